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
from app.core.pages import pages_for
from app.engine.digests import combined_digest, logits_digest
from app.engine.generate import prefill_chunk
from app.engine.sampling import Sampler
from app.errors import (
    Corruption,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    NoCapacity,
    PromptTooLong,
    UnknownRoom,
)
from app.service.awake import within
from app.service.chunk_work import backup_of, senders_of
from app.service.context import NodeContext
from app.service.handover import metadata_of, send_metadata, tell_ahead, tell_complete
from app.service.heartbeats import Heartbeats
from app.service.jobs import Request, TokenOut
from app.service.leg import run_leg
from app.service.prefill_job import PrefillJob
from app.service.prefill_rooms import PrefillRooms
from app.service.recompute import may_recompute, withdraw
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
        self.heartbeats = Heartbeats(node, self.rooms.table, other="decode")
        settings = node.settings.transfer
        layers = node.engine.geometry.layers
        per_layer = settings.mode == "per_layer"
        self._groups = plan_groups(layers, settings.group_layers, taper=settings.taper) if per_layer else ()
        self._ahead = len(self._groups) > 1 and settings.digests != "off"

    async def run(self, job: PrefillJob) -> None:
        """Serve an entered room to its end; its outcome is in the job's lifecycle. Never raises."""
        await run_leg(self.node, job, self._serve, self.rooms.leave)

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
        # answered long before the first layers are through: no write waits for it
        self.node.spawn(self.heartbeats.ask(peer, [job]), f"lease {job.room}")
        async with self.node.forwards.turn(timeout_s=limits.queue_s):
            # looked up when the turn has come, so that the prompt just before this one is found
            await self._take_pages(job, request)
            job.staging = self.node.slots.take(job.room)
            if job.staging is None:
                raise NoCapacity("no metadata slot is free (cache.slots)", room=job.room)
            job.life.advance(Event.ADMIT)
            job.phases.mark("admitted")
            with job.deadline(limits.forward_s, "the forward outlived deadlines.forward_s:"):
                try:
                    await self._forward(job, request, peer, target)
                except KvferryError:
                    if job.stop_reason() is not None or not may_recompute(self.node, job):
                        raise
                    await withdraw(self.node, self.rooms.fifos, job)
                    await self._forward(job, request, peer, target)
            self._keep(job, request)
        await self._finish(job, peer)

    async def _take_pages(self, job: PrefillJob, request: Request) -> None:
        """The lease: what is cached of the prompt, and pages for the rest. Its last token is computed anew.

        What is in L2 only is on its way to L1 from here on; pages of L2 are reserved for what will be new.
        """
        node, total = self.node, len(request.prompt)
        space, queue_s = node.space(request.salt), node.settings.deadlines.queue_s
        job.lease = lease = await node.gate.find(space, request.prompt, most=total - 1, timeout_s=queue_s)
        missing = pages_for(total, node.page_size) - len(lease.prefix)
        lease.own = await node.gate.take(missing, lease=lease, timeout_s=queue_s)
        job.pages = lease.pages
        node.diagnostics.pages(job.pages)
        if node.tiers.hicache is not None and request.store:
            job.backup = node.tiers.hicache.reserve(lease, request.prompt, job.pages)
        job.facts["cached_tokens"] = len(lease.prefix) * node.page_size
        job.facts["l2_tokens"] = lease.l2_tokens

    def _keep(self, job: PrefillJob, request: Request) -> None:
        """Every row has been written: later prompts may use them, while this one's are still being sent.

        With a draft the last key needs a token that was not known when L2 was reserved: the prompt alone counts.
        """
        assert job.lease is not None and job.pages is not None
        if job.life.reason is not None or not request.store:
            return
        hicache = self.node.tiers.hicache
        if hicache is None:
            self.node.cache.keep(job.lease, request.prompt, job.pages)
            return
        if job.backup is not None:
            hicache.finish(job.backup)
        hicache.keep(job.lease, request.prompt, job.pages, back_up=job.recomputed)

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
        assert job.destination is not None and job.lease is not None
        registered: Registered = []
        for plan in plan_chunks(
            len(request.prompt),
            page_size=self.node.page_size,
            chunk_tokens=self.node.settings.prefill.chunk_tokens,
            cached_tokens=len(job.lease.prefix) * self.node.page_size,
            first_position=job.destination.first_position,
        ):
            context = ChunkContext(
                room=job.room,
                start=plan.start,
                layers=self.node.engine.geometry.layers,
                groups=self._groups,
                destinations=senders_of(self.node, job, plan, peer, target),
                event_wait=self.node.bridge.wait,
                receivers=1,
                permit=partial(self.heartbeats.permit, job),
            )
            job.contexts.append(self.rooms.fifos.register(context))
            registered.append((plan, context))
        return registered

    async def _forward(self, job: PrefillJob, request: Request, peer: Peer, target: PageArray) -> None:
        registered = self._register(job, request, peer, target)
        loop = asyncio.get_running_loop()
        job.phases.mark("forward_start")
        for plan, context in registered:
            reason = job.stop_reason()
            if reason is not None:
                raise reason
            assert job.lease is not None
            notes = ForwardNotes(
                loop,
                [context],
                self.node.bridge.record,
                cancelled=job.stop_reason,
                progress=self.node.layer_end,
                ready=job.lease.wait,
                listener=backup_of(self.node, job, plan),
            )
            if plan.is_last and self._ahead:
                job.told_ahead.clear()
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
        engine = self.node.engine
        handover = prefill_chunk(
            engine,
            request.prompt,
            plan,
            job.pages,
            notes,
            Sampler(request.sampling),
            drafts=engine.draft is not None,
        )
        if handover is None:
            return None
        assert job.lease is not None
        # a layer that read no earlier row has not waited for its part of a load
        job.lease.confirm(self.node.settings.hicache.load_s)
        job.handover = metadata_of(handover)
        digests: list[str | None] = [None, None]
        if self.node.settings.trace:
            both = handover.logits, handover.draft_logits
            digests = [None if one is None else logits_digest(one) for one in both]
        return TokenOut(
            token=handover.token,
            log_probability=handover.log_probability,
            logits=digests[0],
            draft_logits=digests[1],
        )

    async def _send_rest(self, job: PrefillJob, peer: Peer) -> None:
        """Flush and await every chunk, then the slot."""
        await self.heartbeats.permit(job)
        job.metadata = send_metadata(self.node, job, peer)
        while await self.rooms.fifos.finish(job.room) or self.rooms.fifos.active(job.room):
            pass
        for context in job.contexts:
            await context.finish()
        await self.node.transfer.wait([job.metadata])

    async def _all_landed(self, job: PrefillJob, peer: Peer) -> None:
        """Send the rest, bounded here too: an engine whose thread is held up keeps no deadline."""
        limits = self.node.settings.transfer
        longest_s = limits.deadline_s + limits.late_landing_s
        try:
            await within(self._send_rest(job, peer), longest_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the engine gave no answer within {longest_s:g} s: {job.unfinished()}"
            ) from error

    async def _tell_ahead(self, job: PrefillJob, peer: Peer, context: ChunkContext) -> None:
        try:
            await tell_ahead(self.node, job, peer, context)
        except Corruption as error:
            job.given_up = True
            job.fail(error)
        except KvferryError as error:
            log.debug("ahead.not_told", room=job.room, reason=error.message)
        finally:
            job.told_ahead.set()

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
            await self._all_landed(job, peer)
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
        for rank, (sent_bytes, landed_s) in job.landed_by_rank().items():
            self.node.statistics.record(
                peer.url,
                rank=rank,
                sent_bytes=sent_bytes,
                seconds=job.phases.between(job.phases.forward_start, landed_s),
            )
        if self.node.settings.trace:
            job.facts["page_digest"] = combined_digest(await self.node.digests(sent, "full"))
