"""A time limit in time awake: what has happened counts, however long the process was stopped."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest

from app.service.awake import within


async def test_a_pause_does_not_use_the_limit_up() -> None:
    """The loop stands still for longer than the limit; the work, done a little later, is not given up."""

    async def work() -> str:
        time.sleep(0.6)  # noqa: ASYNC251
        await asyncio.sleep(0.01)
        return "done"

    assert await within(work(), 0.5) == "done"


async def test_work_that_does_not_end_is_cancelled() -> None:
    """After the limit the work has ended by its cancellation, and its clean-up has run."""
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    with pytest.raises(TimeoutError):
        await within(work(), 0.05)
    assert ended == ["cleaned up"]


async def test_an_error_passes_through() -> None:
    """What the work raises is what the caller sees."""

    async def work() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        await within(work(), 5.0)


async def test_a_cancelled_wait_cancels_the_work() -> None:
    """Nobody waits any more: the work ends with the waiter."""
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiter = asyncio.create_task(within(work(), 60.0))
    await asyncio.sleep(0.01)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert ended.is_set()


async def test_an_error_after_the_waiter_is_gone_is_no_ones_fault() -> None:
    """Work that ends its cancellation with an error of its own: the waiter is cancelled, and nothing is left unseen."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("too late") from None

    waiter = asyncio.create_task(within(work(), 60.0))
    await asyncio.sleep(0.01)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    del waiter
    gc.collect()
    await asyncio.sleep(0.01)
    assert unseen == []
