"""A Hugging Face cache over the pages of a pool.

    one page of one layer (item_bytes):   [ K | V ] x [page_size tokens] x [heads] x [head_dim]

A layer's `update` writes the new rows into the pool, fires the hooks and hands the attention a gathered
view of all rows so far. The model asks layer 0 for its length, so masks and positions come out right
when a cache starts at the length of a prefix.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from app.core.ids import PageArray
from app.core.pages import pages_for
from app.engine.base import LayerHooks
from app.errors import InvalidRequest


class PagedLayer(CacheLayerMixin):
    """One layer of one sequence. `view` is `[pages, 2, page_size, heads, head_dim]` of the whole pool."""

    is_compileable = False
    is_croppable = True

    def __init__(
        self, layer: int, view: torch.Tensor, pages: torch.Tensor, start: int, hooks: LayerHooks
    ) -> None:
        super().__init__()
        self.layer = layer
        self.length = start
        self._view = view
        self._pages = pages
        self._page_size = view.shape[2]
        self._hooks = hooks
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The pool exists already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, count = self.length, key_states.shape[2]
        if start:
            self._hooks.before_read(self.layer)
        self._write(start, key_states, value_states)
        self.length = start + count
        self._hooks.after_write(self.layer, "target")
        if not start:
            return key_states, value_states
        return self._read()

    def _write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        positions = torch.arange(start, start + keys.shape[2], device=self._view.device)
        page, offset = self._pages[positions // self._page_size], positions % self._page_size
        self._view[page, 0, offset] = keys[0].transpose(0, 1)
        self._view[page, 1, offset] = values[0].transpose(0, 1)

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows so far as two `[1, heads, length, head_dim]` tensors."""
        used = self._pages[: pages_for(self.length, self._page_size)]
        rows = self._view[used]
        both = rows.transpose(0, 1).reshape(2, -1, *rows.shape[3:])[:, : self.length]
        keys, values = both.transpose(1, 2).unsqueeze(1)
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, max_length: int) -> None:
        """Forget rows beyond a length; their bytes are overwritten by the next forward."""
        self.length = min(self.length, max_length)


def paged_cache(
    views: list[torch.Tensor], pages: PageArray, start: int, count: int, hooks: LayerHooks
) -> Cache:
    """A cache for one forward of `count` tokens at `start`. InvalidRequest when the table is too short."""
    page_size = views[0].shape[2]
    if pages_for(start + count, page_size) > len(pages):
        raise InvalidRequest(f"{len(pages)} pages do not hold {start + count} tokens")
    table = torch.from_numpy(pages).to(views[0].device)
    return Cache(layers=[PagedLayer(i, view, table, start, hooks) for i, view in enumerate(views)])
