"""Long conversations in a prefix tree: one node for each turn, 49 turns deep; single calls are timed.

Imports numpy only: the peers' processes run it too, in an environment without this project.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

PAGE_TOKENS = 64
TURN_TOKENS = 2_048
TURNS = 49
PROMPT_TOKENS = TURN_TOKENS * TURNS
_TURN_PAGES = TURN_TOKENS // PAGE_TOKENS
_VOCABULARY = 150_000

Tokens = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int64]


class Tree(Protocol):
    """What is compared. `key` prepares tokens as a caller would hold them, outside the timed part."""

    def key(self, tokens: Tokens) -> Any: ...
    def insert(self, key: Any, pages: Pages) -> None:
        """Store a prompt that lies in these pages."""

    def match(self, key: Any) -> int:
        """Length of the known prefix, in tokens."""

    def evict(self, tokens: int) -> int:
        """Tokens that have been evicted."""


def conversation(number: int, tokens: int = PROMPT_TOKENS) -> Tokens:
    return np.random.default_rng(number).integers(0, _VOCABULARY, tokens, dtype=np.int64)


class Forest:
    """A tree filled with conversations, and the measured calls."""

    def __init__(self, tree: Tree, nodes: int) -> None:
        self._tree = tree
        self._conversations = max(1, nodes // TURNS)
        for number in range(self._conversations):
            tokens, pages = conversation(number), self._pages_of(number)
            for turns in range(1, TURNS + 1):
                tree.insert(tree.key(tokens[: turns * TURN_TOKENS]), pages[: turns * _TURN_PAGES])
        self._next_page = self._conversations * TURNS * _TURN_PAGES

    def match(self, numbers: Sequence[int]) -> list[float]:
        """Seconds of each match of a whole conversation."""
        took_s = []
        for number in numbers:
            key = self._tree.key(conversation(self._known(number)))
            matched, seconds = _timed(partial(self._tree.match, key))
            if matched != PROMPT_TOKENS:
                raise RuntimeError(f"matched {matched} of {PROMPT_TOKENS} tokens")
            took_s.append(seconds)
        return took_s

    def insert(self, numbers: Sequence[int]) -> list[float]:
        """Seconds of each insert of a conversation with a turn that nobody has seen."""
        took_s = []
        for number in numbers:
            turn = conversation(10_000_000 + number, TURN_TOKENS)
            key = self._tree.key(np.concatenate((conversation(self._known(number)), turn)))
            new = np.arange(self._next_page, self._next_page + _TURN_PAGES, dtype=np.int64)
            pages = np.concatenate((self._pages_of(self._known(number)), new))
            self._next_page += _TURN_PAGES
            took_s.append(_timed(partial(self._tree.insert, key, pages))[1])
        return took_s

    def evict(self, times: int, tokens: int = 100_000) -> list[float]:
        took_s = []
        for _ in range(times):
            evicted, seconds = _timed(partial(self._tree.evict, tokens))
            if evicted < tokens:
                raise RuntimeError(f"evicted {evicted} of {tokens} tokens")
            took_s.append(seconds)
        return took_s

    def _known(self, number: int) -> int:
        return number % self._conversations

    def _pages_of(self, number: int) -> Pages:
        first = number * TURNS * _TURN_PAGES
        return np.arange(first, first + TURNS * _TURN_PAGES, dtype=np.int64)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    gc.collect(0)
    gc.disable()
    try:
        started = time.perf_counter_ns()
        result = call()
        return result, (time.perf_counter_ns() - started) * 1e-9
    finally:
        gc.enable()
