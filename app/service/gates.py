"""Waiting for pages: first come, first served, bounded in time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from app.core.ids import PageArray
from app.core.prefix_tree import Namespace
from app.errors import DeadlineExceeded, KvferryError, NoCapacity
from app.tiers.hicache import HiCache
from app.tiers.prefix import Lease, PrefixCache


class PageGate:
    """Hands out a cache's pages in the order of asking; a waiter that gives up leaves the queue."""

    def __init__(self, cache: PrefixCache, *, max_waiting: int) -> None:
        self.cache = cache
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[int, Lease | None, asyncio.Future[PageArray]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def find(self, space: Namespace, tokens: Sequence[int], *, most: int, timeout_s: float) -> Lease:
        """What the cache has of a prompt. Waits where the room for a load has to be written back first.

        After `timeout_s` the load has to do with the room that there is, or the hit is a miss.
        """
        cache = self.cache
        if not isinstance(cache, HiCache):
            return cache.find(space, tokens, most=most)
        told: asyncio.Future[KvferryError | None] = asyncio.get_running_loop().create_future()

        def later(error: KvferryError | None) -> None:
            if not told.done():
                told.set_result(error)

        lease = cache.find(space, tokens, most=most, later=later)
        if not lease.waits_for:
            return lease
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(told)
            except TimeoutError:
                cache.resume(lease)
            error = told.result()
            if error is not None:
                raise error
        except BaseException:
            self.end(lease)
            raise
        return lease

    async def take(self, count: int, *, timeout_s: float, lease: Lease | None = None) -> PageArray:
        """`count` pages, behind the prefix of a lease. NoCapacity when they can never be had or the queue is full."""
        if count > self.cache.pages:
            raise NoCapacity(f"{count} pages are needed and this node has {self.cache.pages} (cache.pages)")
        if not self._waiting:
            pages = self.cache.allocate(count, lease)
            if pages is not None:
                return pages
        if len(self._waiting) >= self._max_waiting:
            raise NoCapacity(f"{self._max_waiting} requests wait for pages already")
        place: asyncio.Future[PageArray] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, lease, place))
        pages = None
        try:
            async with asyncio.timeout(timeout_s):
                pages = await place
            return pages
        except TimeoutError as error:
            raise DeadlineExceeded(f"no {count} pages within {timeout_s} s (deadlines.queue_s)") from error
        finally:
            if pages is None:
                self._leave(place)

    def _leave(self, place: asyncio.Future[PageArray]) -> None:
        """A waiter gives up: out of the queue, or its pages back if they had just been granted."""
        if place.done() and not place.cancelled():
            self.give(place.result())
            return
        place.cancel()
        self._waiting = deque(w for w in self._waiting if w[2] is not place)
        self.serve()

    def give(self, pages: PageArray) -> None:
        """Return pages and serve whoever waits."""
        self.cache.release(pages)
        self.serve()

    def end(self, lease: Lease) -> None:
        """End a request's lease and serve whoever waits: what it had pinned may be evicted now."""
        self.cache.end(lease)
        self.serve()

    def serve(self) -> None:
        """Grant pages to those who wait, in their order, as far as they go."""
        while self._waiting:
            count, lease, place = self._waiting[0]
            pages = self.cache.allocate(count, lease)
            if pages is None:
                return
            self._waiting.popleft()
            if place.done():  # given up, and not yet out of the queue
                self.cache.release(pages)
            else:
                place.set_result(pages)
