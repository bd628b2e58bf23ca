"""Coalescing of (source, destination) page pairs into runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.core.ids import PageArray
from app.core.pages import require_equal_counts


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Maximal stretches in which source and destination are both contiguous; parallel arrays."""

    source: PageArray
    destination: PageArray
    count: PageArray

    def __len__(self) -> int:
        return len(self.count)

    @property
    def pages(self) -> int:
        return int(self.count.sum())


def coalesce(source: PageArray, destination: PageArray) -> Runs:
    """Merge neighbours where both sides step by one. PageMismatch on unequal lengths."""
    require_equal_counts(source, destination)
    if not len(source):
        return Runs(source=source, destination=destination, count=source)
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(destination) != 1)) + 1
    starts = np.concatenate(([0], breaks)).astype(np.int64)
    count = np.diff(np.append(starts, len(source))).astype(np.int64)
    return Runs(source=source[starts], destination=destination[starts], count=count)
