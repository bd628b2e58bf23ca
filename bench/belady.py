"""What a cache that knows the future would serve: the bound that no policy reaches."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Final

from bench.traces import BLOCK_TOKENS, Request

_NEVER: Final = 1 << 62


def hit_tokens(requests: Sequence[Request], capacity_tokens: int) -> int:
    """Prompt tokens served from a cache that gives up the block whose next use is farthest away.

    Blocks behind a prompt's block go before it, and those of the request at hand stay, as in the real tree.
    """
    return _Belady(requests, capacity_tokens // BLOCK_TOKENS).run()


class _Belady:
    def __init__(self, requests: Sequence[Request], capacity: int) -> None:
        self._prompts = [request.blocks.tolist() for request in requests]
        self._tokens = [request.tokens for request in requests]
        self._capacity = capacity
        self._next = self._next_uses()
        self._parent: dict[int, int] = {}
        self._children: dict[int, int] = {}
        """Of each block in the cache: how many of them stand on it."""
        self._leaves: list[tuple[int, int]] = []
        """Latest next use first; an entry counts as long as it says the block's next use."""
        self._use: dict[int, int] = {}

    def _next_uses(self) -> list[int]:
        """For each request the next one that shares a block, block by block, in one list."""
        upcoming: dict[int, int] = {}
        uses: list[int] = []
        for at in range(len(self._prompts) - 1, -1, -1):
            for block in reversed(self._prompts[at]):
                uses.append(upcoming.get(block, _NEVER))
                upcoming[block] = at
        uses.reverse()
        return uses

    def run(self) -> int:
        served = 0
        uses = iter(self._next)
        for prompt, tokens in zip(self._prompts, self._tokens, strict=True):
            matched = 0
            while matched < len(prompt) and prompt[matched] in self._children:
                matched += 1
            served += min(matched * BLOCK_TOKENS, tokens)
            self._use_blocks(prompt, matched, uses)
        return served

    def _use_blocks(self, prompt: list[int], matched: int, uses: Iterator[int]) -> None:
        pinned = set(prompt)
        for i, block in enumerate(prompt):
            self._use[block] = next(uses)
            if i < matched:
                self._offer(block)
                continue
            if len(self._children) >= self._capacity:
                self._evict(pinned)
            self._children[block] = 0
            if i:
                self._parent[block] = prompt[i - 1]
                self._children[prompt[i - 1]] += 1
            self._offer(block)

    def _offer(self, block: int) -> None:
        if self._children[block] == 0:
            heapq.heappush(self._leaves, (-self._use[block], block))

    def _evict(self, pinned: set[int]) -> None:
        kept: list[tuple[int, int]] = []
        while True:
            use, block = heapq.heappop(self._leaves)
            if self._children.get(block) != 0 or -use != self._use[block]:
                continue
            if block not in pinned:
                break
            kept.append((use, block))
        for entry in kept:
            heapq.heappush(self._leaves, entry)
        del self._children[block]
        parent = self._parent.pop(block, None)
        if parent is not None:
            self._children[parent] -= 1
            self._offer(parent)
