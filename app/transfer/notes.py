"""From the forward thread's layer ends to the chunk contexts on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from app.core.ids import Source
from app.errors import KvferryError
from app.transfer.context import ChunkContext


class ForwardNotes:
    """The layer hooks of one forward.

    At a layer's end one event is recorded and one note is queued for every context of this forward, and for
    the `listener` (a backup, say); with neither it does nothing. `ready` blocks until a layer's earlier rows
    are there, where they are being loaded. `cancelled` is asked at each layer, so that an aborted room stops its
    forward within one layer; so does a chunk of which a write has failed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        contexts: Sequence[ChunkContext],
        record: Callable[[], Any],
        *,
        cancelled: Callable[[], KvferryError | None] = lambda: None,
        progress: Callable[[], None] = lambda: None,
        ready: Callable[[int], None] = lambda layer: None,
        listener: Callable[[Source, int, Any], None] | None = None,
    ) -> None:
        self._loop = loop
        self._contexts = tuple(contexts)
        self._record = record
        self._cancelled = cancelled
        self._progress = progress
        self._ready = ready
        self._listener = listener

    def before_read(self, layer: int) -> None:
        self._ready(layer)

    def after_write(self, layer: int, source: Source) -> None:
        self._progress()
        reason = self._cancelled() or next((c.fault for c in self._contexts if c.fault), None)
        if reason is not None:
            raise reason
        if not self._contexts and self._listener is None:
            return
        event = self._record()
        self._loop.call_soon_threadsafe(self._deliver, layer, source, event)

    def _deliver(self, layer: int, source: Source, event: Any) -> None:
        for context in self._contexts:
            context.note(layer, event)
        if self._listener is not None:
            self._listener(source, layer, event)
