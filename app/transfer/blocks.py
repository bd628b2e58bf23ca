"""Addresses: from page runs and layers to the blocks that the engine copies.

    address(layer, page) = base + slot(layer) * layer_stride + page * item_bytes

Each buffer has its own base, stride and item size at either end; layers are matched by their logical id,
never by position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.core.geometry import BufferSpec
from app.core.runs import Runs
from app.errors import PageMismatch
from app.transfer.base import Block, Region


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """Where one buffer lies in one node's memory."""

    spec: BufferSpec
    base: int
    layer_stride: int
    pages: int

    def address(self, layer: int, page: int) -> int:
        return self.base + self.spec.slot(layer) * self.layer_stride + page * self.spec.item_bytes

    @property
    def region(self) -> Region:
        return Region(self.spec.name, self.base, len(self.spec.layer_ids) * self.layer_stride)


Layouts = Mapping[str, BufferLayout]


def require_same_buffers(ours: Layouts, theirs: Layouts) -> None:
    """PageMismatch unless both sides hold the same buffers, layers and item sizes, by identity."""
    if set(ours) != set(theirs):
        raise PageMismatch(f"buffers differ: ours {sorted(ours)}, theirs {sorted(theirs)}")
    for name, mine in ours.items():
        other = theirs[name]
        if mine.spec != other.spec:
            raise PageMismatch(f"buffer {name} differs: ours {mine.spec}, theirs {other.spec}")


def plan_blocks(source: Layouts, destination: Layouts, runs: Runs, layers: Iterable[int]) -> list[Block]:
    """Blocks that copy `runs` of every buffer of the given layers."""
    blocks: list[Block] = []
    for layer in layers:
        for name, mine in source.items():
            if not mine.spec.holds(layer):
                continue
            theirs = destination.get(name)
            item = mine.spec.item_bytes
            if theirs is None or not theirs.spec.holds(layer) or theirs.spec.item_bytes != item:
                raise PageMismatch(f"the receiver has no like buffer {name} of layer {layer}", layer=layer)
            for from_page, to_page, count in zip(
                runs.source.tolist(), runs.destination.tolist(), runs.count.tolist(), strict=True
            ):
                for last, layout in ((from_page + count - 1, mine), (to_page + count - 1, theirs)):
                    if last >= layout.pages:
                        raise PageMismatch(f"page {last} of {name} is not of {layout.pages}")
                blocks.append(
                    Block(mine.address(layer, from_page), theirs.address(layer, to_page), count * item)
                )
    return blocks


def total_bytes(blocks: Sequence[Block]) -> int:
    return sum(b.length for b in blocks)
