"""How one buffer's items lie in host memory: four orders of (layer, page).

A and B are layers, 0 1 2 pages; an item is what one layer stores of one page; `.` is unused.

    layer_first        |A0 A1 A2 B0 B1 B2|             as in a device pool: equal strides at both ends
    page_first         |A0 B0|A1 B1|A2 B2|             a page in one piece, for kernels and whole-page readers
    page_first_direct  |A0 . B0 .|A1 . B1 .|A2 . B2 .| the same, each item on a boundary of 512 bytes: what copy
                                                       engines and unbuffered files take without a detour
    layer_page_first   |A0 A1 A2 ...|B0 B1 B2 ...|     a layer's pages in a row that starts on a memory page: one
                                                       copy-engine transfer a run, and rows share no memory page

Item (layer, page) is at base + slot(layer) * layer_stride + page * page_stride in each of them, so every reader
of strided views works with all four. What they differ in is which transfers are one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from app.core.ids import PageArray
from app.core.pairings import Layout
from app.errors import BadInput

ITEM_BOUNDARY: Final = 512
"""The unit of unbuffered file access and a multiple of every transaction size of a GPU."""
ROW_BOUNDARY: Final = 4096
"""A page of memory: what can be registered, advised or mapped by itself."""

KEEPS_ORDER: Final[frozenset[Layout]] = frozenset({"page_first_direct", "layer_page_first"})
"""Page lists of these go to the copies as the caller made them; others may be sorted for longer runs."""


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """Where the items of one buffer lie: `layers` compact slots, `pages` pages, `item_bytes` an item."""

    name: Layout
    layers: int
    pages: int
    item_bytes: int

    def __post_init__(self) -> None:
        if min(self.layers, self.pages, self.item_bytes) < 1:
            raise BadInput(
                f"a buffer of {self.layers} layers, {self.pages} pages and {self.item_bytes} bytes an item"
            )

    @cached_property
    def page_stride(self) -> int:
        """Bytes from an item to the same layer's item of the next page."""
        if self.name == "page_first":
            return self.layers * self.item_bytes
        if self.name == "page_first_direct":
            return self.layers * _up(self.item_bytes, ITEM_BOUNDARY)
        return self.item_bytes

    @cached_property
    def layer_stride(self) -> int:
        """Bytes from an item to the same page's item of the next layer."""
        if self.name == "page_first":
            return self.item_bytes
        if self.name == "page_first_direct":
            return _up(self.item_bytes, ITEM_BOUNDARY)
        row = self.pages * self.item_bytes
        return _up(row, ROW_BOUNDARY) if self.name == "layer_page_first" else row

    @cached_property
    def length(self) -> int:
        """Bytes of the whole buffer, gaps included."""
        return max(self.layers * self.layer_stride, self.pages * self.page_stride)

    @property
    def adjacent(self) -> bool:
        """Whether a layer's item of page p ends where that of page p + 1 starts."""
        return self.page_stride == self.item_bytes

    @property
    def keeps_order(self) -> bool:
        return self.name in KEEPS_ORDER

    def offset(self, slot: int, page: int) -> int:
        """Where an item starts, in bytes from the buffer's base. BadInput outside the buffer."""
        if not (0 <= slot < self.layers and 0 <= page < self.pages):
            raise BadInput(f"slot {slot}, page {page} is outside {self.layers} x {self.pages}")
        return slot * self.layer_stride + page * self.page_stride

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """The buffer as uint8 [layers, pages, item_bytes] over `region`, uint8 [>= length]; nothing is copied."""
        if region.dtype != torch.uint8 or region.ndim != 1 or region.numel() < self.length:
            raise BadInput(f"a region of {self.length} bytes is needed, not {region.numel()} {region.dtype}")
        shape = (self.layers, self.pages, self.item_bytes)
        strides = (self.layer_stride, self.page_stride, 1)
        return torch.as_strided(region, shape, strides, region.storage_offset())

    def page_pointers(self, base: int, pages: PageArray) -> PageArray:
        """One address for each page, all layers of it `layer_stride` apart behind it.

        BadInput for the layer-first orders: a page of theirs is in as many places as it has layers.
        """
        if self.name not in ("page_first", "page_first_direct"):
            raise BadInput(f"a page of {self.name} has no address of its own: ask layer by layer")
        if len(pages) and not (int(pages.min()) >= 0 and int(pages.max()) < self.pages):
            raise BadInput(f"pages {int(pages.min())}..{int(pages.max())} are outside 0..{self.pages}")
        return base + pages * self.page_stride


def _up(value: int, boundary: int) -> int:
    return -(-value // boundary) * boundary
