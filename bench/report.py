"""What a benchmark says: rows of two things compared, each against a target, as a table and as JSON.

Machines are shared and noisy, so no row is an absolute time: both things run alternately in one process
of time, and what counts is the ratio (or the difference, for sizes) of their medians.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_SCALES = {"us": 1e6, "ms": 1e3, "MB": 1e-6, "GB/s": 1e-9, "runs": 1, "%": 100}
_SAMPLED = {"us": "s", "ms": "s", "MB": "B", "GB/s": "B/s", "runs": "runs", "%": "part"}
Unit = Literal["us", "ms", "MB", "GB/s", "runs", "%"]
"""Samples are in seconds, bytes and bytes a second; these are for showing them."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a row must keep: `ours / other`, or `ours - other`, below or above a limit."""

    limit: float
    bound: Literal["at most", "at least"]
    of: Literal["ratio", "difference"] = "ratio"

    def keeps(self, value: float) -> bool:
        return value <= self.limit if self.bound == "at most" else value >= self.limit


NOTHING_TO_KEEP = Target(limit=math.inf, bound="at most")
"""Of a figure that is there to be known."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison. Samples are alternating runs, in seconds, bytes or bytes a second."""

    work: str
    ours: Sequence[float]
    other: Sequence[float]
    unit: Unit
    target: Target
    detail: dict[str, Any] = field(default_factory=dict)
    """Goes to the JSON only."""

    @property
    def ratio(self) -> float:
        return median(self.ours) / median(self.other)

    @property
    def value(self) -> float:
        """What the target is about."""
        return self.ratio if self.target.of == "ratio" else median(self.ours) - median(self.other)

    @property
    def holds(self) -> bool:
        return self.target.keeps(self.value)

    @property
    def verdict(self) -> str:
        if self.target is NOTHING_TO_KEEP:
            return ""
        return "[green]yes[/]" if self.holds else "[red]NO[/]"

    def shown(self, samples: Sequence[float]) -> str:
        return f"{median(samples) * _SCALES[self.unit]:.4g} {self.unit}"

    def shown_other(self) -> str:
        return self.shown(self.other)

    def shown_target(self) -> str:
        if self.target is NOTHING_TO_KEEP:
            return "-"
        sign = "<=" if self.target.bound == "at most" else ">="
        if self.target.of == "ratio":
            return f"{sign} {self.target.limit:g}"
        return f"{sign} {self.target.limit * _SCALES[self.unit]:+.4g} {self.unit}"

    def shown_value(self) -> str:
        if self.target.of == "ratio":
            return f"{self.value:.3f}"
        return f"{self.value * _SCALES[self.unit]:+.4g} {self.unit}"

    def as_json(self) -> dict[str, Any]:
        return {
            "work": self.work,
            "unit": _SAMPLED[self.unit],
            "ours": {"median": median(self.ours), "samples": list(self.ours)},
            "other": {"median": median(self.other), "samples": list(self.other)},
            "ratio": self.ratio,
            "target": None if self.target is NOTHING_TO_KEEP else asdict(self.target),
            "value": self.value,
            "holds": self.holds,
            "detail": self.detail,
        }


class BenchFailed(RuntimeError):
    """Something could not be measured at all."""


@dataclass(frozen=True, kw_only=True)
class Report:
    name: str
    rows: Sequence[Row]
    started_s: float
    """Unix time."""

    @property
    def holds(self) -> bool:
        """Every target is kept, and there was something to keep."""
        return bool(self.rows) and all(row.holds for row in self.rows)

    def show(self, console: Console) -> None:
        table = Table(title=f"bench {self.name}: medians of alternating runs")
        table.add_column("work")
        for name in ("ours", "other", "ratio", "target"):
            table.add_column(name, justify="right")
        table.add_column("holds")
        for row in self.rows:
            table.add_row(
                row.work,
                row.shown(row.ours),
                row.shown_other(),
                row.shown_value(),
                row.shown_target(),
                row.verdict,
            )
        console.print(table)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "name": self.name,
            "holds": self.holds,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started_s)),
            "took_s": round(time.time() - self.started_s, 1),
            "machine": {"cores": os.cpu_count(), "system": platform.platform()},
            "rows": [row.as_json() for row in self.rows],
        }
        path.write_text(json.dumps(content, indent=2) + "\n")


def progress_bars(console: Console) -> Progress:
    """Bars on the given console: what runs, how many of how many, how long so far."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
