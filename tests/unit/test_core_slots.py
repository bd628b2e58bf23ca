"""Metadata slots: one writer, one room, one generation."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.ids import MAX_ROOM, RoomId
from app.core.slots import Metadata, SlotFormat, SlotRef, SlotTable
from app.errors import BadInput, Corruption, IntegrityError
from tests.conftest import Track

PLAIN = SlotFormat()
EMPTY = bytes(PLAIN.slot_bytes)


def ref(room: int, generation: int = 1, index: int = 3) -> SlotRef:
    return SlotRef(index=index, generation=generation, room=RoomId(room))


@pytest.mark.contract(98)
@pytest.mark.parametrize("room", [0, 7, MAX_ROOM])
@pytest.mark.parametrize(("token", "logp"), [(0, 0.0), (2**31 - 1, -12.5), (-1, float("-inf"))])
@pytest.mark.parametrize(("hidden", "top_k"), [(0, 0), (128, 8), (6144, 8)])
def test_a_record_is_read_as_it_was_written(
    room: int, token: int, logp: float, hidden: int, top_k: int
) -> None:
    """Encoding and decoding give the same metadata, whatever the room, the token and the draft's widths."""
    draws = np.random.default_rng(room % 7)
    written = Metadata(
        first_token=token,
        log_probability=logp,
        hidden=draws.standard_normal(hidden, np.float32),
        top_tokens=np.arange(top_k, dtype=np.int32),
        top_log_probabilities=draws.standard_normal(top_k, np.float32),
    )
    form = SlotFormat(hidden=hidden, top_k=top_k)
    record = form.encode(RoomId(room), 5, written)
    assert len(record) == form.slot_bytes
    read = form.decode(record, ref(room, 5))
    assert read is not None
    assert (read.first_token, read.log_probability) == (token, logp)
    assert read.hidden.tobytes() == written.hidden.tobytes()
    assert read.top_tokens.tolist() == list(range(top_k))
    assert read.top_log_probabilities.tobytes() == written.top_log_probabilities.tobytes()


@pytest.mark.contract(132)
def test_what_is_read_out_of_a_slot_is_a_view_of_it() -> None:
    """There is no copy of a slot: writing to its memory changes what a reader of the record sees."""
    form = SlotFormat(hidden=4)
    memory = bytearray(
        form.encode(RoomId(1), 1, Metadata(first_token=1, log_probability=0, hidden=np.ones(4, np.float32)))
    )
    read = form.decode(memoryview(memory), ref(1))
    assert read is not None
    memory[40:44] = np.float32(7).tobytes()
    assert read.hidden.tolist() == [7, 1, 1, 1]


def test_a_record_of_other_widths_is_refused() -> None:
    """A draft of another width is refused when a record is written, and a foreign record when it is read."""
    form = SlotFormat(hidden=4, top_k=2)
    with pytest.raises(BadInput, match="a record of 4 hidden values and 2 tokens"):
        form.encode(RoomId(1), 1, Metadata(first_token=1, log_probability=0))
    record = PLAIN.encode(RoomId(1), 1, Metadata(first_token=1, log_probability=0))
    with pytest.raises(Corruption):
        form.decode(record, ref(1))


@pytest.mark.case("E2")
def test_an_unwritten_slot_is_not_yet() -> None:
    """A zeroed slot reads as nothing, which is neither a failure nor a token."""
    assert PLAIN.decode(EMPTY, ref(12)) is None


@pytest.mark.case("E2")
def test_a_foreign_record_is_a_failure() -> None:
    """A record that was truly written for another room raises and names both rooms."""
    record = PLAIN.encode(RoomId(11), 1, Metadata(first_token=9, log_probability=0.0))
    with pytest.raises(Corruption) as caught:
        PLAIN.decode(record, ref(12, 2))
    assert caught.value.message == "slot 3 was written for room 11 generation 1, not for 12 generation 2"
    assert caught.value.room == 12


@pytest.mark.case("E1")
def test_a_delayed_write_for_an_earlier_room_gives_no_token(track: Track) -> None:
    """Slot used by A, freed, given to B: A's late record is refused, and B's own record is B's token."""
    table = track(SlotTable(1))
    memory = bytearray(PLAIN.slot_bytes)
    a = table.take(RoomId(7))
    assert a is not None
    table.release(a)
    b = table.take(RoomId(7))
    assert b is not None
    assert b.index == a.index
    assert b.generation != a.generation
    memory[:] = PLAIN.encode(a.room, a.generation, Metadata(first_token=1, log_probability=0.0))
    with pytest.raises(Corruption, match=f"generation {a.generation}, not for 7 generation {b.generation}"):
        PLAIN.decode(bytes(memory), b)
    memory[:] = PLAIN.encode(b.room, b.generation, Metadata(first_token=2, log_probability=0.0))
    found = PLAIN.decode(bytes(memory), b)
    assert found is not None
    assert found.first_token == 2
    table.release(b)


def test_any_flipped_bit_of_a_record_is_noticed() -> None:
    """No single flipped bit of a written record is read as metadata."""
    form = SlotFormat(hidden=2, top_k=1)
    written = Metadata(
        first_token=9,
        log_probability=-0.5,
        hidden=np.ones(2, np.float32),
        top_tokens=np.ones(1, np.int32),
        top_log_probabilities=np.ones(1, np.float32),
    )
    record = form.encode(RoomId(7), 1, written)
    for bit in range((40 + 16) * 8):
        broken = bytearray(record)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corruption):
            form.decode(bytes(broken), ref(7))


def test_slots_run_out_and_come_back(track: Track) -> None:
    """The table hands out each slot once, says None when all are held, and counts them back."""
    table = track(SlotTable(3))
    held = [table.take(RoomId(room)) for room in range(3)]
    assert sorted(r.index for r in held if r) == [0, 1, 2]
    assert table.take(RoomId(9)) is None
    assert table.free_slots == 0
    for one in held:
        assert one is not None
        assert PLAIN.offset(one.index) == one.index * PLAIN.slot_bytes
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
