"""Grouped-query models with K and V: in one buffer, or in two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from app.core.geometry import BufferSpec, CacheGeometry
from app.engine.models.files import ModelFiles
from app.engine.models.hf import Family, HfEngine
from app.engine.paged.cache import LayerPlan
from app.engine.paged.formats import PageFormat, key_value_format
from app.engine.paged.splits import Split

KvBuffers = Literal["together", "apart"]


class LlamaFamily(Family):
    """K/V of every layer; the model makes its own mask when it computes all rows."""

    always_masks = False

    def __init__(
        self, model: nn.Module, *, page_size: int, dtype: torch.dtype, cache_dtype: str, kv: KvBuffers
    ) -> None:
        config: Any = model.config
        self.model = model
        self.hidden_size = int(config.hidden_size)
        self.geometry, self.formats = kv_geometry(
            config, page_size=page_size, dtype=dtype, cache_dtype=cache_dtype, kv=kv
        )
        self.plans = [
            LayerPlan(layer=i, owner="target", stores=tuple(self.formats))
            for i in range(int(config.num_hidden_layers))
        ]


def kv_geometry(
    config: Any, *, page_size: int, dtype: torch.dtype, cache_dtype: str, kv: KvBuffers
) -> tuple[CacheGeometry, Mapping[str, PageFormat]]:
    """Buffers of every layer's K and V, and how their pages are written. Needs the config only."""
    width = int(config.num_key_value_heads) * int(config.head_dim)
    parts = {"kv": (width, width)} if kv == "together" else {"k": (width,), "v": (width,)}
    formats = {
        f"target.{kind}": key_value_format(
            page_size=page_size, widths=widths, cache_dtype=cache_dtype, compute=dtype
        )
        for kind, widths in parts.items()
    }
    buffers = tuple(
        BufferSpec(
            owner="target",
            kind=name.removeprefix("target."),
            layer_ids=tuple(range(int(config.num_hidden_layers))),
            item_bytes=form.item_bytes,
            dtype=form.name,
        )
        for name, form in formats.items()
    )
    return CacheGeometry(page_size=page_size, buffers=buffers), formats


def load_llama(
    *,
    name: str,
    files: ModelFiles,
    page_size: int,
    dtype: torch.dtype,
    cache_dtype: str,
    kv: KvBuffers,
    device: str,
    threads: int,
    ranks: int,
    split: Split,
) -> HfEngine:
    """A model from a folder in Hugging Face's format."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=dtype, local_files_only=True)
    family = LlamaFamily(model, page_size=page_size, dtype=dtype, cache_dtype=cache_dtype, kv=kv)
    return HfEngine(
        name=name,
        revision=files.revision,
        family=family,
        dtype=dtype,
        device=device,
        threads=threads,
        ranks=ranks,
        split=split,
    )
