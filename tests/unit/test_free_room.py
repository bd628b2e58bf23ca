"""How much an eviction takes: past the deficit, back to the target of free room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.lanes import OwnerLanes
from app.core.prefix_tree import Namespace
from app.errors import BadInput
from app.tiers.prefix import PrefixCache
from app.tiers.room import room_pages, shortfall

PAGES = 40


@pytest.mark.contract(82)
@given(
    taken=st.lists(st.integers(1, PAGES), min_size=2, max_size=2),
    owners=st.lists(st.integers(0, 1), max_size=PAGES),
    fraction=st.floats(0, 0.5),
)
def test_an_eviction_leaves_the_target_free_behind_what_is_wanted(
    taken: list[int], owners: list[int], fraction: float
) -> None:
    """Whatever a lane lacks for a request and for its target is evicted, nothing where it has both."""
    lanes = OwnerLanes(2, PAGES)
    for lane, pages in enumerate(taken):
        assert lanes.alloc_pages_with_owners(np.full(pages, lane, dtype=np.int8)) is not None
    room = room_pages(lanes, fraction)
    missing = shortfall(lanes, room, np.array(owners, dtype=np.int8))
    for lane in range(2):
        wanted = owners.count(lane)
        left = PAGES - taken[lane] + int(missing[lane]) - wanted
        assert left >= room
        assert missing[lane] == 0 or left == room
    assert (shortfall(lanes, room) == np.maximum(room - PAGES + np.array(taken), 0)).all()


@pytest.mark.contract(82)
def test_pressure_evicts_past_the_deficit() -> None:
    """A full pool that lacks one page gives up that page and the free room besides it."""
    cache = PrefixCache(page_size=4, pages=PAGES, free_room=0.25)
    space = Namespace("room")
    tokens = np.arange(PAGES * 4, dtype=np.int64)
    own = cache.lanes.alloc_pages_with_owners(np.zeros(PAGES, dtype=np.int8))
    assert own is not None
    cache.tree.insert(space, tokens, own)
    taken = cache.allocate(1)
    assert taken is not None
    assert (len(taken), cache.free_pages, cache.evicted_pages) == (1, 10, 11)
    cache.release(taken)
    assert cache.evict_to_target() == 0
    cache.check_integrity()


@pytest.mark.contract(82)
@pytest.mark.parametrize("fraction", [-0.1, 1, 2])
def test_a_target_is_a_part_of_the_lane(fraction: float) -> None:
    """A target of the whole lane would evict everything, always."""
    with pytest.raises(BadInput, match="free room is a part of 0 to 1"):
        room_pages(OwnerLanes(1, PAGES), fraction)
