"""Write-back: what L1 is about to evict, and L2 does not have, is copied there first.

    victim --> backed up, with what lies above it --> last acknowledgement --> in both tiers: evicted like any other
                 `--> L2 has no room, or the copy fails --> evicted without a copy, as if there were no L2

Until then it stays, so that an eviction can come back with less than was asked for. Whoever needs more asks again
when the copies have ended; what is on its way counts, so that asking twice does not copy twice as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from app.core.ids import PageArray
from app.core.lanes import OwnerLanes
from app.core.prefix_tree import NodeInfo, PrefixTree, Residency
from app.tiers.backup import Backups, Reservation

_Wanted = npt.NDArray[np.int64]
"""A number of pages for each lane."""


class WriteBack:
    """Decides what of an eviction may go now. `back_up` copies the path down to a pinned node."""

    def __init__(
        self, tree: PrefixTree, lanes: OwnerLanes, backups: Backups, back_up: Callable[[int], bool]
    ) -> None:
        self._tree = tree
        self._lanes = lanes
        self._backups = backups
        self._back_up = back_up
        self.choosing = False
        """Whether some call of `ready` is under way: a copy that is refused at once says so in the midst of it."""
        self._leaving: list[Reservation] = []
        self._without = np.zeros(lanes.lanes * lanes.pages, dtype=np.bool_)
        """Pages of L1 of which no copy could be made: they go without one."""

    def ready(self, wanted: _Wanted) -> _Wanted:
        """Begin to copy the victims that are in L1 alone; the pages of each lane that may be evicted now."""
        wanted = np.maximum(wanted - self._on_their_way(), 0)
        self.choosing = True
        try:
            return self._choose(wanted)
        finally:
            self.choosing = False

    def _choose(self, wanted: _Wanted) -> _Wanted:
        while wanted.any():
            victims = self._victims(wanted)
            fresh = [info for info in victims if self._is_fresh(info)]
            if not fresh:
                self._count_dropped(victims)
                break
            begun = [self._begin(info) for info in fresh]
            if any(begun):
                # no others in place of those: the order of the tier stays what it is
                wanted = np.minimum(wanted, self._may_go(victims))
        return wanted

    @property
    def leaving_pages(self) -> int:
        """Pages of L1 that can be evicted as soon as their copies have ended."""
        return int(self._on_their_way().sum())

    def bringing(self, missing: _Wanted) -> tuple[Reservation, ...]:
        """Copies after which each lane has as many pages more as it lacks; none when they are not enough."""
        return tuple(self._leaving) if (missing <= self._on_their_way()).all() else ()

    def settled(self) -> None:
        """Some copy has ended, before its pages can be anybody else's."""
        for of in self._leaving:
            if of.error is not None:
                self._without[of.l1] = True
        self._leaving = [of for of in self._leaving if of.open]

    def forget(self, pages: PageArray) -> None:
        """Pages of L1 that hold something else from now on, or are worth another try."""
        self._without[pages] = False

    # ------------------------------------------------------------------ victims

    def _victims(self, wanted: _Wanted) -> list[NodeInfo]:
        return [self._tree.node(node) for node in self._tree.victims(1, wanted)]

    def _is_fresh(self, info: NodeInfo) -> bool:
        return info.state == Residency.L1 and not self._without[info.l1_pages].all()

    def _begin(self, info: NodeInfo) -> bool:
        """Whether it is on its way to L2; some child's path may have brought it there."""
        if self._tree.node(info.id).state == Residency.L1:
            self._tree.pin(info.id)  # making room in L2 must not take what lies above it
            try:
                self._back_up(info.id)
            finally:
                self._tree.unpin(info.id)
        now = self._tree.node(info.id)
        if now.state == Residency.L1:
            self._without[now.l1_pages] = True
            return False
        self._leaving += [of for of in self._backups.open if of.ticket == now.ticket]
        return True

    def _on_their_way(self) -> _Wanted:
        self.settled()
        return self._by_lane([of.l1 for of in self._leaving])

    def _may_go(self, victims: Sequence[NodeInfo]) -> _Wanted:
        now = [self._tree.node(info.id) for info in victims]
        return self._by_lane([info.l1_pages for info in now if not info.holds])

    def _by_lane(self, pages: Sequence[PageArray]) -> _Wanted:
        counts = np.zeros(self._lanes.lanes, dtype=np.int64)
        for some in pages:
            counts += np.bincount(self._lanes.owners_of(some), minlength=len(counts))
        return counts

    def _count_dropped(self, victims: Sequence[NodeInfo]) -> None:
        self._backups.counters.dropped += sum(info.state == Residency.L1 for info in victims)
