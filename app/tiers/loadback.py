"""Loads: L2 pages back to L1, layer by layer ahead of the forward.

    begin --> start: one descriptor, one copy for each layer and source --> all quiet
                                                  | all landed: acknowledged, in L1 and L2
                                                  ` a failure: its leases end, then cancelled, L1 pages back

Decisions are the loop's; `wait` is the forward thread's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import structlog

from app.core.ids import PageArray, Source
from app.core.prefix_tree import PrefixTree
from app.errors import Corruption, DeadlineExceeded, IllegalTransition, IntegrityError, KvferryError
from app.tiers.backup import Post
from app.tiers.copy_queue import CopyQueue
from app.tiers.descriptors import PagePairs
from app.tiers.events import DeviceEvent
from app.tiers.l2 import HostTier
from app.tiers.prepared import LayerReadiness, PreparedLoadDescriptor, start_load
from app.tiers.tickets import CopyTicket

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadPart:
    """One ticket of a batch: what it loads, node by node, and where to."""

    ticket: int
    nodes: tuple[tuple[PageArray, PageArray], ...]
    """(L1 pages, L2 pages)."""


@dataclass(eq=False, kw_only=True)
class Load:
    """One batch on its way. Leases that use it are counted: what failed stays theirs until they have ended."""

    since_s: float
    host: HostTier
    layers: tuple[int, ...]
    parts: list[LoadPart] = field(default_factory=list)
    after: list[DeviceEvent] = field(default_factory=list)
    pairs: PagePairs | None = None
    readiness: LayerReadiness | None = None
    users: int = 0
    moving: int = 0
    error: KvferryError | None = None
    settled: bool = False
    corrupt: set[int] = field(default_factory=set)
    """L2 pages whose bytes did not come back as they went."""
    _checked: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, layer: int) -> None:
        """Block until the layer is there: KV and state, target and draft. Raises what made the load fail."""
        if self.error is not None:
            raise self.error
        if self.settled:
            return
        if self.readiness is None:
            raise IllegalTransition("the load was not started", layer=layer)
        with self._in_time():
            self.readiness.wait(layer)
        self.check(layer)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """A load that somebody has waited for in vain has failed, for all: what lands later is used by nobody."""
        try:
            yield
        except DeadlineExceeded as error:
            self.error = self.error or error
            raise

    def confirm(self, timeout_s: float) -> None:
        """Block until every byte has landed, whoever has read it or not. Raises what made the load fail."""
        until = time.monotonic() + timeout_s
        for layer in self.layers:
            self.wait(layer)
        with self._in_time():
            for ticket in () if self.readiness is None else self.readiness.tickets:
                ticket.wait(max(0.0, until - time.monotonic()))

    def check(self, layer: int) -> None:
        """Compare the digests of a layer that is there, once. Corruption where they differ."""
        checks = self.host.checks
        if checks is None or self.pairs is None:
            return
        with self._lock:
            if layer not in self._checked:
                self.corrupt.update(checks.differing(self.pairs.l1, self.pairs.l2, layer))
                self._checked.add(layer)
            if self.corrupt:
                page = min(self.corrupt)
                self.error = self.error or Corruption(
                    f"page {page} of L2 has changed since it was written", layer=layer, page=page, buffer="l2"
                )
                raise self.error

    @property
    def failed(self) -> KvferryError | None:
        if self.error is not None or self.readiness is None:
            return self.error
        errors = (ticket.error for ticket in self.readiness.tickets if ticket.done)
        return self.readiness.failure or next((error for error in errors if error is not None), None)

    @property
    def landed(self) -> bool:
        """Whether every byte is there and right, acknowledged or not."""
        if self.settled:
            return self.error is None
        if self.readiness is None or self.failed is not None:
            return False
        return all(ticket.done for ticket in self.readiness.tickets)


@dataclass(kw_only=True)
class LoadCounters:
    loads: int = 0
    """Batches that were started."""
    misses: int = 0
    """Hits in L2 for which L1 had no room."""
    failed: int = 0
    corrupt_pages: int = 0
    recomputed: int = 0
    """Requests that computed what a failed load had not brought."""
    recomputed_tokens: int = 0


@dataclass(eq=False, kw_only=True)
class Loads:
    """All loads of a node that have not settled. `freed` gets L1 pages that a failed load had taken."""

    tree: PrefixTree
    host: HostTier
    queue: CopyQueue
    post: Post
    freed: Callable[[PageArray], None]
    acks: int
    deadline_s: float
    strict: bool = False
    clock: Callable[[], float] = time.monotonic
    counters: LoadCounters = field(default_factory=LoadCounters)
    by_ticket: dict[int, Load] = field(default_factory=dict)
    _batch: Load | None = None

    @property
    def open(self) -> set[Load]:
        return set(self.by_ticket.values())

    def add(self, part: LoadPart, after: Sequence[DeviceEvent] = ()) -> Load:
        """Put a ticket of the tree into the batch that the next `start` sends off."""
        if self._batch is None:
            layers = self.queue.copier.geometry.layers
            self._batch = Load(since_s=self.clock(), host=self.host, layers=layers)
        self._batch.parts.append(part)
        self._batch.after += [event for event in after if event not in self._batch.after]
        self.by_ticket[part.ticket] = self._batch
        return self._batch

    def start(self) -> None:
        """Begin, submit and end one descriptor for all tickets since the last start. A failure is the load's."""
        load, self._batch = self._batch, None
        if load is None:
            return
        self.counters.loads += 1
        sources: tuple[Source, ...] = ("target", "draft")
        try:
            pairs = PagePairs.of([node for part in load.parts for node in part.nodes])
            load.pairs = pairs
            descriptor = PreparedLoadDescriptor.begin(
                self.queue.copier, pairs, batch=load.parts[0].ticket, strict=self.strict
            )
            load.readiness = start_load(
                descriptor,
                self.queue,
                deadline_s=self.deadline_s,
                sources=sources,
                after=load.after,
                on_quiet=lambda ticket: self.post(partial(self._quiet, load, ticket)),
            )
        except KvferryError as error:
            load.error = error
        else:
            load.moving = len(load.readiness.tickets)
            load.error = load.readiness.failure
        self._settle(load)

    def join(self, load: Load) -> Load:
        load.users += 1
        return load

    def leave(self, load: Load) -> None:
        """A lease that used it has ended. A batch that nobody wants any more is never started."""
        load.users -= 1
        if load is self._batch and not load.users:
            self._batch = None
            load.error = IllegalTransition("the load was given up before its start")
        self._settle(load)

    def give_up(self, load: Load) -> None:
        """Treat lost copies as quiet: the caller's deadline is longer than any landing. Later words are ignored."""
        load.error = load.error or DeadlineExceeded("a load was lost")
        load.moving = 0
        self._settle(load)

    def _quiet(self, load: Load, ticket: CopyTicket) -> None:
        if load.settled or not load.moving:
            return  # given up: a word that comes too late
        load.moving -= 1
        if ticket.error is not None and load.error is None:
            load.error = ticket.error
        self._settle(load)

    def _settle(self, load: Load) -> None:
        if load.settled or load.moving or load is self._batch:
            return
        if load.error is None:
            try:
                for layer in load.layers:
                    load.check(layer)
            except Corruption as error:
                log.error("load.corrupt", pages=sorted(load.corrupt), reason=error.message)
        failed = load.error is not None  # read once: a forward's thread may find it late
        if failed and load.users:
            return  # the pages are in the page tables of requests that have yet to end
        load.settled = True
        for part in load.parts:
            del self.by_ticket[part.ticket]
            if failed:
                self.freed(self.tree.cancel(part.ticket).pages)
            else:
                for _ in range(self.acks):
                    self.tree.acknowledge(part.ticket)
        if failed:
            self.counters.failed += 1
            self.counters.corrupt_pages += len(load.corrupt)
            self.host.spoil(sorted(load.corrupt))

    def check_integrity(self) -> None:
        """IntegrityError when a load's counts contradict each other."""
        for load in self.open:
            if load.moving < 0 or load.users < 0 or load.settled:
                raise IntegrityError(f"a load: {load.moving} moving, {load.users} users")
