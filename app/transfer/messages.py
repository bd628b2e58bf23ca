"""What nodes say to each other under /v1/peer/. JSON, validated, unknown keys refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.core.geometry import BufferSpec
from app.core.ids import MAX_ROOM, Owner
from app.errors import LegName
from app.transfer.base import Region
from app.transfer.blocks import BufferLayout, Layouts

MAX_PAGES = 1 << 20

DRAIN_ACK = "drain-ack"
"""The peer acknowledges an abort only when nothing of the room is in flight."""
CAPABILITIES = (DRAIN_ACK, "page-digest-xxh3", "absolute-positions")
REQUIRED = (DRAIN_ACK, "absolute-positions")

Instance = Annotated[str, Field(min_length=8, max_length=64)]
Address = Annotated[int, Field(ge=0, lt=2**64)]
Size = Annotated[int, Field(ge=0, lt=2**48)]
Reason = Annotated[str, Field(max_length=2000)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BufferPlace(Message):
    """One buffer's spec and where it lies in the sender's memory."""

    owner: Owner
    kind: Annotated[str, Field(min_length=1, max_length=32)]
    layer_ids: Annotated[tuple[int, ...], Field(min_length=1, max_length=4096)]
    item_bytes: Annotated[int, Field(gt=0, lt=2**32)]
    dtype: Annotated[str, Field(max_length=32)]
    base: Address
    layer_stride: Size
    pages: Annotated[int, Field(gt=0, le=MAX_PAGES)]

    @model_validator(mode="after")
    def _layers_lie_apart(self) -> BufferPlace:
        if self.layer_stride < self.pages * self.item_bytes:
            raise ValueError(f"layers of {self.pages * self.item_bytes} bytes lie {self.layer_stride} apart")
        if self.base + len(self.layer_ids) * self.layer_stride > 2**64:
            raise ValueError("the buffer ends above the address space")
        return self

    @classmethod
    def of(cls, layout: BufferLayout) -> BufferPlace:
        spec = layout.spec
        return cls(
            owner=spec.owner,
            kind=spec.kind,
            layer_ids=spec.layer_ids,
            item_bytes=spec.item_bytes,
            dtype=spec.dtype,
            base=layout.base,
            layer_stride=layout.layer_stride,
            pages=layout.pages,
        )

    def layout(self) -> BufferLayout:
        spec = BufferSpec(
            owner=self.owner,
            kind=self.kind,
            layer_ids=self.layer_ids,
            item_bytes=self.item_bytes,
            dtype=self.dtype,
        )
        return BufferLayout(spec=spec, base=self.base, layer_stride=self.layer_stride, pages=self.pages)


class RankEndpoint(Message):
    """One rank's transfer session and memory."""

    rank: Annotated[int, Field(ge=0, lt=1024)]
    session: Annotated[str, Field(min_length=3, max_length=256)]
    buffers: Annotated[tuple[BufferPlace, ...], Field(max_length=64)]
    slots_base: Address
    slots_bytes: Size

    def layouts(self) -> Layouts:
        return {layout.spec.name: layout for layout in (b.layout() for b in self.buffers)}

    def regions(self) -> list[Region]:
        slots = [Region("slots", self.slots_base, self.slots_bytes)] if self.slots_bytes else []
        return [*(layout.region for layout in self.layouts().values()), *slots]


class Introduction(Message):
    """Who a node is: both the body and the answer of a handshake."""

    instance: Instance
    role: Literal["prefill", "decode"]
    url: Annotated[str, Field(min_length=8, max_length=512)]
    capabilities: Annotated[tuple[str, ...], Field(max_length=64)]
    fingerprint: Annotated[dict[str, Any], Field(max_length=512)]
    ranks: Annotated[tuple[RankEndpoint, ...], Field(min_length=1, max_length=64)]


class Destination(Message):
    """PUT /v1/peer/rooms/{room}: where the pages of a prompt are wanted."""

    instance: Instance
    prefill_instance: Instance
    attempt: Annotated[int, Field(ge=1, lt=2**31)] = 1
    prompt_tokens: Annotated[int, Field(ge=1, le=2**31)]
    first_position: Annotated[int, Field(ge=0, le=MAX_PAGES)]
    pages: Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_PAGES)], ...], Field(max_length=MAX_PAGES)]
    lookahead: Annotated[int, Field(ge=0, le=MAX_PAGES)] = 0
    slot: Annotated[int, Field(ge=0, lt=2**20)]
    generation: Annotated[int, Field(ge=1, lt=2**63)]


class Accepted(Message):
    room: Annotated[int, Field(ge=0, le=MAX_ROOM)]
    state: str


Digests = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**64)], ...], Field(max_length=1 << 22)]
Layers = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**20)], ...], Field(max_length=4096)]


class RankSent(Message):
    """What one rank has sent of a room: the positions as (first, count), none when it owns none."""

    rank: Annotated[int, Field(ge=0, lt=1024)]
    positions: Annotated[
        tuple[
            tuple[Annotated[int, Field(ge=0, lt=MAX_PAGES)], Annotated[int, Field(ge=1, le=MAX_PAGES)]], ...
        ],
        Field(max_length=MAX_PAGES),
    ]
    sent_bytes: Size


RanksSent = Annotated[tuple[RankSent, ...], Field(max_length=64)]


class Ahead(Message):
    """POST /v1/peer/rooms/{room}/ahead: these layers have landed; later ones are still being computed.

    Their digests are compared beside the rest of the forward, so that only the last group's are left to
    compare after it. It promises nothing: `Complete` alone says that everything is there.
    """

    instance: Instance
    generation: Annotated[int, Field(ge=1, lt=2**63)]
    layers: Annotated[Layers, Field(min_length=1)]
    digests: Digests = ()
    ranks: RanksSent = ()
    """As in `Complete`, with the bytes so far: whose page it is that differs."""


class Complete(Message):
    """POST /v1/peer/rooms/{room}/complete: every byte has landed, slot included."""

    instance: Instance
    generation: Annotated[int, Field(ge=1, lt=2**63)]
    sent_bytes: Size
    ranks: Annotated[RanksSent, Field(min_length=1)]
    """One for each rank of the prefill node, in order: together every position once."""
    digests: Digests = ()
    layers: Layers | None = None
    """The layers of these digests: those that were not compared ahead. None: all."""
    settle_s: Annotated[float, Field(ge=0, le=3600)] = 0.0


class Failed(Message):
    """POST /v1/peer/rooms/{room}/failed: the other leg has failed."""

    instance: Instance
    generation: Annotated[int, Field(ge=1, lt=2**63)]
    """Of the slot that was named for the room: a late word must not fail the next use of the number."""
    slug: Annotated[str, Field(max_length=64)]
    reason: Reason
    leg: LegName = "prefill"
    """Where it went wrong: prefill may fail for what decode did."""


class Abort(Message):
    """POST /v1/peer/rooms/{room}/abort: give the room up; the answer is the drain acknowledgement."""

    instance: Instance | None = None
    generation: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the slot that was named for the room; 0 when none was. Tells one use of a room from another."""
    slug: Annotated[str, Field(max_length=64)] = "peer-aborted"
    reason: Reason
    leg: LegName = "decode"


class Drained(Message):
    """Nothing of the room is in flight or will be. `known` tells whether there was such a room.

    `instance` answers: another one than had the room knows nothing of what that one has under way.
    """

    room: Annotated[int, Field(ge=0, le=MAX_ROOM)]
    drained: bool
    known: bool
    instance: Instance | None = None


class RoomUse(Message):
    """One use of a room: the number, and the generation of decode's slot."""

    room: Annotated[int, Field(ge=0, le=MAX_ROOM)]
    generation: Annotated[int, Field(ge=1, lt=2**63)]


class Heartbeat(Message):
    """POST /v1/peer/heartbeat: are you there, and do you still want what I write? Decode names no rooms."""

    instance: Instance
    rooms: Annotated[tuple[RoomUse, ...], Field(max_length=1 << 16)] = ()


class Alive(Message):
    """The answer: who answers, and which of the rooms are given up or were never there."""

    instance: Instance
    gone: Annotated[tuple[RoomUse, ...], Field(max_length=1 << 16)] = ()


class Told(Message):
    room: Annotated[int, Field(ge=0, le=MAX_ROOM)]
    accepted: bool


AnyMessage = Introduction | Destination | Complete | Failed | Abort | Heartbeat
