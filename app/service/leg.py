"""A leg of a request from its entered room to its outcome: the same on both sides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from app.errors import ClientGone, KvferryError
from app.service.context import NodeContext
from app.service.jobs import Job, Request

log = structlog.get_logger(__name__)

J = TypeVar("J", bound=Job)


async def run_leg(
    node: NodeContext,
    job: J,
    serve: Callable[[J, Request], Awaitable[None]],
    leave: Callable[[J], None],
) -> None:
    """Serve a room to its end; its outcome is in the job's lifecycle, and `leave` is called once. Never raises."""
    request = job.request
    assert request is not None
    with structlog.contextvars.bound_contextvars(room=job.room, request_id=request.request_id):
        try:
            with job.scope:
                await serve(job, request)
        except KvferryError as error:
            job.fail(error)
        except Exception as error:
            log.exception(f"{job.leg}.bug", room=job.room)
            job.fail(KvferryError(f"{job.leg} failed: {type(error).__name__}", room=job.room))
        finally:
            if not job.life.ended:
                job.fail(ClientGone("the request was cancelled", room=job.room))
            node.count_corruption(job.life.reason)
            try:
                leave(job)
            finally:
                job.answer()
        log.debug(f"{job.leg}.ended", **job.record())
