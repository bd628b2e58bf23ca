"""The order of last use, page by page: the tree under `lru` against its slow model, with many prompts in it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from app.core.prefix_tree import Namespace, PrefixTree
from tests.native.tree_model import Hold, Key, TreeModel

SPACE = Namespace("order")
PAGE = 4
POOL = 300


class Pair:
    """The tree and its model, under the same operations."""

    def __init__(self) -> None:
        self.tree = PrefixTree(page_size=PAGE, l1_pages=POOL, policy="lru")
        self.model = TreeModel(PAGE)
        self.free = list(range(POOL))
        self.now = 0
        self.pins: list[tuple[int, Hold]] = []
        self.partial_evictions = 0

    def match(self, prompt: Key, *, pin: bool) -> None:
        found = self.tree.match(SPACE, np.array(prompt), pin=pin)
        self.now += 1
        self.model.use(prompt, len(prompt), self.now)
        if pin and found.node:
            info = self.tree.node(found.node)
            last = int(info.l1_pages[-1])
            (end,) = (key for key, entry in self.model.entries.items() if entry.l1 == last)
            assert len(end) == found.tokens  # a use ends where a node does
            self.pins.append((found.node, self.model.hold(end)))

    def insert(self, prompt: Key) -> None:
        count = -(-len(prompt) // PAGE)
        pages, self.free = self.free[:count], self.free[count:]
        expected = self.model.insert(prompt, pages, [0] * count)
        done = self.tree.insert(SPACE, np.array(prompt), np.array(pages))
        assert done.duplicates.tolist() == expected.duplicates
        self.free += [pages[i] for i in expected.duplicates]
        # the page of a tail that another one of more tokens stands beside is not needed either
        self.free += sorted(set(pages) - self.model.pages_of(1) - set(self.free))
        self.now += 1
        self.model.use(prompt, expected.tokens, self.now)

    def evict(self, count: int) -> None:
        gone: set[Key] = set()
        for _ in range(count):
            leaves = [(self.model.entries[key].last, key) for key in self.model.leaves(1, gone)]
            gone |= {min(leaves)[1]} if leaves else set()
        self.partial_evictions += 0 < len(gone) < len(self.model.evictable(1))
        expected = {self.model.entries[key].l1 for key in gone}
        pages = self.tree.evict(1, count).tolist()
        assert set(pages) == expected
        self.model.evict(1, set(pages))
        self.free += pages

    def unpin(self) -> None:
        node, hold = self.pins.pop()
        self.tree.unpin(node)
        self.model.release(hold)


@pytest.mark.parametrize("seed", range(6))
def test_lru_evicts_page_by_page_what_was_used_longest_ago(seed: int, track: Any) -> None:
    """Whatever was matched, inserted and pinned before, an eviction takes the pages of the oldest last use."""
    pair, chance = Pair(), random.Random(seed)
    track(pair.tree)
    for _ in range(400):
        prompt = tuple(chance.choices((0, 1), k=chance.randint(1, 26)))
        roll = chance.random()
        if roll < 0.45 and len(pair.free) > 10:
            pair.insert(prompt)
        elif roll < 0.75:
            pair.match(prompt, pin=roll < 0.55)
        elif roll < 0.85 and pair.pins:
            pair.unpin()
        else:
            pair.evict(chance.randint(1, 6))
        pair.tree.check_integrity()
    assert pair.partial_evictions > 50
