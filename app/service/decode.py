"""The decode leg of a request: name pages, wait for the bytes, go on from them.

BOOTSTRAPPING -- WAITING -- METADATA -- DECODING -- SUCCESS
                 any failure -> DRAINING -> FAILED
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import structlog

from app.core.lifecycle import Event
from app.core.pages import pages_for
from app.core.slots import Metadata
from app.engine.base import ForwardStep, NoHooks
from app.engine.local import combined_digest, logits_digest
from app.engine.sampling import Sampler
from app.errors import (
    ClientGone,
    Corruption,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    NoCapacity,
    PeerRefused,
    PromptTooLong,
)
from app.service.context import NodeContext
from app.service.decode_rooms import DecodeJob, DecodeRooms
from app.service.jobs import Job, Request, TokenOut
from app.transfer.messages import Destination
from app.transfer.peers import Peer

log = structlog.get_logger(__name__)


class _Progress(NoHooks):
    """Tells health that layers end, and ends the step of a room that has failed."""

    def __init__(self, node: NodeContext, job: DecodeJob) -> None:
        self._node = node
        self._job = job

    def after_write(self, layer: int, source: str) -> None:
        self._node.forwards.progress()
        if self._job.life.reason is not None:
            raise self._job.life.reason


class DecodeService:
    """Runs decode requests over the rooms of a node."""

    def __init__(self, node: NodeContext) -> None:
        self.node = node
        self.rooms = DecodeRooms(node)

    async def run(self, job: DecodeJob) -> None:
        """Serve an entered room to its end; tokens go to the job's output. Never raises."""
        request = job.request
        assert request is not None
        with structlog.contextvars.bound_contextvars(room=job.room, request_id=request.request_id):
            try:
                with job.scope:
                    await self._serve(job, request)
            except KvferryError as error:
                job.fail(error)
            except Exception as error:
                log.exception("decode.bug", room=job.room)
                job.fail(KvferryError(f"decode failed: {type(error).__name__}", room=job.room))
            finally:
                if not job.life.ended:
                    job.fail(ClientGone("the request was cancelled", room=job.room))
                try:
                    self.rooms.leave(job)
                finally:
                    job.answered.set()
                    job.output.put_nowait(None)
            log.debug("decode.ended", **job.record())

    async def _serve(self, job: DecodeJob, request: Request) -> None:
        self._check(request)
        limits = self.node.settings.deadlines
        job.peer = await self.node.peers.meet(request.bootstrap_url)
        total = len(request.prompt) + request.max_new_tokens
        job.pages = await self.node.gate.take(pages_for(total, self.node.page_size), timeout_s=limits.queue_s)
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
            landed = job.prompt_pages(self.node.page_size)[job.first_position :]
            job.facts["page_digest"] = combined_digest(await self.node.digests(landed, "full"))
        with job.deadline(limits.decode_s, "decoding outlived deadlines.decode_s:"):
            await self._decode(job, request, metadata)
        job.life.advance(Event.FINISH)

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
                self.node.peers.forget(job.peer)
                job.peer = await self.node.peers.meet(request.bootstrap_url)

    async def _put(self, job: DecodeJob, request: Request, peer: Peer) -> None:
        assert job.pages is not None and job.slot is not None
        pages = job.prompt_pages(self.node.page_size)[job.first_position :]
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
        token = TokenOut(token=metadata.first_token, log_probability=metadata.log_probability)
        sampler = Sampler(request.sampling)
        position = len(request.prompt)
        limits = self.node.settings.deadlines
        for left in range(request.max_new_tokens - 1, -1, -1):
            job.output.put_nowait(token)
            if not left or (token.token in self.node.engine.stop_tokens and not request.ignore_eos):
                return
            async with self.node.forwards.turn(timeout_s=limits.queue_s):
                work = partial(self._step, job, token.token, position, sampler)
                token = await self.node.forwards.run(work)
            self.rooms.free_slot(job)
            position += 1
            if job.stop_requested:
                return

    def finish_early(self, job: Job) -> None:
        """A stop string has been seen: no more tokens are wanted."""
        if isinstance(job, DecodeJob):
            job.stop_requested = True

    def _step(self, job: DecodeJob, token: int, position: int, sampler: Sampler) -> TokenOut:
        """On the forward thread: one token."""
        assert job.pages is not None
        step = ForwardStep(tokens=[token], start=position, pages=job.pages)
        logits = self.node.engine.forward(step, _Progress(self.node, job))
        assert logits is not None
        chosen, log_probability = sampler.choose(logits)
        digest = logits_digest(logits) if self.node.settings.trace else None
        return TokenOut(token=chosen, log_probability=log_probability, logits=digest)
