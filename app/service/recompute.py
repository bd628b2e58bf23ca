"""A prefix that was promised from L2 and did not arrive: its rows are computed, as if it had never been found.

    prefill   every write of the room has ended, and no late one can land  ->  other pages  ->  all chunks anew
    decode    other pages  ->  the prompt's rows up to where prefill's begin, forwarded here  ->  the step again

It goes on from what is in L1. The rows go to other pages, since copies of the failed load may still land in the
first ones: those come back when it is quiet. Whatever prefill had sent is sent again, with every layer of it: what is
computed may differ in low bits from what was loaded, and decode compares digests of all layers at the end. Positions
are absolute, decode reads nothing before `complete`, and its pages are held: writing them twice is safe as soon as the
first write cannot land after the second one. `hicache.failed_load = "fail"` fails the request instead.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import numpy as np
import structlog

from app.core.chunks import ChunkPlan
from app.core.pages import pages_for
from app.engine.base import LayerHooks
from app.engine.generate import prefill_chunk
from app.engine.sampling import Sampler
from app.service.context import NodeContext
from app.service.jobs import Job, Request
from app.service.prefill_job import PrefillJob
from app.transfer.fifo import RoomFifos

log = structlog.get_logger(__name__)


def may_recompute(node: NodeContext, job: Job) -> bool:
    """Whether a forward that has ended with an error can be made good: a load of its prefix had failed."""
    return (
        node.tiers.hicache is not None
        and node.settings.hicache.failed_load == "recompute"
        and job.life.reason is None
        and job.lease is not None
        and job.lease.failed is not None
    )


async def withdraw(node: NodeContext, fifos: RoomFifos, job: PrefillJob) -> None:
    """Bring a prefill's room back to before its first chunk: nothing is registered, and nothing can land any more.

    Raises what a chunk of it had failed with, for another reason than the load.
    """
    assert job.lease is not None and job.lease.failed is not None
    left = fifos.drop(job.room, job.lease.failed)
    for context in job.contexts:
        if context not in left:
            await context.finish()
    await job.told_ahead.wait()
    for context in job.contexts:
        await context.drained()
    await asyncio.sleep(max(job.settled_at_s() - time.monotonic(), 0.0))
    await _other_pages(node, job)
    job.contexts.clear()
    job.compared = frozenset()
    job.backup, job.recomputed = None, True


async def compute_prefix(node: NodeContext, job: Job, request: Request, hooks: LayerHooks) -> None:
    """Compute what a decode's prefix lacks on this node, in turns with other requests."""
    assert job.lease is not None
    end = len(job.lease.prefix) * node.page_size
    await _other_pages(node, job)
    start, most = len(job.lease.prefix) * node.page_size, node.settings.prefill.chunk_tokens
    async with node.forwards.turn(timeout_s=node.settings.deadlines.queue_s):
        while start < end:
            stop = min((start // most + 1) * most, end)
            await node.forwards.run(partial(_rows, node, job, request, start, stop, hooks))
            start = stop


async def _other_pages(node: NodeContext, job: Job) -> None:
    """Give up the lost part of a lease, and take pages for it."""
    hicache, lease = node.tiers.hicache, job.lease
    assert hicache is not None and lease is not None and lease.failed is not None
    reason = lease.failed
    missing = hicache.forsake(lease)
    log.warning(
        "load.recomputed",
        room=job.room,
        tokens=missing * node.page_size,
        cause=reason.slug,
        reason=reason.message,
    )
    pages = await node.gate.take(missing, lease=lease, timeout_s=node.settings.deadlines.queue_s)
    lease.own = np.concatenate([pages, lease.own])
    job.pages = lease.pages
    node.diagnostics.pages(job.pages)
    job.facts["cached_tokens"] = len(lease.prefix) * node.page_size
    job.facts["recomputed_tokens"] = missing * node.page_size


def _rows(node: NodeContext, job: Job, request: Request, start: int, stop: int, hooks: LayerHooks) -> None:
    """On the forward thread: target and draft rows of these positions. Nothing is chosen."""
    assert job.pages is not None
    first, last = start // node.page_size, pages_for(stop, node.page_size)
    plan = ChunkPlan(index=0, start=start, end=stop, first_page=first, last_page=last, is_last=False)
    drafts = node.engine.draft is not None
    prefill_chunk(
        node.engine, request.prompt, plan, job.pages, hooks, Sampler(request.sampling), drafts=drafts
    )
