"""Sends the pages of one chunk that one rank owns to one peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.core.ids import PageArray
from app.core.runs import Runs, coalesce
from app.transfer.base import Batch, TransferEngine
from app.transfer.blocks import Layouts, plan_blocks
from app.transfer.peers import Peer


@dataclass(eq=False, kw_only=True)
class PageSender:
    """A context's destination: physical pages of a rank, pages of the peer and positions, all alike in length."""

    rank: int
    engine: TransferEngine
    peer: Peer
    layouts: Layouts
    source: PageArray
    destination: PageArray
    positions: PageArray
    label: str
    _runs: Runs = field(init=False)

    def __post_init__(self) -> None:
        self._runs = coalesce(self.source, self.destination)

    def submit(self, layers: Sequence[int]) -> Batch | None:
        blocks = plan_blocks(self.layouts, self.peer.layouts[0], self._runs, layers)
        if not blocks:
            return None
        return self.engine.submit(self.peer.rank.session, blocks, label=self.label)

    async def wait(self, batches: Sequence[Batch]) -> None:
        await self.engine.wait(batches)

    async def settle(self, batches: Sequence[Batch]) -> None:
        await self.engine.settle(batches)
