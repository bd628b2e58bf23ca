"""When the phases of a request began and ended, and the durations that follow."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(kw_only=True)
class Phases:
    """Monotonic seconds; 0 is a phase that has not been reached."""

    received: float = 0.0
    admitted: float = 0.0
    forward_start: float = 0.0
    forward_end: float = 0.0
    transfer_end: float = 0.0
    told: float = 0.0
    finished: float = 0.0

    def mark(self, phase: str) -> None:
        setattr(self, phase, time.monotonic())

    @staticmethod
    def between(start: float, end: float) -> float:
        """Seconds from start to end; 0 when either is unset, and never negative."""
        return max(end - start, 0.0) if start and end else 0.0

    def durations(self) -> dict[str, float]:
        """Seconds of each phase. The transfer ends when the last byte has landed, not with the request."""
        return {
            "queue_s": self.between(self.received, self.admitted),
            "forward_s": self.between(self.forward_start, self.forward_end),
            "transfer_s": self.between(self.forward_start, self.transfer_end),
            "exposed_s": self.between(self.forward_end, self.told),
            "total_s": self.between(self.received, self.finished),
        }
