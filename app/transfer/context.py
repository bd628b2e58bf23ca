"""One chunk on its way: which layers have been written, which groups have been sent.

The forward thread notes a layer's end; a group is submitted when all its layers have been noted and
their events have happened, so a layer is never read before its write is complete.

    noted     L0 L1 .. L7 | L8 ..
    submitted [group 0   ]              finish(): what fired no hook, then wait for every batch

Everything here runs on the event loop; notes arrive through `ForwardNotes` (notes.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from app.core.ids import RoomId
from app.errors import DeadlineExceeded, KvferryError, TransferFailed
from app.transfer.base import Batch


class Destination(Protocol):
    """Sends the pages of one chunk that one rank owns to one receiver, any layers at a time."""

    def submit(self, layers: Sequence[int]) -> Batch | None:
        """None when these layers hold nothing to send."""
        ...

    async def wait(self, batches: Sequence[Batch]) -> None: ...

    async def settle(self, batches: Sequence[Batch]) -> None: ...


EventWait = Callable[[Any], Awaitable[None]]
Permit = Callable[[], Awaitable[None]]
"""Returns while the receiver still wants the bytes; raises the reason why nothing may be submitted."""


class ChunkContext:
    """The transfer of one chunk, keyed by (room, first token of its forward).

    There is a destination for each rank and receiver. Per-layer mode needs exactly one receiver. With
    several, or in monolithic mode (no groups), the layers are sent one submit each after the forward; with
    none nothing is sent nor reported.
    """

    def __init__(
        self,
        *,
        room: RoomId,
        start: int,
        layers: Sequence[int],
        groups: Sequence[Sequence[int]],
        destinations: Sequence[Destination],
        event_wait: EventWait,
        receivers: int | None = None,
        permit: Permit | None = None,
    ) -> None:
        self.room = room
        self.start = start
        self.layers = tuple(layers)
        self.destinations = tuple(destinations)
        self.receivers = len(self.destinations) if receivers is None else receivers
        self.per_layer = bool(groups) and self.receivers == 1
        self.groups = tuple(tuple(g) for g in groups) if self.per_layer else ()
        self.error: KvferryError | None = None
        self.batches: list[tuple[Destination, Batch]] = []
        self.groups_sent = 0
        self._event_wait = event_wait
        self._permit = permit
        self._known = frozenset(layers)
        self._group_of = {layer: i for i, group in enumerate(self.groups) for layer in group}
        self._missing = [len(group) for group in self.groups]
        self._events: dict[int, Any] = {}
        self._sent: set[int] = set()
        self._ready: asyncio.Queue[int] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._closed = False
        self._nearly = asyncio.Event()

    @property
    def key(self) -> tuple[RoomId, int]:
        return self.room, self.start

    @property
    def enqueued_bytes(self) -> int:
        return sum(batch.total_bytes for _, batch in self.batches)

    @property
    def fault(self) -> KvferryError | None:
        """Why this chunk cannot succeed any more, as soon as one of its writes has failed."""
        return self.error or next((batch.error for _, batch in self.batches if batch.error), None)

    @property
    def unfinished(self) -> str:
        """What has not landed, in words; empty when everything has."""
        writing = sum(not batch.finished.is_set() for _, batch in self.batches)
        unsent = len(self.layers) - len(self._sent) if self.receivers else 0
        parts = [f"{writing} of {self.submits} submits"] if writing else []
        parts += [f"{unsent} layers not submitted"] if unsent else []
        return " and ".join(parts)

    @property
    def submits(self) -> int:
        return len(self.batches)

    def note(self, layer: int, event: Any) -> None:
        """A layer has been written. Only its first firing counts; O(1) unless it ends a group."""
        if self._closed or layer in self._events or layer not in self._known:
            return
        self._events[layer] = event
        group = self._group_of.get(layer)
        if group is None:
            return
        self._missing[group] -= 1
        if self._missing[group]:
            return
        self._ready.put_nowait(group)
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._send_ready())

    async def _send_ready(self) -> None:
        """Submit ready groups in their order; a fault marks the context failed and ends nothing else."""
        while not self._closed:
            try:
                group = self._ready.get_nowait()
            except asyncio.QueueEmpty:
                break
            try:
                await self._send(self.groups[group])
            except Exception as error:
                self._fail(error)
        self._worker = None

    async def _send(self, layers: Sequence[int]) -> None:
        """Submit layers that have not been sent. Idempotent; the layers' events are awaited first."""
        due = [layer for layer in layers if layer not in self._sent]
        for layer in due:
            await self._event_wait(self._events.get(layer))
        if due and self._permit is not None and not self._closed:
            await self._permit()
        due = [layer for layer in due if layer not in self._sent]
        if self._closed or self.error or not due:
            return
        self._sent.update(due)
        before = len(self.batches)
        for destination in self.destinations:
            batch = destination.submit(due)
            if batch is not None:
                self.batches.append((destination, batch))
        self.groups_sent += len(self.batches) > before
        if len(self.groups) > 1 and len(self._sent) >= len(self.layers) - len(self.groups[-1]):
            self._nearly.set()

    async def nearly_sent(self) -> tuple[int, ...]:
        """Wait until no more than the last group is missing, and for those bytes: the layers that landed.

        Nothing when the chunk has ended otherwise. Never returns in monolithic mode or with one group.
        """
        await self._nearly.wait()
        layers, batches = tuple(sorted(self._sent)), list(self.batches)
        for destination, batch in batches:
            await destination.wait([batch])
        return () if self._closed or self.error else layers

    async def finish(self, *, timeout_s: float | None = None) -> int:
        """Send what is left and wait for every batch. The bytes sent; raises on any failure.

        A finish that outlives `timeout_s` is a failure; without it the caller bounds the time. A second
        finish sends nothing again.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._finish()
        except Exception as error:
            late = DeadlineExceeded(f"the chunk was not finished within {timeout_s} s", room=self.room)
            self._fail(late if limit.expired() else error)
        if self.error:
            self._closed = True
            raise self.error
        if self._closed:
            raise TransferFailed("the chunk was dropped before it finished", room=self.room)
        return self.enqueued_bytes

    async def _finish(self) -> None:
        while self._worker is not None:
            await asyncio.shield(self._worker)
        left = [layer for layer in self.layers if layer not in self._sent]
        if self.error is None:
            if self.per_layer:
                await self._send(left)
            else:
                for layer in left:
                    await self._send([layer])
        for destination in self.destinations:
            await destination.wait([batch for to, batch in self.batches if to is destination])

    def drop(self, reason: KvferryError) -> None:
        """Submit nothing more. What is in the engine stays there: see `drained`."""
        self._closed = True
        self.error = self.error or reason
        self._nearly.set()

    async def drained(self) -> None:
        """Return when nothing of this chunk can land any more."""
        worker = self._worker
        if worker is not None:
            await asyncio.wait([worker])
        for destination, batch in self.batches:
            await destination.settle([batch])

    def settled_at_s(self) -> float:
        """Monotonic time before which a late landing of a retried write cannot be ruled out."""
        return max((batch.settled_at_s for _, batch in self.batches), default=0.0)

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            own = isinstance(error, KvferryError)
            self.error = error if own else TransferFailed(f"a group was not sent: {error}", room=self.room)  # type: ignore[assignment]
