"""Page plans: the owner filter and the coalescing of page pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from app.core.owners import owned, owned_by, rank_positions
from app.core.runs import coalesce
from bench.figures import Figure
from bench.lists import pages_in_runs, seconds_of
from bench.peers.client import Peer
from bench.report import Target

_RANK, _RANKS = 3, 8
_UPSTREAM = "upstream"
_Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class _Work:
    title: str
    limit_s: float
    times: int
    ours: _Call
    plain: tuple[str, _Call]
    request: dict[str, Any] | None = None
    """What the peer is asked for, where it has such a function."""


def _works() -> list[_Work]:
    chunk = pages_in_runs(16_384, 10**9, 5)
    mine = rank_positions(len(chunk), _RANK, _RANKS)
    first, last = int(chunk[mine.start]), int(chunk[mine.stop - 1])
    owners = np.random.default_rng(2).integers(0, _RANKS, len(chunk)).astype(np.int8)
    works = [
        _Work(
            title=f"owner filter, {len(chunk)} pages, one range",
            limit_s=1e-6,
            times=2_000,
            ours=lambda: owned(chunk, 0, mine),
            plain=("numpy mask", lambda: chunk[(chunk >= first) & (chunk <= last)]),
            request={"do": "filter", "pages": len(chunk), "run": 10**9},
        ),
        _Work(
            title=f"owner filter, {len(chunk)} pages, owned one by one",
            limit_s=5e-6,
            times=1_000,
            ours=lambda: owned_by(chunk, owners, _RANK),
            plain=("numpy mask", lambda: _masked(chunk, owners)),
        ),
    ]
    for count, limit_s in ((1_024, 5e-6), (16_384, 80e-6)):
        source, destination = (pages_in_runs(count, 8, seed) for seed in (5, 6))
        works.append(
            _Work(
                title=f"coalescing, {count} pages in runs of about 8",
                limit_s=limit_s,
                times=1_000_000 // count,
                ours=partial(coalesce, source, destination),
                plain=("numpy diff", partial(_differences, source, destination)),
                request={"do": "coalesce", "pages": count, "run": 8},
            )
        )
    return works


STEPS = 4


def _masked(pages: Any, owners: Any) -> Any:
    positions = np.flatnonzero(owners == _RANK)
    return pages[positions], positions


def _differences(source: Any, destination: Any) -> Any:
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(destination) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    return source[starts], destination[starts], np.diff(np.append(starts, len(source)))


def measure(rounds: int, other: Peer | None, advance: Callable[[str], None]) -> list[Figure]:
    rows: list[Figure] = []
    for work in _works():
        name, plain = work.plain
        ours, taken = list[float](), dict[str, list[float]]()
        if work.request:
            taken[_UPSTREAM] = []
        taken[name] = []
        for _ in range(rounds):
            ours.append(median(seconds_of(work.ours, work.times)))
            if work.request and other:
                # slow enough that fewer calls tell
                taken[_UPSTREAM].append(median(other.ask(**work.request, times=max(20, work.times // 10))))
            taken[name].append(median(seconds_of(plain, work.times)))
            advance(work.title)
        rows.append(
            Figure(
                work=work.title,
                ours=ours,
                other=[],
                unit="us",
                target=Target(limit=work.limit_s, bound="at most", of="difference"),
                peers=taken,
            )
        )
    return rows
