"""Namespaces and page keys: who may share KV, and how a page is named."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from app.core.fingerprint import Fingerprint
from app.core.prefix_tree import Namespace, PrefixTree, bigrams, namespace, page_keys

TOKENS = np.arange(1, 131, dtype=np.int64)
PARTS = {"model": "m", "compute_dtype": "bfloat16", "model_revision": "w1"}


def other_hit(first: Namespace, second: Namespace) -> int:
    tree = PrefixTree(page_size=64, l1_pages=8)
    tree.insert(first, TOKENS, np.arange(3))
    assert tree.match(first, TOKENS).tokens == 130 - first.bigrams
    tree.check_integrity()
    return tree.match(second, TOKENS).tokens


@pytest.mark.case("I3")
@pytest.mark.parametrize("part", ["compute_dtype", "model_revision"])
def test_another_dtype_or_other_weights_miss(part: str) -> None:
    """Equal tokens under a fingerprint that differs in dtype, then in weights, are a miss."""
    ours = namespace(Fingerprint(parts=PARTS))
    assert other_hit(ours, namespace(Fingerprint(parts=PARTS | {part: "other"}))) == 0
    assert other_hit(ours, namespace(Fingerprint(parts=dict(PARTS)))) == 130


@pytest.mark.case("I4")
def test_another_tenant_misses() -> None:
    """Equal tokens under the salts a and b are a miss, and so are no salt and an empty one."""
    for first, second in itertools.permutations(["a", "b", None, ""], 2):
        assert other_hit(Namespace("p", first), Namespace("p", second)) == 0
    assert other_hit(Namespace("p", "a"), Namespace("p", "a")) == 130


def test_no_two_namespaces_join_alike() -> None:
    """Parts that read the same when joined are apart: each is written with its length before it."""
    texts = [None, "", "a", "b", "ab", "a\0", "\0a", "ab\0", "aa"]
    triples = [
        Namespace(fingerprint, salt, adapter, bigrams=pairs).key
        for fingerprint in texts
        if fingerprint is not None
        for salt in texts
        for adapter in texts
        for pairs in (False, True)
    ]
    assert len(set(triples)) == len(triples)


def test_adapters_and_kinds_of_key_are_apart() -> None:
    """Another adapter, and bigram keys beside token keys, are a miss."""
    plain = Namespace("p", "a", "x")
    assert other_hit(plain, Namespace("p", "a", "y")) == 0
    assert other_hit(plain, Namespace("p", "a", "x", bigrams=True)) == 0
    assert other_hit(Namespace("p", "a", "x", bigrams=True), plain) == 0


@pytest.mark.case("H6")
def test_draft_keys_are_bigrams() -> None:
    """[1, 2, 3, 4] has the keys (1, 2), (2, 3), (3, 4), and the tree keys a bigram namespace by just these."""
    assert bigrams(np.array([1, 2, 3, 4])).tolist() == [[1, 2], [2, 3], [3, 4]]
    tree = PrefixTree(page_size=1, l1_pages=8)
    space = Namespace("p", bigrams=True)
    tree.insert(space, np.array([1, 2, 3, 4]), np.arange(3))
    assert tree.match(space, np.array([1, 2, 3, 4])).tokens == 3
    assert tree.match(space, np.array([1, 2, 3, 5])).tokens == 2  # (3, 5) is another key
    assert tree.match(space, np.array([1, 2])).tokens == 1
    assert tree.match(space, np.array([1])).tokens == 0
    tree.check_integrity()


@pytest.mark.case("I6")
def test_page_keys_are_equal_in_every_process() -> None:
    """Two processes with different hash seeds name every page alike."""
    program = (
        "import numpy as np; from app.core.prefix_tree import Namespace, page_keys;"
        "print(page_keys(Namespace('p', 'a'), np.arange(1, 131), 64).tolist())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{page_keys(Namespace('p', 'a'), TOKENS, 64).tolist()}\n"}


def test_a_page_key_depends_on_all_that_came_before() -> None:
    """A change of one token changes its own page's key and every later one, and none before it."""
    ours = page_keys(Namespace("p"), TOKENS, 16)
    assert len(ours) == 9
    assert np.array_equal(page_keys(Namespace("p"), TOKENS.astype(np.int32), 16), ours)
    for at in (0, 17, 40, 129):
        other = TOKENS.copy()
        other[at] += 1
        same = page_keys(Namespace("p"), other, 16) == ours
        assert same.tolist() == [page < at // 16 for page in range(9)]
    assert not (page_keys(Namespace("q"), TOKENS, 16) == ours).any()
    assert page_keys(Namespace("p"), TOKENS[:100], 16)[-1] != ours[6]  # a tail is not its whole page


def test_a_million_pages_have_different_keys() -> None:
    """Keys of pages that differ in few bits do not collide."""
    tokens = np.arange(2**20, dtype=np.int64)
    assert len(np.unique(page_keys(Namespace("p"), tokens, 1))) == 2**20
    singles = {int(page_keys(Namespace("p"), np.array([a, b]), 2)[0]) for a in range(256) for b in range(256)}
    assert len(singles) == 2**16
