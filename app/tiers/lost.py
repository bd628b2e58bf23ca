"""A prefix that was promised and did not arrive: what remains of it, and where its pages are to be computed anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from app.errors import BadInput, ClientGone
from app.tiers.leases import Lease
from app.tiers.paths import nodes_to

if TYPE_CHECKING:
    from app.tiers.hicache import HiCache


def forsake(cache: HiCache, lease: Lease) -> int:
    """Let go of a lease's prefix from its first lost page on. The number of pages that are missing now.

    What remains is in L1, on the grid. The tree has the other pages until nothing can land in them any more; the
    lease needs as many new ones, in front of its own. What was being backed up was computed on them: no more.
    BadInput when no load has failed.
    """
    first = _first_lost(lease)
    assert lease.space is not None
    tree, page_size = cache.tree, cache.page_size
    before, node, ahead = len(lease.prefix), 0, int(lease.space.bigrams)
    key = lease.prompt[: first * page_size + ahead]
    kept = 0
    if first:
        kept = cache.on_grid(tree.match(lease.space, key, floor=True, touch=False).l1_tokens)
    if kept:
        node = tree.match(lease.space, key[: kept + ahead], floor=True, pin=True).node
    if lease.node:
        tree.unpin(lease.node)
    lease.node, lease.prefix = node, lease.prefix[: kept // page_size]
    loads, lease.loads = lease.loads, []
    for reservation in lease.backups:
        cache.backups.abort(reservation, ClientGone("its prefix did not arrive"))
    for load in loads:
        cache.loads.leave(load)
    return before - len(lease.prefix)


def _first_lost(lease: Lease) -> int:
    """The index of the first page that a failed load was to bring."""
    lost = [load for load in lease.loads if load.failed is not None]
    if not lost:
        raise BadInput("no load of this lease has failed")
    pages = np.concatenate([l1 for load in lost for part in load.parts for l1, _ in part.nodes])
    return int(np.argmax(np.isin(lease.prefix, pages)))


def saved_owners(cache: HiCache, lease: Lease) -> npt.NDArray[np.int8]:
    """Owners of the pages behind a lease's prefix that the tree has elsewhere than in L1.

    A page that is in L2 comes back to the rank that it left: what is computed anew has to lie there too.
    """
    none = np.empty(0, dtype=np.int8)
    if lease.space is None or not len(lease.prompt):
        return none
    key, _ = cache.whole(lease.space, lease.prompt)
    found = cache.tree.match(lease.space, key, floor=True, touch=False)
    owners = [info.owners for info in nodes_to(cache.tree, found.node)]
    return np.concatenate([none, *owners])[len(lease.prefix) : found.tokens // cache.page_size]
