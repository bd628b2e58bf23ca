"""What benchmarks say and how they end. Nothing is timed here."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from app.transfer.engine import Limits
from bench.__main__ import BENCHMARKS, Benchmark, main
from bench.goodput import default_limits, shapes
from bench.report import BenchFailed, Report, Row, Target
from bench.transfer import options


def row(ours: Sequence[float], other: Sequence[float], **target: object) -> Row:
    chosen = {"limit": 0.25, "bound": "at most"} | target
    return Row(work="writing", ours=ours, other=other, unit="ms", target=Target(**chosen))  # type: ignore[arg-type]


def run(tmp_path: Path, *rows: Row, flags: Sequence[str] = ()) -> tuple[int, str, Path]:
    """The exit status, what was printed, and the file."""
    asked: list[Sequence[str]] = []

    def measured(given: Sequence[str]) -> Report:
        asked.append(given)
        return Report(name="writing", rows=rows, started_s=0.0)

    out = io.StringIO()
    status = main(
        ["writing", *flags],
        benchmarks={"writing": Benchmark(summary="writes", run=measured)},
        results=tmp_path / "results",
        console=Console(file=out, width=200),
    )
    assert asked == [list(flags)]
    return status, out.getvalue(), tmp_path / "results" / "writing.json"


def test_kept_targets_end_with_zero(tmp_path: Path) -> None:
    """The ratio of medians is printed and written beside its target, and flags reach the benchmark."""
    status, said, path = run(tmp_path, row([0.1, 0.2, 9.0], [1.0, 1.0, 1.0]), flags=["--pairs", "3"])
    assert status == 0
    for cell in ("writing", "200 ms", "1000 ms", "0.200", "<= 0.25", "yes"):
        assert cell in said
    written = json.loads(path.read_text())
    assert written["holds"] is True
    assert written["rows"][0]["ratio"] == pytest.approx(0.2)
    assert written["rows"][0]["ours"] == {"median": 0.2, "samples": [0.1, 0.2, 9.0]}


def test_one_missed_target_ends_with_one(tmp_path: Path) -> None:
    """A missed target is shown as such, is written all the same, and decides the exit status."""
    status, said, path = run(tmp_path, row([0.1], [1.0]), row([0.3], [1.0]))
    assert status == 1
    assert "NO" in said
    assert [r["holds"] for r in json.loads(path.read_text())["rows"]] == [True, False]


def test_nothing_measured_is_no_success(tmp_path: Path) -> None:
    """A report without rows keeps no target."""
    assert run(tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("target", "value", "holds"),
    [
        ({"limit": 0.9, "bound": "at least"}, 0.9, True),
        ({"limit": 0.9, "bound": "at least"}, 0.89, False),
        ({"limit": 0.25, "bound": "at most"}, 0.26, False),
        ({"limit": -0.05, "bound": "at most", "of": "difference"}, 0.9, True),
        ({"limit": -0.15, "bound": "at most", "of": "difference"}, 0.9, False),
    ],
)
def test_targets(target: dict[str, object], value: float, holds: bool) -> None:
    """A target bounds the ratio or the difference of the medians, from above or below."""
    assert row([value], [1.0], **target).holds is holds


def test_what_could_not_be_measured_ends_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node that does not start is no missed target: its words are shown and no result is written."""

    def broken(flags: Sequence[str]) -> Report:
        raise BenchFailed("a node ended with 1: [cache]")

    status = main(
        ["writing"], benchmarks={"writing": Benchmark(summary="writes", run=broken)}, results=tmp_path
    )
    assert status == 2
    assert "a node ended with 1: [cache]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every benchmark is listed with what it measures; an unknown one is refused."""
    assert main([]) == 0
    said = capsys.readouterr().out
    for name, benchmark in BENCHMARKS.items():
        assert name in said
        assert benchmark.summary in said
    with pytest.raises(SystemExit) as ended:
        main(["nonsense"])
    assert ended.value.code == 2


def test_options_of_transfer() -> None:
    """Parts and counts can be chosen; a count below one is refused."""
    assert options([]).parts == ("exposed", "goodput")
    assert options(["--part", "goodput", "--runs", "3"]).runs == 3
    with pytest.raises(SystemExit):
        options(["--pairs", "0"])


def test_goodput_measures_a_node_as_it_comes() -> None:
    """The wrapper runs with a default node's limits, and no two scattered pages are neighbours."""
    assert default_limits() == Limits()
    mib, pages = shapes()
    assert sum(length for _, _, length in mib.pairs) == sum(length for _, _, length in pages.pairs)
    ends = {source + length for source, _, length in pages.pairs}
    assert not ends & {source for source, _, _ in pages.pairs}
