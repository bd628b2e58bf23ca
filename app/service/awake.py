"""A time limit that a pause of the process does not use up.

A process that was stopped, or a machine that stood still, finds all its timers due at once, before it has looked at
anything that happened meanwhile. Where a limit only ends a wait in vain, and nothing else relies on the time, it is
cut into slices: a pause, however long, costs one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SLICES = 10


async def within(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """What `work` returns or raises; TimeoutError after `limit_s` seconds awake. It is cancelled, and over, by then."""
    task = asyncio.ensure_future(work)
    try:
        for _ in range(SLICES):
            done, _ = await asyncio.wait({task}, timeout=limit_s / SLICES)
            if done:
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits for it any more
