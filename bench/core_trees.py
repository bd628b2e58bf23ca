"""The prefix tree: matches, inserts and evictions of long conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from bench.figures import Figure
from bench.peers.client import Peer
from bench.prompts import PROMPT_TOKENS, TURN_TOKENS, TURNS, Forest
from bench.report import Target
from bench.subjects import Tree

_RUST = "upstream (Rust)"
_WORKS = ("match", "insert", "evict")
_LIMITS = {"match": 0.35, "insert": 0.25, "evict": 0.3}
_CALLS = {"match": 12, "insert": 12, "evict": 2}
_TITLES = {
    "match": f"match of {PROMPT_TOKENS} tokens over {TURNS} nodes",
    "insert": f"insert of a suffix of {TURN_TOKENS} tokens there",
    "evict": "evict 100000 tokens",
}
_Figures = dict[str, list[float]]


def measure(
    rounds: int, nodes: Sequence[int], other: Peer | None, advance: Callable[[str], None]
) -> list[Figure]:
    """Rows of each size of tree, then what a tree of more nodes costs."""
    rows: list[Figure] = []
    by_size: dict[int, _Figures] = {}
    for count in nodes:
        ours, theirs = _tree(count, rounds, other, advance)
        by_size[count] = ours
        rows += [_row(work, count, ours[work], theirs[work]) for work in _WORKS]
    small, large = min(nodes), max(nodes)
    if small != large:
        # the same prompts in a tree of more nodes
        rows += [_growth(work, small, large, by_size) for work in ("match", "insert")]
    return rows


def _tree(
    count: int, rounds: int, other: Peer | None, advance: Callable[[str], None]
) -> tuple[_Figures, _Figures]:
    forest = Forest(Tree(count), count)
    if other:
        other.ask("grow", nodes=count)
    advance(f"{count} nodes")
    picks = np.random.default_rng(count)
    ours: _Figures = {work: [] for work in _WORKS}
    theirs: _Figures = {work: [] for work in _WORKS}
    for turn in range(rounds):
        numbers = [int(n) for n in picks.integers(0, count // TURNS, _CALLS["match"])]
        fresh = list(range(turn * _CALLS["insert"], (turn + 1) * _CALLS["insert"]))
        requests: dict[str, dict[str, Any]] = {"match": {"numbers": numbers}, "insert": {"numbers": fresh}}
        for work, request in requests.items():
            ours[work].append(median(getattr(forest, work)(**request)))
            if other:
                theirs[work].append(median(other.ask(work, **request)))
        advance(f"{count} nodes")
    # last, since it takes away what is matched
    for _ in range(min(rounds, max(1, count // TURNS // (2 * _CALLS["evict"])))):
        ours["evict"].append(median(forest.evict(_CALLS["evict"])))
        if other:
            theirs["evict"].append(median(other.ask("evict", times=_CALLS["evict"])))
    return ours, theirs


def _row(work: str, nodes: int, ours: list[float], theirs: list[float]) -> Figure:
    return Figure(
        work=f"{_TITLES[work]}, {nodes} nodes",
        ours=ours,
        other=theirs,
        unit="us",
        target=Target(limit=_LIMITS[work], bound="at most"),
        peers={_RUST: theirs},
        against=_RUST,
    )


def _growth(work: str, small: int, large: int, by_size: dict[int, _Figures]) -> Figure:
    name = f"{small} nodes"
    return Figure(
        work=f"{_TITLES[work]}, {large} nodes against {small}",
        ours=by_size[large][work],
        other=by_size[small][work],
        unit="us",
        target=Target(limit=2.0, bound="at most"),
        peers={name: by_size[small][work]},
        against=name,
    )
