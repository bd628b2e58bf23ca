"""The draft layer (multi-token prediction) beside a GLM-MoE-DSA, which Hugging Face's classes do not have.

    embedding of token p+1 --norm--\\
                                     > [both] --projection--> one decoder layer --norm--> hidden of draft row p
    hidden state of row p  --norm--/                                                        |
                                                                shared head --> proposal for token p+2
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import nn

from app.engine.base import DraftStep, Forwarded, LayerHooks
from app.errors import InvalidRequest

if TYPE_CHECKING:
    from app.engine.models.hf import HfEngine, RankShare

log = structlog.get_logger(__name__)


class MtpLayer(nn.Module):
    """Two norms, a projection, a decoder layer at the number behind the target's, and a norm."""

    def __init__(self, config: Any) -> None:
        from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
            GlmMoeDsaDecoderLayer,
            GlmMoeDsaRMSNorm,
        )

        super().__init__()
        extended = copy.deepcopy(config)
        extended.indexer_types = [*config.indexer_types, "full"]
        extended.mlp_layer_types = [*config.mlp_layer_types, config.mlp_layer_types[0]]
        width = int(config.hidden_size)
        self.enorm = GlmMoeDsaRMSNorm(width, config.rms_norm_eps)
        self.hnorm = GlmMoeDsaRMSNorm(width, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = GlmMoeDsaDecoderLayer(extended, int(config.num_hidden_layers))
        self.norm = GlmMoeDsaRMSNorm(width, config.rms_norm_eps)

    def start_from(self, target: Any, *, hidden_share: float) -> None:
        """Weights of the target's first layer; the input is the embedding with a share of the hidden state."""
        self.layer.load_state_dict(target.layers[0].state_dict())
        self.norm.load_state_dict(target.norm.state_dict())
        scale = float(target.embed_tokens.weight.pow(2).mean().sqrt())
        width = self.enorm.weight.numel()
        noise = torch.randn(width, width) * (hidden_share / math.sqrt(width))
        self.eh_proj.weight.copy_(torch.cat([torch.eye(width), noise], dim=1) * scale)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, rotary: Any, share: RankShare
    ) -> torch.Tensor:
        """Draft rows `[rows, width]` out of embeddings and hidden states `[1, rows, width]`."""
        states = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        states, _ = self.layer(
            states,
            attention_mask=share.mask,
            position_embeddings=rotary(states, position_ids=share.positions),
            position_ids=share.positions,
            past_key_values=share.cache,
            use_cache=True,
        )
        result: torch.Tensor = self.norm(states)[0]
        return result


class HfDraft:
    """An engine's draft layer: it reads and writes through the engine's ranks and pools."""

    def __init__(self, name: str, engine: HfEngine) -> None:
        self.name = name
        self.hidden_size = engine.hidden_size
        self._engine = engine

    def forward(self, step: DraftStep, hooks: LayerHooks) -> Forwarded:
        count = len(step.tokens)
        if not count or step.hidden.shape != (count, self.hidden_size):
            raise InvalidRequest(f"{count} draft tokens with hidden states {list(step.hidden.shape)}")
        if step.start and self._engine.ranks > 1:
            log.debug(
                "draft.full_materialisation",
                rows=step.start,
                reason="a draft's earlier rows lie with their owners, and no rank keeps a current part of them",
            )
        tokens = torch.tensor([list(step.tokens)])

        def rows(model: Any, share: RankShare) -> torch.Tensor:
            embeddings = model.model.embed_tokens(tokens[:, share.offsets.cpu()].to(share.device))
            given = step.hidden[share.offsets.to(step.hidden.device)].to(embeddings)
            result: torch.Tensor = model.mtp(embeddings, given.unsqueeze(0), model.model.rotary_emb, share)
            return result

        hidden = self._engine.compute(rows, step.start, count, step.pages, "draft", hooks)
        return Forwarded(logits=self._engine.logits(hidden, "last"), hidden=hidden)
