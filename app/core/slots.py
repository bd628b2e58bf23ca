"""Metadata slots: where prefill writes what decode needs beside the pages.

A slot is a fixed record in the decode node's registered memory. It belongs to one room and one
generation from the announcement until the first real decode result has been processed, and there is no
copy of it: what is read out of a record are views of the slot. The record carries room and generation,
so a reader can tell "nothing yet" (zeroes) from "somebody else's" (a fault).

    0       8      16           24          28         32         36      40
    | magic | room | generation | token i32 | logp f32 | widths   | crc   | hidden f32 | top i32 | top logp f32 |
                                                         u16, u16   u32     what a draft goes on from
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from app.core.ids import RoomId
from app.errors import BadInput, Corruption, IntegrityError

SLOT_GRAIN = 512
"""A slot's size is a multiple of it."""
_MAGIC = 0x4B56464552525932
_BODY = struct.Struct("<QQQifHH")
_CRC = struct.Struct("<I")
_HEAD = _BODY.size + _CRC.size

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Metadata:
    """What the prefill side hands over: the first output token and its log-probability.

    With a draft also its output for the prompt's last row: `hidden` float32 `[draft hidden]`, and its best
    next tokens with their log-probabilities, `[top_k]` each.
    """

    first_token: int
    log_probability: float
    hidden: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    top_tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    top_log_probabilities: Floats = field(default_factory=lambda: np.empty(0, np.float32))


@dataclass(frozen=True, kw_only=True)
class SlotRef:
    """A held slot; `generation` tells this use of the slot from every other one."""

    index: int
    generation: int
    room: RoomId


@dataclass(frozen=True, kw_only=True)
class SlotFormat:
    """The record's widths: part of the fingerprint, since both ends have to agree on every offset."""

    hidden: int = 0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.hidden < 1 << 16 and 0 <= self.top_k < 1 << 16):
            raise BadInput(f"a metadata slot holds no {self.hidden} hidden values and {self.top_k} tokens")

    @property
    def slot_bytes(self) -> int:
        return -(-self._used // SLOT_GRAIN) * SLOT_GRAIN

    @property
    def _used(self) -> int:
        return _HEAD + 4 * self.hidden + 8 * self.top_k

    def offset(self, index: int) -> int:
        """Of a slot, in bytes from the first one."""
        return index * self.slot_bytes

    def encode(self, room: RoomId, generation: int, metadata: Metadata) -> bytes:
        """The record, `slot_bytes` long. BadInput when the draft's part has other widths."""
        widths = len(metadata.hidden), len(metadata.top_tokens), len(metadata.top_log_probabilities)
        if widths != (self.hidden, self.top_k, self.top_k):
            raise BadInput(f"a record of {self.hidden} hidden values and {self.top_k} tokens, not {widths}")
        body = _BODY.pack(
            _MAGIC, room, generation, metadata.first_token, metadata.log_probability, self.hidden, self.top_k
        )
        tail = b"".join(
            np.ascontiguousarray(part).tobytes()
            for part in (metadata.hidden, metadata.top_tokens, metadata.top_log_probabilities)
        )
        return (body + _CRC.pack(zlib.crc32(tail, zlib.crc32(body))) + tail).ljust(self.slot_bytes, b"\0")

    def decode(self, record: bytes | memoryview, ref: SlotRef) -> Metadata | None:
        """None while nothing has been written; Corruption when the record is not this room's.

        The arrays are views of `record`, which stays the slot's.
        """
        body, crc = record[: _BODY.size], record[_BODY.size : _HEAD]
        if not any(body) and not any(crc):
            return None
        magic, room, generation, token, log_probability, hidden, top_k = _BODY.unpack(body)
        if magic != _MAGIC or _CRC.unpack(crc)[0] != zlib.crc32(record[_HEAD : self._used], zlib.crc32(body)):
            raise Corruption(f"slot {ref.index} holds no valid record", room=ref.room)
        if (room, generation) != (ref.room, ref.generation):
            raise Corruption(
                f"slot {ref.index} was written for room {room} generation {generation}, "
                f"not for {ref.room} generation {ref.generation}",
                room=ref.room,
            )
        if (hidden, top_k) != (self.hidden, self.top_k):
            raise Corruption(
                f"slot {ref.index} has {hidden} hidden values and {top_k} tokens, "
                f"not {self.hidden} and {self.top_k}",
                room=ref.room,
            )
        tokens_at = _HEAD + 4 * hidden
        return Metadata(
            first_token=token,
            log_probability=log_probability,
            hidden=np.frombuffer(record, np.float32, hidden, _HEAD),
            top_tokens=np.frombuffer(record, np.int32, top_k, tokens_at),
            top_log_probabilities=np.frombuffer(record, np.float32, top_k, tokens_at + 4 * top_k),
        )


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
