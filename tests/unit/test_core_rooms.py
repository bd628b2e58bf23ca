"""The room table and the room number of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from app.core.ids import MAX_ROOM, RoomId
from app.core.lifecycle import PREFILL, Event, Lifecycle, State
from app.core.rooms import RoomTable, parse_room
from app.errors import IntegrityError, InvalidRequest, PeerAborted, RoomInUse, UnknownRoom
from tests.conftest import Track


@dataclass(eq=False)
class Entry:
    room: RoomId
    life: Lifecycle = field(default_factory=lambda: Lifecycle(table=PREFILL, state=State.TRANSFERRING))

    def record(self) -> dict[str, Any]:
        return {"room": self.room, "state": str(self.life.state)}


@pytest.fixture
def table(track: Track) -> RoomTable[Entry]:
    found: RoomTable[Entry] = track(RoomTable(remember=4))
    return found


ROOM = RoomId(7)


@pytest.mark.case("B2")
def test_failed_then_success_stays_failed(table: RoomTable[Entry]) -> None:
    """A success after a failure changes nothing, and the record shows the failure."""
    entry = table.open(Entry(ROOM))
    reason = PeerAborted("given up", room=7)
    assert table.fail(ROOM, reason)
    assert not table.fail(ROOM, PeerAborted("again"))
    entry.life.advance(Event.LANDED)
    entry.life.advance(Event.DRAINED)
    assert entry.life.reason is reason
    table.clear(ROOM)
    assert table.ended() == [{"room": 7, "state": "failed"}]
    assert (table.failed, table.opened, len(table)) == (1, 1, 0)


@pytest.mark.case("B2")
def test_a_cleared_room_is_not_brought_back_by_a_failure(table: RoomTable[Entry]) -> None:
    """Failing a room that was cleared, or never known, makes no entry."""
    table.open(Entry(ROOM))
    table.clear(ROOM)
    assert not table.fail(ROOM, PeerAborted("late"))
    assert not table.fail(RoomId(8), PeerAborted("never known"))
    assert len(table) == 0
    assert ROOM not in table
    table.clear(ROOM)
    assert len(table.ended()) == 1


def test_a_number_is_taken_once(table: RoomTable[Entry]) -> None:
    """Opening a live number again raises and leaves the first entry; after clearing it is free."""
    first = table.open(Entry(ROOM))
    with pytest.raises(RoomInUse, match="room 7 is in use") as caught:
        table.open(Entry(ROOM))
    assert caught.value.room == 7
    assert table.get(ROOM) is first
    assert list(table) == [first]
    table.clear(ROOM)
    with pytest.raises(UnknownRoom, match="no room 7 on this node"):
        table.get(ROOM)
    assert table.find(ROOM) is None
    table.open(Entry(ROOM))


def test_the_last_life_of_a_room_counts(table: RoomTable[Entry]) -> None:
    """A number that first succeeded and then failed is not remembered as a success."""
    good = table.open(Entry(ROOM))
    good.life.advance(Event.LANDED)
    good.life.advance(Event.TOLD)
    table.clear(ROOM)
    assert table.succeeded(ROOM)
    table.open(Entry(ROOM))
    table.fail(ROOM, PeerAborted("second life"))
    table.clear(ROOM)
    assert not table.succeeded(ROOM)


def test_the_memory_of_ended_rooms_is_bounded(table: RoomTable[Entry]) -> None:
    """Only the newest records are kept, oldest first."""
    for number in range(10):
        table.open(Entry(RoomId(number)))
        table.clear(RoomId(number))
    assert [r["room"] for r in table.ended()] == [6, 7, 8, 9]


def test_an_entry_under_a_foreign_number_is_found() -> None:
    """The integrity check names a room that holds another room's entry."""
    broken: RoomTable[Entry] = RoomTable()
    broken.open(Entry(ROOM)).room = RoomId(8)
    with pytest.raises(IntegrityError, match="room 7 holds the entry of 8"):
        broken.check_integrity()


@pytest.mark.case("E5")
@pytest.mark.parametrize(
    "value", [None, True, False, "", "seven", "7.0", " 7", "1_0", "+7", "-1", "٧", "0x7"]
)
def test_a_room_is_never_made_up(value: Any) -> None:
    """A missing or malformed room is rejected, never replaced by a shared default."""
    with pytest.raises(InvalidRequest, match=r"bootstrap_room is (missing|no number)"):
        parse_room(value)


@pytest.mark.case("E5")
@pytest.mark.parametrize("value", [7.0, 7.5, [7], {"room": 7}, b"7"])
def test_other_types_are_no_room(value: Any) -> None:
    """A JSON number with a fraction would be rounded to another request's room: it is refused."""
    with pytest.raises(InvalidRequest, match="bootstrap_room is no number"):
        parse_room(value)


@pytest.mark.parametrize(
    ("value", "room"), [(0, 0), ("7", 7), (MAX_ROOM, MAX_ROOM), (str(MAX_ROOM), MAX_ROOM)]
)
def test_a_room_has_64_bits(value: Any, room: int) -> None:
    """Numbers of up to 64 bits are rooms, as JSON numbers or as digits."""
    assert parse_room(value) == room


@pytest.mark.parametrize("value", [MAX_ROOM + 1, str(MAX_ROOM + 1), -1, 10**31])
def test_a_room_beyond_64_bits_is_refused(value: Any) -> None:
    """A number that no peer message can carry is rejected at the request."""
    with pytest.raises(InvalidRequest, match=r"64 bits|no number"):
        parse_room(value)
