"""Durations of a request's phases."""

from __future__ import annotations

import pytest

from app.core.phases import Phases


@pytest.mark.contract(129)
def test_an_unset_phase_lasts_zero_seconds() -> None:
    """A duration with an unset end or start is 0, whatever the other one is."""
    assert Phases().durations() == dict.fromkeys(Phases().durations(), 0.0)
    half = Phases(received=100.0, forward_end=5.0)
    assert set(half.durations().values()) == {0.0}


@pytest.mark.contract(129)
def test_a_duration_is_never_negative() -> None:
    """A phase that ended before it began, by an event out of order, lasts 0."""
    odd = Phases(received=10.0, admitted=9.0, forward_start=8.0, forward_end=7.0, told=6.0, finished=1.0)
    assert all(seconds == 0.0 for seconds in odd.durations().values())


@pytest.mark.case("L6")
def test_the_transfer_ends_with_its_last_byte() -> None:
    """Transfer time runs to the end of the transfer, not to the end of the request."""
    phases = Phases(
        received=1.0,
        admitted=2.0,
        forward_start=3.0,
        forward_end=5.0,
        transfer_end=6.0,
        told=6.5,
        finished=60.0,
    )
    assert phases.durations() == {
        "queue_s": 1.0,
        "forward_s": 2.0,
        "transfer_s": 3.0,
        "exposed_s": 1.5,
        "total_s": 59.0,
    }


def test_marks_follow_the_clock() -> None:
    """Marking two phases in turn gives a duration of zero or more."""
    phases = Phases()
    phases.mark("received")
    phases.mark("admitted")
    assert phases.received > 0
    assert phases.admitted >= phases.received
