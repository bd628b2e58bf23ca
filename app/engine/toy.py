"""A model without weights whose output depends on every cached byte.

Row p of layer l is a hash chained over the tokens up to p, read back from the pool; the next token is a
hash over all rows. One wrong byte anywhere in a page changes every token after it, which a real model's
greedy tokens often hide. It runs in milliseconds, for tests, campaigns and a first look at a deployment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from app.core.digests import Bytes3d
from app.core.geometry import BufferSpec, CacheGeometry
from app.core.pages import pages_for
from app.engine.base import ForwardStep, LayerHooks
from app.errors import InvalidRequest
from app.tiers.device import DevicePool

_EOS = 256
_VOCABULARY = 257
_HASH_BYTES = 16


class ToyEngine:
    """`row_bytes` are stored a token and layer: the hash, repeated."""

    def __init__(
        self, *, page_size: int, layers: int = 12, row_bytes: int = 64, layer_delay_s: float = 0.0
    ) -> None:
        self.name = "toy"
        self.revision = f"toy-{layers}x{row_bytes}"
        self.compute_dtype = "uint8"
        self.vocabulary = _VOCABULARY
        self.max_positions = 1 << 20
        self.stop_tokens = frozenset({_EOS})
        self.layer_delay_s = layer_delay_s
        self._page_size = page_size
        self._row_bytes = row_bytes
        self.geometry = CacheGeometry(
            page_size=page_size,
            buffers=(
                BufferSpec(
                    owner="target",
                    kind="kv",
                    layer_ids=tuple(range(layers)),
                    item_bytes=page_size * row_bytes,
                    dtype="uint8",
                ),
            ),
        )

    def bind(self, pool: DevicePool) -> None:
        (spec,) = self.geometry.buffers
        self._pool: Bytes3d = pool.host_arrays()[spec.name]

    def forward(self, step: ForwardStep, hooks: LayerHooks) -> torch.Tensor | None:
        end = step.start + len(step.tokens)
        if pages_for(end, self._page_size) > len(step.pages):
            raise InvalidRequest(f"{len(step.pages)} pages do not hold {end} tokens")
        for layer in self.geometry.layers:
            if step.start:
                hooks.before_read(layer)
            self._write_layer(layer, step)
            if self.layer_delay_s:
                time.sleep(self.layer_delay_s)
            hooks.after_write(layer, "target")
        return self._logits(step.pages, end) if step.wants_logits else None

    def _row(self, layer: int, pages: np.ndarray[Any, Any], position: int) -> np.ndarray[Any, Any]:
        at = position % self._page_size * self._row_bytes
        row: np.ndarray[Any, Any] = self._pool[
            layer, pages[position // self._page_size], at : at + self._row_bytes
        ]
        return row

    def _write_layer(self, layer: int, step: ForwardStep) -> None:
        above = self._row(layer, step.pages, step.start - 1)[:_HASH_BYTES].tobytes() if step.start else b""
        for offset, token in enumerate(step.tokens):
            above = xxhash.xxh3_128_digest(above + token.to_bytes(4, "little"), seed=layer)
            row = self._row(layer, step.pages, step.start + offset)
            row[:] = np.frombuffer(
                (above * (self._row_bytes // _HASH_BYTES + 1))[: self._row_bytes], np.uint8
            )

    def _logits(self, pages: np.ndarray[Any, Any], end: int) -> torch.Tensor:
        digest = xxhash.xxh3_64()
        used = pages[: pages_for(end, self._page_size)]
        for layer in self.geometry.layers:
            rows = self._pool[layer, used].reshape(-1, self._row_bytes)[:end]
            digest.update(rows.tobytes())
        seed = digest.intdigest()
        logits = np.random.default_rng(seed).standard_normal(_VOCABULARY).astype(np.float32)
        logits[_EOS] = -10.0
        logits[32 + seed % 95] += 10.0
        return torch.from_numpy(logits)


class ToyText:
    """Bytes are tokens."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        lines = [f"{m.get('role', 'user')}: {m.get('content', '')}\n" for m in messages]
        return self.encode("".join(lines) + "assistant: ")

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < _EOS).decode(errors="replace")
