"""Metadata slots: where prefill writes what decode needs beside the pages.

A slot is a fixed record in the decode node's registered memory. It belongs to one room and one
generation from the announcement until the first real decode result has been processed, and there is no
copy of it. The record carries room and generation, so a reader can tell "nothing yet" (zeroes) from
"somebody else's" (a fault).

    0       8        16            24           28         32        36
    | magic |  room  | generation  | token i32  | logp f32 | crc u32 |  rest: reserved, zero
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from app.core.ids import RoomId
from app.errors import BadInput, Corruption, IntegrityError

SLOT_BYTES = 512
_MAGIC = 0x4B56464552525931
_BODY = struct.Struct("<QQQif")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What the prefill side hands over: the first output token and its log-probability."""

    first_token: int
    log_probability: float


@dataclass(frozen=True, kw_only=True)
class SlotRef:
    """A held slot; `generation` tells this use of the slot from every other one."""

    index: int
    generation: int
    room: RoomId

    @property
    def offset(self) -> int:
        return self.index * SLOT_BYTES


def encode(room: RoomId, generation: int, metadata: Metadata) -> bytes:
    """The record of SLOT_BYTES bytes."""
    body = _BODY.pack(_MAGIC, room, generation, metadata.first_token, metadata.log_probability)
    return (body + _CRC.pack(zlib.crc32(body))).ljust(SLOT_BYTES, b"\0")


def decode(record: bytes, ref: SlotRef) -> Metadata | None:
    """None while nothing has been written; Corruption when the record is not this room's."""
    body, crc = record[: _BODY.size], record[_BODY.size : _BODY.size + _CRC.size]
    if not any(body) and not any(crc):
        return None
    magic, room, generation, token, log_probability = _BODY.unpack(body)
    if magic != _MAGIC or _CRC.unpack(crc)[0] != zlib.crc32(body):
        raise Corruption(f"slot {ref.index} holds no valid record", room=ref.room)
    if (room, generation) != (ref.room, ref.generation):
        raise Corruption(
            f"slot {ref.index} was written for room {room} generation {generation}, "
            f"not for {ref.room} generation {ref.generation}",
            room=ref.room,
        )
    return Metadata(first_token=token, log_probability=log_probability)


class SlotTable:
    """Which slot belongs to which room. Memory is the caller's: zero a slot when it is taken."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise BadInput(f"at least one metadata slot is needed, not {count}")
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._held: dict[int, SlotRef] = {}
        self._generation = 0

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self, room: RoomId) -> SlotRef | None:
        """A slot for a room, or None when all are held."""
        if not self._free:
            return None
        self._generation += 1
        ref = SlotRef(index=self._free.pop(), generation=self._generation, room=room)
        self._held[ref.index] = ref
        return ref

    def release(self, ref: SlotRef) -> None:
        """Give a slot back. BadInput, and no change, when this use of it has already ended."""
        if self._held.get(ref.index) != ref:
            raise BadInput(f"slot {ref.index} generation {ref.generation} is not held", room=ref.room)
        del self._held[ref.index]
        self._free.append(ref.index)

    def check_integrity(self) -> None:
        if sorted([*self._free, *self._held]) != list(range(self.count)):
            raise IntegrityError(f"slots: {len(self._free)} free and {sorted(self._held)} of {self.count}")
