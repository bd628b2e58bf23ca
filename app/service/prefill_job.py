"""One room of a prefill node: what it holds, what it has sent, when nothing of it can land any more."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from app.core.ids import PageArray
from app.core.pages import stretches
from app.core.slots import Metadata, SlotRef
from app.errors import KvferryError, LegName
from app.service.jobs import Job, TokenOut
from app.service.sender import PageSender
from app.tiers.backup import Reservation
from app.transfer.base import Batch, TransferEngine
from app.transfer.context import ChunkContext
from app.transfer.messages import Destination, RankSent, RoomUse


@dataclass(eq=False, kw_only=True)
class PrefillJob(Job):
    leg: ClassVar[LegName] = "prefill"
    other_leg: ClassVar[LegName] = "decode"

    destination: Destination | None = None
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when decode's pages are known."""
    parked_at_s: float = 0.0
    contexts: list[ChunkContext] = field(default_factory=list)
    first: TokenOut | None = None
    handover: Metadata | None = None
    """What decode goes on from: the first token, and the draft's output beside it."""
    compared: frozenset[int] = frozenset()
    """Layers that decode has compared already."""
    backup: Reservation | None = None
    """Pages of L2 for what is computed."""
    recomputed: bool = False
    """A load had failed, and the reservation with it: what is kept is copied to L2 afterwards."""
    told_ahead: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear while decode may be told of a chunk ahead of its end."""
    staging: SlotRef | None = None
    """Where the metadata record lies until its write can no longer read it."""
    metadata: Batch | None = None
    proven: bool = False
    """Nothing of the room can land any more. Stays False when its hold ended by its deadline."""

    def __post_init__(self) -> None:
        self.told_ahead.set()

    @property
    def sent_bytes(self) -> int:
        return sum(c.enqueued_bytes for c in self.contexts)

    @property
    def key(self) -> tuple[str, int] | None:
        """Which use of the room this is: decode's instance and its slot's generation."""
        return None if self.destination is None else (self.destination.instance, self.destination.generation)

    @property
    def use(self) -> RoomUse | None:
        if self.destination is None:
            return None
        return RoomUse(room=self.room, generation=self.destination.generation)

    def fail(self, reason: KvferryError) -> bool:
        """As for every job; nothing more is submitted from here on, even while a forward still runs."""
        if not super().fail(reason):
            return False
        for context in self.contexts:
            context.drop(reason)
        return True

    def stop_reason(self) -> KvferryError | None:
        """Why the forward should end: the room has failed, or a write has. Asked on the forward thread."""
        faults = (context.fault for context in tuple(self.contexts))
        return self.life.reason or next((fault for fault in faults if fault is not None), None)

    def unfinished(self) -> str:
        """What has not landed yet, in words."""
        parts = [
            f"{context.unfinished} of the chunk at token {context.start}"
            for context in self.contexts
            if context.unfinished
        ]
        if self.metadata is None:
            parts.append("the metadata record was not submitted")
        elif not self.metadata.finished.is_set():
            parts.append("the metadata record")
        return ", ".join(parts) or "nothing is missing"

    def settled_at_s(self) -> float:
        """Monotonic time before which a late landing of a retried write cannot be ruled out."""
        metadata = 0.0 if self.metadata is None else self.metadata.settled_at_s
        return max([metadata, *(c.settled_at_s() for c in self.contexts)])

    def by_rank(self) -> tuple[RankSent, ...]:
        """What each rank has sent, over all chunks; a rank that owns no page has sent nothing."""
        positions: dict[int, list[PageArray]] = defaultdict(list)
        for context in self.contexts:
            for sender in context.destinations:
                assert isinstance(sender, PageSender)
                positions[sender.rank].append(sender.positions)
        sent = self.landed_by_rank()
        return tuple(
            RankSent(
                rank=rank, positions=stretches(np.concatenate(parts)), sent_bytes=sent.get(rank, (0, 0.0))[0]
            )
            for rank, parts in sorted(positions.items())
        )

    def landed_by_rank(self) -> dict[int, tuple[int, float]]:
        """Bytes that each rank has sent, and when (monotonic) the last of them had landed."""
        found: dict[int, tuple[int, float]] = {}
        for context in self.contexts:
            for to, batch in context.batches:
                assert isinstance(to, PageSender)
                sent_bytes, landed_s = found.get(to.rank, (0, 0.0))
                found[to.rank] = sent_bytes + batch.total_bytes, max(landed_s, batch.finished_at_s)
        return found

    async def drained(self, engine: TransferEngine) -> None:
        """Return when nothing of this room, its metadata included, can land any more."""
        for context in self.contexts:
            await context.drained()
        if self.metadata is not None:
            await engine.settle([self.metadata])
