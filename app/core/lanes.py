"""The L1 page allocator of one lane: sorted free extents, contiguous pages preferred.

free extents   [2..5) [9..10) [16..40)
allocate 3     -> the smallest extent that fits whole: 2,3,4
allocate 20    -> 16..36
allocate 26    -> largest extents first until the count is reached; or None, and nothing changed
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from app.core.ids import PageArray
from app.core.pages import as_pages, summary
from app.errors import BadInput, IntegrityError


class PageLane:
    """Hands out the pages 0..pages-1. Not thread-safe: one task decides."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise BadInput(f"a lane needs at least one page, not {pages}")
        self.pages = pages
        self._extents: list[tuple[int, int]] = [(0, pages)]
        self._free = pages
        self._taken = np.zeros(pages, dtype=bool)

    @property
    def free_pages(self) -> int:
        return self._free

    @property
    def largest_extent(self) -> int:
        return max((stop - start for start, stop in self._extents), default=0)

    def allocate(self, count: int) -> PageArray | None:
        """`count` pages in ascending runs, or None (and no change) when too few are free."""
        if count < 0:
            raise BadInput(f"cannot allocate {count} pages")
        if count > self._free:
            return None
        fitting = [e for e in self._extents if e[1] - e[0] >= count]
        if count and fitting:
            chosen = [min(fitting, key=lambda e: (e[1] - e[0], e[0]))]
        else:
            chosen = sorted(self._extents, key=lambda e: (e[0] - e[1], e[0]))
        parts: list[PageArray] = []
        left = count
        for start, stop in chosen:
            if not left:
                break
            take = min(left, stop - start)
            parts.append(np.arange(start, start + take, dtype=np.int64))
            at = bisect_left(self._extents, (start, stop))
            if take == stop - start:
                del self._extents[at]
            else:
                self._extents[at] = (start + take, stop)
            left -= take
        result = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        self._taken[result] = True
        self._free -= count
        return result

    def release(self, pages: PageArray) -> None:
        """Give pages back. BadInput, and no change, on a foreign, repeated or already free page."""
        array = as_pages(pages)
        if array.size and int(array.max()) >= self.pages:
            raise BadInput(f"page {int(array.max())} is not of this lane of {self.pages}")
        if not self._taken[array].all():
            raise BadInput(f"freed twice: {summary(array[~self._taken[array]])}")
        self._taken[array] = False
        self._free += len(array)
        for page in map(int, np.sort(array)):
            self._give_back(page, page + 1)

    def _give_back(self, start: int, stop: int) -> None:
        at = bisect_left(self._extents, (start, stop))
        if at < len(self._extents) and self._extents[at][0] == stop:
            stop = self._extents.pop(at)[1]
        if at and self._extents[at - 1][1] == start:
            start = self._extents.pop(at - 1)[0]
        insort(self._extents, (start, stop))

    def check_integrity(self) -> None:
        """IntegrityError, with the numbers, when extents and the taken map disagree."""
        seen = np.ones(self.pages, dtype=bool)
        for start, stop in self._extents:
            seen[start:stop] = False
        total = sum(stop - start for start, stop in self._extents)
        joined = any(a[1] >= b[0] for a, b in zip(self._extents, self._extents[1:], strict=False))
        if total != self._free or joined or not np.array_equal(seen, self._taken):
            raise IntegrityError(
                f"lane: {self._free} free, extents hold {total}: {self._extents[:8]}, "
                f"{int(self._taken.sum())} of {self.pages} taken"
            )
