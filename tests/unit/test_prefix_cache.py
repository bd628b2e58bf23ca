"""Leases on L1: what a request reuses, takes, leaves behind and gives back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from app.core.prefix_tree import Namespace
from app.errors import BadInput, IntegrityError
from app.tiers.prefix import Lease, PrefixCache

PAGE = 4
PLAIN = Namespace("p")
PAIRS = Namespace("p", bigrams=True)


def tokens(count: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + i for i in range(count)]


def cache(pages: int = 16, ranks: int = 1, **more: object) -> PrefixCache:
    return PrefixCache(page_size=PAGE, pages=pages, ranks=ranks, **more)  # type: ignore[arg-type]


def serve(of: PrefixCache, prompt: list[int], space: Namespace = PLAIN, *, keep: bool = True) -> Lease:
    """A request whose rows are all written; its lease is still held."""
    lease = of.find(space, prompt, most=len(prompt) - 1)
    need = -(-len(prompt) // PAGE) - len(lease.prefix)
    pages = of.allocate(need)
    assert pages is not None
    lease.own = pages
    if keep:
        of.keep(lease, [*prompt, 7], lease.pages)
    return lease


def test_a_prompt_is_found_again() -> None:
    """What one request left behind is the next one's prefix, up to its last whole page."""
    l1 = cache()
    first = serve(l1, tokens(18))
    l1.end(first)
    second = l1.find(PLAIN, tokens(18), most=17)
    assert len(second.prefix) == 4
    l1.end(second)
    longer = l1.find(PLAIN, [*tokens(18), *tokens(5, salt=1)], most=22)
    assert len(longer.prefix) == 4
    l1.end(longer)
    l1.check_integrity()
    assert (l1.cached_pages, l1.free_pages, l1.pins, l1.leases) == (4, 12, 0, 0)


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is wholly cached is reused up to the page before its last token."""
    l1 = cache()
    l1.end(serve(l1, tokens(16)))
    lease = l1.find(PLAIN, tokens(16), most=15)
    assert len(lease.prefix) == 3
    l1.end(lease)
    whole = l1.find(PLAIN, tokens(16), most=16)
    assert len(whole.prefix) == 4
    l1.end(whole)


@pytest.mark.contract(142)
def test_a_draft_row_is_reused_under_the_same_next_token_only() -> None:
    """With a draft the key of a page's last row holds the next token: another continuation recomputes it."""
    l1 = cache()
    l1.end(serve(l1, tokens(8), PAIRS))  # kept with the next token 7
    same = l1.find(PAIRS, [*tokens(8), 7, 1], most=9)
    assert len(same.prefix) == 2
    l1.end(same)
    other = l1.find(PAIRS, [*tokens(8), 8, 1], most=9)
    assert len(other.prefix) == 1
    l1.end(other)


@pytest.mark.case("I4")
def test_namespaces_are_apart() -> None:
    """Equal tokens under another salt are a miss."""
    l1 = cache()
    l1.end(serve(l1, tokens(16), Namespace("p", "a")))
    lease = l1.find(Namespace("p", "b"), tokens(16), most=15)
    assert not len(lease.prefix)
    l1.end(lease)


def test_what_is_leased_is_not_evicted() -> None:
    """Pages under a lease stay; pages that nobody holds make room, least recently used first."""
    l1 = cache(pages=8)
    held = serve(l1, tokens(16))
    l1.end(serve(l1, tokens(8, salt=1)))
    assert l1.allocate(5) is None
    fresh = l1.allocate(4)
    assert fresh is not None
    assert not set(fresh.tolist()) & set(l1.tree.node(held.node).l1_pages.tolist())
    assert l1.evicted_pages == 2
    l1.release(fresh)
    l1.end(held)
    l1.check_integrity()


def test_an_aborted_request_leaves_nothing() -> None:
    """Without keep every page comes back, and the tree knows nothing of the prompt."""
    l1 = cache()
    l1.end(serve(l1, tokens(20), keep=False))
    assert (l1.free_pages, l1.cached_pages) == (16, 0)


def test_two_requests_for_one_prompt_leave_one_copy() -> None:
    """The second of two that computed the same prompt gives its pages back when it ends."""
    l1 = cache()
    one, two = serve(l1, tokens(16), keep=False), serve(l1, tokens(16), keep=False)
    for lease in (one, two):
        l1.keep(lease, [*tokens(16), 7], lease.pages)
    assert (len(one.own), len(two.own)) == (0, 4)
    l1.end(one)
    l1.end(two)
    l1.check_integrity()
    assert (l1.cached_pages, l1.free_pages) == (4, 12)


@pytest.mark.contract(140)
def test_exact_reuse_ends_on_the_chunk_grid() -> None:
    """With a grid of two pages, five cached pages are reused as four."""
    l1 = cache(grid=2 * PAGE)
    l1.end(serve(l1, tokens(21)))
    lease = l1.find(PLAIN, tokens(30), most=29)
    assert len(lease.prefix) == 4
    l1.end(lease)
    with pytest.raises(BadInput, match="a grid of 6 tokens is not on the page grid of 4"):
        cache(grid=6)


@pytest.mark.contract(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_page_has_one_owner_and_the_ranks_share_alike(ranks: int) -> None:
    """A prompt's pages are stored once, on ranks that hold a like number; capacity is the ranks' sum."""
    l1 = cache(pages=12, ranks=ranks)
    assert l1.pages == 12 * ranks
    pages = l1.allocate(21)
    assert pages is not None
    assert len(set(pages.tolist())) == 21
    held = np.bincount(l1.lanes.owners_of(pages), minlength=ranks)
    assert held.max() - held.min() <= 1
    l1.release(pages)


@pytest.mark.contract(20)
def test_a_lane_in_deficit_is_served_by_its_own_pages() -> None:
    """When lanes have run out, pages of just these lanes are evicted, and the allocation is tried once more."""
    l1 = cache(pages=4, ranks=2)
    l1.end(serve(l1, tokens(32)))
    assert l1.free_pages == 0
    pages = l1.allocate(3)
    assert pages is not None
    l1.release(pages)
    l1.check_integrity()


@pytest.mark.contract(82)
def test_an_eviction_restores_the_free_room() -> None:
    """Three pages are missing: five go, so that a quarter of the lane is free; a task behind does alike."""
    l1 = cache(pages=8, free_room=0.25)
    for salt in range(4):
        l1.end(serve(l1, tokens(8, salt)))
    assert l1.free_pages == 0
    fresh = l1.allocate(3)
    assert fresh is not None
    assert (l1.evicted_pages, l1.free_pages) == (5, 2)
    last = l1.allocate(2)
    assert last is not None
    assert (l1.evict_to_target(), l1.evict_to_target()) == (2, 0)
    l1.release(np.concatenate([fresh, last]))
    with pytest.raises(BadInput, match="free room is a part of 0 to 1 of a lane, not 1"):
        cache(free_room=1.0)


def test_off_keeps_nothing() -> None:
    """Without reuse nothing is looked up, and nothing stays."""
    l1 = cache(reuse=False)
    l1.end(serve(l1, tokens(16)))
    assert (l1.cached_pages, l1.free_pages) == (0, 16)
    assert not len(l1.find(PLAIN, tokens(16), most=15).prefix)


def test_a_lease_ends_once() -> None:
    """Ending a lease twice is an error and frees nothing again."""
    l1 = cache()
    lease = serve(l1, tokens(8))
    l1.end(lease)
    with pytest.raises(BadInput, match="a lease was ended twice"):
        l1.end(lease)
    l1.check_integrity()


def test_a_lost_page_is_found() -> None:
    """The check raises, with the numbers, when a page is neither free nor cached nor leased."""
    l1 = cache()
    assert l1.allocate(1) is not None
    with pytest.raises(IntegrityError, match="15 free and 0 cached of 16 pages, nothing leased"):
        l1.check_integrity()


class Requests(RuleBasedStateMachine):
    """Requests that come, are kept or aborted, and end in any order, on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = cache(pages=12, ranks=2)
        self.live: list[tuple[Lease, list[int], np.ndarray]] = []  # type: ignore[type-arg]

    @rule(length=st.integers(1, 40), salt=st.integers(0, 2), pairs=st.booleans())
    def come(self, length: int, salt: int, pairs: bool) -> None:
        prompt, space = tokens(length, salt), PAIRS if pairs else PLAIN
        lease = self.l1.find(space, prompt, most=length - 1)
        assert len(lease.prefix) * PAGE < length
        need = -(-length // PAGE) - len(lease.prefix)
        pages = self.l1.allocate(need)
        if pages is None:
            self.l1.end(lease)
            return
        lease.own = pages
        self.live.append((lease, prompt, lease.pages))

    @rule(which=st.integers(0, 9), keep=st.booleans())
    def go(self, which: int, keep: bool) -> None:
        if not self.live:
            return
        lease, prompt, pages = self.live.pop(which % len(self.live))
        if keep:
            self.l1.keep(lease, [*prompt, 7], pages)
        self.l1.end(lease)

    @invariant()
    def nothing_is_shared_or_lost(self) -> None:
        self.l1.check_integrity()
        own = [page for lease, _, _ in self.live for page in lease.own.tolist()]
        assert len(own) == len(set(own))
        assert self.l1.free_pages + self.l1.cached_pages + len(own) == self.l1.pages

    def teardown(self) -> None:
        while self.live:
            self.go(0, False)
        assert self.l1.pins == 0
        self.l1.check_integrity()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
