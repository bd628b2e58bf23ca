"""This project's core behind the interfaces of the benchmark."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.core.extents import PageExtents
from app.core.ids import PageArray
from app.core.prefix_tree import Namespace, PrefixTree
from bench.churn import runs_of
from bench.prompts import PAGE_TOKENS, TURNS, Pages, Tokens


class Extents:
    """The host pool's allocator; a handle is the array of its pages, as its callers get it."""

    def __init__(self, pages: int) -> None:
        self._extents = PageExtents(pages)
        self.allocate = self._extents.allocate
        self.release = self._extents.release

    def free_pages(self) -> int:
        return self._extents.free_pages

    def runs(self, handle: PageArray) -> int:
        return runs_of(handle)


class Tree:
    """The prefix tree, with the whole prompts in L1."""

    def __init__(self, nodes: int) -> None:
        pages = (nodes + TURNS) * 2_048 // PAGE_TOKENS + 65_536
        self._tree = PrefixTree(page_size=PAGE_TOKENS, l1_pages=pages)
        self._space = Namespace("benchmark")

    def key(self, tokens: Tokens) -> Tokens:
        return np.ascontiguousarray(tokens)

    def insert(self, key: Tokens, pages: Pages) -> None:
        self._tree.insert(self._space, key, pages)

    def match(self, key: Tokens) -> int:
        return int(self._tree.match(self._space, key).tokens)

    def evict(self, tokens: int) -> Any:
        return len(self._tree.evict(1, -(-tokens // PAGE_TOKENS))) * PAGE_TOKENS
