"""The rooms of a prefill node: what decode says about them, and how they are left.

A room is left in two steps. The request's answer goes out at once; pages go back when every context has
drained, through quarantine with a finite deadline. An abort is acknowledged after the second step.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import structlog

from app.core.ids import PageArray, RoomId
from app.core.lifecycle import PREFILL, Event, Lifecycle, State
from app.core.pages import as_pages, destination_pages, pages_for
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
    TooManyRooms,
)
from app.service.context import NodeContext
from app.service.jobs import Request
from app.service.prefill_job import PrefillJob
from app.service.tombstones import Tombstones
from app.transfer.fifo import RoomFifos
from app.transfer.messages import Abort, Accepted, Destination, Drained, Failed

log = structlog.get_logger(__name__)

_REMEMBER = 1024


class PrefillRooms:
    def __init__(self, node: NodeContext) -> None:
        self.node = node
        self.table: RoomTable[PrefillJob] = RoomTable()
        self.fifos = RoomFifos()
        self.tombstones = Tombstones(node.settings.deadlines.tombstone_s)
        self._served: deque[tuple[str, int]] = deque(maxlen=_REMEMBER)
        self._over: deque[tuple[str, int]] = deque(maxlen=_REMEMBER)
        """Uses of a room that have been given up: a tombstone goes by the number alone, and ends sooner."""
        self._unproven: deque[RoomId] = deque(maxlen=_REMEMBER)

    # ------------------------------------------------------------------ coming

    def enter(self, request: Request) -> PrefillJob:
        """The room of a request, joined with decode's pages when those came first.

        NoCapacity when the queue is full; decode's pages are then refused with the same reason.
        """
        self.tombstones.require_alive(request.room)
        job = self.table.find(request.room)
        if job is None:
            self._require_place(request.room)
            life = Lifecycle(table=PREFILL, state=State.BOOTSTRAPPING)
            job = self.table.open(PrefillJob(room=request.room, life=life))
        elif job.life.state is State.PARKED:
            job.life.advance(Event.REQUEST)
        else:
            raise RoomInUse(f"room {request.room} is in use", room=request.room)
        job.request = request
        job.phases.mark("received")
        return job

    def _require_place(self, room: RoomId) -> None:
        waiting = sum(job.life.state in (State.BOOTSTRAPPING, State.WAITING) for job in self.table)
        if waiting >= self.node.settings.limits.queued_requests:
            full = NoCapacity(f"{waiting} requests wait already (limits.queued_requests)", room=room)
            self.tombstones.set(room, full)
            raise full

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
        slots = peer.rank.slots_bytes // self.node.pool.slot_format.slot_bytes
        if message.slot >= slots:
            raise PageMismatch(f"metadata slot {message.slot} is not of the peer's {slots}", room=room)
        possible = pages_for(self.node.engine.max_positions, self.node.page_size) + message.lookahead
        if len(pages) > possible:
            raise PageMismatch(
                f"{len(pages)} pages, and no prompt of this model has over {possible}", room=room
            )
        job = self.table.find(room)
        if job is not None and job.life.reason is not None:
            raise job.life.reason
        if (message.instance, message.generation) in self._served:
            # the same word once more, late: never the pages of a later use of the number
            self.node.late["destination: served"] += 1
            return Accepted(room=room, state=str(State.SUCCESS))
        if (message.instance, message.generation) in self._over:
            # decode has let go of these pages: a request that comes under the number must not fill them
            self.node.late["destination: given up"] += 1
            raise PeerAborted("this use of the room has been given up", room=room)
        if job is None:
            self._require_share(message)
            job = self._park(room)
        elif job.destination == message:
            return Accepted(room=room, state=str(job.life.state))
        elif job.destination is not None or job.life.state is not State.BOOTSTRAPPING:
            raise RoomInUse(f"room {room} has its pages already", room=room)
        else:
            self._require_share(message)
        job.destination = message
        job.peer, job.peer_url = peer, peer.url
        if job.life.state is State.BOOTSTRAPPING:
            try:
                self.target(job)
            except PageMismatch as error:
                job.given_up = job.fail(error)  # decode hears of it by this very answer
                raise
            job.life.advance(Event.DESTINATION)
        job.wanted.set()
        return Accepted(room=room, state=str(job.life.state))

    def _require_share(self, message: Destination) -> None:
        """TooManyRooms when one peer takes more than its share."""
        most = self.node.settings.limits.rooms_per_peer
        theirs = (j for j in self.table if j.destination and j.destination.instance == message.instance)
        if sum(1 for _ in theirs) >= most:
            raise TooManyRooms(f"this peer has {most} rooms already (limits.rooms_per_peer)")

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
        reason = PeerAborted(message.reason, room=room, leg=message.leg)
        key = (message.instance or "", message.generation)
        if message.generation:
            self._over.append(key)
        job = self.table.find(room)
        if job is None:
            if key not in self._served:
                self.tombstones.set(room, reason)
            return self._drained(room, proven=room not in self._unproven, known=False)
        if job.key != key and (key in self._served or (message.generation and job.key is not None)):
            # of an earlier use of the number, which had ended before this one could begin
            self.node.late["abort: earlier use"] += 1
            return self._drained(room, proven=True, known=False)
        if job.fail(reason):
            job.given_up = True
            if job.request is None:
                self.leave(job)
        try:
            async with asyncio.timeout(self.node.settings.deadlines.drain_s):
                await job.ended.wait()
        except TimeoutError:
            return self._drained(room, proven=False)
        return self._drained(room, proven=job.proven)

    def _drained(self, room: RoomId, *, proven: bool, known: bool = True) -> Drained:
        return Drained(room=room, drained=proven, known=known, instance=self.node.instance)

    def expire_parked(self, now_s: float) -> None:
        """End the rooms whose request never came."""
        limit = self.node.settings.deadlines.parked_s
        for job in self.table:
            if job.life.state is State.PARKED and now_s - job.parked_at_s > limit:
                job.fail(DeadlineExceeded(f"no request within {limit} s of decode's pages", room=job.room))
                self.leave(job)

    def end_parked(self, reason: KvferryError) -> None:
        """End them all: their requests are refused from now on."""
        for job in self.table:
            if job.life.state is State.PARKED:
                job.fail(type(reason)(reason.message, room=job.room))
                self.leave(job)

    def leave(self, job: PrefillJob) -> None:
        """Called once, when the room's coroutine has ended (or never began)."""
        self.fifos.drop(job.room, job.life.reason or PeerAborted("the room ended", room=job.room))
        reason = job.life.reason
        if reason is not None:
            self.tombstones.set(job.room, reason)
            if job.key is not None:
                self._over.append(job.key)
            if job.destination is not None and not job.given_up:
                self.node.spawn(self._tell_failed(job, reason), f"failed {job.room}")
        elif job.key is not None:
            self._served.append(job.key)
        if reason is None and job.settled_at_s() <= time.monotonic():
            job.proven = True
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
            await job.drained(self.node.transfer)
            job.proven = True
            release()

        self.node.spawn(drain(), f"drain {job.room}")

    def _free(self, job: PrefillJob) -> None:
        if job.lease is not None:
            self.node.gate.end(job.lease)
        if job.staging is not None:
            self.node.slots.release(job.staging)
        if not job.proven:
            self._unproven.append(job.room)
        if job.life.failing:
            job.life.advance(Event.DRAINED)
        job.phases.mark("finished")
        self.table.clear(job.room)
        job.ended.set()

    async def _tell_failed(self, job: PrefillJob, reason: KvferryError) -> None:
        """Tell decode promptly that its other leg has failed."""
        assert job.destination is not None
        message = Failed(
            instance=self.node.instance,
            generation=job.destination.generation,
            slug=reason.slug,
            reason=reason.message[:2000],
            leg=reason.leg or "prefill",
        )
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
