"""What a copy between L1 and L2 is made of.

    nodes of a batch         PagePairs                   PageMapping (layer-invariant)    LayerCopy
    [7 8] -> [0 1]     \\                                  rank 0: runs, indices      /     target, layer 0
    [3]   -> [9]        >    [7 8 3 ...] -> [0 1 9 ...]    rank 1: runs, indices     <      target, layer 1
    ...                /                                                             \\     draft, layer 9 ...

One LayerCopy serves all nodes of a batch: tree nodes and reservations stay apart, only their pages are listed
together. Page numbers are logical: owner rank * pages a rank + physical page, in L1 and L2 alike, and a pair
never crosses ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from app.core.ids import PageArray, Source
from app.core.pages import as_pages, require_equal_counts
from app.core.plans import pages_of_groups, require_host
from app.core.runs import Runs
from app.errors import BadInput, IllegalTransition

Direction = Literal["backup", "load"]
"""backup: L1 to L2; load: L2 to L1."""


def page_indices(pages: Any, what: str) -> PageArray:
    """int64 [pages] on the host, each once. BadInput otherwise; an array of a device is refused unread."""
    require_host(pages)
    array = pages.numpy() if isinstance(pages, torch.Tensor) else pages
    if not isinstance(array, np.ndarray) or array.dtype != np.int64:
        kind = getattr(array, "dtype", type(array).__name__)
        raise BadInput(f"{what} pages are int64 on the host, not {kind}")
    return np.ascontiguousarray(as_pages(array))


@dataclass(frozen=True, kw_only=True, eq=False)
class PagePairs:
    """Page l1[i] of L1 belongs to page l2[i] of L2; `nodes` are the pages that each node of the batch brought."""

    l1: PageArray
    l2: PageArray
    nodes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.l1)

    @classmethod
    def of(cls, nodes: Sequence[tuple[PageArray, PageArray]]) -> PagePairs:
        """The (L1, L2) page lists of a batch's nodes behind each other, in the caller's order.

        BadInput on an empty batch, a page that stands twice, and indices that are not int64 on the host;
        PageMismatch on lists of unequal length.
        """
        if not nodes or not sum(len(l1) for l1, _ in nodes):
            raise BadInput("a copy of no page")
        parts = [(page_indices(l1, "L1"), page_indices(l2, "L2")) for l1, l2 in nodes]
        for l1, l2 in parts:
            require_equal_counts(l1, l2)
        return cls(
            l1=page_indices(np.concatenate([l1 for l1, _ in parts]), "L1"),
            l2=page_indices(np.concatenate([l2 for _, l2 in parts]), "L2"),
            nodes=tuple(len(l1) for l1, _ in parts),
        )

    @classmethod
    def of_tokens(cls, l1: Any, l2: Any, *, page_size: int, l1_pages: int, l2_pages: int) -> PagePairs:
        """The same out of token indices, as an engine has them: groups of `page_size`, each a complete page.

        BadInput, naming the value, on a group that is partial, off the page grid or not contiguous, and on
        indices of a device, which are not read.
        """
        return cls.of([(pages_of_groups(l1, page_size, l1_pages), pages_of_groups(l2, page_size, l2_pages))])


@dataclass(frozen=True, kw_only=True, eq=False)
class RankPart:
    """The pairs of one rank as physical pages: the lists, their runs, and on CUDA the lists on its device."""

    rank: int
    l1: PageArray
    l2: PageArray
    runs: Runs
    on_device: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PageMapping:
    """How the pairs of a batch move in one direction: equal for every layer, so built once and reused."""

    direction: Direction
    pages: int
    parts: tuple[RankPart, ...]


class Lifetime(Protocol):
    """Whoever owns a mapping says whether it may still be used."""

    def require_open(self) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCopy:
    """All buffers that `source` stores of one layer, KV and state alike, for every page of a batch.

    Without a `mapping` the copier builds one for this layer. `lifetime` ends the use of a shared mapping: a copy
    that is submitted after that is IllegalTransition.
    """

    direction: Direction
    source: Source
    layer: int
    pairs: PagePairs
    mapping: PageMapping | None = None
    lifetime: Lifetime | None = None

    def __post_init__(self) -> None:
        if self.mapping is not None and self.mapping.direction != self.direction:
            raise IllegalTransition(f"a mapping for a {self.mapping.direction} used for a {self.direction}")

    def __str__(self) -> str:
        return f"{self.direction} of {self.source} layer {self.layer}, {len(self.pairs)} pages"


def layer_copies(
    direction: Direction,
    layer: int,
    pairs: PagePairs,
    sources: Sequence[Source],
    *,
    mapping: PageMapping | None = None,
) -> tuple[LayerCopy, ...]:
    """One descriptor for each source, however many nodes the batch has."""
    return tuple(
        LayerCopy(direction=direction, source=source, layer=layer, pairs=pairs, mapping=mapping)
        for source in sources
    )
