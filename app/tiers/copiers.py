"""Copies of one layer between L1 and L2, by one of two backends.

    direct   one slice copy for each run of pages: contiguous runs take a copy engine and no multiprocessor
    kernel   one gather and scatter call for each buffer, whatever the page lists

Both move whole items of all buffers that the copy's source stores of the layer, KV and state together. On CUDA
they enqueue on a stream of their own for each rank and direction, and the events say when the bytes are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import structlog
import torch

from app import _native
from app.core.copies import Layer, move_pages
from app.core.ids import PageArray, Source
from app.core.pages import summary
from app.core.pairings import BACKEND_KEY, Backend
from app.core.runs import Runs, coalesce
from app.errors import BadInput, PageMismatch, SettingsError
from app.tiers.copy_statistics import CopyStatistics
from app.tiers.cuda_views import device_view, widest
from app.tiers.descriptors import Direction, LayerCopy, PageMapping, PagePairs, RankPart
from app.tiers.device import DevicePool
from app.tiers.events import DeviceEvent
from app.tiers.host import HostPool

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerBuffer:
    """One layer of one buffer on one rank at both ends, uint8 [pages, item_bytes]."""

    name: str
    rank: int
    l1: torch.Tensor
    l2: torch.Tensor
    arrays: tuple[Layer, Layer] | None
    """The same as numpy views where both lie on the host."""
    mapped: torch.Tensor | None = None
    """L2 as the device addresses it, where the backend wants that."""

    @property
    def item_bytes(self) -> int:
        return self.l1.shape[1]


class CopyBackend(Protocol):
    """How pages move. `prepared`: it can use one mapping for all layers of a batch."""

    name: str
    prepared: bool
    maps_host: bool
    """Whether kernels of the device read and write L2 in place."""

    def move(self, buffer: LayerBuffer, part: RankPart, direction: Direction) -> int:
        """Copy, or on CUDA enqueue on the current stream. The number of single copies that it took."""
        ...


class DirectBackend:
    """Slice copies, one for each run. What it takes are page lists of the host: nothing is read from a device."""

    name = "direct"
    prepared = True
    maps_host = False

    def move(self, buffer: LayerBuffer, part: RankPart, direction: Direction) -> int:
        runs = part.runs
        # as plain integers: numpy's would be converted at each slice
        places = zip(runs.source.tolist(), runs.destination.tolist(), runs.count.tolist(), strict=True)
        if buffer.arrays is not None:
            l1, l2 = buffer.arrays
            if direction == "backup":
                for at, to, count in places:
                    l2[to : to + count] = l1[at : at + count]
            else:
                for at, to, count in places:
                    l1[at : at + count] = l2[to : to + count]
        else:
            for at, to, count in places:
                ends = buffer.l1[at : at + count], buffer.l2[to : to + count]
                source, destination = ends if direction == "backup" else ends[::-1]
                destination.copy_(source, non_blocking=True)
        return len(runs)


class KernelBackend:
    """One native gather and scatter a buffer. SettingsError, naming the operation, when there is none."""

    name = "kernel"
    prepared = True
    maps_host = True

    def __init__(self) -> None:
        for operation in ("copy_pages",):
            if not hasattr(_native, operation):
                raise SettingsError(f"{BACKEND_KEY} (kernel): the native core has no operation {operation}")

    def move(self, buffer: LayerBuffer, part: RankPart, direction: Direction) -> int:
        if buffer.arrays is not None:
            l1, l2 = buffer.arrays
            if direction == "backup":
                move_pages(l1, part.l1, l2, part.l2)
            else:
                move_pages(l2, part.l2, l1, part.l1)
            return 1
        assert part.on_device is not None and buffer.mapped is not None
        at, to = part.on_device
        device, host = widest(buffer.l1, buffer.mapped)
        if direction == "backup":
            host.index_copy_(0, to, device.index_select(0, at))
        else:
            device.index_copy_(0, at, host.index_select(0, to))
        return 1


def backend_of(name: Backend) -> CopyBackend:
    return DirectBackend() if name == "direct" else KernelBackend()


class LayerCopier:
    """Copies between the L1 pools and the L2 pools of a node, one of each for every rank.

    It borrows the pools: they stay open until the last copy has ended. Calls may come from several threads, as
    long as their copies touch different pages.
    """

    def __init__(
        self,
        l1: Sequence[DevicePool],
        l2: Sequence[HostPool],
        backend: CopyBackend,
        statistics: CopyStatistics | None = None,
    ) -> None:
        _require_alike(l1, l2)
        self.backend = backend
        self.statistics = statistics or CopyStatistics()
        self.geometry = l1[0].geometry
        self.ranks = len(l1)
        self.l1_pages, self.l2_pages = l1[0].pages, l2[0].pages
        self._layout = next(iter(l2[0].buffers.values())).layout
        self._devices = [pool.device for pool in l1]
        self.on_device = self._devices[0].type == "cuda"
        self._streams = {
            (rank, direction): torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
            for rank, device in enumerate(self._devices)
            for direction in ("backup", "load")
            if self.on_device
        }
        self._buffers: dict[tuple[Source, int], list[list[LayerBuffer]]] = {}
        for spec in self.geometry.buffers:
            for layer in spec.layer_ids:
                of_ranks = self._buffers.setdefault((spec.owner, layer), [[] for _ in l1])
                for rank, (device, host) in enumerate(zip(l1, l2, strict=True)):
                    of_ranks[rank].append(self._buffer(spec.name, layer, rank, device, host))

    def _buffer(self, name: str, layer: int, rank: int, device: DevicePool, host: HostPool) -> LayerBuffer:
        pool = device.buffers[name]
        l1, l2 = pool.tensor[pool.spec.slot(layer)], host.layer(name, layer)
        arrays = None if self.on_device else (l1.numpy(), l2.numpy())
        if self.on_device and self.backend.maps_host and not host.pinned_bytes:
            # some devices address any memory of the host, far more slowly: that is not what was asked for
            raise SettingsError(f"{BACKEND_KEY} (kernel): host memory of rank {rank} is not registered")
        mapped = device_view(l2, device.device) if self.on_device and self.backend.maps_host else None
        return LayerBuffer(name=name, rank=rank, l1=l1, l2=l2, arrays=arrays, mapped=mapped)

    def sources(self, layer: int) -> tuple[Source, ...]:
        """Who stores something of a layer, the target first."""
        return tuple(source for source in ("target", "draft") if (source, layer) in self._buffers)

    def buffers(self, source: Source, layer: int) -> list[list[LayerBuffer]]:
        """What a copy of this source and layer moves, by rank. BadInput when that is nothing."""
        found = self._buffers.get((source, layer))
        if found is None:
            raise BadInput(f"there is no {source} buffer of layer {layer}", layer=layer)
        return found

    def map(self, pairs: PagePairs, direction: Direction) -> PageMapping:
        """The layer-invariant part of a batch. Counted and timed as a build.

        BadInput on a page outside the pools, PageMismatch on a pair that crosses ranks.
        """
        with self.statistics.step("build"):
            ranks = _ranks(pairs, self.l1_pages, self.l2_pages, self.ranks)
            parts = tuple(self._part(pairs, ranks, int(rank), direction) for rank in np.unique(ranks))
        return PageMapping(direction=direction, pages=len(pairs), parts=parts)

    def _part(self, pairs: PagePairs, ranks: PageArray, rank: int, direction: Direction) -> RankPart:
        mine = ranks == rank
        l1, l2 = pairs.l1[mine] % self.l1_pages, pairs.l2[mine] % self.l2_pages
        if not self._layout.keeps_order:
            order = np.argsort(l2)
            l1, l2 = l1[order], l2[order]
        if self.on_device and not self._layout.adjacent:
            # a copy engine takes one piece at a time, and here no two items of a layer are one piece
            runs = Runs(source=l1, destination=l2, count=np.ones(len(l1), np.int64))
        else:
            runs = coalesce(l1, l2)
        on_device = None
        if self.on_device and self.backend.maps_host:
            with torch.cuda.stream(self._streams[rank, direction]):
                at, to = (
                    torch.from_numpy(pages).pin_memory().to(self._devices[rank], non_blocking=True)
                    for pages in (l1, l2)
                )
            on_device = at, to
        return RankPart(rank=rank, l1=l1, l2=l2, runs=runs, on_device=on_device)

    def issue(self, copy: LayerCopy, after: Sequence[DeviceEvent] = ()) -> tuple[DeviceEvent, ...]:
        """Move a layer's bytes once every event of `after` has happened; blocks until then where that is the host.

        On CPU the bytes are there when it returns; on CUDA when the events that it returns have happened.
        """
        of_ranks = self.buffers(copy.source, copy.layer)
        mapping = copy.mapping or self.map(copy.pairs, copy.direction)
        for event in after:
            if not (self.on_device and isinstance(event, torch.cuda.Event)):
                event.synchronize()
        events: list[DeviceEvent] = []
        moved_bytes = operations = 0
        try:
            with self.statistics.step("submit"):
                for part in mapping.parts:
                    with self._stream(part.rank, copy.direction, after):
                        for buffer in of_ranks[part.rank]:
                            operations += self.backend.move(buffer, part, copy.direction)
                            moved_bytes += len(part.l1) * buffer.item_bytes
                        if self.on_device:
                            events.append(_recorded())
        except Exception:
            # whoever hears of the failure may give the pages back: what is enqueued has to end first
            for (_, direction), stream in self._streams.items():
                if direction == copy.direction:
                    stream.synchronize()
            raise
        self.statistics.moved(copy.direction, copy.source, moved_bytes=moved_bytes, operations=operations)
        return tuple(events)

    def _stream(self, rank: int, direction: Direction, after: Sequence[DeviceEvent]) -> Any:
        if not self.on_device:
            return nullcontext()
        stream = self._streams[rank, direction]
        for event in after:
            if isinstance(event, torch.cuda.Event):
                stream.wait_event(event)
        return torch.cuda.stream(stream)


def _recorded() -> DeviceEvent:
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch
    event.record()
    return event


def _require_alike(l1: Sequence[DevicePool], l2: Sequence[HostPool]) -> None:
    if not l1 or len(l1) != len(l2):
        raise BadInput(f"{len(l1)} pools of L1 and {len(l2)} of L2: each rank has one of both")
    pools: list[DevicePool | HostPool] = [*l1, *l2]
    for what, values in (
        ("geometry", {pool.geometry for pool in pools}),
        ("L1 pages", {pool.pages for pool in l1}),
        ("L2 pages", {pool.pages for pool in l2}),
        ("layout", {pool.layout for pool in l2}),
        ("kind of device", {pool.device.type for pool in l1}),
    ):
        if len(values) > 1:
            raise BadInput(f"the pools of a node differ in {what}: {values}")


def _ranks(pairs: PagePairs, l1_pages: int, l2_pages: int, ranks: int) -> PageArray:
    """The owner of each pair."""
    owners, places = pairs.l1 // l1_pages, pairs.l2 // l2_pages
    if int(owners.max()) >= ranks or int(places.max()) >= ranks:
        raise BadInput(
            f"pages outside {ranks} x {l1_pages} of L1 and {ranks} x {l2_pages} of L2: "
            f"{summary(pairs.l1)} and {summary(pairs.l2)}"
        )
    crossing = np.flatnonzero(owners != places)
    if len(crossing):
        first = int(crossing[0])
        raise PageMismatch(
            f"L1 page {int(pairs.l1[first])} is of rank {int(owners[first])}, "
            f"L2 page {int(pairs.l2[first])} of rank {int(places[first])}",
            rank=int(owners[first]),
        )
    return owners
