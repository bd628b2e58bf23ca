"""`python -m bench` lists the benchmarks, `python -m bench NAME` runs one.

The exit status is 1 when a target is missed and 2 when something could not be measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rich.console import Console

from bench.report import BenchFailed, Report, progress_bars

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """`run` gets its own flags and a function that shows progress; it measures and judges nothing."""

    summary: str
    run: Callable[[Sequence[str]], Report]


def _in(module: str) -> Callable[[Sequence[str]], Report]:
    """A module's benchmark, imported when it runs: it has `options(flags)` and `run(chosen, progress)`."""

    def run(flags: Sequence[str]) -> Report:
        found = import_module(module)
        chosen = found.options(flags)
        with progress_bars(Console(stderr=True)) as progress:
            report: Report = found.run(chosen, progress)
        return report

    return run


BENCHMARKS: Mapping[str, Benchmark] = {
    "core": Benchmark(
        summary="allocators, prefix tree, page plans and page copies against their peers",
        run=_in("bench.core"),
    ),
    "cp": Benchmark(
        summary="what context parallelism with one shared copy costs and moves",
        run=_in("bench.cp"),
    ),
    "replay": Benchmark(
        summary="a trace of requests through tree, allocators and eviction, against LRU and a bound",
        run=_in("bench.replay"),
    ),
    "hicache": Benchmark(
        summary="first tokens of cached prefixes, the price of backups, loads behind the forward",
        run=_in("bench.hicache"),
    ),
    "transfer": Benchmark(
        summary="exposed transfer time, goodput against a plain socket, resident memory of the nodes",
        run=_in("bench.transfer"),
    ),
}


def main(
    arguments: Sequence[str] | None = None,
    *,
    benchmarks: Mapping[str, Benchmark] = BENCHMARKS,
    results: Path = RESULTS,
    console: Console | None = None,
) -> int:
    """List or run; the process's exit status."""
    console = console or Console()
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(benchmarks), help="which benchmark to run")
    known, flags = parser.parse_known_args(arguments)
    if known.name is None:
        if flags:
            parser.error(f"unknown: {' '.join(flags)}")
        for name, benchmark in benchmarks.items():
            console.print(f"{name:12} {benchmark.summary}", highlight=False, soft_wrap=True)
        return 0
    try:
        report = benchmarks[known.name].run(flags)
    except BenchFailed as error:
        Console(stderr=True).print(f"bench {known.name}: {error}", markup=False, highlight=False)
        return 2
    report.write(results / f"{known.name}.json")
    report.show(console)
    return 0 if report.holds else 1


if __name__ == "__main__":
    # told to end: as if interrupted, so that nodes and other processes are stopped first. In the background
    # a shell starts us with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    sys.exit(main())
