"""A driver for tests of faults: it copies inside this process, with settable misbehaviour.

Sessions are names in a registry of fake drivers; addresses are real addresses of this process, so the
bytes truly move. `faults` is asked once per submit.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.transfer.base import Block, Region, Status


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one write.

    It is answered with `status` after `delay_s`; its bytes land after `lands_after_s` (the delay when
    None, never when negative), which may be long after a failure was reported.
    """

    delay_s: float = 0.0
    status: Status = Status.DONE
    lands_after_s: float | None = None
    refuse: bool = False
    error: Exception | None = None
    flip_byte: bool = False


FaultPlan = Callable[[str, Block], Fault]
_GOOD = Fault()


class FakeDriver:
    """Same protocol as the real driver. `submitted` lists every accepted write in order."""

    addressed = True
    _names = itertools.count(1)

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.session = f"fake:{next(self._names)}"
        self.transport = "fake"
        self.plan = plan
        self.alive = True
        self.submitted: list[tuple[str, Block]] = []
        self.checked_after_end = 0
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[float, Status]] = {}
        self._landings: list[tuple[float, int, Block, bool]] = []
        self.regions: list[Region] = []

    def register(self, region: Region) -> None:
        self.regions.append(region)

    def unregister(self, region: Region) -> None:
        self.regions.remove(region)

    def submit(self, session: str, block: Block) -> int:
        fault = self.plan(session, block) if self.plan else _GOOD
        if fault.error:
            raise fault.error
        if fault.refuse:
            return 0
        now = time.monotonic()
        number = next(self._ids)
        self.submitted.append((session, block))
        self._pending[number] = (now + fault.delay_s, fault.status)
        lands = fault.delay_s if fault.lands_after_s is None else fault.lands_after_s
        wanted = fault.status is Status.DONE or fault.lands_after_s is not None
        if wanted and lands >= 0:
            heapq.heappush(self._landings, (now + lands, number, block, fault.flip_byte))
        self.land()
        return number

    def land(self) -> None:
        """Copy every write whose time has come. Called by the pump, and by tests after a wait."""
        now = time.monotonic()
        while self._landings and self._landings[0][0] <= now:
            _, _, block, flip = heapq.heappop(self._landings)
            ctypes.memmove(block.destination, block.source, block.length)
            if flip:
                byte = ctypes.c_uint8.from_address(block.destination)
                byte.value ^= 1

    def check(self, submitted: int) -> Status:
        now = time.monotonic()  # before landing: what counts as done at this moment has landed
        self.land()
        if submitted not in self._pending:
            self.checked_after_end += 1
            raise AssertionError(f"status of {submitted} asked after its end: the real engine would crash")
        at, status = self._pending[submitted]
        if now < at:
            return Status.PENDING
        del self._pending[submitted]
        return status

    def probe(self, session: str) -> bool:
        return self.alive

    def close(self) -> None:
        self._pending.clear()
