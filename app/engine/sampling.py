"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """`temperature` 0 is greedy. Limits apply in the order top-k, top-p. `seed` makes draws repeatable."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class Sampler:
    """Draws tokens for one request."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed)
        else:
            self._generator.seed()

    @property
    def greedy(self) -> bool:
        """The same logits always give the same token."""
        return self._sampling.temperature <= 0

    def choose(self, logits: torch.Tensor) -> tuple[int, float]:
        """A token and its log-probability under the unmodified distribution."""
        log_probabilities = torch.log_softmax(logits, dim=-1)
        token = int(torch.argmax(logits)) if self.greedy else self._draw(logits / self._sampling.temperature)
        return token, float(log_probabilities[token])

    def _draw(self, logits: torch.Tensor) -> int:
        ordered, indices = torch.sort(torch.softmax(logits, dim=-1), descending=True)
        if self._sampling.top_k > 0:
            ordered = ordered[: self._sampling.top_k]
        before = torch.cumsum(ordered, dim=0) - ordered
        kept = ordered[before < self._sampling.top_p] if self._sampling.top_p < 1 else ordered
        drawn = torch.multinomial(kept, 1, generator=self._generator)
        return int(indices[int(drawn)])
