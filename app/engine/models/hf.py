"""Hugging Face causal models over a paged cache, on one rank or on several that share one copy of it.

The models are unpatched: everything particular to pages and ranks happens in the cache that they are given and in
the masks and positions they are called with.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from app.core.geometry import CacheGeometry
from app.core.ids import Owner, PageArray
from app.engine.base import DraftModel, Forwarded, ForwardStep, LayerHooks, Wanted
from app.engine.models.files import ModelFiles
from app.engine.paged.cache import LayerPlan, paged_cache
from app.engine.paged.formats import PageFormat
from app.engine.paged.parallel import RankTeam, SharedAccess, SharedForward
from app.engine.paged.rows import RankPools, RowAccess, RowStatistics, SingleAccess
from app.engine.paged.splits import Split, split_rows
from app.errors import BadInput, InvalidRequest
from app.tiers.device import DevicePool

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """One rank's part of a forward: which of the step's rows it computes, and where their past is."""

    offsets: torch.Tensor
    """Of its rows within the step, ascending."""
    positions: torch.Tensor
    mask: torch.Tensor | None
    """`[1, 1, rows, length]`, True where a row may look; None for a model that makes its own."""
    cache: Any
    device: torch.device


class Family:
    """What differs between kinds of models."""

    model: nn.Module
    """All weights, the draft's included; copied once to each further device."""
    plans: Sequence[LayerPlan]
    geometry: CacheGeometry
    formats: Mapping[str, PageFormat]
    hidden_size: int
    always_masks: bool
    """A single rank needs an explicit mask too."""

    def mask(self, share: RankShare) -> Any:
        """In the form in which the model takes it."""
        return share.mask

    def rows(self, model: nn.Module, tokens: torch.Tensor, share: RankShare) -> torch.Tensor:
        """The target's last hidden states `[rows, hidden_size]` of a rank's tokens."""
        causal: Any = model
        output = causal.model(
            input_ids=tokens,
            attention_mask=self.mask(share),
            position_ids=share.positions,
            past_key_values=share.cache,
            use_cache=True,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Of hidden states, target's or draft's."""
        causal: Any = model
        logits: torch.Tensor = causal.lm_head(hidden)
        return logits


class HfEngine:
    """A model with its pools. Weights and computations are in one dtype, pages in their formats."""

    def __init__(
        self,
        *,
        name: str,
        revision: str,
        family: Family,
        dtype: torch.dtype,
        device: str,
        threads: int,
        ranks: int = 1,
        split: Split = "zigzag",
        draft: Callable[[HfEngine], DraftModel] | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        config: Any = family.model.config
        self.family = family
        self.name = name
        self.revision = revision
        self.compute_dtype = str(dtype).removeprefix("torch.")
        self.vocabulary = int(config.vocab_size)
        self.max_positions = int(config.max_position_embeddings)
        stops = config.eos_token_id
        self.stop_tokens = frozenset(stops if isinstance(stops, list) else [stops])
        self.geometry = family.geometry
        self.hidden_size = family.hidden_size
        self.ranks = ranks
        self.statistics = [RowStatistics() for _ in range(ranks)]
        self._split = split
        family.model.eval().to(device)
        self._models = {next(family.model.parameters()).device: family.model}
        self._team = RankTeam(ranks, threads) if ranks > 1 else None
        self._pools: RankPools | None = None
        self._draft = draft(self) if draft is not None else None

    @property
    def draft(self) -> DraftModel | None:
        return self._draft

    def bind(self, pools: Sequence[DevicePool]) -> None:
        if len(pools) != self.ranks:
            raise BadInput(f"{self.ranks} ranks need as many pools, not {len(pools)}")
        self._pools = RankPools(self.geometry, self.family.formats, pools)
        for device in self._pools.devices:
            if device not in self._models:
                self._models[device] = copy.deepcopy(self.family.model).to(device)

    def forward(self, step: ForwardStep, hooks: LayerHooks) -> Forwarded:
        if not step.tokens:
            raise InvalidRequest("a forward needs at least one token")
        tokens = torch.tensor([list(step.tokens)])

        def rows(model: nn.Module, share: RankShare) -> torch.Tensor:
            return self.family.rows(model, tokens[:, share.offsets.cpu()].to(share.device), share)

        hidden = self.compute(rows, step.start, len(step.tokens), step.pages, "target", hooks)
        return Forwarded(
            logits=self.logits(hidden, step.logits), hidden=hidden if self._draft is not None else None
        )

    def logits(self, hidden: torch.Tensor, wanted: Wanted) -> torch.Tensor | None:
        """Float32 on CPU, of the rows that are wanted."""
        if wanted == "none":
            return None
        with torch.inference_mode():
            chosen = hidden if wanted == "all" else hidden[-1:]
            return self.family.logits(self._models[hidden.device], chosen).float().cpu()

    def compute(
        self,
        rows: Callable[[nn.Module, RankShare], torch.Tensor],
        start: int,
        count: int,
        pages: PageArray,
        owner: Owner,
        hooks: LayerHooks,
    ) -> torch.Tensor:
        """Run `rows` over `count` rows at `start` on every rank; their results in the order of the rows."""
        if self._pools is None:
            raise BadInput("the engine is not bound to its pools")
        if self._team is None:
            return self._compute_alone(self._pools, rows, start, count, pages, hooks)
        return self._compute_shared(self._pools, self._team, rows, start, count, pages, owner, hooks)

    def _compute_alone(
        self,
        pools: RankPools,
        rows: Callable[[nn.Module, RankShare], torch.Tensor],
        start: int,
        count: int,
        pages: PageArray,
        hooks: LayerHooks,
    ) -> torch.Tensor:
        device = pools.devices[0]
        with torch.inference_mode():
            access = SingleAccess(pools, pages, start, count, hooks, self.statistics[0])
            offsets = torch.arange(count, device=device)
            return rows(
                self._models[device], self._share(access, offsets, start, count, device, explicit=False)
            )

    def _compute_shared(
        self,
        pools: RankPools,
        team: RankTeam,
        rows: Callable[[nn.Module, RankShare], torch.Tensor],
        start: int,
        count: int,
        pages: PageArray,
        owner: Owner,
        hooks: LayerHooks,
    ) -> torch.Tensor:
        shared = SharedForward(pools, pages, start, count, hooks)
        parts = split_rows(count, self.ranks, self._split)
        schedule = [call for plan in self.family.plans if plan.owner == owner for call in plan.schedule]

        def work(rank: int) -> torch.Tensor | None:
            device = pools.devices[rank]
            with torch.inference_mode(), _on(device):
                access = SharedAccess(shared, rank, start + parts[rank], self.statistics[rank])
                if not len(parts[rank]):
                    access.idle(schedule)
                    return None
                offsets = torch.from_numpy(parts[rank]).to(device)
                share = self._share(access, offsets, start, count, device, explicit=True)
                return rows(self._models[device], share).to(pools.devices[0])

        results = team.run(work, shared.abort)
        with torch.inference_mode():
            computed = [(part, result) for part, result in zip(parts, results, strict=True) if len(part)]
            order = torch.cat([torch.from_numpy(part) for part, _ in computed]).to(pools.devices[0])
            together = torch.cat([result for _, result in computed if result is not None])
            return torch.empty_like(together).index_copy_(0, order, together)

    def _share(
        self,
        access: RowAccess,
        offsets: torch.Tensor,
        start: int,
        count: int,
        device: torch.device,
        *,
        explicit: bool,
    ) -> RankShare:
        positions = start + offsets
        mask = None
        if explicit or self.family.always_masks:
            keys = torch.arange(start + count, device=device)
            mask = (keys <= positions.unsqueeze(1)).unsqueeze(0).unsqueeze(0)
        return RankShare(
            offsets=offsets,
            positions=positions.unsqueeze(0),
            mask=mask,
            cache=paged_cache(self.family.plans, access),
            device=device,
        )

    def close(self) -> None:
        """End the ranks' threads. The pools stay their owner's."""
        if self._team is not None:
            self._team.close()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """CUDA's current device is a matter of each thread."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class HfText:
    """The model's own tokenizer and chat template."""

    def __init__(self, files: ModelFiles) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(files.folder, local_files_only=True)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
