"""The asynchronous transfer engine: one thread that owns the driver, and batches that the loop awaits.

    loop:    submit(blocks) -> Batch          await wait([batches])        await settle([batches])
                  | queue                           ^ finished                   ^ idle, settled
    thread:  window per peer -> driver.submit -> poll driver.check -> retry | fail | done

Flow control is a window per peer, in descriptors and bytes; the driver's own queue limit is never
reached. A write is retried where that is safe: the pages at both ends are held until the batch settles,
so writing the same bytes twice is harmless.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from app.errors import BadInput, DeadlineExceeded, IntegrityError, TransferFailed
from app.transfer.base import Batch, Block, EngineDriver, Region
from app.transfer.window import Descriptor, PeerWindow

log = structlog.get_logger(__name__)

DriverFactory = Callable[[], EngineDriver]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """All times in seconds, all sizes in bytes."""

    window_descriptors: int = 16
    window_bytes: int = 32 << 20
    descriptor_bytes: int = 1 << 20
    deadline_s: float = 30.0
    retries: int = 2
    retry_after_s: float = 1.1
    late_landing_s: float = 10.0
    poll_s: float = 0.0002


class Engine:
    """Implements TransferEngine over a driver. `start` before use, `close` at the end."""

    def __init__(self, factory: DriverFactory, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._factory = factory
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._windows: dict[str, PeerWindow] = {}
        self._local: list[Region] = []
        self._remote: dict[str, list[Region]] = {}
        self._numbers = itertools.count(1)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drivers: list[EngineDriver] = []
        self._rebuilt_at_s = float("-inf")
        self.counters = dict.fromkeys(
            ("batches", "descriptors", "bytes", "failures", "refused", "retries", "deadlines", "rebuilds"), 0
        )

    # ------------------------------------------------------------------ event loop side

    async def start(self) -> None:
        """Start the thread and the driver. Spawned processes only: a fork after this would hang."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)
        self._thread.start()
        await self._call(lambda: self._drivers.append(self._factory()))

    @property
    def session(self) -> str:
        """Of the first driver: it keeps receiving even after the sending side was rebuilt."""
        return self._drivers[0].session

    @property
    def transport(self) -> str:
        return self._drivers[0].transport

    async def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            await self._call(partial(self._drivers[-1].register, region))
            self._local.append(region)

    def add_peer(self, session: str, regions: Sequence[Region]) -> None:
        self._remote[session] = list(regions)

    def drop_peer(self, session: str) -> None:
        self._remote.pop(session, None)

    def submit(self, session: str, blocks: Sequence[Block], *, label: str = "") -> Batch:
        if self._thread is None:
            raise TransferFailed("the transfer engine is not running")
        for block in blocks:
            self._check_bounds(session, block)
        batch = Batch(
            number=next(self._numbers),
            session=session,
            blocks=len(blocks),
            total_bytes=sum(b.length for b in blocks),
            deadline_s=time.monotonic() + self.limits.deadline_s,
            label=label,
        )
        if not blocks:
            batch.finished.set()
            batch.idle.set()
            return batch
        self.counters["batches"] += 1
        self._calls.put(lambda: self._enqueue(batch, blocks))
        return batch

    def _check_bounds(self, session: str, block: Block) -> None:
        if block.length <= 0:
            raise BadInput(f"a block of {block.length} bytes")
        if not any(r.covers(block.source, block.length) for r in self._local):
            raise BadInput(f"source {block.source:#x}+{block.length} is outside the registered regions")
        remote = self._remote.get(session)
        if remote is None:
            raise BadInput(f"no peer with session {session}")
        if not any(r.covers(block.destination, block.length) for r in remote):
            raise BadInput(f"destination {block.destination:#x}+{block.length} is outside the peer's regions")

    async def wait(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            await batch.finished.wait()
            if batch.error:
                raise batch.error

    async def settle(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            await batch.idle.wait()
            left = batch.settled_at_s - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)

    def statistics(self) -> dict[str, Any]:
        peers = {s: w.statistics() for s, w in tuple(self._windows.items())}
        return {**self.counters, "transport": self.transport, "session": self.session, "peers": peers}

    def check_integrity(self) -> None:
        """IntegrityError while descriptors are still queued or in flight."""
        busy = {s: w.statistics() for s, w in tuple(self._windows.items()) if w.busy}
        if busy:
            raise IntegrityError(f"engine: descriptors left: {busy}")

    async def close(self) -> None:
        """Unregister, stop the thread and drop the drivers; a second call is harmless."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        for region in self._local:
            await self._call(partial(self._drivers[0].unregister, region))
        self._local.clear()
        self._calls.put(None)
        await asyncio.to_thread(thread.join, 10)
        for driver in self._drivers:
            driver.close()

    async def _call(self, function: Callable[[], None]) -> None:
        """Run something in the engine's thread and wait for it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def resolve(error: Exception | None) -> None:
            if not done.done():
                done.set_exception(error) if error else done.set_result(None)

        def work() -> None:
            try:
                function()
            except Exception as error:
                loop.call_soon_threadsafe(resolve, error)
            else:
                loop.call_soon_threadsafe(resolve, None)

        self._calls.put(work)
        await done

    # ------------------------------------------------------------------ thread side

    def _run(self) -> None:
        while True:
            busy = any(w.busy for w in self._windows.values())
            try:
                call = self._calls.get_nowait() if busy else self._calls.get(timeout=0.5)
            except queue.Empty:
                call = _nothing
            if call is None:
                return
            try:
                call()
                progress = call is not _nothing
                for window in tuple(self._windows.values()):
                    progress |= self._serve(window)
            except Exception:
                # one bad call must not end the thread: every other room depends on it
                log.exception("engine.thread")
                progress = False
            if busy and not progress:
                time.sleep(self.limits.poll_s)

    def _enqueue(self, batch: Batch, blocks: Sequence[Block]) -> None:
        window = self._windows.setdefault(batch.session, PeerWindow(batch.session))
        limit = self.limits.descriptor_bytes
        for block in blocks:
            for at in range(0, block.length, limit):
                part = Block(block.source + at, block.destination + at, min(limit, block.length - at))
                window.add(Descriptor(batch=batch, block=part))

    def _serve(self, window: PeerWindow) -> bool:
        now = time.monotonic()
        progress = self._fill(window, now)
        for descriptor in tuple(window.active):
            try:
                status = descriptor.driver.check(descriptor.submitted)
            except Exception as error:
                window.end(descriptor)
                self._give_up(window, descriptor, TransferFailed(f"status of a write: {error}"), landing=True)
                continue
            if status == 0:
                continue
            progress = True
            window.end(descriptor)
            if status == 1:
                window.failures = 0
                self.counters["bytes"] += descriptor.block.length
                self._descriptor_done(window, descriptor)
            else:
                self._failed(window, descriptor, now)
        for batch in window.overdue(now):
            self.counters["deadlines"] += 1
            late = DeadlineExceeded(f"transfer {batch.label or batch.number} outlived its deadline")
            self._fail_batch(window, batch, late, settled_at_s=now + self.limits.late_landing_s)
        for descriptor in window.stuck(now - self.limits.late_landing_s):
            # no end in sight: a new driver serves the peer, and the pages wait out their settling time
            window.end(descriptor)
            self._descriptor_done(window, descriptor)
            self._rebuild(f"a write to {window.session} never ended")
        return progress

    def _fill(self, window: PeerWindow, now: float) -> bool:
        progress = False
        while (
            descriptor := window.next(now, self.limits.window_descriptors, self.limits.window_bytes)
        ) is not None:
            progress = True
            descriptor.driver = self._drivers[-1]
            try:
                descriptor.submitted = descriptor.driver.submit(window.session, descriptor.block)
            except Exception as error:
                self._give_up(window, descriptor, TransferFailed(f"a write did not start: {error}"))
                continue
            if descriptor.submitted <= 0:
                self.counters["refused"] += 1
                self._give_up(window, descriptor, TransferFailed("the engine refused a write"))
                self._rebuild(f"{window.session} refused a write")
                continue
            self.counters["descriptors"] += 1
            window.start(descriptor)
        return progress

    def _failed(self, window: PeerWindow, descriptor: Descriptor, now: float) -> None:
        self.counters["failures"] += 1
        window.failures += 1
        batch = descriptor.batch
        self._tell(_unsettle, batch, now + self.limits.late_landing_s)
        if batch not in window.failed and descriptor.tries < self.limits.retries:
            self.counters["retries"] += 1
            descriptor.tries += 1
            window.add(descriptor, not_before=now + self.limits.retry_after_s)
            if window.failures >= 2 and not descriptor.driver.probe(window.session):
                self._rebuild(f"{window.session} fails and does not answer a probe")
            return
        self._give_up(window, descriptor, TransferFailed(f"a write to {window.session} failed"), landing=True)
        if descriptor.tries:
            self._rebuild(f"{window.session} failed {descriptor.tries + 1} times")

    def _give_up(
        self, window: PeerWindow, descriptor: Descriptor, error: TransferFailed, *, landing: bool = False
    ) -> None:
        settled = time.monotonic() + self.limits.late_landing_s if landing else 0.0
        self._fail_batch(window, descriptor.batch, error, settled_at_s=settled)
        self._descriptor_done(window, descriptor)

    def _fail_batch(self, window: PeerWindow, batch: Batch, error: Exception, *, settled_at_s: float) -> None:
        window.fail(batch)
        self._tell(_set_error, batch, error, settled_at_s)
        if window.left(batch) == 0:
            self._tell(batch.idle.set)

    def _descriptor_done(self, window: PeerWindow, descriptor: Descriptor) -> None:
        batch = descriptor.batch
        if window.left(batch):
            return
        if not window.forget(batch):
            self._tell(batch.finished.set)
        self._tell(batch.idle.set)

    def _rebuild(self, reason: str) -> None:
        """Send through a new driver from now on. Writes on the old one are still polled to their end.

        The first driver stays for good, since peers write into this node through its session.
        """
        now = time.monotonic()
        if now - self._rebuilt_at_s < self.limits.retry_after_s:
            return  # the failures of one outage share one rebuild
        self._rebuilt_at_s = now
        self.counters["rebuilds"] += 1
        log.warning("engine.rebuild", reason=reason)
        driver = self._factory()
        for region in self._local:
            driver.register(region)
        self._drivers.append(driver)
        used = {id(d.driver) for w in self._windows.values() for d in w.active}
        for old in [d for d in self._drivers[1:-1] if id(d) not in used]:
            self._drivers.remove(old)
            old.close()

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _nothing() -> None:
    """Stands in for a call when the queue was empty."""


def _set_error(batch: Batch, error: TransferFailed, settled_at_s: float) -> None:
    batch.error = batch.error or error
    batch.settled_at_s = max(batch.settled_at_s, settled_at_s)
    batch.finished.set()


def _unsettle(batch: Batch, settled_at_s: float) -> None:
    batch.settled_at_s = max(batch.settled_at_s, settled_at_s)
