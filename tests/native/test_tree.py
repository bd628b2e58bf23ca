"""The prefix tree: lookups, valid tails, splits, pins, last use, drafts and bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from app.core.prefix_tree import Draft, Namespace, PrefixTree, Residency
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


def owners(*numbers: int) -> npt.NDArray[np.int8]:
    return np.array(numbers, dtype=np.int8)


def put(tree: PrefixTree, tokens: Array, first: int, space: Namespace = SPACE) -> int:
    """Insert with the pages first.., all of lane 0; the node."""
    count = -(-(len(tokens) - space.bigrams) // PAGE)
    return tree.insert(space, tokens, pages(first, count), owners(*[0] * count)).node


@pytest.mark.contract(27, 29)
def test_a_valid_tail_is_matched_exactly(tree: PrefixTree) -> None:
    """100 tokens inserted at page 64 take 2 pages and match as 100, not 64 and not 128."""
    tokens = prompt(100)
    done = tree.insert(SPACE, tokens, pages(7, 2), owners(0, 1))
    assert (done.tokens, done.known_tokens, done.duplicates.tolist()) == (100, 0, [])
    found = tree.match(SPACE, tokens)
    assert (found.tokens, found.l1_tokens, found.pages.tolist()) == (100, 100, [7, 8])
    assert tree.stats().l1_pages == 2


@pytest.mark.contract(30)
def test_a_new_scheduling_decision_floors_a_tail(tree: PrefixTree) -> None:
    """With `floor` a hit of 100 tokens is one of 64 with its one page; the refresh of a request keeps 100."""
    tokens = prompt(100)
    put(tree, tokens, 7)
    longer = np.concatenate([tokens, prompt(50, 1)])
    found = tree.match(SPACE, longer, floor=True)
    assert (found.tokens, found.pages.tolist()) == (64, [7])
    assert tree.match(SPACE, longer).tokens == 100


@pytest.mark.case("C13")
@pytest.mark.contract(27)
def test_a_page_matches_whole_or_not_at_all(tree: PrefixTree) -> None:
    """A page of 4 units of 16 tokens of which 3 are equal is no hit: the match ends before that page."""
    tokens = prompt(192)
    put(tree, tokens, 0)
    other = tokens.copy()
    other[64 + 48 :] += 1
    assert tree.match(SPACE, other).tokens == 64
    assert tree.match(SPACE, tokens[: 64 + 48]).tokens == 64


@pytest.mark.contract(31)
def test_a_tail_that_two_prompts_leave_differently_keeps_its_page(tree: PrefixTree) -> None:
    """Prompts that differ inside a tail page have a page each; none is shared or cut."""
    first = prompt(100)
    second = np.concatenate([first[:80], prompt(40, 1)])
    put(tree, first, 0)
    done = tree.insert(SPACE, second, pages(10, 2), owners(0, 3))
    assert (done.known_tokens, done.duplicates.tolist()) == (64, [0])
    assert tree.match(SPACE, first).pages.tolist() == [0, 1]
    assert tree.match(SPACE, second).pages.tolist() == [0, 11]
    assert tree.node(done.node).owners.tolist() == [3]


@pytest.mark.contract(29)
def test_the_page_that_a_request_went_on_writing_grows_in_place(tree: PrefixTree) -> None:
    """A refresh with the tail's own page makes the tail longer: no second entry, no duplicate, the pin stays."""
    tokens = prompt(200)
    done = tree.insert(SPACE, tokens[:100], pages(0, 2), owners(1, 2), pin=True)
    again = tree.insert(SPACE, tokens, np.array([0, 1, 5, 6]), owners(1, 0, 3, 3))
    assert (again.tokens, again.known_tokens, again.duplicates.tolist()) == (200, 100, [])
    assert tree.match(SPACE, tokens).pages.tolist() == [0, 1, 5, 6]
    assert tree.match(SPACE, tokens[:100]).tokens == 64  # inside a page now
    assert tree.node(again.node).owners.tolist() == [2, 3, 3]  # where its bytes are did not change
    assert tree.stats().l1_pages == 4
    tree.unpin(done.node)
    assert tree.stats().pins == 0


@pytest.mark.contract(46)
def test_a_tail_that_is_being_backed_up_does_not_grow(tree: PrefixTree) -> None:
    """The rest stays with the caller while a copy of the tail is in flight; after it the tail grows and gives
    up its stale L2 page."""
    tokens = prompt(200)
    node = put(tree, tokens[:100], 0)
    ticket = tree.begin_backup(node, pages(20, 2))
    mine = np.array([0, 1, 5, 6])
    refused = tree.insert(SPACE, tokens, mine, owners(0, 0, 0, 0))
    assert (refused.tokens, refused.duplicates.tolist()) == (100, [2, 3])
    assert tree.match(SPACE, tokens).tokens == 100
    tree.acknowledge(ticket)
    grown = tree.insert(SPACE, tokens, mine, owners(0, 0, 0, 0))
    assert (grown.tokens, grown.freed_l2.tolist()) == (200, [21])
    assert tree.stats().l2_pages == 1


@pytest.mark.contract(15)
@pytest.mark.parametrize("at", [1, 63, 65, 100, 0, -64, 256, 320])
def test_a_split_off_the_page_grid_is_refused(tree: PrefixTree, at: int) -> None:
    """split(k) off the grid or outside the node is an error that names k and changes nothing."""
    node = put(tree, prompt(256), 0)
    with pytest.raises(BadInput, match=f"at {at} is"):
        tree.split(node, at)
    assert tree.stats().nodes == 1


@pytest.mark.contract(15)
def test_a_split_cuts_owners_at_the_page(tree: PrefixTree) -> None:
    """split(k) cuts owners and pages of both tiers at k // page_size; the back part keeps the id."""
    done = tree.insert(SPACE, prompt(250), pages(0, 4), owners(3, 1, 2, 0))
    tree.acknowledge(tree.begin_backup(done.node, pages(40, 4)))
    front, back = tree.node(tree.split(done.node, 128)), tree.node(done.node)
    assert (front.owners.tolist(), back.owners.tolist()) == ([3, 1], [2, 0])
    assert (front.l1_pages.tolist(), back.l1_pages.tolist()) == ([0, 1], [2, 3])
    assert (front.l2_pages.tolist(), back.l2_pages.tolist()) == ([40, 41], [42, 43])
    assert (front.tokens, back.tokens, back.start, back.parent) == (128, 122, 128, front.id)
    assert front.state == back.state == Residency.L1_L2


def test_an_insert_says_which_pages_were_not_needed(tree: PrefixTree) -> None:
    """Positions that the tree held already come back, except where the very same page was brought along."""
    tokens = prompt(256)
    put(tree, tokens, 0)
    longer = np.concatenate([tokens[:192], prompt(128, 1)])
    done = tree.insert(SPACE, longer, np.array([0, 31, 2, 33, 34]), owners(0, 0, 0, 0, 0))
    assert (done.known_tokens, done.duplicates.tolist()) == (192, [1])
    assert tree.match(SPACE, longer).pages.tolist() == [0, 1, 2, 33, 34]
    assert tree.match(SPACE, tokens).pages.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_both_token_widths_name_the_same_prompt(tree: PrefixTree, dtype: type) -> None:
    """int32 and int64 arrays match each other, read-only ones too; a value above int32 matches nothing."""
    tokens = prompt(300)
    narrow: Any = tokens.astype(dtype)
    narrow.flags.writeable = False
    count = 5
    tree.insert(SPACE, narrow, pages(0, count), owners(*[0] * count))
    assert tree.match(SPACE, tokens).tokens == tree.match(SPACE, tokens.astype(np.int32)).tokens == 300
    for at in (3, 130, 299):
        wrong = tokens.copy()
        wrong[at] += 2**32
        assert tree.match(SPACE, wrong).tokens == at // PAGE * PAGE


@pytest.mark.parametrize("hash_bits", [0, 1])
def test_a_hash_collision_never_serves_another_prompt(track: Track, hash_bits: int) -> None:
    """With hashes that all collide every prompt still finds its own pages, and a foreign one finds none."""
    tree = track(PrefixTree(page_size=4, l1_pages=4096, hash_bits=hash_bits))
    prompts = [np.random.default_rng(i).integers(0, 3, 18, dtype=np.int64) for i in range(60)]
    for i, tokens in enumerate(prompts):
        tree.insert(SPACE, tokens, pages(5 * i, 5))
    for tokens in prompts:
        found = tree.match(SPACE, tokens)
        assert found.tokens == 18
        node = tree.node(found.node)
        assert node.start + node.tokens == 18
    assert tree.match(SPACE, np.full(18, 7)).tokens == 0


@pytest.mark.case("G15")
def test_a_lookup_pins_and_unpins_once(tree: PrefixTree) -> None:
    """1000 tokens looked up and finished leave no pin; a second unpin is an error, not clamped."""
    tokens = prompt(1000)
    put(tree, tokens, 0)
    found = tree.match(SPACE, tokens, pin=True)
    assert (tree.stats().pins, tree.stats().evictable_l1_pages) == (1, 0)
    tree.unpin(found.node)
    assert (tree.stats().pins, tree.stats().evictable_l1_pages) == (0, 16)
    with pytest.raises(BadInput, match=f"node {found.node} is not pinned"):
        tree.unpin(found.node)
    assert tree.stats().evictable_l1_pages == 16


def test_a_pin_survives_a_split_below_and_above(tree: PrefixTree) -> None:
    """A pinned node that is split stays held whole, and one unpin frees all of it."""
    tokens = prompt(256)
    put(tree, tokens, 0)
    found = tree.match(SPACE, tokens[:128], touch=False, pin=True)  # a use would cut the node behind it
    put(tree, np.concatenate([tokens[:64], prompt(64, 1)]), 10)
    assert tree.evict(1, 100).tolist() == [11]
    tree.unpin(found.node)
    assert sorted(tree.evict(1, 100).tolist()) == [0, 1, 2, 3]
    assert tree.stats().nodes == tree.stats().namespaces == 0


@pytest.mark.contract(142)
def test_a_draft_recomputes_the_last_matched_page(tree: PrefixTree) -> None:
    """With the draft rule a hit gives up its last page, tail or whole; an absent draft keeps it."""
    tokens = prompt(300)
    put(tree, tokens, 0)
    for length, kept in ((300, 256), (256, 192), (64, 0)):
        found = tree.match(SPACE, tokens[:length], draft=Draft.RECOMPUTE_LAST_PAGE)
        assert (found.tokens, len(found.pages)) == (kept, kept // PAGE)
    assert tree.match(SPACE, tokens, draft=Draft.NONE).tokens == 300
    assert tree.match(SPACE, tokens[:64], draft=Draft.RECOMPUTE_LAST_PAGE, pin=True).node == 0


@pytest.mark.contract(142)
def test_bigram_keys_tell_last_draft_rows_apart(tree: PrefixTree) -> None:
    """Keyed one token further, a page is another one where only the token behind it differs."""
    drafted = Namespace("print", None, None, bigrams=True)
    tokens = prompt(193)
    put(tree, tokens, 0, drafted)
    rule = Draft.ONE_TOKEN_FURTHER
    assert tree.match(drafted, tokens, draft=rule).pages.tolist() == [0, 1, 2]
    other = tokens.copy()
    other[128] += 1
    found = tree.match(drafted, other, draft=rule)
    assert (found.tokens, found.pages.tolist()) == (64, [0])  # token keys would share 128
    assert tree.match(drafted, tokens[:128], draft=rule).tokens == 64  # 127 keys
    with pytest.raises(BadInput, match="namespace of bigrams only"):
        tree.match(SPACE, tokens, draft=rule)
    with pytest.raises(BadInput, match="no page is recomputed"):
        tree.match(drafted, tokens, draft=Draft.RECOMPUTE_LAST_PAGE)


def bad_calls() -> dict[str, tuple[type[Exception], str, Callable[[PrefixTree, Array, int], object]]]:
    none = owners(0, 0)

    def put_two(tree: PrefixTree, tokens: Array, two: Array, lanes: npt.NDArray[np.int8] = none) -> object:
        return tree.insert(SPACE, tokens[:100], two, lanes)

    return {
        "too few pages": (PageMismatch, "1 pages are given where 2", lambda t, x, n: put_two(t, x, pages(9, 1))),
        "too few owners": (PageMismatch, "1 owners are given", lambda t, x, n: put_two(t, x, pages(9, 2), owners(0))),
        "a foreign page": (BadInput, "page 4096 is outside", lambda t, x, n: put_two(t, x, np.array([9, 4096]))),
        "a negative page": (BadInput, "page -1 is outside", lambda t, x, n: put_two(t, x, np.array([-1, 9]))),
        "a page twice": (BadInput, "page 9 is given twice", lambda t, x, n: put_two(t, x, np.array([9, 9]))),
        "a page of another place": (BadInput, "page 3 is in the tree", lambda t, x, n: put_two(t, x, np.array([9, 3]))),
        "a foreign lane": (BadInput, "owner 4 is outside", lambda t, x, n: put_two(t, x, pages(9, 2), owners(0, 4))),
        "no token": (BadInput, "0 tokens", lambda t, x, n: t.insert(SPACE, x[:0], pages(0, 0), owners())),
        "a negative token": (BadInput, "token at 99", lambda t, x, n: put_two(t, np.append(x[:99], -1), pages(9, 2))),
        "floating tokens": (BadInput, "int64 or int32", lambda t, x, n: t.match(SPACE, x.astype(np.float64))),  # type: ignore[arg-type]
        "tokens with gaps": (BadInput, "contiguous", lambda t, x, n: t.match(SPACE, x[::2])),
        "a table of tokens": (BadInput, "one dimension, not 2", lambda t, x, n: t.match(SPACE, x[:100].reshape(2, 50))),
        "a made-up node": (BadInput, "no node 12345", lambda t, x, n: t.pin(12345)),
        "no node": (BadInput, "no node 0", lambda t, x, n: t.unpin(0)),
        "a made-up ticket": (BadInput, "ticket 5", lambda t, x, n: t.acknowledge(5)),
        "less than nothing": (BadInput, "cannot evict -1", lambda t, x, n: t.evict(1, -1)),
        "a third tier": (BadInput, "tier 3", lambda t, x, n: t.evict(3, 1)),  # type: ignore[arg-type]
        "two lanes of four": (BadInput, "2 numbers for 4 lanes", lambda t, x, n: t.evict_owners(1, [1, 1])),
        "a short backup": (PageMismatch, "3 pages are given where 4", lambda t, x, n: t.begin_backup(n, pages(0, 3))),
        "no acknowledgement": (BadInput, "or more, not 0", lambda t, x, n: t.begin_backup(n, pages(0, 4), acks=0)),
        "a load of what is there": (BadInput, "nothing to load", lambda t, x, n: t.begin_load(n, pages(0, 0))),
    }  # fmt: skip


@pytest.mark.parametrize("name", bad_calls())
def test_bad_input_names_the_value_and_changes_nothing(tree: PrefixTree, name: str) -> None:
    """Each wrong argument is a typed error; the tree stays as it was."""
    error, text, call = bad_calls()[name]
    tokens = prompt(256)
    node = put(tree, tokens, 0)
    before = tree.node(node).l1_pages.tolist(), tree.stats().nodes, tree.stats().namespaces
    with pytest.raises(error, match=text):
        call(tree, prompt(200, 9), node)
    assert (tree.node(node).l1_pages.tolist(), tree.stats().nodes, tree.stats().namespaces) == before
    tree.check_integrity()


@pytest.mark.parametrize(
    "shape",
    [
        {"page_size": 0},
        {"l1_pages": -1},
        {"l2_pages": 2**40},
        {"lanes": 0},
        {"lanes": 128},
        {"hash_bits": 65},
    ],
)
def test_an_impossible_shape_is_refused(shape: dict[str, int]) -> None:
    """A tree without pages of at least one token, or with lanes that int8 cannot name, does not come to be."""
    with pytest.raises(BadInput, match=str(next(iter(shape.values())))):
        PrefixTree(**({"page_size": 64, "l1_pages": 8} | shape))


def test_a_stale_node_is_no_node(tree: PrefixTree) -> None:
    """The id of an evicted or shortened node is an error, even when its place has been taken again."""
    node = put(tree, prompt(256), 0)
    assert tree.evict(1, 1).tolist() == [3]
    with pytest.raises(BadInput, match=f"no node {node}"):
        tree.pin(node)
    assert tree.match(SPACE, prompt(256)).tokens == 192
    tree.evict(1, 3)
    put(tree, prompt(64, 1), 0)
    with pytest.raises(BadInput, match=f"no node {node}"):
        tree.pin(node)
