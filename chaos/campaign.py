"""Run a plan: requests at a steady number at once, faults when their request begins, quiet in between."""

from __future__ import annotations

import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx

from chaos import checks
from chaos.checks import Check
from chaos.clients import Outcome, ask
from chaos.deployment import BOUND_S, Deployment, deployment
from chaos.plan import LIVES_ON, NodeFault, Plan, Request

AT_ONCE = 6
_RETRY_AFTER_S = 1.0
_IDLE_S = 2.5
"""An idle node gives freed memory back."""
_LOOKS, _LOOK_AGAIN_S = 40, 0.05
"""How long a node may take until it has a room that can be aborted."""


@dataclass(kw_only=True)
class Report:
    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    checks: list[Check] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    stats: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return bool(self.checks) and all(check.good for check in self.checks)


class _Campaign:
    def __init__(self, running: Deployment, client: httpx.AsyncClient, report: Report) -> None:
        self._running, self._client, self._report = running, client, report
        self._busy = {name: anyio.Lock() for name in running.nodes}
        self._by_request: dict[int, list[NodeFault]] = {}
        for fault in report.plan.faults:
            self._by_request.setdefault(fault.at_request, []).append(fault)

    async def run(self, requests: tuple[Request, ...]) -> None:
        places = anyio.Semaphore(AT_ONCE)
        async with anyio.create_task_group() as group:
            for request in requests:
                await places.acquire()
                for fault in self._by_request.get(request.number, ()):
                    group.start_soon(self._strike, fault)
                if request.abort_on is not None:
                    group.start_soon(self._abort, request)
                group.start_soon(self._one, request, places)

    async def _one(self, request: Request, places: anyio.Semaphore) -> None:
        assert self._running.router is not None
        try:
            outcome = await ask(self._client, self._running.router.url, request, BOUND_S)
            self._report.outcomes.append(outcome)
            if outcome.status == 503:
                # as Retry-After says: otherwise a node that is down would be met by all requests that are left
                await anyio.sleep(_RETRY_AFTER_S)
        finally:
            places.release()

    async def _strike(self, fault: NodeFault) -> None:
        """One at a time on a node: a fault that is due while another lasts comes after it."""
        node = self._running.nodes[fault.node]
        async with self._busy[fault.node]:
            if fault.action == "stop":
                node.signal(signal.SIGSTOP)
                await anyio.sleep(fault.seconds)
                node.signal(signal.SIGCONT)
            else:
                node.kill()
                await anyio.sleep(fault.seconds)
                node.start()
                await node.ready()
                self._report.faults["node_restarted"] += 1
            self._report.faults["node_killed" if fault.action == "kill" else "node_stopped"] += 1

    async def _abort(self, request: Request) -> None:
        """Abort the node's newest room, or the first one that it has within a while."""
        assert request.abort_on is not None
        await anyio.sleep(request.abort_after_s)
        for _ in range(_LOOKS):
            if await self._abort_one(self._running.nodes[request.abort_on].url):
                return
            await anyio.sleep(_LOOK_AGAIN_S)

    async def _abort_one(self, url: str) -> bool:
        """Whether a room was aborted: each may end first, and the node may be dead or stopped."""
        try:
            live = (await self._client.get(f"{url}/rooms", timeout=5)).raise_for_status().json()["live"]
            for record in reversed(live):
                answer = await self._client.post(f"{url}/abort/{record['room']}", timeout=5)
                if answer.status_code == 200 and answer.json()["aborted"]:
                    self._report.faults["room_aborted"] += 1
                    return True
        except httpx.HTTPError:
            pass
        return False


async def run_campaign(plan: Plan, folder: Path, say: Any) -> Report:
    """All of it. ClusterError when processes do not come up; everything else is in the report."""
    report, began = Report(plan=plan), time.monotonic()
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=0)
    async with httpx.AsyncClient(limits=limits, timeout=15, verify=False) as client:
        with deployment(folder, plan.seed) as running:
            say("starting two prefill nodes, two decode nodes and the router")
            await running.start()
            campaign = _Campaign(running, client, report)
            nodes = list(running.nodes.values())
            lasting = [running.nodes[name] for name in LIVES_ON]
            say(f"requests 0 to {plan.warm - 1}, to warm up")
            await campaign.run(plan.requests[: plan.warm])
            held_warm = await checks.quiet(client, nodes)
            await anyio.sleep(_IDLE_S)
            before = await checks.memory(client, lasting)
            say(f"requests {plan.warm} to {len(plan.requests) - 1}")
            await campaign.run(plan.requests[plan.warm :])
            say("waiting for quiet")
            held_end = await checks.quiet(client, nodes)
            await anyio.sleep(_IDLE_S)
            after = await checks.memory(client, lasting)
            counters = await checks.bad_counters(client, nodes)
            report.stats = {n.name: (await client.get(f"{n.url}/stats")).json() for n in nodes}
            left = await checks.flushed(client, nodes)
            for node in nodes:
                report.faults.update(node.fault_counts())
        report.events = checks.events(log for node in nodes for log in node.logs)
    say("computing every answer without a transfer")
    checks.judge(plan, report.outcomes)
    _conclude(report, held_warm, held_end, left, counters, (before, after))
    report.seconds = time.monotonic() - began
    return report


def _conclude(
    report: Report,
    held_warm: dict[str, Any],
    held_end: dict[str, Any],
    left: dict[str, Any],
    counters: dict[str, Any],
    memory: tuple[dict[str, int], dict[str, int]],
) -> None:
    outcomes, count = report.outcomes, len(report.plan.requests)
    kinds = Counter(o.kind for o in outcomes)
    for outcome in outcomes:
        if outcome.left:
            report.faults[f"client_left_{outcome.left}"] += 1
    wrong = [o.number for o in outcomes if o.wrong]
    slowest = max((o.seconds for o in outcomes), default=0.0)
    bugs = {name: n for name, n in report.events.items() if name in (*checks.BUG_EVENTS, *checks.BUG_ERRORS)}
    before, after = memory
    grown = checks.grown(before, after)
    sizes = {name: f"{before[name] >> 20} -> {after[name] >> 20} MiB" for name in before}

    def check(name: str, good: bool, found: Any) -> None:
        report.checks.append(Check(name=name, good=good, found=str(found)))

    check(
        "every request has one outcome",
        sorted(o.number for o in outcomes) == list(range(count)),
        len(outcomes),
    )
    check("no wrong output", not wrong, f"{len(wrong)} wrong {wrong[:10]}")
    check(f"every request ended within {BOUND_S:.0f} s", not kinds["overdue"], f"slowest {slowest:.1f} s")
    check("free = initial after warm-up", not held_warm, held_warm or "nothing held")
    check("free = initial at the end", not held_end, held_end or "nothing held")
    check("every page free after a flush", not left, left or "all free")
    check("no counter of integrity", not counters, counters or "all zero")
    check("no bug in any life's log", not bugs, bugs or "none")
    check("memory flat", not grown, grown or sizes)
    report.checks.append(checks.least("enough answers", kinds, {"answered": count * 3 // 10}))
    report.checks.append(checks.least("enough faults", report.faults, wanted_faults(count)))


def wanted_faults(count: int) -> dict[str, int]:
    """The least number of each fault: well below what is expected of so many requests."""
    each = max(1, count // 100)
    return {
        "node_killed": max(1, count // 50), "node_restarted": max(1, count // 50),
        "node_stopped": max(1, count // 50), "room_aborted": each,
        "client_left_before_headers": each, "client_left_before_first_token": each,
        "client_left_mid_stream": each,
        "message_lost": each, "answer_lost": each, "message_twice": each, "message_twice_late": each,
        "message_delayed": each,
        "write_refused": each, "write_failed": each, "write_late": each, "write_slow": each,
    }  # fmt: skip
