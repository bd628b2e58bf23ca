"""Pages for one request after another: who is alone never waits, however the cached pages lie in the lanes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.pages import pages_for
from app.core.prefix_tree import Namespace
from app.tiers.prefix import PrefixCache
from app.tiers.room import spread
from tests.service.test_two_tiers import conversations
from tests.support.harness import PAGE


def serve(cache: PrefixCache, space: Namespace, prompt: list[int]) -> bool:
    """A request from its look-up to its end; whether it has got its pages at once."""
    lease = cache.find(space, prompt, most=len(prompt) - 1)
    own = cache.allocate(pages_for(len(prompt), PAGE) - len(lease.prefix), lease)
    if own is not None:
        lease.own = own
        cache.keep(lease, prompt, lease.pages)
    cache.end(lease)
    cache.check_integrity()
    return own is not None


@pytest.mark.contract(17, 20)
@pytest.mark.parametrize("lane_pages", [4, 6, 16])
def test_a_request_that_is_alone_never_waits(lane_pages: int) -> None:
    """Prefixes that lie unevenly in four lanes, and housekeeping at any time: pages come from where there is room."""
    for seed in range(60):
        draws = random.Random(seed)
        cache = PrefixCache(page_size=PAGE, pages=lane_pages, ranks=4, free_room=0.02)
        space = Namespace("contract", bigrams=True)
        for prompt in conversations(38 if seed % 2 else seed):
            if draws.random() < 0.3:
                cache.make_room()
            assert serve(cache, space, prompt[: 4 * lane_pages * PAGE])
        assert cache.hit_tokens > 0


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 160), st.integers(0, 7))
def test_no_lane_gives_more_than_it_has(room: list[int], count: int, first: int) -> None:
    """New pages are spread evenly as long as no lane's room ends before; where all fit, none is asked for more."""
    wanted = min(count, sum(room))
    given = np.bincount(spread(wanted, np.array(room), first % len(room)), minlength=len(room))
    assert given.sum() == wanted
    assert (given <= room).all()
    # a lane that gave less than another by more than one page had no more to give
    full = given == room
    assert full.all() or given.max() - given[~full].min() <= 1
