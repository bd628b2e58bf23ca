"""The engine's thread: it uses the drivers and serves one window a peer.

    take(descriptor) -> driver.submit -> poll driver.check -> done | retry after a pause | fail the batch

Nothing here may block: one peer that hangs would stop the writes to all others, and what was submitted late
would land late. A first contact does block in the driver (a minute, with a stopped peer), so a peer is probed
in a thread of its own before its first write, and again before its failures are blamed on our driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from app.errors import DeadlineExceeded, KvferryError, TransferFailed
from app.transfer.base import Batch, Block, EngineDriver, Region, Status
from app.transfer.calls import Call, Calls
from app.transfer.drivers import DriverFactory, Drivers
from app.transfer.window import Descriptor, PeerWindow

log = structlog.get_logger(__name__)

Tell = Callable[..., None]
"""Runs a function with its arguments on the event loop, in the order of the calls."""

_GLANCE = 4
"""Writes end nearly in the order in which they began: a look at them stops at this many that have not."""
_LOOK_AT_ALL_S = 0.003
"""How often it does not stop, so that a few that hang hide no others."""
_IDLE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Limits:
    """All times in seconds, all sizes in bytes."""

    window_descriptors: int = 64
    window_bytes: int = 16 << 20
    descriptor_bytes: int = 1 << 20
    deadline_s: float = 30.0
    retries: int = 2
    retry_after_s: float = 1.1
    late_landing_s: float = 10.0
    poll_s: float = 0.0004


class Pump:
    """Everything but `call` belongs to the thread that executes `run`."""

    def __init__(self, factory: DriverFactory, limits: Limits, tell: Tell) -> None:
        self.limits = limits
        self.drivers = Drivers(factory, between_s=limits.retry_after_s)
        self.windows: dict[str, PeerWindow] = {}
        self.counters = dict.fromkeys(
            ("batches", "descriptors", "bytes", "failures", "refused", "retries", "deadlines", "rebuilds"), 0
        )
        self._tell = tell
        self._calls = Calls()
        self.due_at_s = time.monotonic()
        """When the thread stops waiting at the latest, or did. Long ago: it is held up. Any thread may read it."""

    # ------------------------------------------------------------------ calls

    def call(self, function: Call | None) -> None:
        """Have the thread execute something; None ends it. Any thread may ask."""
        self._calls.put(function)

    def open(self) -> None:
        self.drivers.open()

    def register(self, region: Region) -> None:
        self.drivers.register(region)

    def enqueue(self, batch: Batch, blocks: Sequence[Block]) -> None:
        window = self.windows.setdefault(batch.session, PeerWindow(batch.session))
        window.dropped = False
        self.counters["batches"] += 1
        limit = self.limits.descriptor_bytes
        descriptors: list[Descriptor] = []
        for block in blocks:
            if block.length <= limit:
                descriptors.append(Descriptor(batch=batch, block=block))
                continue
            for at in range(0, block.length, limit):
                part = Block(block.source + at, block.destination + at, min(limit, block.length - at))
                descriptors.append(Descriptor(batch=batch, block=part))
        window.extend(batch, descriptors)

    def drop(self, session: str) -> None:
        """Forget a peer's window once its last write has ended."""
        window = self.windows.get(session)
        if window is not None:
            window.dropped = True

    # ------------------------------------------------------------------ thread

    def run(self) -> None:
        while True:
            busy = any(w.busy for w in self.windows.values())
            # also after progress: polling without a pause takes the processor from the engine's own thread
            wait_s = self.limits.poll_s if busy else _IDLE_S
            self.due_at_s = time.monotonic() + wait_s
            try:
                call = self._calls.get(wait_s)
            except TimeoutError:
                call = _nothing if busy else self._close_replaced
            self.due_at_s = time.monotonic()
            if call is None:
                break
            self._guarded(call)
            for window in tuple(self.windows.values()):
                self._guarded(partial(self._serve, window))
                if window.dropped and not window.busy:
                    del self.windows[window.session]
        self._end()

    def _guarded(self, function: Call) -> None:
        """One bad call must not end the thread, nor the writes to other peers."""
        try:
            function()
        except Exception:
            log.exception("engine.thread")

    def _end(self) -> None:
        """Unregister, drop the drivers, and fail what had not ended: nobody may wait for ever."""
        for region in self.drivers.regions:
            self._guarded(partial(self.drivers.first.unregister, region))
        for driver in self.drivers:
            self._guarded(driver.close)
        closed = TransferFailed("the transfer engine was closed")
        settled_at_s = time.monotonic() + self.limits.late_landing_s
        for window in self.windows.values():
            for batch in window.batches():
                self._tell(_set_error, batch, closed, settled_at_s)
                self._tell(batch.idle.set)
        self.windows.clear()

    def _serve(self, window: PeerWindow) -> None:
        self._look(window)
        now = time.monotonic()
        # before anything is submitted: after a pause of this process, what waits may be older than its deadline,
        # and the peer may have given its pages away
        for batch in window.overdue(now):
            self.counters["deadlines"] += 1
            late = DeadlineExceeded(f"transfer {batch.label or batch.number} outlived its deadline")
            self._fail_batch(window, batch, late, settled_at_s=now + self.limits.late_landing_s)
        self._fill(window)
        for descriptor in window.stuck(now - self.limits.late_landing_s):
            # no end in sight: a new driver serves the peer, and the pages have waited out their time
            window.end(descriptor)
            self._descriptor_done(window, descriptor)
            self._rebuild(f"a write to {window.session} never ended")

    def _look(self, window: PeerWindow) -> None:
        """Ask how the writes are, the oldest first."""
        now, left = time.monotonic(), _GLANCE
        if now - window.looked_at_all_s >= _LOOK_AT_ALL_S:
            window.looked_at_all_s, left = now, len(window.active)
        for descriptor in tuple(window.active):
            if not left:
                return
            try:
                status = descriptor.driver.check(descriptor.submitted)
            except Exception as error:
                window.end(descriptor)
                self._give_up(window, descriptor, TransferFailed(f"status of a write: {error}"), landing=True)
                continue
            if status is Status.PENDING:
                left -= 1
                continue
            window.end(descriptor)
            if status is Status.DONE:
                self.counters["bytes"] += descriptor.block.length
                self._descriptor_done(window, descriptor)
            else:
                self._failed(window, descriptor)

    def _fill(self, window: PeerWindow) -> None:
        while window.met is self.drivers.sending:
            descriptor = window.next(
                time.monotonic(), self.limits.window_descriptors, self.limits.window_bytes
            )
            if descriptor is None:
                return
            descriptor.driver = self.drivers.sending
            try:
                descriptor.submitted = descriptor.driver.submit(window.session, descriptor.block)
            except Exception as error:
                self._give_up(window, descriptor, TransferFailed(f"a write did not start: {error}"))
                continue
            if descriptor.submitted <= 0:
                self.counters["refused"] += 1
                self._give_up(window, descriptor, TransferFailed("the engine refused a write"))
                self._probe(window, f"{window.session} refused a write")
                continue
            self.counters["descriptors"] += 1
            window.start(descriptor)
        if window.waiting:
            self._probe(window)

    # ------------------------------------------------------------------ failures

    def _failed(self, window: PeerWindow, descriptor: Descriptor) -> None:
        now = time.monotonic()
        self.counters["failures"] += 1
        batch = descriptor.batch
        self._tell(_unsettle, batch, now + self.limits.late_landing_s)
        if descriptor.tries:
            self._probe(window, f"{window.session} failed a write {descriptor.tries + 1} times")
        if batch not in window.failed and descriptor.tries < self.limits.retries:
            self.counters["retries"] += 1
            descriptor.tries += 1
            window.retry(descriptor, not_before_s=now + self.limits.retry_after_s)
            return
        self._give_up(window, descriptor, TransferFailed(f"a write to {window.session} failed"), landing=True)

    def _give_up(
        self, window: PeerWindow, descriptor: Descriptor, error: KvferryError, *, landing: bool = False
    ) -> None:
        settled = time.monotonic() + self.limits.late_landing_s if landing else 0.0
        self._fail_batch(window, descriptor.batch, error, settled_at_s=settled)
        self._descriptor_done(window, descriptor)

    def _fail_batch(
        self, window: PeerWindow, batch: Batch, error: KvferryError, *, settled_at_s: float
    ) -> None:
        window.fail(batch)
        self._tell(_set_error, batch, error, settled_at_s)
        if window.left(batch) == 0:
            self._tell(batch.idle.set)

    def _descriptor_done(self, window: PeerWindow, descriptor: Descriptor) -> None:
        batch = descriptor.batch
        if window.left(batch):
            return
        if not window.forget(batch):
            self._tell(_succeed, batch, time.monotonic())
        self._tell(batch.idle.set)

    # ------------------------------------------------------------------ peers and drivers

    def _probe(self, window: PeerWindow, reason: str = "") -> None:
        """Ask, in another thread, whether the peer answers. With a reason, an answer means a new driver."""
        window.suspicion = window.suspicion or reason
        if window.asking:
            return
        driver = self.drivers.sending

        def ask() -> None:
            try:
                answers = driver.probe(window.session)
            except Exception:
                answers = False
            self.call(lambda: self._probed(window, driver, answers))

        threading.Thread(target=ask, name="kvferry-probe", daemon=True).start()
        window.asking = True

    def _probed(self, window: PeerWindow, driver: EngineDriver, answers: bool) -> None:
        window.asking = False
        reason, window.suspicion = window.suspicion, ""
        if not answers and window.met is not self.drivers.sending:
            error = TransferFailed(f"{window.session} does not answer")
            for batch in window.batches():
                self._fail_batch(window, batch, error, settled_at_s=0.0)
        elif answers and driver is self.drivers.sending:
            window.met = driver
            if reason:
                # it lives and our writes do not arrive: it is this driver that cannot reach it any more
                self._rebuild(reason)

    def _rebuild(self, reason: str) -> None:
        if not self.drivers.just_replaced:
            self.counters["rebuilds"] += 1
            self.drivers.replace(reason, self._in_use())

    def _close_replaced(self) -> None:
        self.drivers.close_replaced(self._in_use())

    def _in_use(self) -> list[EngineDriver]:
        return [descriptor.driver for window in self.windows.values() for descriptor in window.active]


def _nothing() -> None:
    """Stands in for a call when the queue was empty."""


def _succeed(batch: Batch, now_s: float) -> None:
    batch.finished_at_s = now_s
    batch.finished.set()


def _set_error(batch: Batch, error: KvferryError, settled_at_s: float) -> None:
    batch.error = batch.error or error
    batch.settled_at_s = max(batch.settled_at_s, settled_at_s)
    batch.finished.set()


def _unsettle(batch: Batch, settled_at_s: float) -> None:
    batch.settled_at_s = max(batch.settled_at_s, settled_at_s)
