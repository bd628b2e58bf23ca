"""L1 with its prefix tree: which pages a request reuses, takes, leaves behind.

    find      pins what the tree has of a prompt          lease.prefix   the tree's pages
    allocate  pages for the rest, evicting when it must   lease.own      the request's pages
    keep      the tree takes over what was computed       own -> tree, under the lease's pin
    end       unpins, frees what is still the request's

Decisions only: no byte is touched here. With several ranks a logical page is rank * pages + physical page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from app.core.ids import PageArray
from app.core.lanes import OwnerLanes
from app.core.prefix_tree import DEFAULT_POLICY, Inserted, Namespace, Policy, PrefixTree
from app.errors import BadInput, IntegrityError, PageMismatch
from app.tiers.flushed import Flushed
from app.tiers.leases import NO_PAGES, Lease
from app.tiers.room import room_pages, shortfall, spread

__all__ = ["Lease", "PrefixCache"]

Tokens = npt.NDArray[np.int64]


class PrefixCache:
    """The lanes of L1 and the tree over them. Not thread-safe: the event loop decides.

    `reuse=False` keeps nothing: every prompt is computed. `grid` is the number of tokens of which a reused
    prefix is a multiple. An eviction goes on until `free_room`, a part of each lane, is free again.
    """

    def __init__(
        self,
        *,
        page_size: int,
        pages: int,
        ranks: int = 1,
        reuse: bool = True,
        grid: int | None = None,
        free_room: float = 0.0,
        l2_pages: int = 0,
        eviction: Policy = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_size = page_size
        self.ranks = ranks
        self.lanes = OwnerLanes(ranks, pages)
        self.tree = PrefixTree(
            page_size=page_size,
            l1_pages=pages * ranks,
            l2_pages=l2_pages * ranks,
            lanes=ranks,
            policy=eviction,
        )
        self.eviction = eviction
        self.room = room_pages(self.lanes, free_room)
        self.clock = clock
        self.reuse = reuse
        self.grid = grid or page_size
        if self.grid % page_size:
            raise BadInput(f"a grid of {self.grid} tokens is not on the page grid of {page_size}")
        self.hit_tokens = 0
        self.looked_up_tokens = 0
        self.evicted_pages = 0
        self._live: set[Lease] = set()

    # ------------------------------------------------------------------ how full it is

    @property
    def pages(self) -> int:
        """Of all ranks."""
        return self.lanes.pages * self.ranks

    @property
    def free_pages(self) -> int:
        return self.lanes.free_pages

    @property
    def cached_pages(self) -> int:
        """Pages of the tree, in use or not."""
        return self.tree.stats().l1_pages

    @property
    def pins(self) -> int:
        return self.tree.stats().pins

    @property
    def leases(self) -> int:
        """Requests that hold something."""
        return len(self._live)

    @property
    def largest_extent(self) -> int:
        return max(self.lanes.largest_extent(rank) for rank in range(self.ranks))

    # ------------------------------------------------------------------ a request's life

    def find(self, space: Namespace, tokens: Sequence[int], *, most: int) -> Lease:
        """A lease on what is here of a prompt: whole pages, on the grid, at most `most` tokens."""
        lease = self._open(space, tokens)
        if not self.reuse:
            return lease
        self.looked_up_tokens += len(tokens)
        key = lease.prompt[: most + space.bigrams]
        # which node is pinned has to be the one that ends the reused part, so its length comes first
        found = self.tree.match(space, key, floor=True, touch=False)
        self._reuse(lease, key, self.on_grid(min(found.l1_tokens, most)))
        return lease

    def _open(self, space: Namespace, prompt: Sequence[int] = ()) -> Lease:
        kept = np.asarray(prompt if self.reuse else (), dtype=np.int64)
        lease = Lease(space=space, prompt=kept, since_s=self.clock())
        self._live.add(lease)
        return lease

    def on_grid(self, tokens: int) -> int:
        """As much of that many tokens as may be reused."""
        return tokens // self.grid * self.grid

    def _reuse(self, lease: Lease, key: Tokens, usable: int) -> None:
        """Pin the first `usable` tokens, which are in L1."""
        if not usable:
            return
        assert lease.space is not None
        hit = self.tree.match(lease.space, key[: usable + lease.space.bigrams], floor=True, pin=True)
        lease.node = hit.node
        lease.prefix = np.asarray(hit.pages, dtype=np.int64)
        self.hit_tokens += usable

    def allocate(self, count: int, lease: Lease | None = None) -> PageArray | None:
        """`count` pages, shared out among the ranks; evicts once for lanes in deficit. None: no change.

        For a `lease` they are the pages behind its prefix: of the lanes where the tree would look for them, and
        never so many of a lane that, with those of the prefix, it could not ever have them.
        """
        return self._take(self._plan(count, lease))

    def _plan(self, count: int, lease: Lease | None) -> npt.NDArray[np.int8]:
        room = np.full(self.ranks, self.lanes.pages, dtype=np.int64)
        if lease is None or self.ranks == 1:
            return spread(count, room, self._roomiest())
        room -= np.bincount(self.lanes.owners_of(lease.pages), minlength=self.ranks)
        saved = self._saved_owners(lease)[:count]
        left = room - np.bincount(saved, minlength=self.ranks)
        if (left < 0).any():
            # they lie too unevenly: what is computed on other lanes is kept as far as it fits the tree
            saved, left = saved[:0], room
        return np.concatenate([saved, spread(count - len(saved), left, self._roomiest())])

    def _saved_owners(self, lease: Lease) -> npt.NDArray[np.int8]:
        """Of the pages behind a lease's prefix that the tree knows elsewhere than in L1."""
        return np.empty(0, dtype=np.int8)

    def _take(self, owners: npt.NDArray[np.int8]) -> PageArray | None:
        """A page of each owner's lane, or None; lanes in deficit are served by an eviction, once."""
        pages = self.lanes.alloc_pages_with_owners(owners)
        if pages is None and self.reuse and self._evict(shortfall(self.lanes, self.room, owners)):
            pages = self.lanes.alloc_pages_with_owners(owners)
        return pages

    def _evict(self, wanted: npt.NDArray[np.int64]) -> int:
        victims = self.tree.evict_owners(1, wanted) if wanted.any() else NO_PAGES
        self.evicted_pages += len(victims)
        self._give_back(victims)
        return len(victims)

    def evict_to_target(self) -> int:
        """Restore the free room of every lane; the number of pages that were evicted."""
        return self._evict(shortfall(self.lanes, self.room))

    def release(self, pages: PageArray) -> None:
        """Pages that no lease has come to hold. BadInput on a foreign or free page."""
        self.lanes.release(pages)

    def _give_back(self, pages: PageArray) -> None:
        """Pages that the tree or a lease held."""
        if len(pages):
            self.lanes.release(pages)

    def keep(self, lease: Lease, tokens: Sequence[int], pages: PageArray) -> None:
        """Give the tree the whole pages of a prompt: every row of them has been written, draft rows too.

        `pages` is the request's page table. In a namespace of bigrams the last token is only a key. The
        lease goes on holding all of them; what the tree did not take stays the lease's own.
        """
        if not self.reuse or lease.ended or lease.space is None:
            return
        key, whole = self.whole(lease.space, tokens)
        done = self._insert(lease.space, key, pages[:whole]) if whole else None
        if done is None:
            return
        if lease.node:
            self.tree.unpin(lease.node)
        lease.node = done.node
        table = pages[: -(-done.tokens // self.page_size)]
        taken = np.delete(table, [i for i in done.duplicates.tolist() if i < len(table)])
        lease.own = lease.own[~np.isin(lease.own, taken)]

    def whole(self, space: Namespace, tokens: Sequence[int] | Tokens) -> tuple[Tokens, int]:
        """The key of a prompt's whole pages, and their number."""
        ahead = int(space.bigrams)
        whole = max(len(tokens) - ahead, 0) // self.page_size
        return np.asarray(tokens[: whole * self.page_size + ahead], dtype=np.int64), whole

    def _insert(self, space: Namespace, key: Tokens, pages: PageArray) -> Inserted | None:
        """Insert, under a pin. Only as much as fits where the tree knows a part with other owners."""
        ahead, table = int(space.bigrams), np.ascontiguousarray(pages)
        owners = self.lanes.owners_of(table)
        try:
            return self.tree.insert(space, key, table, owners, pin=True)
        except PageMismatch:
            # a page in L2, or on its way there, comes back to the rank that it left: ours lie on others
            found = self.tree.match(space, key, floor=True, touch=False)
        for tokens in (found.tokens, found.l1_tokens):
            count = tokens // self.page_size
            try:
                if count:
                    return self.tree.insert(
                        space, key[: tokens + ahead], table[:count], owners[:count], pin=True
                    )
            except PageMismatch:
                continue
        return None

    def end(self, lease: Lease) -> None:
        """Let go of everything, once."""
        if lease.ended:
            raise BadInput("a lease was ended twice")
        lease.ended = True
        self._live.discard(lease)
        if lease.node:
            self.tree.unpin(lease.node)
        self._give_back(lease.own)
        lease.prefix = lease.own = NO_PAGES

    # ------------------------------------------------------------------ room, purge, flush

    def make_room(self) -> int:
        """Restore the free room: for a task in the background. The pages that were evicted."""
        return self.evict_to_target()

    def purge(self, space: Namespace) -> Flushed:
        """Forget a namespace but for what is held."""
        gone = self.tree.clear(space)
        self._give_back(gone.l1)
        return self.flushed(len(gone.l1), 0)

    def flush(self, *, l1_only: bool = False) -> Flushed:
        """Forget everything that nobody holds; what stayed is in the answer. With an L2 maybe in L1 alone."""
        l1 = self.tree.evict(1, self.pages)
        self._give_back(l1)
        return self.flushed(len(l1), 0)

    def flushed(self, l1_pages: int, l2_pages: int) -> Flushed:
        """The answer to a flush that has freed these pages."""
        stats = self.tree.stats()
        return Flushed(
            l1_pages=l1_pages,
            l2_pages=l2_pages,
            l1_stayed=stats.l1_pages + self.held_pages() + sum(len(lease.own) for lease in self._live),
            l2_stayed=stats.l2_pages,
            leases=self.leases,
            copies=stats.tickets,
        )

    @property
    def live(self) -> frozenset[Lease]:
        """The leases that have not ended."""
        return frozenset(self._live)

    def _roomiest(self) -> int:
        """The lane with the most free pages, so that short prompts do not all go to the first."""
        return max(range(self.ranks), key=lambda rank: (self.lanes.free_in(rank), -rank))

    def check_integrity(self) -> None:
        """IntegrityError unless lanes, tree and their sums agree."""
        self.lanes.check_integrity()
        self.tree.check_integrity()
        stats = self.tree.stats()
        free = self.lanes.free_pages + self.held_pages()
        own = sum(len(lease.own) for lease in self._live)
        if free + stats.l1_pages + own > self.pages:
            raise IntegrityError(
                f"L1: {free} free, {stats.l1_pages} cached and {own} leased of {self.pages} pages"
            )
        if not self._live and free + stats.l1_pages != self.pages:
            raise IntegrityError(
                f"L1: {free} free and {stats.l1_pages} cached of {self.pages} pages, nothing leased"
            )
        if stats.pins > len(self._live):
            raise IntegrityError(f"L1: {stats.pins} pins of {len(self._live)} leases")

    def held_pages(self) -> int:
        """Pages that are neither free nor leased nor cached."""
        return 0
