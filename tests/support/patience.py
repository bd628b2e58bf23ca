"""Waits with a bound that a machine which stands still for seconds does not use up.

A virtual machine that is paused, or a full collection of the heap, makes every timer due at once. So each wait here is
bounded in turns of the event loop too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_SLICES = 50
_POLL_S = 0.002


async def patiently(make: Callable[[], Awaitable[T]], within_s: float) -> T:
    """What `make()` gives; TimeoutError when `within_s`, in many short waits, has not brought it.

    Each of them calls `make` anew: it has to bear being cancelled.
    """
    for _ in range(_SLICES):
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s / _SLICES):
                return await make()
    raise TimeoutError(f"nothing within {within_s} s")


async def comes_true(condition: Callable[[], Any], within_s: float) -> bool:
    """Whether a condition holds before the time, and a good part of the questions that fit into it, are over."""
    until, left = time.monotonic() + within_s, within_s / _POLL_S / 10
    while not condition():
        left -= 1
        if left < 0 and time.monotonic() > until:
            return False
        await asyncio.sleep(_POLL_S)
    return True
