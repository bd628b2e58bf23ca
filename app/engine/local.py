"""Prefill and decode in one place, without any transfer: what every transferred answer is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.core.chunks import plan_chunks
from app.core.ids import PageArray
from app.core.owners import plan_owners
from app.core.pages import pages_for
from app.engine.base import Engine, NoHooks
from app.engine.digests import combined_digest, logits_digest
from app.engine.generate import Continuation, Handover, prefill_chunk
from app.engine.sampling import Sampler, Sampling
from app.errors import BadInput
from app.tiers.device import DevicePool, readable

__all__ = ["LocalPair", "LocalRun", "combined_digest", "logits_digest", "run_locally"]


@dataclass(kw_only=True)
class LocalRun:
    """The output tokens and the digest of the logits that each was chosen from.

    `draft_logits` are the draft's, one for the prompt and one for each step; empty when it did not run.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[str] = field(default_factory=list)
    draft_logits: list[str] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0


def run_locally(
    engine: Engine,
    prompt: list[int],
    *,
    chunk_tokens: int,
    new_tokens: int,
    pages: PageArray | None = None,
    proposals: int = 0,
    cached_tokens: int = 0,
    **sampling: Any,
) -> LocalRun:
    """Generate, greedily by default, in `pages` of the bound pools (by default the first ones).

    Chunk boundaries are those that a prefill node with the same `chunk_tokens` uses. The first `cached_tokens`
    rows are in the pages already, and the draft's too: from a prompt that is the same one token further.
    """
    page_size = engine.geometry.page_size
    needed = pages_for(len(prompt) + new_tokens, page_size)
    if pages is None:
        pages = np.arange(needed, dtype=np.int64)
    if len(pages) < needed:
        raise BadInput(
            f"{len(pages)} pages do not hold a prompt of {len(prompt)} and {new_tokens} new tokens"
        )
    sampler = Sampler(Sampling(**sampling))
    handover = _prefill(
        engine, prompt, pages, sampler, chunk_tokens=chunk_tokens, cached_tokens=cached_tokens
    )
    return _decode(engine, prompt, pages, sampler, handover, new_tokens=new_tokens, proposals=proposals)


class LocalPair:
    """A prefill engine of any number of ranks and a decode engine of one, without a transfer between them.

    The pages go over as a copy of what materialising them from their owners gives. Both engines are bound to
    pools of this object, of `pages` pages for decode and as many for each rank. BadInput for one engine twice: it
    would prefill into one pool and be bound to the other.
    """

    def __init__(self, prefill: Engine, decode: Engine, *, pages: int, ranks: int = 1) -> None:
        if prefill is decode:
            raise BadInput("prefill and decode need an engine each: an engine is bound to one set of pools")
        self._prefill, self._decode = prefill, decode
        self._pools = [DevicePool(prefill.geometry, pages) for _ in range(ranks)]
        self._pool = DevicePool(decode.geometry, pages)
        self._pages, self._ranks = pages, ranks
        prefill.bind(self._pools)
        decode.bind([self._pool])

    def run(
        self, prompt: list[int], *, chunk_tokens: int, new_tokens: int, proposals: int = 0, **sampling: Any
    ) -> LocalRun:
        """As `run_locally`, each side as the node of its role computes it."""
        page_size, sampler = self._prefill.geometry.page_size, Sampler(Sampling(**sampling))
        count = pages_for(len(prompt), page_size)
        owners = plan_owners(count, self._ranks).astype(np.int64)
        places = np.concatenate([np.arange(np.count_nonzero(owners == r)) for r in range(self._ranks)])
        pages = owners * self._pages + places
        handover = _prefill(self._prefill, prompt, pages, sampler, chunk_tokens=chunk_tokens)
        arrays, at = readable(self._pools, pages)
        for name, array in self._pool.host_arrays().items():
            array[:, :count] = arrays[name][:, at]
        table = np.arange(pages_for(len(prompt) + new_tokens, page_size), dtype=np.int64)
        return _decode(
            self._decode, prompt, table, sampler, handover, new_tokens=new_tokens, proposals=proposals
        )

    def close(self) -> None:
        """Let go of the pools; neither engine may run before it is bound again."""
        for pool in (*self._pools, self._pool):
            pool.close()


def _prefill(
    engine: Engine,
    prompt: list[int],
    pages: PageArray,
    sampler: Sampler,
    *,
    chunk_tokens: int,
    cached_tokens: int = 0,
) -> Handover:
    handover: Handover | None = None
    for plan in plan_chunks(
        len(prompt),
        page_size=engine.geometry.page_size,
        chunk_tokens=chunk_tokens,
        cached_tokens=cached_tokens,
    ):
        handover = prefill_chunk(
            engine, prompt, plan, pages, NoHooks(), sampler, drafts=engine.draft is not None
        )
    assert handover is not None
    return handover


def _decode(
    engine: Engine,
    prompt: list[int],
    pages: PageArray,
    sampler: Sampler,
    handover: Handover,
    *,
    new_tokens: int,
    proposals: int,
) -> LocalRun:
    assert handover.logits is not None
    run = LocalRun(tokens=[handover.token], logits=[logits_digest(handover.logits)])
    if handover.draft_logits is not None:
        run.draft_logits.append(logits_digest(handover.draft_logits))
    steps = Continuation(engine, pages, len(prompt), handover, sampler, proposals, digests=True)
    while len(run.tokens) < new_tokens and not engine.stop_tokens & set(run.tokens[-1:]):
        out = steps.step(NoHooks(), at_most=new_tokens - len(run.tokens))
        run.proposed += out.proposed
        run.accepted += out.accepted
        for chosen in out.tokens:
            run.tokens.append(chosen.token)
            run.logits.append(chosen.logits or "")
            if chosen.draft_logits is not None:
                run.draft_logits.append(chosen.draft_logits)
            if chosen.token in engine.stop_tokens:
                break
    return run
