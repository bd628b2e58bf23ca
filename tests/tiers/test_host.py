"""The L2 pool: its memory, its registration and its size."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from app.core.digests import page_digests
from app.core.pairings import LAYOUTS, Layout
from app.errors import BadInput, IntegrityError, NoCapacity, SettingsError
from app.tiers.host import HostPool, host_bytes, host_pages
from app.tiers.registration import CudaRegistrar, NoRegistrar, registrar_for
from tests.conftest import Track
from tests.tiers.rig import FakeRuntime, geometry, pages

TIB = 1 << 40


def mapped_kib(name: str) -> int:
    """What the kernel says of this process's mappings of a memory file."""
    kib, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split("-")[0].isalnum() and "-" in line.split()[0]:
            counts = name in line
        elif counts and line.startswith("Size:"):
            kib += int(line.split()[1])
    return kib


@pytest.mark.case("M4")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pinned_bytes_are_the_true_ones(layout: Layout, track: Track) -> None:
    """What is reported as pinned is what the driver has registered and the kernel has mapped, gaps included."""
    runtime = FakeRuntime()
    registrar = track(CudaRegistrar("cpu", runtime=runtime))
    gc.collect()
    before = mapped_kib("kvferry-l2")
    with track(HostPool(geometry(), 5, layout, registrar)) as pool:
        assert pool.pinned_bytes == registrar.pinned_bytes == sum(runtime.registered.values())
        assert pool.pinned_bytes == pool.total_bytes == host_bytes(geometry(), 5, layout)
        assert pool.total_bytes >= geometry().pool_bytes(5)
        assert (mapped_kib("kvferry-l2") - before) * 1024 == pool.total_bytes
    assert pool.pinned_bytes == registrar.pinned_bytes == 0
    assert runtime.registered == {}


@pytest.mark.case("M4")
def test_where_nothing_is_pinned_the_report_says_so() -> None:
    """Without a GPU nothing is registered, and the pinned bytes are 0 beside the bytes that are mapped."""
    with HostPool(geometry(), 5, "layer_first", registrar_for("cpu")) as pool:
        assert isinstance(registrar_for("cpu"), NoRegistrar)
        assert pool.pinned_bytes == 0
        assert pool.total_bytes > 0


@pytest.mark.case("M2")
def test_a_failed_registration_is_a_hard_error(track: Track) -> None:
    """A driver that refuses to pin stops the start: the setting, the bytes and its words are in the error."""
    registrar = track(CudaRegistrar("cpu", runtime=FakeRuntime(refuse=True)))
    gc.collect()
    before = mapped_kib("kvferry-l2")
    with pytest.raises(SettingsError) as caught:
        HostPool(geometry(), 5, "layer_page_first", registrar, rank=2)
    expected = host_bytes(geometry(), 5, "layer_page_first")
    assert caught.value.message == (
        f"hicache.host_bytes: {expected} bytes of host memory cannot be registered: "
        f"cannot pin {expected} bytes: out of memory"
    )
    assert caught.value.fields() == {"rank": 2, "bytes": expected}
    assert isinstance(caught.value.__cause__, NoCapacity)
    del caught
    gc.collect()
    assert mapped_kib("kvferry-l2") == before


def test_memory_that_cannot_be_mapped_names_the_setting() -> None:
    """A pool that is larger than the address space is an error of the setting, with the bytes that were wanted."""
    with pytest.raises(SettingsError, match=r"hicache\.host_bytes: cannot map \d+ bytes"):
        HostPool(geometry(), 1 << 50, "layer_first")


@pytest.mark.contract(60)
def test_two_rounds_of_register_and_free(track: Track) -> None:
    """A closed pool is unregistered before its memory goes, so that a second one in the same process succeeds."""
    runtime = FakeRuntime()
    registrar = track(CudaRegistrar("cpu", runtime=runtime))
    for _ in range(2):
        pool = HostPool(geometry(), 5, "page_first", registrar)
        assert runtime.registered == {pool.base: pool.total_bytes}
        pool.close()
        pool.close()
        assert pool.closed
        assert runtime.registered == {}
    assert runtime.calls == ["register", "unregister"] * 2


@pytest.mark.contract(60)
@pytest.mark.filterwarnings("ignore:.*bytes of L2 were not closed:ResourceWarning")
def test_a_pool_that_is_dropped_is_unregistered(track: Track) -> None:
    """Memory is unregistered when its pool goes without a close, and a warning tells of the leak."""
    runtime = FakeRuntime()
    registrar = track(CudaRegistrar("cpu", runtime=runtime))
    held = [HostPool(geometry(), 5, "page_first", registrar)]
    with pytest.warns(ResourceWarning, match="were not closed"):
        held.clear()
    assert runtime.registered == {}


def test_memory_that_stays_registered_is_not_given_back(track: Track) -> None:
    """When a driver refuses to unregister, the error is raised and the pool keeps its memory and says so."""
    runtime = FakeRuntime()
    registrar = CudaRegistrar("cpu", runtime=runtime)
    pool = track(HostPool(geometry(), 5, "page_first", registrar))
    runtime.registered.clear()
    with pytest.raises(IntegrityError, match="not registered"):
        pool.close()
    assert not pool.closed
    assert pool.pinned_bytes == registrar.pinned_bytes == pool.total_bytes
    with pytest.raises(IntegrityError, match="still pinned"):
        registrar.check_integrity()
    runtime.registered[pool.base] = pool.total_bytes
    pool.close()


def test_a_mapping_is_registered_once() -> None:
    """Registering memory twice, and unregistering what is not registered, are errors of the caller."""
    registrar = CudaRegistrar("cpu", runtime=FakeRuntime())
    registrar.register(4096, 10)
    with pytest.raises(BadInput, match="registered already"):
        registrar.register(4096, 10)
    registrar.unregister(4096)
    with pytest.raises(IntegrityError, match="not registered"):
        registrar.unregister(4096)


@pytest.mark.contract(57)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_lies_in_compact_slots(layout: Layout) -> None:
    """A host buffer holds the layers that have such state and no others; a logical layer finds its slot."""
    with HostPool(geometry(), 5, layout) as pool:
        index = pool.buffers["target.index"].tensor
        assert index.shape == (2, 5, 44)
        assert pool.layer("target.index", 3).data_ptr() == index[1].data_ptr()
        with pytest.raises(BadInput, match=r"target\.index holds no layer 2"):
            pool.layer("target.index", 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_regions_of_buffers_do_not_overlap(layout: Layout, track: Track) -> None:
    """What is written into every buffer of a pool is still there when all are written."""
    with track(HostPool(geometry(), 5, layout)) as pool:
        for number, buffer in enumerate(pool.buffers.values()):
            assert not bool(buffer.tensor.any())
            buffer.tensor.fill_(number + 1)
        for number, buffer in enumerate(pool.buffers.values()):
            assert bool((buffer.tensor == number + 1).all())
            assert buffer.base % 4096 == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_digests_do_not_depend_on_the_layout(layout: Layout) -> None:
    """Page digests of L2 are those of a contiguous pool with the same bytes."""
    shape = geometry()
    with HostPool(shape, 5, layout) as pool:
        flat = {}
        for name, buffer in pool.buffers.items():
            flat[name] = np.random.default_rng(3).integers(0, 256, tuple(buffer.tensor.shape), np.uint8)
            buffer.tensor[:] = torch.from_numpy(flat[name])
        chosen = pages(4, 0, 2)
        assert page_digests(shape, dict(pool.host_arrays()), chosen, "full") == page_digests(
            shape, flat, chosen, "full"
        )


@pytest.mark.contract(62)
def test_a_pool_has_page_pointers_where_its_layout_has() -> None:
    """The pool's pointers of pages are addresses in its buffers, and refused for layer_page_first."""
    with HostPool(geometry(), 5, "page_first_direct") as pool:
        (pointer,) = pool.page_pointers("draft.kv", pages(2)).tolist()
        assert pointer == pool.layer("draft.kv", 3)[2].data_ptr()
    with (
        HostPool(geometry(), 5, "layer_page_first") as pool,
        pytest.raises(BadInput, match="layer_page_first"),
    ):
        pool.page_pointers("draft.kv", pages(2))


@pytest.mark.case("M3")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_fill_the_bytes_of_each_rank(layout: Layout) -> None:
    """A pool takes as many pages as its bytes hold and not one more; the total is that of all ranks."""
    given = 1 << 20
    size = host_pages(geometry(), layout, device_pages=3, bytes_per_rank=given, ranks=4)
    assert host_bytes(geometry(), size.pages, layout) == size.rank_bytes <= given
    assert host_bytes(geometry(), size.pages + 1, layout) > given
    assert size.total_bytes == 4 * size.rank_bytes
    with HostPool(geometry(), size.pages, layout) as pool:
        assert pool.total_bytes == size.rank_bytes


@pytest.mark.case("M3")
def test_a_ratio_counts_pages_of_l1() -> None:
    """The ratio sizes L2 by the L1 pages of a rank; given bytes win over it."""
    size = host_pages(geometry(), "layer_first", device_pages=30, ratio=2.5, ranks=2)
    assert size.pages == 75
    assert size.total_bytes == 2 * host_bytes(geometry(), 75, "layer_first")
    both = host_pages(geometry(), "layer_first", device_pages=30, ratio=2.5, bytes_per_rank=1 << 16)
    assert both.rank_bytes <= 1 << 16


@pytest.mark.case("M3")
@pytest.mark.parametrize(
    ("key", "size"),
    [
        ("hicache.host_bytes (1048576)", {"bytes_per_rank": 1 << 20}),
        ("hicache.host_ratio (1000)", {"ratio": 1000.0}),
    ],
)
def test_all_ranks_together_stay_below_the_control_groups_limit(key: str, size: dict[str, float]) -> None:
    """What one rank may take and four may not stops the start, with the setting, the product and the limit."""
    given = {"device_pages": 1, **size}
    one = host_pages(geometry(), "layer_first", limit_bytes=3 << 20, **given)  # type: ignore[arg-type]
    assert one.total_bytes < 3 << 20
    with pytest.raises(SettingsError) as caught:
        host_pages(geometry(), "layer_first", limit_bytes=3 << 20, ranks=4, **given)  # type: ignore[arg-type]
    assert caught.value.message == (
        f"{key} on 4 ranks takes 4 x {one.rank_bytes} = {4 * one.rank_bytes} bytes beside 0 in use: "
        f"the control group allows {3 << 20}"
    )
    assert host_pages(geometry(), "layer_first", ranks=4, **given)  # type: ignore[arg-type]  # no limit


@pytest.mark.case("M3")
def test_what_is_in_use_counts_against_the_limit() -> None:
    """Memory that the process has taken already leaves less for L2."""
    fits = host_pages(geometry(), "layer_first", device_pages=1, bytes_per_rank=1 << 20, limit_bytes=2 << 20)
    with pytest.raises(SettingsError, match=f"beside {2 << 20} in use"):
        host_pages(
            geometry(),
            "layer_first",
            device_pages=1,
            bytes_per_rank=1 << 20,
            limit_bytes=(2 << 20) + fits.total_bytes - 1,
            used_bytes=2 << 20,
        )


@pytest.mark.case("M3")
@pytest.mark.parametrize("size", [{"bytes_per_rank": 0}, {"bytes_per_rank": 100}, {"ratio": 0.5}, {}])
def test_a_size_that_holds_no_page_is_refused(size: dict[str, float]) -> None:
    """Less than a page is an error that names the setting and the bytes of a page."""
    key = "hicache.host_bytes" if "bytes_per_rank" in size else "hicache.host_ratio"
    needed = host_bytes(geometry(), 1, "layer_first")
    with pytest.raises(SettingsError, match=rf"{key} .*holds not one page: a page takes {needed} bytes"):
        host_pages(geometry(), "layer_first", device_pages=1, **size)  # type: ignore[arg-type]


def test_a_large_size_is_found_at_once() -> None:
    """Terabytes of pages are counted by bisection, without a step for each."""
    size = host_pages(geometry(), "page_first_direct", device_pages=1, bytes_per_rank=4 * TIB)
    assert size.rank_bytes <= 4 * TIB < host_bytes(geometry(), size.pages + 1, "page_first_direct")
