"""Host copies of pages of 64 KiB, 256 MiB at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from app.core.copies import gather, scatter
from bench.figures import Figure
from bench.report import BenchFailed, Target

_PAGE_BYTES = 64 << 10
_PAGES = 4_096
_BYTES = _PAGE_BYTES * _PAGES
_BLOCK = "numpy, one block"
_PASSES = 3
"""Copies a round; the first round is not counted."""


def measure(rounds: int, advance: Callable[[str], None]) -> list[Figure]:
    """Gather and scatter against one plain copy of as many bytes."""
    pool = np.random.default_rng(3).integers(0, 256, (2 * _PAGES, _PAGE_BYTES), np.uint8)
    pages = np.random.default_rng(4).permutation(2 * _PAGES)[:_PAGES]
    rows = np.zeros((_PAGES, _PAGE_BYTES), np.uint8)
    block = np.zeros_like(rows)
    gather(pool, pages, rows)
    if not np.array_equal(rows, pool[pages]):
        raise BenchFailed("the gathered pages are not those that were listed")
    works: dict[str, Callable[[], object]] = {
        "block": lambda: np.copyto(block, rows),
        "gather": lambda: gather(pool, pages, rows),
        "scatter": lambda: scatter(rows, pool, pages),
    }
    speeds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for _ in range(_PASSES):
            for name, work in works.items():
                started = time.perf_counter()
                work()
                if turn:
                    speeds[name].append(_BYTES / (time.perf_counter() - started))
        if turn:
            advance("copies")
    return [
        _row("gather of 64 KiB pages, 256 MiB", speeds["gather"], _BLOCK, speeds["block"], 0.9),
        _row("scatter of 64 KiB pages, 256 MiB", speeds["scatter"], _BLOCK, speeds["block"], 0.9),
    ]


def _row(work: str, ours: list[float], name: str, other: list[float], least: float) -> Figure:
    return Figure(
        work=work,
        ours=ours,
        other=other,
        unit="GB/s",
        target=Target(limit=least, bound="at least"),
        peers={name: other},
        against=name,
    )
