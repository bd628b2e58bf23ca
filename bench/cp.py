"""`bench cp`: what context parallelism with one shared copy costs on one machine, and what it moves.

The ranks of one node share this machine's cores, so their forward is no faster here: what counts is the part of it
that goes into storing rows by owner, materialising the full view, and waiting for each other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import uvloop
from rich.progress import Progress

from app.core.chunks import plan_chunks
from app.core.owners import plan_owners
from app.core.pages import pages_for
from app.engine.base import ForwardStep, NoHooks
from app.engine.load import load_engine
from app.engine.models.hf import HfEngine
from app.tiers.device import DevicePool
from bench.exposed import RouterStandIn
from bench.nodes import node
from bench.report import NOTHING_TO_KEEP, BenchFailed, Report, Row, Target

_MODEL = "glm-dsa-tiny"
_PAGE = 64
_CHUNK = 512
_RANKS = 8
_VOCABULARY = 256

Advance = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: int
    tokens: int


def options(flags: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench cp", description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="prompts of each number of ranks")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of a prompt")
    known = parser.parse_args(list(flags))
    if known.runs < 1 or known.tokens < 1:
        parser.error("at least one run of one token is needed")
    return Options(runs=known.runs, tokens=known.tokens)


class Side:
    """An engine of some ranks over pools of its own, and the same prompt in them."""

    def __init__(self, ranks: int, tokens: int) -> None:
        engine, _ = load_engine(
            name=_MODEL, page_size=_PAGE, dtype="auto", device="cpu", threads=1, ranks=ranks, draft=False
        )
        assert isinstance(engine, HfEngine)
        self._engine, self._ranks = engine, ranks
        count = pages_for(tokens, _PAGE)
        self.owners = plan_owners(count, ranks)
        each = int(np.bincount(self.owners, minlength=ranks).max())
        engine.bind([DevicePool(engine.geometry, each) for _ in range(ranks)])
        places = np.concatenate([np.arange(np.count_nonzero(self.owners == r)) for r in range(ranks)])
        self._pages = self.owners.astype(np.int64) * each + places
        self._prompt = np.random.default_rng(5).integers(0, _VOCABULARY, tokens).tolist()

    @property
    def stored_bytes(self) -> float:
        """Of the rank that stores most."""
        most = int(np.bincount(self.owners, minlength=self._ranks).max())
        return float(most * self._engine.geometry.page_bytes())

    def prefill(self) -> dict[str, float]:
        """Seconds of the whole prompt, and of the parts that are about ownership, a rank's share of each."""
        before = self._parts()
        started = time.perf_counter()
        for plan in plan_chunks(len(self._prompt), page_size=_PAGE, chunk_tokens=_CHUNK):
            tokens = self._prompt[plan.start : plan.end]
            step = ForwardStep(tokens=tokens, start=plan.start, pages=self._pages)
            self._engine.forward(step, NoHooks())
        whole = time.perf_counter() - started
        after = self._parts()
        return {"whole": whole} | {name: after[name] - before[name] for name in before}

    def _parts(self) -> dict[str, float]:
        ranks = self._engine.statistics
        return {
            "store": sum(s.store_s for s in ranks) / len(ranks),
            "materialise": sum(s.materialise_s for s in ranks) / len(ranks),
            "wait": sum(s.wait_s for s in ranks) / len(ranks),
        }


def engines(chosen: Options, advance: Advance) -> list[Row]:
    """Forwards of eight ranks and of one, in turn."""
    eight, one = Side(_RANKS, chosen.tokens), Side(1, chosen.tokens)
    ours: list[dict[str, float]] = []
    other: list[dict[str, float]] = []
    for turn in range(chosen.runs + 1):
        pair = eight.prefill(), one.prefill()
        if turn:  # the first touches every page
            ours.append(pair[0])
            other.append(pair[1])
        advance("forwards")

    def row(work: str, part: Callable[[dict[str, float]], float]) -> Row:
        return Row(
            work=work,
            ours=[part(o) for o in ours],
            other=[part(o) for o in other],
            unit="ms",
            target=NOTHING_TO_KEEP,
        )

    what = f"{chosen.tokens:,} tokens, CP {_RANKS} / CP 1"
    return [
        row(f"forward, {what}", lambda p: p["whole"]),
        row("of it: storing rows by owner", lambda p: p["store"]),
        row("of it: materialising the full view", lambda p: p["materialise"]),
        Row(
            work=f"of it at CP {_RANKS}: both / the forward",
            ours=[p["store"] + p["materialise"] for p in ours],
            other=[p["whole"] for p in ours],
            unit="ms",
            target=NOTHING_TO_KEEP,
        ),
        Row(
            work=f"of it at CP {_RANKS}: waiting for each other / the forward",
            ours=[p["wait"] for p in ours],
            other=[p["whole"] for p in ours],
            unit="ms",
            target=NOTHING_TO_KEEP,
        ),
        Row(
            work="bytes that a rank stores",
            ours=[eight.stored_bytes],
            other=[one.stored_bytes],
            unit="MB",
            target=Target(limit=1 / _RANKS + 1 / pages_for(chosen.tokens, _PAGE), bound="at most"),
        ),
    ]


async def nodes(chosen: Options, advance: Advance) -> list[Row]:
    """Bytes that real nodes move, and what a request still waits for after its forward."""
    common: dict[str, str | int] = {
        "model__name": _MODEL,
        "cache__reuse": "off",
        "prefill__chunk_tokens": _CHUNK,
    }
    shared: dict[str, str | int] = {"cp__size": _RANKS, "cp__shared_kv": "true"}
    ours: list[dict[str, Any]] = []
    other: list[dict[str, Any]] = []
    async with (
        httpx.AsyncClient(timeout=300, limits=httpx.Limits(keepalive_expiry=30)) as client,
        node("decode", client, **common) as decode,
        node("prefill", client, **common, **shared) as eight,
        node("prefill", client, **common) as one,
    ):
        router = RouterStandIn(decode, vocabulary=_VOCABULARY, tokens=chosen.tokens)
        for turn in range(chosen.runs + 1):
            pair = [await router.ask(prefill, new_tokens=1) for prefill in (eight, one)]
            if turn:
                ours.append(pair[0])
                other.append(pair[1])
            advance("requests")
    if {r["state"] for r in (*ours, *other)} != {"success"}:
        raise BenchFailed("a request failed")
    return [
        Row(
            work=f"bytes moved to decode, CP {_RANKS} / CP 1",
            ours=[float(r["sent_bytes"]) for r in ours],
            other=[float(r["sent_bytes"]) for r in other],
            unit="MB",
            target=Target(limit=1.0, bound="at most"),
        ),
        Row(
            work=f"exposed time, CP {_RANKS} / CP 1",
            ours=[r["exposed_s"] for r in ours],
            other=[r["exposed_s"] for r in other],
            unit="ms",
            target=NOTHING_TO_KEEP,
        ),
    ]


def run(chosen: Options, progress: Progress) -> Report:
    started_s = time.time()
    task = progress.add_task("forwards", total=2 * (chosen.runs + 1))

    def advance(now: str) -> None:
        progress.update(task, advance=1, description=now)

    rows = engines(chosen, advance)
    rows += uvloop.run(nodes(chosen, advance))
    return Report(name="cp", rows=rows, started_s=started_s)
