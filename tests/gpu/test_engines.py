"""Engines on CUDA: the same bits from other pages, from moved pages, and from ranks on devices of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from app.core.chunks import plan_chunks
from app.core.owners import plan_owners
from app.core.pages import pages_for
from app.engine.base import Engine, NoHooks
from app.engine.digests import logits_digest
from app.engine.generate import Continuation, Handover, prefill_chunk
from app.engine.load import load_engine
from app.engine.sampling import Sampler, Sampling
from app.tiers.device import DevicePool, readable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE, TOKENS, NEW, PAGES = 64, 400, 8, 24
PROMPT = [(7 * i + i // 13) % 251 for i in range(TOKENS)]


def engine_of(dtype: str, ranks: int = 1) -> Engine:
    engine, _ = load_engine(
        name="glm-dsa-tiny",
        page_size=PAGE,
        dtype="bfloat16",
        device="cuda",
        threads=1,
        cache_dtype=dtype,
        ranks=ranks,
    )
    return engine


def pools_of(engine: Engine, ranks: int = 1) -> list[DevicePool]:
    names = [f"cuda:{rank}" for rank in range(ranks)] if ranks > 1 else ["cuda"]
    pools = [DevicePool(engine.geometry, PAGES, device=name) for name in names]
    engine.bind(pools)
    return pools


def prefill(engine: Engine, pages: Any, chunk: int = 256) -> Handover:
    handover = None
    for plan in plan_chunks(TOKENS, page_size=PAGE, chunk_tokens=chunk):
        handover = prefill_chunk(engine, PROMPT, plan, pages, NoHooks(), Sampler(Sampling()), drafts=True)
    assert handover is not None
    return handover


def decode(engine: Engine, pages: Any, handover: Handover) -> tuple[list[int], list[str | None]]:
    steps = Continuation(engine, pages, TOKENS, handover, Sampler(Sampling()), 2, digests=True)
    tokens, digests = [handover.token], []
    while len(tokens) < NEW:
        out = steps.step(NoHooks(), at_most=NEW - len(tokens))
        tokens += [t.token for t in out.tokens]
        digests += [d for t in out.tokens for d in (t.logits, t.draft_logits)]
    return tokens, digests


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_other_pages_give_the_same_bits(dtype: str) -> None:
    """A prompt in pages of another order gives the same logits, main and draft, and tokens."""
    engine = engine_of(dtype)
    pools_of(engine)
    count = pages_for(TOKENS + NEW, PAGE)
    seen = []
    for pages in (np.arange(count), np.arange(PAGES)[::-1][:count].copy()):
        handover = prefill(engine, pages)
        assert handover.logits is not None
        seen.append((logits_digest(handover.logits), decode(engine, pages, handover)))
    assert seen[0] == seen[1]


@pytest.mark.contract(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_pages_that_were_moved_decode_alike(dtype: str, ranks: int) -> None:
    """Pages of one rank or of two devices, materialised into another pool, decode alike when moved again."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} devices")
    sender, receiver = engine_of(dtype, ranks), engine_of(dtype)
    pools = pools_of(sender, ranks)
    prompt_pages = pages_for(TOKENS, PAGE)
    owners = plan_owners(prompt_pages, ranks).astype(np.int64)
    places = np.concatenate([np.arange(np.count_nonzero(owners == r)) for r in range(ranks)])
    pages = owners * PAGES + places
    seen = []
    for order in (1, -1):
        handover = prefill(sender, pages)
        target = pools_of(receiver)[0]
        table = np.arange(PAGES)[::order][: pages_for(TOKENS + NEW, PAGE)].copy()
        arrays, at = readable(pools, pages)
        index = torch.from_numpy(table[:prompt_pages]).to(target.device)
        for name, array in arrays.items():
            target.buffers[name].tensor[:, index] = torch.from_numpy(array[:, at]).to(target.device)
        seen.append(decode(receiver, table, handover))
    assert seen[0] == seen[1]
    held = [int(pool.buffers["target.latent"].tensor.flatten(2).any(2).any(0).sum()) for pool in pools]
    assert sum(held) == prompt_pages
    assert max(held) - min(held) <= 1
