"""The prefix tree: which pages hold the KV of which prompt prefix, in which tier.

The tree is native (csrc/include/kvferry/tree.hpp); this module gives it names and types. It stores page
numbers and never touches a page: pages that a call takes belong to the tree, pages that it returns belong
to the caller again.

    tree.match(space, tokens, floor=True, pin=True)    what of a prompt is readable, and where
    tree.insert(space, tokens, pages, owners)          after a forward; says which pages were not needed
    tree.reserve / begin_backup -> acknowledge         L1 -> L2: visible after the last acknowledgement
    tree.begin_load -> acknowledge                     L2 -> L1
    tree.evict / evict_owners                          what the tier's policy gives up first, children before parents
    tree.victims                                       which nodes that would be, without a change

Tokens are contiguous numpy arrays of int64 or int32 and are read in place (not to be written by another
thread meanwhile). Lengths count valid tokens; the last page of a prompt may be a valid tail. A node id stays
valid for as long as the node lives and is pinned; without a pin it may name less than it did, or nothing:
a stale id is BadInput.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from app import _native
from app._native import Draft, Freed, Inserted, Match, NodeInfo, Reserved, Settled, TreeStats
from app.core.fingerprint import Fingerprint
from app.core.ids import PageArray

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "TRANSITIONS",
    "Draft",
    "Freed",
    "Inserted",
    "Match",
    "Namespace",
    "NodeInfo",
    "Policy",
    "PrefixTree",
    "Reserved",
    "Residency",
    "Settled",
    "Tier",
    "TreeStats",
    "bigrams",
    "namespace",
    "page_keys",
]

Namespace = _native.Namespace
Tokens = npt.NDArray[np.int64] | npt.NDArray[np.int32]
Owners = npt.NDArray[np.int8]
Tier = Literal[1, 2]
Policy = Literal["lru", "slru", "s3fifo", "lhd"]
"""How a tier chooses what goes: POLICIES; what they order by is in csrc/include/kvferry/policy.hpp."""
DEFAULT_POLICY: Final[Policy] = "lhd"
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)


class Residency(StrEnum):
    """Where the bytes of a node are; the moves between the states are TRANSITIONS."""

    ABSENT = "absent"
    L1 = "l1"
    PENDING = "pending"
    L1_PENDING = "l1+pending"
    L1_L2 = "l1+l2"
    L2 = "l2"
    LOADING = "loading"


TRANSITIONS: Final[tuple[tuple[Residency, str, Residency], ...]] = tuple(
    (Residency(before), event, Residency(after)) for before, event, after in _native.TRANSITIONS
)


def namespace(
    fingerprint: Fingerprint, *, salt: str | None = None, adapter: str | None = None, bigrams: bool = False
) -> Namespace:
    """Whose KV it is: prompts of different contracts, tenants or adapters never share a page.

    `bigrams` keys position p by the tokens p and p + 1, as a draft attached to the model needs it.
    """
    return Namespace(fingerprint.hash, salt, adapter, bigrams=bigrams)


def bigrams(tokens: Tokens) -> npt.NDArray[np.int64]:
    """The keys of a namespace of bigrams, int64 [n - 1, 2]: [1, 2, 3, 4] gives (1, 2), (2, 3), (3, 4)."""
    return np.stack([tokens[:-1], tokens[1:]], axis=1).astype(np.int64)


def page_keys(space: Namespace, tokens: Tokens, page_size: int) -> npt.NDArray[np.uint64]:
    """Chained hash of each page of a prompt, valid tail included; equal in every process."""
    return _native.page_keys(space, tokens, page_size)


class PrefixTree:
    """Errors leave it as it was: BadInput, PageMismatch. One lock guards it; long calls run without the GIL."""

    def __init__(
        self,
        *,
        page_size: int,
        l1_pages: int,
        l2_pages: int = 0,
        lanes: int = 1,
        hash_bits: int = 64,
        policy: Policy = DEFAULT_POLICY,
        l2_policy: Policy | None = None,
    ) -> None:
        """Pages are 0..n-1 in each tier, owners 0..lanes-1. Fewer `hash_bits` make hashes collide (tests).

        `policy` says what is evicted first: of L1, and of L2 too unless `l2_policy` names another.
        """
        self._tree = _native.PrefixTree(
            page_size=page_size,
            l1_pages=l1_pages,
            l2_pages=l2_pages,
            lanes=lanes,
            hash_bits=hash_bits,
            policy=policy,
            l2_policy=l2_policy,
        )
        self.page_size = page_size
        self.lanes = lanes

    def match(
        self,
        space: Namespace,
        tokens: Tokens,
        *,
        floor: bool = False,
        draft: Draft = Draft.NONE,
        touch: bool = True,
        pin: bool = False,
    ) -> Match:
        """The readable prefix: `l1_tokens` in L1 (its `pages`), then up to `tokens` from L2.

        `floor` gives whole pages, for a new scheduling decision; without it a valid tail counts. `draft`
        says how the last draft row is made sure of. `pin` keeps `node` and all above it until unpin(node).
        `known_tokens` is what an insert would find, in whatever state. `touch` counts as a use, and cuts the
        node inside which it ends: pages of a node are used together.
        """
        return self._tree.match(space, tokens, floor, draft, touch, pin)

    def insert(
        self,
        space: Namespace,
        tokens: Tokens,
        pages: PageArray,
        owners: Owners | None = None,
        *,
        pin: bool = False,
    ) -> Inserted:
        """Take over the L1 pages of a prompt, an entry for each of its pages.

        `duplicates` are the positions whose page the tree did not take and does not hold: free them.
        `freed_l2` are L2 pages of a valid tail that grew: free them too.
        """
        return self._tree.insert(space, tokens, pages, owners, pin)

    def pin(self, node: int) -> None:
        self._tree.pin(node)

    def unpin(self, node: int) -> None:
        """BadInput when the node has no pin left: it was unpinned twice."""
        self._tree.unpin(node)

    def split(self, node: int, tokens: int) -> int:
        """Cut a node after `tokens` of its own tokens, on the page grid; the id of the new front part."""
        return self._tree.split(node, tokens)

    def reserve(
        self,
        space: Namespace,
        tokens: Tokens,
        first_page: int,
        l2_pages: PageArray,
        owners: Owners | None = None,
        *,
        acks: int = 1,
    ) -> Reserved:
        """Before the forward: a pending node for the pages from `first_page`, which an insert would add.

        `first_page` is known_tokens // page_size of a match. Its parent has to be in L2 or pending.
        """
        return self._tree.reserve(space, tokens, first_page, l2_pages, owners, acks=acks)

    def begin_backup(self, node: int, l2_pages: PageArray, *, acks: int = 1) -> int:
        """A ticket for copying a node of L1 to `l2_pages`; with a draft attached acks=2."""
        return self._tree.begin_backup(node, l2_pages, acks=acks)

    def load_owners(self, node: int) -> Owners:
        """Owners of the pages that a load of the path down to `node` needs, in order."""
        return self._tree.load_owners(node)

    def load_pages(self, node: int) -> PageArray:
        """The L2 pages of the same."""
        return self._tree.load_pages(node)

    def begin_load(self, node: int, l1_pages: PageArray, *, acks: int = 1) -> int:
        """A ticket for loading them to `l1_pages`. The path is held until the ticket ends."""
        return self._tree.begin_load(node, l1_pages, acks=acks)

    def acknowledge(self, ticket: int) -> Settled:
        """One copy of the ticket has ended. After the last, `nodes` are visible (every part of a split node)."""
        return self._tree.acknowledge(ticket)

    def cancel(self, ticket: int) -> Settled:
        """The copy failed and nothing of it can land any more: `pages` had been taken for it."""
        return self._tree.cancel(ticket)

    def evict(self, tier: Tier, pages: int) -> PageArray:
        """Up to `pages` pages in the order of the tier's policy; fewer when no more can be evicted."""
        return self._tree.evict(tier, pages)

    def evict_owners(self, tier: Tier, wanted: Sequence[int] | PageArray) -> PageArray:
        """At least wanted[lane] pages of each lane where they can be evicted, and what stood in the way."""
        return self._tree.evict_owners(tier, np.asarray(wanted, dtype=np.int64))

    def victims(self, tier: Tier, wanted: Sequence[int] | PageArray) -> list[int]:
        """The nodes that `evict_owners` would take pages of, in its order; nothing changes.

        Of the last one it may take only a part.
        """
        return self._tree.victims(tier, np.asarray(wanted, dtype=np.int64))

    def clear(self, space: Namespace) -> Freed:
        """Forget a namespace, except what is pinned or being copied."""
        return self._tree.clear(space)

    def node(self, node: int) -> NodeInfo:
        return self._tree.node(node)

    def path(self, node: int) -> list[int]:
        """The node ids from the top down to `node`."""
        return self._tree.path(node)

    def stats(self) -> TreeStats:
        return self._tree.stats()

    def check_integrity(self) -> None:
        """IntegrityError, with the numbers, when the tree contradicts itself."""
        self._tree.check_integrity()
