"""The decode leg of a request: name pages, wait for the bytes, go on from them.

BOOTSTRAPPING -- WAITING -- METADATA -- DECODING -- SUCCESS
                 any failure -> DRAINING -> FAILED
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from app.core.lifecycle import Event
from app.core.pages import pages_for
from app.core.slots import Metadata
from app.engine.base import NoHooks
from app.engine.digests import combined_digest
from app.engine.generate import Continuation
from app.engine.sampling import Sampler
from app.errors import (
    Corruption,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    NoCapacity,
    PeerRefused,
    PromptTooLong,
)
from app.service.context import NodeContext
from app.service.decode_job import DecodeJob
from app.service.decode_rooms import DecodeRooms
from app.service.handover import handover_of
from app.service.heartbeats import Heartbeats
from app.service.jobs import Job, Request, TokenOut
from app.service.leg import run_leg
from app.service.recompute import compute_prefix, may_recompute
from app.transfer.messages import Destination
from app.transfer.peers import Peer


class _Progress(NoHooks):
    """Waits for loads, tells health that layers end, and ends the step of a room that has failed."""

    def __init__(self, node: NodeContext, job: DecodeJob) -> None:
        self._node = node
        self._job = job

    def before_read(self, layer: int) -> None:
        if self._job.lease is not None:
            self._job.lease.wait(layer)

    def after_write(self, layer: int, source: str) -> None:
        self._node.layer_end()
        if self._job.life.reason is not None:
            raise self._job.life.reason


class DecodeService:
    """Runs decode requests over the rooms of a node."""

    def __init__(self, node: NodeContext) -> None:
        self.node = node
        self.rooms = DecodeRooms(node)
        self.heartbeats = Heartbeats(node, self.rooms.table, other="prefill")

    async def run(self, job: DecodeJob) -> None:
        """Serve an entered room to its end; tokens go to the job's output. Never raises."""
        await run_leg(self.node, job, self._serve, self.rooms.leave)

    async def _serve(self, job: DecodeJob, request: Request) -> None:
        self._check(request)
        limits = self.node.settings.deadlines
        with self.node.breakers.attempt(request.bootstrap_url):
            job.peer = await self.node.peers.meet(request.bootstrap_url)
        await self._take_pages(job, request)
        job.slot = self.node.slots.take(job.room)
        if job.slot is None:
            raise NoCapacity("no metadata slot is free (cache.slots)", room=job.room)
        job.generation = job.slot.generation
        self.node.pool.clear_slot(job.slot)
        job.phases.mark("admitted")
        await self._announce(job, request)
        try:
            async with asyncio.timeout(limits.transfer_s):
                await job.landed.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the prompt's pages did not land within {limits.transfer_s} s") from error
        # a write that landed twice brings the prompt's last page again, over rows that decoding adds to it,
        # and the metadata record again, into a slot that may have its next owner by then
        await asyncio.sleep(max(job.settled_at_s - time.monotonic(), 0.0))
        metadata = self.node.pool.read_slot(job.slot)
        if metadata is None:
            raise Corruption("all bytes were announced as landed, the metadata slot is empty", room=job.room)
        job.life.advance(Event.READ)
        job.facts["first_token_s"] = round(time.monotonic() - job.phases.received, 6)
        if self.node.settings.trace:
            landed = job.received_pages(self.node.page_size)
            job.facts["page_digest"] = combined_digest(await self.node.digests(landed, "full"))
        with job.deadline(limits.decode_s, "decoding outlived deadlines.decode_s:"):
            await self._decode(job, request, metadata)
        job.life.advance(Event.FINISH)
        await self._keep(job, request)

    async def _keep(self, job: DecodeJob, request: Request) -> None:
        """Leave the rows behind for later prompts: those that target and draft have both written.

        In exact mode, and where the draft was not run, only what prefill has computed: a row that was decoded
        alone has other low bits.
        """
        assert job.lease is not None and job.pages is not None and job.lease.space is not None
        if not request.store:
            return
        if job.lease.loads:  # an answer of one token has read nothing yet
            await asyncio.to_thread(job.lease.confirm, self.node.settings.hicache.load_s)
        rows = len(request.prompt)
        drafted = self.node.engine.draft is None or self._proposals(request) > 0
        if self.node.settings.cache.reuse == "page" and job.continuation is not None and drafted:
            rows = job.continuation.position
        tokens = [*request.prompt, *job.emitted][: rows + job.lease.space.bigrams]
        if self.node.tiers.hicache is not None:
            self.node.tiers.hicache.keep(job.lease, tokens, job.pages, back_up=True)
        else:
            self.node.cache.keep(job.lease, tokens, job.pages)

    async def _take_pages(self, job: DecodeJob, request: Request) -> None:
        """The lease: what is here of the prompt, and pages for the rest of it and for the answer."""
        node = self.node
        space, total, queue_s = node.space(request.salt), len(request.prompt), node.settings.deadlines.queue_s
        job.lease = lease = await node.gate.find(space, request.prompt, most=total, timeout_s=queue_s)
        rows = total + request.max_new_tokens
        missing = pages_for(rows, node.page_size) - len(lease.prefix)
        lease.own = await node.gate.take(missing, lease=lease, timeout_s=queue_s)
        job.pages = lease.pages
        node.diagnostics.pages(job.pages)
        job.first_position = max(job.first_position, len(lease.prefix))
        job.facts["cached_tokens"] = len(lease.prefix) * node.page_size
        job.facts["l2_tokens"] = lease.l2_tokens

    def _proposals(self, request: Request) -> int:
        """Tokens that the draft proposes a step: verified greedily, so only for greedy requests."""
        greedy = self.node.engine.draft is not None and request.sampling.temperature <= 0
        return self.node.settings.model.draft_tokens if greedy else 0

    def _check(self, request: Request) -> None:
        limits = self.node.settings.limits
        if not request.prompt:
            raise InvalidRequest("the prompt is empty", room=request.room)
        if not 1 <= request.max_new_tokens <= limits.max_new_tokens:
            raise InvalidRequest(
                f"max_new_tokens is {request.max_new_tokens}, the limit is {limits.max_new_tokens}",
                room=request.room,
            )
        total, most = len(request.prompt) + request.max_new_tokens, self.node.engine.max_positions
        if total > most:
            raise PromptTooLong(f"prompt and answer take {total} positions, the model has {most}")

    async def _announce(self, job: DecodeJob, request: Request) -> None:
        """Name the pages to prefill. After a restart of prefill: a new handshake and one more try."""
        job.life.advance(Event.ANNOUNCED)
        job.announced = True
        for last in (False, True):
            assert job.peer is not None
            try:
                await self._put(job, request, job.peer)
                return
            except PeerRefused:
                if last:
                    raise
                # no room of the old instance any more: its silence, or its successor, must not end this one
                old, job.peer = job.peer, None
                self.node.peers.forget(old)
                job.peer = await self.node.peers.meet(request.bootstrap_url)

    async def _put(self, job: DecodeJob, request: Request, peer: Peer) -> None:
        assert job.pages is not None and job.slot is not None
        pages = job.received_pages(self.node.page_size)
        message = Destination(
            instance=self.node.instance,
            prefill_instance=peer.instance,
            prompt_tokens=len(request.prompt),
            first_position=job.first_position,
            pages=tuple(pages.tolist()),
            slot=job.slot.index,
            generation=job.slot.generation,
        )
        url = f"{request.bootstrap_url}/v1/peer/rooms/{job.room}"
        await self.node.client.send("PUT", url, message, timeout_s=self.node.settings.deadlines.message_s)

    async def _decode(self, job: DecodeJob, request: Request, metadata: Metadata) -> None:
        """Steps take turns with other requests; the slot is ours until the first one has been processed."""
        assert job.pages is not None
        first = TokenOut(token=metadata.first_token, log_probability=metadata.log_probability)
        going_on = Continuation(
            self.node.engine,
            job.pages,
            len(request.prompt),
            handover_of(metadata),
            Sampler(request.sampling),
            self._proposals(request),
            digests=self.node.settings.trace,
        )
        job.continuation = going_on
        limits = self.node.settings.deadlines
        left = request.max_new_tokens
        fresh: Sequence[TokenOut] = (first,)
        while True:
            for token in fresh:
                job.output.put_nowait(token)
                job.emitted.append(token.token)
                left -= 1
                if not left or (token.token in self.node.engine.stop_tokens and not request.ignore_eos):
                    return
            if job.stop_requested:
                return
            try:
                async with self.node.forwards.turn(timeout_s=limits.queue_s):
                    fresh = await self.node.forwards.run(partial(self._step, job, going_on, left))
            except KvferryError:
                if not may_recompute(self.node, job):
                    raise
                await compute_prefix(self.node, job, request, _Progress(self.node, job))
                going_on.move(job.pages)
                fresh = ()
                continue
            self.rooms.free_slot(job)

    def finish_early(self, job: Job) -> None:
        """A stop string has been seen: no more tokens are wanted."""
        if isinstance(job, DecodeJob):
            job.stop_requested = True

    def _step(self, job: DecodeJob, going_on: Continuation, left: int) -> list[TokenOut]:
        """On the forward thread: one step, which gives a token and those of the draft's that were right."""
        out = going_on.step(_Progress(self.node, job), at_most=left)
        job.facts["proposed_tokens"] = job.facts.get("proposed_tokens", 0) + out.proposed
        job.facts["accepted_tokens"] = job.facts.get("accepted_tokens", 0) + out.accepted
        return [
            TokenOut(
                token=t.token,
                log_probability=t.log_probability,
                logits=t.logits,
                draft_logits=t.draft_logits,
            )
            for t in out.tokens
        ]
