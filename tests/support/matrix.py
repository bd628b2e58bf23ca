"""Every way to move a cache, compared with the same computation without a transfer: one process a model and dtype.

    python -m tests.support.matrix MODEL CACHE_DTYPE [full]      one JSON line a request, to standard output

Both nodes run in this process, over the real transfer engine on loopback; ranks, chunk and mode vary. For each
prompt a first pass moves everything, and a second one is served from both caches.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import sys
from typing import Any

import torch

from app.core.pages import pages_for
from app.engine.base import Engine, Text
from app.engine.load import load_engine
from app.engine.local import LocalPair, LocalRun
from app.obs.logging import configure_logging
from demo.prompts import demo_prompts
from tests.support import harness, inprocess
from tests.support.harness import Cluster
from tests.support.inprocess import Legs

PAGE = 64
LENGTHS = (1, 63, 64, 65, 130, 700)
CHUNKS = (64, 256)
MODES = ("per_layer", "monolithic")
RANKS = (1, 2, 4, 8)
FULL = "full"
PROPOSALS = 2
PAGES = 24
PATIENT_TRANSFER = {"progress_timeout_s": 60, "late_landing_s": 90.0, "deadline_s": 120.0}
PATIENT = {
    "message_s": 60.0,
    "bootstrap_s": 120.0,
    "parked_s": 120.0,
    "lease_s": 120.0,
    "heartbeat_misses": 100,
    "drain_s": 60.0,
    "quarantine_s": 600.0,
}
"""It is about bits: no deadline is to be met, even on a machine that stands still for a while."""


def combinations(model: str, *, full: bool) -> list[tuple[int, int, str]]:
    """(ranks, chunk, mode). Of the large model a quarter that has every value, unless all are asked for."""
    every = list(itertools.product(RANKS, CHUNKS, MODES))
    if full or model != "smollm2":
        return every
    kept = {(1, 64, "per_layer"), (2, 256, "per_layer"), (4, 64, "monolithic"), (8, 256, "monolithic")}
    return [one for one in every if one in kept]


def new_tokens(model: str) -> int:
    return 12 if model.startswith("glm") else 3


def prompts(text: Text) -> dict[int, list[int]]:
    """A prompt of each length; none is the beginning of another."""
    long = demo_prompts(text)[0].tokens  # type: ignore[arg-type]
    return {length: long[37 * number :][:length] for number, length in enumerate(LENGTHS)}


def share_weights() -> None:
    """Nodes and reference of this process read one copy of the weights: eight of them would not fit."""
    from transformers import AutoModelForCausalLM

    load = functools.cache(AutoModelForCausalLM.from_pretrained)
    AutoModelForCausalLM.from_pretrained = load


def load(model: str, dtype: str, ranks: int) -> tuple[Engine, Text]:
    return load_engine(
        name=model, page_size=PAGE, dtype="auto", device="cpu", threads=1, cache_dtype=dtype, ranks=ranks
    )


def sides(model: str, dtype: str, ranks: int, chunk: int, mode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    common = {
        "model": {"name": model, "draft_tokens": PROPOSALS},
        "cache": {"page_size": PAGE, "dtype": dtype, "reuse": "exact", "pages": PAGES},
        "prefill": {"chunk_tokens": chunk, "max_input_tokens": 1024},
        "transfer": {"digests": "full", "mode": mode, **PATIENT_TRANSFER},
        "deadlines": PATIENT,
    }
    cp = {"size": ranks, "shared_kv": True} if ranks > 1 else {}
    return {**common, "cp": cp, "real": True}, {**common, "real": True}


async def observe(cluster: Cluster, prompt: list[int], count: int) -> dict[str, Any]:
    """One request from beginning to end, as plain values."""
    legs: Legs = cluster.start_both(prompt, new_tokens=count)
    tokens = await legs.answered()
    prefill, decode = legs.prefill, legs.decode
    reasons = [str(job.life.reason) if job.life.reason else None for job in (prefill, decode)]
    first = prefill.first
    if any(reasons) or first is None:
        return {"reasons": reasons}
    drafts = [first.draft_logits, *(t.draft_logits for t in tokens[1:])]
    return {
        "reasons": reasons,
        "page_digests": [prefill.facts["page_digest"], decode.facts["page_digest"]],
        "logits": [first.logits, *(t.logits for t in tokens[1:])],
        "draft_logits": [one for one in drafts if one is not None],
        "tokens": [t.token for t in tokens],
        "accepted": decode.facts.get("accepted_tokens", 0),
        "cached_tokens": [prefill.facts["cached_tokens"], decode.facts["cached_tokens"]],
        "sent_bytes": prefill.facts["sent_bytes"],
        "pages_by_rank": [sum(n for _, n in part.positions) for part in prefill.by_rank()],
    }


def plain(run: LocalRun) -> dict[str, Any]:
    return {
        "logits": run.logits,
        "draft_logits": run.draft_logits,
        "tokens": run.tokens,
        "accepted": run.accepted,
    }


async def work(model: str, dtype: str, plan: list[tuple[int, int, str]]) -> None:
    decoder, text = load(model, dtype, 1)
    page_bytes = decoder.geometry.page_bytes()
    count = new_tokens(model)
    for (ranks, chunk), of_chunk in itertools.groupby(plan, key=lambda one: one[:2]):
        pair = LocalPair(load(model, dtype, ranks)[0], decoder, pages=PAGES, ranks=ranks)
        expected = {
            length: plain(pair.run(prompt, chunk_tokens=chunk, new_tokens=count, proposals=PROPOSALS))
            for length, prompt in prompts(text).items()
        }
        pair.close()
        for _, _, mode in of_chunk:
            cluster = Cluster()
            try:
                await cluster.start(*sides(model, dtype, ranks, chunk, mode))
                for name in ("first", "second"):
                    for length, prompt in prompts(text).items():
                        line = {
                            "ranks": ranks,
                            "chunk": chunk,
                            "mode": mode,
                            "pass": name,
                            "length": length,
                            "expected": expected[length],
                            "expected_bytes": pages_for(length, PAGE) * page_bytes,
                            "seen": await observe(cluster, prompt, count),
                        }
                        print(json.dumps(line), flush=True)  # noqa: T201
                await cluster.free(within_s=60)
            finally:
                await cluster.close()


def main() -> None:
    configure_logging(level="error", style="json")
    torch.set_num_threads(1)
    inprocess.WITHIN_S = harness.WITHIN_S = 300.0
    share_weights()
    model, dtype = sys.argv[1:3]
    asyncio.run(work(model, dtype, combinations(model, full=FULL in sys.argv[3:])))


if __name__ == "__main__":
    main()
