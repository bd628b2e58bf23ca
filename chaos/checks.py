"""What has to hold afterwards, each a line of the report with what was found."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx

from app.core.pages import pages_for
from app.engine.load import load_engine
from app.engine.local import run_locally
from app.engine.models.toy import ToyEngine
from app.tiers.device import DevicePool
from chaos.clients import Outcome
from chaos.deployment import CHUNK_TOKENS, PAGE_SIZE, QUARANTINE_S, ChaosNode
from chaos.plan import Plan, Request

QUIET_S = QUARANTINE_S + 60
BUG_EVENTS = (
    "prefill.bug",
    "decode.bug",
    "task.fault",
    "control.fault",
    "request.bug",
    "node.start_failed",
    "Traceback",
)
BUG_ERRORS = ("Corruption", "IntegrityError", "IllegalTransition")
"""Of the logs of every life: they hold, too, what the counters of killed ones have lost."""
NO_COUNTERS = (
    "task_faults",
    "internal_errors",
    "problem.corruption",
    "problem.integrity",
    "problem.illegal-transition",
    "problem.internal",
)
MEMORY_MARGIN, MEMORY_FREE = 1.05, 24 << 20


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    good: bool
    found: str


class Reference:
    """The same model in this process, without any transfer."""

    def __init__(self) -> None:
        engine, _ = load_engine(name="toy-dsa", page_size=PAGE_SIZE, dtype="auto", device="cpu", threads=1)
        assert isinstance(engine, ToyEngine)
        self._engine = engine
        self._pool = DevicePool(engine.geometry, pages_for(600, PAGE_SIZE))
        engine.bind([self._pool])

    def tokens(self, request: Request) -> list[int]:
        return run_locally(
            self._engine, list(request.prompt), chunk_tokens=CHUNK_TOKENS, new_tokens=request.new_tokens
        ).tokens

    def close(self) -> None:
        self._pool.close()


def judge(plan: Plan, outcomes: Sequence[Outcome]) -> None:
    """Mark what is wrong. What a client had read before it left has to be the beginning of the right answer."""
    reference = Reference()
    try:
        for outcome in outcomes:
            if not outcome.tokens:
                outcome.wrong = outcome.kind == "answered"
                continue
            expected = reference.tokens(plan.requests[outcome.number])
            if outcome.kind == "answered":
                outcome.wrong = outcome.tokens != expected or not outcome.complete
            else:
                outcome.wrong = outcome.tokens != expected[: len(outcome.tokens)]
    finally:
        reference.close()


async def held(client: httpx.AsyncClient, node: ChaosNode) -> dict[str, int]:
    """What a node holds beyond its initial state, by name; empty when free = initial."""
    stats = (await client.get(f"{node.url}/stats")).raise_for_status().json()
    rooms = (await client.get(f"{node.url}/rooms")).raise_for_status().json()
    cache = (await client.get(f"{node.url}/cache")).raise_for_status().json()
    pages, slots = stats["pages"], stats["slots"]
    every = {
        "pages": pages["total"] - pages["free"] - pages["cached"],
        "pins": stats["reuse"]["pins"],
        "leases": stats["reuse"]["leases"],
        "slots": slots["total"] - slots["free"],
        "rooms": stats["rooms"]["live"] + len(rooms["live"]),
        "chunks": stats["chunks"],
        "tombstones": stats["tombstones"],
        "quarantine": pages["quarantine"],
        "holds": len(stats["holds"]) + len(cache["holds"]),
        "waiting": pages["waiting"] + stats["forwards"]["waiting"],
    }
    return {name: count for name, count in every.items() if count}


async def quiet(client: httpx.AsyncClient, nodes: Iterable[ChaosNode]) -> dict[str, dict[str, int]]:
    """Wait until nothing is held on any node; what still is when the time is up, by node."""
    left: dict[str, dict[str, int]] = {}
    deadline = time.monotonic() + QUIET_S
    while time.monotonic() < deadline:
        left = {}
        for node in nodes:
            try:
                if found := await held(client, node):
                    left[node.name] = found
            except httpx.HTTPError as error:
                left[node.name] = {type(error).__name__: 1}
        if not left:
            break
        await anyio.sleep(0.3)
    return left


async def flushed(client: httpx.AsyncClient, nodes: Iterable[ChaosNode]) -> dict[str, Any]:
    """After a flush every page of both tiers is free; the nodes on which that is not so."""
    left: dict[str, Any] = {}
    for node in nodes:
        done = (await client.post(f"{node.url}/cache/flush")).json()
        stats = (await client.get(f"{node.url}/stats")).json()
        cache = (await client.get(f"{node.url}/cache")).json()
        tiers = {tier: cache[tier] for tier in ("l1", "l2") if cache[tier] is not None}
        used = {
            name: tier["pages"] - tier["free_pages"]
            for name, tier in tiers.items()
            if tier["free_pages"] != tier["pages"]
        }
        if done["status"] != "flushed" or stats["pages"]["free"] != stats["pages"]["total"] or used:
            left[node.name] = {"flush": done, "pages": stats["pages"], "used": used}
    return left


async def memory(client: httpx.AsyncClient, nodes: Iterable[ChaosNode]) -> dict[str, int]:
    return {n.name: (await client.get(f"{n.url}/stats")).json()["memory"]["rss_bytes"] for n in nodes}


async def bad_counters(client: httpx.AsyncClient, nodes: Iterable[ChaosNode]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for node in nodes:
        counters = (await client.get(f"{node.url}/stats")).json()["counters"]
        if bad := {name: counters[name] for name in NO_COUNTERS if counters.get(name)}:
            found[node.name] = bad
    return found


def events(logs: Iterable[Path]) -> Counter[str]:
    """Warnings and errors of the nodes by event; failed requests by the name of their error."""
    counts: Counter[str] = Counter()
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if not line.startswith("{"):
                counts["Traceback"] += line.startswith("Traceback")
                continue
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut by a kill
            if record.get("level") in ("warning", "error", "critical"):
                counts[str(record.get("event"))] += 1
                if record.get("error") in BUG_ERRORS:
                    counts[str(record["error"])] += 1
    return +counts


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, str]:
    """Nodes that take more memory than their margin."""
    return {
        name: f"{then >> 20} -> {after[name] >> 20} MiB"
        for name, then in before.items()
        if after[name] > max(then * MEMORY_MARGIN, then + MEMORY_FREE)
    }


def least(name: str, counts: Counter[str], wanted: dict[str, int]) -> Check:
    """A campaign in which hardly anything happened proves nothing."""
    short = {key: f"{counts[key]} < {number}" for key, number in wanted.items() if counts[key] < number}
    return Check(name=name, good=not short, found=str(short or "enough of each"))
