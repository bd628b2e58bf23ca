"""The table of live rooms of one node, and what its ended rooms looked like."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from app.core.ids import MAX_ROOM, RoomId
from app.core.lifecycle import Lifecycle, State
from app.errors import IntegrityError, InvalidRequest, KvferryError, RoomInUse, UnknownRoom


class RoomEntry(Protocol):
    """What the table needs of an entry."""

    room: RoomId
    life: Lifecycle

    def record(self) -> dict[str, Any]: ...


E = TypeVar("E", bound=RoomEntry)

_DIGITS = re.compile("[0-9]{1,32}")


def parse_room(value: int | str | None) -> RoomId:
    """A room number out of a request. InvalidRequest when it is missing or no number of 64 bits."""
    if value is None or isinstance(value, bool):
        raise InvalidRequest("bootstrap_room is missing: a room is never derived from another field")
    # int() would round 7.5 to the room of another request, and takes signs, blanks and underscores
    if not isinstance(value, int) and not (isinstance(value, str) and _DIGITS.fullmatch(value)):
        raise InvalidRequest(f"bootstrap_room is no number: {str(value)[:40]!r}")
    number = int(value)
    if not 0 <= number <= MAX_ROOM:
        raise InvalidRequest(f"bootstrap_room is no number of 64 bits: {str(value)[:40]}")
    return RoomId(number)


class RoomTable(Generic[E]):
    """Live rooms by number. A number is free again once its room has been cleared."""

    def __init__(self, *, remember: int = 256) -> None:
        self._live: dict[RoomId, E] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=remember)
        self.opened = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[E]:
        return iter(tuple(self._live.values()))

    def __contains__(self, room: RoomId) -> bool:
        return room in self._live

    def open(self, entry: E) -> E:
        """Add a live room. RoomInUse, and no change, when the number is taken."""
        if entry.room in self._live:
            raise RoomInUse(f"room {entry.room} is in use", room=entry.room)
        self._live[entry.room] = entry
        self.opened += 1
        return entry

    def get(self, room: RoomId) -> E:
        try:
            return self._live[room]
        except KeyError:
            raise UnknownRoom(f"no room {room} on this node", room=room) from None

    def find(self, room: RoomId) -> E | None:
        return self._live.get(room)

    def fail(self, room: RoomId, reason: KvferryError) -> bool:
        """Fail a room if it is live and has not failed; a cleared or unknown room gets no entry."""
        entry = self._live.get(room)
        return entry is not None and entry.life.fail(reason)

    def clear(self, room: RoomId) -> None:
        """Forget a live room and remember its record; a second call is harmless."""
        entry = self._live.pop(room, None)
        if entry is None:
            return
        self.failed += entry.life.reason is not None
        self._ended.append(entry.record())

    def succeeded(self, room: RoomId) -> bool:
        """Whether a room's last life is remembered as ended with success."""
        last = next((r for r in reversed(self._ended) if r["room"] == room), None)
        return last is not None and last["state"] == State.SUCCESS

    def ended(self) -> list[dict[str, Any]]:
        """Records of the last ended rooms, oldest first."""
        return list(self._ended)

    def check_integrity(self) -> None:
        for room, entry in self._live.items():
            if entry.room != room:
                raise IntegrityError(f"room {room} holds the entry of {entry.room}", room=room)
