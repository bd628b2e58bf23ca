"""Counts and tails of transfers, per peer."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and max, by nearest rank; zeros when there is nothing."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}

    def rank(part: float) -> float:
        return ordered[max(math.ceil(part * len(ordered)) - 1, 0)]

    return {"p50": rank(0.50), "p95": rank(0.95), "p99": rank(0.99), "max": ordered[-1]}


class TransferStatistics:
    """What has been sent to whom. A room that sent no byte of KV (a dummy sender) reports nothing."""

    def __init__(self, *, remember: int = 1024) -> None:
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=remember))
        self.bytes: dict[str, int] = defaultdict(int)
        self.rooms: dict[str, int] = defaultdict(int)

    def record(self, peer: str, *, sent_bytes: int, seconds: float) -> None:
        if sent_bytes <= 0:
            return
        self.bytes[peer] += sent_bytes
        self.rooms[peer] += 1
        self._durations[peer].append(seconds)

    def snapshot(self) -> dict[str, Any]:
        return {
            peer: {
                "rooms": self.rooms[peer],
                "bytes": self.bytes[peer],
                "transfer_s": percentiles(self._durations[peer]),
            }
            for peer in self.rooms
        }
