"""A tiny GLM-MoE-DSA made from a seed: latent attention, a shared sparse-attention index, a draft layer.

    layer     0        1        2        3        4
    owner     target   target   target   target   draft
    latent    yes      yes      yes      yes      yes
    index     full     shared   full     shared   full       (the default; index_topk_freq and its offset change it)

There are no weights on disk: config and seed decide everything. Bytes are tokens. Random weights know no language,
but they tell wrong pages: 256 of all rows are attended to, so index keys matter from 257 rows on. The layers above
the first add little to what it computes, and the draft starts from the first one's weights: so it is right about
one time in three, as a trained one would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import Owner
from app.engine.models.hf import Family, HfEngine, RankShare
from app.engine.models.mtp import HfDraft, MtpLayer
from app.engine.paged.cache import LayerPlan
from app.engine.paged.formats import PageFormat, index_format, latent_format
from app.engine.paged.splits import Split
from app.errors import SettingsError

SEED = 1
_EMBEDDING_SCALE = 3.0
_UPPER_LAYERS_SCALE = 0.3
_DRAFT_HIDDEN_SHARE = 0.1
"""Of the draft's input that comes from the hidden state: enough to change every bit of its output."""

_CONFIG: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 256,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 1,
    "initializer_range": 0.1,
    "max_position_embeddings": 16384,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 256,
    "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
}


class GlmFamily(Family):
    """Latent of every layer, an index key where a layer has an indexer; the draft's own behind them."""

    always_masks = True

    def __init__(
        self, model: nn.Module, *, page_size: int, dtype: torch.dtype, cache_dtype: str, draft: bool
    ) -> None:
        config: Any = model.config
        targets = int(config.num_hidden_layers)
        self.model = model
        self.hidden_size = int(config.hidden_size)
        plans = [_plan(layer, "target", kind) for layer, kind in enumerate(config.indexer_types)]
        if draft:
            plans.append(_plan(targets, "draft", "full"))
        formats: dict[str, PageFormat] = {}
        latent = latent_format(
            page_size=page_size,
            latent=int(config.kv_lora_rank),
            rotary=int(config.qk_rope_head_dim),
            cache_dtype=cache_dtype,
            compute=dtype,
        )
        index = index_format(page_size=page_size, width=int(config.index_head_dim), compute=dtype)
        buffers = []
        owners: list[Owner] = ["target", "draft"] if draft else ["target"]
        for owner in owners:
            mine = [plan for plan in plans if plan.owner == owner]
            indexed = [plan for plan in mine if plan.index is not None]
            for kind, form, used in (("latent", latent, mine), ("index", index, indexed)):
                spec = BufferSpec(
                    owner=owner,
                    kind=kind,
                    layer_ids=tuple(plan.layer for plan in used),
                    item_bytes=form.item_bytes,
                    dtype=form.name,
                )
                buffers.append(spec)
                formats[spec.name] = form
        self.plans = plans
        self.formats = formats
        self.geometry = CacheGeometry(page_size=page_size, buffers=tuple(buffers))

    def mask(self, share: RankShare) -> Any:
        return {"indexed_attention": share.mask}


def _plan(layer: int, owner: Owner, kind: str) -> LayerPlan:
    index = f"{owner}.index" if kind == "full" else None
    return LayerPlan(layer=layer, owner=owner, stores=(f"{owner}.latent",), index=index)


def glm_config(overrides: Mapping[str, Any] | None = None) -> Any:
    """The config with overrides merged in before it is read: the layers' kinds derive from it."""
    from transformers import GlmMoeDsaConfig

    values = {**_CONFIG, **(overrides or {})}
    unknown = sorted(set(overrides or {}) - set(_CONFIG) - set(GlmMoeDsaConfig().to_dict()) - _DERIVING)
    if unknown:
        raise SettingsError(f"model.overrides: the model's config knows no {', '.join(unknown)}")
    config: Any = GlmMoeDsaConfig(**values)
    if config.indexer_types[0] != "full":
        raise SettingsError(f"model.overrides: layer 0 has no index to share: {config.indexer_types}")
    return config


_DERIVING = {"index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"}
"""Read by the config and not kept in it."""


def build_glm(config: Any, seed: int = SEED) -> nn.Module:
    """Model and draft layer (`model.mtp`) with seeded weights; the same on every machine of one torch version."""
    from transformers import GlmMoeDsaForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = GlmMoeDsaForCausalLM._from_config(
            config, attn_implementation="sdpa", experts_implementation="eager", dtype=torch.float32
        )
        model.model.embed_tokens.weight.mul_(_EMBEDDING_SCALE)
        model.lm_head.weight[int(config.eos_token_id)] = 0  # answers run to their length
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(_UPPER_LAYERS_SCALE)
            for name, weight in layer.mlp.named_parameters():
                if "down_proj" in name:
                    weight.mul_(_UPPER_LAYERS_SCALE)
        mtp = MtpLayer(model.config)
        mtp.start_from(model.model, hidden_share=_DRAFT_HIDDEN_SHARE)
        model.mtp = mtp
    built: nn.Module = model
    return built


def revision_of(model: Any, seed: int) -> str:
    """Digest of config, seed and weights (those depend on torch's generators too)."""
    digest = xxhash.xxh3_128(f"{model.config.to_json_string()} {model.config.indexer_types} {seed}".encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_glm(
    *,
    name: str,
    page_size: int,
    dtype: torch.dtype,
    cache_dtype: str,
    device: str,
    threads: int,
    ranks: int,
    split: Split,
    draft: bool,
    overrides: Mapping[str, Any] | None,
) -> HfEngine:
    """Build the model from its seed: a tenth of a second."""
    model = build_glm(glm_config(overrides))
    revision = revision_of(model, SEED)
    family = GlmFamily(
        model.to(dtype), page_size=page_size, dtype=dtype, cache_dtype=cache_dtype, draft=draft
    )
    return HfEngine(
        name=name,
        revision=revision,
        family=family,
        dtype=dtype,
        device=device,
        threads=threads,
        ranks=ranks,
        split=split,
        draft=(lambda engine: HfDraft(f"{name}-mtp", engine)) if draft else None,
    )
