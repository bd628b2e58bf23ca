"""What will go wrong, and when: a pure function of the seed and the number of requests.

Faults of processes are tied to requests, not to times: the same ones happen on a slow machine.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, Literal

Client = Literal["stays", "before_headers", "before_first_token", "mid_stream"]
Action = Literal["kill", "stop"]

LIVES_ON = ("prefill-0", "decode-0")
"""Never killed, so that their memory can be compared; stopped like the others."""
MORTAL = ("prefill-1", "decode-1")
NODES = (*LIVES_ON, *MORTAL)
WARM_PART = 0.3
"""Of the requests: after them the memory of the nodes that live on is measured for the first time."""
STOPPED_S = 3.0
"""Longer than transfer.progress_timeout_s."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request and what its client does."""

    number: int
    prompt: tuple[int, ...]
    new_tokens: int
    stream: bool
    client: Client
    leaves_after_s: float = 0.0
    leaves_after_events: int = 0
    abort_on: str | None = None
    """A node that is asked to abort one of its live rooms, whosever that is."""
    abort_after_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NodeFault:
    """At the start of a request a process is killed, and restarted later, or stopped for a while."""

    at_request: int
    node: str
    action: Action
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    requests: tuple[Request, ...]
    faults: tuple[NodeFault, ...]

    @property
    def warm(self) -> int:
        return round(len(self.requests) * WARM_PART)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(seed: int, count: int) -> Plan:
    draws = random.Random(f"plan/{seed}/{count}")
    known = [tuple(draws.randrange(250) for _ in range(200)) for _ in range(6)]
    requests = tuple(_request(draws, number, known) for number in range(count))
    return Plan(seed=seed, requests=requests, faults=tuple(_faults(draws, count)))


def _request(draws: random.Random, number: int, known: list[tuple[int, ...]]) -> Request:
    start = draws.choice(known)[: draws.randrange(20, 200)] if draws.random() < 0.5 else ()
    prompt = (*start, *(draws.randrange(250) for _ in range(draws.randrange(1, 160))))
    clients: tuple[Client, ...] = ("stays", "before_headers", "before_first_token", "mid_stream")
    # half of the requests fail before their first token, and nobody can leave those in mid-stream: more clients try,
    # so that some do in every short campaign
    client = draws.choices(clients, weights=(76, 4, 4, 16))[0]
    stream = client == "mid_stream" or draws.random() < 0.5
    leaves = {"before_headers": draws.uniform(0, 0.08), "before_first_token": draws.uniform(0.08, 0.4)}
    return Request(
        number=number,
        prompt=prompt,
        new_tokens=draws.randrange(6, 16) if client == "mid_stream" else draws.randrange(2, 14),
        stream=stream,
        client=client,
        leaves_after_s=leaves.get(client, 0.0),
        leaves_after_events=draws.randrange(1, 3) if client == "mid_stream" else 0,
        abort_on=draws.choice(NODES) if draws.random() < 0.1 else None,
        abort_after_s=draws.uniform(0.05, 0.5),
    )


def _faults(draws: random.Random, count: int) -> list[NodeFault]:
    """One in some 15 requests, kills and stops in turns; every node is hit when there are enough of them."""
    found: list[NodeFault] = []
    targets: dict[Action, list[str]] = {"kill": [], "stop": []}
    at = draws.randrange(4, 9)
    while at < count - 4:
        action: Action = "kill" if len(found) % 2 == 0 else "stop"
        if not targets[action]:
            targets[action] = draws.sample(MORTAL, 2) if action == "kill" else draws.sample(NODES, 4)
        seconds = draws.uniform(0.2, 2.0) if action == "kill" else draws.uniform(STOPPED_S, STOPPED_S + 1.5)
        found.append(NodeFault(at_request=at, node=targets[action].pop(), action=action, seconds=seconds))
        at += draws.randrange(12, 19)
    return found
