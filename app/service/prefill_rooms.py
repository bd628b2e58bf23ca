"""The rooms of a prefill node: what decode says about them, and how they are left.

A room is left in two steps. The request's answer goes out at once; pages go back when every context has
drained, through quarantine with a finite deadline. An abort is acknowledged after the second step.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import structlog

from app.core.ids import PageArray, RoomId
from app.core.lifecycle import PREFILL, Event, Lifecycle, State
from app.core.pages import as_pages, destination_pages
from app.core.rooms import RoomTable
from app.errors import (
    DeadlineExceeded,
    KvferryError,
    NoCapacity,
    PageMismatch,
    PeerAborted,
    PeerFault,
    PeerRefused,
    RoomInUse,
)
from app.service.context import NodeContext
from app.service.jobs import Job, Request, TokenOut
from app.service.tombstones import Tombstones
from app.transfer.context import ChunkContext
from app.transfer.fifo import RoomFifos
from app.transfer.messages import Abort, Accepted, Destination, Drained, Failed

log = structlog.get_logger(__name__)


@dataclass(eq=False, kw_only=True)
class PrefillJob(Job):
    destination: Destination | None = None
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when decode's pages are known."""
    parked_at_s: float = 0.0
    contexts: list[ChunkContext] = field(default_factory=list)
    first: TokenOut | None = None

    @property
    def sent_bytes(self) -> int:
        return sum(c.enqueued_bytes for c in self.contexts)


class PrefillRooms:
    def __init__(self, node: NodeContext) -> None:
        self.node = node
        self.table: RoomTable[PrefillJob] = RoomTable()
        self.fifos = RoomFifos()
        self.tombstones = Tombstones(node.settings.deadlines.tombstone_s)

    # ------------------------------------------------------------------ coming

    def enter(self, request: Request) -> PrefillJob:
        """The room of a request, joined with decode's pages when those came first."""
        self.tombstones.require_alive(request.room)
        job = self.table.find(request.room)
        if job is None:
            life = Lifecycle(table=PREFILL, state=State.BOOTSTRAPPING)
            job = self.table.open(PrefillJob(room=request.room, life=life))
        elif job.life.state is State.PARKED:
            job.life.advance(Event.REQUEST)
        else:
            raise RoomInUse(f"room {request.room} is in use", room=request.room)
        job.request = request
        job.phases.mark("received")
        return job

    def destine(self, room: RoomId, message: Destination) -> Accepted:
        """Decode names its pages. Refused with the room's reason when it has ended already."""
        self.tombstones.require_alive(room)
        if message.prefill_instance != self.node.instance:
            raise PeerRefused(
                f"this is instance {self.node.instance}, not {message.prefill_instance}", room=room
            )
        peer = self.node.peers.of(message.instance)
        pages = as_pages(message.pages)
        most = min(layout.pages for layout in peer.layouts[0].values())
        if len(pages) and int(pages.max()) >= most:
            raise PageMismatch(f"page {int(pages.max())} is not of the peer's {most}", room=room)
        job = self.table.find(room)
        if job is None:
            job = self._park(room)
        elif job.destination == message:
            return Accepted(room=room, state=str(job.life.state))
        elif job.destination is not None or job.life.state is not State.BOOTSTRAPPING:
            raise RoomInUse(f"room {room} has its pages already", room=room)
        job.destination = message
        job.peer_url = peer.url
        if job.life.state is State.BOOTSTRAPPING:
            try:
                self.target(job)
            except PageMismatch as error:
                job.fail(error)
                raise
            job.life.advance(Event.DESTINATION)
        job.wanted.set()
        return Accepted(room=room, state=str(job.life.state))

    def target(self, job: PrefillJob) -> PageArray:
        """Destination pages of the positions that decode lacks. PageMismatch when they do not fit."""
        message, request = job.destination, job.request
        assert message is not None and request is not None
        if message.prompt_tokens != len(request.prompt):
            raise PageMismatch(
                f"the prompt has {len(request.prompt)} tokens here, decode expects {message.prompt_tokens}",
                room=job.room,
            )
        return destination_pages(
            as_pages(message.pages),
            prompt_tokens=message.prompt_tokens,
            first_position=message.first_position,
            page_size=self.node.page_size,
            lookahead=message.lookahead,
        )

    def _park(self, room: RoomId) -> PrefillJob:
        parked = sum(job.life.state is State.PARKED for job in self.table)
        most = self.node.settings.limits.queued_requests
        if parked >= most:
            raise NoCapacity(f"{parked} rooms wait for their request already", room=room)
        life = Lifecycle(table=PREFILL, state=State.PARKED)
        job = self.table.open(PrefillJob(room=room, life=life))
        job.parked_at_s = time.monotonic()
        return job

    # ------------------------------------------------------------------ going

    async def abort(self, room: RoomId, message: Abort) -> Drained:
        """Give a room up; returns when nothing of it is in flight, or says that it could not be proven."""
        reason = PeerAborted(message.reason, room=room)
        job = self.table.find(room)
        if job is None:
            if not self.table.succeeded(room):
                self.tombstones.set(room, reason)
            return Drained(room=room, drained=True, known=False)
        job.fail(reason)
        if job.request is None:
            self.leave(job)
        try:
            async with asyncio.timeout(self.node.settings.deadlines.drain_s):
                await job.ended.wait()
        except TimeoutError:
            return Drained(room=room, drained=False, known=True)
        return Drained(room=room, drained=True, known=True)

    def expire_parked(self, now_s: float) -> None:
        """End the rooms whose request never came."""
        limit = self.node.settings.deadlines.parked_s
        for job in self.table:
            if job.life.state is State.PARKED and now_s - job.parked_at_s > limit:
                job.fail(DeadlineExceeded(f"no request within {limit} s of decode's pages", room=job.room))
                self.leave(job)

    def leave(self, job: PrefillJob) -> None:
        """Called once, when the room's coroutine has ended (or never began)."""
        self.fifos.drop(job.room, job.life.reason or PeerAborted("the room ended", room=job.room))
        reason = job.life.reason
        if reason is not None:
            for context in job.contexts:
                context.drop(reason)
            self.tombstones.set(job.room, reason)
            if job.destination is not None and not isinstance(reason, PeerAborted):
                self.node.spawn(self._tell_failed(job, reason), f"failed {job.room}")
        unsettled = max((c.settled_at_s() for c in job.contexts), default=0.0) > time.monotonic()
        if reason is None and not unsettled:
            self._free(job)
            return
        release = self.node.hold(
            job.room,
            "draining" if reason else "a retried write may still land",
            job.pages,
            lambda: self._free(job),
            self.node.settings.deadlines.quarantine_s,
        )

        async def drain() -> None:
            for context in job.contexts:
                await context.drained()
            release()

        self.node.spawn(drain(), f"drain {job.room}")

    def _free(self, job: PrefillJob) -> None:
        if job.pages is not None:
            self.node.gate.give(job.pages)
        if job.life.failing:
            job.life.advance(Event.DRAINED)
        job.phases.mark("finished")
        self.table.clear(job.room)
        job.ended.set()

    async def _tell_failed(self, job: PrefillJob, reason: KvferryError) -> None:
        """Tell decode promptly that its other leg has failed."""
        message = Failed(instance=self.node.instance, slug=reason.slug, reason=reason.message[:2000])
        url = f"{job.peer_url}/v1/peer/rooms/{job.room}/failed"
        try:
            await self.node.client.send(
                "POST", url, message, timeout_s=self.node.settings.deadlines.message_s
            )
        except (PeerFault, DeadlineExceeded) as error:
            log.warning("peer.not_told", room=job.room, peer=job.peer_url, reason=error.message)
        except KvferryError as error:
            # decode no longer has the room: it knows
            log.debug("peer.told_late", room=job.room, peer=job.peer_url, reason=error.message)
