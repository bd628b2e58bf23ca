"""A wait for a condition, with a bound that a machine which stands still for seconds does not use up.

A virtual machine that is paused, or a full collection of the heap, makes every timer due at once. So the wait is
bounded in turns of the event loop too. What can be awaited has `app.service.awake.within`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

_POLL_S = 0.002


async def comes_true(condition: Callable[[], Any], within_s: float) -> bool:
    """Whether a condition holds before the time, and a good part of the questions that fit into it, are over."""
    until, left = time.monotonic() + within_s, within_s / _POLL_S / 10
    while not condition():
        left -= 1
        if left < 0 and time.monotonic() > until:
            return False
        await asyncio.sleep(_POLL_S)
    return True
