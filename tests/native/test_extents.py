"""The page-extent allocator of L2."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest

from app.core.extents import PageExtents
from app.core.ids import PageArray
from app.errors import BadInput, IntegrityError, PageMismatch
from tests.conftest import Track

POOL_220_GB = 38_255
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")


def pages(*numbers: int) -> PageArray:
    return np.array(numbers, dtype=np.int64)


def fragmented(track: Track, size: int, free: list[int]) -> PageExtents:
    """A pool of which exactly `free` is free."""
    pool = track(PageExtents(size))
    pool.allocate(size)
    pool.release(pages(*free))
    return pool


def runs_of(found: PageArray | None) -> int:
    assert found is not None
    return 1 + int((np.diff(found) != 1).sum())


@pytest.mark.contract(77)
def test_what_fits_somewhere_is_one_run(track: Track) -> None:
    """The smallest extent that holds the count serves it, the lowest of equals."""
    pool = fragmented(track, 60, [2, 3, 4, 9, 20, 21, 22, *range(30, 50)])
    assert pool.allocate(3).tolist() == [2, 3, 4]
    assert pool.allocate(3).tolist() == [20, 21, 22]
    assert pool.allocate(2).tolist() == [30, 31]


@pytest.mark.contract(77)
def test_what_fits_nowhere_is_as_few_runs_as_possible(track: Track) -> None:
    """Largest extents first, the highest of equals, and the rest out of the smallest that holds it; else None."""
    pool = fragmented(track, 20, [0, 1, 4, 5, 6, 7, 10, 15, 16, 17])
    before = pool.free_slots.tolist()
    assert pool.allocate(11) is None
    assert pool.free_slots.tolist() == before
    first, count = pool.allocate_runs(6)
    assert (first.tolist(), count.tolist()) == ([4, 0], [4, 2])
    pool.release_runs(first, count)
    assert pool.allocate(9).tolist() == [4, 5, 6, 7, 15, 16, 17, 0, 1]
    pool = fragmented(track, 20, [0, 1, 2, 5, 6, 7, 10, 11])
    assert pool.allocate(5).tolist() == [5, 6, 7, 10, 11]


@pytest.mark.contract(78)
def test_free_slots_follow_every_change(track: Track) -> None:
    """The free pages are readable, ascending and what the extents say, after each kind of change."""
    pool = track(PageExtents(12))
    assert pool.free_slots.tolist() == list(range(12))
    pool.allocate(5)
    pool.release(pages(3, 1))
    assert pool.free_slots.tolist() == [1, 3, *range(5, 12)]
    pool.reserve(7, 2)
    assert pool.free_slots.tolist() == [1, 3, *range(7, 12)]
    first, count = pool.free_extents
    assert (first.tolist(), count.tolist()) == ([1, 3, 7], [1, 1, 5])
    pool.roll_back(7)
    assert (pool.free_pages, pool.extents, pool.largest_extent) == (9, 3, 7)


@pytest.mark.contract(79)
@pytest.mark.parametrize("order", ["ascending", "descending", "evens", "random"])
def test_freeing_everything_gives_one_extent(track: Track, order: str) -> None:
    """In whatever order and portions pages come back, neighbours join and one extent is left."""
    pool = track(PageExtents(1000))
    taken = pool.allocate(1000)
    numbers = {
        "ascending": taken,
        "descending": taken[::-1],
        "evens": np.concatenate((taken[::2], taken[1::2])),
        "random": np.random.default_rng(0).permutation(taken),
    }[order]
    for part in np.array_split(numbers, 7):
        pool.release(part)
        pool.check_integrity()
    assert (pool.extents, pool.largest_extent) == (1, 1000)


@pytest.mark.contract(41)
@pytest.mark.contract(44)
def test_a_reservation_rolls_back_in_one_call(track: Track) -> None:
    """Everything reserved under a holder is free again, other holders keep theirs, and none ends twice."""
    pool = track(PageExtents(30))
    kept = pool.allocate(4)
    pool.reserve(1, 5)
    pool.reserve(2, 6)
    pool.reserve(1, 3)
    assert pool.reserved(1).tolist() == [4, 5, 6, 7, 8, 15, 16, 17]
    assert (pool.free_pages, pool.reserved_pages, pool.holders) == (12, 14, 2)
    assert pool.roll_back(1) == 8
    assert (pool.free_pages, pool.reserved(2).tolist()) == (20, [9, 10, 11, 12, 13, 14])
    with pytest.raises(BadInput, match="nothing is reserved for holder 1"):
        pool.roll_back(1)
    assert pool.commit(2) == 6
    pool.release(pages(*kept, *range(9, 15)))
    assert (pool.free_pages, pool.extents, pool.reserved_pages) == (30, 1, 0)


def test_reserved_pages_are_not_freed_one_by_one(track: Track) -> None:
    """Only the end of a reservation frees its pages: a release that names one changes nothing."""
    pool = track(PageExtents(10))
    pool.allocate(2)
    pool.reserve(3, 2)
    with pytest.raises(BadInput, match=r"freed while reserved: \[2\] \(1\)"):
        pool.release(pages(0, 2))
    assert (pool.free_pages, pool.reserved_pages) == (6, 2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0, 1, 6], r"freed twice: \[6\] \(1\)"),
        ([0, 8], "page 8 is not of this pool of 8"),
        ([0, 2**40], f"page {2**40} is not of this pool of 8"),
        ([0, -1], "negative page number: -1"),
        ([2, 0, 2], r"a page stands twice in \[2, 0, 2\] \(3\): 2"),
        ([[0, 1]], "page numbers have one dimension, not 2"),
        ([0.5], "page numbers are whole numbers, not float64"),
    ],
)
def test_bad_releases_change_nothing(track: Track, bad: list[int], message: str) -> None:
    """A double free, a foreign, a repeated and a senseless page raise, and no page of the call is freed."""
    pool = track(PageExtents(8))
    pool.allocate(4)
    with pytest.raises(BadInput, match=message):
        pool.release(np.array(bad))
    pool.check_integrity()
    assert pool.free_slots.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("first", "count", "message"),
    [
        ([0, 2], [2, 0], "a run of 0 pages from page 2"),
        ([0, 6], [2, 3], "a run of 3 pages from page 6 is not of this pool of 8"),
        ([0, -1], [1, 1], "a run of 1 pages from page -1"),
        ([0, 1], [2, 2], r"a page stands twice in \[0..1, 1..2\] \(4\): 1"),
        ([0, 3], [1, 3], r"freed twice: \[4..5\] \(2\)"),
        ([0], [1, 1], "runs have 1 starts and 2 counts"),
        ([0], [2**62], f"a run of {2**62} pages"),
    ],
)
def test_bad_runs_change_nothing(track: Track, first: list[int], count: list[int], message: str) -> None:
    """Runs that overlap, leave the pool or are free already raise, and no page of the call is freed."""
    pool = track(PageExtents(8))
    pool.allocate(4)
    with pytest.raises(BadInput, match=message) as caught:
        pool.release_runs(pages(*first), pages(*count))
    assert isinstance(caught.value, PageMismatch) is (len(first) != len(count))
    assert pool.free_slots.tolist() == [4, 5, 6, 7]


def test_impossible_counts_are_refused(track: Track) -> None:
    """No page, fewer than none and more than exist raise and name the count; so does an empty pool."""
    pool = track(PageExtents(8))
    for call in (pool.allocate, pool.allocate_runs, lambda count: pool.reserve(1, count)):
        for count in (0, -1, 9, 2**40):
            with pytest.raises(BadInput, match=f"cannot allocate {count} pages of 8"):
                call(count)
    assert (pool.free_pages, pool.holders) == (8, 0)
    for size, message in ((0, "at least one page, not 0"), (-3, "not -3"), (2**31, str(2**31))):
        with pytest.raises(BadInput, match=message):
            PageExtents(size)


def test_nothing_is_freed_by_nothing(track: Track) -> None:
    """An empty list, of whatever type numpy gives it, is legal."""
    pool = track(PageExtents(3))
    pool.release(np.array([]))
    pool.release_runs(pages(), pages())
    assert pool.free_pages == 3


def test_other_integer_types_and_strides_are_taken(track: Track) -> None:
    """Narrower integers, lists and strided views free the pages that they name."""
    pool = track(PageExtents(40))
    taken = pool.allocate(40)
    pool.release(taken[::-4])
    pool.release(np.array([0, 1], dtype=np.int32))
    pool.release([4, 5])
    assert pool.free_slots.tolist() == sorted([*range(3, 40, 4), 0, 1, 4, 5])
    with pytest.raises(BadInput, match="page numbers of type uint64 may not fit int64"):
        pool.release(np.array([8], dtype=np.uint64))


def test_a_broken_pool_is_found() -> None:
    """The integrity check compares extents, counts, reservations and states."""
    for at, state in ((0, 0), (5, 1), (5, 2), (3, 1)):
        pool = PageExtents(8)
        pool.allocate(3)
        pool.reserve(1, 1)
        pool.check_integrity()
        pool._states[at] = state
        with pytest.raises(IntegrityError, match=f"pool: 4 free, extents hold 4.*page {at}"):
            pool.check_integrity()


def test_an_answer_outlives_its_pool() -> None:
    """Returned pages are the caller's own memory."""
    pool = PageExtents(5000)
    found = pool.allocate(5000)
    states = pool._states
    del pool
    assert found.tolist() == list(range(5000))
    assert found.flags.writeable
    assert states.sum() == 5000


def history(pool: PageExtents, occupied: float, seed: int) -> Callable[[int], None]:
    """Fill a pool with small nodes and replace them at random; the result makes room for a larger one."""
    rng = np.random.default_rng(seed)
    live: list[PageArray] = []
    reserve = int(pool.pages * (1 - occupied))

    def room(count: int) -> None:
        while pool.free_pages < count + reserve:
            at = int(rng.integers(len(live)))
            live[at], live[-1] = live[-1], live[at]
            pool.release(live.pop())

    for _ in range(7000):
        count = int(np.clip(rng.geometric(1 / 8), 1, 64))
        room(count)
        found = pool.allocate(count)
        assert found is not None
        live.append(found)
    return room


@pytest.mark.contract(77)
@pytest.mark.contract(80)
@pytest.mark.parametrize("occupied", [0.90, 0.97])
def test_large_nodes_after_a_history_of_small_ones(track: Track, occupied: float) -> None:
    """At 38,255 pages each allocation has the fewest runs that the extents allow, and a p50 below 30 us."""
    pool = track(PageExtents(POOL_220_GB))
    room = history(pool, occupied, seed=5)
    rng = np.random.default_rng(6)
    seconds = []
    for _ in range(60):
        count = int(np.clip(rng.geometric(1 / 256), 16, 1600))
        room(count)
        sizes = np.sort(pool.free_extents[1])[::-1].cumsum()
        start = time.perf_counter()
        found = pool.allocate(count)
        seconds.append(time.perf_counter() - start)
        assert runs_of(found) == 1 + int(np.searchsorted(sizes, count))
    if not SANITIZED:
        assert statistics.median(seconds) < 30e-6


@pytest.mark.contract(76)
@pytest.mark.skipif(SANITIZED, reason="the sanitizer's own costs grow with the memory")
def test_no_allocation_walks_over_the_pool(track: Track) -> None:
    """Allocating in a pool of 1,000 times the pages and extents costs a little more, not 1,000 times."""

    def seconds(size: int) -> float:
        pool = track(PageExtents(size))
        everything = pool.allocate(size)
        pool.release(everything[::3])
        taken = []
        for _ in range(300):
            start = time.perf_counter()
            found = pool.allocate(1)
            pool.release(found)
            assert pool.free_pages == -(-size // 3)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    assert seconds(1_500_000) < 25 * seconds(1_500)
