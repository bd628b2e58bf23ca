"""When pages go from L1 to L2.

    write_through             with the forward that computes them: reserved before it, copied at its layer ends
    write_through_selective   after they were used so many times
    write_back                when L1 has to evict them (write_back.py)

A child is never backed up before its parent, and what L2 has no room for is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import structlog

from app.core.ids import PageArray
from app.core.lanes import OwnerLanes
from app.core.prefix_tree import Namespace, PrefixTree, Residency, Tokens
from app.errors import BadInput, SettingsError
from app.tiers.backup import Backups, Piece, Reservation
from app.tiers.events import DeviceEvent
from app.tiers.l2 import HostTier
from app.tiers.paths import nodes_to
from app.tiers.write_back import WriteBack

log = structlog.get_logger(__name__)

Policy = Literal["write_through", "write_through_selective", "write_back"]
HITS_KEY: Final = "hicache.selective_hits"


class TierWrites:
    """Decides which nodes of L1 are backed up, and begins it."""

    def __init__(
        self,
        tree: PrefixTree,
        lanes: OwnerLanes,
        host: HostTier,
        backups: Backups,
        *,
        policy: Policy = "write_through",
        selective_hits: int = 2,
    ) -> None:
        if selective_hits < 1:
            raise SettingsError(f"{HITS_KEY} ({selective_hits}): one use is the least")
        self.policy = policy
        self.selective_hits = selective_hits
        self._tree = tree
        self._lanes = lanes
        self._host = host
        self._backups = backups
        self._uses = np.zeros(lanes.lanes * lanes.pages, dtype=np.int32)
        self.write_back = WriteBack(tree, lanes, backups, self.back_up) if policy == "write_back" else None

    def reserve(self, space: Namespace, key: Tokens, pages: PageArray) -> Reservation | None:
        """Pages of L2 and a pending node for what an insert of `key` will add. None when that is nothing.

        It starts from the very prefix that the insert will find, in whatever state that is.
        """
        if self.policy != "write_through":
            return None
        known = self._tree.match(space, key, floor=True, touch=False, pin=True)
        try:
            first = known.known_tokens // self._tree.page_size
            if first >= len(pages) or not self.back_up(known.node):
                return None
            return self._reserve(space, key, first, pages[first:])
        finally:
            if known.node:
                self._tree.unpin(known.node)

    def _reserve(self, space: Namespace, key: Tokens, first: int, l1: PageArray) -> Reservation | None:
        owners = self._lanes.owners_of(l1)
        l2 = self._host.allocate(owners)
        if l2 is None:
            self._skip("L2 has no room", len(l1))
            return None
        try:
            made = self._tree.reserve(space, key, first, l2, owners, acks=self._backups.acks)
        except BadInput as error:
            # what lies above is in L1 alone, below something that is not: it cannot be backed up from here
            self._host.release(l2, unwritten=True)
            self._skip(error.message, len(l1))
            return None
        return self._backups.begin(made.ticket, first, l1, l2)

    def back_up(self, node: int, after: Sequence[DeviceEvent] = ()) -> bool:
        """Copy what lies in L1 alone on the path down to a pinned node, one descriptor a layer for all of it.

        These pages were written long ago: there is no forward whose layer ends could be followed. False when L2
        has no room for some node; what lies above it is backed up.
        """
        pieces, fits = [], True
        for info in nodes_to(self._tree, node):
            if info.state != Residency.L1:
                continue
            l1 = np.asarray(info.l1_pages, dtype=np.int64)
            l2 = self._host.allocate(self._lanes.owners_of(l1))
            if l2 is None:
                self._skip("L2 has no room", len(l1))
                fits = False
                break
            ticket = self._tree.begin_backup(info.id, l2, acks=self._backups.acks)
            made = self._backups.begin(ticket, info.start // self._tree.page_size, l1, l2)
            pieces.append(Piece(of=made, start=0, stop=len(l1)))
        if pieces:
            self._backups.send(pieces, after=after)
        return fits

    def used(self, node: int, pages: PageArray) -> None:
        """A request has found `pages`, which end at or in the pinned `node`."""
        if self.write_back is not None:
            self.write_back.forget(pages)
        if self.policy != "write_through_selective" or not node:
            return
        self._uses[pages] += 1
        last, end = self._tree.node(node), len(pages) * self._tree.page_size
        if last.state == Residency.L1 and last.start + last.tokens > end:
            node = self._tree.split(node, end - last.start)
        hot = 0
        for info in nodes_to(self._tree, node):
            if info.state == Residency.L1 and (self._uses[info.l1_pages] < self.selective_hits).any():
                break
            hot = info.id
        self.back_up(hot)

    def forget(self, pages: PageArray) -> None:
        """Pages of L1 that hold something else from now on."""
        self._uses[pages] = 0
        if self.write_back is not None:
            self.write_back.forget(pages)

    def _skip(self, reason: str, pages: int) -> None:
        self._backups.counters.skipped += 1
        log.debug("backup.skipped", reason=reason, pages=pages)
