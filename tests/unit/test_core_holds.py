"""Quarantine: finite holds that give back exactly once."""

from __future__ import annotations

import math

import numpy as np
import pytest

from app.core.holds import Hold, Quarantine
from app.core.ids import RoomId
from app.core.lanes import PageLane
from app.errors import BadInput
from tests.conftest import Track


class Given:
    """Counts how often it was given back."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def hold(quarantine: Quarantine, given: Given, *, for_s: float = 10.0, now_s: float = 100.0) -> Hold:
    return quarantine.hold(
        room=RoomId(7), reason="draining", pages=4, now_s=now_s, for_s=for_s, give_back=given
    )


def test_a_release_gives_back_once() -> None:
    """Ending a hold twice, or ending and expiring it, gives its resources back a single time."""
    quarantine, given = Quarantine(), Given()
    held = hold(quarantine, given)
    assert (len(quarantine), quarantine.pages) == (1, 4)
    assert quarantine.release(held)
    assert not quarantine.release(held)
    assert quarantine.expire(1000.0) == []
    assert (given.times, len(quarantine), quarantine.pages, quarantine.expired) == (1, 0, 0, 0)


def test_a_hold_ends_at_its_deadline() -> None:
    """Before its deadline a hold stays; from then on it is given back, once, and a late release is void."""
    quarantine, given, other = Quarantine(), Given(), Given()
    held = hold(quarantine, given)
    hold(quarantine, other, for_s=20.0)
    assert quarantine.expire(109.9) == []
    assert given.times == 0
    assert quarantine.expire(110.0) == [held]
    assert (given.times, other.times, quarantine.expired, len(quarantine)) == (1, 0, 1, 1)
    assert not quarantine.release(held)
    assert given.times == 1


@pytest.mark.parametrize("for_s", [0.0, -1.0, math.inf, math.nan])
def test_deadlines_are_finite(for_s: float) -> None:
    """A hold without a finite, positive deadline is refused and holds nothing."""
    quarantine = Quarantine()
    with pytest.raises(BadInput, match="a hold needs a finite deadline") as caught:
        hold(quarantine, Given(), for_s=for_s)
    assert caught.value.room == 7
    assert len(quarantine) == 0


def test_a_snapshot_says_who_and_how_long() -> None:
    """The snapshot shows room, reason, pages, age and what is left."""
    quarantine = Quarantine()
    hold(quarantine, Given())
    assert quarantine.snapshot(103.0) == [
        {"room": 7, "reason": "draining", "pages": 4, "age_s": 3.0, "left_s": 7.0}
    ]


def test_held_pages_are_nobody_elses(track: Track) -> None:
    """Pages in quarantine are not handed out before the hold has ended."""
    lane, quarantine = track(PageLane(8)), Quarantine()
    mine = lane.allocate(6)
    assert mine is not None
    held = quarantine.hold(
        room=RoomId(1),
        reason="draining",
        pages=len(mine),
        now_s=0.0,
        for_s=1.0,
        give_back=lambda: lane.release(mine),
    )
    assert lane.allocate(3) is None
    quarantine.release(held)
    again = lane.allocate(8)
    assert again is not None
    assert np.isin(mine, again).all()
