"""SGLang's own allocators, trees and page filters behind the interfaces of the benchmark.

Runs in the peer's environment. The library keeps token indices where this project keeps page numbers; the
adapters convert outside the timed calls.
"""

from __future__ import annotations

import os
from array import array
from types import SimpleNamespace
from typing import Any

from bench.peers import stand_ins

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
stand_ins.install()

import numpy as np  # noqa: E402  the environment comes first
import torch  # noqa: E402

from bench.churn import runs_of  # noqa: E402
from bench.lists import Pages  # noqa: E402
from bench.prompts import PAGE_TOKENS, PROMPT_TOKENS, TURN_TOKENS, Tokens  # noqa: E402

torch.set_num_threads(1)

_LAYERS, _WIDTH = 78, 576


def host_pool(pages: int) -> Any:
    """The allocator of its host pool, without the memory."""
    from sglang.srt.mem_cache.pool_host.base import HostKVCache  # type: ignore[import-not-found]

    token_bytes = _WIDTH * 2 * _LAYERS

    class Pool(HostKVCache):  # type: ignore[misc]
        def get_size_per_token(self) -> int:
            return token_bytes

    nothing = lambda *_, **__: None  # noqa: E731  its memory is never asked for
    missing = dict.fromkeys(Pool.__abstractmethods__, nothing)
    concrete = type("Concrete", (Pool,), missing)
    pool = concrete(
        dtype=torch.bfloat16,
        device_capacity_tokens=0,
        size_per_token=token_bytes,
        start_layer=0,
        end_layer=_LAYERS,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE_TOKENS,
        layout="page_first",
        pin_memory=False,
        device="cpu",
        is_dummy=True,
        host_token_capacity=pages * PAGE_TOKENS,
    )
    return _HostPool(pool)


class _HostPool:
    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.release = pool.free

    def free_pages(self) -> int:
        return int(self._pool.available_size()) // PAGE_TOKENS

    def allocate(self, pages: int) -> Any:
        return self._pool.alloc(pages * PAGE_TOKENS)

    def runs(self, handle: Any) -> int:
        return runs_of(handle[::PAGE_TOKENS].numpy() // PAGE_TOKENS)


class _Allocator:
    """What its tree wants of a pool when it frees."""

    device, page_size, size = "cpu", PAGE_TOKENS, 10**9

    def __getattr__(self, name: str) -> Any:
        if name.startswith("free"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def available_size(self) -> int:
        return self.size

    def get_kvcache(self) -> None:
        return None


class RadixTree:
    """Its prefix tree with the Rust core."""

    def __init__(self) -> None:
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "rust"
        from sglang.srt.mem_cache import base_prefix_cache as base  # type: ignore[import-not-found]
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # type: ignore[import-not-found]
        from sglang.srt.mem_cache.radix_cache import RadixKey  # type: ignore[import-not-found]
        from sglang.srt.mem_cache.unified_cache.components import (  # type: ignore[import-not-found]
            ComponentType,
        )
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # type: ignore[import-not-found]

        self._base, self._key = base, RadixKey
        self._tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=_Allocator(),
                page_size=PAGE_TOKENS,
                tree_components=(ComponentType.FULL,),
            )
        )
        core = type(self._tree.tree_core).__name__
        if "Rust" not in core:
            raise RuntimeError(f"the peer's tree runs on {core}")
        self._slots = torch.arange(PROMPT_TOKENS + TURN_TOKENS, dtype=torch.int64)

    def key(self, tokens: Tokens) -> Any:
        """Its own fastest form of a token list."""
        return array("q", tokens.tobytes())

    def insert(self, key: Any, pages: Pages) -> None:
        self._tree.insert(self._base.InsertParams(key=self._key(key), value=self._slots[: len(key)]))

    def match(self, key: Any) -> int:
        result = self._tree.match_prefix(self._base.MatchPrefixParams(key=self._key(key)))
        return int(result.device_prefix_len)

    def evict(self, tokens: int) -> int:
        return int(self._tree.evict(self._base.EvictParams(num_tokens=tokens)).num_tokens_evicted)


def owner_filter(pages: Pages, rank: int, ranks: int) -> Any:
    """A call that picks one rank's part of a chunk."""
    from sglang.srt.disaggregation.utils import filter_kv_indices_for_cp_rank  # type: ignore[import-not-found]

    manager, indices = SimpleNamespace(attn_cp_rank=rank, attn_cp_size=ranks), pages.astype(np.int32)
    return lambda: filter_kv_indices_for_cp_rank(manager, indices, slice(0, len(indices)))


def coalescing(source: Pages, destination: Pages) -> Any:
    """A call that merges pairs into runs."""
    from sglang.srt.disaggregation.common.utils import (  # type: ignore[import-not-found]
        group_concurrent_contiguous,
    )

    ours, theirs = source.astype(np.int32), destination.astype(np.int32)
    return lambda: group_concurrent_contiguous(ours, theirs)
