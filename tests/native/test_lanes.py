"""Owner lanes: pages by their owners."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.lanes import OwnerLanes, PageLane
from app.core.owners import owned_by
from app.core.plans import slots_of_pages
from app.core.prefix_tree import Namespace, PrefixTree
from app.errors import BadInput, IntegrityError
from tests.conftest import Track


@pytest.mark.contract(17)
def test_owners_come_back_in_the_order_given(track: Track) -> None:
    """Each page is of the lane that its entry names, whatever the order of the entries."""
    lanes = track(OwnerLanes(4, 10))
    owners = [2, 0, 0, 3, 2, 2, 0, 3]
    found = lanes.alloc_pages_with_owners(owners)
    assert found.tolist() == [20, 0, 1, 30, 21, 22, 2, 31]
    assert lanes.owners_of(found).tolist() == owners
    assert lanes.physical(found).tolist() == [0, 0, 1, 0, 1, 2, 2, 1]


@pytest.mark.contract(1)
@pytest.mark.contract(4)
def test_every_rank_and_every_cut_gives_the_same_owners(track: Track) -> None:
    """Two lane sets answer alike, and a request cut into chunks gets the owners of the whole."""
    owners = [int(o) for o in np.random.default_rng(0).integers(0, 3, 60)]
    whole = track(OwnerLanes(3, 40)).alloc_pages_with_owners(owners)
    assert whole.tolist() == track(OwnerLanes(3, 40)).alloc_pages_with_owners(owners).tolist()
    lanes = track(OwnerLanes(3, 40))
    parts = [lanes.alloc_pages_with_owners(owners[at : at + 7]) for at in range(0, 60, 7)]
    assert lanes.owners_of(np.concatenate(parts)).tolist() == owners
    places = {(int(o), int(p)) for o, p in zip(lanes.owners_of(whole), lanes.physical(whole), strict=True)}
    assert len(places) == 60


@pytest.mark.contract(16)
def test_a_backup_takes_its_owners_from_the_first_slot_of_each_page(track: Track) -> None:
    """Slots of whole pages and of a valid tail give the owners on every rank, one that owns none of them included."""
    owners = [2, 0, 0, 2, 0]
    tokens = 4 * 64 + 17
    for rank in range(4):
        lanes = track(OwnerLanes(4, 10))
        pages = lanes.alloc_pages_with_owners(owners)
        slots = slots_of_pages(pages, 64, tokens)
        tree = track(PrefixTree(page_size=64, l1_pages=40, l2_pages=8, lanes=4))
        node = tree.insert(Namespace("f"), np.arange(tokens), pages, lanes.owners_of_slots(slots, 64)).node
        tree.acknowledge(tree.begin_backup(node, np.arange(5)))
        tree.evict(1, 5)
        assert tree.load_owners(node).tolist() == owners
        mine, _ = owned_by(pages, tree.node(node).owners, rank)
        assert lanes.physical(mine).tolist() == {0: [0, 1, 2], 2: [0, 1]}.get(rank, [])


def test_slots_that_start_no_page_have_no_owner() -> None:
    """A first slot off the page grid, negative or behind the last lane is named; no slots have no owners."""
    lanes = OwnerLanes(2, 10)
    assert lanes.owners_of_slots(np.array([], dtype=np.int64), 4).tolist() == []
    assert lanes.owners_of_slots(np.arange(40, 45), 4).tolist() == [1, 1]
    for slots, wrong in (([0, 1, 2, 3, 6], "page 1 starts at slot 6"), ([-4], "slot -4"), ([80], "slot 80")):
        with pytest.raises(BadInput, match=f"{wrong}: not the first slot of a page, or outside 0..80"):
            lanes.owners_of_slots(np.array(slots), 4)
    with pytest.raises(BadInput, match="at least one token, not 0"):
        lanes.owners_of_slots(np.arange(4), 0)


@pytest.mark.contract(18)
def test_a_lane_that_runs_out_changes_nothing(track: Track) -> None:
    """One lane too few pages gives None: the other lanes keep theirs, and the deficit says which lane."""
    lanes = track(OwnerLanes(3, 4))
    lanes.alloc_pages_with_owners([1, 1, 1])
    states = lanes._states.copy()
    assert lanes.alloc_pages_with_owners([0, 1, 2, 1, 0]) is None
    assert lanes.reserve(9, [2, 1, 1]) is None
    assert lanes.deficits([0, 1, 2, 1, 0]).tolist() == [0, 1, 0]
    assert (lanes._states.tolist(), lanes.holders) == (states.tolist(), 0)


@pytest.mark.contract(18)
def test_freed_pages_are_joined_before_a_lane_is_exhausted(track: Track) -> None:
    """Pages that came back one by one, in any order, serve the next call as one stretch."""
    lanes = track(OwnerLanes(2, 6))
    found = lanes.alloc_pages_with_owners([0] * 6 + [1] * 6)
    assert lanes.alloc_pages_with_owners([1]) is None
    for page in (10, 7, 9, 8):
        lanes.release(np.array([page]))
    assert lanes.alloc_pages_with_owners([1] * 4).tolist() == [7, 8, 9, 10]
    assert lanes.largest_extent(1) == 0
    lanes.release(found[:6])
    assert lanes.largest_extent(0) == 6


def test_neighbours_of_two_lanes_are_never_joined(track: Track) -> None:
    """The last page of a lane and the first of the next stay apart, also when one call frees both."""
    lanes = track(OwnerLanes(2, 4))
    found = lanes.alloc_pages_with_owners([0, 0, 0, 0, 1, 1, 1, 1])
    lanes.release(found[2:6])
    assert (lanes.largest_extent(0), lanes.largest_extent(1), lanes.free_pages) == (2, 2, 4)
    lanes.check_integrity()
    assert lanes.alloc_pages_with_owners([0, 0, 0]) is None


@pytest.mark.contract(22)
def test_pages_of_a_lane_are_contiguous_where_it_allows(track: Track) -> None:
    """A lane serves a call from one stretch though shorter ones are free, and ascending where it cannot."""
    lanes = track(OwnerLanes(2, 20))
    lanes.alloc_pages_with_owners([0] * 20)
    lanes.release(np.array([1, 3, 4, 10, 11, 12, 13]))
    assert lanes.alloc_pages_with_owners([0, 1, 0, 1, 0]).tolist() == [10, 20, 11, 21, 12]
    assert lanes.alloc_pages_with_owners([0, 0, 0]).tolist() == [1, 3, 4]


@pytest.mark.contract(41)
@pytest.mark.contract(44)
def test_a_reservation_over_lanes_rolls_back_in_one_call(track: Track) -> None:
    """All lanes get back what a holder had; another holder's pages stay."""
    lanes = track(OwnerLanes(3, 5))
    lanes.reserve(1, [0, 1, 2, 2])
    other = lanes.reserve(2, [1, 1])
    lanes.reserve(1, [0])
    assert lanes.roll_back(1) == 5
    assert [lanes.free_in(lane) for lane in range(3)] == [5, 3, 5]
    assert lanes.reserved(2).tolist() == other.tolist()
    assert lanes.commit(2) == 2
    lanes.release(other)
    assert (lanes.free_pages, lanes.reserved_pages) == (15, 0)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([0, 3], r"owner 3 of page 1 is outside 0\.\.3"),
        ([-1], r"owner -1 of page 0 is outside 0\.\.3"),
        ([0, 300], "owners fit int8, 300 does not"),
        ([], "cannot allocate 0 pages"),
        ([0.5], "owners are whole numbers, not float64"),
        ([[0], [1]], "owners have one dimension, not 2"),
    ],
)
def test_bad_owners_change_nothing(track: Track, owners: list[int], message: str) -> None:
    """A lane that does not exist, no owner at all and senseless owners raise and name the value."""
    lanes = track(OwnerLanes(3, 4))
    for call in (lanes.alloc_pages_with_owners, lambda o: lanes.reserve(5, o)):
        with pytest.raises(BadInput, match=message):
            call(owners)
    assert (lanes.free_pages, lanes.holders) == (12, 0)


def test_bad_lanes_are_refused(track: Track) -> None:
    """Foreign pages, double frees and lanes that do not exist raise and name the value."""
    lanes = track(OwnerLanes(2, 4))
    lanes.alloc_pages_with_owners([0])
    for bad, message in (
        ([0, 8], "page 8 is not of this set of lanes of 8"),
        ([0, 4], r"freed twice: \[4\]"),
    ):
        with pytest.raises(BadInput, match=message):
            lanes.release(np.array(bad))
    for call in (lanes.free_in, lanes.largest_extent):
        with pytest.raises(BadInput, match=r"lane 2 is outside 0\.\.2"):
            call(2)
    for count, pages, message in (
        (0, 4, "1 to 127 lanes, not 0"),
        (128, 4, "not 128"),
        (2, 0, "at least one page"),
    ):
        with pytest.raises(BadInput, match=message):
            OwnerLanes(count, pages)
    assert lanes.free_pages == 7


def test_a_broken_lane_set_is_found() -> None:
    """The integrity check covers each lane."""
    lanes = OwnerLanes(2, 4)
    lanes._states[6] = 1
    with pytest.raises(IntegrityError, match="the state of page 6"):
        lanes.check_integrity()


def test_a_lane_takes_its_pages_back_in_any_order(track: Track) -> None:
    """Many scattered pages in one call are joined as if they had come in order."""
    lane = track(PageLane(500))
    found = lane.allocate(500)
    lane.release(np.random.default_rng(1).permutation(found))
    assert (lane.free_pages, lane.largest_extent) == (500, 500)
