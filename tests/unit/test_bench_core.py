"""The parts of `bench core` that decide what its figures mean."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bench.churn import Load, Sizes, churn, node_pages, runs_of
from bench.core import options
from bench.figures import Figure
from bench.lists import pages_in_runs
from bench.peers.client import peer
from bench.prototypes import BisectBestFit, SortAndScan
from bench.report import BenchFailed, Report, Target
from bench.subjects import Extents

ALLOCATORS: list[Any] = [Extents, BisectBestFit, SortAndScan]


def pages_of(handle: Any) -> np.ndarray:
    if isinstance(handle, list):
        return np.concatenate([np.arange(start, start + length) for start, length in handle])
    return np.asarray(handle)


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_every_allocator_hands_out_each_page_once(kind: Any) -> None:
    """Whatever is compared really allocates: no page twice, None when there are too few, all of them back."""
    allocator, random = kind(500), np.random.default_rng(1)
    live: list[Any] = []
    for _ in range(400):
        wanted = int(random.integers(1, 60))
        free = allocator.free_pages()
        handle = allocator.allocate(wanted)
        assert (handle is None) == (wanted > free)
        if handle is None:
            allocator.release(live.pop(int(random.integers(len(live)))))
        else:
            assert len(pages_of(handle)) == wanted
            assert allocator.runs(handle) == runs_of(pages_of(handle))
            live.append(handle)
        taken = np.concatenate([pages_of(h) for h in live]) if live else np.empty(0, np.int64)
        assert len(np.unique(taken)) == len(taken) == 500 - allocator.free_pages()
    for handle in live:
        allocator.release(handle)
    assert runs_of(pages_of(allocator.allocate(500))) == 1


@pytest.mark.contract(81)
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("sizes", ["small", "mixed", "large"])
def test_churn_measures_a_nearly_full_pool_after_a_burn_in(sizes: Sizes, history: bool) -> None:
    """Calls are timed at the wanted occupancy, after a burn-in, with node sizes of that history."""
    load = Load(pages=4_000, sizes=sizes, occupancy=0.9, history=history)
    free_before: list[int] = []

    class Watched(BisectBestFit):
        def allocate(self, pages: int) -> list[tuple[int, int]] | None:
            free_before.append(self.free_pages() - pages)
            return super().allocate(pages)

    samples = churn(Watched(4_000), load, 3)
    measured = len(samples.allocate_s)
    assert len(free_before) > measured >= 100
    assert samples.release_s
    assert len(samples.runs) == measured
    largest = max(node_pages(sizes, 1_000, 4))
    assert all(400 <= free < 400 + 2 * largest for free in free_before[-measured:])


def test_equal_seeds_are_equal_work() -> None:
    """Both best fits get the same nodes and victims, so that their runs can be compared."""
    load = Load(pages=4_000, sizes="mixed", occupancy=0.9)
    first, second = (churn(BisectBestFit(4_000), load, 5).runs for _ in range(2))
    assert first == second
    assert churn(BisectBestFit(4_000), load, 6).runs != first


def test_page_lists_have_the_runs_that_they_claim() -> None:
    """Runs of about 8 pages that do not touch; one run when it is as long as the list."""
    pages = pages_in_runs(4_096, 8, 1)
    assert len(np.unique(pages)) == 4_096
    assert 6 < 4_096 / runs_of(pages) < 10
    assert runs_of(pages_in_runs(4_096, 10**9, 1)) == 1


def figure(**changes: Any) -> Figure:
    fields: dict[str, Any] = {
        "work": "match",
        "ours": [2e-6, 1e-6, 9e-6],
        "other": [10e-6, 9e-6, 11e-6],
        "unit": "us",
        "target": Target(limit=0.35, bound="at most"),
        "peers": {"upstream": [10e-6, 9e-6, 11e-6]},
        "against": "upstream",
    }
    return Figure(**fields | changes)


def written_and_shown(row: Figure, tmp_path: Path) -> tuple[Any, str]:
    report = Report(name="core", rows=[row], started_s=0)
    report.write(tmp_path / "core.json")
    with (tmp_path / "shown").open("w") as shown:
        report.show(Console(file=shown, width=150))
    return json.loads((tmp_path / "core.json").read_text())["rows"][0], (tmp_path / "shown").read_text()


def test_a_ratio_is_held_against_its_peer(tmp_path: Path) -> None:
    """The ratio of the medians decides, and is written with both sides' samples."""
    row, shown = written_and_shown(figure(), tmp_path)
    assert (row["ratio"], row["holds"], row["measured"]) == (pytest.approx(0.2), True, True)
    assert row["peers"] == {"upstream": {"samples": [10e-6, 9e-6, 11e-6]}}
    assert "upstream 10 us (0.200)" in shown
    assert not figure(target=Target(limit=0.19, bound="at most")).holds


def test_a_limit_of_our_own_needs_no_peer(tmp_path: Path) -> None:
    """A figure with an absolute target is held against it, whether the peer is there or not."""
    limit = Target(limit=2e-6, bound="at most", of="difference")
    row, shown = written_and_shown(
        figure(against=None, other=[], target=limit, peers={"upstream": [], "plain": [4e-6]}), tmp_path
    )
    assert (row["value"], row["holds"]) == (2e-6, True)
    assert row["ratios"] == {"upstream": None, "plain": 0.5}
    assert "upstream not installed" in shown
    assert not figure(
        against=None, other=[], target=Target(limit=1.9e-6, bound="at most", of="difference")
    ).holds


def test_a_row_without_its_peer_says_so(tmp_path: Path) -> None:
    """Nothing was compared: the row neither fails the run nor claims to hold."""
    row, shown = written_and_shown(figure(other=[], peers={"upstream": []}), tmp_path)
    assert (row["measured"], row["holds"]) == (False, True)
    assert "upstream not installed" in shown
    assert "no peer" in shown
    assert "yes" not in shown


def test_a_peer_that_is_not_set_up_is_none(tmp_path: Path) -> None:
    """Without an interpreter at the given place nothing is started."""
    with peer(tmp_path / "python") as other:
        assert other is None


def test_a_peer_that_cannot_answer_is_named() -> None:
    """An interpreter without the peer's library fails the benchmark with the peer's own words."""
    with (
        pytest.raises(BenchFailed, match=r"the peer could not version: .*sglang"),
        peer(Path(sys.executable)),
    ):
        pass


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--nodes", "10"], ["--nodes", "x"], ["--part", "x"]])
def test_flags_that_measure_nothing_are_refused(flags: list[str]) -> None:
    """No rounds, trees too small to be walked, unknown parts: usage errors before anything starts."""
    with pytest.raises(SystemExit):
        options(flags)


def test_flags_are_read() -> None:
    """Sizes of trees are a list, a part stands alone."""
    chosen = options(["--nodes", "1000,2000", "--part", "lists", "--peer", "/some/python"])
    assert (chosen.nodes, chosen.parts, chosen.peer_python) == (
        (1000, 2000),
        ("lists",),
        Path("/some/python"),
    )
