"""The driver that sends, the first one through which peers write here, and those that were replaced.

first  ------------------------------------------------> closed with the engine
second --- sends --- replaced --- its writes end --- closed in an idle moment
third                 sends --->
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import structlog

from app.transfer.base import EngineDriver, Region

log = structlog.get_logger(__name__)

DriverFactory = Callable[[], EngineDriver]

_MOST_REPLACED = 4
"""Replaced drivers that wait for an idle moment to be closed in."""


class Drivers:
    """Belongs to the engine's thread; `first` may be read from elsewhere."""

    def __init__(self, factory: DriverFactory, *, between_s: float) -> None:
        self._factory = factory
        self._between_s = between_s
        self._all: list[EngineDriver] = []
        self.regions: list[Region] = []
        self._replaced_at_s = float("-inf")

    def __iter__(self) -> Iterator[EngineDriver]:
        return iter(self._all)

    @property
    def first(self) -> EngineDriver:
        """Stays for good, since peers write into this node through its session."""
        return self._all[0]

    @property
    def sending(self) -> EngineDriver:
        return self._all[-1]

    def open(self) -> None:
        self._all.append(self._factory())

    def register(self, region: Region) -> None:
        """With the first driver and with the one that sends."""
        for driver in dict.fromkeys((self.first, self.sending)):
            driver.register(region)
        self.regions.append(region)

    @property
    def just_replaced(self) -> bool:
        """The failures of one outage share one rebuild, also one that failed."""
        return time.monotonic() - self._replaced_at_s < self._between_s

    def replace(self, reason: str, in_use: Iterable[EngineDriver]) -> None:
        """Send through a new driver from now on. Writes on the old one are still polled to their end."""
        self._replaced_at_s = time.monotonic()
        log.warning("engine.rebuild", reason=reason)
        driver = self._factory()
        try:
            for region in self.regions:
                driver.register(region)
        except Exception:
            driver.close()
            raise
        self._all.append(driver)
        self.close_replaced(in_use, kept=_MOST_REPLACED)

    def close_replaced(self, in_use: Iterable[EngineDriver], *, kept: int = 0) -> None:
        """Close replaced drivers that serve no write, but the latest `kept`.

        An engine holds the interpreter for a second and more while it is closed, which stops every room of the
        node: it waits for an idle moment, unless there are many.
        """
        used = {id(driver) for driver in in_use}
        idle = [driver for driver in self._all[1:-1] if id(driver) not in used]
        for old in idle[: max(0, len(idle) - kept)]:
            self._all.remove(old)
            old.close()
