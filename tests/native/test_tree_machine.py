"""The prefix tree against its slow model, under every operation in any order."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.core.prefix_tree import POLICIES, Draft, Namespace, Policy, PrefixTree
from app.errors import BadInput, PageMismatch
from tests.native.tree_model import HOLDS_L2, Foreign, Hold, Key, TreeModel

PAGE = 4
LANES = 3
POOL = 400
SPACES = {
    "tokens": Namespace("print", "a", None),
    "salted": Namespace("print", "b", None),
    "bigrams": Namespace("print", "a", None, bigrams=True),
}
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=22)
names = st.sampled_from(sorted(SPACES))


def keys_of(name: str, tokens: list[int]) -> Key:
    return tuple(itertools.pairwise(tokens)) if SPACES[name].bigrams else tuple(tokens)


class TreeMachine(RuleBasedStateMachine):
    """Few tokens and short pages, so that prompts share, diverge and end anywhere; few hash bits in half of
    the runs, so that pages collide. The policies decide in which order pages go, never which may."""

    @initialize(
        hash_bits=st.sampled_from([64, 2, 0]),
        l1_policy=st.sampled_from(POLICIES),
        l2_policy=st.sampled_from(POLICIES),
    )
    def start(self, hash_bits: int, l1_policy: Policy, l2_policy: Policy) -> None:
        self.tree = PrefixTree(
            page_size=PAGE,
            l1_pages=POOL,
            l2_pages=POOL,
            lanes=LANES,
            hash_bits=hash_bits,
            policy=l1_policy,
            l2_policy=l2_policy,
        )
        self.models = {name: TreeModel(PAGE) for name in SPACES}
        self.policies = {1: l1_policy, 2: l2_policy}
        self.free = {1: list(range(POOL)), 2: list(range(POOL))}
        self.pins: list[tuple[str, int, Hold]] = []
        self.copies: list[tuple[str, int, int, Hold]] = []  # the numbers: ticket, acknowledgements missing

    steps: ClassVar[int] = 0

    # --- helpers

    def take(self, tier: int, count: int) -> list[int]:
        taken = self.free[tier][:count]
        del self.free[tier][:count]
        return taken

    def give(self, tier: int, pages: Any) -> None:
        for page in map(int, pages):
            assert page not in self.free[tier]
            self.free[tier].append(page)

    def owners(self, first: int, count: int) -> list[int]:
        return [(first + i) % LANES for i in range(count)]

    def fitting(self, name: str, tokens: list[int]) -> list[tuple[int, int, Key]]:
        """Nodes that lie whole inside the prompt: (id, first page, end), from the top."""
        keys = keys_of(name, tokens)
        found = self.tree.match(SPACES[name], np.array(tokens), touch=False)
        nodes = self.tree.path(found.node) if found.node else []
        out = []
        for node in nodes:
            info = self.tree.node(node)
            end = info.start + info.tokens
            if end <= found.known_tokens:
                out.append((node, info.start // PAGE, keys[:end]))
        return out

    def pages_between(self, first: int, end: Key) -> list[Key]:
        last = -(-len(end) // PAGE)
        return [end[: (i + 1) * PAGE] for i in range(first, last)]

    # --- rules

    @rule(name=names, tokens=prompts, wide=st.booleans(), touch=st.booleans())
    def match(self, name: str, tokens: list[int], wide: bool, touch: bool) -> None:
        array: Any = np.array(tokens, dtype=np.int64 if wide else np.int32)
        readable, l1, known, pages = self.models[name].match(keys_of(name, tokens))
        found = self.tree.match(SPACES[name], array, touch=touch)
        assert (found.tokens, found.l1_tokens, found.known_tokens) == (readable, l1, known)
        assert found.pages.tolist() == pages
        assert (found.node == 0) == (readable == 0)
        floored = self.tree.match(SPACES[name], array, floor=True)
        assert floored.tokens == readable // PAGE * PAGE
        assert floored.pages.tolist() == pages[: floored.l1_tokens // PAGE]
        if not SPACES[name].bigrams:
            drafted = self.tree.match(SPACES[name], array, draft=Draft.RECOMPUTE_LAST_PAGE)
            assert drafted.tokens == max(readable - 1, 0) // PAGE * PAGE

    @rule(name=names, tokens=prompts, data=st.data(), pin=st.booleans())
    def insert(self, name: str, tokens: list[int], data: st.DataObject, pin: bool) -> None:
        model, keys = self.models[name], keys_of(name, tokens)
        count = -(-len(keys) // PAGE)
        if not keys:
            with pytest.raises(BadInput):
                self.tree.insert(SPACES[name], np.array(tokens), np.array([], dtype=np.int64))
            return
        mine = self.take(1, count)
        pages = list(mine)
        if data.draw(st.booleans()):
            # what a request that was served from the tree brings along: the tree's own pages
            for i, key in enumerate(model.path(keys)):
                entry = model.entries[key]
                if entry.l1 is not None and data.draw(st.booleans()):
                    pages[i] = entry.l1
        grid = data.draw(st.integers(0, count - 1))
        tails = [
            e.l1
            for k, e in model.entries.items()
            if model.parent(k) == keys[: grid * PAGE] and len(k) % PAGE and k == keys[: len(k)]
        ]
        if tails and tails[0] is not None:
            pages[grid] = tails[0]  # the page that this request went on writing
        owners = self.owners(0, count)
        arguments = (SPACES[name], np.array(tokens), np.array(pages), np.array(owners, dtype=np.int8))
        try:
            expected = model.insert(keys, pages, owners)
        except Foreign:
            with pytest.raises(BadInput):
                self.tree.insert(*arguments)
            self.give(1, mine)
            return
        done = self.tree.insert(*arguments, pin=pin)
        assert done.tokens == expected.tokens
        assert done.duplicates.tolist() == expected.duplicates
        assert done.freed_l2.tolist() == expected.freed_l2
        self.give(2, expected.freed_l2)
        self.give(1, set(mine) - model.pages_of(1))
        assert {pages[i] for i in expected.duplicates} <= set(self.free[1])
        if pin and done.node:
            self.remember_pin(name, done.node)

    def remember_pin(self, name: str, node: int) -> None:
        """Find the node's end in the model by its last page: it may lie past the prompt."""
        info, model = self.tree.node(node), self.models[name]
        last = {*info.l1_pages[-1:].tolist()}, {*info.l2_pages[-1:].tolist()}
        (end,) = (k for k, e in model.entries.items() if e.l1 in last[0] or e.l2 in last[1])
        assert len(end) == info.start + info.tokens
        self.pins.append((name, node, model.hold(end)))

    @rule(name=names, tokens=prompts)
    def match_and_pin(self, name: str, tokens: list[int]) -> None:
        found = self.tree.match(SPACES[name], np.array(tokens), pin=True)
        if found.node:
            self.remember_pin(name, found.node)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name, node, hold = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.tree.unpin(node)
        self.models[name].release(hold)
        if not any(other == node for _, other, _ in self.pins):
            with pytest.raises(BadInput):
                self.tree.unpin(node)

    @rule(name=names, tokens=prompts, data=st.data())
    def split(self, name: str, tokens: list[int], data: st.DataObject) -> None:
        nodes = self.fitting(name, tokens)
        if not nodes:
            return
        node, _, _ = data.draw(st.sampled_from(nodes))
        info = self.tree.node(node)
        cut = data.draw(st.integers(0, info.tokens + 1))
        if 0 < cut < info.tokens and cut % PAGE == 0:
            front = self.tree.node(self.tree.split(node, cut))
            back = self.tree.node(node)
            assert front.owners.tolist() == info.owners.tolist()[: cut // PAGE]
            assert back.owners.tolist() == info.owners.tolist()[cut // PAGE :]
            assert (front.tokens, back.tokens) == (cut, info.tokens - cut)
        else:
            with pytest.raises(BadInput):
                self.tree.split(node, cut)

    @rule(name=names, tokens=prompts, acks=st.integers(1, 2))
    def reserve(self, name: str, tokens: list[int], acks: int) -> None:
        model, keys = self.models[name], keys_of(name, tokens)
        path = model.path(keys)
        known = len(path[-1]) if path else 0
        first = known // PAGE
        count = -(-(len(keys) - first * PAGE) // PAGE)
        parent = keys[: first * PAGE]
        allowed = known < len(keys) and (not parent or model.entries[parent].state in HOLDS_L2)
        pages, owners = self.take(2, count), self.owners(first, count)
        arguments = (
            SPACES[name],
            np.array(tokens),
            first,
            np.array(pages, dtype=np.int64),
            np.array(owners, np.int8),
        )
        if not allowed:
            with pytest.raises(BadInput):
                self.tree.reserve(*arguments)
            self.give(2, pages)
            return
        with pytest.raises(PageMismatch):
            self.tree.reserve(*arguments[:2], first + 1, *arguments[3:])
        done = self.tree.reserve(*arguments, acks=acks)
        hold = model.reserve(keys, first, pages, owners, done.ticket)
        self.copies.append((name, done.ticket, acks, hold))

    @rule(name=names, tokens=prompts, data=st.data(), acks=st.integers(1, 2))
    def begin_backup(self, name: str, tokens: list[int], data: st.DataObject, acks: int) -> None:
        nodes = self.fitting(name, tokens)
        if not nodes:
            return
        model = self.models[name]
        node, first, end = data.draw(st.sampled_from(nodes))
        keys = self.pages_between(first, end)
        pages = self.take(2, len(keys))
        parent = end[: first * PAGE]
        allowed = model.entries[end].state == "l1" and (not parent or model.entries[parent].state in HOLDS_L2)
        if not allowed:
            with pytest.raises(BadInput):
                self.tree.begin_backup(node, np.array(pages))
            self.give(2, pages)
            return
        ticket = self.tree.begin_backup(node, np.array(pages), acks=acks)
        self.copies.append((name, ticket, acks, model.begin_backup(end, keys, pages, ticket)))

    @rule(name=names, tokens=prompts)
    def begin_load(self, name: str, tokens: list[int]) -> None:
        nodes = self.fitting(name, tokens)
        if not nodes:
            return
        model = self.models[name]
        node, _, end = nodes[-1]
        keys = [key for key in self.pages_between(0, end) if model.entries[key].state == "l2"]
        assert self.tree.load_owners(node).tolist() == [model.entries[k].owner for k in keys]
        assert self.tree.load_pages(node).tolist() == [model.entries[k].l2 for k in keys]
        pages = self.take(1, len(keys))
        if not keys:
            with pytest.raises(BadInput):
                self.tree.begin_load(node, np.array(pages, dtype=np.int64))
            return
        ticket = self.tree.begin_load(node, np.array(pages))
        self.copies.append((name, ticket, 1, model.begin_load(keys[-1], keys, pages, ticket)))

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), cancelled=st.booleans())
    def settle(self, data: st.DataObject, cancelled: bool) -> None:
        index = data.draw(st.integers(0, len(self.copies) - 1))
        name, ticket, acks, hold = self.copies[index]
        model = self.models[name]
        if acks > 1 and not cancelled:
            assert self.tree.acknowledge(ticket).nodes == []
            self.copies[index] = (name, ticket, acks - 1, hold)
            return
        del self.copies[index]
        tier = 1 if model.entries[hold.end].state == "loading" else 2
        done = self.tree.cancel(ticket) if cancelled else self.tree.acknowledge(ticket)
        pages = model.settle(ticket, hold, cancelled=cancelled)
        assert set(done.pages.tolist()) == pages
        self.give(tier, pages)
        with pytest.raises(BadInput):
            self.tree.acknowledge(ticket)

    @rule(tier=st.sampled_from([1, 2]), count=st.integers(0, 3) | st.integers(0, 12))
    def evict(self, tier: int, count: int) -> None:
        may_go = set[int]().union(*(model.evictable(tier) for model in self.models.values()))
        gone = self.tree.evict(tier, count).tolist()  # type: ignore[arg-type]
        assert len(gone) == len(set(gone)) == min(count, len(may_go))
        self.apply_eviction(tier, set(gone))

    @rule(tier=st.sampled_from([1, 2]), wanted=st.lists(st.integers(0, 4), min_size=LANES, max_size=LANES))
    def evict_owners(self, tier: int, wanted: list[int]) -> None:
        owner = {
            (e.l1 if tier == 1 else e.l2): e.owner for m in self.models.values() for e in m.entries.values()
        }
        may_go = set[int]().union(*(model.evictable(tier) for model in self.models.values()))
        named = self.tree.victims(tier, wanted)  # type: ignore[arg-type]
        assert self.tree.victims(tier, wanted) == named  # type: ignore[arg-type]
        infos = [self.tree.node(node) for node in named]
        self.tree.check_integrity()
        gone = self.tree.evict_owners(tier, wanted).tolist()  # type: ignore[arg-type]
        place = {
            int(page): i for i, info in enumerate(infos) for page in (info.l1_pages, info.l2_pages)[tier - 1]
        }
        if self.policies[tier] != "s3fifo":  # it orders what came at one time by the node's place in memory
            assert list(dict.fromkeys(place[page] for page in gone)) == list(range(len(named)))
        assert len(gone) == len(set(gone))
        assert sum(wanted) > 0 or not gone
        for lane, pages in enumerate(wanted):
            there = sum(owner[page] == lane for page in may_go)
            assert sum(owner[page] == lane for page in gone) >= min(pages, there)
        self.apply_eviction(tier, set(gone))

    def apply_eviction(self, tier: int, gone: set[int]) -> None:
        for model in self.models.values():
            model.evict(tier, gone & model.pages_of(tier))
        self.give(tier, gone)

    @rule(name=names)
    def clear(self, name: str) -> None:
        freed = self.tree.clear(SPACES[name])
        l1, l2 = self.models[name].clear()
        assert (set(freed.l1.tolist()), set(freed.l2.tolist())) == (l1, l2)
        self.give(1, l1)
        self.give(2, l2)

    # --- what always holds

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        type(self).steps += 1
        self.tree.check_integrity()
        stats = self.tree.stats()
        for tier, pages, evictable in (
            (1, stats.l1_pages, stats.evictable_l1_pages),
            (2, stats.l2_pages, stats.evictable_l2_pages),
        ):
            assert pages == sum(len(m.pages_of(tier)) for m in self.models.values())
            assert evictable == sum(len(m.evictable(tier)) for m in self.models.values())
            assert pages + len(self.free[tier]) == POOL
        assert stats.pins == len(self.pins)
        assert stats.tickets == len(self.copies)


@pytest.mark.contract(15, 27, 29, 30, 31, 35, 46)
def test_tree_agrees_with_its_slow_model() -> None:
    """After any sequence of operations the tree holds, finds and gives back what a model without nodes does."""
    TreeMachine.steps = 0
    run_state_machine_as_test(
        TreeMachine,
        settings=settings(
            max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert TreeMachine.steps >= 2000
