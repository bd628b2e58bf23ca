"""Rooms that ended before the other half of them arrived.

An abort can overtake the request it is about, and a refused request can precede decode's pages. A
tombstone answers the latecomer with the first reason. Bounded in time and number.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from app.core.ids import RoomId
from app.errors import KvferryError

_MOST = 4096


class Tombstones:
    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._stones: OrderedDict[RoomId, tuple[float, KvferryError]] = OrderedDict()

    def __len__(self) -> int:
        """Those that still count: an idle node has none, although nothing has swept them."""
        self.sweep()
        return len(self._stones)

    def set(self, room: RoomId, reason: KvferryError) -> None:
        """Remember a room's end; the first reason stays."""
        self.sweep()
        self._stones.setdefault(room, (time.monotonic() + self._keep_s, reason))
        while len(self._stones) > _MOST:
            self._stones.popitem(last=False)

    def require_alive(self, room: RoomId) -> None:
        """Raise the reason of a room that has ended already."""
        self.sweep()
        stone = self._stones.get(room)
        if stone is not None:
            raise stone[1]

    def sweep(self) -> None:
        now = time.monotonic()
        while self._stones and next(iter(self._stones.values()))[0] <= now:
            self._stones.popitem(last=False)
