"""Time to the first token of a prompt that is new, that is in L2, and that is in L1, over real nodes in turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httpx

from bench.nodes import NodeProcess, node
from bench.report import BenchFailed, Row, Target

PROMPT_TOKENS = 1500
_MODEL = "smollm2"
_VOCABULARY = 49_000
_PAGE = 64

Advance = Callable[[str], None]


class Asker:
    """Posts one prompt to both legs. Decode keeps nothing, so that every prompt's pages move."""

    def __init__(self, prefill: NodeProcess, decode: NodeProcess) -> None:
        self._prefill, self._decode = prefill, decode
        self._draws = random.Random(23)

    def prompt(self) -> list[int]:
        return [self._draws.randrange(100, _VOCABULARY) for _ in range(PROMPT_TOKENS)]

    async def ask(self, prompt: list[int]) -> dict[str, Any]:
        """Prefill's record of the room, with the seconds to decode's first token."""
        room = self._draws.getrandbits(63)
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._prefill.port,
            "bootstrap_room": room,
        }
        legs = await asyncio.gather(*(leg.post("/generate", body) for leg in (self._prefill, self._decode)))
        record = await self._prefill.ended_room(room)
        landed = await self._decode.ended_room(room)
        return {**record, "first_s": landed["first_token_s"], "output_ids": legs[1]["output_ids"]}

    async def idle(self) -> None:
        """Return when no copy between the tiers is under way."""
        for _ in range(600):
            if not (await self._prefill.get("/cache"))["holds"]:
                return
            await asyncio.sleep(0.05)
        raise BenchFailed("copies between the tiers do not end")

    async def empty_l1(self) -> None:
        await self.idle()
        await self._prefill.post("/cache/flush", {"tier": "l1"})


async def measure(runs: int, advance: Advance) -> list[Row]:
    """Rounds of: a new prompt, the same from L1, the same from L2."""
    cold: list[dict[str, Any]] = []
    l1: list[dict[str, Any]] = []
    l2: list[dict[str, Any]] = []
    common: dict[str, str | int] = {"model__name": _MODEL, "cache__pages": 96}
    async with (
        httpx.AsyncClient(timeout=300, limits=httpx.Limits(keepalive_expiry=30)) as client,
        node("decode", client, **common, cache__reuse="off") as decode,
        node("prefill", client, **common, hicache__host_ratio="4") as prefill,
    ):
        asker = Asker(prefill, decode)
        for turn in range(runs + 1):
            prompt = asker.prompt()
            answers = [await asker.ask(prompt)]
            await asker.idle()
            answers.append(await asker.ask(prompt))
            await asker.empty_l1()
            answers.append(await asker.ask(prompt))
            if len({tuple(a["output_ids"]) for a in answers}) != 1:
                raise BenchFailed("a cached prefix has led to other tokens")
            _require_hits(answers)
            if turn:  # the first round touches every page and shakes hands
                cold.append(answers[0])
                l1.append(answers[1])
                l2.append(answers[2])
            advance("first tokens")
    what = f"first token of {PROMPT_TOKENS:,} tokens"
    return [
        _row(f"{what}: prefix in L1 / new", l1, cold, 0.2),
        _row(f"{what}: prefix in L2 / new", l2, cold, 0.25),
    ]


def _require_hits(answers: list[dict[str, Any]]) -> None:
    cached = PROMPT_TOKENS // _PAGE * _PAGE
    found = [(a["cached_tokens"], a["l2_tokens"]) for a in answers]
    if found != [(0, 0), (cached, 0), (cached, cached)]:
        raise BenchFailed(f"tokens from caches and from L2: {found}")


def _row(work: str, ours: list[dict[str, Any]], other: list[dict[str, Any]], limit: float) -> Row:
    return Row(
        work=work,
        ours=[a["first_s"] for a in ours],
        other=[a["first_s"] for a in other],
        unit="ms",
        target=Target(limit=limit, bound="at most"),
        detail={"forward_s": [a["forward_s"] for a in ours]},
    )
