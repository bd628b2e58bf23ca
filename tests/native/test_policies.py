"""Which pages the policies give up, and what they learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from app import _native
from app.core.prefix_tree import DEFAULT_POLICY, POLICIES, Namespace, Policy, PrefixTree
from app.errors import BadInput

SPACE = Namespace("policies")
PAGE = 16
GRAIN = 512
"""A page of so many tokens is remembered after its eviction."""


def prompt(number: int, tokens: int = PAGE) -> npt.NDArray[np.int64]:
    return np.arange(tokens, dtype=np.int64) + number * 1_000_000


class Pool:
    """A tree over a pool of pages; a request is served, and makes room for itself."""

    def __init__(self, pages: int, policy: Policy) -> None:
        self.tree = PrefixTree(page_size=PAGE, l1_pages=pages, policy=policy)
        self.free = list(range(pages))

    def serve(self, tokens: npt.NDArray[np.int64]) -> int:
        """The tokens that were there."""
        hit = self.tree.match(SPACE, tokens, pin=True)
        wanted = -(-len(tokens) // PAGE) - len(hit.pages)
        if wanted > len(self.free):
            self.free += self.tree.evict(1, wanted - len(self.free)).tolist()
        own, self.free = self.free[:wanted], self.free[wanted:]
        self.tree.insert(SPACE, tokens, np.concatenate([hit.pages, np.array(own, dtype=np.int64)]))
        if hit.node:
            self.tree.unpin(hit.node)
        return hit.tokens

    def has(self, *numbers: int) -> list[bool]:
        return [self.tree.match(SPACE, prompt(n), touch=False).tokens > 0 for n in numbers]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_what_is_pinned_and_gives_the_rest(policy: Policy, track: Any) -> None:
    """All that nobody holds can be evicted, children before parents; what is pinned stays."""
    pool = Pool(64, policy)
    track(pool.tree)
    whole = prompt(1, 32 * PAGE)
    pool.serve(whole[: 8 * PAGE])
    pool.serve(whole)
    pool.serve(np.concatenate([whole[: 8 * PAGE], prompt(2, 4 * PAGE)]))
    pinned = pool.tree.match(SPACE, whole[: 16 * PAGE], pin=True)
    gone = pool.tree.evict(1, 64)
    assert len(gone) == 20
    assert not set(gone.tolist()) & set(pinned.pages.tolist())
    pool.tree.unpin(pinned.node)
    assert len(pool.tree.evict(1, 64)) == 16
    assert pool.tree.stats().l1_pages == 0


def test_lru_gives_up_what_was_used_longest_ago(track: Any) -> None:
    """A match or an insert is a use, in L1 and L2 alike."""
    pool = Pool(4, "lru")
    track(pool.tree)
    for number in (1, 2, 3, 4, 1, 5, 6):
        pool.serve(prompt(number))
    assert pool.has(1, 2, 3, 4, 5, 6) == [True, False, False, True, True, True]


def test_a_use_counts_for_the_pages_that_it_reaches(track: Any) -> None:
    """What lies behind the end of a match stays as old as it was, and goes first."""
    pool = Pool(8, "lru")
    track(pool.tree)
    pool.serve(prompt(1, 4 * PAGE))
    pool.serve(prompt(2, 2 * PAGE))
    assert pool.tree.match(SPACE, prompt(1, 2 * PAGE)).tokens == 2 * PAGE
    pool.tree.evict(1, 2)
    assert pool.tree.match(SPACE, prompt(1, 4 * PAGE), touch=False).tokens == 2 * PAGE
    assert pool.has(2) == [True]


def test_slru_protects_what_was_used_again(track: Any) -> None:
    """A scan of new prompts takes the place of prompts that came once; not of those that came twice."""
    pool = Pool(8, "slru")
    track(pool.tree)
    for number in (1, 2, 1, 2, *range(10, 40)):
        pool.serve(prompt(number))
    assert pool.has(1, 2, 10, 39) == [True, True, False, True]


def test_slru_gives_up_protected_pages_when_they_are_nearly_all(track: Any) -> None:
    """Where only the last prompt is new, the oldest of the protected ones goes instead of it."""
    pool = Pool(8, "slru")
    track(pool.tree)
    for number in (*range(8), *range(8), 10):
        pool.serve(prompt(number))
    assert pool.has(0, 1, 10) == [False, True, True]


def test_s3fifo_drops_what_came_once_and_keeps_what_came_again(track: Any) -> None:
    """A prompt that was used while it was in the small queue moves to the main one."""
    pool = Pool(8, "s3fifo")
    track(pool.tree)
    for number in (1, 2, 1, *range(10, 30)):
        pool.serve(prompt(number))
    assert pool.has(1, 2, 10, 29) == [True, False, False, True]


def test_s3fifo_remembers_what_it_has_evicted(track: Any) -> None:
    """A prompt that comes back after its eviction goes to the main queue at once, and outlives a scan."""
    pool = Pool(4 * GRAIN // PAGE, "s3fifo")
    track(pool.tree)
    pool.serve(prompt(1, GRAIN))
    for number in range(10, 16):
        pool.serve(prompt(number, GRAIN))
    assert pool.has(1) == [False]
    pool.serve(prompt(1, GRAIN))
    for number in range(20, 30):
        pool.serve(prompt(number, GRAIN))
    assert pool.has(1) == [True]


def test_lhd_without_experience_is_lru(track: Any) -> None:
    """As long as nothing has come back, the oldest goes first."""
    pool = Pool(8, "lhd")
    track(pool.tree)
    for number in range(30):
        pool.serve(prompt(number))
    assert pool.has(*range(20, 30)) == [False] * 2 + [True] * 8


def test_lhd_learns_to_keep_what_comes_back_later_than_lru_would_wait(track: Any) -> None:
    """A third of the prompts come back once, always after twice the time that the pool holds: LRU serves none of
    them, lhd many, although it has to find out which age is worth waiting for."""
    served: dict[str, int] = {}
    for policy in POLICIES:
        pool = Pool(32 * GRAIN // PAGE, policy)
        track(pool.tree)
        served[policy] = 0
        for number in range(1_500):
            pool.serve(prompt(number, GRAIN))
            back = number - 64
            if back >= 0 and back % 3 == 0:
                served[policy] += pool.serve(prompt(back, GRAIN)) > 0
        pool.tree.check_integrity()
    assert served["lru"] == 0
    assert served["lhd"] > 100


def test_each_tier_has_a_policy_of_its_own() -> None:
    """L2 follows L1 unless it is told otherwise; the default has a name that is known."""
    assert DEFAULT_POLICY in POLICIES
    assert POLICIES == _native.POLICIES
    for l1, l2 in ((p, q) for p in POLICIES for q in POLICIES):
        PrefixTree(page_size=PAGE, l1_pages=4, l2_pages=4, policy=l1, l2_policy=l2).check_integrity()


@pytest.mark.parametrize("names", [{"policy": "fifo"}, {"policy": ""}, {"l2_policy": "LRU"}])
def test_an_unknown_policy_is_refused_by_name(names: dict[str, Any]) -> None:
    """The error lists what there is."""
    wrong = next(iter(names.values()))
    with pytest.raises(BadInput, match=f"no eviction policy {wrong}: there are lru, slru, s3fifo, lhd"):
        PrefixTree(page_size=PAGE, l1_pages=4, **names)


def test_a_purge_forgets_pages_and_keeps_the_order_whole(track: Any) -> None:
    """After a namespace is cleared, pages of others go in the same order as before."""
    pool = Pool(8, "lru")
    track(pool.tree)
    other = Namespace("other")
    for number in (1, 2, 3):
        pool.serve(prompt(number))
    pool.tree.insert(other, prompt(9), np.array(pool.free[:1]))
    pool.free[:1] = pool.tree.clear(other).l1.tolist()
    assert [pool.tree.evict(1, 1).tolist() for _ in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize("policy", POLICIES)
def test_victims_are_named_before_they_go(policy: Policy, track: Any) -> None:
    """Child before parent, each once, as many as the pages that are asked for need; they are still there."""
    pool = Pool(16, policy)
    track(pool.tree)
    whole = prompt(1, 8 * PAGE)
    pool.serve(whole[: 4 * PAGE])
    pool.serve(whole)
    pinned = pool.tree.match(SPACE, whole[: 2 * PAGE], pin=True)
    named = pool.tree.victims(1, [5])
    assert [pool.tree.node(node).start for node in named] == [4 * PAGE, 2 * PAGE]
    assert pool.tree.victims(1, [0]) == []
    assert pool.tree.victims(1, [16]) == named
    assert pool.tree.stats().l1_pages == 8
    assert pool.tree.evict(1, 5).tolist() == [*range(4, 8), 3]
    pool.tree.unpin(pinned.node)


@pytest.mark.parametrize(
    ("tier", "wanted", "says"),
    [(3, [1], "tier 3"), (1, [1, 1], "2 numbers for 1 lanes"), (2, [-1], "-1 pages")],
)
def test_a_wrong_demand_names_no_victims(tier: Any, wanted: list[int], says: str, track: Any) -> None:
    """Another tier, a number for a lane that is none, and less than nothing are BadInput."""
    pool = Pool(4, "lru")
    track(pool.tree)
    with pytest.raises(BadInput, match=says):
        pool.tree.victims(tier, wanted)
