"""The L1 pool: one `uint8` region per buffer, `[layers, pages, item_bytes]`.

Transfer code sees bytes; an engine views the same memory as typed tensors. On CPU the regions lie in one
shared-memory file (memfd), so that an engine in another process can map them; on CUDA they are plain
allocations. The pool owns its memory until `close`; nobody may keep a view beyond that.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from app.core.digests import Bytes3d
from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import PageArray
from app.core.slots import Metadata, SlotFormat, SlotRef
from app.errors import NoCapacity

_ALIGN = 4096


@dataclass(frozen=True, kw_only=True)
class PoolBuffer:
    """One buffer's memory: address of byte 0, bytes between layers, and the tensor over it."""

    spec: BufferSpec
    base: int
    layer_stride: int
    tensor: torch.Tensor

    @property
    def length(self) -> int:
        return self.tensor.numel()


class DevicePool:
    """All buffers of a geometry for `pages` pages, and the metadata slots beside them."""

    def __init__(
        self,
        geometry: CacheGeometry,
        pages: int,
        slots: int = 0,
        device: torch.device | str = "cpu",
        slot_format: SlotFormat | None = None,
    ) -> None:
        self.geometry = geometry
        self.pages = pages
        self.device = torch.device(device)
        self.slot_format = slot_format or SlotFormat()
        self._map: mmap.mmap | None = None
        sizes = [b.pool_bytes(pages) for b in geometry.buffers] + [self.slot_format.offset(slots)]
        if self.device.type == "cpu":
            flat = self._map_shared([-(-s // _ALIGN) * _ALIGN for s in sizes])
        else:
            flat = [torch.zeros(s, dtype=torch.uint8, device=self.device) for s in sizes[:-1]]
            flat.append(torch.zeros(sizes[-1], dtype=torch.uint8))
        self.buffers: dict[str, PoolBuffer] = {}
        for spec, region in zip(geometry.buffers, flat, strict=False):
            tensor = region[: spec.pool_bytes(pages)].view(len(spec.layer_ids), pages, spec.item_bytes)
            self.buffers[spec.name] = PoolBuffer(
                spec=spec,
                base=tensor.data_ptr(),
                layer_stride=pages * spec.item_bytes,
                tensor=tensor,
            )
        self.slots = flat[-1][: sizes[-1]]

    def _map_shared(self, sizes: list[int]) -> list[torch.Tensor]:
        handle = os.memfd_create("kvferry-l1", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, sum(sizes))
            self._map = mmap.mmap(handle, sum(sizes))
        except OSError as error:
            raise NoCapacity(f"cannot map a pool of {sum(sizes)} bytes: {error}") from error
        finally:
            os.close(handle)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        return list(torch.split(whole, sizes))

    @property
    def total_bytes(self) -> int:
        return sum(b.length for b in self.buffers.values()) + self.slots.numel()

    def typed(self, name: str, layer: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of one layer as `[pages, *shape]`; writes through it are writes to the pool."""
        buffer = self.buffers[name]
        return buffer.tensor[buffer.spec.slot(layer)].view(dtype).view(self.pages, *shape)

    def host_arrays(self) -> Mapping[str, Bytes3d]:
        """The buffers as numpy views (CPU pools only), for digests."""
        return {name: b.tensor.numpy() for name, b in self.buffers.items()}

    def clear_slot(self, ref: SlotRef) -> None:
        self._slot(ref.index).zero_()

    def write_slot(self, index: int, record: bytes) -> int:
        """Put a record into a slot and return its address (the source of an engine write)."""
        slot = self._slot(index)
        slot[:] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        return slot.data_ptr()

    def read_slot(self, ref: SlotRef) -> Metadata | None:
        """What stands in a slot; its arrays are views of the slot's memory."""
        return self.slot_format.decode(self._slot(ref.index).numpy().data, ref)

    def _slot(self, index: int) -> torch.Tensor:
        at = self.slot_format.offset(index)
        return self.slots[at : at + self.slot_format.slot_bytes]

    def close(self) -> None:
        """Let go of the memory. The mapping itself ends when the last view is gone."""
        self.buffers.clear()
        self._map = None

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def readable(pools: Sequence[DevicePool], pages: PageArray) -> tuple[dict[str, Bytes3d], PageArray]:
    """The buffers of all ranks on the host, and where the given logical pages lie in them.

    Views of the pool where there is one rank on CPU; else copies of these pages only, in their order, so
    that the page numbers change: what materialisation gives, byte for byte.
    """
    first = pools[0]
    if len(pools) == 1 and first.device.type == "cpu":
        return dict(first.host_arrays()), pages
    owners, physical = np.divmod(pages, first.pages)
    copies: dict[str, Bytes3d] = {}
    for name, buffer in first.buffers.items():
        layers, _, item = buffer.tensor.shape
        out = torch.empty((layers, len(pages), item), dtype=torch.uint8)
        for rank, pool in enumerate(pools):
            mine = np.flatnonzero(owners == rank)
            if len(mine):
                index = torch.from_numpy(physical[mine]).to(pool.device)
                out[:, torch.from_numpy(mine)] = pool.buffers[name].tensor[:, index].cpu()
        copies[name] = out.numpy()
    return copies, np.arange(len(pages), dtype=np.int64)
