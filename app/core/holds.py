"""Quarantine: resources on which a read or write may still land.

A hold has a reason, an age and a finite deadline. It ends when the writer has been proven idle, or at
its deadline, which is longer than every timeout of the engine; either way it gives its resources back
exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.core.ids import RoomId
from app.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Hold:
    """`give_back` returns the held resources to their pools; it is called once."""

    number: int
    room: RoomId
    reason: str
    pages: int
    since_s: float
    deadline_s: float
    give_back: Callable[[], None]


class Quarantine:
    """All holds of a node. Times are the caller's monotonic seconds."""

    def __init__(self) -> None:
        self._holds: dict[int, Hold] = {}
        self._next = 1
        self.expired = 0

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def pages(self) -> int:
        return sum(h.pages for h in self._holds.values())

    def hold(
        self,
        *,
        room: RoomId,
        reason: str,
        pages: int,
        now_s: float,
        for_s: float,
        give_back: Callable[[], None],
    ) -> Hold:
        if not 0 < for_s < float("inf"):
            raise BadInput(f"a hold needs a finite deadline, not {for_s}", room=room)
        hold = Hold(
            number=self._next,
            room=room,
            reason=reason,
            pages=pages,
            since_s=now_s,
            deadline_s=now_s + for_s,
            give_back=give_back,
        )
        self._holds[hold.number] = hold
        self._next += 1
        return hold

    def release(self, hold: Hold) -> bool:
        """End a hold: its writer is proven idle. False when it had ended before."""
        if self._holds.pop(hold.number, None) is None:
            return False
        hold.give_back()
        return True

    def expire(self, now_s: float) -> list[Hold]:
        """End the holds that are past their deadline and return them."""
        late = [h for h in self._holds.values() if h.deadline_s <= now_s]
        for hold in late:
            self.release(hold)
        self.expired += len(late)
        return late

    def snapshot(self, now_s: float) -> list[dict[str, Any]]:
        return [
            {
                "room": h.room,
                "reason": h.reason,
                "pages": h.pages,
                "age_s": round(now_s - h.since_s, 3),
                "left_s": round(h.deadline_s - now_s, 3),
            }
            for h in self._holds.values()
        ]
