"""The two lifecycle tables."""

from __future__ import annotations

import itertools

import pytest

from app.core.lifecycle import TABLES, TERMINAL, Event, Lifecycle, State, mermaid
from app.errors import DeadlineExceeded, IllegalTransition, PeerAborted

STATES = {name: {s for s, _ in table} | set(table.values()) for name, table in TABLES.items()}


@pytest.mark.parametrize("side", TABLES)
def test_a_missing_entry_raises_and_changes_nothing(side: str) -> None:
    """Every (state, event) pair that the table lacks is an illegal transition, the others follow it."""
    table = TABLES[side]
    for state, event in itertools.product(STATES[side], Event):
        life = Lifecycle(table=table, state=state)
        if (state, event) in table:
            assert life.advance(event) is table[state, event]
            continue
        with pytest.raises(IllegalTransition) as caught:
            life.advance(event)
        assert caught.value.message == f"{event} in state {state}"
        assert (life.state, life.history) == (state, [])


@pytest.mark.parametrize("side", TABLES)
def test_every_state_can_fail_and_failure_reaches_an_end(side: str) -> None:
    """A failure is legal in each state; it ends at once or after draining, and success stays success."""
    for state in STATES[side]:
        life = Lifecycle(table=TABLES[side], state=state)
        changed = life.fail(PeerAborted("gone"))
        assert changed is (state not in (State.SUCCESS, State.FAILED, State.DRAINING))
        if life.state is State.DRAINING:
            assert not life.ended
            assert life.failing
            life.advance(Event.DRAINED)
        assert life.state in TERMINAL
        assert (life.state is State.SUCCESS) is (state is State.SUCCESS)


@pytest.mark.case("B2")
@pytest.mark.parametrize("side", TABLES)
def test_the_first_reason_stays(side: str) -> None:
    """A failed room keeps its first reason whatever comes later: failures, landings, drains."""
    start = State.TRANSFERRING if side == "prefill" else State.WAITING
    life = Lifecycle(table=TABLES[side], state=start)
    first = DeadlineExceeded("too late", room=7)
    assert life.fail(first)
    assert not life.fail(PeerAborted("later"))
    assert life.advance(Event.LANDED) is State.DRAINING
    assert life.advance(Event.DRAINED) is State.FAILED
    assert life.advance(Event.LANDED) is State.FAILED
    assert life.advance(Event.TOLD) is State.FAILED
    assert not life.fail(PeerAborted("much later"))
    assert life.reason is first
    assert life.history == [start, State.DRAINING]


def test_success_cannot_fail() -> None:
    """A room that has succeeded records no reason afterwards."""
    life = Lifecycle(table=TABLES["decode"], state=State.SUCCESS)
    assert not life.fail(PeerAborted("late"))
    assert (life.state, life.reason) == (State.SUCCESS, None)


@pytest.mark.parametrize("side", TABLES)
def test_the_way_to_success(side: str) -> None:
    """The happy path of each side ends in success and remembers its states."""
    ways = {
        "prefill": (State.PARKED, [Event.REQUEST, Event.ADMIT, Event.LANDED, Event.TOLD]),
        "decode": (State.BOOTSTRAPPING, [Event.ANNOUNCED, Event.LANDED, Event.READ, Event.FINISH]),
    }
    start, events = ways[side]
    life = Lifecycle(table=TABLES[side], state=start)
    for event in events:
        assert not life.ended
        life.advance(event)
    assert life.ended
    assert life.state is State.SUCCESS
    assert len(life.history) == len(events)


@pytest.mark.parametrize("side", TABLES)
def test_the_diagram_shows_each_change(side: str) -> None:
    """The generated diagram has one line for each entry that changes the state, and no other."""
    text = mermaid(TABLES[side])
    changes = [f"    {s} --> {t}: {e}" for (s, e), t in TABLES[side].items() if s is not t]
    assert [line for line in text.splitlines() if ": " in line] == changes
