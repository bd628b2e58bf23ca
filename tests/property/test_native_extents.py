"""The native allocators against their slow models, page for page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.core.extents import PageExtents
from app.core.lanes import OwnerLanes
from app.errors import BadInput
from tests.native.page_model import PageModel

HOLDERS = st.integers(0, 3)


def array(pages: list[int]) -> np.ndarray:
    return np.array(pages, dtype=np.int64)


class ExtentsMachine(RuleBasedStateMachine):
    """Small pools meet their edges often; the large one has more extents than one block of the index holds."""

    @initialize(pages=st.sampled_from([1, 2, 7, 40, 300]))
    def start(self, pages: int) -> None:
        self.pages = pages
        self.real = PageExtents(pages)
        self.model = PageModel(pages)

    def some_taken(self, data: st.DataObject) -> list[int]:
        taken = sorted(self.model.taken)
        if not taken:
            return []
        first, step = data.draw(st.integers(0, len(taken) - 1)), data.draw(st.integers(1, 3))
        some = taken[first::step][: data.draw(st.integers(1, 40))]
        return data.draw(st.permutations(some))

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pages) if data.draw(st.booleans()) else st.just(1))
        by_runs = data.draw(st.booleans())
        if by_runs:
            runs = self.model.choose(count)
            found = self.real.allocate_runs(count)
            self.model.allocate(count)
            assert (runs is None) is (found is None)
            if runs is not None and found is not None:
                assert found[0].tolist() == [r.start for r in runs]
                assert found[1].tolist() == [len(r) for r in runs]
        else:
            expected, pages = self.model.allocate(count), self.real.allocate(count)
            assert (None if pages is None else pages.tolist()) == expected

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        some = self.some_taken(data)
        self.real.release(array(some))
        self.model.release(some)

    @rule()
    def comb(self) -> None:
        """Take everything and free each second page: as many extents as there can be."""
        if self.model.free:
            everything = self.real.allocate(len(self.model.free))
            assert everything is not None
            assert everything.tolist() == self.model.allocate(len(self.model.free))
            odd = [int(p) for p in everything if p % 2]
            self.real.release(array(odd))
            self.model.release(odd)

    @rule(data=st.data())
    def release_runs(self, data: st.DataObject) -> None:
        some = sorted(self.some_taken(data))
        self.real.release_runs(array(some), np.ones(len(some), dtype=np.int64))
        self.model.release(some)

    @rule(data=st.data(), bad=st.integers(-2, 2))
    def release_badly(self, data: st.DataObject, bad: int) -> None:
        some = self.some_taken(data)
        wrong = [*sorted(self.model.free)[:1], *sorted(p for h in self.model.held.values() for p in h)[:1]]
        wrong += [self.pages + bad, -1, *some[:1]]
        page = data.draw(st.sampled_from(wrong))
        if page in self.model.taken and page not in some:
            return
        with pytest.raises(BadInput, match=str(page)):
            self.real.release(array([*some, page]))

    @rule(holder=HOLDERS, data=st.data())
    def reserve(self, holder: int, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pages))
        found, expected = self.real.reserve(holder, count), self.model.reserve(holder, count)
        assert (None if found is None else found.tolist()) == expected

    @rule(holder=HOLDERS, keep=st.booleans())
    def end(self, holder: int, keep: bool) -> None:
        ending = self.real.commit if keep else self.real.roll_back
        if holder not in self.model.held:
            with pytest.raises(BadInput, match=f"nothing is reserved for holder {holder}"):
                ending(holder)
            return
        assert ending(holder) == len(self.model.held[holder])
        (self.model.commit if keep else self.model.roll_back)(holder)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "real"):
            return
        self.real.check_integrity()
        assert self.real.free_pages == len(self.model.free)
        assert self.real.free_slots.tolist() == sorted(self.model.free)
        extents = self.model.extents()
        first, count = self.real.free_extents
        assert list(zip(first.tolist(), count.tolist(), strict=True)) == [(e.start, len(e)) for e in extents]
        assert self.real.largest_extent == self.model.largest()
        assert self.real.extents == len(extents)
        assert self.real.reserved_pages == sum(map(len, self.model.held.values()))
        for holder in range(4):
            assert self.real.reserved(holder).tolist() == self.model.held.get(holder, [])


class LanesMachine(RuleBasedStateMachine):
    """Each lane is its own model; a call takes from several lanes or from none."""

    @initialize(lanes=st.sampled_from([1, 2, 5]), pages=st.sampled_from([1, 6, 30]))
    def start(self, lanes: int, pages: int) -> None:
        self.pages = pages
        self.real = OwnerLanes(lanes, pages)
        self.models = [PageModel(pages, first=lane * pages) for lane in range(lanes)]

    def owners(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.integers(0, len(self.models) - 1), min_size=1, max_size=2 * self.pages))

    def expected(self, owners: list[int], holder: int | None) -> list[int] | None:
        wanted = [owners.count(lane) for lane in range(len(self.models))]
        assert self.real.deficits(owners).tolist() == [
            max(0, w - len(m.free)) for w, m in zip(wanted, self.models, strict=True)
        ]
        if any(w > len(m.free) for w, m in zip(wanted, self.models, strict=True)):
            return None
        of_lane = []
        for count, model in zip(wanted, self.models, strict=True):
            pages = model.allocate(count) if holder is None else model.reserve(holder, count)
            assert pages is not None
            of_lane.append(iter(sorted(pages)))
        return [next(of_lane[owner]) for owner in owners]

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        owners = self.owners(data)
        expected = self.expected(owners, None)
        found = self.real.alloc_pages_with_owners(owners)
        assert (None if found is None else found.tolist()) == expected
        if found is not None:
            assert self.real.owners_of(found).tolist() == owners

    @rule(data=st.data(), holder=HOLDERS)
    def reserve(self, data: st.DataObject, holder: int) -> None:
        owners = self.owners(data)
        expected = self.expected(owners, holder)
        found = self.real.reserve(holder, np.array(owners, dtype=np.int8))
        assert (None if found is None else found.tolist()) == expected

    @rule(holder=HOLDERS, keep=st.booleans())
    def end(self, holder: int, keep: bool) -> None:
        held = sum(len(m.held.get(holder, [])) for m in self.models)
        if not held:
            return
        assert (self.real.commit if keep else self.real.roll_back)(holder) == held
        for model in self.models:
            (model.commit if keep else model.roll_back)(holder)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        taken = sorted(p for m in self.models for p in m.taken)
        some = data.draw(st.lists(st.sampled_from(taken), unique=True) if taken else st.just([]))
        self.real.release(array(some))
        for model in self.models:
            model.release([p for p in some if p // self.pages * self.pages == model.first])

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([-1, len(self.models), 127, 300]))
        with pytest.raises(BadInput, match=str(owner)):
            self.real.alloc_pages_with_owners([*self.owners(data), owner])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "real"):
            return
        self.real.check_integrity()
        for lane, model in enumerate(self.models):
            assert self.real.free_in(lane) == len(model.free)
            assert self.real.largest_extent(lane) == model.largest()
        states = self.real._states
        assert set(np.flatnonzero(states == 0).tolist()) == set().union(*(m.free for m in self.models))
        assert set(np.flatnonzero(states == 1).tolist()) == set().union(*(m.taken for m in self.models))


STEPS = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestExtents = ExtentsMachine.TestCase
TestExtents.settings = STEPS
TestLanes = LanesMachine.TestCase
TestLanes.settings = STEPS
