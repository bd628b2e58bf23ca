"""Copies in the background, first in, first out.

    submit --> [ jobs ] --> worker: waits for `after`, moves (CPU) or enqueues (CUDA)
                              | CPU: ended               | CUDA: events
                              v                          v
                            ticket <---------------- reaper: waits for the events, in order

A node has one queue for backups and one for loads, so that a load never stands behind a backup. On CUDA the
worker enqueues ahead of what the device has done, and a second thread tells of the ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

import structlog

from app.core.ids import Source
from app.errors import DeadlineExceeded, IntegrityError, KvferryError, NotReady, TransferFailed
from app.tiers.copiers import LayerCopier
from app.tiers.copy_faults import CopyFault, FaultPlan
from app.tiers.descriptors import Direction, LayerCopy, PagePairs, layer_copies
from app.tiers.events import DeviceEvent
from app.tiers.tickets import CopyTicket, Notice

log = structlog.get_logger(__name__)

_GOOD = CopyFault()
_TELLING_S = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    ticket: CopyTicket
    after: tuple[DeviceEvent, ...]


class CopyQueue:
    """Runs copies of a copier in order. `faults` stands for an engine that is slow, fails or loses copies."""

    def __init__(self, copier: LayerCopier, *, name: str = "copies", faults: FaultPlan | None = None) -> None:
        self.copier = copier
        self.name = name
        self.submitted = self.ended = self.quiet = 0
        self._faults = faults
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._issued: SimpleQueue[tuple[CopyTicket, tuple[DeviceEvent, ...]] | None] = SimpleQueue()
        self._open: set[CopyTicket] = set()
        self._timers: set[threading.Timer] = set()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._work, name=f"kvferry-{name}", daemon=True)]
        if copier.on_device:
            self._threads.append(
                threading.Thread(target=self._reap, name=f"kvferry-{name}-ends", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        copy: LayerCopy,
        *,
        after: Sequence[DeviceEvent] = (),
        on_end: Notice | None = None,
        on_quiet: Notice | None = None,
    ) -> CopyTicket:
        """Queue a copy that starts once every event of `after` has happened; returns at once.

        `after` is a layer's end for a backup, and for a load the last reader of the pages that it writes. Errors
        of the copy itself are the ticket's. Raises NotReady when the queue is closed, IllegalTransition when the
        copy's prepared mapping has ended, BadInput when its source stores nothing of its layer.
        """
        if copy.lifetime is not None:
            copy.lifetime.require_open()
        self.copier.buffers(copy.source, copy.layer)
        ticket = CopyTicket(copy, on_end=on_end, on_quiet=on_quiet)
        with self._changed:
            if self._closing.is_set():
                raise NotReady(f"the queue of {self.name} is closed")
            self.submitted += 1
            self._open.add(ticket)
            self._jobs.put(_Job(ticket=ticket, after=tuple(after)))
        self.copier.statistics.submitted(copy.direction, copy.source)
        return ticket

    @property
    def pending(self) -> int:
        """Copies whose outcome is unknown."""
        with self._changed:
            return self.submitted - self.ended

    @property
    def moving(self) -> int:
        """Copies of which bytes may still move."""
        with self._changed:
            return self.submitted - self.quiet

    def drain(self, timeout_s: float) -> None:
        """Block until nothing moves any more and every notice has been given. DeadlineExceeded when something does."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.submitted == self.quiet, timeout_s):
                raise DeadlineExceeded(
                    f"{self.submitted - self.quiet} {self.name} have not ended within {timeout_s} s"
                )

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop: the copy at work ends, those that wait fail with NotReady, and afterwards nothing moves.

        DeadlineExceeded when a thread is stuck (in an event that never happens, say): the pools must then stay.
        """
        with self._changed:
            if not self._closing.is_set():
                self._closing.set()
                self._jobs.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                raise DeadlineExceeded(f"{thread.name} has not stopped within {timeout_s} s")
        with self._changed:
            timers = list(self._timers)
        for timer in timers:
            timer.cancel()
            timer.join()
        for ticket in list(self._open):  # what was lost, or was to land
            if not ticket.done:
                self._end(ticket, NotReady(f"the queue of {self.name} was closed"))
            self._fall_quiet(ticket)

    def check_integrity(self) -> None:
        """IntegrityError when the counts and the open tickets contradict each other."""
        with self._changed:
            # a worker tells of a quiet ticket before it takes it out: it is given the time for that
            self._changed.wait_for(lambda: not any(t.quiet for t in self._open), _TELLING_S)
            counts = (self.submitted, self.ended, self.quiet)
            tickets = list(self._open)
        wrong = [t for t in tickets if t.quiet]
        if not counts[0] >= counts[1] >= counts[2] or counts[0] - counts[2] != len(tickets) or wrong:
            raise IntegrityError(
                f"{self.name}: {counts} submitted, ended, quiet; {len(tickets)} open, {len(wrong)} of them quiet"
            )

    def __enter__(self) -> CopyQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # the worker

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(job.ticket, job.after)
        self._issued.put(None)

    def _run(self, ticket: CopyTicket, after: tuple[DeviceEvent, ...]) -> None:
        fault, error = _GOOD, None
        events: tuple[DeviceEvent, ...] = ()
        try:
            fault = (self._faults(ticket.copy) if self._faults else None) or _GOOD
            if fault.delay_s:
                self._closing.wait(fault.delay_s)
            if self._closing.is_set():
                raise NotReady(f"the queue of {self.name} was closed")
            if fault.error is not None:
                error = fault.error
            elif fault.lands_after_s is None:
                events = self.copier.issue(ticket.copy, after)
        except Exception as failure:
            fault, error = _GOOD, _typed(failure, ticket.copy)
        if error is None and events and not fault.lost:
            ticket.issued(events)
            self._issued.put((ticket, events))
            return
        if not fault.lost:
            self._end(ticket, error)
        if fault.lands_after_s is not None:
            self._land_later(ticket, fault)
        elif not fault.lost:
            self._fall_quiet(ticket)

    def _reap(self) -> None:
        while (issued := self._issued.get()) is not None:
            ticket, events = issued
            error = None
            try:
                for event in events:
                    event.synchronize()
            except Exception as failure:
                error = _typed(failure, ticket.copy)
            self._end(ticket, error)
            self._fall_quiet(ticket)

    def _land_later(self, ticket: CopyTicket, fault: CopyFault) -> None:
        assert fault.lands_after_s is not None

        def land() -> None:
            try:
                for event in self.copier.issue(ticket.copy):
                    event.synchronize()
            except Exception:
                log.exception("a late copy failed", copy=str(ticket.copy))
            if not fault.lost:
                self._fall_quiet(ticket)
            with self._changed:
                self._timers.discard(timer)

        timer = threading.Timer(fault.lands_after_s, land)
        timer.daemon = True
        with self._changed:
            self._timers.add(timer)
        timer.start()

    def _end(self, ticket: CopyTicket, error: KvferryError | None) -> None:
        ticket.end(error)
        with self._changed:
            self.ended += 1
            self._changed.notify_all()

    def _fall_quiet(self, ticket: CopyTicket) -> None:
        ticket.fall_quiet()
        with self._changed:
            self.quiet += 1
            self._open.discard(ticket)
            self._changed.notify_all()


def submit_all_layers(
    queue: CopyQueue, direction: Direction, pairs: PagePairs, sources: Sequence[Source] = ("target", "draft")
) -> list[CopyTicket]:
    """Every layer at once, as a loop over the copies of single layers: what is left where no layer fires a hook.

    An explicit fallback: it hides nothing behind the forward, and says so each time.
    """
    layers = queue.copier.geometry.layers
    log.warning(
        "all layers are copied at once, without the layers' ends",
        direction=direction,
        layers=len(layers),
        pages=len(pairs),
    )
    mapping = queue.copier.map(pairs, direction)
    return [
        queue.submit(copy)
        for layer in layers
        for copy in layer_copies(
            direction, layer, pairs, [s for s in queue.copier.sources(layer) if s in sources], mapping=mapping
        )
    ]


def _typed(failure: Exception, copy: LayerCopy) -> KvferryError:
    if isinstance(failure, KvferryError):
        return failure
    error = TransferFailed(f"{copy} failed: {failure}", layer=copy.layer)
    error.__cause__ = failure
    return error
