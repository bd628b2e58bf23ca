"""`bench replay`: traces, the bound that knows the future, and a run over a small trace."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from app.core.prefix_tree import POLICIES
from bench import __main__ as bench
from bench import belady, traces
from bench.replay import options, replay
from bench.replay_tiers import Shape
from bench.report import BenchFailed

BLOCK = traces.BLOCK_TOKENS


def conversations(count: int, turns: int, seed: int = 1) -> list[dict[str, Any]]:
    """Prompts that grow by a block or two a turn, behind a first block that all of them share."""
    chance = random.Random(seed)
    known: list[list[int]] = []
    lines: list[dict[str, Any]] = []
    fresh = 1
    for at in range(count * turns):
        if len(known) < count or chance.random() < 0.3:
            blocks = [0]
            known.append(blocks)
        else:
            blocks = known[-chance.randint(1, min(count, len(known)))]
        for _ in range(chance.randint(1, 2)):
            blocks.append(fresh)
            fresh += 1
        tokens = len(blocks) * BLOCK - chance.randint(0, 100)
        lines.append(
            {"timestamp": at * 500, "input_length": tokens, "output_length": 5, "hash_ids": list(blocks)}
        )
    return lines


def written(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_equal_ids_are_equal_tokens(tmp_path: Path) -> None:
    """Prompts share exactly the tokens of the blocks whose ids are equal, and have the length that is written."""
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [4, 7, 9]},
        {"timestamp": 1500, "input_length": 1536, "output_length": 1, "hash_ids": [4, 7, 8]},
    ]
    first, second = traces.read(written(tmp_path / "trace.jsonl", lines))
    assert (len(first.prompt()), len(second.prompt()), second.at_s) == (1100, 1536, 1.5)
    assert np.array_equal(first.prompt()[: 2 * BLOCK], second.prompt()[: 2 * BLOCK])
    assert not np.isin(first.prompt()[2 * BLOCK :], second.prompt()).any()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "not json",
        '{"timestamp": 0, "input_length": 0, "hash_ids": []}',
        '{"timestamp": 0, "input_length": 513, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": 1}',
    ],
)
def test_another_file_is_no_trace(tmp_path: Path, text: str) -> None:
    """A line that is no request ends the benchmark with the name of the file."""
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(BenchFailed, match=r"trace\.jsonl cannot be read"):
        traces.read(tmp_path / "trace.jsonl")
    with pytest.raises(BenchFailed, match="cannot be read"):
        traces.read(tmp_path / "none.jsonl")


def best_possible(requests: Sequence[traces.Request], capacity: int) -> int:
    """By trying every choice of what is given up; prompts are single blocks."""

    def after(at: int, cached: frozenset[int]) -> int:
        if at == len(requests):
            return 0
        block, tokens = int(requests[at].blocks[0]), requests[at].tokens
        if block in cached:
            return tokens + after(at + 1, cached)
        if len(cached) < capacity:
            return after(at + 1, cached | {block})
        return max(after(at + 1, cached - {gone} | {block}) for gone in cached)

    return after(0, frozenset())


def test_the_bound_is_the_best_of_all_choices() -> None:
    """For prompts of one block nothing serves more than the cache that knows the future."""
    chance = random.Random(3)
    for _ in range(20):
        requests = [
            traces.Request(at_s=0, tokens=BLOCK, blocks=np.array([chance.randint(0, 4)])) for _ in range(9)
        ]
        assert belady.hit_tokens(requests, 2 * BLOCK) == best_possible(requests, 2)


def test_the_bound_with_room_for_all_serves_every_repetition(tmp_path: Path) -> None:
    """Without evictions each prompt finds its longest prefix; a real tree of that size finds the same pages."""
    requests = traces.read(written(tmp_path / "trace.jsonl", conversations(8, 10)))
    seen: set[int] = set()
    served = 0
    for request in requests:
        known = [block in seen for block in request.blocks.tolist()] + [False]
        served += min(known.index(False) * BLOCK, request.tokens)
        seen |= set(request.blocks.tolist())
    assert belady.hit_tokens(requests, 10**7) == served
    real = replay(requests, Shape(l1_tokens=10**7), "lhd")
    assert 0 <= served - real.l1_tokens < 64 * len(requests)  # whole pages only
    assert real.evicted_pages == 0


def test_a_real_tier_never_serves_more_than_the_bound(tmp_path: Path) -> None:
    """Under pressure every policy stays below the cache that knows the future, and L2 adds to L1."""
    requests = traces.read(written(tmp_path / "trace.jsonl", conversations(30, 10)))
    room = 40 * BLOCK
    bound = belady.hit_tokens(requests, room)
    for policy in POLICIES:
        alone = replay(requests, Shape(l1_tokens=room, free_room=0), policy)
        assert 0 < alone.l1_tokens <= bound
        assert alone.l2_tokens == 0
        assert alone.evicted_pages > 0
        both = replay(requests, Shape(l1_tokens=room, l2_tokens=4 * room), policy)
        assert both.l2_tokens > 0
        assert both.served > alone.served


@pytest.mark.contract(82)
def test_evictions_of_a_replay_go_past_the_deficit(tmp_path: Path) -> None:
    """With a target of free room there are fewer evictions, each of more pages."""
    requests = traces.read(written(tmp_path / "trace.jsonl", conversations(30, 10)))
    exact, roomy = (
        replay(requests, Shape(l1_tokens=40 * BLOCK, lanes=2, free_room=part), "lru") for part in (0, 0.2)
    )
    assert roomy.evictions < exact.evictions / 2
    assert roomy.evicted_pages / roomy.evictions > 2 * exact.evicted_pages / exact.evictions


def test_a_replay_is_a_table_a_file_and_an_exit_status(tmp_path: Path) -> None:
    """Hits against LRU's and the bound, the time of a request, and what happened to the pool."""
    trace = written(tmp_path / "talk.jsonl", conversations(60, 8))
    with (tmp_path / "shown").open("w") as shown:
        status = bench.main(
            ["replay", "--trace", str(trace), "--capacity", "0.1", "--policy", "lru"],
            results=tmp_path,
            console=Console(file=shown, width=200),
        )
    content = json.loads((tmp_path / "replay.json").read_text())
    hits, took = content["rows"]
    assert status == (0 if content["holds"] else 1)
    assert (hits["ratio"], hits["holds"], set(hits["peers"])) == (1.0, True, {"lru", "Belady"})
    assert hits["ours"]["median"] < hits["peers"]["Belady"]["samples"][0] < 1
    assert {"evictions", "evicted_pages", "largest_extent_pages", "runs_per_allocation", "request_s"} < set(
        hits["detail"]
    )
    assert took["detail"]["p99_s"] >= took["value"] > 0
    assert "prompt tokens served, 0.1 M tokens, lru" in (tmp_path / "shown").read_text()


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--trace", "t", "--capacity", "x"],
        ["--trace", "t", "--capacity", "0.01"],
        ["--trace", "t", "--policy", "fifo"],
        ["--trace", "t", "--lanes", "0"],
        ["--trace", "t", "--l2-ratio", "-1"],
        ["--trace", "t", "--free-room", "1"],
    ],
)
def test_flags_that_replay_nothing_are_refused(flags: list[str]) -> None:
    """Usage errors come before the trace is read."""
    with pytest.raises(SystemExit):
        options(flags)


def test_an_empty_trace_cannot_be_measured(tmp_path: Path) -> None:
    """No request: the benchmark says so instead of holding its targets."""
    trace = written(tmp_path / "empty.jsonl", [])
    assert bench.main(["replay", "--trace", str(trace)], results=tmp_path) == 2
