"""The lane allocator against a set of page numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from app.core.lanes import PageLane
from app.errors import BadInput

PAGES = 24


class LaneMachine(RuleBasedStateMachine):
    """`free` is the model; the lane has to agree with it after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = PageLane(PAGES)
        self.free = set(range(PAGES))

    @rule(count=st.integers(0, PAGES + 2))
    def allocate(self, count: int) -> None:
        largest = self.lane.largest_extent
        found = self.lane.allocate(count)
        if count > len(self.free):
            assert found is None
            return
        assert found is not None
        taken = set(found.tolist())
        assert len(taken) == len(found) == count
        assert taken <= self.free
        if 0 < count <= largest:
            assert found.tolist() == list(range(found[0], found[0] + count))
        self.free -= taken

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        taken = sorted(set(range(PAGES)) - self.free)
        some = data.draw(st.lists(st.sampled_from(taken), unique=True) if taken else st.just([]))
        self.lane.release(np.array(some, dtype=np.int64))
        self.free |= set(some)

    @rule(data=st.data(), bad=st.integers(-2, PAGES + 2))
    def release_badly(self, data: st.DataObject, bad: int) -> None:
        taken = sorted(set(range(PAGES)) - self.free)
        some = data.draw(st.lists(st.sampled_from(taken), unique=True) if taken else st.just([]))
        if bad in taken:
            some = [*[page for page in some if page != bad], bad]  # so that the page stands twice
        with pytest.raises(BadInput):
            self.lane.release(np.array([*some, bad], dtype=np.int64))

    @invariant()
    def agrees(self) -> None:
        self.lane.check_integrity()
        assert self.lane.free_pages == len(self.free)
        runs = "".join("1" if page in self.free else " " for page in range(PAGES)).split()
        assert self.lane.largest_extent == max(map(len, runs), default=0)


TestPageLane = LaneMachine.TestCase
TestPageLane.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
