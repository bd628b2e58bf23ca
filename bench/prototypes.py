"""Two allocators to compare with: the plainest one, and a best fit that Python makes fast enough to like.

Throw-away code on purpose: no validation. Imports numpy only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.churn import runs_of

_Pages = npt.NDArray[np.int64]


class SortAndScan:
    """A list of free pages; each allocation sorts it all and scans for the smallest run that fits."""

    def __init__(self, pages: int) -> None:
        self._free: _Pages = np.arange(pages, dtype=np.int64)

    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, pages: int) -> _Pages | None:
        if pages > len(self._free):
            return None
        free = np.sort(self._free)
        edges = np.concatenate(([0], np.flatnonzero(np.diff(free) != 1) + 1, [len(free)]))
        lengths = np.diff(edges)
        fitting = np.flatnonzero(lengths >= pages)
        if len(fitting):
            start = int(edges[fitting[np.argmin(lengths[fitting])]])
            self._free = np.concatenate((free[:start], free[start + pages :]))
            return free[start : start + pages]
        parts, left, kept = [], pages, np.ones(len(free), dtype=bool)
        for run in np.argsort(-lengths, kind="stable"):
            taken = slice(edges[run], edges[run] + min(left, lengths[run]))
            parts.append(free[taken])
            kept[taken] = False
            left -= len(parts[-1])
            if not left:
                break
        self._free = free[kept]
        return np.concatenate(parts)

    def release(self, handle: _Pages) -> None:
        self._free = np.concatenate((self._free, handle))

    def runs(self, handle: _Pages) -> int:
        return runs_of(handle)


class BisectBestFit:
    """Free extents sorted by (length, start) with bisect, and dictionaries that find an extent's neighbours."""

    def __init__(self, pages: int) -> None:
        self._by_length = [(pages, 0)]
        self._by_start, self._by_stop = {0: pages}, {pages: 0}
        self._free = pages

    def free_pages(self) -> int:
        return self._free

    def allocate(self, pages: int) -> list[tuple[int, int]] | None:
        """(start, length) of each run."""
        if pages > self._free:
            return None
        self._free -= pages
        runs, left = [], pages
        while left:
            at = min(bisect_left(self._by_length, (left, 0)), len(self._by_length) - 1)
            length, start = self._by_length.pop(at)
            del self._by_start[start], self._by_stop[start + length]
            taken = min(left, length)
            if taken < length:
                self._add(start + taken, length - taken)
            runs.append((start, taken))
            left -= taken
        return runs

    def release(self, handle: list[tuple[int, int]]) -> None:
        for start, length in handle:
            self._free += length
            stop = start + length
            if (after := self._by_start.get(stop)) is not None:
                self._remove(stop, after)
                stop += after
            if (before := self._by_stop.get(start)) is not None:
                self._remove(before, start - before)
                start = before
            self._add(start, stop - start)

    def runs(self, handle: list[tuple[int, int]]) -> int:
        return len(handle)

    def _add(self, start: int, length: int) -> None:
        insort(self._by_length, (length, start))
        self._by_start[start] = length
        self._by_stop[start + length] = start

    def _remove(self, start: int, length: int) -> None:
        del self._by_length[bisect_left(self._by_length, (length, start))]
        del self._by_start[start], self._by_stop[start + length]


def prototype(name: str, pages: int) -> Any:
    return {"sort and scan": SortAndScan, "bisect": BisectBestFit}[name](pages)
