"""The interface between the service and whatever runs a model.

    target rows    0 .. n-1    row p is computed from tokens 0..p
    draft rows     0 .. n-1    row p is computed from token p+1 and the target's hidden state of row p

Page tables hold logical pages: owner rank * pages a rank + physical page. With one rank they are the physical
pages of its pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from app.core.geometry import CacheGeometry
from app.core.ids import PageArray, Source
from app.tiers.device import DevicePool

Wanted = Literal["none", "last", "all"]
"""Of which rows of a step the logits are computed."""


class LayerHooks(Protocol):
    """Called on the forward thread. An exception raised here ends the forward, on every rank.

    With several ranks the forward thread is rank 0's, and what it says here holds for all of them.
    """

    def before_read(self, layer: int) -> None:
        """Rows written earlier are about to be read: block until the layer's pages are there.

        Called by every accessor of a layer (its K/V or latent, its index), so up to twice a forward.
        """
        ...

    def after_write(self, layer: int, source: Source) -> None:
        """Every row of this forward has been written (on CUDA: enqueued) for this layer. Once a forward."""
        ...


class NoHooks:
    """For forwards that nobody watches: decode steps and local runs."""

    def before_read(self, layer: int) -> None:
        pass

    def after_write(self, layer: int, source: Source) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class ForwardStep:
    """Compute `tokens` at the positions `start`.. of one sequence.

    `pages` is the sequence's page table; it covers every position up to the last one computed. Rows
    below `start` are read from it, the new rows are written to it, and rows behind them are never read.
    """

    tokens: Sequence[int]
    start: int
    pages: PageArray
    logits: Wanted = "last"


@dataclass(frozen=True, kw_only=True)
class DraftStep:
    """Compute draft rows `start`.. of one sequence: `tokens[i]` stands at position start + i + 1.

    `hidden` is one row for each token: the target's of the same positions, or, when `chained`, the draft's own
    output of the row before, in the draft's width.
    """

    tokens: Sequence[int]
    start: int
    pages: PageArray
    hidden: torch.Tensor
    chained: bool = False


@dataclass(frozen=True, kw_only=True)
class Forwarded:
    """`logits` are float32 on CPU, `[rows, vocabulary]`; None unless wanted.

    `hidden` is `[rows of the step, width]`: from a target what its draft reads (None without a draft), from a
    draft what it reads itself when chained.
    """

    logits: torch.Tensor | None
    hidden: torch.Tensor | None


class DraftModel(Protocol):
    """The speculative layers beside a target, over the same pools and page tables.

    Its layers have the logical numbers after the target's, its buffers the owner "draft".
    `hidden_size` is the width of its output, which may differ from the target's.
    """

    name: str
    hidden_size: int

    def forward(self, step: DraftStep, hooks: LayerHooks) -> Forwarded:
        """Logits of the last row, hidden of every row. Hooks fire with the source "draft"."""
        ...


class Engine(Protocol):
    """One loaded model bound to its pools. `forward` blocks and runs on a worker thread, one at a time."""

    name: str
    revision: str
    compute_dtype: str
    geometry: CacheGeometry
    stop_tokens: frozenset[int]
    vocabulary: int
    max_positions: int
    hidden_size: int

    @property
    def draft(self) -> DraftModel | None:
        """None when the model has none, or was loaded without it."""
        ...

    def bind(self, pools: Sequence[DevicePool]) -> None:
        """Use these pools from now on: one for each context-parallel rank, of equally many pages."""
        ...

    def forward(self, step: ForwardStep, hooks: LayerHooks) -> Forwarded:
        """One forward of the target. InvalidRequest when the page table is too short."""
        ...


class Text(Protocol):
    """From text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Tokens of a conversation, the model's template applied, ready for the answer."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...
