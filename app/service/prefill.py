"""The prefill leg of a request: compute the prompt, send its pages meanwhile, hand over the first token.

PARKED ------.
              >-- WAITING -- TRANSFERRING -- METADATA -- SUCCESS
BOOTSTRAPPING'                      any failure -> DRAINING -> FAILED
"""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from app.core.chunks import ChunkPlan, plan_chunks
from app.core.groups import plan_groups
from app.core.ids import PageArray
from app.core.lifecycle import Event
from app.core.pages import pages_for, slice_positions
from app.engine.base import ForwardStep
from app.engine.local import combined_digest, logits_digest
from app.engine.sampling import Sampler
from app.errors import (
    ClientGone,
    Corruption,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    NoCapacity,
    PromptTooLong,
    UnknownRoom,
)
from app.service.context import NodeContext
from app.service.handover import send_metadata, tell_ahead, tell_complete
from app.service.jobs import Request, TokenOut
from app.service.prefill_rooms import PrefillJob, PrefillRooms
from app.service.sender import PageSender
from app.transfer.context import ChunkContext
from app.transfer.notes import ForwardNotes
from app.transfer.peers import Peer

log = structlog.get_logger(__name__)

Registered = list[tuple[ChunkPlan, ChunkContext]]


class PrefillService:
    """Runs prefill requests over the rooms of a node."""

    def __init__(self, node: NodeContext) -> None:
        self.node = node
        self.rooms = PrefillRooms(node)
        settings = node.settings.transfer
        layers = node.engine.geometry.layers
        per_layer = settings.mode == "per_layer"
        self._groups = plan_groups(layers, settings.group_layers, taper=settings.taper) if per_layer else ()
        self._ahead = len(self._groups) > 1 and settings.digests != "off"

    async def run(self, job: PrefillJob) -> None:
        """Serve an entered room to its end; its outcome is in the job's lifecycle. Never raises."""
        request = job.request
        assert request is not None
        with structlog.contextvars.bound_contextvars(room=job.room, request_id=request.request_id):
            try:
                with job.scope:
                    await self._serve(job, request)
            except KvferryError as error:
                job.fail(error)
            except Exception as error:
                log.exception("prefill.bug", room=job.room)
                job.fail(KvferryError(f"prefill failed: {type(error).__name__}", room=job.room))
            finally:
                if not job.life.ended:
                    job.fail(ClientGone("the request was cancelled", room=job.room))
                try:
                    self.rooms.leave(job)
                finally:
                    job.answered.set()
            log.debug("prefill.ended", **job.record())

    async def _serve(self, job: PrefillJob, request: Request) -> None:
        self._check(request)
        limits = self.node.settings.deadlines
        try:
            async with asyncio.timeout(limits.bootstrap_s):
                await job.wanted.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"decode named no pages within {limits.bootstrap_s} s") from error
        target = self.rooms.target(job)
        assert job.destination is not None
        peer = self.node.peers.of(job.destination.instance)
        wanted = pages_for(len(request.prompt), self.node.page_size)
        job.pages = await self.node.gate.take(wanted, timeout_s=limits.queue_s)
        async with self.node.forwards.turn(timeout_s=limits.queue_s):
            job.staging = self.node.slots.take(job.room)
            if job.staging is None:
                raise NoCapacity("no metadata slot is free (cache.slots)", room=job.room)
            job.life.advance(Event.ADMIT)
            job.phases.mark("admitted")
            registered = self._register(job, request, peer, target)
            with job.deadline(limits.forward_s, "the forward outlived deadlines.forward_s:"):
                await self._forward(job, request, registered, peer)
        await self._finish(job, peer)

    def _check(self, request: Request) -> None:
        if not request.prompt:
            raise InvalidRequest("the prompt is empty", room=request.room)
        most = min(self.node.settings.prefill.max_input_tokens, self.node.engine.max_positions)
        if len(request.prompt) > most:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt)} tokens, the limit is {most}", room=request.room
            )

    def _register(self, job: PrefillJob, request: Request, peer: Peer, target: PageArray) -> Registered:
        """Register every chunk before the first forward, so that no layer end is missed."""
        assert job.destination is not None and job.pages is not None
        first = job.destination.first_position
        registered: Registered = []
        for plan in plan_chunks(
            len(request.prompt),
            page_size=self.node.page_size,
            chunk_tokens=self.node.settings.prefill.chunk_tokens,
            first_position=first,
        ):
            sender = PageSender(
                engine=self.node.transfer,
                peer=peer,
                layouts=self.node.layouts,
                source=slice_positions(job.pages, 0, plan.first_page, plan.last_page),
                destination=slice_positions(target, first, plan.first_page, plan.last_page),
                label=f"{job.room}:{plan.start}",
            )
            context = ChunkContext(
                room=job.room,
                start=plan.start,
                layers=self.node.engine.geometry.layers,
                groups=self._groups,
                destinations=[sender],
                event_wait=self.node.bridge.wait,
            )
            job.contexts.append(self.rooms.fifos.register(context))
            registered.append((plan, context))
        return registered

    async def _forward(self, job: PrefillJob, request: Request, registered: Registered, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        job.phases.mark("forward_start")
        for plan, context in registered:
            reason = job.stop_reason()
            if reason is not None:
                raise reason
            notes = ForwardNotes(
                loop,
                [context],
                self.node.bridge.record,
                cancelled=job.stop_reason,
                progress=self.node.forwards.progress,
            )
            if plan.is_last and self._ahead:
                self.node.spawn(self._tell_ahead(job, peer, context), f"ahead {job.room}")
            job.first = await self.node.forwards.run(partial(self._compute, job, request, plan, notes))
            if not plan.is_last:
                self.node.spawn(self._finish_chunk(job), f"chunk {job.room}:{plan.start}")
        job.phases.mark("forward_end")

    def _compute(
        self, job: PrefillJob, request: Request, plan: ChunkPlan, notes: ForwardNotes
    ) -> TokenOut | None:
        """On the forward thread: one chunk, and the first token after the last one."""
        assert job.pages is not None
        step = ForwardStep(
            tokens=request.prompt[plan.start : plan.end],
            start=plan.start,
            pages=job.pages,
            wants_logits=plan.is_last,
        )
        logits = self.node.engine.forward(step, notes)
        if logits is None:
            return None
        token, log_probability = Sampler(request.sampling).choose(logits)
        digest = logits_digest(logits) if self.node.settings.trace else None
        return TokenOut(token=token, log_probability=log_probability, logits=digest)

    async def _send_rest(self, job: PrefillJob, peer: Peer) -> None:
        """Flush and await every chunk, then the slot. Bounded here too: a wedged engine keeps no deadline."""
        limits = self.node.settings.transfer
        longest_s = limits.deadline_s + limits.late_landing_s
        try:
            async with asyncio.timeout(longest_s):
                job.metadata = send_metadata(self.node, job, peer)
                while await self.rooms.fifos.finish(job.room) or self.rooms.fifos.active(job.room):
                    pass
                for context in job.contexts:
                    await context.finish()
                await self.node.transfer.wait([job.metadata])
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine gave no answer within {longest_s:g} s") from error

    async def _tell_ahead(self, job: PrefillJob, peer: Peer, context: ChunkContext) -> None:
        try:
            await tell_ahead(self.node, job, peer, context)
        except Corruption as error:
            job.given_up = True
            job.fail(error)
        except KvferryError as error:
            log.debug("ahead.not_told", room=job.room, reason=error.message)

    async def _tell_complete(
        self, job: PrefillJob, peer: Peer, digests: list[int], layers: list[int]
    ) -> None:
        try:
            await tell_complete(self.node, job, peer, digests, layers)
        except (UnknownRoom, Corruption):
            job.given_up = True  # decode has said so itself
            raise

    async def _finish_chunk(self, job: PrefillJob) -> None:
        """Wait for a chunk's bytes beside the next chunk's forward."""
        try:
            await self.rooms.fifos.finish(job.room)
        except KvferryError as error:
            job.fail(error)

    async def _finish(self, job: PrefillJob, peer: Peer) -> None:
        """Wait for every byte and the slot, then tell decode."""
        assert job.pages is not None and job.destination is not None
        sent = job.pages[job.destination.first_position :]
        layers = [layer for layer in self.node.engine.geometry.layers if layer not in job.compared]
        digests = asyncio.ensure_future(self.node.digests(sent, layers=layers))
        try:
            await self._send_rest(job, peer)
            job.phases.mark("transfer_end")
            job.life.advance(Event.LANDED)
            job.facts |= {
                "sent_bytes": job.sent_bytes,
                "groups": sum(c.groups_sent for c in job.contexts),
                "chunks": len(job.contexts),
            }
            await self._tell_complete(job, peer, await digests, layers)
        finally:
            digests.cancel()
        job.phases.mark("told")
        job.life.advance(Event.TOLD)
        self.node.statistics.record(
            peer.url,
            sent_bytes=job.sent_bytes,
            seconds=job.phases.between(job.phases.forward_start, job.phases.transfer_end),
        )
        if self.node.settings.trace:
            job.facts["page_digest"] = combined_digest(await self.node.digests(sent, "full"))
