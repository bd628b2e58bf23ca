"""Whether what has landed at decode is what prefill has sent: every position once, and the same bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from app.core.digests import require_equal_digests
from app.core.pages import require_tiling
from app.errors import KvferryError, PageMismatch
from app.service.context import NodeContext
from app.service.decode_job import DecodeJob
from app.transfer.messages import Ahead, Complete


def require_all_ranks(node: NodeContext, job: DecodeJob, message: Complete) -> None:
    """PageMismatch, which fails the room, unless every rank has sent its part, without gap or overlap."""
    assert job.peer is not None
    expected = [endpoint.rank for endpoint in job.peer.introduction.ranks]
    page_bytes = node.engine.geometry.page_bytes()
    try:
        if [sent.rank for sent in message.ranks] != expected:
            raise PageMismatch(
                f"ranks {[sent.rank for sent in message.ranks]} have sent, not {expected}", room=job.room
            )
        stop = job.first_position + len(job.received_pages(node.page_size))
        require_tiling((sent.positions for sent in message.ranks), job.first_position, stop)
        for sent in message.ranks:
            owed = sum(count for _, count in sent.positions) * page_bytes
            if sent.sent_bytes != owed:
                raise PageMismatch(f"rank {sent.rank} has sent {sent.sent_bytes} bytes, not {owed}")
    except KvferryError as error:
        job.fail(error)
        raise


def require_equal(
    node: NodeContext,
    job: DecodeJob,
    message: Ahead | Complete,
    landed: Sequence[int],
    layers: Collection[int],
) -> None:
    """Corruption, which fails the room, unless these are the bytes that were sent."""

    def sender(position: int) -> int | None:
        parts = ((sent.rank, first, count) for sent in message.ranks for first, count in sent.positions)
        return next((rank for rank, first, count in parts if first <= position < first + count), None)

    try:
        require_equal_digests(
            node.engine.geometry,
            message.digests,
            landed,
            pages=job.received_pages(node.page_size),
            first_position=job.first_position,
            mode=node.settings.transfer.digests,
            room=job.room,
            layers=layers,
            rank_of=sender,
        )
    except KvferryError as error:
        job.fail(error)
        raise
