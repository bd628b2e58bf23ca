"""The rooms of a decode node: what prefill says about them, and how they are left.

Pages and slot go back at once when no write can land on them: before the announcement, or after the
word that everything has landed. In between they wait in quarantine for prefill's drain acknowledgement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import structlog
from pydantic import ValidationError

from app.core.digests import require_equal_digests
from app.core.ids import PageArray, RoomId
from app.core.lifecycle import DECODE, Event, Lifecycle, State
from app.core.pages import pages_for, require_tiling
from app.core.rooms import RoomTable
from app.core.slots import SlotRef
from app.engine.generate import Continuation
from app.errors import (
    IllegalTransition,
    KvferryError,
    NoCapacity,
    PageMismatch,
    PeerRefused,
    TooManyRooms,
    UnknownRoom,
)
from app.service.context import NodeContext
from app.service.jobs import Job, Request, TokenOut
from app.transfer.client import error_from_problem
from app.transfer.messages import (
    Abort,
    Ahead,
    Alive,
    Complete,
    Drained,
    Failed,
    Heartbeat,
    Leg,
    RoomUse,
    Told,
)

log = structlog.get_logger(__name__)


@dataclass(eq=False, kw_only=True)
class DecodeJob(Job):
    leg: ClassVar[Leg] = "decode"
    other_leg: ClassVar[Leg] = "prefill"

    slot: SlotRef | None = None
    generation: int = 0
    """Of the slot, and known after the slot has gone: prefill may repeat its word."""
    first_position: int = 0
    """Positions below it were here already: nothing is received for them."""
    announced: bool = False
    """Prefill may know the pages: a write can land."""
    delivered: bool = False
    """Prefill has said that every write has ended: only a retried one may still land, until settled_at_s."""
    settled_at_s: float = 0.0
    checked: set[int] = field(default_factory=set)
    """Layers whose digests have been compared ahead of the end."""
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    """Delivered, and the bytes are those that were sent."""
    emitted: list[int] = field(default_factory=list)
    """Tokens of the answer so far."""
    continuation: Continuation | None = None
    stop_requested: bool = False
    """The reader has seen enough: end with success after the step in progress."""
    output: asyncio.Queue[TokenOut | None] = field(default_factory=asyncio.Queue)
    """Tokens as they come; None ends it, whatever the outcome."""

    def prompt_pages(self, page_size: int) -> PageArray:
        """The pages of the prompt, without those for its continuation."""
        assert self.pages is not None and self.request is not None
        return self.pages[: pages_for(len(self.request.prompt), page_size)]


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
            self._require_equal(job, message, landed, message.layers)
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
        self._require_all_ranks(job, message)
        job.delivered = True
        job.settled_at_s = time.monotonic() + min(message.settle_s, self.node.settings.deadlines.quarantine_s)
        self._require_equal(job, message, landed, layers)
        job.life.advance(Event.LANDED)
        job.facts["received_bytes"] = message.sent_bytes
        job.phases.mark("transfer_end")
        job.landed.set()
        return Told(room=room, accepted=True)

    def _require_all_ranks(self, job: DecodeJob, message: Complete) -> None:
        """PageMismatch, which fails the room, unless every rank has sent its part, without gap or overlap."""
        assert job.peer is not None
        expected = [endpoint.rank for endpoint in job.peer.introduction.ranks]
        page_bytes = self.node.engine.geometry.page_bytes()
        try:
            if [sent.rank for sent in message.ranks] != expected:
                raise PageMismatch(
                    f"ranks {[sent.rank for sent in message.ranks]} have sent, not {expected}", room=job.room
                )
            stop = job.first_position + len(self._received(job))
            require_tiling((sent.positions for sent in message.ranks), job.first_position, stop)
            for sent in message.ranks:
                owed = sum(count for _, count in sent.positions) * page_bytes
                if sent.sent_bytes != owed:
                    raise PageMismatch(f"rank {sent.rank} has sent {sent.sent_bytes} bytes, not {owed}")
        except KvferryError as error:
            job.fail(error)
            raise

    async def _landed_digests(self, job: DecodeJob, layers: Collection[int]) -> list[int] | None:
        """Digests of what is here of these layers. None when the room has landed, before or meanwhile."""
        landed: list[int] = []
        if not job.landed.is_set():
            self._require_waiting(job)
            landed = await self.node.digests(self._received(job), layers=layers)
        if job.landed.is_set():
            return None
        # meanwhile the room may have been given up
        self._require_waiting(job)
        return landed

    def _require_equal(
        self, job: DecodeJob, message: Ahead | Complete, landed: Sequence[int], layers: Collection[int]
    ) -> None:
        """Corruption, which fails the room, unless these are the bytes that were sent."""
        senders = {
            position: sent.rank
            for sent in message.ranks
            for first, count in sent.positions
            for position in range(first, first + count)
        }
        try:
            require_equal_digests(
                self.node.engine.geometry,
                message.digests,
                landed,
                pages=self._received(job),
                first_position=job.first_position,
                mode=self.node.settings.transfer.digests,
                room=job.room,
                layers=layers,
                rank_of=senders.get,
            )
        except KvferryError as error:
            job.fail(error)
            raise

    def _received(self, job: DecodeJob) -> PageArray:
        return job.prompt_pages(self.node.page_size)[job.first_position :]

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
        leg="prefill" if reason.leg == "prefill" else "decode",
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
