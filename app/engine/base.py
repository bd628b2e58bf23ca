"""The interface between the service and whatever runs a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from app.core.geometry import CacheGeometry
from app.core.ids import PageArray, Source
from app.tiers.device import DevicePool


class LayerHooks(Protocol):
    """Called on the forward thread. An exception raised here ends the forward."""

    def before_read(self, layer: int) -> None:
        """Rows written earlier are about to be read: block until the layer's pages are there."""
        ...

    def after_write(self, layer: int, source: Source) -> None:
        """Every row of this forward has been written (on CUDA: enqueued) for this layer."""
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
    below `start` are read from it, the new rows are written to it.
    """

    tokens: Sequence[int]
    start: int
    pages: PageArray
    wants_logits: bool = True


class Engine(Protocol):
    """One loaded model bound to one pool. `forward` blocks and runs on a worker thread, one at a time."""

    name: str
    revision: str
    compute_dtype: str
    geometry: CacheGeometry
    stop_tokens: frozenset[int]
    vocabulary: int
    max_positions: int

    def bind(self, pool: DevicePool) -> None:
        """Use this pool's memory from now on."""
        ...

    def forward(self, step: ForwardStep, hooks: LayerHooks) -> torch.Tensor | None:
        """Logits of the last token, float32 `[vocabulary]` on CPU; None unless wanted."""
        ...


class Text(Protocol):
    """From text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Tokens of a conversation, the model's template applied, ready for the answer."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...
