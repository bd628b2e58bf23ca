"""The host tier beside a CUDA device: pinning, copies on streams of their own, readiness for each layer.

Run where one is, with the native core built there: python -m pytest -m gpu tests/gpu, with
`-c /dev/null --rootdir .` before it where the plug-ins that pyproject.toml configures are missing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from app.core.geometry import BufferSpec, CacheGeometry
from app.core.pairings import Layout
from app.errors import SettingsError
from app.tiers.copiers import CopyBackend, DirectBackend, KernelBackend, LayerCopier
from app.tiers.copy_queue import CopyQueue
from app.tiers.descriptors import LayerCopy, PagePairs
from app.tiers.device import DevicePool
from app.tiers.host import HostPool
from app.tiers.prepared import PreparedLoadDescriptor, start_load
from app.tiers.registration import CudaRegistrar, NoRegistrar

pytestmark = pytest.mark.gpu

LAYERS, L1_PAGES, L2_PAGES = 4, 32, 48
WAIT_S = 60.0
LONG_CYCLES = 400_000_000
"""Some 0.2 s on the devices at hand; nothing below depends on how long it really is."""

PAIRS: tuple[tuple[Layout, type[DirectBackend] | type[KernelBackend]], ...] = (
    ("layer_first", DirectBackend),
    ("layer_first", KernelBackend),
    ("page_first", KernelBackend),
    ("page_first_direct", DirectBackend),
    ("page_first_direct", KernelBackend),
    ("layer_page_first", DirectBackend),
)


def cuda() -> torch.device:
    """The device; the test is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")
    return torch.device("cuda", torch.cuda.current_device())


def geometry() -> CacheGeometry:
    """KV on all layers, state on two of them, and a draft layer; the state's items are of odd size."""
    layers = tuple(range(LAYERS))
    return CacheGeometry(
        page_size=64,
        buffers=(
            BufferSpec(owner="target", kind="kv", layer_ids=layers, item_bytes=41_984, dtype="uint8"),
            BufferSpec(owner="target", kind="index", layer_ids=(1, 3), item_bytes=8_449, dtype="uint8"),
            BufferSpec(owner="draft", kind="kv", layer_ids=(LAYERS,), item_bytes=4_100, dtype="uint8"),
        ),
    )


@dataclass
class Tiers:
    l1: DevicePool
    l2: HostPool
    copier: LayerCopier
    before: dict[str, torch.Tensor]

    def overwrite(self) -> None:
        for buffer in self.l1.buffers.values():
            buffer.tensor.fill_(0xEE)
        torch.cuda.synchronize()


@contextmanager
def tiers(layout: Layout, backend: CopyBackend) -> Iterator[Tiers]:
    """One rank's pools with random bytes in L1."""
    device = cuda()
    registrar = CudaRegistrar(device)
    l1 = DevicePool(geometry(), L1_PAGES, device=device)
    l2 = HostPool(geometry(), L2_PAGES, layout, registrar)
    try:
        for buffer in l1.buffers.values():
            buffer.tensor.random_(0, 256)
        torch.cuda.synchronize()
        before = {name: b.tensor.cpu() for name, b in l1.buffers.items()}
        yield Tiers(l1, l2, LayerCopier([l1], [l2], backend), before)
        l2.check_integrity()
    finally:
        torch.cuda.synchronize()
        l1.close()
        l2.close()
    registrar.check_integrity()


def batch(count: int = 20) -> PagePairs:
    """Scattered pages with a few runs in them."""
    random = np.random.default_rng(5)
    l1 = np.concatenate([np.arange(6), 6 + random.permutation(L1_PAGES - 6)[: count - 6]]).astype(np.int64)
    l2 = np.concatenate([np.arange(8, 14), 14 + random.permutation(L2_PAGES - 14)[: count - 6]]).astype(
        np.int64
    )
    return PagePairs.of([(l1, l2)])


@pytest.mark.contract(64)
@pytest.mark.case("H1")
@pytest.mark.parametrize(("layout", "making"), PAIRS)
def test_pages_come_back_from_pinned_memory(layout: Layout, making: Callable[[], CopyBackend]) -> None:
    """KV, state and draft that are backed up layer by layer, overwritten and loaded are byte-identical; others stay."""
    with tiers(layout, making()) as rig, CopyQueue(rig.copier) as queue:
        pairs = batch()
        mapping = rig.copier.map(pairs, "backup")
        for layer in geometry().layers:
            for source in rig.copier.sources(layer):
                queue.submit(
                    LayerCopy(direction="backup", source=source, layer=layer, pairs=pairs, mapping=mapping)
                )
        queue.drain(WAIT_S)
        for name, held in rig.before.items():
            assert torch.equal(rig.l2.buffers[name].tensor[:, pairs.l2], held[:, pairs.l1])
        rig.overwrite()
        readiness = start_load(
            PreparedLoadDescriptor.begin(rig.copier, pairs, batch=1), queue, deadline_s=WAIT_S
        )
        queue.drain(WAIT_S)
        assert all(ticket.error is None for ticket in readiness.tickets)
        others = np.setdiff1d(np.arange(L1_PAGES), pairs.l1)
        for name, held in rig.before.items():
            now = rig.l1.buffers[name].tensor.cpu()
            assert torch.equal(now[:, pairs.l1], held[:, pairs.l1])
            assert bool((now[:, others] == 0xEE).all())
        queue.check_integrity()


@pytest.mark.contract(60)
@pytest.mark.case("M4")
def test_two_rounds_of_pinning() -> None:
    """Memory is pinned while its pool is open, unpinned when it closes, and pinned again for the next pool."""
    device = cuda()
    registrar = CudaRegistrar(device)
    for _ in range(2):
        with HostPool(geometry(), L2_PAGES, "layer_page_first", registrar) as pool:
            assert pool.pinned_bytes == registrar.pinned_bytes == pool.total_bytes
            assert pool.buffers["target.kv"].tensor.is_pinned()
        gc.collect()
        assert registrar.pinned_bytes == 0


@pytest.mark.case("M2")
def test_memory_that_the_driver_refuses_is_a_hard_error() -> None:
    """Memory that is pinned already cannot be pinned again: the driver's refusal names the setting."""
    device = cuda()
    first, second = CudaRegistrar(device), CudaRegistrar(device)

    class Same(CudaRegistrar):
        def register(self, address: int, length: int) -> None:
            super().register(held.base, length)

    with HostPool(geometry(), L2_PAGES, "layer_first", first) as held:
        with pytest.raises(SettingsError, match=r"hicache\.host_bytes: \d+ bytes of host memory cannot"):
            HostPool(geometry(), L2_PAGES, "layer_first", Same(device))
        assert second.pinned_bytes == 0
    torch.zeros(1, device=device).add_(1)
    torch.cuda.synchronize()


def test_kernels_need_memory_that_is_registered() -> None:
    """The kernel backend does not start over memory that the device cannot address."""
    device = cuda()
    l1 = DevicePool(geometry(), L1_PAGES, device=device)
    with HostPool(geometry(), L2_PAGES, "layer_first", NoRegistrar()) as l2:
        with pytest.raises(SettingsError, match=r"hicache\.copy_backend \(kernel\)"):
            LayerCopier([l1], [l2], KernelBackend())
        LayerCopier([l1], [l2], DirectBackend())
    l1.close()


@pytest.mark.case("G12")
@pytest.mark.parametrize("making", [DirectBackend, KernelBackend])
def test_a_load_starts_after_the_reader_of_its_pages(making: Callable[[], CopyBackend]) -> None:
    """A long kernel that reads the pages afterwards still reads the old bytes: the load waits for its event."""
    with tiers("layer_first", making()) as rig, CopyQueue(rig.copier) as queue:
        pairs = batch()
        rig.l2.buffers["target.kv"].tensor.fill_(0x11)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG_CYCLES)
            read = rig.l1.buffers["target.kv"].tensor[0].clone()
            reader = torch.cuda.Event()
            reader.record()
        assert not reader.query(), "the kernel was too short for this test"
        load = LayerCopy(direction="load", source="target", layer=0, pairs=pairs)
        queue.submit(load, after=[reader]).wait(WAIT_S)
        assert reader.query()
        assert torch.equal(read.cpu(), rig.before["target.kv"][0])
        assert bool((rig.l1.buffers["target.kv"].tensor[0, pairs.l1].cpu() == 0x11).all())


@pytest.mark.contract(74)
@pytest.mark.case("G1")
@pytest.mark.parametrize("making", [DirectBackend, KernelBackend])
def test_a_reader_is_ordered_behind_its_layer_without_blocking_the_thread(
    making: Callable[[], CopyBackend],
) -> None:
    """The forward's stream waits for the layer; its thread goes on enqueueing while the load is still held up."""
    with tiers("layer_first", making()) as rig, CopyQueue(rig.copier) as queue:
        pairs = batch()
        for name in ("target.kv", "target.index"):
            rig.l2.buffers[name].tensor.fill_(0x22)
        busy = torch.cuda.Stream()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(LONG_CYCLES)
            held = torch.cuda.Event()
            held.record()
        readiness = start_load(
            PreparedLoadDescriptor.begin(rig.copier, pairs, batch=1), queue, deadline_s=WAIT_S, after=[held]
        )
        with torch.cuda.stream(torch.cuda.Stream()):
            readiness.wait(3)
            assert not held.query(), "the thread was blocked, or the kernel was too short for this test"
            index = torch.from_numpy(pairs.l1).pin_memory().to(rig.l1.device, non_blocking=True)
            kv = rig.l1.buffers["target.kv"].tensor[3].index_select(0, index)
            state = rig.l1.buffers["target.index"].tensor[1].index_select(0, index)
        torch.cuda.synchronize()
        assert bool((kv == 0x22).all())
        assert bool((state == 0x22).all())
        queue.drain(WAIT_S)


def test_a_backup_reads_what_its_layers_end_has_written() -> None:
    """A backup that is submitted before the layer's kernels have run copies their result."""
    with tiers("layer_page_first", DirectBackend()) as rig, CopyQueue(rig.copier) as queue:
        pairs = batch()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LONG_CYCLES)
            rig.l1.buffers["target.kv"].tensor[2].fill_(0x33)
            end = torch.cuda.Event()
            end.record()
        ticket = queue.submit(
            LayerCopy(direction="backup", source="target", layer=2, pairs=pairs), after=[end]
        )
        assert not ticket.done
        ticket.wait(WAIT_S)
        assert bool((rig.l2.buffers["target.kv"].tensor[2, pairs.l2] == 0x33).all())
