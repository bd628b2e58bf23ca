"""The model of the abort and drain protocol (docs/protocol.md), explored by spin."""

from __future__ import annotations

import re
from functools import cache

import pytest

from app.core.lifecycle import DECODE, PREFILL, Event, State, Table
from formal.check import HERE, SEARCHES, WRONG, Outcome, explore, unused
from formal.tables import entries, promela

# Both sides share the late entries. Prefill alone is told; and a prefill room that failed before its drain was
# parked, so that it has sent nothing that could land.
NEVER_RAISED = {
    ("prefill", "failed", "landed", "failed"),
    ("decode", "draining", "told", "draining"),
    ("decode", "failed", "told", "failed"),
}


@cache
def searched(name: str) -> Outcome:
    return explore(SEARCHES[name])


def test_the_models_tables_are_those_of_the_code() -> None:
    """formal/tables.pml is what `python -m formal tables` prints from app/core/lifecycle.py."""
    assert (HERE / "tables.pml").read_text() == promela()


def test_another_table_makes_another_model() -> None:
    """An entry that is added to a lifecycle table is added to the model's."""
    more: Table = {**DECODE, (State.METADATA, Event.DRAINED): State.FAILED}
    changed = promela({"prefill": PREFILL, "decode": more})
    assert changed != promela()
    assert "life == METADATA && event == DRAINED" in changed


def test_the_model_changes_lives_by_the_tables_alone() -> None:
    """Outside the tables the model gives a new room its first state, and changes none after that."""
    text = (HERE / "rooms.pml").read_text()
    assigned = set(re.findall(r"\b(prefill|decode)\[\w+\] = (\w+)", text))
    assert assigned == {
        ("prefill", "BOOTSTRAPPING"),
        ("prefill", "PARKED"),
        ("decode", "BOOTSTRAPPING"),
    }


@pytest.mark.contract(111, 125)
@pytest.mark.case("A1", "A2", "A5", "A13", "F4")
@pytest.mark.parametrize("name", SEARCHES)
def test_no_page_is_reused_while_a_write_can_land_and_no_room_waits_for_ever(name: str) -> None:
    """Every reachable state: pages are free only when nothing lands on them, and every run ends, free = initial."""
    outcome = searched(name)
    assert outcome.error == "", outcome.trail[-20_000:]
    assert outcome.complete
    assert outcome.states > 100_000


def test_the_model_uses_every_entry_of_the_tables() -> None:
    """The transitions that the searches follow are those of the tables, but for two that have no sender."""
    outcomes = [searched(name) for name in SEARCHES]
    assert unused(outcomes) == NEVER_RAISED
    assert frozenset().union(*(outcome.used for outcome in outcomes)) == set(entries()) - NEVER_RAISED


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_protocol_is_found(name: str) -> None:
    """Each known mistake in the protocol, made in the model, is found by the search that proves the right one."""
    macros, expected = WRONG[name]
    outcome = explore(macros)
    assert expected in outcome.error
    assert outcome.trail


def test_confirmed_rooms_close_the_gap_of_an_unheard_abort() -> None:
    """A hold of bounded time is enough once prefill sends only for rooms that decode has lately confirmed."""
    outcome = explore(("ONE_ROOM", "STOPS", "REPEATS=1", "LEASE"))
    assert (outcome.error, outcome.complete) == ("", True), outcome.trail[-20_000:]
