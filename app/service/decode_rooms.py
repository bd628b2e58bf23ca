"""The rooms of a decode node: what prefill says about them, and how they are left.

Pages and slot go back at once when no write can land on them: before the announcement, or after the
word that everything has landed. In between they wait in quarantine for prefill's drain acknowledgement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

import structlog
from pydantic import ValidationError

from app.core.ids import RoomId
from app.core.lifecycle import DECODE, Event, Lifecycle, State
from app.core.rooms import RoomTable
from app.errors import (
    IllegalTransition,
    KvferryError,
    NoCapacity,
    PeerRefused,
    TooManyRooms,
    UnknownRoom,
)
from app.service.context import NodeContext
from app.service.decode_job import DecodeJob
from app.service.jobs import Request
from app.service.landing import require_all_ranks, require_equal
from app.transfer.client import error_from_problem
from app.transfer.messages import (
    Abort,
    Ahead,
    Alive,
    Complete,
    Drained,
    Failed,
    Heartbeat,
    RoomUse,
    Told,
)

log = structlog.get_logger(__name__)


class DecodeRooms:
    def __init__(self, node: NodeContext) -> None:
        self.node = node
        self.table: RoomTable[DecodeJob] = RoomTable()

    def enter(self, request: Request) -> DecodeJob:
        """The room of a request. RoomInUse while another has it; NoCapacity, told to prefill, when full."""
        self._require_place(request)
        life = Lifecycle(table=DECODE, state=State.BOOTSTRAPPING)
        job = self.table.open(DecodeJob(room=request.room, life=life, request=request))
        job.peer_url = request.bootstrap_url
        job.phases.mark("received")
        return job

    def _require_place(self, request: Request) -> None:
        if request.room in self.table:
            return
        limits = self.node.settings.limits
        waiting = sum(job.life.state is State.BOOTSTRAPPING for job in self.table)
        theirs = sum(job.peer_url == request.bootstrap_url for job in self.table)
        full: NoCapacity
        if waiting >= limits.queued_requests:
            full = NoCapacity(f"{waiting} requests wait already (limits.queued_requests)", room=request.room)
        elif theirs >= limits.rooms_per_peer:
            full = TooManyRooms(
                f"{theirs} rooms are shared with {request.bootstrap_url} already (limits.rooms_per_peer)",
                room=request.room,
            )
        else:
            return
        self._spawn_abort(request.bootstrap_url, request.room, full)
        raise full

    # ------------------------------------------------------------------ prefill's words

    def heartbeat(self, message: Heartbeat) -> Alive:
        """Which of a prefill's rooms are still wanted: what it asks before it writes."""
        gone = tuple(use for use in message.rooms if not self._wants(use, message.instance))
        return Alive(instance=self.node.instance, gone=gone)

    def _wants(self, use: RoomUse, instance: str) -> bool:
        job = self.table.find(RoomId(use.room))
        if job is None:
            # ended well: prefill may ask before it has read the answer to its last word, and must not fail
            return self.table.succeeded(RoomId(use.room))
        mine = job.peer is not None and job.peer.instance == instance and job.generation == use.generation
        return mine and job.life.reason is None

    async def ahead(self, room: RoomId, message: Ahead) -> Told:
        """Compare what has landed so far, while prefill still computes. Changes nothing once all is there."""
        job = self._mine(room, message)
        landed = await self._landed_digests(job, message.layers)
        if landed is not None:
            require_equal(self.node, job, message, landed, message.layers)
            job.checked.update(message.layers)
        return Told(room=room, accepted=True)

    async def complete(self, room: RoomId, message: Complete) -> Told:
        """Everything has landed. Refused unless it is this room's own prefill and generation.

        A second time it is accepted and changes nothing: the answer to the first may have been lost.
        """
        if room not in self.table and self.table.succeeded(room):
            return Told(room=room, accepted=True)
        job = self._mine(room, message)
        every = self.node.engine.geometry.layers
        layers = every if message.layers is None else message.layers
        landed = await self._landed_digests(job, layers)
        if landed is None:
            return Told(room=room, accepted=True)
        left = set(every) - set(layers) - job.checked
        if left:
            raise PeerRefused(f"no digests were sent of layers {sorted(left)}", room=room)
        require_all_ranks(self.node, job, message)
        job.delivered = True
        job.settled_at_s = time.monotonic() + min(message.settle_s, self.node.settings.deadlines.quarantine_s)
        require_equal(self.node, job, message, landed, layers)
        job.life.advance(Event.LANDED)
        job.facts["received_bytes"] = message.sent_bytes
        job.phases.mark("transfer_end")
        job.landed.set()
        return Told(room=room, accepted=True)

    async def _landed_digests(self, job: DecodeJob, layers: Collection[int]) -> list[int] | None:
        """Digests of what is here of these layers. None when the room has landed, before or meanwhile."""
        landed: list[int] = []
        if not job.landed.is_set():
            self._require_waiting(job)
            landed = await self.node.digests(job.received_pages(self.node.page_size), layers=layers)
        if job.landed.is_set():
            return None
        # meanwhile the room may have been given up
        self._require_waiting(job)
        return landed

    @staticmethod
    def _require_waiting(job: DecodeJob) -> None:
        """UnknownRoom for a room that has failed; any other state that does not wait fails it here and now."""
        if job.life.state is State.WAITING:
            return
        stray = IllegalTransition(f"landed in state {job.life.state}", room=job.room)
        if job.fail(stray):
            raise stray
        raise UnknownRoom(f"room {job.room} has been given up", room=job.room)

    async def failed(self, room: RoomId, message: Failed) -> Told:
        """The prefill leg has failed: so has this one, with the same reason."""
        job = self._mine(room, message)
        problem = {
            "type": f"urn:kvferry:problem:{message.slug}",
            "detail": message.reason,
            "room": room,
            "leg": message.leg,
        }
        return Told(room=room, accepted=job.fail(error_from_problem(502, problem, job.peer_url)))

    def _mine(self, room: RoomId, message: Ahead | Complete | Failed) -> DecodeJob:
        """The room that a message is about. What is for an earlier use of it, or for none, is counted."""
        kind = type(message).__name__.lower()
        try:
            job = self.table.get(room)
        except UnknownRoom:
            self.node.late[f"{kind}: ended room"] += 1
            raise
        if job.peer is None or job.peer.instance != message.instance:
            self.node.late[f"{kind}: other instance"] += 1
            raise PeerRefused(f"instance {message.instance} is not the prefill of room {room}", room=room)
        if message.generation != job.generation:
            self.node.late[f"{kind}: other generation"] += 1
            raise PeerRefused(f"generation {message.generation} is not of this room", room=room)
        return job

    # ------------------------------------------------------------------ going

    def leave(self, job: DecodeJob) -> None:
        """Called once, when the room's coroutine has ended."""
        reason = job.life.reason
        if reason is not None and job.announced and not job.delivered:
            for_s = self.node.settings.deadlines.quarantine_s
            release = self._hold(job, "awaiting drain acknowledgement", for_s)
            self.node.spawn(self._abort_and_drain(job, reason, release), f"abort {job.room}")
        elif (left := job.settled_at_s - time.monotonic()) > 0:
            self._hold(job, "a retried write may still land", left)
        else:
            if reason is not None and not job.announced:
                self._spawn_abort(job.peer_url, job.room, reason)
            self._free(job)

    def _hold(self, job: DecodeJob, why: str, for_s: float) -> Callable[[], bool]:
        return self.node.hold(job.room, why, job.pages, lambda: self._free(job), for_s)

    def _free(self, job: DecodeJob) -> None:
        if job.lease is not None:
            self.node.gate.end(job.lease)
        self.free_slot(job)
        if job.life.failing:
            job.life.advance(Event.DRAINED)
        job.phases.mark("finished")
        self.table.clear(job.room)
        job.ended.set()

    def free_slot(self, job: DecodeJob) -> None:
        """Give the metadata slot back, once."""
        slot, job.slot = job.slot, None
        if slot is not None:
            self.node.slots.release(slot)

    async def _abort_and_drain(
        self, job: DecodeJob, reason: KvferryError, release: Callable[[], bool]
    ) -> None:
        answer = await tell_abort(self.node, job.peer_url, job.room, reason, generation=job.generation)
        if answer is not None and answer.drained:
            if job.peer is not None and answer.instance not in (None, job.peer.instance):
                # its process is gone; what it had sent may still be on its way through both kernels
                await asyncio.sleep(self.node.settings.transfer.late_landing_s)
            release()
        else:
            log.warning("room.quarantined", room=job.room, peer=job.peer_url)

    def _spawn_abort(self, url: str, room: RoomId, reason: KvferryError) -> None:
        """Tell prefill; nobody waits for the answer."""

        async def tell() -> None:
            await tell_abort(self.node, url, room, reason)

        self.node.spawn(tell(), f"abort {room}")


async def tell_abort(
    node: NodeContext, url: str, room: RoomId, reason: KvferryError, *, generation: int = 0
) -> Drained | None:
    """Tell a prefill node that a room is given up. None when it does not answer.

    Its answer is the drain acknowledgement, so this may take as long as a write takes to end.
    """
    if not url:
        return None
    message = Abort(
        instance=node.instance,
        generation=generation,
        slug=reason.slug,
        reason=reason.message[:2000],
        leg=reason.leg or "decode",
    )
    timeout_s = node.settings.deadlines.drain_s + node.settings.deadlines.message_s
    try:
        answer = await node.client.send(
            "POST", f"{url}/v1/peer/rooms/{room}/abort", message, timeout_s=timeout_s
        )
        return Drained.model_validate(answer)
    except (KvferryError, ValidationError) as error:
        log.warning("peer.not_told", room=room, peer=url, reason=str(error))
        return None
