"""Copies of layers between L1 and L2: which bytes, which pages, how many operations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app import _native
from app.core.ids import PageArray, Source
from app.core.pairings import Layout
from app.core.runs import coalesce
from app.errors import BadInput, IllegalTransition, PageMismatch, SettingsError
from app.tiers.copiers import CopyBackend, DirectBackend, KernelBackend, LayerBuffer, LayerCopier, backend_of
from app.tiers.copy_queue import CopyQueue
from app.tiers.copy_statistics import CopyStatistics, Phase
from app.tiers.cuda_views import widest
from app.tiers.descriptors import Direction, LayerCopy, PagePairs, RankPart, layer_copies
from app.tiers.device import DevicePool
from app.tiers.host import HostPool
from tests.conftest import Track
from tests.tiers.rig import PAIRS, SHARED_LAYER, WAIT_S, RecordingBackend, Tiers, geometry, pages, tiers

Making = Callable[[], CopyBackend]


def copy_all(rig: Tiers, direction: Direction, pairs: PagePairs, sources: tuple[Source, ...]) -> None:
    """Every layer of the given sources, one after another."""
    for layer in geometry().layers:
        here = [s for s in rig.copier.sources(layer) if s in sources]
        for copy in layer_copies(direction, layer, pairs, here):
            rig.copier.issue(copy)


@pytest.mark.contract(64)
@pytest.mark.case("H1")
@pytest.mark.parametrize(("layout", "making"), PAIRS)
def test_target_and_draft_come_back_byte_for_byte(layout: Layout, making: Making) -> None:
    """Pages that are backed up, overwritten and loaded are what they were: KV and state, target and draft."""
    with tiers(layout, making(), ranks=2) as rig:
        pairs = PagePairs.of([(pages(3, 4, 1, 9), pages(11, 2, 3, 12)), (pages(15), pages(20))])
        copy_all(rig, "backup", pairs, ("target", "draft"))
        rig.forget()
        copy_all(rig, "load", pairs, ("target", "draft"))
        moved = {0: {1, 3, 4}, 1: {1, 7}}
        for rank, held in enumerate(rig.before):
            for name, items in held.items():
                for page in range(8):
                    now = rig.l1_bytes(name, rank)[:, page]
                    if page in moved[rank]:
                        assert np.array_equal(now, items[:, page]), (rank, name, page)
                    else:
                        assert (now == 0xEE).all()


@settings(max_examples=40, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    count=st.integers(1, 7),
    layer=st.sampled_from(geometry().layers),
    source=st.sampled_from(["target", "draft"]),
    seed=st.integers(0, 2**16),
)
def test_a_layers_copy_is_that_of_numpy(
    pair: tuple[Layout, Making], count: int, layer: int, source: Source, seed: int
) -> None:
    """Any page lists in any layout put a layer's items where numpy's indexing would, and change nothing else."""
    layout, making = pair
    random = np.random.default_rng(seed)
    at, to = random.permutation(8)[:count], random.permutation(12)[:count]
    with tiers(layout, making()) as rig:
        if source not in rig.copier.sources(layer):
            return
        expected = {name: rig.l2_bytes(name).copy() for name in rig.before[0]}
        for spec in geometry().buffers:
            if spec.owner == source and spec.holds(layer):
                slot = spec.slot(layer)
                expected[spec.name][slot, to] = rig.before[0][spec.name][slot, at]
        pairs = PagePairs.of([(at.astype(np.int64), to.astype(np.int64))])
        rig.copier.issue(LayerCopy(direction="backup", source=source, layer=layer, pairs=pairs))
        for name, items in expected.items():
            assert np.array_equal(rig.l2_bytes(name), items)


@pytest.mark.contract(37)
@pytest.mark.parametrize(("layout", "making"), PAIRS)
@pytest.mark.parametrize("source", ["target", "draft"])
def test_a_source_copies_its_own_pages_only(layout: Layout, making: Making, source: Source) -> None:
    """At the end of a layer that both models store, the target's copy moves target pages, the draft's draft ones."""
    with tiers(layout, making()) as rig:
        pairs = PagePairs.of([(pages(5, 6), pages(1, 2))])
        rig.copier.issue(LayerCopy(direction="backup", source=source, layer=SHARED_LAYER, pairs=pairs))
        written = {name for name in rig.before[0] if rig.l2_bytes(name).any()}
        assert written == {s.name for s in geometry().buffers if s.owner == source and s.holds(SHARED_LAYER)}
        item_bytes = {"target": 96 + 44, "draft": 160}[source]
        assert rig.copier.statistics.bytes == {("backup", source): 2 * item_bytes}


@pytest.mark.contract(57)
@pytest.mark.parametrize(("layout", "making"), PAIRS)
def test_a_logical_layer_moves_between_compact_slots(layout: Layout, making: Making) -> None:
    """The state of logical layer 3 lies in slot 1 at both ends, and a layer without state moves none."""
    with tiers(layout, making()) as rig:
        pairs = PagePairs.of([(pages(5), pages(1))])
        for layer in (2, 3):
            rig.copier.issue(LayerCopy(direction="backup", source="target", layer=layer, pairs=pairs))
        state = rig.l2_bytes("target.index")
        assert not state[0].any()
        assert np.array_equal(state[1, 1], rig.before[0]["target.index"][1, 5])


@pytest.mark.parametrize("item_bytes", [16, 12, 6, 7])
@pytest.mark.parametrize("making", [DirectBackend, KernelBackend])
def test_the_way_of_a_device_moves_the_same_bytes(making: Making, item_bytes: int) -> None:
    """Slices and index operations of tensors, as a device takes them, do what the host's copies do."""
    l1, l2 = torch.randint(0, 256, (8, item_bytes), dtype=torch.uint8), torch.zeros(12, 3, item_bytes)
    strided = l2.to(torch.uint8)[:, 1]
    buffer = LayerBuffer(name="kv", rank=0, l1=l1, l2=strided, arrays=None, mapped=strided)
    at, to = pages(5, 0, 1), pages(2, 10, 11)
    on_device = torch.from_numpy(at), torch.from_numpy(to)
    part = RankPart(rank=0, l1=at, l2=to, runs=coalesce(at, to), on_device=on_device)
    before = l1.clone()
    assert making().move(buffer, part, "backup") == (2 if making is DirectBackend else 1)
    assert torch.equal(strided[to], before[at])
    assert int(strided.count_nonzero()) == int(before[at].count_nonzero())
    l1.fill_(0xEE)
    making().move(buffer, part, "load")
    assert torch.equal(l1[at], before[at])
    assert bool((l1[[2, 3, 4, 6, 7]] == 0xEE).all())
    wide = widest(l1, strided)[0].dtype
    assert wide == {16: torch.int64, 12: torch.int32, 6: torch.int16, 7: torch.uint8}[item_bytes]


@pytest.mark.contract(43)
def test_a_batch_of_nodes_is_one_target_and_one_draft_copy() -> None:
    """Ten pending nodes make one descriptor a source and layer, and each node's pages stay told apart."""
    with tiers(l1_pages=32, l2_pages=32) as rig, CopyQueue(rig.copier) as queue:
        nodes = [(pages(3 * n, 3 * n + 1), pages(31 - 2 * n, 30 - 2 * n)) for n in range(10)]
        pairs = PagePairs.of(nodes)
        assert pairs.nodes == (2,) * 10
        mapping = rig.copier.map(pairs, "backup")
        copies = layer_copies(
            "backup", SHARED_LAYER, pairs, rig.copier.sources(SHARED_LAYER), mapping=mapping
        )
        assert [copy.source for copy in copies] == ["target", "draft"]
        for copy in copies:
            queue.submit(copy)
        queue.drain(WAIT_S)
        statistics = rig.copier.statistics
        assert statistics.submits == {("backup", "target"): 1, ("backup", "draft"): 1}
        assert statistics.steps["build"] == 1
        for l1, l2 in nodes:
            assert np.array_equal(rig.l2_bytes("draft.kv")[0, l2], rig.before[0]["draft.kv"][0, l1])
            assert np.array_equal(rig.l2_bytes("target.kv")[3, l2], rig.before[0]["target.kv"][3, l1])


def test_the_direct_backend_copies_once_for_each_run() -> None:
    """Pages that are contiguous at both ends are one slice copy; the kernel backend needs one call in any case."""
    pairs = PagePairs.of([(pages(2, 3, 4, 7, 0), pages(8, 9, 10, 2, 3))])
    for backend, operations in ((DirectBackend(), 3), (KernelBackend(), 1)):
        with tiers("layer_first", backend) as rig:
            rig.copier.issue(LayerCopy(direction="backup", source="target", layer=0, pairs=pairs))
            assert rig.copier.statistics.operations["backup", "target"] == operations


@pytest.mark.contract(66)
@pytest.mark.parametrize("layout", ["page_first_direct", "layer_page_first"])
def test_host_indices_keep_the_callers_order(layout: Layout) -> None:
    """page_first_direct and layer_page_first copy the host pages in the order of the list, sorted or not."""
    backend = RecordingBackend()
    with tiers(layout, backend) as rig:
        order = [9, 10, 3, 4, 0]
        pairs = PagePairs.of([(pages(0, 1, 2, 3, 4), pages(*order))])
        rig.copier.issue(LayerCopy(direction="load", source="target", layer=0, pairs=pairs))
        (part,) = backend.parts
        assert part.l2.tolist() == order
        assert part.runs.destination.tolist() == [9, 3, 0]


def test_other_layouts_sort_host_pages_for_longer_runs() -> None:
    """layer_first may be copied in any order: neighbours that the list has apart become one run."""
    backend = RecordingBackend()
    with tiers("layer_first", backend) as rig:
        pairs = PagePairs.of([(pages(5, 2, 4), pages(8, 1, 7))])
        rig.copier.issue(LayerCopy(direction="backup", source="target", layer=0, pairs=pairs))
        (part,) = backend.parts
        assert (part.runs.source.tolist(), part.runs.destination.tolist(), part.runs.count.tolist()) == (
            [2, 4],
            [1, 7],
            [1, 2],
        )
        assert np.array_equal(
            rig.l2_bytes("target.kv")[0, [8, 1, 7]], rig.before[0]["target.kv"][0, [5, 2, 4]]
        )


class DeviceArray:
    """An array of a device: reading it is the mistake."""

    device = torch.device("cuda", 0)
    dtype = np.dtype(np.int64)

    def __len__(self) -> int:
        return 2

    def __array__(self, *_: object) -> np.ndarray:
        raise AssertionError("an array of a device was read")


@pytest.mark.contract(65)
@pytest.mark.parametrize("side", [0, 1])
def test_indices_of_a_device_are_refused_unread(side: int) -> None:
    """Page lists and token groups that lie on a device are BadInput, and nothing is copied to the host to see."""
    lists: list[object] = [pages(0, 1), pages(0, 1)]
    lists[side] = DeviceArray()
    with pytest.raises(BadInput, match="of the host, not of cuda:0"):
        PagePairs.of([tuple(lists)])  # type: ignore[list-item]
    with pytest.raises(BadInput, match="of the host, not of cuda:0"):
        PagePairs.of_tokens(*lists, page_size=2, l1_pages=8, l2_pages=8)


@pytest.mark.contract(65)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (np.array([0, 1], np.int32), "int32"),
        (np.array([0.0, 1.0]), "float64"),
        ([0, 1], "list"),
        (torch.tensor([0, 1], dtype=torch.int32), "int32"),
    ],
)
def test_indices_are_int64(wrong: object, said: str) -> None:
    """Page lists of another type are refused by that type; int64 of numpy and of torch on the CPU are taken."""
    with pytest.raises(BadInput, match=f"int64 on the host, not .*{said}"):
        PagePairs.of([(wrong, pages(0, 1))])  # type: ignore[list-item]
    taken = PagePairs.of([(torch.tensor([5, 3]), pages(0, 1))])  # type: ignore[list-item]
    assert taken.l1.tolist() == [5, 3]


@pytest.mark.contract(65)
@pytest.mark.contract(25)
@pytest.mark.parametrize("tokens", [[4, 5, 6], [5, 6, 7, 8], [4, 5, 7, 6], [4, 5, 6, 7, 8]])
def test_token_groups_that_are_no_complete_page_are_refused(tokens: list[int]) -> None:
    """A partial, misaligned or non-contiguous group of token indices is BadInput before anything moves."""
    whole = np.arange(8, dtype=np.int64)[: -(-len(tokens) // 4) * 4]
    with pytest.raises(BadInput):
        PagePairs.of_tokens(np.array(tokens, np.int64), whole, page_size=4, l1_pages=8, l2_pages=8)
    with pytest.raises(BadInput):
        PagePairs.of_tokens(whole, np.array(tokens, np.int64), page_size=4, l1_pages=8, l2_pages=8)


@pytest.mark.contract(65)
def test_complete_groups_become_pages_in_their_order() -> None:
    """Groups of whole pages are those pages, in the order of the groups."""
    l1 = np.array([8, 9, 10, 11, 0, 1, 2, 3], np.int64)
    pairs = PagePairs.of_tokens(l1, np.arange(8, dtype=np.int64), page_size=4, l1_pages=8, l2_pages=8)
    assert (pairs.l1.tolist(), pairs.l2.tolist()) == ([2, 0], [0, 1])


@pytest.mark.parametrize(
    ("nodes", "error", "said"),
    [
        ([], BadInput, "no page"),
        ([(pages(), pages())], BadInput, "no page"),
        ([(pages(1), pages(1)), (pages(2), pages(1))], BadInput, "stands twice"),
        ([(pages(1, 1), pages(1, 2))], BadInput, "stands twice"),
        ([(pages(-1), pages(1))], BadInput, "negative"),
        (
            [(pages(1, 2), pages(1)), (pages(3), pages(2, 3))],
            PageMismatch,
            "source has 2 pages, destination 1",
        ),
    ],
)
def test_page_lists_that_contradict_each_other_are_refused(
    nodes: list[tuple[PageArray, PageArray]], error: type[BadInput], said: str
) -> None:
    """Empty batches, repeated pages and nodes whose two lists differ in length never become a copy."""
    with pytest.raises(error, match=said):
        PagePairs.of(nodes)


@pytest.mark.parametrize("making", [DirectBackend, KernelBackend])
def test_a_pair_never_crosses_ranks(making: Making) -> None:
    """L1 and L2 pages of different owners are PageMismatch, pages of no rank BadInput; nothing has moved."""
    with tiers("layer_first", making(), ranks=2) as rig:
        for l2, error, said in (
            (pages(0, 1), PageMismatch, "L1 page 9 is of rank 1, L2 page 1 of rank 0"),
            (pages(0, 24), BadInput, "pages outside 2 x 8 of L1 and 2 x 12 of L2"),
        ):
            pairs = PagePairs.of([(pages(0, 9), l2)])
            with pytest.raises(error, match=said):
                rig.copier.issue(LayerCopy(direction="backup", source="target", layer=0, pairs=pairs))
        assert not rig.l2_bytes("target.kv").any()


def test_a_layer_that_a_source_does_not_store_is_refused() -> None:
    """There is no draft copy of a target's layer."""
    with tiers() as rig, pytest.raises(BadInput, match="no draft buffer of layer 0"):
        rig.copier.buffers("draft", 0)


def test_a_mapping_serves_its_direction() -> None:
    """A mapping of a load is no mapping of a backup."""
    with tiers() as rig:
        pairs = PagePairs.of([(pages(0), pages(0))])
        mapping = rig.copier.map(pairs, "load")
        with pytest.raises(IllegalTransition, match="a mapping for a load used for a backup"):
            LayerCopy(direction="backup", source="target", layer=0, pairs=pairs, mapping=mapping)


@pytest.mark.contract(68)
def test_a_missing_native_operation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the native page copies the kernel backend does not start, and says which operation is missing."""
    assert isinstance(backend_of("kernel"), KernelBackend)
    monkeypatch.delattr(_native, "copy_pages")
    with pytest.raises(SettingsError) as caught:
        backend_of("kernel")
    assert (
        caught.value.message == "hicache.copy_backend (kernel): the native core has no operation copy_pages"
    )
    assert isinstance(backend_of("direct"), DirectBackend)


@pytest.mark.contract(74)
def test_each_step_is_timed() -> None:
    """A hook hears of each build and each submit with its seconds; the totals are in the statistics."""
    heard: list[tuple[Phase, float]] = []
    with tiers() as rig:
        rig.copier.statistics.timing = lambda phase, seconds: heard.append((phase, seconds))
        pairs = PagePairs.of([(pages(0, 5), pages(0, 3))])
        mapping = rig.copier.map(pairs, "load")
        for layer in (0, 1):
            copy = LayerCopy(direction="load", source="target", layer=layer, pairs=pairs, mapping=mapping)
            rig.copier.issue(copy)
        assert [phase for phase, _ in heard] == ["build", "submit", "submit"]
        assert all(seconds >= 0 for _, seconds in heard)
        snapshot = rig.copier.statistics.snapshot()
        assert snapshot["steps"]["submit"] == {"count": 2, "seconds": heard[1][1] + heard[2][1]}


@pytest.mark.parametrize(
    ("what", "l1", "l2"),
    [
        ("L1 pages", (8, 9), (12, 12)),
        ("L2 pages", (8, 8), (12, 11)),
    ],
)
def test_the_ranks_of_a_node_are_alike(
    what: str, l1: tuple[int, ...], l2: tuple[int, ...], track: Track
) -> None:
    """Pools of different sizes would map a logical page to different ranks: they are refused."""
    device = [DevicePool(geometry(), count) for count in l1]
    host = [track(HostPool(geometry(), count, "layer_first")) for count in l2]
    try:
        with pytest.raises(BadInput, match=f"differ in {what}"):
            LayerCopier(device, host, DirectBackend(), CopyStatistics())
        with pytest.raises(BadInput, match="1 pools of L1 and 2 of L2"):
            LayerCopier(device[:1], host, DirectBackend(), CopyStatistics())
    finally:
        for pool in (*device, *host):
            pool.close()
