"""Faults inside a node: a driver and a control client that misbehave as a seed says. Never in the product.

Each fault is one line in a file at once, so that a killed process has told of its faults, too.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import DeadlineExceeded, PeerUnavailable
from app.transfer.base import Block, EngineDriver, Region, Status
from app.transfer.client import ControlClient
from app.transfer.messages import Message


class FaultLog:
    """Appends a line a fault. Lines of less than a page are written whole."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def note(self, kind: str, **more: Any) -> None:
        self._file.write(json.dumps({"fault": kind, **more}).encode() + b"\n")


@dataclass(frozen=True, kw_only=True)
class DriverRates:
    """Of each write: it is refused, fails unwritten, fails and lands late, or is slow."""

    refused: float = 0.002
    failed: float = 0.003
    late: float = 0.003
    slow: float = 0.02
    late_most_s: float = 1.5
    """Well below transfer.late_landing_s: the bound that nodes are told to rely on."""
    slow_most_s: float = 0.3


class FaultyDriver:
    """The real driver behind faults. A write that lands late truly does, after it was said to have failed."""

    def __init__(
        self, inner: EngineDriver, draws: random.Random, log: FaultLog, rates: DriverRates | None = None
    ) -> None:
        self._inner, self._draws, self._log = inner, draws, log
        self._rates = rates or DriverRates()
        self.session, self.transport, self.addressed = inner.session, inner.transport, inner.addressed
        self._next = 1
        self._failing: set[int] = set()
        self._inside: dict[int, tuple[int, float]] = {}
        self._guard = threading.RLock()
        self._timers: set[threading.Timer] = set()
        self._closed = False

    def register(self, region: Region) -> None:
        self._inner.register(region)

    def unregister(self, region: Region) -> None:
        self._inner.unregister(region)

    def submit(self, session: str, block: Block) -> int:
        rates, drawn = self._rates, self._draws.random()
        with self._guard:
            number, self._next = self._next, self._next + 1
            if drawn < (edge := rates.refused):
                self._log.note("write_refused")
                return 0
            if drawn < (edge := edge + rates.failed):
                self._log.note("write_failed")
                self._failing.add(number)
                return number
            if drawn < (edge := edge + rates.late):
                self._failing.add(number)
                self._later(self._draws.uniform(0.1, rates.late_most_s), session, block)
                return number
            until = 0.0
            if drawn < edge + rates.slow:
                self._log.note("write_slow")
                until = time.monotonic() + self._draws.uniform(0, rates.slow_most_s)
            inside = self._inner.submit(session, block)
            if inside <= 0:
                return 0
            self._inside[number] = (inside, until)
            return number

    def check(self, submitted: int) -> Status:
        with self._guard:
            if submitted in self._failing:
                self._failing.discard(submitted)
                return Status.FAILED
            inside, until = self._inside[submitted]
            if time.monotonic() < until:
                return Status.PENDING
            status = self._inner.check(inside)
            if status is not Status.PENDING:
                del self._inside[submitted]
            return status

    def probe(self, session: str) -> bool:
        return self._inner.probe(session)

    def close(self) -> None:
        with self._guard:
            self._closed = True
            for timer in self._timers:
                timer.cancel()
            self._inner.close()

    def _later(self, delay_s: float, session: str, block: Block) -> None:
        promised_s = time.monotonic() + self._rates.late_most_s

        def land() -> None:
            with self._guard:
                self._timers.discard(timer)
                # a process that was stopped meanwhile writes no more: its failure is older than it promised
                if self._closed or time.monotonic() > promised_s:
                    return
                inside = self._inner.submit(session, block)
            if inside <= 0:
                return
            self._log.note("write_late")
            while True:
                with self._guard:
                    if self._closed or self._inner.check(inside) is not Status.PENDING:
                        return
                time.sleep(0.001)

        timer = threading.Timer(delay_s, land)
        timer.daemon = True
        self._timers.add(timer)
        timer.start()


@dataclass(frozen=True, kw_only=True)
class MessageRates:
    """Of each message: it is lost, its answer is lost, it comes twice (at once, or late), or it is delayed."""

    lost: float = 0.01
    answer_lost: float = 0.015
    twice: float = 0.04
    late_twice: float = 0.03
    delayed: float = 0.08
    delay_most_s: float = 0.6
    late_most_s: float = 4.0


class FaultyClient:
    """A control client between which and the peer messages are lost, late and doubled."""

    def __init__(
        self, inner: ControlClient, draws: random.Random, log: FaultLog, rates: MessageRates | None = None
    ) -> None:
        self._inner, self._draws, self._log = inner, draws, log
        self._rates = rates or MessageRates()
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, method: str, url: str, message: Message, *, timeout_s: float) -> dict[str, Any]:
        rates, drawn = self._rates, self._draws.random()
        kind = url.rpartition("/")[2]
        kind = "destine" if kind.isdigit() else kind
        late_s, delay_s = (
            self._draws.uniform(0.2, rates.late_most_s),
            self._draws.uniform(0, rates.delay_most_s),
        )
        if drawn < (edge := rates.lost):
            self._log.note("message_lost", message=kind)
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded(f"{url} did not answer within {timeout_s} s")
        if drawn < (edge := edge + rates.answer_lost):
            self._log.note("answer_lost", message=kind)
            await self._inner.send(method, url, message, timeout_s=timeout_s)
            raise PeerUnavailable(f"{url}: the answer was lost")
        if drawn < (edge := edge + rates.twice):
            self._log.note("message_twice", message=kind)
            self._copy(method, url, message, timeout_s=timeout_s, after_s=0)
        elif drawn < (edge := edge + rates.late_twice):
            self._log.note("message_twice_late", message=kind)
            self._copy(method, url, message, timeout_s=timeout_s, after_s=late_s)
        elif drawn < edge + rates.delayed:
            self._log.note("message_delayed", message=kind)
            await asyncio.sleep(min(delay_s, timeout_s / 2))
            timeout_s /= 2
        return await self._inner.send(method, url, message, timeout_s=timeout_s)

    def _copy(self, method: str, url: str, message: Message, *, timeout_s: float, after_s: float) -> None:
        async def again() -> None:
            await asyncio.sleep(after_s)
            try:
                await self._inner.send(method, url, message, timeout_s=timeout_s)
            except Exception as error:
                # nobody waits for the copy's answer, but it says what the peer made of it
                self._log.note("copy_refused", slug=getattr(error, "slug", type(error).__name__))

        task = asyncio.create_task(again())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await self._inner.close()
