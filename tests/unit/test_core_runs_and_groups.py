"""Coalescing page pairs into runs, and layers into groups."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.groups import plan_groups
from app.core.ids import PageArray
from app.core.runs import coalesce
from app.errors import BadInput, PageMismatch


def array(*numbers: int) -> PageArray:
    return np.array(numbers, dtype=np.int64)


def test_neighbours_on_both_sides_make_one_run() -> None:
    """A run goes on only while source and destination both step by one."""
    runs = coalesce(array(5, 6, 7, 8, 20, 21, 3), array(1, 2, 9, 10, 11, 30, 31))
    assert list(zip(runs.source, runs.destination, runs.count, strict=True)) == [
        (5, 1, 2),
        (7, 9, 2),
        (20, 11, 1),
        (21, 30, 1),
        (3, 31, 1),
    ]
    assert (len(runs), runs.pages) == (5, 7)


def test_no_pages_make_no_runs() -> None:
    """Empty lists are legal and give zero runs."""
    runs = coalesce(array(), array())
    assert (len(runs), runs.pages) == (0, 0)


@pytest.mark.contract(93)
def test_runs_of_unequal_lists_are_refused() -> None:
    """Coalescing truncates nothing: unequal lists raise."""
    with pytest.raises(PageMismatch, match="source has 2 pages, destination 1"):
        coalesce(array(1, 2), array(1))


@pytest.mark.parametrize(
    ("layers", "size", "taper", "sizes"),
    [
        (79, 8, False, [8] * 9 + [7]),
        (30, 8, False, [8, 8, 8, 6]),
        (30, 8, True, [8, 8, 8, 4, 2]),
        (32, 8, True, [8, 8, 8, 4, 2, 2]),
        (79, 8, True, [8] * 9 + [4, 2, 1]),
        (3, 1, True, [1, 1, 1]),
        (0, 8, True, []),
    ],
)
def test_groups(layers: int, size: int, taper: bool, sizes: list[int]) -> None:
    """Groups are consecutive, hold every layer once and shrink toward the end when they taper."""
    groups = plan_groups(range(layers), size, taper=taper)
    assert [len(g) for g in groups] == sizes
    assert [layer for g in groups for layer in g] == list(range(layers))


def test_a_group_needs_a_layer() -> None:
    """A group size below one is refused."""
    with pytest.raises(BadInput, match="at least one layer, not 0"):
        plan_groups([1, 2], 0)
