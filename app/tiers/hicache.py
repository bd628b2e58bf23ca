"""L1 and L2 under one tree: a prefix is computed once, kept in both tiers, and comes back layer by layer.

    find      L1 hits as they are; L2 hits start to load          lease.wait(layer) before each read
    reserve   before the forward: pages of L2 for what `keep` will add
    chunk     before each chunk's forward; its layer_end after each layer
    finish    after the forward; then keep
    end       at any time, also in the middle: what was not sent is given up

Every decision is made on one thread. Copies end on threads of their queues, and `post` brings that over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from app.core.ids import PageArray
from app.core.prefix_tree import DEFAULT_POLICY, Inserted, Namespace
from app.core.prefix_tree import Policy as Eviction
from app.errors import BadInput, ClientGone, IntegrityError, KvferryError
from app.tiers.backup import Backups, ChunkBackup, Post, Reservation
from app.tiers.copy_queue import CopyQueue
from app.tiers.events import DeviceEvent
from app.tiers.flushed import Flushed
from app.tiers.hicache_report import Held, holds, report
from app.tiers.l2 import HostTier
from app.tiers.leases import Lease
from app.tiers.loadback import Loads
from app.tiers.lost import forsake, saved_owners
from app.tiers.page_checks import PageChecks
from app.tiers.prefix import PrefixCache, Tokens
from app.tiers.reads import TierReads
from app.tiers.writes import Policy, TierWrites

log = structlog.get_logger(__name__)

Later = Callable[[KvferryError | None], None]
"""Told once that a lease that had to wait has what there is for it, or why not."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Look:
    """A look-up that may have to be made again."""

    key: Tokens
    most: int
    after: Sequence[DeviceEvent]
    start: bool
    later: Later | None


class HiCache(PrefixCache):
    """Takes the place of a PrefixCache where there is an L2; the queues' copier knows the pools of both tiers.

    `freed` is called when pages have come back later than their lease ended: whoever waits for pages may get
    them now. The cache does not own pools and queues: close the queues first, then it is idle.
    """

    def __init__(
        self,
        *,
        backups: CopyQueue,
        loads: CopyQueue,
        post: Post,
        reuse: bool = True,
        grid: int | None = None,
        eviction: Eviction = DEFAULT_POLICY,
        policy: Policy = "write_through",
        selective_hits: int = 2,
        l1_room: float = 0.02,
        l2_room: float = 0.02,
        load_deadline_s: float = 30.0,
        strict: bool = False,
        checks: PageChecks | None = None,
        freed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        copier = loads.copier
        super().__init__(
            page_size=copier.geometry.page_size,
            pages=copier.l1_pages,
            ranks=copier.ranks,
            reuse=reuse,
            grid=grid,
            free_room=l1_room,
            l2_pages=copier.l2_pages,
            eviction=eviction,
            clock=clock,
        )
        self.freed = freed
        sources = tuple(dict.fromkeys(b.owner for b in copier.geometry.buffers))
        self.host = HostTier(
            self.tree,
            ranks=copier.ranks,
            pages=copier.l2_pages,
            sources=sources,
            free_room=l2_room,
            checks=checks,
        )
        self.backups = Backups(
            tree=self.tree,
            host=self.host,
            queue=backups,
            post=post,
            drained=self._drained,
            clock=clock,
        )
        self.loads = Loads(
            tree=self.tree,
            host=self.host,
            queue=loads,
            post=post,
            freed=self._returned,
            acks=self.backups.acks,
            deadline_s=load_deadline_s,
            strict=strict,
            clock=clock,
        )
        self.writes = TierWrites(
            self.tree, self.lanes, self.host, self.backups, policy=policy, selective_hits=selective_hits
        )
        self.reads = TierReads(
            self.tree, self.lanes, self.host, self.loads, self._take, self.writes.write_back
        )
        self.l2_hit_tokens = 0
        self.waiting: dict[Lease, _Look] = {}
        """Leases whose load needs room that is being written back."""
        self.late: list[tuple[PageArray, tuple[Reservation, ...]]] = []
        """Pages of ended leases, and the backups that still read them."""

    # ------------------------------------------------------------------ look up and load

    def find(
        self,
        space: Namespace,
        tokens: Sequence[int],
        *,
        most: int,
        after: Sequence[DeviceEvent] = (),
        start: bool = True,
        later: Later | None = None,
    ) -> Lease:
        """A lease on what both tiers have of a prompt; what is in L2 only is on its way to L1 when it returns.

        `after` are events of whoever read the pages of L1 last. With `start=False` the loads of several prompts
        wait for `start_loads`, and make one batch. Under write-back the room for a load may be on its way to L2:
        with `later` the lease then `waits_for` that, has no pages yet, and `later` is called when the load was
        tried once more. Without it such a hit is a miss.
        """
        lease = self._open(space, tokens)
        if not self.reuse:
            return lease
        self.looked_up_tokens += len(tokens)
        key = lease.prompt[: most + space.bigrams]
        look = _Look(key=key, most=most, after=after, start=start, later=later)
        try:
            self._look(lease, look, may_wait=later is not None)
        except BaseException:
            self.end(lease)
            raise
        if lease.waits_for:
            self.waiting[lease] = look
        return lease

    def _look(self, lease: Lease, look: _Look, *, may_wait: bool) -> None:
        assert lease.space is not None
        key, most = look.key, look.most
        found = self.tree.match(lease.space, key, floor=True, touch=False)
        l1, usable = self.on_grid(min(found.l1_tokens, most)), self.on_grid(min(found.tokens, most))
        if usable > l1:
            usable = self.on_grid(min(usable, self.reads.sound(found.node)))
        if usable > l1 and self.reads.load(lease, key, usable, look.after, may_wait=may_wait):
            self.l2_hit_tokens += lease.l2_tokens
            self.hit_tokens += usable - lease.l2_tokens
            if look.start:
                self.start_loads()
        elif lease.waits_for:
            return
        else:
            self._reuse(lease, key, l1)
        self.writes.used(lease.node, lease.prefix)

    def resume(self, lease: Lease) -> None:
        """Try the load of a lease that waits once more, with the room that there is by now, and tell it."""
        look = self.waiting.pop(lease, None)
        if look is None:
            return
        assert look.later is not None
        self.tree.unpin(lease.node)  # found again before anything else can happen to it
        lease.node, lease.waits_for = 0, ()
        try:
            self._look(lease, look, may_wait=False)
        except KvferryError as error:
            look.later(error)
        else:
            look.later(None)

    def start_loads(self) -> None:
        """Send off what was found with `start=False`, as one batch."""
        self.loads.start()

    def forsake(self, lease: Lease) -> int:
        """A load has failed: let go of the prefix from its first page on. The number of pages that are missing now."""
        missing = forsake(self, lease)
        self.loads.counters.recomputed += 1
        self.loads.counters.recomputed_tokens += missing * self.page_size
        return missing

    def _saved_owners(self, lease: Lease) -> npt.NDArray[np.int8]:
        return saved_owners(self, lease)

    # ------------------------------------------------------------------ back up

    def reserve(self, lease: Lease, tokens: Sequence[int], pages: PageArray) -> Reservation | None:
        """Before the forward: L2 pages for what `keep(lease, tokens, pages)` will add to the tree.

        `pages` is the page table, as for `keep`. None when there is nothing to add, another policy is set, or
        L2 has no room: the prompt is then not backed up.
        """
        if not self.reuse or lease.space is None or lease.ended:
            return None
        key, whole = self.whole(lease.space, tokens)
        made = self.writes.reserve(lease.space, key, pages[:whole]) if whole else None
        if made is not None:
            made.doubt = lambda: lease.failed
            lease.backups.append(made)
        return made

    def chunk(self, ranges: Sequence[tuple[Reservation, int, int]]) -> ChunkBackup:
        """The part of a batch that one forward writes: (reservation, first page, page behind the last whole one)."""
        return self.backups.chunk(ranges)

    def finish(self, reservation: Reservation, after: Sequence[DeviceEvent] = ()) -> None:
        """The forward ended well, and every row of the reserved pages is written."""
        self.backups.finish(reservation, after)

    # ------------------------------------------------------------------ keep and end

    def keep(self, lease: Lease, tokens: Sequence[int], pages: PageArray, *, back_up: bool = False) -> None:
        """As in L1. Nothing is kept that was computed on a prefix which did not arrive.

        `back_up` copies to L2 what no reservation did: for pages that came from elsewhere than a forward here.
        """
        if not lease.loaded:
            log.debug("keep.refused", reason="the prefix was not loaded", failed=str(lease.failed))
            return
        super().keep(lease, tokens, pages)
        if back_up and self.writes.policy == "write_through" and lease.node and not lease.ended:
            self.writes.back_up(lease.node)

    def _insert(self, space: Namespace, key: Tokens, pages: PageArray) -> Inserted | None:
        done = super()._insert(space, key, pages)
        if done is not None:
            self.host.release(done.freed_l2)
        return done

    def end(self, lease: Lease) -> None:
        """Let go of everything, once. Own pages that a backup still reads come back when it is quiet."""
        if lease.ended:
            raise BadInput("a lease was ended twice")
        self.waiting.pop(lease, None)
        for reservation in lease.backups:
            if not reservation.complete:
                self.backups.abort(reservation, ClientGone("its request ended before its forward"))
        reading = tuple(reservation for reservation in lease.backups if reservation.moving)
        if reading:
            kept = np.isin(lease.own, np.concatenate([reservation.l1 for reservation in reading]))
            if kept.any():
                self.late.append((lease.own[kept], reading))
                lease.own = lease.own[~kept]
        super().end(lease)
        for load in lease.loads:
            self.loads.leave(load)

    def _drained(self) -> None:
        """Some reservation fell quiet: its pages may come back."""
        back = self.writes.write_back
        if back is not None:
            back.settled()
            if back.choosing:  # refused at once: nobody gets pages in the middle of a choice
                self.backups.post(self._drained)
                return
        late, self.late = self.late, []
        for pages, reading in late:
            if any(reservation.moving for reservation in reading):
                self.late.append((pages, reading))
            else:
                self._give_back(pages)
        if back is not None:
            # whoever made this room needs it: before anybody else gets it
            for lease in [one for one in self.waiting if all(of.settled for of in one.waits_for)]:
                self.resume(lease)
            self.evict_to_target()  # it had to wait for this
        self.freed()

    def _returned(self, pages: PageArray) -> None:
        self._give_back(pages)
        self.freed()

    def _give_back(self, pages: PageArray) -> None:
        super()._give_back(pages)
        self.writes.forget(pages)

    def held_pages(self) -> int:
        return sum(len(pages) for pages, _ in self.late)

    # ------------------------------------------------------------------ room, purge, flush

    def _evict(self, wanted: npt.NDArray[np.int64]) -> int:
        """Under write-back only what is in L2 or cannot get there; `freed` tells of the rest."""
        back = self.writes.write_back
        return super()._evict(wanted if back is None else back.ready(wanted))

    def make_room(self) -> int:
        """Restore the free room of both tiers: for a task in the background. The pages that were evicted."""
        return self.evict_to_target() + self.host.evict_to_target()

    def purge(self, space: Namespace) -> Flushed:
        """Forget a namespace, in both tiers, but for what is held."""
        gone = self.tree.clear(space)
        self._returned(gone.l1)
        self.host.release(gone.l2)
        return self.flushed(len(gone.l1), len(gone.l2))

    def flush(self, *, l1_only: bool = False) -> Flushed:
        l2 = 0 if l1_only else self.host.flush()  # first: it may refuse
        l1 = self.tree.evict(1, self.pages)
        self._returned(l1)
        return self.flushed(len(l1), l2)

    def holds(self) -> list[Held]:
        """What copies may still touch, oldest first."""
        return holds(self)

    def give_up(self, older_s: float) -> int:
        """Take copies of which nothing was heard for that long as lost. How many nodes and batches were.

        `older_s` has to be longer than any copy can take to land: their pages are handed out again.
        """
        before = self.clock() - older_s
        backups = [of for of in self.backups.open if of.moving and of.since_s < before]
        loads = [load for load in self.loads.open if load.moving and load.since_s < before]
        for of in backups:
            self.backups.give_up(of)
        for load in loads:
            self.loads.give_up(load)
        return len(backups) + len(loads)

    def report(self) -> dict[str, Any]:
        """For GET /cache: plain values."""
        return report(self)

    def check_integrity(self) -> None:
        """IntegrityError unless lanes, tree, copies in flight and their sums agree, in both tiers."""
        super().check_integrity()
        self.host.check_integrity()
        self.backups.check_integrity()
        self.loads.check_integrity()
        tickets = self.tree.stats().tickets
        known = len(self.backups.open) + len(self.loads.by_ticket)
        if tickets != known:
            raise IntegrityError(f"{tickets} copies in the tree, {known} are known here")
