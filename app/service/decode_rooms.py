"""The rooms of a decode node: what prefill says about them, and how they are left.

Pages and slot go back at once when no write can land on them: before the announcement, or after the
word that everything has landed. In between they wait in quarantine for prefill's drain acknowledgement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from pydantic import ValidationError

from app.core.digests import require_equal_digests
from app.core.ids import PageArray, RoomId
from app.core.lifecycle import DECODE, Event, Lifecycle, State
from app.core.pages import pages_for
from app.core.rooms import RoomTable
from app.core.slots import SlotRef
from app.errors import KvferryError, PeerRefused, UnknownRoom
from app.service.context import NodeContext
from app.service.jobs import Job, Request, TokenOut
from app.transfer.client import error_from_problem
from app.transfer.messages import Abort, Complete, Drained, Failed, Told
from app.transfer.peers import Peer

log = structlog.get_logger(__name__)


@dataclass(eq=False, kw_only=True)
class DecodeJob(Job):
    peer: Peer | None = None
    slot: SlotRef | None = None
    first_position: int = 0
    """Positions below it were here already: nothing is received for them."""
    announced: bool = False
    """Prefill may know the pages: a write can land."""
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    settle_s: float = 0.0
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
        """The room of a request. RoomInUse while another request has it."""
        life = Lifecycle(table=DECODE, state=State.BOOTSTRAPPING)
        job = self.table.open(DecodeJob(room=request.room, life=life, request=request))
        job.peer_url = request.bootstrap_url
        job.phases.mark("received")
        return job

    # ------------------------------------------------------------------ prefill's words

    async def complete(self, room: RoomId, message: Complete) -> Told:
        """Everything has landed. Refused unless it is this room's own prefill and generation."""
        job = self._mine(room, message.instance)
        if job.slot is None or message.generation != job.slot.generation:
            raise PeerRefused(f"generation {message.generation} is not of this room", room=room)
        if job.life.state is not State.WAITING:
            if job.landed.is_set():
                return Told(room=room, accepted=True)
            raise UnknownRoom(f"room {room} has been given up", room=room)
        pages = job.prompt_pages(self.node.page_size)[job.first_position :]
        mode = self.node.settings.transfer.digests
        try:
            require_equal_digests(
                self.node.engine.geometry,
                message.digests,
                await self.node.digests(pages),
                positions=len(pages),
                mode=mode,
                room=room,
            )
        except KvferryError as error:
            job.settle_s = message.settle_s
            job.fail(error)
            raise
        job.life.advance(Event.LANDED)
        if job.life.failing:
            raise UnknownRoom(f"room {room} has been given up", room=room)
        job.settle_s = message.settle_s
        job.facts["received_bytes"] = message.sent_bytes
        job.phases.mark("transfer_end")
        job.landed.set()
        return Told(room=room, accepted=True)

    async def failed(self, room: RoomId, message: Failed) -> Told:
        """The prefill leg has failed: so has this one, with the same reason."""
        job = self._mine(room, message.instance)
        problem = {"type": f"urn:kvferry:problem:{message.slug}", "detail": message.reason, "room": room}
        return Told(room=room, accepted=job.fail(error_from_problem(502, problem, job.peer_url)))

    def _mine(self, room: RoomId, instance: str) -> DecodeJob:
        job = self.table.get(room)
        if job.peer is None or job.peer.instance != instance:
            raise PeerRefused(f"instance {instance} is not the prefill of room {room}", room=room)
        return job

    # ------------------------------------------------------------------ going

    def leave(self, job: DecodeJob) -> None:
        """Called once, when the room's coroutine has ended."""
        reason = job.life.reason
        if reason is not None and job.announced and not job.landed.is_set():
            for_s = self.node.settings.deadlines.quarantine_s
            release = self._hold(job, "awaiting drain acknowledgement", for_s)
            self.node.spawn(self._abort_and_drain(job, reason, release), f"abort {job.room}")
        elif job.settle_s > 0:
            self._hold(job, "a retried write may still land", job.settle_s)
        else:
            if reason is not None and not job.announced:
                self.node.spawn(self._tell_abort_only(job, reason), f"abort {job.room}")
            self._free(job)
        job.output.put_nowait(None)

    def _hold(self, job: DecodeJob, why: str, for_s: float) -> Callable[[], bool]:
        return self.node.hold(job.room, why, job.pages, lambda: self._free(job), for_s)

    def _free(self, job: DecodeJob) -> None:
        if job.pages is not None:
            self.node.gate.give(job.pages)
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
        answer = await tell_abort(self.node, job.peer_url, job.room, reason)
        if answer is not None and answer.drained:
            release()
        else:
            log.warning("room.quarantined", room=job.room, peer=job.peer_url)

    async def _tell_abort_only(self, job: DecodeJob, reason: KvferryError) -> None:
        await tell_abort(self.node, job.peer_url, job.room, reason)


async def tell_abort(node: NodeContext, url: str, room: RoomId, reason: KvferryError) -> Drained | None:
    """Tell a prefill node that a room is given up. None when it does not answer.

    Its answer is the drain acknowledgement, so this may take as long as a write takes to end.
    """
    if not url:
        return None
    message = Abort(instance=node.instance, slug=reason.slug, reason=reason.message[:2000])
    timeout_s = node.settings.deadlines.drain_s + node.settings.deadlines.message_s
    try:
        answer = await node.client.send(
            "POST", f"{url}/v1/peer/rooms/{room}/abort", message, timeout_s=timeout_s
        )
        return Drained.model_validate(answer)
    except (KvferryError, ValidationError) as error:
        log.warning("peer.not_told", room=room, peer=url, reason=str(error))
        return None
