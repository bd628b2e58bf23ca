"""The composition root: builds a node's parts, starts and stops them, and says how it is."""

from __future__ import annotations

import asyncio
import resource
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import structlog

from app import __version__
from app.core.fingerprint import Fingerprint, build_fingerprint
from app.core.holds import Quarantine
from app.core.ids import InstanceId, RoomId
from app.core.lanes import PageLane
from app.core.rooms import RoomTable
from app.core.slots import SLOT_BYTES, SlotTable
from app.engine.base import Text
from app.engine.load import load_engine
from app.errors import NotReady
from app.service.context import NodeContext
from app.service.decode import DecodeService
from app.service.forwards import Forwards
from app.service.gates import PageGate
from app.service.jobs import Job
from app.service.prefill import PrefillService
from app.settings import NodeSettings
from app.tiers.device import DevicePool
from app.tiers.events import EventBridge
from app.transfer import mooncake
from app.transfer.base import EngineDriver, Region
from app.transfer.blocks import BufferLayout
from app.transfer.client import ControlClient, HttpControlClient
from app.transfer.engine import Engine as WindowedEngine
from app.transfer.engine import Limits
from app.transfer.messages import CAPABILITIES, BufferPlace, Introduction, RankEndpoint
from app.transfer.peers import Peers

log = structlog.get_logger(__name__)

DriverFactory = Callable[[], EngineDriver]
_REAP_S = 0.1


class Node:
    """One node. `start` loads and registers; until then `context` raises NotReady."""

    def __init__(
        self,
        settings: NodeSettings,
        *,
        url: str,
        driver: DriverFactory | None = None,
        client: ControlClient | None = None,
        text: Text | None = None,
    ) -> None:
        self.settings = settings
        self.url = url
        self.instance = InstanceId(uuid.uuid4().hex)
        self.counters: Counter[str] = Counter()
        self.started_s = time.monotonic()
        self.draining = False
        self._driver = driver
        self._client = client
        self._context: NodeContext | None = None
        self._fingerprint: Fingerprint | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._control: asyncio.Task[None] | None = None
        self._text = text
        self.prefill: PrefillService | None = None
        self.decode: DecodeService | None = None
        self.start_error: str | None = None

    # ------------------------------------------------------------------ parts

    @property
    def context(self) -> NodeContext:
        if self._context is None:
            raise NotReady(self.start_error or "the node is starting")
        return self._context

    @property
    def text(self) -> Text:
        if self._text is None:
            raise NotReady("the node is starting")
        return self._text

    @property
    def fingerprint(self) -> Fingerprint:
        if self._fingerprint is None:
            raise NotReady("the node is starting")
        return self._fingerprint

    def introduction(self) -> Introduction:
        """Who this node is, for a handshake."""
        context = self.context
        endpoint = RankEndpoint(
            rank=0,
            session=context.transfer.session,
            buffers=tuple(BufferPlace.of(layout) for layout in context.layouts.values()),
            slots_base=context.pool.slots.data_ptr(),
            slots_bytes=context.pool.slots.numel(),
        )
        return Introduction(
            instance=self.instance,
            role=self.settings.role,
            url=self.url,
            capabilities=CAPABILITIES,
            fingerprint=dict(self.fingerprint.parts),
            ranks=(endpoint,),
        )

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model, map and register the pool, begin to serve."""
        settings, loop = self.settings, asyncio.get_running_loop()
        forwards = Forwards(
            threads=settings.model.threads,
            stall_s=settings.deadlines.stall_s,
            max_waiting=settings.limits.queued_requests,
        )
        load = partial(
            load_engine,
            name=settings.model.name,
            page_size=settings.cache.page_size,
            dtype=settings.model.dtype,
            device=settings.model.device,
            threads=settings.model.threads,
            layer_delay_s=settings.model.layer_delay_s,
        )
        engine, self._text = await loop.run_in_executor(None, load)
        pool = DevicePool(
            engine.geometry, settings.cache.pages, settings.cache.slots, device=settings.model.device
        )
        engine.bind(pool)
        transfer = WindowedEngine(self._driver or self._mooncake(), self._limits())
        await transfer.start()
        regions = [Region(name, b.base, b.length) for name, b in pool.buffers.items()]
        await transfer.register([*regions, Region("slots", pool.slots.data_ptr(), pool.slots.numel())])
        layouts = {
            name: BufferLayout(
                spec=b.spec, base=b.base, layer_stride=b.layer_stride, pages=settings.cache.pages
            )
            for name, b in pool.buffers.items()
        }
        client = self._client or HttpControlClient(token=settings.secret())
        self._fingerprint = build_fingerprint(
            geometry=engine.geometry,
            model=engine.name,
            model_revision=engine.revision,
            compute_dtype=engine.compute_dtype,
            draft=None,
            digest_mode=settings.transfer.digests,
            slot_bytes=SLOT_BYTES,
        )
        self._context = NodeContext(
            settings=settings,
            instance=self.instance,
            engine=engine,
            pool=pool,
            layouts=layouts,
            gate=PageGate(PageLane(settings.cache.pages), max_waiting=settings.limits.queued_requests),
            slots=SlotTable(settings.cache.slots),
            quarantine=Quarantine(),
            forwards=forwards,
            bridge=EventBridge(settings.model.device),
            transfer=transfer,
            client=client,
            peers=Peers(
                self.introduction, lambda: layouts, client, transfer, timeout_s=settings.deadlines.handshake_s
            ),
            spawn=self.spawn,
            digest_thread=ThreadPoolExecutor(1, thread_name_prefix="kvferry-digest"),
        )
        if settings.role == "prefill":
            self.prefill = PrefillService(self._context)
        else:
            self.decode = DecodeService(self._context)
        self._control = asyncio.create_task(self._reap(), name="kvferry-control")
        log.info(
            "node.ready",
            role=settings.role,
            url=self.url,
            instance=self.instance,
            fingerprint=self.fingerprint.hash,
            transport=transfer.transport,
            session=transfer.session,
            pool_bytes=pool.total_bytes,
            dtype=engine.compute_dtype,
        )

    def _mooncake(self) -> DriverFactory:
        transfer, host = self.settings.transfer, self.settings.http.advertise or self.settings.http.host
        mooncake.prepare(
            mooncake.environment(
                bind=self.settings.http.host,
                lanes=transfer.lanes,
                progress_timeout_s=transfer.progress_timeout_s,
            )
        )
        return partial(mooncake.MooncakeDriver, host)

    def _limits(self) -> Limits:
        t = self.settings.transfer
        return Limits(
            window_descriptors=t.window_descriptors,
            window_bytes=t.window_bytes,
            descriptor_bytes=t.descriptor_bytes,
            deadline_s=t.deadline_s,
            retries=t.retries,
            retry_after_s=t.retry_after_s,
            late_landing_s=t.late_landing_s,
        )

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a coroutine as a task of this node; a fault in it is logged and counted."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.counters["task_faults"] += 1
            log.error("task.fault", task=task.get_name(), exc_info=task.exception())

    async def _reap(self) -> None:
        """The control task: ends what is past its deadline."""
        while True:
            await asyncio.sleep(_REAP_S)
            now = time.monotonic()
            for hold in self.context.quarantine.expire(now):
                log.warning("hold.expired", room=hold.room, reason=hold.reason, pages=hold.pages)
            if self.prefill is not None:
                self.prefill.rooms.expire_parked(now)

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """Stop serving, give rooms `grace_s` to end, unregister memory. A second call is harmless."""
        self.draining = True
        context, self._context = self._context, None
        if context is None:
            return
        deadline = time.monotonic() + grace_s
        for job in self._jobs():
            job.fail(NotReady("the node is stopping", room=job.room))
        while self._tasks and time.monotonic() < deadline:
            await asyncio.wait(tuple(self._tasks), timeout=deadline - time.monotonic())
        for task in (*self._tasks, *([self._control] if self._control else [])):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await context.client.close()
        await context.transfer.close()
        context.bridge.close()
        context.forwards.close()
        context.digest_thread.shutdown(wait=True, cancel_futures=True)
        context.pool.close()

    # ------------------------------------------------------------------ how it is

    @property
    def live(self) -> bool:
        """False once a forward has made no progress for too long."""
        return self._context is None or not self._context.forwards.stalled

    def why_not_ready(self) -> str | None:
        """None when requests can be served."""
        if self.draining:
            return "the node is draining"
        if self._context is None:
            return self.start_error or "the node is starting"
        if self._control is None or self._control.done():
            return "the control task has died"
        if self._context.forwards.stalled:
            return "a forward makes no progress"
        return None

    def _table(self) -> RoomTable[Any]:
        service = self.prefill or self.decode
        if service is None:
            raise NotReady("the node is starting")
        return service.rooms.table

    def _jobs(self) -> list[Job]:
        return list(self._table())

    def rooms(self) -> list[dict[str, Any]]:
        """Records of the live rooms."""
        return [job.record() for job in self._jobs()]

    def ended_rooms(self) -> list[dict[str, Any]]:
        """Records of the last ended rooms, oldest first."""
        return self._table().ended()

    def job(self, room: RoomId) -> Job:
        """A live room. UnknownRoom when there is none."""
        found: Job = self._table().get(room)
        return found

    def statistics(self) -> dict[str, Any]:
        """A snapshot of every pool, table and counter."""
        context, now = self.context, time.monotonic()
        lane, table = context.gate.lane, self._table()
        return {
            "version": __version__,
            "instance": self.instance,
            "role": self.settings.role,
            "uptime_s": round(now - self.started_s, 3),
            "ready": self.why_not_ready() is None,
            "pages": {
                "total": lane.pages,
                "free": lane.free_pages,
                "largest_extent": lane.largest_extent,
                "quarantine": context.quarantine.pages,
                "waiting": context.gate.waiting,
            },
            "slots": {"total": context.slots.count, "free": context.slots.free_slots},
            "rooms": {
                "live": len(table),
                "opened": table.opened,
                "failed": table.failed,
                "states": dict(Counter(str(job.life.state) for job in table)),
            },
            "holds": context.quarantine.snapshot(now),
            "holds_expired": context.quarantine.expired,
            "forwards": {"count": context.forwards.count, "waiting": context.forwards.waiting},
            "chunks": len(self.prefill.rooms.fifos) if self.prefill else 0,
            "tombstones": len(self.prefill.rooms.tombstones) if self.prefill else 0,
            "transfer": context.transfer.statistics(),
            "sent": context.statistics.snapshot(),
            "peers": {"known": len(context.peers), "refused": context.peers.refused},
            "memory": {
                "rss_bytes": psutil.Process().memory_info().rss,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "pool_bytes": context.pool.total_bytes,
            },
            "counters": dict(self.counters),
        }

    def check_integrity(self) -> None:
        """Every pool, table and queue of this node."""
        context = self.context
        context.gate.lane.check_integrity()
        context.slots.check_integrity()
        self._table().check_integrity()
        if self.prefill is not None:
            self.prefill.rooms.fifos.check_integrity()
