"""Hits in L2: what of a path can be loaded, the pages of L1 for it, and the loads of others that it joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from app.core.ids import PageArray
from app.core.lanes import OwnerLanes
from app.core.prefix_tree import NodeInfo, PrefixTree, Residency, Tokens
from app.tiers.events import DeviceEvent
from app.tiers.l2 import HostTier
from app.tiers.leases import Lease
from app.tiers.loadback import LoadPart, Loads
from app.tiers.paths import nodes_to
from app.tiers.room import shortfall
from app.tiers.write_back import WriteBack

Take = Callable[[npt.NDArray[np.int8]], PageArray | None]
"""A page of L1 for each owner, from that owner's lane; evicts once where lanes are in deficit. None: no change."""


class TierReads:
    """Turns a hit in L2 into pages of L1 that are being written."""

    def __init__(
        self,
        tree: PrefixTree,
        lanes: OwnerLanes,
        host: HostTier,
        loads: Loads,
        take: Take,
        back: WriteBack | None,
    ) -> None:
        self._back = back
        self._tree = tree
        self._lanes = lanes
        self._host = host
        self._loads = loads
        self._take = take

    def sound(self, node: int) -> int:
        """Tokens down to the first node that cannot be loaded: half written, changed, or on a load that failed."""
        end = 0
        for info in nodes_to(self._tree, node):
            if info.state == Residency.L2 and not self._host.sound(info.l2_pages):
                break
            if info.state == Residency.LOADING and self._loads.by_ticket[info.ticket].failed is not None:
                break
            end = info.start + info.tokens
        return end

    def load(
        self, lease: Lease, key: Tokens, usable: int, after: Sequence[DeviceEvent], *, may_wait: bool = False
    ) -> bool:
        """Pin the first `usable` tokens and begin to load what is missing in L1. False: no room, nothing held.

        The lease has the pages at once, and waits for each layer of them before it reads. Where room comes as soon
        as something was written back, and it `may_wait`, it holds the path meanwhile: see `lease.waits_for`.
        """
        assert lease.space is not None
        key = key[: usable + lease.space.bigrams]
        last = self._tree.node(self._tree.match(lease.space, key, floor=True, touch=False).node)
        if last.state == Residency.L2 and last.start + last.tokens > usable:
            self._tree.split(last.id, usable - last.start)  # no more than is asked for
        node = lease.node = self._tree.match(lease.space, key, floor=True, pin=True).node
        path = nodes_to(self._tree, node)
        missing = [info for info in path if info.state == Residency.L2]
        if missing and not self._begin(lease, node, missing, after):
            if may_wait and self._back is not None:
                owners = self._tree.load_owners(node)
                lease.waits_for = self._back.bringing(shortfall(self._lanes, 0, owners))
            if lease.waits_for:
                return False
            self._tree.unpin(node)
            lease.node = 0
            self._loads.counters.misses += 1
            return False
        for info in path:
            if info.state == Residency.LOADING:
                load = self._loads.by_ticket[info.ticket]
                if load not in lease.loads:
                    lease.loads.append(self._loads.join(load))
        table = [np.asarray(info.l1_pages, dtype=np.int64) for info in nodes_to(self._tree, node)]
        lease.prefix = np.concatenate(table)[: -(-usable // self._tree.page_size)]
        lease.l2_tokens = sum(info.tokens for info in missing)
        return True

    def _begin(
        self, lease: Lease, node: int, missing: Sequence[NodeInfo], after: Sequence[DeviceEvent]
    ) -> bool:
        for info in missing:
            self._host.require_sound(info.l2_pages, info.id)
        owners = self._tree.load_owners(node)
        # an estimate only, over all lanes: whether it can be had is decided lane by lane
        leaving = 0 if self._back is None else self._back.leaving_pages
        if len(owners) > self._lanes.free_pages + self._tree.stats().evictable_l1_pages + leaving:
            return False
        pages = self._take(owners)
        if pages is None:
            return False
        try:
            ticket = self._tree.begin_load(node, pages, acks=self._loads.acks)
        except BaseException:
            self._lanes.release(pages)
            raise
        ends = np.cumsum([len(info.l2_pages) for info in missing])
        places = np.split(pages, ends[:-1])
        parts = tuple((l1, info.l2_pages) for l1, info in zip(places, missing, strict=True))
        lease.loads.append(self._loads.join(self._loads.add(LoadPart(ticket=ticket, nodes=parts), after)))
        return True
