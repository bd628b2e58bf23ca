"""Exposed transfer time of real prompts over real nodes, and the nodes' resident memory.

One decode node, and two prefill nodes that differ in `transfer.mode` only; requests alternate between
them. This process plays the router: it posts the same body to both legs.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import httpx

from app.engine.models.files import model_files
from bench.nodes import NodeProcess, node
from bench.report import BenchFailed, Row, Target

PROMPT_TOKENS = 1500
_MODEL = "smollm2"
_VOCABULARY = 49_000
_ALLOWED_BYTES = 400e6
_IDLE_S = 3.0
"""A node gives freed memory back when it has been idle for a second or two."""

Advance = Callable[[str], None]


class RouterStandIn:
    """Posts one prompt to a prefill and a decode node, as a PD router does."""

    def __init__(
        self, decode: NodeProcess, *, vocabulary: int = _VOCABULARY, tokens: int = PROMPT_TOKENS
    ) -> None:
        self._decode = decode
        self._rooms = random.Random(11)
        self._prompt = [self._rooms.randrange(100, vocabulary) for _ in range(tokens)]

    async def ask(self, prefill: NodeProcess, *, new_tokens: int) -> dict[str, Any]:
        """The prefill node's record of the room, with decode's answer under `output_ids`."""
        room = self._rooms.getrandbits(63)
        body = {
            "input_ids": self._prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.port,
            "bootstrap_room": room,
        }
        legs = await asyncio.gather(*(leg.post("/generate", body) for leg in (prefill, self._decode)))
        record = await prefill.ended_room(room)
        await self._decode.ended_room(room)
        return {**record, "output_ids": legs[1]["output_ids"]}


@dataclass(frozen=True, kw_only=True)
class Pair:
    per_layer: NodeProcess
    monolithic: NodeProcess


@asynccontextmanager
async def prefill_pair(client: httpx.AsyncClient, chunk_tokens: int) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:

        async def start(mode: str) -> NodeProcess:
            settings: dict[str, str | int] = {
                "prefill__chunk_tokens": chunk_tokens,
                "transfer__mode": mode,
                "cache__reuse": "off",  # the same prompt again and again: all of it has to move
            }
            return await stack.enter_async_context(node("prefill", client, **settings, model__name=_MODEL))

        yield Pair(per_layer=await start("per_layer"), monolithic=await start("monolithic"))


async def measure(pairs: int, chunkings: tuple[int, ...], advance: Advance) -> list[Row]:
    """A row of exposed time for each chunking, then rows of memory for a node of each role."""
    rows: list[Row] = []
    memory: list[Row] = []
    async with (
        httpx.AsyncClient(timeout=300, limits=httpx.Limits(keepalive_expiry=30)) as client,
        node("decode", client, model__name=_MODEL, cache__reuse="off") as decode,
    ):
        router = RouterStandIn(decode)
        for chunk_tokens in chunkings:
            async with prefill_pair(client, chunk_tokens) as prefill:
                advance("nodes started")
                rows.append(await _compare(router, prefill, pairs, chunk_tokens, advance))
                if not memory:
                    memory += await _memory("prefill", prefill.per_layer)
                    memory += await _memory("decode", decode)
    return [*rows, *memory]


async def _compare(
    router: RouterStandIn, prefill: Pair, pairs: int, chunk_tokens: int, advance: Advance
) -> Row:
    chunks = -(-PROMPT_TOKENS // chunk_tokens)
    work = (
        f"exposed time, {PROMPT_TOKENS:,} tokens in {chunks} chunk{'s'[: chunks > 1]}: per-layer / monolithic"
    )
    ours: list[dict[str, Any]] = []
    other: list[dict[str, Any]] = []
    # the handshake, the first connection and the first touch of every page are nobody's transfer time
    answers = [await router.ask(p, new_tokens=4) for p in (prefill.per_layer, prefill.monolithic)]
    advance(work)
    for _ in range(pairs):
        ours.append(await router.ask(prefill.per_layer, new_tokens=1))
        other.append(await router.ask(prefill.monolithic, new_tokens=1))
        advance(work)
    both = [*ours, *other]
    if len({r["sent_bytes"] for r in both}) != 1 or answers[0]["output_ids"] != answers[1]["output_ids"]:
        raise BenchFailed("both modes must send the same bytes and lead to the same tokens")
    return Row(
        work=work,
        ours=[r["exposed_s"] for r in ours],
        other=[r["exposed_s"] for r in other],
        unit="ms",
        target=Target(limit=0.25, bound="at most"),
        detail={"per_layer": [_detail(r) for r in ours], "monolithic": [_detail(r) for r in other]},
    )


def _detail(record: dict[str, Any]) -> dict[str, Any]:
    """What an exposed time consists of: until the last byte has landed, and the word about it."""
    landing_s = max(record["transfer_s"] - record["forward_s"], 0.0)
    return {
        "forward_s": record["forward_s"],
        "landing_s": round(landing_s, 6),
        "telling_s": round(record["exposed_s"] - landing_s, 6),
        "sent_bytes": record["sent_bytes"],
        "groups": record["groups"],
        "chunks": record["chunks"],
    }


async def _memory(role: str, process: NodeProcess) -> list[Row]:
    """Resident bytes beyond the model and the pool, in two ways.

    The first counts the pool as it was asked for, touched or not. The second is the sharper one: what the
    process alone owns, without the code of shared libraries (clean file pages, about 120 MB, that all
    processes share and the system can take back), and of the pool only what has been touched.
    """
    await asyncio.sleep(_IDLE_S)
    memory = (await process.get("/stats"))["memory"]
    dtype = (await process.get("/model_info"))["dtype"]
    model_bytes = parameters() * {"float32": 4, "bfloat16": 2}[dtype]
    touched = _resident_pool_bytes(process.pid)
    owned = _owned_bytes(process.pid)
    target = Target(limit=_ALLOWED_BYTES, bound="at most", of="difference")
    detail = {
        **memory,
        "model_bytes": model_bytes,
        "touched_pool_bytes": touched,
        "owned_bytes": owned,
        "rss_beyond_model_and_touched_pool_bytes": memory["rss_bytes"] - model_bytes - touched,
    }
    return [
        Row(
            work=f"resident memory, {role} node / model + pool",
            ours=[memory["rss_bytes"]],
            other=[model_bytes + memory["pool_bytes"]],
            unit="MB",
            target=target,
            detail=detail,
        ),
        Row(
            work=f"its own memory, {role} node / model + touched pool",
            ours=[owned],
            other=[model_bytes + touched],
            unit="MB",
            target=target,
            detail=detail,
        ),
    ]


def parameters() -> int:
    """Elements of every tensor in the checkpoint (a tied one is stored once)."""
    total = 0
    for path in sorted(Path(model_files(_MODEL).folder).glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        total += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def _resident_pool_bytes(pid: int) -> int:
    """How much of the shared-memory pool a process has really touched: the rest costs nothing yet."""
    inside, total = False, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            inside = "memfd:kvferry-l1" in line
        elif inside and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def _owned_bytes(pid: int) -> int:
    """Anonymous and shared memory of a process: its resident set without pages of files."""
    kept = ("RssAnon:", "RssShmem:")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kept))
