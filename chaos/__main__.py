"""Faults of every kind over a whole deployment on loopback, and what is left afterwards.

python -m chaos [--seed N] [--requests N] [--report FILE] [--plan]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from app.obs.logging import configure_logging
from chaos.campaign import Report, run_campaign
from chaos.plan import make_plan
from demo.cluster import ClusterError

REQUESTS, SEED = 500, 1
RESULTS = Path("chaos/results")

console = Console(highlight=False, width=118)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--report", type=Path, help="JSON file; default: a new one in chaos/results")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes in this new folder")
    parser.add_argument("--plan", action="store_true", help="print the plan of faults as JSON and end")
    known = parser.parse_args(arguments)
    if known.requests < 50:
        parser.error("--requests: fewer than 50 do not meet every fault")
    plan = make_plan(known.seed, known.requests)
    if known.plan:
        print(json.dumps(plan.as_json(), indent=1))
        return 0
    configure_logging(level="warning", style="console")
    with tempfile.TemporaryDirectory(prefix="kvferry-chaos-") as temporary:
        folder = Path(temporary)
        if known.logs:
            folder = known.logs
            folder.mkdir(parents=True)
        try:
            report = anyio.run(run_campaign, plan, folder, say)
        except (ClusterError, ExceptionGroup) as error:
            # of a task group's several failures the first says enough
            first: Exception = error
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
            if not isinstance(first, ClusterError):
                raise
            console.print(f"[red]chaos: {first}[/red]")
            return 1
    path = known.report or RESULTS / f"seed-{known.seed}-requests-{known.requests}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(report), indent=1))
    show(report)
    failed = sum(not check.good for check in report.checks)
    console.print(
        f"chaos: seed {plan.seed}, {len(report.outcomes)} requests in {report.seconds:.0f} s, "
        f"{failed} checks failed; {path}"
    )
    return 0 if report.good else 1


def say(text: str) -> None:
    console.print(f"[dim]chaos: {text}[/dim]")


def endings(report: Report) -> Counter[str]:
    """Outcomes by kind; failures by the name of their error."""
    return Counter(f"{o.kind}: {o.error}" if o.error else o.kind for o in report.outcomes)


def as_json(report: Report) -> dict[str, Any]:
    return {
        "good": report.good,
        "seconds": round(report.seconds, 1),
        "checks": [asdict(check) for check in report.checks],
        "outcomes": dict(endings(report)),
        "faults": dict(report.faults),
        "events": dict(report.events),
        "stats": report.stats,
        "requests": [asdict(o) for o in sorted(report.outcomes, key=lambda o: o.number)],
        "plan": report.plan.as_json(),
    }


def show(report: Report) -> None:
    for title, counts in (
        ("outcomes", endings(report)),
        ("faults", report.faults),
        ("warnings and errors in the nodes' logs", report.events),
    ):
        table = Table(title=title)
        table.add_column("kind")
        table.add_column("count", justify="right")
        for kind, count in sorted(counts.items()):
            table.add_row(kind, str(count))
        console.print(table)
    table = Table(title="checks")
    for name in ("check", "", "found"):
        table.add_column(name)
    for check in report.checks:
        table.add_row(check.name, "good" if check.good else "[red]FAILED[/red]", check.found)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
