"""The end of a prefill: the metadata slot, then the word that everything has landed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from app.core.slots import SLOT_BYTES, Metadata, SlotRef, encode
from app.errors import KvferryError, NoCapacity
from app.service.context import NodeContext
from app.service.prefill_rooms import PrefillJob
from app.transfer.base import Batch, Block
from app.transfer.messages import Complete
from app.transfer.peers import Peer


@dataclass(eq=False, kw_only=True)
class MetadataWrite:
    """A record on its way into the peer's slot; the staging slot is ours until the write has ended."""

    node: NodeContext
    batch: Batch
    staging: SlotRef

    def end(self) -> None:
        """Give the staging slot back: at once when the write has ended, else out of quarantine."""
        if self.batch.idle.is_set() and not self.batch.error:
            self.node.slots.release(self.staging)
            return
        release = self.node.hold(
            self.staging.room,
            "metadata write in flight",
            None,
            lambda: self.node.slots.release(self.staging),
            self.node.settings.deadlines.quarantine_s,
        )

        async def settle() -> None:
            await self.node.transfer.settle([self.batch])
            release()

        self.node.spawn(settle(), f"metadata of {self.staging.room}")


def send_metadata(node: NodeContext, job: PrefillJob, peer: Peer) -> MetadataWrite:
    """Submit the record of a job's first token. NoCapacity when no staging slot is free."""
    assert job.destination is not None and job.first is not None
    staging = node.slots.take(job.room)
    if staging is None:
        raise NoCapacity("no metadata slot is free (cache.slots)", room=job.room)
    record = encode(
        job.room,
        job.destination.generation,
        Metadata(first_token=job.first.token, log_probability=job.first.log_probability),
    )
    block = Block(
        source=node.pool.write_slot(staging.index, record),
        destination=peer.rank.slots_base + job.destination.slot * SLOT_BYTES,
        length=SLOT_BYTES,
    )
    try:
        batch = node.transfer.submit(peer.rank.session, [block], label=f"{job.room}:metadata")
    except KvferryError:
        node.slots.release(staging)
        raise
    return MetadataWrite(node=node, batch=batch, staging=staging)


async def tell_complete(node: NodeContext, job: PrefillJob, peer: Peer, digests: list[int]) -> None:
    """Tell decode that all bytes have landed. Raises what decode answers, a digest mismatch included."""
    assert job.destination is not None
    settled_at_s = max((c.settled_at_s() for c in job.contexts), default=0.0)
    message = Complete(
        instance=node.instance,
        generation=job.destination.generation,
        sent_bytes=job.sent_bytes,
        digests=tuple(digests),
        settle_s=max(settled_at_s - time.monotonic(), 0.0),
    )
    await node.client.send(
        "POST",
        f"{peer.url}/v1/peer/rooms/{job.room}/complete",
        message,
        timeout_s=node.settings.deadlines.message_s,
    )
