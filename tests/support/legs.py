"""Playing the router: the same body to a prefill and a decode node, with one room."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from demo.cluster import NodeProcess

_rooms = itertools.count(secrets.randbits(40) << 16)


def new_room() -> int:
    return next(_rooms)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What both legs answered."""

    room: int
    prefill: httpx.Response
    decode: httpx.Response


def body_for(
    prefill: NodeProcess, tokens: Sequence[int], *, room: int | None = None, new_tokens: int = 8, **more: Any
) -> dict[str, Any]:
    return {
        "input_ids": list(tokens),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.port,
        "bootstrap_room": new_room() if room is None else room,
        **more,
    }


async def both_legs(
    prefill: NodeProcess,
    decode: NodeProcess,
    body: dict[str, Any],
    *,
    decode_body: dict[str, Any] | None = None,
    timeout_s: float = 240,
) -> Pair:
    """Send the body to both nodes at once and wait for both answers."""
    answers: dict[str, httpx.Response] = {}

    async def send(name: str, node: NodeProcess, content: dict[str, Any]) -> None:
        async with httpx.AsyncClient(timeout=timeout_s) as client:
            answers[name] = await client.post(f"{node.url}/generate", json=content)

    async with anyio.create_task_group() as group:
        group.start_soon(send, "prefill", prefill, body)
        group.start_soon(send, "decode", decode, decode_body or body)
    return Pair(room=body["bootstrap_room"], **answers)


def held(node: NodeProcess) -> dict[str, int]:
    """What a node holds beyond its initial state: all zeros when free = initial."""
    stats = node.get("/stats")
    pages, slots = stats["pages"], stats["slots"]
    return {
        "pages": pages["total"] - pages["free"] - pages["cached"],
        "pins": stats["reuse"]["pins"],
        "leases": stats["reuse"]["leases"],
        "slots": slots["total"] - slots["free"],
        "rooms": stats["rooms"]["live"],
        "chunks": stats["chunks"],
        "quarantine": pages["quarantine"],
        "holds": len(stats["holds"]),
        "waiting": pages["waiting"] + stats["forwards"]["waiting"],
    }


async def wait_free(*nodes: NodeProcess, within_s: float = 60) -> None:
    """Assert that free = initial is reached on every node."""
    with anyio.move_on_after(within_s):
        while any(any(held(node).values()) for node in nodes):
            await anyio.sleep(0.05)
    for node in nodes:
        assert not any(held(node).values()), (node.name, held(node), node.get("/rooms")["live"])
