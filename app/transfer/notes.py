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

    At a layer's end one event is recorded and one note is queued for every context of this forward; with
    no context it does nothing. `cancelled` is asked at each layer, so that an aborted room stops its
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
    ) -> None:
        self._loop = loop
        self._contexts = tuple(contexts)
        self._record = record
        self._cancelled = cancelled
        self._progress = progress

    def before_read(self, layer: int) -> None:
        """Where loading tiers block until the layer's pages are there; nothing to wait for in L1."""

    def after_write(self, layer: int, source: Source) -> None:
        self._progress()
        reason = self._cancelled() or next((c.fault for c in self._contexts if c.fault), None)
        if reason is not None:
            raise reason
        if not self._contexts:
            return
        event = self._record()
        self._loop.call_soon_threadsafe(self._deliver, layer, event)

    def _deliver(self, layer: int, event: Any) -> None:
        for context in self._contexts:
            context.note(layer, event)
