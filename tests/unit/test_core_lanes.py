"""The page allocator of one lane."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.lanes import PageLane
from app.errors import BadInput, IntegrityError
from tests.conftest import Track


def test_the_smallest_extent_that_fits_is_taken(track: Track) -> None:
    """An allocation that fits whole somewhere is contiguous and leaves the large extents alone."""
    lane = track(PageLane(40))
    lane.allocate(40)
    lane.release(np.array([2, 3, 4, 9, *range(16, 40)]))
    found = lane.allocate(3)
    assert found is not None
    assert found.tolist() == [2, 3, 4]
    assert lane.largest_extent == 24


def test_a_scattered_allocation_starts_with_the_largest_extents(track: Track) -> None:
    """What fits nowhere whole is put together from as few extents as possible."""
    lane = track(PageLane(20))
    lane.allocate(20)
    lane.release(np.array([0, 1, 4, 5, 6, 7, 10, 15, 16, 17]))
    found = lane.allocate(6)
    assert found is not None
    assert found.tolist() == [4, 5, 6, 7, 15, 16]


def test_all_or_nothing(track: Track) -> None:
    """Too few free pages give None and change nothing."""
    lane = track(PageLane(8))
    lane.allocate(5)
    assert lane.allocate(4) is None
    assert (lane.free_pages, lane.largest_extent) == (3, 3)
    assert lane.allocate(3) is not None
    assert (lane.free_pages, lane.largest_extent) == (0, 0)


def test_freed_neighbours_are_joined(track: Track) -> None:
    """Freeing everything in any order gives one extent."""
    lane = track(PageLane(16))
    pages = lane.allocate(16)
    assert pages is not None
    for page in (3, 1, 2, 15, 0, *range(4, 15)):
        lane.release(np.array([page]))
        lane.check_integrity()
    assert lane.largest_extent == 16


def test_bad_releases_change_nothing(track: Track) -> None:
    """A double free, a foreign page and a repeated page raise, and no page of the call is freed."""
    lane = track(PageLane(8))
    lane.allocate(4)
    lane.release(np.array([1]))
    for pages, message in (
        ([0, 1], r"freed twice: \[1\] \(1\)"),
        ([0, 8], "page 8 is not of this lane of 8"),
        ([0, -1], "negative page number: -1"),
        ([0, 0], "stands twice"),
        ([0, 6], r"freed twice: \[6\] \(1\)"),
    ):
        with pytest.raises(BadInput, match=message):
            lane.release(np.array(pages))
        assert lane.free_pages == 5
        lane.check_integrity()


def test_nothing_and_less(track: Track) -> None:
    """Zero pages are an empty list; a negative count and an empty lane are refused."""
    lane = track(PageLane(4))
    found = lane.allocate(0)
    assert found is not None
    assert found.size == 0
    with pytest.raises(BadInput, match="cannot allocate -1 pages"):
        lane.allocate(-1)
    with pytest.raises(BadInput, match="at least one page, not 0"):
        PageLane(0)


def test_a_broken_lane_is_found() -> None:
    """The integrity check compares extents, counts and the taken map."""
    lane = PageLane(4)
    lane._taken[2] = True
    with pytest.raises(IntegrityError, match="lane: 4 free, extents hold 4"):
        lane.check_integrity()
