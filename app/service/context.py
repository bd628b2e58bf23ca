"""What the two legs share of a node. Built by the composition root (node.py)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from app.core.digests import items, page_digests
from app.core.fingerprint import Fingerprint
from app.core.holds import Quarantine
from app.core.ids import InstanceId, PageArray, RoomId
from app.core.prefix_tree import Namespace, namespace
from app.core.slots import SlotTable
from app.engine.base import Engine
from app.errors import Corruption, KvferryError
from app.service.diagnostics import Diagnostics
from app.service.forwards import Forwards
from app.service.gates import PageGate
from app.service.tiers import Tiers
from app.settings import NodeSettings
from app.tiers.device import DevicePool, readable
from app.tiers.events import EventBridge
from app.tiers.prefix import PrefixCache
from app.transfer.base import TransferEngine
from app.transfer.blocks import Layouts
from app.transfer.breaker import Breakers
from app.transfer.client import ControlClient
from app.transfer.peers import Peers
from app.transfer.statistics import TransferStatistics

_INLINE_BYTES = 1 << 20
"""Hashed within 0.2 ms, the time that a thread takes to be woken and to answer on a busy machine."""


@dataclass(eq=False, kw_only=True)
class NodeContext:
    settings: NodeSettings
    instance: InstanceId
    engine: Engine
    pools: tuple[DevicePool, ...]
    """One for each rank; the metadata slots lie in the first."""
    layouts: tuple[Layouts, ...]
    """Of each rank."""
    fingerprint: Fingerprint
    tiers: Tiers
    gate: PageGate
    slots: SlotTable
    quarantine: Quarantine
    forwards: Forwards
    bridge: EventBridge
    transfers: tuple[TransferEngine, ...]
    """One for each rank."""
    client: ControlClient
    peers: Peers
    spawn: Callable[[Coroutine[Any, Any, None], str], None]
    """Run a coroutine as a task that the node owns."""
    digest_thread: ThreadPoolExecutor
    diagnostics: Diagnostics
    breakers: Breakers
    statistics: TransferStatistics = field(default_factory=TransferStatistics)
    corrupt: Counter[str] = field(default_factory=Counter)
    """Requests that failed for wrong bytes, by the buffer; those without a place under "record"."""
    late: Counter[str] = field(default_factory=Counter)
    """Messages that came too late, by their kind and why they were dropped."""

    @property
    def page_size(self) -> int:
        return self.settings.cache.page_size

    @property
    def cache(self) -> PrefixCache:
        """Of both tiers where there is an L2, else of L1."""
        return self.tiers.cache

    def space(self, salt: str | None = None) -> Namespace:
        """Under which prompts of a tenant are kept in the prefix tree. With a draft a token further."""
        return namespace(self.fingerprint, salt=salt, bigrams=self.engine.draft is not None)

    @property
    def pool(self) -> DevicePool:
        """The first rank's."""
        return self.pools[0]

    @property
    def transfer(self) -> TransferEngine:
        """The first rank's, which also carries the metadata records."""
        return self.transfers[0]

    async def digests(
        self, pages: PageArray, mode: str | None = None, *, layers: Collection[int] | None = None
    ) -> list[int]:
        """Digests of pages of this node; off the event loop, but for so few bytes that a thread costs more."""
        chosen: Any = mode or self.settings.transfer.digests
        if chosen == "off":
            return []

        def work() -> list[int]:
            arrays, places = readable(self.pools, pages)
            return page_digests(self.engine.geometry, arrays, places, chosen, layers)

        checked = items(self.engine.geometry, len(pages), chosen, layers)
        if (
            self.pool.device.type == "cpu"
            and len(self.pools) == 1
            and _sum_within(_INLINE_BYTES, (s.item_bytes for s, _, _ in checked))
        ):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.digest_thread, work)

    def layer_end(self) -> None:
        """On the forward thread, at each layer's end."""
        self.forwards.progress()
        self.diagnostics.layer_end()

    def count_corruption(self, reason: KvferryError | None) -> None:
        """At the end of a room, on either side."""
        if isinstance(reason, Corruption):
            self.corrupt[reason.details.get("buffer", "record")] += 1

    def hold(
        self, room: RoomId, reason: str, pages: PageArray | None, give_back: Callable[[], None], for_s: float
    ) -> Callable[[], bool]:
        """Put resources into quarantine; the answer ends the hold early, once."""
        hold = self.quarantine.hold(
            room=room,
            reason=reason,
            pages=0 if pages is None else len(pages),
            now_s=time.monotonic(),
            for_s=for_s,
            give_back=give_back,
        )
        return lambda: self.quarantine.release(hold)


def _sum_within(most: int, values: Iterable[int]) -> bool:
    """Whether values add up to at most `most`; looks at no more of them than it needs."""
    return all(total <= most for total in accumulate(values))
