"""The short campaign of faults, and what makes its report believable."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from app.errors import DeadlineExceeded, PeerUnavailable
from app.transfer.base import Block, Status
from app.transfer.fake import FakeDriver
from app.transfer.messages import Abort, Message
from chaos import checks
from chaos.campaign import Report, wanted_faults
from chaos.clients import Outcome, slug_of
from chaos.faults import DriverRates, FaultLog, FaultyClient, FaultyDriver, MessageRates
from chaos.plan import LIVES_ON, STOPPED_S, make_plan

SEED = 11
"""Of the short campaign: its plan has many of each fault that needs a request to come far enough for it."""


@pytest.mark.timeout(420)
def test_a_short_campaign_leaves_nothing_behind(tmp_path: Path) -> None:
    """100 requests under every fault: no wrong output, none overdue, free = initial on every node, flat memory."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "chaos", "--requests", "100", "--report", str(report)]
    command += ["--seed", str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads(report.read_text())
    assert len(found["requests"]) == 100
    assert all(check["good"] for check in found["checks"])


def test_a_plan_is_a_function_of_its_seed() -> None:
    """The same seed gives the same plan, another one another; those that live on are stopped but never killed."""
    plan = make_plan(7, 500)
    assert plan == make_plan(7, 500)
    assert plan != make_plan(8, 500)
    assert not {f.node for f in plan.faults if f.action == "kill"} & set(LIVES_ON)
    assert {f.node for f in plan.faults if f.action == "stop"} >= set(LIVES_ON)
    assert all(f.seconds >= STOPPED_S for f in plan.faults if f.action == "stop")


@pytest.mark.parametrize("seed", range(5))
def test_every_short_plan_has_enough_of_each_fault(seed: int) -> None:
    """What a report asks for at least is in the plan of any seed, kills and stops included."""
    plan = make_plan(seed, 100)
    planned = Counter(f.action for f in plan.faults)
    wanted = wanted_faults(100)
    assert planned["kill"] >= wanted["node_killed"]
    assert planned["stop"] >= wanted["node_stopped"]
    assert {r.client for r in plan.requests} == {
        "stays",
        "before_headers",
        "before_first_token",
        "mid_stream",
    }


def test_the_short_campaign_depends_on_no_luck() -> None:
    """Of what happens only to a request that is still alive, its plan has seven times what the report asks for."""
    plan, wanted = make_plan(SEED, 100), wanted_faults(100)
    clients = Counter(r.client for r in plan.requests)
    assert sum(r.abort_on is not None for r in plan.requests) >= 7 * wanted["room_aborted"]
    assert clients["mid_stream"] >= 7 * wanted["client_left_mid_stream"]
    # these leave by the clock, which needs no luck
    assert clients["before_headers"] >= 3 * wanted["client_left_before_headers"]
    assert clients["before_first_token"] >= 3 * wanted["client_left_before_first_token"]


def test_a_wrong_token_is_found() -> None:
    """One other token, an answer without its end and one without tokens are wrong; the right one is not."""
    plan = make_plan(1, 50)
    reference = checks.Reference()
    right = [reference.tokens(request) for request in plan.requests[:4]]
    reference.close()
    outcomes = [
        Outcome(number=0, kind="answered", tokens=right[0], complete=True),
        Outcome(number=1, kind="answered", tokens=[*right[1][:-1], right[1][-1] ^ 1], complete=True),
        Outcome(number=2, kind="answered", tokens=right[2], complete=False),
        Outcome(number=3, kind="answered", complete=True),
        Outcome(number=3, kind="left", tokens=right[3][:1]),
        Outcome(number=3, kind="left", tokens=[right[3][0] ^ 1]),
    ]
    checks.judge(plan, outcomes)
    assert [o.wrong for o in outcomes] == [False, True, True, True, False, True]


def test_a_campaign_in_which_nothing_happened_is_no_success() -> None:
    """Too few of one fault fail the report, and so does a report without checks."""
    enough = Counter(wanted_faults(100))
    assert checks.least("faults", enough, wanted_faults(100)).good
    enough["node_killed"] -= 1
    short = checks.least("faults", enough, wanted_faults(100))
    assert not short.good
    assert "node_killed" in short.found
    assert not Report(plan=make_plan(1, 50)).good


def test_memory_that_grows_is_found() -> None:
    """A node beyond its margin is named with both sizes."""
    assert checks.grown({"a": 400 << 20, "b": 400 << 20}, {"a": 420 << 20, "b": 440 << 20}) == {
        "b": "400 -> 440 MiB"
    }


def test_bugs_in_logs_of_killed_lives_are_found(tmp_path: Path) -> None:
    """Warnings are counted by event, tracebacks too, and a line that a kill has cut is passed over."""
    log = tmp_path / "node-life-1.log"
    log.write_text(
        '{"event": "task.fault", "level": "error"}\n{"event": "x", "level": "info"}\n'
        '{"event": "room.failed", "error": "Corruption", "level": "warning"}\n'
        'Traceback (most\n{"event": '
    )
    assert checks.events([log]) == {"task.fault": 1, "Traceback": 1, "room.failed": 1, "Corruption": 1}


def test_a_failure_keeps_its_name_through_the_router() -> None:
    """The problem's slug is found in a document, in a document that is quoted, and else the status stands."""
    document = json.dumps({"type": "urn:kvferry:problem:deadline", "status": 504})
    assert slug_of(504, document.encode()) == "deadline"
    assert slug_of(504, json.dumps({"error": {"message": document}}).encode()) == "deadline"
    assert slug_of(500, b"no") == "status 500"


def _driver(tmp_path: Path, **rates: float) -> tuple[FaultyDriver, FakeDriver]:
    inner = FakeDriver()
    every = {"refused": 0.0, "failed": 0.0, "late": 0.0, "slow": 0.0, **rates}
    log = FaultLog(tmp_path / "faults")
    return FaultyDriver(inner, random.Random(1), log, DriverRates(**every)), inner


def _block() -> tuple[Block, Any, Any]:
    import numpy as np

    source, destination = np.full(8, 7, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    return Block(source.ctypes.data, destination.ctypes.data, 8), source, destination


def test_a_driver_refuses_and_fails_writes_that_never_land(tmp_path: Path) -> None:
    """A refused write has no number; a failed one says so, and neither reaches the engine."""
    driver, inner = _driver(tmp_path, refused=1.0)
    block, _, destination = _block()
    assert driver.submit("peer", block) == 0
    driver, inner = _driver(tmp_path, failed=1.0)
    assert driver.check(driver.submit("peer", block)) is Status.FAILED
    assert not inner.submitted
    assert not destination.any()


async def test_a_write_lands_after_it_was_said_to_have_failed(tmp_path: Path) -> None:
    """The failure is told at once, and the bytes come later; a driver that was closed writes nothing any more."""
    driver, _ = _driver(tmp_path, late=1.0, late_most_s=5.0)
    block, source, destination = _block()
    assert driver.check(driver.submit("peer", block)) is Status.FAILED
    assert not destination.any()
    async with asyncio.timeout(30):
        while not destination.all():
            await asyncio.sleep(0.02)
    destination[:] = 0
    driver.submit("peer", block)
    driver.close()
    await asyncio.sleep(0.3)
    assert not destination.any()
    assert source.all()


class _Counting:
    def __init__(self) -> None:
        self.sent = 0

    async def send(self, method: str, url: str, message: Message, *, timeout_s: float) -> dict[str, Any]:
        self.sent += 1
        return {}

    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("rate", "arrives", "raised"),
    [
        ("lost", 0, DeadlineExceeded),
        ("answer_lost", 1, PeerUnavailable),
        ("twice", 2, None),
        ("delayed", 1, None),
    ],
)
async def test_a_client_loses_doubles_and_delays_messages(
    tmp_path: Path, rate: str, arrives: int, raised: type[Exception] | None
) -> None:
    """Each fault delivers as many copies as it says, and raises what a real loss would."""
    none = dict.fromkeys(("lost", "answer_lost", "twice", "late_twice", "delayed"), 0.0)
    inner = _Counting()
    rates = MessageRates(**{**none, rate: 1.0, "delay_most_s": 0.01})
    client = FaultyClient(inner, random.Random(1), FaultLog(tmp_path / "faults"), rates)
    send = client.send("POST", "http://x/v1/peer/rooms/4/abort", Abort(reason="r"), timeout_s=0.02)
    if raised is None:
        assert await send == {}
    else:
        with pytest.raises(raised):
            await send
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert inner.sent == arrives
    kinds = {"lost": "message_lost", "answer_lost": "answer_lost"}
    noted = json.loads((tmp_path / "faults").read_text())
    assert noted == {"fault": kinds.get(rate, f"message_{rate}"), "message": "abort"}
    await client.close()
