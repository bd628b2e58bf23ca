"""The chunk contexts of every room, first in, first out."""

from __future__ import annotations

from collections import deque

from app.core.ids import RoomId
from app.errors import IntegrityError, KvferryError
from app.transfer.context import ChunkContext


class RoomFifos:
    """Contexts are registered before their forward and leave from the front."""

    def __init__(self) -> None:
        self._rooms: dict[RoomId, deque[ChunkContext]] = {}

    def __len__(self) -> int:
        return sum(len(chunks) for chunks in self._rooms.values())

    def register(self, context: ChunkContext) -> ChunkContext:
        """Append a chunk; the same (room, start) is registered once and the first one is returned."""
        chunks = self._rooms.setdefault(context.room, deque())
        for known in chunks:
            if known.key == context.key:
                return known
        chunks.append(context)
        return context

    def active(self, room: RoomId) -> tuple[ChunkContext, ...]:
        return tuple(self._rooms.get(room, ()))

    async def finish(self, room: RoomId, *, timeout_s: float | None = None) -> int:
        """Pop the room's front chunk and wait for its bytes; 0 when there is none (harmless)."""
        chunks = self._rooms.get(room)
        if not chunks:
            return 0
        context = chunks.popleft()
        if not chunks:
            del self._rooms[room]
        return await context.finish(timeout_s=timeout_s)

    def drop(self, room: RoomId, reason: KvferryError) -> tuple[ChunkContext, ...]:
        """Take all chunks of a room out; the caller awaits each one's `drained` before freeing pages."""
        dropped = tuple(self._rooms.pop(room, ()))
        for context in dropped:
            context.drop(reason)
        return dropped

    def check_integrity(self) -> None:
        for room, chunks in self._rooms.items():
            starts = [c.start for c in chunks]
            if not chunks or starts != sorted(set(starts)) or any(c.room != room for c in chunks):
                raise IntegrityError(f"room {room} has chunks at {starts}", room=room)
