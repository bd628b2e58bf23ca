"""`bench hicache`: what a cached prefix saves, what a backup costs, how much of a load hides behind the forward."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop
from rich.progress import Progress

from bench import first_token, tier_forwards
from bench.report import Report, Row

_PARTS = ("nodes", "forwards")


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: int
    parts: tuple[str, ...]


def options(flags: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench hicache", description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="rounds of each comparison")
    parser.add_argument("--part", choices=_PARTS, help="only this part")
    known = parser.parse_args(list(flags))
    if known.runs < 1:
        parser.error("at least one run is needed")
    return Options(runs=known.runs, parts=(known.part,) if known.part else _PARTS)


def run(chosen: Options, progress: Progress) -> Report:
    started_s, rows = time.time(), list[Row]()
    if "nodes" in chosen.parts:
        advance = _bar(progress, "first tokens", chosen.runs + 1)
        rows += uvloop.run(first_token.measure(chosen.runs, advance))
    if "forwards" in chosen.parts:
        advance = _bar(progress, "forwards", 2 * (chosen.runs + 1))
        rows += tier_forwards.measure(chosen.runs, advance)
    return Report(name="hicache", rows=rows, started_s=started_s)


def _bar(progress: Progress, description: str, total: int) -> Callable[[str], None]:
    task = progress.add_task(description, total=total)

    def advance(now: str) -> None:
        progress.update(task, advance=1, description=now)

    return advance
