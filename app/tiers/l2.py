"""The pages of L2: one lane for each rank, and what every page is known to hold.

A page of L2 is target and draft at once: it has one number, one owner and one fate. Which of the two has been
written is marked page by page, and a page is sound when all that the geometry stores is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from app.core.ids import PageArray, Source
from app.core.lanes import OwnerLanes
from app.core.prefix_tree import PrefixTree
from app.errors import IntegrityError
from app.tiers.page_checks import PageChecks
from app.tiers.room import room_pages, shortfall

_MARKS: dict[Source, int] = {"target": 1, "draft": 2}
_SPOILED = 4


class HostTier:
    """Decides about pages of L2; the tree holds those that are not free. Not thread-safe: the loop decides."""

    def __init__(
        self,
        tree: PrefixTree,
        *,
        ranks: int,
        pages: int,
        sources: Sequence[Source],
        free_room: float = 0.0,
        checks: PageChecks | None = None,
    ) -> None:
        self.lanes = OwnerLanes(ranks, pages)
        self.room = room_pages(self.lanes, free_room)
        self.checks = checks
        self.evicted_pages = 0
        self._tree = tree
        self._marks = np.zeros(ranks * pages, dtype=np.uint8)
        self._sound = sum(_MARKS[source] for source in sources)

    @property
    def pages(self) -> int:
        """Of all ranks."""
        return self.lanes.pages * self.lanes.lanes

    def allocate(self, owners: npt.NDArray[np.int8]) -> PageArray | None:
        """A page of each owner's lane, on all ranks or on none. Evicts once for lanes in deficit. None: no change."""
        pages = self.lanes.alloc_pages_with_owners(owners)
        if pages is None and self.evict(shortfall(self.lanes, self.room, owners)):
            pages = self.lanes.alloc_pages_with_owners(owners)
        return pages

    def evict(self, wanted: npt.NDArray[np.int64]) -> int:
        """Pages of L2 that nothing holds, by lane. The number of pages that became free."""
        if not wanted.any():
            return 0
        for node in self._tree.victims(2, wanted):
            self._require_accounted(self._tree.node(node).l2_pages, f" of node {node}")
        victims = self._tree.evict_owners(2, wanted)
        self.evicted_pages += len(victims)
        self.release(victims)
        return len(victims)

    def evict_to_target(self) -> int:
        """Restore the free room of every lane."""
        return self.evict(shortfall(self.lanes, self.room))

    def flush(self) -> int:
        """Evict all that nothing holds."""
        before = self.evicted_pages
        gone = self.evict(np.full(self.lanes.lanes, self.lanes.pages, dtype=np.int64))
        self.evicted_pages = before  # nobody was short of them
        return gone

    def release(self, pages: PageArray, *, unwritten: bool = False) -> None:
        """Pages that the tree no longer holds; `unwritten`: of a copy that has come to nothing.

        IntegrityError, before anything is freed, for a page of which target or draft is unaccounted for.
        """
        if not len(pages):
            return
        if not unwritten:
            self._require_accounted(pages)
        self.lanes.release(pages)
        self._marks[pages] = 0
        if self.checks is not None:
            self.checks.forget(pages)

    def written(self, pages: PageArray, source: Source) -> None:
        """All that `source` stores of these pages is there."""
        self._marks[pages] |= _MARKS[source]

    def spoil(self, pages: Sequence[int]) -> None:
        """The bytes are not what was written: these pages are no hit any more, until they are evicted."""
        self._marks[list(pages)] |= _SPOILED

    def sound(self, pages: PageArray) -> bool:
        """Whether target and draft of all these pages can be read."""
        return bool((self._marks[pages] == self._sound).all())

    def require_sound(self, pages: PageArray, node: int) -> None:
        """IntegrityError, naming node and rank, for a page of which target or draft was never written."""
        wrong = np.flatnonzero(self._marks[pages] != self._sound)
        if len(wrong):
            page = int(pages[wrong[0]])
            held = "other bytes than were written" if self._marks[page] & _SPOILED else self._held(page)
            raise IntegrityError(
                f"page {page} of node {node} holds {held} in L2", rank=page // self.lanes.pages, node=node
            )

    def _held(self, page: int) -> str:
        return f"only {[name for name, bit in _MARKS.items() if self._marks[page] & bit] or 'nothing'}"

    def _require_accounted(self, pages: PageArray, of: str = "") -> None:
        """IntegrityError unless the marks say that all of each page was written, whatever became of it."""
        wrong = np.flatnonzero(self._marks[pages] & self._sound != self._sound)
        if len(wrong):
            page = int(pages[wrong[0]])
            raise IntegrityError(
                f"page {page}{of} is given up in L2 with {self._held(page)} written",
                rank=page // self.lanes.pages,
            )

    def check_integrity(self) -> None:
        """IntegrityError unless every page is free or the tree's, and only pages that are not free are marked."""
        self.lanes.check_integrity()
        held = self._tree.stats().l2_pages
        if self.lanes.free_pages + held != self.pages:
            raise IntegrityError(f"L2: {self.lanes.free_pages} free and {held} cached of {self.pages} pages")
        if np.count_nonzero(self._marks) > held:
            raise IntegrityError(f"L2: {np.count_nonzero(self._marks)} pages are marked, {held} are cached")
