"""The life of a room on each side, as tables: (state, event) -> state.

An entry that is missing is an illegal event and raises; an entry that stays in its state is an event
that may arrive late and changes nothing. The diagrams in docs/lifecycle.md are generated from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from app.errors import IllegalTransition, KvferryError


class State(StrEnum):
    """States of both sides; each table uses the ones that apply to it."""

    PARKED = "parked"  # prefill: decode's pages are known, the request is not
    BOOTSTRAPPING = "bootstrapping"  # prefill: no pages known; decode: handshake, pages being taken
    WAITING = "waiting"  # prefill: queued for pages and a forward; decode: announced, nothing landed
    TRANSFERRING = "transferring"  # prefill: forward and engine at work
    METADATA = "metadata"  # prefill: slot written, decode being told; decode: told, slot being read
    DECODING = "decoding"  # decode: own forward steps
    DRAINING = "draining"  # failed, something may still be in flight
    SUCCESS = "success"
    FAILED = "failed"


class Event(StrEnum):
    REQUEST = "request"
    DESTINATION = "destination"
    ADMIT = "admit"
    ANNOUNCED = "announced"
    LANDED = "landed"
    TOLD = "told"
    READ = "read"
    FINISH = "finish"
    FAIL = "fail"
    DRAINED = "drained"


Table = Mapping[tuple[State, Event], State]

TERMINAL = frozenset({State.SUCCESS, State.FAILED})

_LATE: dict[tuple[State, Event], State] = {
    # the first outcome stays: a late success, failure or drain changes nothing
    (State.DRAINING, Event.FAIL): State.DRAINING,
    (State.DRAINING, Event.LANDED): State.DRAINING,
    (State.DRAINING, Event.TOLD): State.DRAINING,
    (State.DRAINING, Event.DRAINED): State.FAILED,
    (State.FAILED, Event.FAIL): State.FAILED,
    (State.FAILED, Event.LANDED): State.FAILED,
    (State.FAILED, Event.TOLD): State.FAILED,
    (State.FAILED, Event.DRAINED): State.FAILED,
    (State.SUCCESS, Event.FAIL): State.SUCCESS,
}

PREFILL: Table = {
    (State.PARKED, Event.REQUEST): State.WAITING,
    (State.PARKED, Event.FAIL): State.FAILED,
    (State.BOOTSTRAPPING, Event.DESTINATION): State.WAITING,
    (State.BOOTSTRAPPING, Event.FAIL): State.DRAINING,
    (State.WAITING, Event.ADMIT): State.TRANSFERRING,
    (State.WAITING, Event.FAIL): State.DRAINING,
    (State.TRANSFERRING, Event.LANDED): State.METADATA,
    (State.TRANSFERRING, Event.FAIL): State.DRAINING,
    (State.METADATA, Event.TOLD): State.SUCCESS,
    (State.METADATA, Event.FAIL): State.DRAINING,
    **_LATE,
}

DECODE: Table = {
    (State.BOOTSTRAPPING, Event.ANNOUNCED): State.WAITING,
    (State.BOOTSTRAPPING, Event.FAIL): State.DRAINING,
    (State.WAITING, Event.LANDED): State.METADATA,
    (State.WAITING, Event.FAIL): State.DRAINING,
    (State.METADATA, Event.READ): State.DECODING,
    (State.METADATA, Event.FAIL): State.DRAINING,
    (State.DECODING, Event.FINISH): State.SUCCESS,
    (State.DECODING, Event.FAIL): State.DRAINING,
    **_LATE,
}

TABLES: Mapping[str, Table] = {"prefill": PREFILL, "decode": DECODE}


@dataclass(kw_only=True)
class Lifecycle:
    """One room's position in a table, with the first failure that it met."""

    table: Table
    state: State
    reason: KvferryError | None = None
    history: list[State] = field(default_factory=list)

    def advance(self, event: Event) -> State:
        """Follow the table. IllegalTransition, and no change, when it has no such entry."""
        target = self.table.get((self.state, event))
        if target is None:
            raise IllegalTransition(f"{event} in state {self.state}")
        if target is not self.state:
            self.history.append(self.state)
        self.state = target
        return target

    def fail(self, reason: KvferryError) -> bool:
        """Record a failure; the first reason stays. False when the room had already ended or failed."""
        before = self.state
        if self.advance(Event.FAIL) is before:
            return False
        self.reason = reason
        return True

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    @property
    def failing(self) -> bool:
        return self.state in (State.DRAINING, State.FAILED)


def mermaid(table: Table) -> str:
    """The table as a Mermaid state diagram; events that change nothing are left out."""
    lines = ["stateDiagram-v2"]
    reached = {target for (source, _), target in table.items() if target is not source}
    sources = dict.fromkeys(source for source, _ in table)
    lines += [f"    [*] --> {s}" for s in sources if s not in reached]
    lines += [f"    {s} --> {t}: {e}" for (s, e), t in table.items() if t is not s]
    lines += [f"    {s} --> [*]" for s in sources if s in TERMINAL]
    return "\n".join(lines) + "\n"
