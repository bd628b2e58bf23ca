"""The L2 pool of one rank: every buffer of a geometry in one mapping of shared memory, pinned where a GPU copies.

    | target.kv ........ | target.index .. | draft.kv .. |      regions on memory pages, each in the pool's layout

Target and draft lie in one pool with the same page numbers: a page of L2 is both, or neither.
"""

from __future__ import annotations

import mmap
import os
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import torch

from app.core.digests import Bytes3d
from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import PageArray
from app.core.pairings import Layout
from app.errors import IntegrityError, SettingsError
from app.tiers.layouts import ROW_BOUNDARY, HostLayout
from app.tiers.registration import NoRegistrar, Registrar

BYTES_KEY: Final = "hicache.host_bytes"
RATIO_KEY: Final = "hicache.host_ratio"


@dataclass(frozen=True, kw_only=True)
class HostBuffer:
    """One buffer's memory: address of byte 0 and the tensor uint8 [layers, pages, item_bytes] over it, strided."""

    spec: BufferSpec
    layout: HostLayout
    base: int
    tensor: torch.Tensor


class HostPool:
    """L2 pages of one rank. The pool owns its memory until `close`; nobody may keep a view or a copy beyond that."""

    def __init__(
        self,
        geometry: CacheGeometry,
        pages: int,
        layout: Layout,
        registrar: Registrar | None = None,
        *,
        rank: int = 0,
    ) -> None:
        """SettingsError, naming the setting, when the memory cannot be mapped or pinned; nothing is left behind."""
        self.geometry = geometry
        self.pages = pages
        self.layout = layout
        self.rank = rank
        self._registrar = registrar or NoRegistrar()
        layouts = _layouts(geometry, pages, layout)
        self.total_bytes = sum(_rows(part.length) for part in layouts)
        """Bytes of the mapping: items, the gaps of the layout, and regions rounded to memory pages."""
        self.pinned_bytes = 0
        self.buffers: dict[str, HostBuffer] = {}
        whole = self._map(self.total_bytes)
        self.base = whole.data_ptr()
        self._pin()
        start = 0
        for spec, part in zip(geometry.buffers, layouts, strict=True):
            region = whole[start : start + part.length]
            self.buffers[spec.name] = HostBuffer(
                spec=spec, layout=part, base=region.data_ptr(), tensor=part.view(region)
            )
            start += _rows(part.length)

    def _map(self, length: int) -> torch.Tensor:
        self._mapping: mmap.mmap | None = None
        handle = os.memfd_create("kvferry-l2", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, length)
            self._mapping = mmap.mmap(handle, length)
        except (OSError, ValueError, OverflowError) as error:
            raise SettingsError(
                f"{BYTES_KEY}: cannot map {length} bytes: {error}", rank=self.rank, bytes=length
            ) from error
        finally:
            os.close(handle)
        return torch.frombuffer(self._mapping, dtype=torch.uint8)

    def _pin(self) -> None:
        before = self._registrar.pinned_bytes
        try:
            self._registrar.register(self.base, self.total_bytes)
        except Exception as error:
            self._mapping = None
            raise SettingsError(
                f"{BYTES_KEY}: {self.total_bytes} bytes of host memory cannot be registered: {error}",
                rank=self.rank,
                bytes=self.total_bytes,
            ) from error
        self.pinned_bytes = self._registrar.pinned_bytes - before

    @property
    def closed(self) -> bool:
        return self._mapping is None

    def layer(self, name: str, layer: int) -> torch.Tensor:
        """One layer's pages, uint8 [pages, item_bytes], strided; writes through it are writes to the pool."""
        buffer = self.buffers[name]
        return buffer.tensor[buffer.spec.slot(layer)]

    def host_arrays(self) -> Mapping[str, Bytes3d]:
        """The buffers as numpy views, for digests."""
        return {name: b.tensor.numpy() for name, b in self.buffers.items()}

    def page_pointers(self, name: str, pages: PageArray) -> PageArray:
        """Address of each page of a buffer. BadInput where a page of the layout has none."""
        buffer = self.buffers[name]
        return buffer.layout.page_pointers(buffer.base, pages)

    def close(self) -> None:
        """Unregister and let go of the memory. Call it when no copy can touch it any more; twice is harmless.

        The mapping itself ends when the last view is gone. When it cannot be unregistered it stays: memory that
        a driver has pinned must not be given back.
        """
        if self._mapping is None:
            return
        self._registrar.unregister(self.base)
        self.pinned_bytes = 0
        self.buffers.clear()
        self._mapping = None

    def check_integrity(self) -> None:
        """IntegrityError when regions overlap, leave the mapping, or more is said to be pinned than is mapped."""
        end = self.base
        for name, buffer in self.buffers.items():
            if buffer.base < end or buffer.tensor.data_ptr() != buffer.base:
                raise IntegrityError(f"{name} starts at {buffer.base:#x}, before {end:#x}", rank=self.rank)
            end = buffer.base + buffer.layout.length
        if end > self.base + self.total_bytes:
            raise IntegrityError(f"regions end at {end:#x}, the mapping before it", rank=self.rank)
        if self.pinned_bytes not in (0, self.total_bytes) or (self.closed and self.pinned_bytes):
            raise IntegrityError(
                f"{self.pinned_bytes} of {self.total_bytes} bytes are pinned", rank=self.rank
            )

    def __enter__(self) -> HostPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            warnings.warn(f"{self.total_bytes} bytes of L2 were not closed", ResourceWarning, stacklevel=2)
            self.close()


@dataclass(frozen=True, kw_only=True)
class HostSize:
    """Pages of each rank's pool, and the bytes of one and of all of them."""

    pages: int
    rank_bytes: int
    total_bytes: int


def host_bytes(geometry: CacheGeometry, pages: int, layout: Layout) -> int:
    """Bytes that a pool of `pages` pages maps, gaps included."""
    return sum(_rows(part.length) for part in _layouts(geometry, pages, layout)) if pages else 0


def host_pages(
    geometry: CacheGeometry,
    layout: Layout,
    *,
    device_pages: int,
    ranks: int = 1,
    bytes_per_rank: int | None = None,
    ratio: float = 0.0,
    limit_bytes: int | None = None,
    used_bytes: int = 0,
) -> HostSize:
    """The size of L2: as many pages as `bytes_per_rank` hold, or `ratio` times the L1 pages of a rank.

    `bytes_per_rank` (hicache.host_bytes) wins over `ratio` (hicache.host_ratio). Every rank has a pool, and all
    of them together with the `used_bytes` of the process have to stay below `limit_bytes`, the control group's
    limit (None: there is none). SettingsError, naming the setting, where they do not or not one page fits.
    """
    if bytes_per_rank is not None:
        key = f"{BYTES_KEY} ({bytes_per_rank})"
        most = max(bytes_per_rank, 0) // geometry.page_bytes()
        pages = (
            bisect_right(range(most + 1), bytes_per_rank, key=lambda n: host_bytes(geometry, n, layout)) - 1
        )
    else:
        key = f"{RATIO_KEY} ({ratio:g})"
        pages = int(device_pages * ratio)
    if pages < 1:
        raise SettingsError(f"{key} holds not one page: a page takes {host_bytes(geometry, 1, layout)} bytes")
    rank_bytes = host_bytes(geometry, pages, layout)
    size = HostSize(pages=pages, rank_bytes=rank_bytes, total_bytes=rank_bytes * ranks)
    if limit_bytes is not None and size.total_bytes + used_bytes > limit_bytes:
        raise SettingsError(
            f"{key} on {ranks} ranks takes {ranks} x {rank_bytes} = {size.total_bytes} bytes beside {used_bytes} "
            f"in use: the control group allows {limit_bytes}"
        )
    return size


def _layouts(geometry: CacheGeometry, pages: int, layout: Layout) -> list[HostLayout]:
    return [
        HostLayout(name=layout, layers=len(b.layer_ids), pages=pages, item_bytes=b.item_bytes)
        for b in geometry.buffers
    ]


def _rows(length: int) -> int:
    return -(-length // ROW_BOUNDARY) * ROW_BOUNDARY
