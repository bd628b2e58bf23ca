"""What goes on beside one chunk's forward: its pages to the peer, rank by rank, and to the host tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.core.chunks import ChunkPlan
from app.core.ids import PageArray, Source
from app.core.owners import owned_by
from app.core.pages import slice_positions
from app.service.context import NodeContext
from app.service.prefill_job import PrefillJob
from app.service.sender import PageSender
from app.transfer.peers import Peer

LayerEnd = Callable[[Source, int, Any], None]


def senders_of(
    node: NodeContext, job: PrefillJob, plan: ChunkPlan, peer: Peer, target: PageArray
) -> list[PageSender]:
    """One a rank: the pages of a chunk that it owns, paired by absolute position with the peer's."""
    assert job.destination is not None and job.pages is not None
    first = job.destination.first_position
    pages = slice_positions(job.pages, 0, plan.first_page, plan.last_page)
    owners = node.cache.lanes.owners_of(pages)
    wanted = slice_positions(target, first, plan.first_page, plan.last_page)
    senders = []
    for rank, (engine, layouts) in enumerate(zip(node.transfers, node.layouts, strict=True)):
        mine, positions = owned_by(pages, owners, rank, plan.first_page)
        senders.append(
            PageSender(
                rank=rank,
                engine=engine,
                peer=peer,
                layouts=layouts,
                source=node.cache.lanes.physical(mine),
                destination=wanted[positions - plan.first_page],
                positions=positions,
                label=f"{job.room}:{plan.start}:{rank}",
            )
        )
    return senders


def backup_of(node: NodeContext, job: PrefillJob, plan: ChunkPlan) -> LayerEnd | None:
    """Copies the pages that a chunk fills to L2, layer by layer. None when nothing was reserved."""
    if job.backup is None or node.tiers.hicache is None:
        return None
    page = node.page_size
    chunk = node.tiers.hicache.chunk([(job.backup, plan.start // page, plan.end // page)])

    def layer_end(source: Source, layer: int, event: Any) -> None:
        chunk.layer_end(source, layer, [] if event is None else [event])

    return layer_end
