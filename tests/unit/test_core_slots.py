"""Metadata slots: one writer, one room, one generation."""

from __future__ import annotations

import pytest

from app.core.ids import MAX_ROOM, RoomId
from app.core.slots import SLOT_BYTES, Metadata, SlotRef, SlotTable, decode, encode
from app.errors import BadInput, Corruption, IntegrityError
from tests.conftest import Track

EMPTY = bytes(SLOT_BYTES)


def ref(room: int, generation: int = 1, index: int = 3) -> SlotRef:
    return SlotRef(index=index, generation=generation, room=RoomId(room))


@pytest.mark.parametrize("room", [0, 7, MAX_ROOM])
@pytest.mark.parametrize(("token", "logp"), [(0, 0.0), (2**31 - 1, -12.5), (-1, float("-inf"))])
def test_a_record_is_read_as_it_was_written(room: int, token: int, logp: float) -> None:
    """Encoding and decoding give the same metadata, whatever the room and the token."""
    written = Metadata(first_token=token, log_probability=logp)
    record = encode(RoomId(room), 5, written)
    assert len(record) == SLOT_BYTES
    assert decode(record, ref(room, 5)) == written


@pytest.mark.case("E2")
def test_an_unwritten_slot_is_not_yet() -> None:
    """A zeroed slot reads as nothing, which is neither a failure nor a token."""
    assert decode(EMPTY, ref(12)) is None


@pytest.mark.case("E2")
def test_a_foreign_record_is_a_failure() -> None:
    """A record that was truly written for another room raises and names both rooms."""
    record = encode(RoomId(11), 1, Metadata(first_token=9, log_probability=0.0))
    with pytest.raises(Corruption) as caught:
        decode(record, ref(12, 2))
    assert caught.value.message == "slot 3 was written for room 11 generation 1, not for 12 generation 2"
    assert caught.value.room == 12


@pytest.mark.case("E1")
def test_a_delayed_write_for_an_earlier_room_gives_no_token(track: Track) -> None:
    """Slot used by A, freed, given to B: A's late record is refused, and B's own record is B's token."""
    table = track(SlotTable(1))
    memory = bytearray(SLOT_BYTES)
    a = table.take(RoomId(7))
    assert a is not None
    table.release(a)
    b = table.take(RoomId(7))
    assert b is not None
    assert b.index == a.index
    assert b.generation != a.generation
    memory[:] = encode(a.room, a.generation, Metadata(first_token=1, log_probability=0.0))
    with pytest.raises(Corruption, match=f"generation {a.generation}, not for 7 generation {b.generation}"):
        decode(bytes(memory), b)
    memory[:] = encode(b.room, b.generation, Metadata(first_token=2, log_probability=0.0))
    found = decode(bytes(memory), b)
    assert found is not None
    assert found.first_token == 2
    table.release(b)


def test_any_flipped_bit_of_a_record_is_noticed() -> None:
    """No single flipped bit of a written record is read as metadata."""
    record = encode(RoomId(7), 1, Metadata(first_token=9, log_probability=-0.5))
    for bit in range(36 * 8):
        broken = bytearray(record)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corruption):
            decode(bytes(broken), ref(7))


def test_slots_run_out_and_come_back(track: Track) -> None:
    """The table hands out each slot once, says None when all are held, and counts them back."""
    table = track(SlotTable(3))
    held = [table.take(RoomId(room)) for room in range(3)]
    assert sorted(r.index for r in held if r) == [0, 1, 2]
    assert table.take(RoomId(9)) is None
    assert table.free_slots == 0
    for one in held:
        assert one is not None
        assert one.offset == one.index * SLOT_BYTES
        table.release(one)
    assert table.free_slots == 3


def test_a_slot_is_freed_once(track: Track) -> None:
    """A second release of the same use raises and does not take the slot from its new holder."""
    table = track(SlotTable(2))
    first = table.take(RoomId(1))
    assert first is not None
    table.release(first)
    second = table.take(RoomId(2))
    assert second is not None
    assert second.index == first.index
    with pytest.raises(BadInput, match=f"slot {first.index} generation {first.generation} is not held"):
        table.release(first)
    assert table.free_slots == 1
    table.release(second)
    with pytest.raises(BadInput, match="is not held"):
        table.release(second)
    assert table.free_slots == 2


def test_a_lost_slot_is_found() -> None:
    """The integrity check raises, with the numbers, when a slot is neither free nor held."""
    table = SlotTable(2)
    table._free.pop()
    with pytest.raises(IntegrityError, match=r"slots: 1 free and \[\] of 2"):
        table.check_integrity()


def test_a_table_needs_a_slot() -> None:
    """A table without slots is refused at start."""
    with pytest.raises(BadInput, match="at least one metadata slot is needed, not 0"):
        SlotTable(0)
