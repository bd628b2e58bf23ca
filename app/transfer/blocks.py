"""Addresses: from page runs and layers to the blocks that the engine copies.

    address(layer, page) = base + slot(layer) * layer_stride + page * item_bytes

Each buffer has its own base, stride and item size at either end; layers are matched by their logical id,
never by position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.core.geometry import BufferSpec
from app.core.plans import Term, plan_addresses
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
    terms: list[Term] = []
    for layer in layers:
        for name, mine in source.items():
            if not mine.spec.holds(layer):
                continue
            theirs = destination.get(name)
            item = mine.spec.item_bytes
            if theirs is None or not theirs.spec.holds(layer) or theirs.spec.item_bytes != item:
                raise PageMismatch(f"the receiver has no like buffer {name} of layer {layer}", layer=layer)
            ends = mine.address(layer, 0), theirs.address(layer, 0)
            terms.append(Term(name, *ends, item, mine.pages, theirs.pages))
    plan = plan_addresses(terms, runs)
    return list(
        map(
            Block._make,
            zip(plan.source.tolist(), plan.destination.tolist(), plan.length.tolist(), strict=True),
        )
    )


def total_bytes(blocks: Sequence[Block]) -> int:
    return sum(b.length for b in blocks)
