"""`bench core`: the native core against a peer's allocators, trees and filters, and against plain code.

All parties do the same work in alternating rounds, the peer in a process of its own environment (see
bench/peers/setup.sh; without it its figures are missing and the rows say so). A round gives one figure to
each party; the table shows the medians of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from bench import core_allocators, core_lists, core_memory, core_trees
from bench.figures import Figure
from bench.peers.client import DEFAULT_PYTHON, Peer, peer
from bench.report import Report

PARTS = ("allocators", "trees", "lists", "memory")


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int
    nodes: tuple[int, ...]
    parts: tuple[str, ...]
    peer_python: Path


def options(flags: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench core", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of each work")
    parser.add_argument("--nodes", default="1000,50000", help="sizes of the trees, with commas")
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument(
        "--peer", type=Path, default=DEFAULT_PYTHON, help="interpreter of the peer's environment"
    )
    known = parser.parse_args(list(flags))
    nodes = tuple(int(n) for n in known.nodes.split(",") if n.strip().isdigit())
    if known.rounds < 1 or not nodes or min(nodes) < 500:
        parser.error("at least one round and trees of at least 500 nodes are needed")
    return Options(
        rounds=known.rounds,
        nodes=nodes,
        parts=(known.part,) if known.part else PARTS,
        peer_python=known.peer,
    )


def run(chosen: Options, progress: Progress) -> Report:
    started_s = time.time()
    with peer(chosen.peer_python) as other:
        rows = [row for part in chosen.parts for row in _measure(part, chosen, other, progress)]
    return Report(name="core", rows=rows, started_s=started_s)


def _measure(part: str, chosen: Options, other: Peer | None, progress: Progress) -> list[Figure]:
    if part == "allocators":
        advance = _bar(progress, part, chosen.rounds * core_allocators.STEPS)
        return core_allocators.measure(chosen.rounds, other, advance)
    if part == "trees":
        advance = _bar(progress, part, (chosen.rounds + 1) * len(chosen.nodes))
        return core_trees.measure(chosen.rounds, chosen.nodes, other, advance)
    if part == "lists":
        return core_lists.measure(
            chosen.rounds, other, _bar(progress, part, chosen.rounds * core_lists.STEPS)
        )
    return core_memory.measure(chosen.rounds, _bar(progress, part, chosen.rounds))


def _bar(progress: Progress, part: str, total: int) -> Callable[[str], None]:
    task = progress.add_task(part, total=total)

    def advance(now: str) -> None:
        progress.update(task, advance=1, description=f"{part}: {now}")

    return advance
