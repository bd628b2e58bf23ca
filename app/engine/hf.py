"""Hugging Face causal models over a paged cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from app.core.geometry import BufferSpec, CacheGeometry
from app.engine.base import ForwardStep, LayerHooks
from app.engine.models import ModelFiles
from app.engine.paged_cache import paged_cache
from app.tiers.device import DevicePool

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class HfEngine:
    """A grouped-query model. Weights stay in `dtype`, and so do K and V."""

    def __init__(
        self,
        *,
        name: str,
        files: ModelFiles,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        threads: int,
    ) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._dtype = dtype
        self._model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=dtype, local_files_only=True)
        self._model.eval().to(self._device)
        config = self._model.config
        self._heads = int(config.num_key_value_heads)
        self._head_dim = int(config.head_dim)
        self._page_size = page_size
        self._views: list[torch.Tensor] = []
        self.name = name
        self.revision = files.revision
        self.compute_dtype = str(dtype).removeprefix("torch.")
        self.vocabulary = int(config.vocab_size)
        self.max_positions = int(config.max_position_embeddings)
        stops = config.eos_token_id
        self.stop_tokens = frozenset(stops if isinstance(stops, list) else [stops])
        item = 2 * page_size * self._heads * self._head_dim * dtype.itemsize
        self.geometry = CacheGeometry(
            page_size=page_size,
            buffers=(
                BufferSpec(
                    owner="target",
                    kind="kv",
                    layer_ids=tuple(range(int(config.num_hidden_layers))),
                    item_bytes=item,
                    dtype=self.compute_dtype,
                ),
            ),
        )

    def bind(self, pool: DevicePool) -> None:
        shape = (2, self._page_size, self._heads, self._head_dim)
        (spec,) = self.geometry.buffers
        self._views = [pool.typed(spec.name, layer, self._dtype, shape) for layer in spec.layer_ids]

    def forward(self, step: ForwardStep, hooks: LayerHooks) -> torch.Tensor | None:
        with torch.inference_mode():
            cache = paged_cache(self._views, step.pages, step.start, len(step.tokens), hooks)
            positions = torch.arange(step.start, step.start + len(step.tokens), device=self._device)
            output = self._model.model(
                input_ids=torch.tensor([list(step.tokens)], device=self._device),
                position_ids=positions.unsqueeze(0),
                past_key_values=cache,
                use_cache=True,
            )
            if not step.wants_logits:
                return None
            logits: torch.Tensor = self._model.lm_head(output.last_hidden_state[0, -1])
            return logits.float().cpu()


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
