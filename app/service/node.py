"""The composition root: builds a node's parts, starts and stops them, and says how it is."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import anyio
import structlog

from app.core.fingerprint import Fingerprint
from app.core.ids import InstanceId, RoomId
from app.core.rooms import RoomTable
from app.engine.base import Text
from app.errors import NotReady
from app.service.build import DriverFactory, bootstrap_hosts, build
from app.service.context import NodeContext
from app.service.decode import DecodeService
from app.service.heartbeats import Heartbeats
from app.service.jobs import Job
from app.service.prefill import PrefillService
from app.service.report import snapshot
from app.settings import NodeSettings
from app.transfer.client import ControlClient
from app.transfer.messages import CAPABILITIES, BufferPlace, Introduction, RankEndpoint

log = structlog.get_logger(__name__)

_REAP_S = 0.1
_AFTER_DRAIN_S = 2.0
_ROUNDS = 3


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
        self._drained = False
        self.hosts = bootstrap_hosts(settings)
        self._driver = driver
        self._client = client
        self._context: NodeContext | None = None
        self._fingerprint: Fingerprint | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._control: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._text = text
        self.prefill: PrefillService | None = None
        self.decode: DecodeService | None = None
        self.start_error: str | None = None

    # ------------------------------------------------------------------ parts

    @property
    def context(self) -> NodeContext:
        if self._context is None:
            raise NotReady(self.start_error or f"the node is {'stopping' if self.draining else 'starting'}")
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
        slots = context.pool.slots
        ranks = tuple(
            RankEndpoint(
                rank=rank,
                session=transfer.session,
                buffers=tuple(BufferPlace.of(layout) for layout in layouts.values()),
                slots_base=0 if rank else slots.data_ptr(),
                slots_bytes=0 if rank else slots.numel(),
            )
            for rank, (transfer, layouts) in enumerate(zip(context.transfers, context.layouts, strict=True))
        )
        return Introduction(
            instance=self.instance,
            role=self.settings.role,
            url=self.url,
            capabilities=CAPABILITIES,
            fingerprint=dict(self.fingerprint.parts),
            ranks=ranks,
        )

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model, map and register the pool, begin to serve."""
        settings = self.settings
        self._context, self._text, self._fingerprint = await build(
            settings,
            instance=self.instance,
            introduction=self.introduction,
            spawn=self.spawn,
            hosts=self.hosts,
            driver=self._driver,
            client=self._client,
        )
        if settings.role == "prefill":
            self.prefill = PrefillService(self._context)
        else:
            self.decode = DecodeService(self._context)
        self._control = asyncio.create_task(self._reap(self._context), name="kvferry-control")
        self._beating = asyncio.create_task(self.heartbeats.run(), name="kvferry-heartbeats")
        log.info(
            "node.ready",
            role=settings.role,
            url=self.url,
            instance=self.instance,
            fingerprint=self.fingerprint.hash,
            transport=self._context.transfer.transport,
            sessions=[transfer.session for transfer in self._context.transfers],
            pool_bytes=sum(pool.total_bytes for pool in self._context.pools),
            dtype=self._context.engine.compute_dtype,
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

    async def _reap(self, context: NodeContext) -> None:
        """The control task: ends what is past its deadline. A fault in one room must not end it."""
        while True:
            await asyncio.sleep(_REAP_S)
            now = time.monotonic()
            try:
                for hold in context.quarantine.expire(now):
                    log.warning("hold.expired", room=hold.room, reason=hold.reason, pages=hold.pages)
                if self.prefill is not None:
                    self.prefill.rooms.expire_parked(now)
                context.tiers.keep_house(self.settings.hicache.lost_s)
                context.gate.serve()  # what has been evicted ahead may be what somebody waits for
            except Exception as error:
                self.counters["task_faults"] += 1
                log.error("control.fault", exc_info=error)

    async def drain(self, *, finish_s: float, abort_s: float = 10.0) -> bool:
        """Take no new rooms, let live ones finish for `finish_s`, then abort them by protocol for `abort_s`.

        Peers are answered meanwhile: what they say ends the rooms. False when rooms are left.
        """
        self.draining = True
        if self._context is None:
            return True
        if self.prefill is not None:
            self.prefill.rooms.end_parked(NotReady("the node is draining"))
        if not await self._no_rooms(finish_s):
            for job in self._jobs():
                job.fail(NotReady("the node is stopping", room=job.room))
            await self._no_rooms(abort_s)
        self._drained = True
        return not self._jobs()

    async def _no_rooms(self, within_s: float) -> bool:
        """Wait for the last room to end; whether it has."""
        with anyio.move_on_after(within_s):
            while jobs := self._jobs():
                await jobs[0].ended.wait()
        return not self._jobs()

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """Stop serving, give rooms `grace_s` to end, unregister memory. A second call is harmless."""
        self.draining = True
        context, self._context = self._context, None
        if context is None:
            return
        if self._drained:  # what has not ended by now waits for a peer that does not answer
            grace_s = min(grace_s, _AFTER_DRAIN_S)
        deadline = time.monotonic() + grace_s
        for job in self._jobs():
            job.fail(NotReady("the node is stopping", room=job.room))
        while self._tasks and time.monotonic() < deadline:
            await asyncio.wait(tuple(self._tasks), timeout=deadline - time.monotonic())
        for loop in (self._control, self._beating):
            if loop is not None:
                loop.cancel()
        for _ in range(_ROUNDS):  # a room that is cancelled may start a task of its own for its drain
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(tuple(self._tasks), timeout=grace_s)
        await context.client.close()
        for transfer in context.transfers:
            await transfer.close()
        context.bridge.close()
        context.forwards.close()
        context.digest_thread.shutdown(wait=True, cancel_futures=True)
        await asyncio.to_thread(context.tiers.close)
        for pool in context.pools:
            pool.close()

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
        if self._beating is None or self._beating.done():
            return "the task that asks peers has died"
        if self._context.forwards.stalled:
            return "a forward makes no progress"
        stall_s = self.settings.deadlines.stall_s
        for rank, transfer in enumerate(self._context.transfers):
            reason = transfer.why_not_ready(stall_s=stall_s)
            if reason is not None:
                return f"rank {rank}: {reason}"  # requests need all of them
        return None

    @property
    def service(self) -> PrefillService | DecodeService:
        """Of this node's role. NotReady while the node is starting."""
        service = self.prefill or self.decode
        if service is None:
            raise NotReady("the node is starting")
        return service

    @property
    def heartbeats(self) -> Heartbeats[Any]:
        return self.service.heartbeats

    def table(self) -> RoomTable[Any]:
        """The rooms of this node's role."""
        return self.service.rooms.table

    @property
    def live_rooms(self) -> int:
        service = self.prefill or self.decode
        return 0 if service is None else len(service.rooms.table)

    def _jobs(self) -> list[Job]:
        return list(self.table())

    def rooms(self) -> list[dict[str, Any]]:
        """Records of the live rooms."""
        return [job.record() for job in self._jobs()]

    def ended_rooms(self) -> list[dict[str, Any]]:
        """Records of the last ended rooms, oldest first."""
        return self.table().ended()

    def job(self, room: RoomId) -> Job:
        """A live room. UnknownRoom when there is none."""
        found: Job = self.table().get(room)
        return found

    def statistics(self) -> dict[str, Any]:
        """A snapshot of every pool, table and counter."""
        return snapshot(self)

    def check_integrity(self) -> None:
        """Every pool, table and queue of this node."""
        context = self.context
        context.tiers.check_integrity()
        context.slots.check_integrity()
        self.table().check_integrity()
        if self.prefill is not None:
            self.prefill.rooms.fifos.check_integrity()
