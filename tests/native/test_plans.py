"""Page plans: groups of token indices, owners, runs and addresses as arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.ids import PageArray
from app.core.owners import owned_by
from app.core.plans import Term, pages_of_groups, plan_addresses, slots_of_pages
from app.core.runs import Runs, coalesce
from app.errors import BadInput, PageMismatch

PAGE = 64
NUMBERS = st.integers(0, 30) | st.sampled_from([-(2**63), 2**63 - 2, -1])


def array(*numbers: int) -> PageArray:
    return np.array(numbers, dtype=np.int64)


def tokens(*pages: int) -> PageArray:
    return np.concatenate([np.arange(p * PAGE, (p + 1) * PAGE) for p in pages])


def broken(at: int, token: int) -> PageArray:
    changed = tokens(3, 7)
    changed[at] = token
    return changed


@pytest.mark.contract(25)
def test_whole_groups_become_their_pages() -> None:
    """Groups on the page grid give their pages in the caller's order."""
    assert pages_of_groups(tokens(5, 2, 9), PAGE, 10).tolist() == [5, 2, 9]
    assert pages_of_groups(tokens(1, 2).astype(np.int32), PAGE, 3).tolist() == [1, 2]
    assert pages_of_groups(array(), PAGE, 3).tolist() == []
    assert pages_of_groups(array(4, 0, 2), 1, 5).tolist() == [4, 0, 2]


@pytest.mark.contract(25)
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (tokens(3)[:-1], "63 token indices are no whole pages of 64"),
        (tokens(3, 7)[1:-63], "group 0 starts at token 193, off the page grid of 64"),
        (broken(70, 460), "group 1 is not contiguous: token 460 follows 453"),
        (tokens(3, 7)[::-1], "group 0 starts at token 511, off"),
        (np.sort(tokens(3, 7) ^ 1), None),
        (tokens(3) ^ 1, "group 0 starts at token 193, off"),
        (broken(63, 254), "group 0 is not contiguous: token 254 follows 254"),
        (tokens(3, 10), "page 10 of group 1 is not of 10"),
        (tokens(3) - 256, "group 0 starts at token -64"),
        (tokens(3, 7, 3), "page 3 stands in group 0 and in group 2"),
        (tokens(3, 3), "page 3 stands in group 0 and in group 1"),
    ],
)
def test_broken_groups_are_refused(groups: PageArray, message: str | None) -> None:
    """Partial, misaligned, unsorted, overlapping and foreign groups raise and name group and value."""
    if message is None:
        assert pages_of_groups(groups, PAGE, 10).tolist() == [3, 7]
        return
    with pytest.raises(BadInput, match=message):
        pages_of_groups(groups, PAGE, 10)


def test_a_page_has_a_size() -> None:
    """A page of no token is refused."""
    for size in (0, -64):
        with pytest.raises(BadInput, match=f"at least one token, not {size}"):
            pages_of_groups(tokens(1), size, 4)
        with pytest.raises(BadInput, match=f"at least one token, not {size}"):
            slots_of_pages(array(1), size, 4)


@pytest.mark.contract(26)
def test_arrays_of_a_device_are_refused_unread() -> None:
    """An array of a device raises by its place; nothing reads it, so nothing waits for the device."""

    class OnDevice:
        device = SimpleNamespace(type="cuda", index=0)

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("read")

        def __len__(self) -> int:
            raise AssertionError("read")

    unread: Any = OnDevice()
    with pytest.raises(BadInput, match=r"take arrays of the host, not of .*cuda"):
        pages_of_groups(unread, PAGE, 10)
    with pytest.raises(BadInput, match="take arrays of the host"):
        slots_of_pages(unread, PAGE)


@pytest.mark.contract(28)
def test_a_valid_tail_has_its_own_tokens_only() -> None:
    """100 tokens in pages of 64 are 2 pages and 128 slots, of which 100 are handed out."""
    pages = array(5, 2)
    assert len(slots_of_pages(pages, PAGE)) == 128
    valid = slots_of_pages(pages, PAGE, 100)
    assert valid.tolist() == [*range(320, 384), *range(128, 164)]
    for count in (0, 64, 129, -1):
        with pytest.raises(BadInput, match=f"{count} tokens do not fill 2 pages of 64"):
            slots_of_pages(pages, PAGE, count)
    with pytest.raises(BadInput, match=f"page {2**60} has no token indices"):
        slots_of_pages(array(2**60), PAGE)


@pytest.mark.contract(95)
@given(owners=st.lists(st.integers(0, 3), max_size=300), first=st.integers(0, 1000), rank=st.integers(0, 4))
def test_the_owner_filter_equals_a_membership_test(owners: list[int], first: int, rank: int) -> None:
    """The filter keeps exactly the pages that a rank owns, with their absolute positions."""
    pages = np.arange(len(owners), dtype=np.int64) * 7 + 3
    found, positions = owned_by(pages, np.array(owners, dtype=np.int8), rank, first)
    mine = [i for i, owner in enumerate(owners) if owner == rank]
    assert found.tolist() == [7 * i + 3 for i in mine]
    assert positions.tolist() == [first + i for i in mine]


@pytest.mark.contract(95)
def test_long_stretches_of_one_owner_are_filtered_alike() -> None:
    """Stretches longer than a word of the filter keep every page and its own position."""
    owners = np.repeat(np.array([1, 0, 1, 2], dtype=np.int8), [200, 70, 128, 5])
    pages = np.arange(len(owners), dtype=np.int64)[::-1].copy()
    for rank in range(4):
        found, positions = owned_by(pages, owners, rank, 40)
        assert (positions - 40).tolist() == np.flatnonzero(owners == rank).tolist()
        assert found.tolist() == pages[owners == rank].tolist()


@pytest.mark.contract(97)
def test_chunks_of_all_ranks_make_the_whole_mapping() -> None:
    """For 8 ranks, the pairs over all chunks and ranks are those of the request, each once."""
    rng = np.random.default_rng(2)
    source, destination = rng.permutation(1000), rng.permutation(1000)
    owners = rng.integers(0, 8, 1000).astype(np.int8)
    pairs = []
    for start in range(0, 1000, 130):
        for rank in range(8):
            part = slice(start, start + 130)
            pages, positions = owned_by(source[part], owners[part], rank, start)
            assert ((positions >= start) & (positions < start + 130)).all()
            pairs += zip(pages.tolist(), destination[positions].tolist(), strict=True)
    assert sorted(pairs) == sorted(zip(source.tolist(), destination.tolist(), strict=True))


def test_bad_filters_are_refused() -> None:
    """Owners that do not pair with the pages, ranks and positions that cannot be: each raises by value."""
    with pytest.raises(PageMismatch, match="3 pages have 2 owners"):
        owned_by(array(1, 2, 3), np.zeros(2, dtype=np.int8), 0)
    for rank in (-1, 128):
        with pytest.raises(BadInput, match=f"owner {rank} is outside"):
            owned_by(array(1), np.zeros(1, dtype=np.int8), rank)
    for position, message in (
        (-5, "negative position: -5"),
        (2**63 - 1, f"position {2**63 - 1} leaves no room"),
    ):
        with pytest.raises(BadInput, match=message):
            owned_by(array(1), np.zeros(1, dtype=np.int8), 0, position)


@given(pairs=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=200), stretch=st.integers(0, 200))
def test_runs_equal_the_slow_ones(pairs: list[tuple[int, int]], stretch: int) -> None:
    """Runs are maximal, in order, and hold every pair once, for any numbers and lengths."""
    pairs = [*pairs, *((40 + i, 90 + i) for i in range(stretch))]
    expected: list[list[int]] = []
    for at, (source, destination) in enumerate(pairs):
        if at and (source, destination) == (pairs[at - 1][0] + 1, pairs[at - 1][1] + 1):
            expected[-1][2] += 1
        else:
            expected.append([source, destination, 1])
    runs = coalesce(array(*(s for s, _ in pairs)), array(*(d for _, d in pairs)))
    assert [list(r) for r in zip(runs.source, runs.destination, runs.count, strict=True)] == expected


@pytest.mark.contract(93)
def test_unequal_sides_move_nothing() -> None:
    """Runs whose arrays differ in length raise with the lengths."""
    uneven = Runs(source=array(1, 2), destination=array(1), count=array(1, 1))
    with pytest.raises(PageMismatch, match="2 sources, 1 destinations and 2 counts"):
        plan_addresses([], uneven)


@pytest.mark.contract(108)
def test_addresses_are_arrays_over_all_terms() -> None:
    """Each term has its own bases and item size; its runs follow one another."""
    terms = [Term("kv", 1000, 9_000, 64, 10, 20), Term("index", 5000, 70_000, 12, 10, 20)]
    plan = plan_addresses(terms, coalesce(array(7, 8, 2), array(3, 4, 19)))
    assert plan.source.tolist() == [1000 + 448, 1000 + 128, 5000 + 84, 5000 + 24]
    assert plan.destination.tolist() == [9_000 + 192, 9_000 + 1216, 70_000 + 36, 70_000 + 228]
    assert plan.length.tolist() == [128, 64, 24, 12]
    assert len(plan) == 4
    assert plan.source.dtype == np.int64


@pytest.mark.parametrize(
    ("source", "destination", "count", "message"),
    [
        (9, 0, 2, "page 10 of kv is not of 10"),
        (0, 19, 2, "page 20 of kv is not of 20"),
        (0, 0, 2**62, f"page {2**62 - 1} of kv is not of 10"),
        (-1, 0, 1, "no run: 1 pages from page -1 to page 0"),
        (0, 0, 0, "no run: 0 pages from page 0"),
    ],
)
def test_addresses_outside_a_pool_are_refused(
    source: int, destination: int, count: int, message: str
) -> None:
    """A run that leaves either pool, or is none, raises and is named."""
    runs = Runs(source=array(source), destination=array(destination), count=array(count))
    with pytest.raises(PageMismatch, match=message):
        plan_addresses([Term("kv", 0, 0, 64, 10, 20)], runs)
