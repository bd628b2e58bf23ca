"""The list of buffers from which pools, transfer blocks and the fingerprint derive.

    one buffer, three layers of four pages       address of (layer, page)
    +--------+--------+--------+--------+
    | L0 p0  | L0 p1  | L0 p2  | L0 p3  |        base + slot(layer) * layer_stride
    +--------+--------+--------+--------+             + page * item_bytes
    | L1 p0  |  ...                     |
    +--------+                          |        layer_stride = pages * item_bytes
    | L2 p0  |                          |        slot(layer) = rank of the layer among the
    +--------+--------------------------+                      buffer's own layer ids

Nothing outside this module knows whether a buffer holds K and V, a latent or an index key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from app.core.ids import Owner
from app.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """One kind of page data.

    `layer_ids` are logical layer numbers in ascending order; storage is compact, so a layer without
    this kind of data takes no room. `item_bytes` is the size of one page of one layer.
    """

    owner: Owner
    kind: str
    layer_ids: tuple[int, ...]
    item_bytes: int
    dtype: str

    def __post_init__(self) -> None:
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise BadInput(f"layer ids of {self.name} must be ascending and unique: {self.layer_ids}")
        if self.item_bytes <= 0:
            raise BadInput(f"item_bytes of {self.name} must be positive: {self.item_bytes}")

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.kind}"

    @cached_property
    def _slots(self) -> Mapping[int, int]:
        return {layer: slot for slot, layer in enumerate(self.layer_ids)}

    def slot(self, layer: int) -> int:
        """Compact slot of a logical layer. BadInput when the buffer does not hold that layer."""
        try:
            return self._slots[layer]
        except KeyError:
            raise BadInput(f"{self.name} holds no layer {layer}: {self.layer_ids}", layer=layer) from None

    def holds(self, layer: int) -> bool:
        return layer in self._slots

    def pool_bytes(self, pages: int) -> int:
        return len(self.layer_ids) * pages * self.item_bytes


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """All buffers of a model's cache; `page_size` in tokens. Target buffers come before draft ones."""

    page_size: int
    buffers: tuple[BufferSpec, ...]

    def __post_init__(self) -> None:
        if self.page_size <= 0:
            raise BadInput(f"page_size must be positive: {self.page_size}")
        names = [b.name for b in self.buffers]
        if not names or len(set(names)) != len(names):
            raise BadInput(f"a geometry needs uniquely named buffers: {names}")
        owners = [b.owner for b in self.buffers]
        if owners != sorted(owners, reverse=True):
            raise BadInput(f"draft buffers follow the target's: {names}")

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Every logical layer that any buffer holds, ascending."""
        return tuple(sorted({layer for b in self.buffers for layer in b.layer_ids}))

    def buffers_of(self, layer: int) -> tuple[BufferSpec, ...]:
        return tuple(b for b in self.buffers if b.holds(layer))

    def page_bytes(self, layers: Iterable[int] | None = None) -> int:
        """Bytes of one page over the given layers (all by default) and every buffer."""
        chosen = self.layers if layers is None else layers
        return sum(b.item_bytes for layer in chosen for b in self.buffers_of(layer))

    def pool_bytes(self, pages: int) -> int:
        return sum(b.pool_bytes(pages) for b in self.buffers)

    def describe(self) -> dict[str, Any]:
        """Plain values for the fingerprint: everything that must be equal at both ends."""
        return {
            b.name: {"layers": list(b.layer_ids), "item_bytes": b.item_bytes, "dtype": b.dtype}
            for b in self.buffers
        }
