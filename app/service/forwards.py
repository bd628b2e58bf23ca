"""The one forward thread of a node: turns in order of asking, progress that health can see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import torch

from app.errors import DeadlineExceeded

T = TypeVar("T")


class Forwards:
    """`turn` for a stretch of forwards of one request, `run` for one of them.

    A forward cannot be cancelled from outside: `run` returns only when the thread has, so pages are
    never freed under a running forward. An aborted room ends its forward through its layer hooks.

    The queue has no limit of its own: whoever asks for a turn holds pages already, and refusing it would
    make an admitted request pay for the arrivals after it.
    """

    def __init__(self, *, threads: int, stall_s: float) -> None:
        # torch keeps the thread count per thread; equal counts are what makes equal bits
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="kvferry-forward", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._turn = asyncio.Lock()
        self._stall_s = stall_s
        self._progress_s = 0.0
        self._running = False
        self.waiting = 0
        self.count = 0

    @asynccontextmanager
    async def turn(self, *, timeout_s: float) -> AsyncIterator[None]:
        """The forward thread, in order of asking. DeadlineExceeded when the turn does not come."""
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded(f"not scheduled within {timeout_s} s (deadlines.queue_s)") from error
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._turn.release()

    async def run(self, work: Callable[[], T]) -> T:
        """Run on the forward thread and wait for its end, whatever happens to the caller."""
        self.progress()
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        self._running = True
        try:
            await _end_of(future)
            return future.result()
        finally:
            self._running = False
            self.count += 1

    def progress(self) -> None:
        """A layer has ended. Called from the forward thread."""
        self._progress_s = time.monotonic()

    @property
    def stalled(self) -> bool:
        """A forward runs and no layer has ended for longer than allowed."""
        return self._running and time.monotonic() - self._progress_s > self._stall_s

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


async def _end_of(future: asyncio.Future[T]) -> None:
    """Wait for a thread's work. A cancellation is raised after that: neither a scope's nor the task's own."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        future.exception()  # seen: the caller hears of the cancellation instead
        raise cancelled
