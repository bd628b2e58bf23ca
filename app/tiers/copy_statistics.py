"""What copies did and how long their steps took.

build    a batch's page lists into runs and indices      once a batch, or once a layer without prepared loads
submit   a layer's copy handed to the processor or the device
wait     a reader blocked until its layer was there      what a load costs the forward
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from app.core.ids import Source
from app.tiers.descriptors import Direction

Phase = Literal["build", "submit", "wait"]
Timing = Callable[[Phase, float], None]
"""Called with each step's seconds, on the thread that took the step; it must not raise or block."""

Key = tuple[Direction, Source]


@dataclass(kw_only=True)
class CopyStatistics:
    """Counters of one node's copies. Thread-safe; read them with `snapshot`, or one by one when idle."""

    timing: Timing | None = None
    submits: Counter[Key] = field(default_factory=Counter)
    """Layer copies handed in."""
    bytes: Counter[Key] = field(default_factory=Counter)
    operations: Counter[Key] = field(default_factory=Counter)
    """Single copies that they took: runs of the direct backend, calls of the kernel one."""
    steps: Counter[Phase] = field(default_factory=Counter)
    seconds: dict[Phase, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def submitted(self, direction: Direction, source: Source) -> None:
        with self._lock:
            self.submits[direction, source] += 1

    def moved(self, direction: Direction, source: Source, *, moved_bytes: int, operations: int) -> None:
        with self._lock:
            self.bytes[direction, source] += moved_bytes
            self.operations[direction, source] += operations

    @contextmanager
    def step(self, phase: Phase) -> Iterator[None]:
        """Time a step; one that fails counts too."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timed(phase, time.perf_counter() - start)

    def timed(self, phase: Phase, seconds: float) -> None:
        with self._lock:
            self.steps[phase] += 1
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        if self.timing is not None:
            self.timing(phase, seconds)

    def snapshot(self) -> dict[str, Any]:
        """Plain values for reports."""
        with self._lock:
            copies = {
                f"{direction}.{source}": {
                    "submits": submits,
                    "operations": self.operations[direction, source],
                    "bytes": self.bytes[direction, source],
                }
                for (direction, source), submits in self.submits.items()
            }
            steps = {p: {"count": n, "seconds": self.seconds[p]} for p, n in self.steps.items()}
        return {"copies": copies, "steps": steps}
