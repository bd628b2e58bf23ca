"""The end of a prefill: what it hands over, the metadata slot, then the word that everything has landed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from app.core.slots import Metadata
from app.engine.generate import Handover
from app.service.context import NodeContext
from app.service.prefill_job import PrefillJob
from app.transfer.base import Batch, Block
from app.transfer.context import ChunkContext
from app.transfer.messages import Ahead, Complete
from app.transfer.peers import Peer

_WORTH_A_MESSAGE_S = 0.1


def metadata_of(handover: Handover) -> Metadata:
    """The record of what prefill hands over. The logits stay here."""
    none = np.empty(0, np.float32)
    return Metadata(
        first_token=handover.token,
        log_probability=handover.log_probability,
        hidden=none if handover.hidden is None else handover.hidden,
        top_tokens=handover.top_ids,
        top_log_probabilities=handover.top_log_probabilities,
    )


def handover_of(metadata: Metadata) -> Handover:
    """What a record hands over; its arrays stay those of the record, and of the slot that it lies in."""
    return Handover(
        token=metadata.first_token,
        log_probability=metadata.log_probability,
        hidden=metadata.hidden if len(metadata.hidden) else None,
        top_ids=metadata.top_tokens,
        top_log_probabilities=metadata.top_log_probabilities,
    )


def send_metadata(node: NodeContext, job: PrefillJob, peer: Peer) -> Batch:
    """Submit the record of a job's first token, out of the staging slot that the job holds to its end."""
    assert job.destination is not None and job.handover is not None and job.staging is not None
    form = node.pool.slot_format
    record = form.encode(job.room, job.destination.generation, job.handover)
    block = Block(
        source=node.pool.write_slot(job.staging.index, record),
        destination=peer.rank.slots_base + form.offset(job.destination.slot),
        length=form.slot_bytes,
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
        ranks=job.by_rank(),
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
        ranks=job.by_rank(),
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
