"""Coalescing of (source, destination) page pairs into runs."""

from __future__ import annotations

from dataclasses import dataclass

from app import _native
from app.core.ids import PageArray
from app.core.pages import require_equal_counts


@dataclass(kw_only=True, slots=True)
class Runs:
    """Maximal stretches in which source and destination are both contiguous; parallel arrays.

    Not to be changed; not frozen, because that would be a third of the cost of `coalesce`.
    """

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
    first, to, count = _native.coalesce(source, destination)
    return Runs(source=first, destination=to, count=count)
