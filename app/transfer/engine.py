"""The asynchronous transfer engine: one thread that owns the driver, and batches that the loop awaits.

    loop:             submit(blocks) -> Batch      await wait([batches])        await settle([batches])
                           | queue                       ^ finished                   ^ idle, settled
    thread (pump.py): window per peer -> driver.submit -> poll driver.check -> retry | fail | done

Flow control is a window per peer, in descriptors and bytes; the driver's own queue limit is never
reached. A write is retried where that is safe: the pages at both ends are held until the batch settles,
so writing the same bytes twice is harmless.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from app.errors import BadInput, IntegrityError, TransferFailed
from app.transfer.base import Batch, Block, Region
from app.transfer.drivers import DriverFactory
from app.transfer.pump import Limits, Pump

log = structlog.get_logger(__name__)

_JOIN_S = 10.0


class Engine:
    """Implements TransferEngine over a driver. `start` before use, `close` at the end."""

    def __init__(self, factory: DriverFactory, limits: Limits | None = None) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump = Pump(factory, limits or Limits(), self._tell)
        self._thread: threading.Thread | None = None
        self._local: list[Region] = []
        self._remote: dict[str, list[Region]] = {}
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """Start the thread and the driver. Spawned processes only: a fork after this would hang."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._pump.run, name="kvferry-engine", daemon=True)
        self._thread.start()
        try:
            await self._call(self._pump.open)
        except BaseException:
            self._thread = None
            self._pump.call(None)
            raise

    @property
    def limits(self) -> Limits:
        return self._pump.limits

    @property
    def counters(self) -> dict[str, int]:
        return self._pump.counters

    @property
    def session(self) -> str:
        """Of the first driver: it keeps receiving even after the sending side was rebuilt."""
        return self._pump.drivers.first.session

    @property
    def transport(self) -> str:
        return self._pump.drivers.first.transport

    @property
    def addressed(self) -> bool:
        return self._pump.drivers.first.addressed

    async def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            await self._call(partial(self._pump.register, region))
            self._local.append(region)

    def add_peer(self, session: str, regions: Sequence[Region]) -> None:
        self._remote[session] = list(regions)

    def drop_peer(self, session: str) -> None:
        if self._remote.pop(session, None) is not None:
            self._pump.call(lambda: self._pump.drop(session))

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
        self._pump.call(lambda: self._pump.enqueue(batch, blocks))
        return batch

    def _check_bounds(self, session: str, block: Block) -> None:
        if block.length <= 0:
            raise BadInput(f"a block of {block.length} bytes")
        if not _covered(self._local, block.source, block.length):
            raise BadInput(f"source {block.source:#x}+{block.length} is outside the registered regions")
        remote = self._remote.get(session)
        if remote is None:
            raise BadInput(f"no peer with session {session}")
        if not _covered(remote, block.destination, block.length):
            raise BadInput(f"destination {block.destination:#x}+{block.length} is outside the peer's regions")

    async def wait(self, batches: Sequence[Batch]) -> None:
        ends = [asyncio.ensure_future(_success(b)) for b in batches if b.error or not b.finished.is_set()]
        try:
            # the first failure is raised at once, whichever batch it is
            await asyncio.gather(*ends)
        finally:
            for end in ends:
                end.cancel()

    async def settle(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            await batch.idle.wait()
            left = batch.settled_at_s - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)

    def why_not_ready(self, *, stall_s: float) -> str | None:
        if self._thread is None or not self._thread.is_alive():
            return "the transfer engine has ended"
        if time.monotonic() - self._pump.due_at_s > stall_s:
            return f"the transfer engine has not looked for work for {stall_s:g} s"
        return None

    def statistics(self) -> dict[str, Any]:
        peers = {s: w.statistics() for s, w in tuple(self._pump.windows.items())}
        return {**self.counters, "transport": self.transport, "session": self.session, "peers": peers}

    def check_integrity(self) -> None:
        """IntegrityError while descriptors are queued or in flight, or when a batch was counted wrongly."""
        for session, window in tuple(self._pump.windows.items()):
            if window.busy:
                raise IntegrityError(f"engine: descriptors left for {session}: {window.statistics()}")
            window.check_integrity()

    async def close(self) -> None:
        """Unregister, drop the drivers and stop the thread; a second call is harmless.

        What had not ended fails. The thread is given up after a while: a driver may hang in a call.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._local.clear()
        self._pump.call(None)
        await asyncio.to_thread(thread.join, _JOIN_S)
        if thread.is_alive():
            log.warning("engine.close", reason=f"the engine's thread did not end within {_JOIN_S} s")

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

        self._pump.call(work)
        await done

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        """From the thread to the loop; there is nobody left to tell once that has been closed."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *args)


def _covered(regions: Sequence[Region], address: int, length: int) -> bool:
    """A plain loop: this runs on the event loop for each of thousands of blocks."""
    for region in regions:  # noqa: SIM110
        if region.base <= address and address + length <= region.base + region.length:
            return True
    return False


async def _success(batch: Batch) -> None:
    await batch.finished.wait()
    if batch.error:
        raise batch.error


__all__ = ["DriverFactory", "Engine", "Limits"]
