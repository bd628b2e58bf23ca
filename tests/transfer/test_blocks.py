"""Addresses: which bytes of which layer and page go where."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import Owner, PageArray
from app.core.owners import owned, rank_positions
from app.core.runs import Runs, coalesce
from app.errors import PageMismatch
from app.transfer.base import Block
from app.transfer.blocks import BufferLayout, Layouts, plan_blocks, require_same_buffers, total_bytes
from app.transfer.statistics import TransferStatistics, percentiles


def spec(
    layers: tuple[int, ...], *, owner: Owner = "target", kind: str = "kv", item_bytes: int = 64
) -> BufferSpec:
    return BufferSpec(owner=owner, kind=kind, layer_ids=layers, item_bytes=item_bytes, dtype="uint8")


def layouts(*specs: BufferSpec, base: int, pages: int = 10) -> Layouts:
    return {
        s.name: BufferLayout(
            spec=s, base=base + i * (1 << 20), layer_stride=pages * s.item_bytes, pages=pages
        )
        for i, s in enumerate(specs)
    }


def pages(*numbers: int) -> PageArray:
    return np.array(numbers, dtype=np.int64)


def runs(source: PageArray, destination: PageArray) -> Runs:
    return coalesce(source, destination)


@pytest.mark.contract(108)
def test_addresses_are_base_plus_page_times_item() -> None:
    """Page 7 of layer L is at base[L] + 7 items at each end, by the same page list for every layer."""
    ours, theirs = layouts(spec((0, 1, 2)), base=1000), layouts(spec((0, 1, 2)), base=900_000, pages=20)
    blocks = plan_blocks(ours, theirs, runs(pages(7, 8, 2), pages(3, 4, 9)), [0, 2])
    assert blocks == [
        Block(1000 + 7 * 64, 900_000 + 3 * 64, 128),
        Block(1000 + 2 * 64, 900_000 + 9 * 64, 64),
        Block(1000 + 2 * 640 + 7 * 64, 900_000 + 2 * 1280 + 3 * 64, 128),
        Block(1000 + 2 * 640 + 2 * 64, 900_000 + 2 * 1280 + 9 * 64, 64),
    ]


@pytest.mark.contract(109)
def test_layer_by_layer_equals_all_at_once() -> None:
    """The blocks of single layers together are the blocks of all layers: one list of pages serves both."""
    both = (spec((0, 1, 3)), spec((1, 3), kind="index", item_bytes=12))
    ours, theirs = layouts(*both, base=0), layouts(*both, base=1 << 30)
    moved = runs(pages(4, 5, 1), pages(0, 1, 2))
    assert [b for layer in range(4) for b in plan_blocks(ours, theirs, moved, [layer])] == plan_blocks(
        ours, theirs, moved, range(4)
    )
    assert plan_blocks(ours, theirs, moved, [2]) == []


@pytest.mark.case("D2")
def test_layers_of_a_second_stage_keep_their_global_ids() -> None:
    """A stage with layers 4..7 writes into layers 4..7 of an 8-layer decoder, not into 0..3."""
    stage, decoder = layouts(spec((4, 5, 6, 7)), base=0), layouts(spec(tuple(range(8))), base=1 << 30)
    blocks = plan_blocks(stage, decoder, runs(pages(0), pages(0)), range(4, 8))
    assert [b.source for b in blocks] == [0, 640, 1280, 1920]
    assert [b.destination - (1 << 30) for b in blocks] == [4 * 640, 5 * 640, 6 * 640, 7 * 640]


@pytest.mark.case("D2")
def test_a_stage_may_hold_state_only() -> None:
    """A geometry with state buffers and no KV is legal and is sent."""
    state = spec((4, 5), kind="index", item_bytes=132)
    assert CacheGeometry(page_size=64, buffers=(state,)).layers == (4, 5)
    ours, theirs = layouts(state, base=0), layouts(state, base=1 << 30)
    assert total_bytes(plan_blocks(ours, theirs, runs(pages(1), pages(2)), [4, 5])) == 264


@pytest.mark.contract(56)
@pytest.mark.case("D4")
def test_state_is_matched_by_identity() -> None:
    """State layers {A,C} against {A,B,C}, or the same number with other ids: refused, with both shown."""
    for theirs in ((0, 1, 2), (0, 1)):
        ours_spec = spec((0, 2), kind="index", item_bytes=12)
        with pytest.raises(PageMismatch, match=r"buffer target\.index differs") as caught:
            require_same_buffers(
                layouts(ours_spec, base=0),
                layouts(spec(theirs, kind="index", item_bytes=12), base=1 << 30),
            )
        assert "(0, 2)" in caught.value.message
        assert str(theirs) in caught.value.message
    with pytest.raises(PageMismatch, match=r"theirs \['target\.kv'\]"):
        require_same_buffers(
            layouts(spec((0,)), spec((0,), kind="index"), base=0), layouts(spec((0,)), base=1 << 30)
        )


@pytest.mark.case("D4")
def test_a_plan_is_never_made_by_position() -> None:
    """A buffer, layer or item size that the receiver lacks raises and names the layer."""
    ours = layouts(spec((0, 2), kind="index", item_bytes=12), base=0)
    moved = runs(pages(0), pages(0))
    for theirs in (
        layouts(spec((0, 2)), base=1 << 30),
        layouts(spec((0, 1), kind="index", item_bytes=12), base=1 << 30),
        layouts(spec((0, 2), kind="index", item_bytes=24), base=1 << 30),
    ):
        with pytest.raises(PageMismatch, match=r"no like buffer target\.index of layer 2") as caught:
            plan_blocks(ours, theirs, moved, [2])
        assert caught.value.layer == 2


@pytest.mark.contract(127)
@pytest.mark.case("D5")
def test_each_buffer_has_its_own_stride_and_bytes() -> None:
    """Target items of 1152 B and draft items of 2 x 4096 B: addresses and the total are exact."""
    both = (
        spec((0, 1), item_bytes=1152),
        spec((2,), owner="draft", kind="k", item_bytes=4096),
        spec((2,), owner="draft", kind="v", item_bytes=4096),
    )
    ours, theirs = layouts(*both, base=0), layouts(*both, base=1 << 30)
    blocks = plan_blocks(ours, theirs, runs(pages(3, 4, 9), pages(0, 1, 5)), range(3))
    assert total_bytes(blocks) == 3 * (2 * 1152 + 2 * 4096)
    assert [b.source for b in blocks if b.length == 8192] == [(1 << 20) + 3 * 4096, (2 << 20) + 3 * 4096]
    assert [b.source for b in blocks if b.length == 1152] == [9 * 1152, 10 * 1152 + 9 * 1152]


@pytest.mark.contract(127)
def test_cache_hits_and_owners_lower_the_bytes() -> None:
    """Bytes are pages sent times item bytes plus state: what decode has, or another rank owns, is not sent."""
    both = (spec((0, 1, 2)), spec((1,), kind="index", item_bytes=12))
    ours, theirs = layouts(*both, base=0), layouts(*both, base=1 << 30)
    prompt, target, page_bytes = np.arange(8), np.arange(8)[::-1], 3 * 64 + 12

    def sent(source: PageArray, destination: PageArray) -> int:
        return total_bytes(plan_blocks(ours, theirs, runs(source, destination), range(3)))

    assert sent(prompt, target) == 8 * page_bytes
    assert sent(prompt[5:], target[5:]) == 3 * page_bytes
    by_rank = []
    for rank in range(3):
        mine = rank_positions(8, rank, 3)
        by_rank.append(sent(owned(prompt, 0, mine)[0], owned(target, 0, mine)[0]))
    assert by_rank == [3 * page_bytes, 3 * page_bytes, 2 * page_bytes]


@pytest.mark.parametrize(("source", "destination", "page"), [(9, 0, 10), (0, 19, 20)])
def test_pages_outside_a_pool_are_refused(source: int, destination: int, page: int) -> None:
    """A page behind either pool would be the next layer's: it raises and is named."""
    ours, theirs = layouts(spec((0, 1)), base=0), layouts(spec((0, 1)), base=1 << 30, pages=20)
    moved = runs(pages(source, source + 1), pages(destination, destination + 1))
    with pytest.raises(PageMismatch, match=f"page {page} of target.kv is not of {page}"):
        plan_blocks(ours, theirs, moved, [0])


@pytest.mark.contract(141)
def test_tails_are_by_nearest_rank() -> None:
    """p50, p95, p99 and max are values that occurred, per peer and rank; nothing recorded gives zeros."""
    statistics = TransferStatistics()
    for value in range(100, 0, -1):
        statistics.record("http://a", sent_bytes=10, seconds=float(value))
    statistics.record("http://a", rank=3, sent_bytes=7, seconds=9.0)
    statistics.record("http://b", sent_bytes=5, seconds=2.0)
    tail = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert statistics.snapshot() == {
        "http://a": {
            "bytes": 1007,
            "ranks": {
                "0": {"rooms": 100, "bytes": 1000, "transfer_s": tail},
                "3": {"rooms": 1, "bytes": 7, "transfer_s": dict.fromkeys(tail, 9.0)},
            },
        },
        "http://b": {
            "bytes": 5,
            "ranks": {"0": {"rooms": 1, "bytes": 5, "transfer_s": dict.fromkeys(tail, 2.0)}},
        },
    }
    assert percentiles([]) == {"p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}


@pytest.mark.contract(128)
@pytest.mark.parametrize("sent", [0, -1])
def test_a_dummy_sender_reports_nothing(sent: int) -> None:
    """A room that sent no byte leaves no trace in the statistics."""
    statistics = TransferStatistics()
    statistics.record("http://a", sent_bytes=sent, seconds=1.0)
    assert statistics.snapshot() == {}
