"""The toy engine's draft: right three times in four, and dependent on every byte of its own pages.

Draft row p is a hash chained over (token p+1, hidden state of row p). The draft carries the target's state one row
further and so knows the target's next token; a hash over its own rows decides when it says another one.

    hidden of the target   | sum | one hash a layer |
    hidden of the draft    | sum | one hash a layer | hash of the draft row |     wider than the target's
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from app.engine.base import DraftStep, Forwarded, LayerHooks
from app.engine.models import toy_state
from app.engine.models.toy_state import HASH_BYTES, SUM_BYTES
from app.engine.paged.rows import require_pages
from app.errors import InvalidRequest

if TYPE_CHECKING:
    from app.engine.models.toy import ToyEngine

DRAFT_ROW_BYTES = 96
_WRONG_EVERY = 4
_NAME = "draft.kv"


class ToyDraft:
    """One layer behind the engine's."""

    def __init__(self, engine: ToyEngine, *, layer: int) -> None:
        self.name = f"{engine.name}-draft"
        self.hidden_size = engine.hidden_size + HASH_BYTES
        self._engine = engine
        self._layer = layer

    def forward(self, step: DraftStep, hooks: LayerHooks) -> Forwarded:
        engine, count = self._engine, len(step.tokens)
        end = step.start + count
        require_pages(step.pages, end, engine.geometry.page_size)
        width = self.hidden_size if step.chained else engine.hidden_size
        if not count or step.hidden.shape != (count, width):
            raise InvalidRequest(f"{count} draft tokens with hidden states {list(step.hidden.shape)}")
        given = [row.tobytes() for row in step.hidden.numpy().astype(np.uint8)]
        if step.start:
            hooks.before_read(self._layer)
        above = engine.hash_before(_NAME, self._layer, step.pages, step.start)
        digests: list[bytes] = []
        for token, state in zip(step.tokens, given, strict=True):
            above = toy_state.chained(above + state, token, self._layer)
            digests.append(above)
        rows = toy_state.filled(digests, DRAFT_ROW_BYTES)
        engine.store(_NAME, self._layer, step.pages, step.start, rows)
        engine.end_layer(self._layer, "draft", hooks)

        states = self._next_states(given, step.tokens, step.start + 1)
        hidden = np.frombuffer(b"".join(s + d for s, d in zip(states, digests, strict=True)), np.uint8)
        return Forwarded(
            logits=self._logits(step, end, states[-1]),
            hidden=torch.from_numpy(hidden.reshape(count, -1).astype(np.float32)),
        )

    def _next_states(self, given: Sequence[bytes], tokens: Sequence[int], position: int) -> list[bytes]:
        """The target's states after the rows from `position` on, of those tokens, each from the one before."""
        engine = self._engine
        totals = np.array([int.from_bytes(s[:SUM_BYTES], "little") for s in given], dtype=np.uint64)
        parts: list[list[bytes]] = []
        with np.errstate(over="ignore"):
            for layer in range(engine.layers):
                at = SUM_BYTES + layer * HASH_BYTES
                digests = [
                    toy_state.chained(state[at : at + HASH_BYTES], token, layer)
                    for state, token in zip(given, tokens, strict=True)
                ]
                totals = totals + engine.added_by(digests, layer, position)
                parts.append(digests)
        return [b"".join((total.tobytes(), *hashes)) for total, *hashes in zip(totals, *parts, strict=True)]

    def _logits(self, step: DraftStep, end: int, state: bytes) -> torch.Tensor:
        """Of the last row: the target's next token, or another one where the draft's own rows say so."""
        rows = self._engine.rows(_NAME, self._layer, step.pages, end)
        own = int(toy_state.mixed(toy_state.row_sums(rows, 0, 2 * self._layer).sum(dtype=np.uint64)))
        token = toy_state.token_of(int.from_bytes(state[:SUM_BYTES], "little"))
        if own % _WRONG_EVERY == 0:
            token = toy_state.FIRST_TOKEN + (token - toy_state.FIRST_TOKEN + 1) % toy_state.TOKENS
        seed = own ^ int.from_bytes(state[:SUM_BYTES], "little")
        return torch.from_numpy(self._engine.logits_of(seed, token)).unsqueeze(0)
