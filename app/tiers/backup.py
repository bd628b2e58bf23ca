"""Backups: L1 pages to L2, layer by layer while the forward writes them.

    open --> layer ends, chunk by chunk --> all sent --> all quiet --> target acknowledged, draft acknowledged --> L2
               |  failure, abort
               `--> nothing more is submitted --> all quiet --> cancelled, L2 pages back

A copy serves all reservations of a batch; pages, acknowledgement and rollback stay each reservation's own. All of
it runs on one thread: copies tell of their ends on threads of the queue, and `post` brings that over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import structlog

from app.core.ids import PageArray, Source
from app.core.prefix_tree import PrefixTree
from app.errors import DeadlineExceeded, IntegrityError, KvferryError
from app.tiers.copy_queue import CopyQueue
from app.tiers.descriptors import LayerCopy, PageMapping, PagePairs
from app.tiers.events import DeviceEvent
from app.tiers.l2 import HostTier
from app.tiers.tickets import CopyTicket

log = structlog.get_logger(__name__)

Post = Callable[[Callable[[], None]], None]
"""Runs a callback on the deciding thread, soon and in order; called from any thread (call_soon_threadsafe)."""
Unit = tuple[Source, int]
"""A source and a layer of which it stores something: what one copy moves."""


@dataclass(eq=False, kw_only=True)
class Reservation:
    """The backup of one node: its ticket in the tree, its page pairs, and how far its copies are."""

    ticket: int
    first: int
    """Position of its first page in the prompt."""
    l1: PageArray
    l2: PageArray
    sent: npt.NDArray[np.bool_]
    """[units, pages]: which copies were submitted."""
    left: dict[Source, int]
    """(layer, page) of each source whose copy has not succeeded yet."""
    since_s: float
    moving: int = 0
    """Copies that may still touch its pages."""
    error: KvferryError | None = None
    settled: bool = False
    """Visible, or rolled back."""
    doubt: Callable[[], KvferryError | None] = lambda: None
    """Asked at the last moment: why what was copied must not be seen, a prefix that did not arrive, say."""

    @property
    def complete(self) -> bool:
        """Whether every copy was submitted."""
        return bool(self.sent.all())

    @property
    def open(self) -> bool:
        return self.error is None and not self.settled


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """The pages of a reservation that one chunk writes: indices start..stop of its lists."""

    of: Reservation
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(kw_only=True)
class BackupCounters:
    backups: int = 0
    """Nodes that became visible in L2."""
    skipped: int = 0
    """Nodes for which L2 had no room, or whose parent is not there."""
    rolled_back: int = 0
    dropped: int = 0
    """Nodes that L1 gave up under write-back before L2 had them: no room there, or a failed copy."""
    fallbacks: int = 0
    """Reservations of which layers had to be copied without a layer's end."""


class ChunkBackup:
    """A chunk of a batch. The mapping is built once and serves every layer, as long as no member falls away."""

    def __init__(self, backups: Backups, pieces: Sequence[Piece]) -> None:
        self._backups = backups
        self._pieces = tuple(piece for piece in pieces if len(piece))
        self._fired: set[Unit] = set()
        self._mapped: tuple[tuple[Piece, ...], PagePairs, PageMapping] | None = None

    def layer_end(self, source: Source, layer: int, after: Sequence[DeviceEvent] = ()) -> None:
        """`source` has written its rows of `layer`, once the events have happened: one copy for all members.

        A second end of the same layer does nothing, and neither does a layer of which the source stores nothing.
        """
        unit = (source, layer)
        if unit in self._fired or unit not in self._backups.index:
            return
        self._fired.add(unit)
        number = self._backups.index[unit]
        members = tuple(
            piece
            for piece in self._pieces
            if piece.of.open and not piece.of.sent[number, piece.start : piece.stop].any()
        )
        if not members:
            return
        if self._mapped is None or self._mapped[0] != members:
            # whoever was given up must not be copied any more: its pages may be another's before long
            pairs = PagePairs.of([(p.of.l1[p.start : p.stop], p.of.l2[p.start : p.stop]) for p in members])
            self._mapped = members, pairs, self._backups.queue.copier.map(pairs, "backup")
        _, pairs, mapping = self._mapped
        self._backups.submit(members, unit, pairs, mapping, after)


@dataclass(eq=False, kw_only=True)
class Backups:
    """All backups of a node that have not settled. `drained` hears of each reservation that fell quiet."""

    tree: PrefixTree
    host: HostTier
    queue: CopyQueue
    post: Post
    drained: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    counters: BackupCounters = field(default_factory=BackupCounters)
    open: set[Reservation] = field(default_factory=set)

    def __post_init__(self) -> None:
        copier = self.queue.copier
        units = [(source, layer) for layer in copier.geometry.layers for source in copier.sources(layer)]
        self.index: dict[Unit, int] = {unit: number for number, unit in enumerate(units)}
        self.sources: tuple[Source, ...] = tuple(
            source for source in ("target", "draft") if any(s == source for s, _ in units)
        )

    @property
    def acks(self) -> int:
        return len(self.sources)

    # ------------------------------------------------------------------ copies

    def begin(self, ticket: int, first: int, l1: PageArray, l2: PageArray) -> Reservation:
        """Follow a ticket of the tree: page l1[i] of the prompt's position first + i goes to l2[i]."""
        made = Reservation(
            ticket=ticket,
            first=first,
            l1=np.array(l1, dtype=np.int64),
            l2=np.array(l2, dtype=np.int64),
            sent=np.zeros((len(self.index), len(l1)), dtype=bool),
            left={s: len(l1) * sum(s == source for source, _ in self.index) for s in self.sources},
            since_s=self.clock(),
        )
        self.open.add(made)
        return made

    def chunk(self, ranges: Sequence[tuple[Reservation, int, int]]) -> ChunkBackup:
        """What a forward is about to write: (reservation, first page, page behind the last) of each prompt.

        Positions are the prompt's. Only whole pages count: those that no later chunk of the prompt writes to.
        """
        pieces = []
        for of, first, end in ranges:
            start, stop = max(first - of.first, 0), min(end - of.first, len(of.l1))
            already = np.flatnonzero(of.sent[:, start : max(stop, start)].any(axis=0))
            if len(already):
                start += int(already[-1]) + 1
            pieces.append(Piece(of=of, start=start, stop=max(stop, start)))
        return ChunkBackup(self, pieces)

    def submit(
        self,
        members: Sequence[Piece],
        unit: Unit,
        pairs: PagePairs,
        mapping: PageMapping,
        after: Sequence[DeviceEvent] = (),
    ) -> None:
        """One copy for all members. When the queue refuses it they fail."""
        copy = LayerCopy(direction="backup", source=unit[0], layer=unit[1], pairs=pairs, mapping=mapping)

        def ended(ticket: CopyTicket) -> None:
            if ticket.error is not None:
                self.post(partial(self._fail, members, ticket.error))

        def quiet(ticket: CopyTicket) -> None:
            self.post(partial(self._quiet, members, unit[0], ticket))

        try:
            self.queue.submit(copy, after=after, on_end=ended, on_quiet=quiet)
        except KvferryError as error:
            self._fail(members, error)
            return
        now = self.clock()
        for piece in members:
            piece.of.sent[self.index[unit], piece.start : piece.stop] = True
            piece.of.moving += 1
            piece.of.since_s = now

    def finish(self, of: Reservation, after: Sequence[DeviceEvent] = ()) -> None:
        """The forward has ended well. What no layer's end has brought is copied now, with a warning."""
        if not of.open or of.complete:
            return
        missing = [unit for unit, number in self.index.items() if not of.sent[number].all()]
        log.warning("layers are copied at once, without their ends", layers=len(missing), pages=len(of.l1))
        self.counters.fallbacks += 1
        for unit in missing:
            places = np.flatnonzero(~of.sent[self.index[unit]])
            for stretch in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
                self.send((Piece(of=of, start=int(stretch[0]), stop=int(stretch[-1]) + 1),), (unit,), after)

    def send(
        self, pieces: Sequence[Piece], units: Sequence[Unit] | None = None, after: Sequence[DeviceEvent] = ()
    ) -> None:
        """Copy pages that are written already: every layer, unless `units` names some."""
        pairs = PagePairs.of([(p.of.l1[p.start : p.stop], p.of.l2[p.start : p.stop]) for p in pieces])
        mapping = self.queue.copier.map(pairs, "backup")
        for unit in self.index if units is None else units:
            members = [piece for piece in pieces if piece.of.open]
            if len(members) == len(pieces):
                self.submit(members, unit, pairs, mapping, after)

    # ------------------------------------------------------------------ ends

    def abort(self, of: Reservation, error: KvferryError) -> None:
        """Submit nothing more of it: it rolls back when its copies are quiet, if it has not settled."""
        if of.open:
            of.error = error
            self._advance(of)

    def give_up(self, of: Reservation) -> None:
        """Treat lost copies as quiet: the caller's deadline is longer than any landing. Later words are ignored."""
        self.abort(of, DeadlineExceeded(f"a backup of {len(of.l1)} pages was lost"))
        of.moving = 0
        self._advance(of)

    def _fail(self, members: Sequence[Piece], error: KvferryError) -> None:
        for piece in members:
            if piece.of.open:
                log.debug("backup.failed", pages=len(piece.of.l1), reason=error.message)
            self.abort(piece.of, error)

    def _quiet(self, members: Sequence[Piece], source: Source, ticket: CopyTicket) -> None:
        for piece in members:
            of = piece.of
            if of.settled:
                continue  # given up: a word that comes too late
            of.moving -= 1
            if ticket.error is None and of.open:
                of.left[source] -= len(piece)
                if not of.left[source]:
                    self._acknowledge(of, source)
            self._advance(of)

    def _acknowledge(self, of: Reservation, source: Source) -> None:
        last = not any(of.left.values())
        reason = of.doubt() if last else None
        if reason is not None:
            self.abort(of, reason)
            return
        self.host.written(of.l2, source)
        if last and self.host.checks is not None:
            self.host.checks.record(of.l1, of.l2)
        self.tree.acknowledge(of.ticket)
        if last:
            of.settled = True
            self.counters.backups += 1

    def _advance(self, of: Reservation) -> None:
        if of.moving:
            return
        if of.error is not None and not of.settled:
            of.settled = True
            self.host.release(self.tree.cancel(of.ticket).pages, unwritten=True)
            self.counters.rolled_back += 1
        if of.settled:
            self.open.discard(of)
        self.drained()

    def check_integrity(self) -> None:
        """IntegrityError when a reservation's counts contradict each other."""
        for of in self.open:
            left = sum(of.left.values())
            if of.moving < 0 or of.settled or left > of.sent.size or (of.moving and not of.sent.any()):
                raise IntegrityError(f"a backup of {len(of.l1)} pages: {of.moving} moving, {left} left")
