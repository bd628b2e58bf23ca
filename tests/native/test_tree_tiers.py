"""The prefix tree across the tiers: what is visible when, and what may go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from app.core.prefix_tree import TRANSITIONS, Namespace, PrefixTree, Residency
from app.errors import BadInput, PageMismatch

PAGE = 64
SPACE = Namespace("print", None, None)
Array = npt.NDArray[np.int64]
Track = Callable[[Any], Any]


@pytest.fixture
def tree(track: Track) -> PrefixTree:
    made: PrefixTree = track(PrefixTree(page_size=PAGE, l1_pages=4096, l2_pages=4096, lanes=4))
    return made


def prompt(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 150_000, count, dtype=np.int64)


def pages(first: int, count: int) -> Array:
    return np.arange(first, first + count, dtype=np.int64)


def put(tree: PrefixTree, tokens: Array, first: int, lanes: list[int] | None = None) -> int:
    count = -(-len(tokens) // PAGE)
    owners = np.array(lanes or [0] * count, dtype=np.int8)
    return tree.insert(SPACE, tokens, pages(first, count), owners).node


def back_up(tree: PrefixTree, node: int, first: int) -> None:
    tree.acknowledge(tree.begin_backup(node, pages(first, len(tree.node(node).l1_pages))))


@pytest.mark.contract(35)
def test_a_pending_node_is_no_host_hit(tree: PrefixTree) -> None:
    """Before its last acknowledgement a reserved node is known and not readable; after it, it is an L2 hit."""
    tokens = prompt(256)
    made = tree.reserve(SPACE, tokens, 0, pages(0, 4), np.zeros(4, np.int8), acks=2)
    for missing in (True, True, False):
        found = tree.match(SPACE, tokens)
        assert (found.tokens, found.l1_tokens, found.known_tokens) == (0 if missing else 256, 0, 256)
        assert tree.node(made.node).state == (Residency.PENDING if missing else Residency.L2)
        if missing:
            tree.acknowledge(made.ticket)
    with pytest.raises(BadInput, match=f"ticket {made.ticket}"):
        tree.acknowledge(made.ticket)


@pytest.mark.contract(35)
def test_an_insert_over_a_reservation_is_readable_in_l1_only(tree: PrefixTree) -> None:
    """The forward's pages join the reserved node; its L2 copy is visible after the acknowledgement only."""
    tokens = prompt(256)
    made = tree.reserve(SPACE, tokens, 0, pages(0, 4), np.zeros(4, np.int8))
    put(tree, tokens, 8)
    assert tree.node(made.node).state == Residency.L1_PENDING
    found = tree.match(SPACE, tokens)
    assert (found.l1_tokens, found.l2_tokens, found.pages.tolist()) == (256, 0, [8, 9, 10, 11])
    assert tree.evict(1, 4).tolist() == tree.evict(2, 4).tolist() == []
    assert tree.acknowledge(made.ticket).nodes == [made.node]
    assert sorted(tree.evict(1, 4).tolist()) == [8, 9, 10, 11]
    assert tree.match(SPACE, tokens).l2_tokens == 256


@pytest.mark.contract(46)
def test_both_parts_of_a_split_pending_node_are_published(tree: PrefixTree) -> None:
    """A 375-token node is split while it is backed up: neither part goes before the acknowledgement, both
    are visible after it."""
    tokens = prompt(375)
    node = put(tree, tokens, 0)
    ticket = tree.begin_backup(node, pages(20, 6))
    put(tree, np.concatenate([tokens[:128], prompt(64, 1)]), 30)
    assert sorted(tree.evict(1, 100).tolist()) == [32]
    assert len(tree.acknowledge(ticket).nodes) == 2
    assert sorted(tree.evict(1, 100).tolist()) == [0, 1, 2, 3, 4, 5]
    found = tree.match(SPACE, tokens)
    assert (found.l1_tokens, found.l2_tokens) == (0, 375)
    assert tree.load_pages(found.node).tolist() == [20, 21, 22, 23, 24, 25]


@pytest.mark.contract(46)
def test_both_parts_of_a_split_pending_node_roll_back(tree: PrefixTree) -> None:
    """A cancelled backup gives back the reserved pages of every part; other reservations stay."""
    tokens = prompt(256)
    made = tree.reserve(SPACE, tokens, 0, pages(0, 4), np.zeros(4, np.int8))
    branch = np.concatenate([tokens[:128], prompt(64, 1)])
    other = tree.reserve(SPACE, branch, 2, pages(9, 1), np.zeros(1, np.int8))
    assert sorted(tree.cancel(made.ticket).pages.tolist()) == [0, 1, 2, 3]
    assert tree.node(other.node).state == Residency.PENDING
    assert tree.match(SPACE, branch).known_tokens == 192
    assert tree.match(SPACE, tokens).known_tokens == 128
    assert tree.cancel(other.ticket).pages.tolist() == [9]
    assert tree.stats().nodes == tree.stats().l2_pages == 0


@pytest.mark.case("G6")
def test_a_child_is_backed_up_after_its_parent(tree: PrefixTree) -> None:
    """A backup or reservation below a node that is neither in L2 nor pending is refused."""
    tokens = prompt(256)
    parent = put(tree, tokens[:128], 0)
    child = tree.insert(SPACE, tokens, pages(0, 4), np.zeros(4, np.int8)).node
    with pytest.raises(BadInput, match="the parent is l1"):
        tree.begin_backup(child, pages(10, 2))
    longer = np.concatenate([tokens, prompt(64, 1)])
    with pytest.raises(BadInput, match="the parent is l1"):
        tree.reserve(SPACE, longer, 4, pages(10, 1), np.zeros(1, np.int8))
    tree.begin_backup(parent, pages(20, 2))
    tree.begin_backup(child, pages(10, 2))
    tree.reserve(SPACE, longer, 4, pages(12, 1), np.zeros(1, np.int8))


def test_a_reservation_starts_where_an_insert_would(tree: PrefixTree) -> None:
    """A repeated prompt reserves no duplicate suffix: another start page, or a known prompt, is refused."""
    tokens = prompt(256)
    back_up(tree, put(tree, tokens[:128], 0), 0)
    with pytest.raises(PageMismatch, match="from page 0 where the tree knows 128 tokens"):
        tree.reserve(SPACE, tokens, 0, pages(4, 4), np.zeros(4, np.int8))
    tree.reserve(SPACE, tokens, 2, pages(4, 2), np.zeros(2, np.int8))
    with pytest.raises(BadInput, match="knows all 256 tokens"):
        tree.reserve(SPACE, tokens, 4, pages(8, 0), np.zeros(0, np.int8))


def test_a_load_takes_the_owners_of_all_nodes_in_order(tree: PrefixTree) -> None:
    """The L2-only nodes of a path are loaded by one ticket, held until it ends, and again in L1 after it."""
    tokens = prompt(250)
    back_up(tree, put(tree, tokens[:128], 0, [3, 1]), 0)
    back_up(tree, tree.insert(SPACE, tokens, pages(0, 4), np.array([3, 1, 2, 0], np.int8)).node, 2)
    assert sorted(tree.evict(1, 4).tolist()) == [0, 1, 2, 3]
    node = tree.match(SPACE, tokens).node
    assert tree.load_owners(node).tolist() == [3, 1, 2, 0]
    ticket = tree.begin_load(node, pages(50, 4))
    assert tree.evict(2, 4).tolist() == tree.evict(1, 4).tolist() == []
    found = tree.match(SPACE, tokens)
    assert (found.l1_tokens, found.l2_tokens) == (0, 250)
    assert tree.insert(SPACE, tokens, pages(70, 4), np.array([3, 1, 2, 0], np.int8)).duplicates.tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert len(tree.acknowledge(ticket).nodes) == 2
    assert tree.match(SPACE, tokens).pages.tolist() == [50, 51, 52, 53]


def test_a_failed_load_leaves_an_l2_hit(tree: PrefixTree) -> None:
    """A cancelled load gives its L1 pages back and the host copy stays readable."""
    tokens = prompt(128)
    node = put(tree, tokens, 0)
    back_up(tree, node, 0)
    tree.evict(1, 2)
    ticket = tree.begin_load(node, pages(50, 2))
    assert tree.cancel(ticket).pages.tolist() == [50, 51]
    assert tree.match(SPACE, tokens).l2_tokens == 128
    assert tree.stats().l1_pages == 0


def test_owners_of_a_host_copy_are_binding(tree: PrefixTree) -> None:
    """New L1 pages for a node that is in L2 have the owners that its host pages have."""
    tokens = prompt(128)
    back_up(tree, put(tree, tokens, 0, [2, 3]), 0)
    tree.evict(1, 2)
    with pytest.raises(PageMismatch, match="position 1 has owner 3 in L2, owner 1"):
        put(tree, tokens, 10, [2, 1])
    put(tree, tokens, 10, [2, 3])
    assert tree.match(SPACE, tokens).l1_tokens == 128


def test_the_least_recently_used_goes_first(tree: PrefixTree) -> None:
    """Eviction takes the oldest leaf, a match makes a prompt new, a look without touch does not."""
    for i in range(3):
        put(tree, prompt(128, i), 10 * i)
    tree.match(SPACE, prompt(128, 0))
    tree.match(SPACE, prompt(128, 1), touch=False)
    assert sorted(tree.evict(1, 2).tolist()) == [10, 11]
    assert sorted(tree.evict(1, 2).tolist()) == [20, 21]
    assert sorted(tree.evict(1, 2).tolist()) == [0, 1]


def test_children_go_before_parents(tree: PrefixTree) -> None:
    """Whatever is asked for, no page goes whose continuation stays; a long leaf loses its end only."""
    tokens = prompt(640)
    for end in (128, 384, 640):
        tree.insert(SPACE, tokens[:end], pages(0, end // PAGE), np.zeros(end // PAGE, np.int8))
    for left in range(10, 0, -1):
        assert tree.match(SPACE, tokens, touch=False).l1_tokens == left * PAGE
        assert tree.evict(1, 1).tolist() == [left - 1]
    assert tree.stats().namespaces == 0


def test_a_long_backed_up_leaf_keeps_its_host_copy(tree: PrefixTree) -> None:
    """Pages evicted from the end of a node that is in both tiers stay readable from L2."""
    tokens = prompt(640)
    back_up(tree, put(tree, tokens, 0), 0)
    assert sorted(tree.evict(1, 3).tolist()) == [7, 8, 9]
    found = tree.match(SPACE, tokens)
    assert (found.l1_tokens, found.tokens) == (448, 640)


def test_owner_targeted_eviction_spares_other_lanes(tree: PrefixTree) -> None:
    """Lanes in deficit get their pages from prompts that hold them, older prompts of other lanes stay."""
    put(tree, prompt(256, 0), 0, [0, 0, 0, 0])
    put(tree, prompt(256, 1), 10, [1, 0, 1, 2])
    put(tree, prompt(256, 2), 20, [1, 1, 3, 3])
    assert sorted(tree.evict_owners(1, [0, 1, 0, 0]).tolist()) == [12, 13]
    assert sorted(tree.evict_owners(1, [0, 2, 0, 0]).tolist()) == [10, 11, 21, 22, 23]
    assert tree.match(SPACE, prompt(256, 0)).tokens == 256
    assert tree.evict_owners(1, [0, 0, 5, 0]).tolist() == []


def test_owner_targeted_eviction_removes_what_stands_on_the_page(tree: PrefixTree) -> None:
    """A page of the wanted lane deep in the tree goes with every page below it, and only with these."""
    tokens = prompt(128)
    put(tree, tokens, 0, [0, 1])
    for i in range(3):
        branch = np.concatenate([tokens, prompt(64, 10 + i)])
        tree.insert(SPACE, branch, np.array([0, 1, 10 + i]), np.array([0, 1, 2], np.int8))
    put(tree, prompt(64, 5), 30, [3])
    assert sorted(tree.evict_owners(1, [0, 1, 0, 0]).tolist()) == [1, 10, 11, 12]
    assert tree.match(SPACE, tokens).tokens == 64


@pytest.mark.parametrize("state", ["pinned", "pending", "loading"])
def test_what_is_held_is_never_evicted(tree: PrefixTree, state: str) -> None:
    """A pinned, pending or loading node and all above it stay, in both tiers and for every way to evict."""
    tokens = prompt(256)
    top = put(tree, tokens[:128], 0)
    back_up(tree, top, 0)
    node = tree.insert(SPACE, tokens, pages(0, 4), np.zeros(4, np.int8)).node
    if state == "pinned":
        tree.pin(node)
    elif state == "pending":
        tree.begin_backup(node, pages(2, 2))
    else:
        back_up(tree, node, 2)
        tree.evict(1, 4)
        tree.begin_load(node, pages(50, 4))
    assert tree.stats().evictable_l1_pages == tree.stats().evictable_l2_pages == 0
    for tier in (1, 2):
        assert tree.evict(tier, 9).tolist() == []
        assert tree.evict_owners(tier, [9, 9, 9, 9]).tolist() == []
    assert tree.clear(SPACE).l1.tolist() == []


def test_a_namespace_is_forgotten_alone(tree: PrefixTree) -> None:
    """clear() gives back both tiers' pages of one namespace and leaves the others."""
    other = Namespace("print", "b", None)
    back_up(tree, put(tree, prompt(128), 0), 7)
    tree.insert(other, prompt(128), pages(20, 2), np.zeros(2, np.int8))
    freed = tree.clear(SPACE)
    assert (sorted(freed.l1.tolist()), sorted(freed.l2.tolist())) == ([0, 1], [7, 8])
    assert tree.match(SPACE, prompt(128)).known_tokens == 0
    assert tree.match(other, prompt(128)).tokens == 128


def test_residency_has_its_states_and_no_dead_end() -> None:
    """Every state but absent can be left and reached, and absent is where a node comes from."""
    left = {before for before, _, _ in TRANSITIONS}
    reached = {after for _, _, after in TRANSITIONS}
    assert left == reached == set(Residency)
    assert len({(before, event) for before, event, _ in TRANSITIONS}) == len(TRANSITIONS)


def test_threads_share_a_tree(tree: PrefixTree) -> None:
    """Long calls run without the interpreter's lock and still see the tree whole."""
    tokens = prompt(64 * 512)
    count = len(tokens) // PAGE
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            space = Namespace("print", str(number))
            for _ in range(20):
                tree.insert(space, tokens, pages(number * count, count), np.zeros(count, np.int8))
                assert tree.match(space, tokens).tokens == len(tokens)
                assert len(tree.clear(space).l1) == count
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert tree.stats().nodes == 0
