"""The native page copies, against numpy's indexing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import _native
from app.core.copies import gather, move_pages, scatter
from app.errors import BadInput, PageMismatch
from tests.support.interpreter import steps_during

MEBIBYTE = 1 << 20


def random_layer(pages: int, item_bytes: int, *, page_first_of: int = 0, offset: int = 0) -> np.ndarray:
    """uint8 [pages, item_bytes]; as the middle layer of a page-first pool, or `offset` bytes off alignment."""
    random = np.random.default_rng(pages + item_bytes)
    if page_first_of:
        return random.integers(0, 256, (pages, page_first_of, item_bytes), np.uint8)[:, page_first_of // 2]
    flat = random.integers(0, 256, pages * item_bytes + offset, np.uint8)
    return flat[offset:].reshape(pages, item_bytes)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@settings(max_examples=200, deadline=None)
@given(
    pages=st.integers(1, 24),
    item_bytes=st.one_of(st.integers(1, 300), st.sampled_from([4096, 4097])),
    layers=st.sampled_from([0, 1, 3]),
    offset=st.integers(0, 70),
    threads=st.integers(0, 5),
    data=st.data(),
)
def test_moves_are_those_of_numpy(
    pages: int, item_bytes: int, layers: int, offset: int, threads: int, data: st.DataObject
) -> None:
    """Any pairs between any two layouts land as numpy's indexing would put them, and nothing else changes."""
    source = random_layer(pages, item_bytes, page_first_of=layers)
    destination = random_layer(pages + 3, item_bytes, offset=offset)
    to = np.array(data.draw(st.lists(st.integers(0, pages + 2), unique=True)), np.int64)
    from_pages = np.array(
        data.draw(st.lists(st.integers(0, pages - 1), min_size=len(to), max_size=len(to))), np.int64
    )
    expected = destination.copy()
    expected[to] = source[from_pages]
    _native.copy_pages(source, from_pages, destination, to, threads=threads)
    assert np.array_equal(destination, expected)


@pytest.mark.parametrize(("item_bytes", "offset"), [(64 << 10, 0), (64 << 10, 16), (50_001, 3), (100, 1)])
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_streamed_copies_are_complete(item_bytes: int, offset: int, threads: int) -> None:
    """A copy past the cache's size bypasses it, with heads and tails of odd alignment, and loses no byte."""
    pages = _native.STREAMING_BYTES // item_bytes + 7
    source = random_layer(pages, item_bytes)
    destination = np.zeros(pages * item_bytes + offset + 64, np.uint8)
    rows = destination[offset : offset + pages * item_bytes].reshape(pages, item_bytes)
    order = np.random.default_rng(3).permutation(pages)
    _native.copy_pages(source, order, rows, np.arange(pages), threads=threads)
    assert np.array_equal(rows, source[order])
    assert not destination[:offset].any()
    assert not destination[offset + rows.size :].any()


def test_gather_and_scatter_are_inverse() -> None:
    """What was gathered from some pages and scattered back to them is what was there."""
    pool = random_layer(20, 128, page_first_of=3)
    before, rows = pool.copy(), np.empty((4, 128), np.uint8)
    pages = numbers(7, 0, 19, 3)
    gather(pool, pages, rows)
    assert np.array_equal(rows, before[pages])
    pool[pages] = 0
    scatter(rows, pool, pages)
    assert np.array_equal(pool, before)


def test_pages_move_within_one_pool() -> None:
    """Source and destination may be the same memory while no page is on both sides."""
    pool = random_layer(10, 48)
    before = pool.copy()
    move_pages(pool, numbers(0, 2, 9), pool, numbers(1, 5, 3))
    assert np.array_equal(pool[[1, 5, 3]], before[[0, 2, 9]])
    assert np.array_equal(pool[[0, 2, 4, 6, 7, 8, 9]], before[[0, 2, 4, 6, 7, 8, 9]])


def refused(error: type[Exception], message: str, *call: np.ndarray) -> None:
    """The call raises, and neither side has changed."""
    source, pages, destination, to = call
    before = source.copy(), destination.copy()
    with pytest.raises(error, match=message):
        move_pages(source, pages, destination, to)
    assert np.array_equal(source, before[0])
    assert np.array_equal(destination, before[1])


@pytest.mark.contract(93)
def test_unequal_counts_move_nothing() -> None:
    """Page lists, or items, of unequal size are a mismatch with both sizes, and no page moves."""
    a, b = random_layer(5, 32), random_layer(6, 32)
    refused(PageMismatch, "source has 2 pages, destination 3", a, numbers(0, 1), b, numbers(0, 1, 2))
    refused(
        PageMismatch,
        "source items have 32 bytes, destination items 33",
        *(a, numbers(0), random_layer(5, 33), numbers(0)),
    )
    with pytest.raises(PageMismatch, match="source has 2 pages, destination 3"):
        gather(a, numbers(0, 1), np.empty((3, 32), np.uint8))
    with pytest.raises(PageMismatch, match="source has 3 pages, destination 2"):
        scatter(np.empty((3, 32), np.uint8), a, numbers(0, 1))


@pytest.mark.parametrize("page", [-1, 5, 2**62, -(2**63)])
def test_foreign_pages_move_nothing(page: int) -> None:
    """A page outside either pool is named, wherever it stands in the list."""
    a, b = random_layer(5, 32), random_layer(5, 32, offset=1)
    message = f"page {page} is not of this pool of 5"
    refused(BadInput, message, a, numbers(0, page), b, numbers(0, 1))
    refused(BadInput, message, a, numbers(0, 1), b, numbers(0, page))


def test_two_writers_of_one_page_move_nothing() -> None:
    """A destination page that stands twice is named: the order of the copies is not defined."""
    a, b = random_layer(5, 32), random_layer(5, 32, offset=1)
    refused(BadInput, "destination page 3 stands twice", a, numbers(0, 1, 2), b, numbers(3, 1, 3))


@pytest.mark.parametrize("item_bytes", [32, 33])
def test_a_page_that_is_read_and_written_moves_nothing(item_bytes: int) -> None:
    """Within one memory, a destination that touches a byte of a source is refused, also at shifted views."""
    flat = np.arange(10 * item_bytes, dtype=np.int64).astype(np.uint8)
    pool = flat.reshape(10, item_bytes)
    refused(BadInput, "page 4 is both read and written", pool, numbers(0, 4), pool, numbers(4, 1))
    shifted = flat[1 : 1 + 9 * item_bytes].reshape(9, item_bytes)
    refused(BadInput, "page 3 is both read and written", pool, numbers(4), shifted, numbers(3))
    refused(BadInput, "page 4 is both read and written", pool, numbers(4), shifted, numbers(4))
    expected = pool[7].copy()
    move_pages(pool, numbers(7), shifted, numbers(3))
    assert np.array_equal(shifted[3], expected)


def test_no_pages_move() -> None:
    """Zero pages are a valid copy, also out of an empty pool."""
    move_pages(np.empty((0, 8), np.uint8), numbers(), random_layer(2, 8), numbers())


def test_read_only_and_other_arrays_are_refused() -> None:
    """A destination that must not be written, or an array of another kind, is a TypeError."""
    a, b = random_layer(4, 16), random_layer(4, 16, offset=1)
    b.setflags(write=False)
    with pytest.raises(TypeError):
        _native.copy_pages(a, numbers(0), b, numbers(0))
    _native.copy_pages(b, numbers(0), a, numbers(0))
    with pytest.raises(TypeError):
        _native.copy_pages(a.astype(np.int8), numbers(0), a, numbers(0))
    with pytest.raises(BadInput, match="at a stride of 0"):
        _native.copy_pages(a, numbers(0), np.lib.stride_tricks.as_strided(a, (4, 16), (0, 1)), numbers(0))


def test_the_interpreter_runs_on_while_pages_are_copied() -> None:
    """The interpreter lock is released: another thread of Python makes progress during one long call."""
    source = random_layer(16, 8 * MEBIBYTE)
    destination, pages = np.zeros_like(source), np.arange(16)
    assert steps_during(lambda: _native.copy_pages(source, pages, destination, pages, threads=1)) >= 3
