"""The end of a prefill: the metadata slot, then the word that everything has landed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from app.core.slots import SLOT_BYTES, Metadata, encode
from app.service.context import NodeContext
from app.service.prefill_rooms import PrefillJob
from app.transfer.base import Batch, Block
from app.transfer.context import ChunkContext
from app.transfer.messages import Ahead, Complete
from app.transfer.peers import Peer

_WORTH_A_MESSAGE_S = 0.1


def send_metadata(node: NodeContext, job: PrefillJob, peer: Peer) -> Batch:
    """Submit the record of a job's first token, out of the staging slot that the job holds to its end."""
    assert job.destination is not None and job.first is not None and job.staging is not None
    record = encode(
        job.room,
        job.destination.generation,
        Metadata(first_token=job.first.token, log_probability=job.first.log_probability),
    )
    block = Block(
        source=node.pool.write_slot(job.staging.index, record),
        destination=peer.rank.slots_base + job.destination.slot * SLOT_BYTES,
        length=SLOT_BYTES,
    )
    return node.transfer.submit(peer.rank.session, [block], label=f"{job.room}:metadata")


async def tell_ahead(node: NodeContext, job: PrefillJob, peer: Peer, context: ChunkContext) -> None:
    """Have decode compare, beside the last chunk's forward, all layers but its last group.

    What is left to tell and to compare after the forward is then a group's digests. A short forward hides
    nothing worth a message. Whatever goes wrong here `tell_complete` makes good, but for a difference in
    the bytes: Corruption.
    """
    assert job.destination is not None and job.pages is not None
    layers = await context.nearly_sent()
    for earlier in job.contexts[:-1]:
        await earlier.finish()
    if not layers or time.monotonic() - job.phases.forward_start < _WORTH_A_MESSAGE_S:
        return
    digests = await node.digests(job.pages[job.destination.first_position :], layers=layers)
    if job.phases.forward_end or job.life.reason is not None:
        return
    message = Ahead(
        instance=node.instance,
        generation=job.destination.generation,
        layers=layers,
        digests=tuple(digests),
    )
    url = f"{peer.url}/v1/peer/rooms/{job.room}/ahead"
    await node.client.send("POST", url, message, timeout_s=node.settings.deadlines.message_s)
    job.compared = frozenset(layers)


async def tell_complete(
    node: NodeContext, job: PrefillJob, peer: Peer, digests: list[int], layers: Sequence[int]
) -> None:
    """Tell decode that all bytes have landed. Raises what decode answers, a digest mismatch included."""
    assert job.destination is not None
    message = Complete(
        instance=node.instance,
        generation=job.destination.generation,
        sent_bytes=job.sent_bytes,
        digests=tuple(digests),
        layers=tuple(layers),
        settle_s=max(job.settled_at_s() - time.monotonic(), 0.0),
    )
    await node.client.send(
        "POST",
        f"{peer.url}/v1/peer/rooms/{job.room}/complete",
        message,
        timeout_s=node.settings.deadlines.message_s,
    )
