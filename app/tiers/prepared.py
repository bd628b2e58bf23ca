"""A batch's load from L2: built once, one copy for each layer, and readiness for each layer.

    begin --> layer 0 --> layer 1 --> ... --> end          the mapping is the same object all the way
                |            |
                v            v
             ticket       ticket  --> LayerReadiness.wait(layer), inside every accessor of the forward

The forward of layer L starts when layer L is there, while later layers still load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final

import structlog

from app.core.ids import Source
from app.errors import (
    BadInput,
    DeadlineExceeded,
    IllegalTransition,
    IntegrityError,
    KvferryError,
    SettingsError,
)
from app.tiers.copiers import LayerCopier
from app.tiers.copy_queue import CopyQueue
from app.tiers.copy_statistics import CopyStatistics
from app.tiers.descriptors import LayerCopy, PagePairs
from app.tiers.events import DeviceEvent
from app.tiers.tickets import CopyTicket, Notice

log = structlog.get_logger(__name__)

STRICT_KEY: Final = "hicache.strict"


class PreparedLoadDescriptor:
    """The load of one batch. Build it with `begin`; `end` it once every layer has been submitted.

    Copies that were submitted before the end keep what they need. `builds` counts mappings: 1, whatever the
    number of layers, or 0 where the backend has no prepared loads and the copier builds one for every layer.
    """

    def __init__(self, copier: LayerCopier, pairs: PagePairs, *, batch: int, prepared: bool) -> None:
        self.batch = batch
        self.pairs = pairs
        self.builds = 0
        self._copier = copier
        self._mapping = None
        if prepared:
            self._mapping = copier.map(pairs, "load")
            self.builds = 1
        self._taken: set[tuple[Source, int]] = set()
        self._ended = False

    @classmethod
    def begin(
        cls, copier: LayerCopier, pairs: PagePairs, *, batch: int, strict: bool = False
    ) -> PreparedLoadDescriptor:
        """Build the layer-invariant mapping of a batch, whose number is the caller's.

        A backend without prepared loads is an explicit fallback, logged each time; SettingsError when `strict`.
        """
        prepared = copier.backend.prepared
        if not prepared:
            if strict:
                raise SettingsError(
                    f"{STRICT_KEY}: the copy backend {copier.backend.name} has no prepared loads"
                )
            log.warning("no prepared loads: built for each layer", backend=copier.backend.name, batch=batch)
        return cls(copier, pairs, batch=batch, prepared=prepared)

    @property
    def ended(self) -> bool:
        return self._ended

    def require_open(self) -> None:
        """IllegalTransition after the end: the pages may be another batch's."""
        if self._ended:
            raise IllegalTransition(f"the prepared load of batch {self.batch} has ended")

    def layer(self, source: Source, layer: int, *, batch: int) -> LayerCopy:
        """The copy of one layer, once. IllegalTransition after the end, for another batch, or a second time."""
        self.require_open()
        if batch != self.batch:
            raise IllegalTransition(f"the prepared load of batch {self.batch} was used for batch {batch}")
        if (source, layer) in self._taken:
            raise IllegalTransition(f"{source} layer {layer} of batch {batch} is loaded already", layer=layer)
        self._copier.buffers(source, layer)
        self._taken.add((source, layer))
        return LayerCopy(
            direction="load",
            source=source,
            layer=layer,
            pairs=self.pairs,
            mapping=self._mapping,
            lifetime=self,
        )

    def copies(self, sources: Sequence[Source] = ("target", "draft")) -> Iterator[LayerCopy]:
        """One copy for each layer and source that stores something of it, in the order of the forward."""
        for layer in self._copier.geometry.layers:
            for source in self._copier.sources(layer):
                if source in sources:
                    yield self.layer(source, layer, batch=self.batch)

    def end(self) -> None:
        """Release the mapping; twice is harmless."""
        self._ended = True
        self._mapping = None

    def __enter__(self) -> PreparedLoadDescriptor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class LayerReadiness:
    """Which layers of a load are there. The loop adds tickets, the forward thread waits.

    `copies` lists (source, layer) of every copy to come: a layer opens when all of its copies have landed, and
    one that is not listed is open. The deadline counts from the start of each wait, and is finite.
    """

    def __init__(
        self,
        copies: Iterable[tuple[Source, int]],
        *,
        deadline_s: float,
        statistics: CopyStatistics | None = None,
    ) -> None:
        if not 0 < deadline_s < float("inf"):
            raise BadInput(f"a wait needs a finite deadline, not {deadline_s}")
        self._deadline_s = deadline_s
        self._statistics = statistics
        self._missing: dict[int, set[Source]] = {}
        for source, layer in copies:
            self._missing.setdefault(layer, set()).add(source)
        self._tickets: dict[int, list[CopyTicket]] = {layer: [] for layer in self._missing}
        self._failure: KvferryError | None = None
        self._changed = threading.Condition()

    def add(self, ticket: CopyTicket) -> None:
        """The ticket of a listed copy. BadInput when it is not listed, or was added before."""
        copy = ticket.copy
        with self._changed:
            if copy.source not in self._missing.get(copy.layer, ()):
                raise BadInput(f"no {copy} was announced", layer=copy.layer)
            self._missing[copy.layer].remove(copy.source)
            self._tickets[copy.layer].append(ticket)
            self._changed.notify_all()

    def fail(self, error: KvferryError) -> None:
        """Copies that were announced will not come: waiters for their layers get this error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    @property
    def failure(self) -> KvferryError | None:
        """Why copies that were announced will not come. Errors of copies are their tickets'."""
        return self._failure

    @property
    def tickets(self) -> list[CopyTicket]:
        """Every ticket so far, in the order of the layers."""
        with self._changed:
            return [ticket for tickets in self._tickets.values() for ticket in tickets]

    def ready(self, layer: int) -> bool:
        """Whether every copy of a layer has landed."""
        with self._changed:
            return not self._missing.get(layer) and all(
                ticket.done and ticket.error is None for ticket in self._tickets.get(layer, ())
            )

    def wait(self, layer: int) -> None:
        """Block until the layer's KV and state are there, target and draft: for every accessor, before it reads.

        Raises the error of a copy that failed; DeadlineExceeded, naming the layer, when one is not over in time.
        Other layers are not waited for. On CUDA the caller's current stream waits in place of the thread.
        """
        if layer not in self._tickets:
            return
        start = time.monotonic()
        try:
            for ticket in self._announced(layer):
                ticket.join(max(0.0, start + self._deadline_s - time.monotonic()))
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"layer {layer} was not loaded within {self._deadline_s} s", layer=layer
            ) from error
        finally:
            if self._statistics is not None:
                self._statistics.timed("wait", time.monotonic() - start)

    def _announced(self, layer: int) -> list[CopyTicket]:
        with self._changed:
            self._changed.wait_for(lambda: not self._missing[layer] or self._failure, self._deadline_s)
            if self._missing[layer]:
                raise self._failure or DeadlineExceeded(
                    f"the copies of layer {layer} were not submitted", layer=layer
                )
            return list(self._tickets[layer])

    def check_integrity(self) -> None:
        """IntegrityError when a layer has more tickets than sources."""
        with self._changed:
            for layer, tickets in self._tickets.items():
                sources = [t.copy.source for t in tickets]
                if len(set(sources)) != len(sources) or self._missing[layer] & set(sources):
                    raise IntegrityError(f"layer {layer} has copies of {sources}", layer=layer)


def start_load(
    descriptor: PreparedLoadDescriptor,
    queue: CopyQueue,
    *,
    deadline_s: float,
    sources: Sequence[Source] = ("target", "draft"),
    after: Sequence[DeviceEvent] = (),
    on_end: Notice | None = None,
    on_quiet: Notice | None = None,
) -> LayerReadiness:
    """Submit every layer of a load, one operation each, in the order of the forward, and end the descriptor.

    IllegalTransition, with nothing submitted, for a descriptor that has ended. A submission that fails is the
    answer's `failure`: its accessors raise it at once, and its `tickets` are what has to fall quiet all the same.
    """
    with descriptor:
        copies = list(descriptor.copies(sources))
        readiness = LayerReadiness(
            [(copy.source, copy.layer) for copy in copies],
            deadline_s=deadline_s,
            statistics=queue.copier.statistics,
        )
        try:
            for copy in copies:
                readiness.add(queue.submit(copy, after=after, on_end=on_end, on_quiet=on_quiet))
        except KvferryError as error:
            readiness.fail(error)
    return readiness
