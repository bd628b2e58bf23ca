"""Allocators under churn: the same nodes come and go in each of them, and single calls are timed.

Imports numpy only: the peers' processes run it too, in an environment without this project.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Sizes = Literal["small", "mixed", "large"]
POOL_PAGES = 38_255
"""A host pool of 220 GB: pages of 64 tokens at 89,856 bytes a token."""

_BURN = {"small": 5_600, "mixed": 1_500, "large": 300}
"""Nodes that fill a pool of POOL_PAGES and turn it over."""
_MEASURED = {"small": 1_200, "mixed": 800, "large": 400}
_HISTORY_NODES, _HISTORY_MEASURED = 7_000, 120


class Allocator(Protocol):
    """What is compared; `allocate` gives a handle that means nothing here, or None."""

    def free_pages(self) -> int: ...
    def allocate(self, pages: int) -> Any: ...
    def release(self, handle: Any) -> None: ...
    def runs(self, handle: Any) -> int:
        """Stretches of contiguous pages in an allocation; not timed."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Steady churn of nodes of one size; or, after a history of small nodes, large ones."""

    pages: int
    sizes: Sizes
    occupancy: float
    history: bool = False


@dataclass(kw_only=True)
class Samples:
    allocate_s: list[float] = field(default_factory=list)
    release_s: list[float] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)


def node_pages(sizes: Sizes, count: int, seed: int) -> list[int]:
    """Pages of `count` nodes: about 8, about 24 with a long tail, or about 256."""
    generator = np.random.default_rng(seed)
    if sizes == "small":
        drawn = np.clip(generator.geometric(1 / 8, count), 1, 64)
    elif sizes == "mixed":
        drawn = np.clip(np.exp(generator.normal(np.log(24), 1.2, count)), 1, 1024)
    else:
        drawn = np.clip(generator.geometric(1 / 256, count), 16, 1600)
    return [int(n) for n in drawn]


def churn(allocator: Allocator, load: Load, seed: int) -> Samples:
    """Fill the pool to its occupancy, turn it over, then time the calls."""
    samples = Samples()
    scale = max(1, load.pages // POOL_PAGES)
    before: Sizes = "small" if load.history else load.sizes
    burn = (_HISTORY_NODES if load.history else _BURN[load.sizes]) * scale
    measured = _HISTORY_MEASURED if load.history else _MEASURED[load.sizes]
    turn = _Turnover(allocator, load, random.Random(seed))
    for pages in node_pages(before, burn, seed):
        turn.make_room(pages, None)
        turn.add(pages, None)
    gc.collect()
    gc.disable()
    try:
        for pages in node_pages(load.sizes, measured, seed + 1):
            turn.make_room(pages, samples)
            turn.add(pages, samples)
    finally:
        gc.enable()
    return samples


class _Turnover:
    def __init__(self, allocator: Allocator, load: Load, chance: random.Random) -> None:
        self._allocator, self._chance = allocator, chance
        self._kept_free = round(load.pages * (1 - load.occupancy))
        self._victims = 1.0 if load.history else 0.5
        self._live: list[Any] = []

    def make_room(self, pages: int, samples: Samples | None) -> None:
        """Free random nodes, of the older half in steady churn, until the occupancy allows `pages`."""
        live = self._live
        while live and self._allocator.free_pages() < pages + self._kept_free:
            at = self._chance.randrange(max(1, int(len(live) * self._victims)))
            live[at], live[-1] = live[-1], live[at]
            victim = live.pop()
            took_s = _timed(self._allocator.release, victim)[1]
            if samples:
                samples.release_s.append(took_s)

    def add(self, pages: int, samples: Samples | None) -> None:
        handle, took_s = _timed(self._allocator.allocate, pages)
        if handle is None:
            raise RuntimeError(f"no room for {pages} pages with {self._allocator.free_pages()} free")
        self._live.append(handle)
        if samples:
            samples.allocate_s.append(took_s)
            samples.runs.append(self._allocator.runs(handle))


def _timed(call: Callable[[Any], Any], argument: Any) -> tuple[Any, float]:
    started = time.perf_counter_ns()
    result = call(argument)
    return result, (time.perf_counter_ns() - started) * 1e-9


def runs_of(pages: Any) -> int:
    """Runs of a page list in allocation order."""
    return 1 + int((np.diff(pages) != 1).sum())
