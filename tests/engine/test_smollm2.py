"""Real weights through every way of keeping K and V."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.base import Engine, ForwardStep, NoHooks
from tests.engine.rig import bound, loaded, prompt_of, table

pytestmark = pytest.mark.real
PROMPT = prompt_of(150)


@cache
def smol(**options: Any) -> Engine:
    """Engines are kept for this module: loading one takes seconds."""
    return loaded("smollm2", **options)


def last_rows(engine: Engine, pages: np.ndarray[Any, Any]) -> torch.Tensor:
    """Logits of the last prompt row and of a step behind it."""
    found = []
    for start, end in ((0, 128), (128, 150)):
        step = ForwardStep(tokens=PROMPT[start:end], start=start, pages=pages)
        found.append(engine.forward(step, NoHooks()).logits)
    found.append(engine.forward(ForwardStep(tokens=[5], start=150, pages=pages), NoHooks()).logits)
    return torch.cat([logits for logits in found if logits is not None])


def test_k_and_v_apart_compute_what_they_compute_together() -> None:
    """Two buffers or one: other pages and other strides, and the same logits within rounding."""
    together, apart = smol(), smol(kv="apart")
    assert [b.name for b in together.geometry.buffers] == ["target.kv"]
    assert [b.name for b in apart.geometry.buffers] == ["target.k", "target.v"]
    assert together.geometry.page_bytes() == apart.geometry.page_bytes()
    found = []
    for engine in (together, apart):
        bound(engine)
        found.append(last_rows(engine, np.array([3, 1, 7])))
    assert float((found[0] - found[1]).abs().max()) < 1e-3


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8"])
def test_a_rounded_cache_gives_equal_bits_wherever_its_pages_are(cache_dtype: str) -> None:
    """Moved pages change nothing, and the distribution stays close to that of a cache without rounding."""
    engine, exact = smol(cache_dtype=cache_dtype), smol()
    bound(engine)
    bound(exact)
    first, second = (last_rows(engine, pages) for pages in (np.arange(3), np.array([9, 2, 5])))
    assert torch.equal(first, second)
    wanted = torch.softmax(last_rows(exact, np.arange(3)), -1)
    assert float((torch.softmax(first, -1) - wanted).abs().sum(-1).max()) < 0.5


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_two_ranks_compute_what_one_computes(split: str) -> None:
    """Grouped-query attention over a full view of two ranks' pages: repeatable, and one rank's within rounding."""
    alone, shared = smol(), smol(ranks=2, split=split)
    bound(alone)
    bound(shared, ranks=2)
    pages = table(2, 16, 3)
    first, second = last_rows(shared, pages), last_rows(shared, pages)
    assert torch.equal(first, second)
    assert float((first - last_rows(alone, np.arange(3))).abs().max()) < 1e-2
