"""The four orders of a host buffer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.pairings import LAYOUTS, Layout
from app.errors import BadInput
from app.tiers.layouts import ITEM_BOUNDARY, ROW_BOUNDARY, HostLayout

SHAPES = {
    "name": st.sampled_from(LAYOUTS),
    "layers": st.integers(1, 6),
    "pages": st.integers(1, 9),
    "item_bytes": st.one_of(st.integers(1, 700), st.sampled_from([512, 4096])),
}


def plan(name: Layout, *, layers: int = 3, pages: int = 5, item_bytes: int = 40) -> HostLayout:
    return HostLayout(name=name, layers=layers, pages=pages, item_bytes=item_bytes)


@settings(max_examples=60, deadline=None)
@given(**SHAPES)
def test_items_never_overlap_and_stay_inside(name: Layout, layers: int, pages: int, item_bytes: int) -> None:
    """Every byte of every item has its own place, within the length that the layout states."""
    layout = plan(name, layers=layers, pages=pages, item_bytes=item_bytes)
    starts = sorted(layout.offset(slot, page) for slot in range(layers) for page in range(pages))
    assert starts[0] == 0
    assert all(b - a >= item_bytes for a, b in itertools.pairwise(starts))
    assert starts[-1] + item_bytes <= layout.length


@settings(max_examples=60, deadline=None)
@given(**SHAPES)
def test_a_view_is_where_the_offsets_say(name: Layout, layers: int, pages: int, item_bytes: int) -> None:
    """What is written through the view of an item stands at its offset, and nowhere else."""
    layout = plan(name, layers=layers, pages=pages, item_bytes=item_bytes)
    region = torch.zeros(layout.length + 3, dtype=torch.uint8)[3:]
    view = layout.view(region)
    assert view.shape == (layers, pages, item_bytes)
    items = np.random.default_rng(0).integers(1, 256, (layers, pages, item_bytes), np.uint8)
    view[:] = torch.from_numpy(items)
    raw = region.numpy()
    for slot in range(layers):
        for page in range(pages):
            at = layout.offset(slot, page)
            assert np.array_equal(raw[at : at + item_bytes], items[slot, page])
    assert np.count_nonzero(raw) == items.size


@pytest.mark.contract(64)
@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 4),
    pages=st.integers(1, 9),
    kv_bytes=st.integers(1, 600),
    state_bytes=st.integers(1, 60),
    other=st.sampled_from([name for name in LAYOUTS if name != "layer_first"]),
)
def test_a_round_trip_through_another_layout_keeps_every_byte(
    layers: int, pages: int, kv_bytes: int, state_bytes: int, other: Layout
) -> None:
    """layer_first to another layout and back, layer by layer, is byte-identical, for KV and state."""
    for item_bytes in (kv_bytes, state_bytes):
        first, second = (
            plan(name, layers=layers, pages=pages, item_bytes=item_bytes) for name in ("layer_first", other)
        )
        start = np.random.default_rng(item_bytes).integers(0, 256, first.length, np.uint8)
        source, back = torch.from_numpy(start.copy()), torch.zeros(first.length, dtype=torch.uint8)
        between = torch.full((second.length,), 0xEE, dtype=torch.uint8)
        for slot in range(layers):
            second.view(between)[slot] = first.view(source)[slot]
            first.view(back)[slot] = second.view(between)[slot]
        assert back.numpy().tobytes() == start.tobytes()


@pytest.mark.contract(63)
@pytest.mark.parametrize("item_bytes", [1, 40, 512, 4097])
def test_pages_of_a_layer_are_adjacent_in_layer_page_first(item_bytes: int) -> None:
    """For a fixed layer each page starts where the one before it ends, and the row starts on a memory page."""
    layout = plan("layer_page_first", pages=40, item_bytes=item_bytes)
    for slot in range(layout.layers):
        assert layout.offset(slot, 0) % ROW_BOUNDARY == 0
        for page in range(layout.pages - 1):
            assert layout.offset(slot, page + 1) == layout.offset(slot, page) + item_bytes
    assert layout.adjacent


@pytest.mark.contract(61)
def test_the_four_layouts_are_what_their_picture_shows() -> None:
    """Strides of each layout: tight rows, tight pages, pages of aligned items, aligned rows."""
    strides = {name: (plan(name).layer_stride, plan(name).page_stride) for name in LAYOUTS}
    assert strides == {
        "layer_first": (5 * 40, 40),
        "page_first": (40, 3 * 40),
        "page_first_direct": (ITEM_BOUNDARY, 3 * ITEM_BOUNDARY),
        "layer_page_first": (ROW_BOUNDARY, 40),
    }
    assert [name for name in LAYOUTS if plan(name).adjacent] == ["layer_first", "layer_page_first"]


@pytest.mark.contract(62)
@pytest.mark.parametrize("name", ["layer_page_first", "layer_first"])
def test_a_page_in_many_places_has_no_pointer(name: Layout) -> None:
    """Asking for one pointer per page is refused, by the layout's name, where a page is not in one piece."""
    with pytest.raises(BadInput, match=f"a page of {name} has no address"):
        plan(name).page_pointers(1 << 20, np.array([0, 1], np.int64))


@pytest.mark.parametrize("name", ["page_first", "page_first_direct"])
def test_a_page_in_one_piece_has_a_pointer(name: Layout) -> None:
    """The pointer of a page is the address of its first layer; a page outside the pool is refused."""
    layout = plan(name)
    pointers = layout.page_pointers(1 << 20, np.array([3, 0], np.int64))
    assert pointers.tolist() == [(1 << 20) + layout.offset(0, 3), 1 << 20]
    with pytest.raises(BadInput, match=r"3\.\.5 are outside 0\.\.5"):
        layout.page_pointers(0, np.array([3, 5], np.int64))


def test_what_lies_outside_is_refused() -> None:
    """Foreign items, regions that are too short or not bytes, and empty shapes are BadInput."""
    layout = plan("page_first")
    with pytest.raises(BadInput, match="slot 3, page 0"):
        layout.offset(3, 0)
    with pytest.raises(BadInput, match="slot 0, page -1"):
        layout.offset(0, -1)
    with pytest.raises(BadInput, match=f"{layout.length} bytes"):
        layout.view(torch.zeros(layout.length - 1, dtype=torch.uint8))
    with pytest.raises(BadInput, match="float32"):
        layout.view(torch.zeros(layout.length))
    with pytest.raises(BadInput, match="0 pages"):
        plan("page_first", pages=0)
