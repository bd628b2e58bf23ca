"""What the engine's thread is asked to do, in order, and its wait for that.

`queue.SimpleQueue.get(timeout)` may wait for ever (CPython 3.11): after an item that was there without a wait, it takes
its free lock, computes what is left of the time, and waits without a limit when that has become negative. With waits of
0.4 ms, a thread that lost its processor there for as long did not look at its writes again before the next call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Call = Callable[[], None]


class Calls:
    """First in, first out; any thread may put, one thread gets."""

    def __init__(self) -> None:
        self._calls: deque[Call | None] = deque()
        self._bell = threading.Lock()
        """Free: something has been put since the getter last looked."""

    def put(self, call: Call | None) -> None:
        self._calls.append(call)
        if self._bell.locked():
            try:
                self._bell.release()
            except RuntimeError:
                """Another thread has rung just now: the getter comes, and finds this call as well."""

    def get(self, timeout_s: float) -> Call | None:
        """The next call. TimeoutError when there is none, after a wait of at least `timeout_s` seconds."""
        while not self._calls:
            if self._bell.acquire(blocking=False):
                continue  # it rang for a call that has been taken since
            if not self._bell.acquire(timeout=timeout_s) and not self._calls:
                raise TimeoutError
        return self._calls.popleft()
