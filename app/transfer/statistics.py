"""Counts and tails of transfers, per peer and rank."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
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
    """What each rank has sent to whom. A rank that sent no byte of KV (a dummy sender) reports nothing."""

    def __init__(self, *, remember: int = 1024) -> None:
        self._durations: dict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=remember))
        self._bytes: Counter[tuple[str, int]] = Counter()
        self._rooms: Counter[tuple[str, int]] = Counter()

    def record(self, peer: str, *, sent_bytes: int, seconds: float, rank: int = 0) -> None:
        """One rank's part of a room: `seconds` from the forward's start to its last byte's landing."""
        if sent_bytes <= 0:
            return
        key = peer, rank
        self._bytes[key] += sent_bytes
        self._rooms[key] += 1
        self._durations[key].append(seconds)

    def snapshot(self) -> dict[str, Any]:
        """By peer: the sums over its ranks, and each rank by its number."""
        shown: dict[str, Any] = {}
        for (peer, rank), rooms in sorted(self._rooms.items()):
            of_peer = shown.setdefault(peer, {"bytes": 0, "ranks": {}})
            of_peer["bytes"] += self._bytes[peer, rank]
            of_peer["ranks"][str(rank)] = {
                "rooms": rooms,
                "bytes": self._bytes[peer, rank],
                "transfer_s": percentiles(self._durations[peer, rank]),
            }
        return shown
