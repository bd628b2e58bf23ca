"""Host copies of pages of 64 KiB, 256 MiB at a time, and digests of a quarter of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import xxhash

from app import _native
from app.core.copies import gather, scatter
from bench.figures import Figure
from bench.report import BenchFailed, Target

_PAGE_BYTES = 64 << 10
_PAGES = 4_096
_BYTES = _PAGE_BYTES * _PAGES
_BLOCK = "numpy, one block"
_DIGESTED_PAGES = 1_024
_LOOP = "xxhash, a call a page"
_PASSES = 3
"""Copies a round; the first round is not counted."""


def measure(rounds: int, advance: Callable[[str], None]) -> list[Figure]:
    """Gather and scatter against one plain copy of as many bytes; digests against a loop over the same library."""
    pool = np.random.default_rng(3).integers(0, 256, (2 * _PAGES, _PAGE_BYTES), np.uint8)
    pages = np.random.default_rng(4).permutation(2 * _PAGES)[:_PAGES]
    rows = np.zeros((_PAGES, _PAGE_BYTES), np.uint8)
    block = np.zeros_like(rows)
    few, layers = pages[:_DIGESTED_PAGES], np.zeros(_DIGESTED_PAGES, np.int64)
    gather(pool, pages, rows)
    if not np.array_equal(rows, pool[pages]):
        raise BenchFailed("the gathered pages are not those that were listed")

    def loop() -> list[int]:
        return [xxhash.xxh3_64_intdigest(pool[page]) for page in few]

    def digests() -> list[int]:
        found: list[int] = _native.digest_items(pool[np.newaxis], layers, few).tolist()
        return found

    if loop() != digests():
        raise BenchFailed("the digests are not those of xxhash")
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "block": (_BYTES, lambda: np.copyto(block, rows)),
        "gather": (_BYTES, lambda: gather(pool, pages, rows)),
        "scatter": (_BYTES, lambda: scatter(rows, pool, pages)),
        "loop": (_DIGESTED_PAGES * _PAGE_BYTES, loop),
        "digests": (_DIGESTED_PAGES * _PAGE_BYTES, digests),
    }
    speeds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for _ in range(_PASSES):
            for name, (size, work) in works.items():
                started = time.perf_counter()
                work()
                if turn:
                    speeds[name].append(size / (time.perf_counter() - started))
        if turn:
            advance("copies and digests")
    return [
        _row("gather of 64 KiB pages, 256 MiB", speeds["gather"], _BLOCK, speeds["block"], 0.9),
        _row("scatter of 64 KiB pages, 256 MiB", speeds["scatter"], _BLOCK, speeds["block"], 0.9),
        _row("digests of 1,024 pages of 64 KiB", speeds["digests"], _LOOP, speeds["loop"], 0.9),
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
