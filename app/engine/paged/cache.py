"""A Hugging Face cache over the pages of a pool.

A layer's accessors write the new rows, fire the hooks and hand the attention all rows so far. The model asks
layer 0 for its length, so masks and positions come out right when a cache starts at the length of a prefix.

    accessor            stores                          ends the layer
    update              K and V, or latent and rotary   where there is no index
    update_indexer      the index key                   always: the latent has been written before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from app.core.ids import Owner
from app.engine.paged.rows import RowAccess


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Where one layer's rows go: names of buffers. `stores` has one entry (both parts) or two (one each)."""

    layer: int
    owner: Owner
    stores: tuple[str, ...]
    index: str | None = None

    @property
    def schedule(self) -> list[tuple[int, tuple[str, ...], Owner | None]]:
        """The accessors of this layer in the order in which a model calls them."""
        if self.index is None:
            return [(self.layer, self.stores, self.owner)]
        return [(self.layer, self.stores, None), (self.layer, (self.index,), self.owner)]


class PagedLayer(CacheLayerMixin):
    """One layer of one sequence, for one forward."""

    is_compileable = False
    is_croppable = True

    def __init__(self, plan: LayerPlan, access: RowAccess) -> None:
        super().__init__()
        self.plan = plan
        self.length = access.start
        self._access = access
        self.is_initialized = True
        self.is_indexer_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The pool exists already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[1, heads, rows, width]`, the new ones in and all of them out."""
        plan = self.plan
        current = [_flat(key_states), _flat(value_states)]
        ends = plan.owner if plan.index is None else None
        if len(plan.stores) == 1:
            (name,) = plan.stores
            full = self._access.exchange(plan.layer, {name: torch.cat(current, dim=1)}, ends=ends)
            parts = full[name].split([part.shape[1] for part in current], dim=1)
        else:
            full = self._access.exchange(plan.layer, dict(zip(plan.stores, current, strict=True)), ends=ends)
            parts = tuple(full[name] for name in plan.stores)
        self.length += key_states.shape[2]
        return _headed(parts[0], key_states), _headed(parts[1], value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Index keys `[1, rows, width]`, the new ones in and all of them out."""
        plan = self.plan
        assert plan.index is not None
        full = self._access.exchange(plan.layer, {plan.index: indexer_key_states[0]}, ends=plan.owner)
        return full[plan.index].unsqueeze(0)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, max_length: int) -> None:
        """Forget rows beyond a length; their bytes are overwritten by the next forward."""
        self.length = min(self.length, max_length)


def paged_cache(plans: Sequence[LayerPlan], access: RowAccess) -> Cache:
    """A cache for one forward, the layers in the model's order."""
    return Cache(layers=[PagedLayer(plan, access) for plan in plans])


def _flat(states: torch.Tensor) -> torch.Tensor:
    """`[1, heads, rows, width]` to `[rows, heads * width]`."""
    return states[0].transpose(0, 1).flatten(1)


def _headed(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The other way, with the heads and width of `like`."""
    headed: torch.Tensor = rows.unflatten(1, (like.shape[1], like.shape[3])).transpose(0, 1)
    return headed.unsqueeze(0)
