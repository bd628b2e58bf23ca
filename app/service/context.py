"""What the two legs share of a node. Built by the composition root (node.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from app.core.digests import page_digests
from app.core.holds import Quarantine
from app.core.ids import InstanceId, PageArray, RoomId
from app.core.slots import SlotTable
from app.engine.base import Engine
from app.service.forwards import Forwards
from app.service.gates import PageGate
from app.settings import NodeSettings
from app.tiers.device import DevicePool
from app.tiers.events import EventBridge
from app.transfer.base import TransferEngine
from app.transfer.blocks import Layouts
from app.transfer.client import ControlClient
from app.transfer.peers import Peers
from app.transfer.statistics import TransferStatistics


@dataclass(eq=False, kw_only=True)
class NodeContext:
    settings: NodeSettings
    instance: InstanceId
    engine: Engine
    pool: DevicePool
    layouts: Layouts
    gate: PageGate
    slots: SlotTable
    quarantine: Quarantine
    forwards: Forwards
    bridge: EventBridge
    transfer: TransferEngine
    client: ControlClient
    peers: Peers
    spawn: Callable[[Coroutine[Any, Any, None], str], None]
    """Run a coroutine as a task that the node owns."""
    digest_thread: ThreadPoolExecutor
    statistics: TransferStatistics = field(default_factory=TransferStatistics)

    @property
    def page_size(self) -> int:
        return self.settings.cache.page_size

    async def digests(self, pages: PageArray, mode: str | None = None) -> list[int]:
        """Digests of pages of this node, off the event loop."""
        chosen: Any = mode or self.settings.transfer.digests
        if chosen == "off":
            return []

        def work() -> list[int]:
            arrays, places = self.pool.readable(pages)
            return page_digests(self.engine.geometry, arrays, places, chosen)

        return await asyncio.get_running_loop().run_in_executor(self.digest_thread, work)

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
