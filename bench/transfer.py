"""`bench transfer`: what a request still waits for after its forward, and how fast the wrapper is."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop
from rich.progress import Progress

from bench import exposed, goodput
from bench.report import Report, Row

_CHUNKINGS = (2048, 512)
_PARTS = ("exposed", "goodput")


@dataclass(frozen=True, kw_only=True)
class Options:
    pairs: int
    runs: int
    parts: tuple[str, ...]


def options(flags: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench transfer", description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="requests of each mode and chunking")
    parser.add_argument("--runs", type=int, default=25, help="64 MiB runs of each shape")
    parser.add_argument("--part", choices=_PARTS, help="only this part (exposed has the memory rows)")
    known = parser.parse_args(list(flags))
    if known.pairs < 1 or known.runs < 1:
        parser.error("at least one pair and one run are needed")
    return Options(pairs=known.pairs, runs=known.runs, parts=(known.part,) if known.part else _PARTS)


def run(chosen: Options, progress: Progress) -> Report:
    started_s, rows = time.time(), list[Row]()
    if "goodput" in chosen.parts:
        advance = _bar(progress, "goodput", (chosen.runs + 1) * len(goodput.shapes()))
        rows += uvloop.run(goodput.measure(chosen.runs, advance))
    if "exposed" in chosen.parts:
        advance = _bar(progress, "starting nodes", (chosen.pairs + 2) * len(_CHUNKINGS))
        rows = [*uvloop.run(exposed.measure(chosen.pairs, _CHUNKINGS, advance)), *rows]
    return Report(name="transfer", rows=rows, started_s=started_s)


def _bar(progress: Progress, description: str, total: int) -> Callable[[str], None]:
    task = progress.add_task(description, total=total)

    def advance(now: str) -> None:
        progress.update(task, advance=1, description=now)

    return advance
