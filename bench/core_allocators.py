"""The page-extent allocator under churn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.churn import POOL_PAGES, Load, Samples, churn
from bench.figures import Figure
from bench.peers.client import Peer
from bench.prototypes import prototype
from bench.report import Target, Unit
from bench.subjects import Extents

_STEADY = [
    Load(pages=POOL_PAGES, sizes=sizes, occupancy=occupancy)
    for sizes in ("small", "mixed", "large")
    for occupancy in (0.90, 0.97)
]
_HISTORY = [Load(pages=POOL_PAGES, sizes="large", occupancy=o, history=True) for o in (0.90, 0.97)]
_TEN_TIMES = 10
STEPS = len(_STEADY) + len(_HISTORY)
_PROTOTYPES = ("bisect", "sort and scan")
_UPSTREAM = "upstream"


def measure(rounds: int, other: Peer | None, advance: Callable[[str], None]) -> list[Figure]:
    """Rows of each load, then what ten times the pages cost in each."""
    rows: list[Figure] = []
    wide: list[Figure] = []
    for load in (*_STEADY, *_HISTORY):
        taken: dict[str, list[Samples]] = {}
        for seed in range(rounds):
            taken.setdefault("ours", []).append(churn(Extents(load.pages), load, seed))
            if other:
                taken.setdefault(_UPSTREAM, []).append(_ask(other, load, seed))
            for name in _PROTOTYPES:
                taken.setdefault(name, []).append(churn(prototype(name, load.pages), load, seed))
            larger = replace(load, pages=load.pages * _TEN_TIMES)
            taken.setdefault("wide", []).append(churn(Extents(larger.pages), larger, seed))
            advance(_name(load))
        larger_samples = taken.pop("wide")
        rows += _rows(load, taken)
        wide.append(_wide(load, taken["ours"], larger_samples))
    return [*rows, *wide]


def _ask(other: Peer, load: Load, seed: int) -> Samples:
    fields: dict[str, Any] = other.ask(
        "churn", pages=load.pages, sizes=load.sizes, occupancy=load.occupancy, history=load.history, seed=seed
    )
    return Samples(**fields)


def _name(load: Load) -> str:
    kind = "large nodes after small ones" if load.history else f"{load.sizes} nodes"
    return f"{kind}, {load.occupancy:.0%}"


def _rows(load: Load, taken: dict[str, list[Samples]]) -> list[Figure]:
    allocate = _figure(taken, "us", lambda s: median(s.allocate_s))
    tail = _figure(taken, "us", lambda s: float(np.percentile(s.allocate_s, 99)))
    release = _figure(taken, "us", lambda s: median(s.release_s))
    runs = _figure(taken, "runs", lambda s: fmean(s.runs))
    name = _name(load)
    rows = [allocate(f"allocate, p50: {name}", 15e-6 if load.history else 2e-6)]
    if not load.history:
        rows.append(tail(f"allocate, p99: {name}", 10e-6))
    rows.append(release(f"free, p50: {name}", 2e-6))
    if load.history:
        rows.append(runs(f"runs, mean: {name}", 10))
    rows.append(runs(f"runs, mean: {name}", 1.0, "bisect"))
    return rows


def _figure(
    taken: dict[str, list[Samples]], unit: Unit, of: Callable[[Samples], float]
) -> Callable[..., Figure]:
    """A row of one figure; its target is a limit for it or, with `against`, for the ratio to a peer."""

    def row(work: str, limit: float, against: str | None = None) -> Figure:
        each = {name: [of(samples) for samples in rounds] for name, rounds in taken.items()}
        ours = each.pop("ours")
        return Figure(
            work=work,
            ours=ours,
            other=each[against] if against else [],
            unit=unit,
            target=Target(limit=limit, bound="at most", of="ratio" if against else "difference"),
            peers={_UPSTREAM: [], **each},
            against=against,
        )

    return row


def _wide(load: Load, ours: list[Samples], larger: list[Samples]) -> Figure:
    small = [median(s.allocate_s) for s in ours]
    return Figure(
        work=f"allocate, p50, {_TEN_TIMES} x the pages: {_name(load)}",
        ours=[median(s.allocate_s) for s in larger],
        other=small,
        unit="us",
        target=Target(limit=2.0, bound="at most"),
        peers={"1 x": small},
        against="1 x",
    )
