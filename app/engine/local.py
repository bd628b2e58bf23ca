"""Prefill and decode in one place, without any transfer: what every transferred answer is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from app.core.chunks import plan_chunks
from app.core.pages import pages_for
from app.engine.base import Engine, ForwardStep, NoHooks
from app.engine.sampling import Sampler, Sampling


def logits_digest(logits: torch.Tensor) -> str:
    """Bit-exact digest of a float32 logits vector."""
    return xxhash.xxh3_128_hexdigest(logits.contiguous().numpy().tobytes())


def combined_digest(digests: list[int]) -> str:
    """One digest over a list of page digests."""
    return xxhash.xxh3_128_hexdigest(np.asarray(digests, dtype=np.uint64).tobytes())


@dataclass(kw_only=True)
class LocalRun:
    """The output tokens and the digest of every step's logits."""

    tokens: list[int] = field(default_factory=list)
    logits: list[str] = field(default_factory=list)


def run_locally(
    engine: Engine, prompt: list[int], *, chunk_tokens: int, new_tokens: int, **sampling: Any
) -> LocalRun:
    """Generate, greedily by default, in the first pages of the bound pool.

    Chunk boundaries are those that a prefill node with the same `chunk_tokens` uses.
    """
    page_size = engine.geometry.page_size
    pages = np.arange(pages_for(len(prompt) + new_tokens, page_size), dtype=np.int64)
    run, sampler, hooks = LocalRun(), Sampler(Sampling(**sampling)), NoHooks()
    logits: torch.Tensor | None = None
    for chunk in plan_chunks(len(prompt), page_size=page_size, chunk_tokens=chunk_tokens):
        step = ForwardStep(
            tokens=prompt[chunk.start : chunk.end], start=chunk.start, pages=pages, wants_logits=chunk.is_last
        )
        logits = engine.forward(step, hooks)
    at = len(prompt)
    while logits is not None:
        token, _ = sampler.choose(logits)
        run.tokens.append(token)
        run.logits.append(logits_digest(logits))
        if len(run.tokens) >= new_tokens or token in engine.stop_tokens:
            break
        logits = engine.forward(ForwardStep(tokens=[token], start=at, pages=pages), hooks)
        at += 1
    return run
