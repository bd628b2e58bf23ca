"""Pools of both tiers with known bytes, and the parts that fail on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import PageArray
from app.core.pairings import Layout
from app.tiers.copiers import CopyBackend, DirectBackend, KernelBackend, LayerBuffer, LayerCopier
from app.tiers.copy_statistics import CopyStatistics
from app.tiers.descriptors import Direction, RankPart
from app.tiers.device import DevicePool
from app.tiers.host import HostPool
from app.tiers.registration import NoRegistrar, Registrar

WAIT_S = 20.0
"""Longer than anything here takes; a test that reaches it fails."""

SHARED_LAYER = 3
"""Stored by the target and by the draft."""

PAIRS: tuple[tuple[Layout, type[DirectBackend] | type[KernelBackend]], ...] = (
    ("layer_first", DirectBackend),
    ("layer_first", KernelBackend),
    ("page_first", KernelBackend),
    ("page_first_direct", DirectBackend),
    ("page_first_direct", KernelBackend),
    ("layer_page_first", DirectBackend),
)
"""Every layout with every backend that it works with."""


def geometry(*, draft: bool = True) -> CacheGeometry:
    """Four target layers, an index on every other one, a draft of two layers; every buffer with its own item size."""
    buffers = (
        BufferSpec(owner="target", kind="kv", layer_ids=(0, 1, 2, 3), item_bytes=96, dtype="uint8"),
        BufferSpec(owner="target", kind="index", layer_ids=(1, 3), item_bytes=44, dtype="uint8"),
        BufferSpec(owner="draft", kind="kv", layer_ids=(SHARED_LAYER, 4), item_bytes=160, dtype="uint8"),
        BufferSpec(owner="draft", kind="index", layer_ids=(4,), item_bytes=20, dtype="uint8"),
    )
    return CacheGeometry(page_size=4, buffers=buffers if draft else buffers[:2])


def pages(*numbers: int) -> PageArray:
    return np.array(numbers, np.int64)


@dataclass
class Tiers:
    """The pools of a node's ranks, and their copier."""

    l1: list[DevicePool]
    l2: list[HostPool]
    copier: LayerCopier
    before: list[dict[str, np.ndarray]] = field(default_factory=list)
    """What L1 held at the start, by rank."""

    def l1_bytes(self, name: str, rank: int = 0) -> np.ndarray:
        return self.l1[rank].buffers[name].tensor.numpy()

    def l2_bytes(self, name: str, rank: int = 0) -> np.ndarray:
        return self.l2[rank].buffers[name].tensor.numpy()

    def forget(self) -> None:
        """Overwrite all of L1, as later requests would."""
        for pool in self.l1:
            for buffer in pool.buffers.values():
                buffer.tensor.fill_(0xEE)

    def check_integrity(self) -> None:
        for pool in self.l2:
            pool.check_integrity()


@contextmanager
def tiers(
    layout: Layout = "layer_page_first",
    backend: CopyBackend | None = None,
    *,
    ranks: int = 1,
    l1_pages: int = 8,
    l2_pages: int = 12,
    registrar: Registrar | None = None,
    draft: bool = True,
) -> Iterator[Tiers]:
    """Pools whose L1 holds random bytes; closed at the end."""
    shape = geometry(draft=draft)
    l1 = [DevicePool(shape, l1_pages) for _ in range(ranks)]
    l2 = [HostPool(shape, l2_pages, layout, registrar or NoRegistrar(), rank=r) for r in range(ranks)]
    random = torch.Generator().manual_seed(7)
    for pool in l1:
        for buffer in pool.buffers.values():
            buffer.tensor.random_(0, 256, generator=random)
    made = Tiers(l1, l2, LayerCopier(l1, l2, backend or DirectBackend(), CopyStatistics()))
    made.before = [{name: b.tensor.numpy().copy() for name, b in pool.buffers.items()} for pool in l1]
    try:
        yield made
        made.check_integrity()
    finally:
        for pool in l1:
            pool.close()
        for host in l2:
            host.close()


class Gate:
    """An event that happens when the test says so; what CUDA's events are to the copies."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.awaited = threading.Event()

    def happen(self) -> None:
        self._event.set()

    def query(self) -> bool:
        return self._event.is_set()

    def synchronize(self) -> None:
        self.awaited.set()
        if not self._event.wait(WAIT_S):
            raise TimeoutError("the gate stayed closed")


class GatedBackend(DirectBackend):
    """Stops before it copies a certain buffer of a certain layer."""

    def __init__(self, buffer: str, gate: Gate, *, layer_slot: int) -> None:
        self._buffer = buffer
        self._gate = gate
        self._slot = layer_slot
        self._seen = 0

    def move(self, buffer: LayerBuffer, part: RankPart, direction: Direction) -> int:
        if buffer.name == self._buffer:
            if self._seen == self._slot:
                self._gate.synchronize()
            self._seen += 1
        return super().move(buffer, part, direction)


class RecordingBackend(DirectBackend):
    """Keeps the order in which runs are copied; optionally one without prepared loads."""

    def __init__(self, *, prepared: bool = True) -> None:
        self.prepared = prepared
        self.name = "recording"
        self.parts: list[RankPart] = []

    def move(self, buffer: LayerBuffer, part: RankPart, direction: Direction) -> int:
        self.parts.append(part)
        return super().move(buffer, part, direction)


class FakeRuntime:
    """Stands for CUDA's runtime: knows what is registered, and refuses what a driver would."""

    def __init__(self, *, refuse: bool = False) -> None:
        self.refuse = refuse
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        self.calls.append("register")
        if self.refuse:
            return 2
        if address in self.registered:
            return 712
        self.registered[address] = length
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        return 0 if self.registered.pop(address, None) else 713

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory", 712: "already registered", 713: "not registered"}[code]
