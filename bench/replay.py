"""`bench replay`: a trace of requests through the real tree, allocators and eviction, metadata only.

The prompt tokens that the tiers serve are compared with the same run under `lru`, and shown beside a cache of the
same size that knows the future. The tree's clock is the order of the requests, so that the arrival times of the
trace decide nothing and a replay gives the same hits on every machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from app.core.prefix_tree import DEFAULT_POLICY, POLICIES, Policy
from bench import belady, traces
from bench.figures import Figure
from bench.replay_tiers import Outcome, Shape, Tiers
from bench.report import BenchFailed, Report, Row, Target

_BELADY = "Belady"
_LRU: Policy = "lru"
_US_TOKENS = (11_000, 13_000)
_US_LIMIT = 300e-6
_LRU_FACTOR = {"conversation": {1_000_000: 1.3, 2_448_000: 1.3}}
"""Where no less than LRU is too little; the trace is known by its name."""


@dataclass(frozen=True, kw_only=True)
class Options:
    trace: Path
    capacities: tuple[int, ...]
    policy: Policy
    l2_ratio: float
    lanes: int
    free_room: float
    requests: int | None


def options(flags: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench replay", description=__doc__)
    parser.add_argument(
        "--trace", type=Path, required=True, help="a file of requests, one JSON object a line"
    )
    parser.add_argument(
        "--capacity", default="1.0,2.448,5.0", help="of L1, in millions of tokens, with commas"
    )
    parser.add_argument("--policy", choices=POLICIES, default=DEFAULT_POLICY)
    parser.add_argument(
        "--l2-ratio", type=float, default=0.0, help="capacity of L2 as a multiple of L1; 0: no L2"
    )
    parser.add_argument("--lanes", type=int, default=1, help="owner lanes of L1")
    parser.add_argument(
        "--free-room", type=float, default=0.01, help="part of a tier that evictions keep free"
    )
    parser.add_argument("--requests", type=int, help="only the first ones")
    known = parser.parse_args(list(flags))
    try:
        capacities = tuple(round(float(part) * 1e6) for part in known.capacity.split(","))
    except ValueError:
        parser.error(f"capacities are numbers, not {known.capacity}")
    if min(capacities) < 100_000 or known.l2_ratio < 0 or known.lanes < 1 or not 0 <= known.free_room < 1:
        parser.error("capacities from 0.1, a ratio from 0, lanes from 1 and a free room in 0..1 are needed")
    return Options(
        trace=known.trace,
        capacities=capacities,
        policy=known.policy,
        l2_ratio=known.l2_ratio,
        lanes=known.lanes,
        free_room=known.free_room,
        requests=known.requests,
    )


def run(chosen: Options, progress: Progress) -> Report:
    started_s = time.time()
    requests = traces.read(chosen.trace)[: chosen.requests]
    if not requests:
        raise BenchFailed(f"the trace {chosen.trace} holds no request")
    task = progress.add_task("replay", total=len(chosen.capacities) * 3)
    rows: list[Row] = []
    for capacity in chosen.capacities:

        def advance(now: str, capacity: int = capacity) -> None:
            progress.update(task, advance=1, description=f"{capacity / 1e6:g} M tokens: {now}")

        rows += _compare(chosen, requests, capacity, advance)
    return Report(name=f"replay-{chosen.trace.stem}", rows=rows, started_s=started_s)


def _compare(
    chosen: Options, requests: Sequence[traces.Request], capacity: int, advance: Callable[[str], None]
) -> list[Row]:
    shape = Shape(
        l1_tokens=capacity,
        l2_tokens=round(capacity * chosen.l2_ratio),
        lanes=chosen.lanes,
        free_room=chosen.free_room,
    )
    ours = replay(requests, shape, chosen.policy)
    advance(chosen.policy)
    lru = ours if chosen.policy == _LRU else replay(requests, shape, _LRU)
    advance(_LRU)
    # one cache of the size of both tiers, since what is in L1 is in L2 too
    bound = belady.hit_tokens(requests, max(shape.l1_tokens, shape.l2_tokens)) / ours.prompt_tokens
    advance(_BELADY)
    name = f"{capacity / 1e6:g} M tokens"
    rows: list[Row] = [
        Figure(
            work=f"prompt tokens served, {name}, {chosen.policy}",
            ours=[ours.served],
            other=[lru.served],
            unit="%",
            target=Target(limit=_least(chosen, capacity), bound="at least"),
            peers={_LRU: [lru.served], _BELADY: [bound]},
            against=_LRU,
            detail=_detail(ours) | {"lru": _detail(lru)},
        )
    ]
    middle = [
        took for took, request in zip(ours.took_s, requests, strict=True) if _is_middle(request.tokens)
    ] or ours.took_s
    rows.append(
        Figure(
            work=f"decisions for a request of 12000 tokens, {name}: p50",
            ours=[float(np.median(middle))],
            other=[],
            unit="us",
            target=Target(limit=_US_LIMIT, bound="at most", of="difference"),
            detail={"p99_s": float(np.percentile(middle, 99)), "requests": len(middle)},
        )
    )
    return rows


def replay(requests: Sequence[traces.Request], shape: Shape, policy: Policy) -> Outcome:
    """One run from empty tiers; the tree is checked at its end."""
    tiers = Tiers(shape, policy)
    for request in requests:
        tiers.serve(request)
    tiers.tree.check_integrity()
    return tiers.outcome


def _least(chosen: Options, capacity: int) -> float:
    """How many times LRU's hits are wanted. LRU has to be as good as itself."""
    if chosen.policy == _LRU:
        return 1.0
    known = next((factors for name, factors in _LRU_FACTOR.items() if chosen.trace.stem.startswith(name)), {})
    return known.get(capacity, 1.0)


def _is_middle(tokens: int) -> bool:
    return _US_TOKENS[0] <= tokens <= _US_TOKENS[1]


def _detail(outcome: Outcome) -> dict[str, Any]:
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "l1_tokens": outcome.l1_tokens,
        "l2_tokens": outcome.l2_tokens,
        "evictions": outcome.evictions,
        "evicted_pages": outcome.evicted_pages,
        "largest_extent_pages": {
            "p50": float(np.median(outcome.largest_extent)),
            "end": outcome.largest_extent[-1],
        },
        "runs_per_allocation": {
            "mean": float(np.mean(outcome.runs)),
            "p99": float(np.percentile(outcome.runs, 99)),
        },
        "request_s": {
            "p50": float(np.percentile(outcome.took_s, 50)),
            "p99": float(np.percentile(outcome.took_s, 99)),
        },
    }
