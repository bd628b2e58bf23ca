"""Small engines with pools, and what tests ask of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.core.ids import PageArray, Source
from app.engine.base import DraftStep, Engine, ForwardStep, LayerHooks, NoHooks
from app.engine.load import load_engine
from app.tiers.device import DevicePool

PAGE = 64


def prompt_of(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 256, length).tolist()
    return tokens


def loaded(name: str, **options: Any) -> Engine:
    engine, _ = load_engine(name=name, page_size=PAGE, dtype="auto", device="cpu", threads=1, **options)
    return engine


def bound(engine: Engine, *, pages: int = 16, ranks: int = 1) -> list[DevicePool]:
    """Pools of `pages` pages a rank, bound to the engine."""
    pools = [DevicePool(engine.geometry, pages, 1) for _ in range(ranks)]
    engine.bind(pools)
    return pools


def table(ranks: int, pages_per_rank: int, count: int, seed: int = 3) -> PageArray:
    """`count` logical pages in no order, owned by the ranks in turn."""
    rng = np.random.default_rng(seed)
    physical = [rng.permutation(pages_per_rank) for _ in range(ranks)]
    pages = [rank * pages_per_rank + physical[rank][i // ranks] for i in range(count) for rank in [i % ranks]]
    return np.asarray(pages, dtype=np.int64)


def page_bytes(pools: Sequence[DevicePool], pages: PageArray) -> dict[str, npt.NDArray[np.uint8]]:
    """Each buffer's bytes of the given logical pages, in order: `[layers, pages, item_bytes]`."""
    per_rank = pools[0].pages
    return {
        name: np.stack(
            [pools[p // per_rank].buffers[name].tensor[:, p % per_rank].numpy() for p in pages.tolist()],
            axis=1,
        )
        for name in pools[0].buffers
    }


def forward_all(
    engine: Engine,
    tokens: Sequence[int],
    pages: PageArray,
    *,
    chunk: int = 256,
    hooks: LayerHooks | None = None,
    start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every row from `start` on, and the draft's logits of the last one (empty without a draft)."""
    target: list[torch.Tensor] = []
    draft = torch.empty(0)
    for at in range(start, len(tokens), chunk):
        part = list(tokens[at : at + chunk])
        step = ForwardStep(tokens=part, start=at, pages=pages, logits="all")
        out = engine.forward(step, hooks or NoHooks())
        assert out.logits is not None
        target.append(out.logits)
        if engine.draft is not None:
            assert out.hidden is not None
            after = [*tokens[at + 1 : at + len(part) + 1], 7][: len(part)]
            given = DraftStep(tokens=after, start=at, pages=pages, hidden=out.hidden)
            logits = engine.draft.forward(given, hooks or NoHooks()).logits
            assert logits is not None
            draft = logits[-1]
    return torch.cat(target), draft


class Notes:
    """Hooks that remember what they were called for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.sources: dict[int, Source] = {}

    def before_read(self, layer: int) -> None:
        self.calls.append(("read", layer))

    def after_write(self, layer: int, source: Source) -> None:
        self.calls.append(("write", layer))
        self.sources[layer] = source

    def of(self, kind: str) -> list[int]:
        return [layer for name, layer in self.calls if name == kind]
