"""Every kind of cache over every way to move it: the real engine, against the same chunks without a transfer.

MATRIX=full takes all combinations of the large model too (`make matrix`); without it, a quarter of them.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.matrix import FULL, LENGTHS, combinations

MODELS = ("smollm2", "glm-dsa-tiny")
DTYPES = ("bfloat16", "fp8")
ALL = os.environ.get("MATRIX") == FULL
WITHIN_S = 4200 if ALL else 1400
pytestmark = [pytest.mark.real, pytest.mark.timeout(WITHIN_S + 100)]
EVERY = [
    (model, dtype, *one) for dtype in DTYPES for model in MODELS for one in combinations(model, full=ALL)
]


def _observe(model: str, dtype: str) -> tuple[dict[str, Any], ...]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.matrix", model, dtype, *([FULL] if ALL else [])],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return tuple(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


@functools.cache
def _started() -> dict[tuple[str, str], Future[tuple[dict[str, Any], ...]]]:
    """Two processes at a time: each computes on one thread."""
    pool = ThreadPoolExecutor(2)
    return {(model, dtype): pool.submit(_observe, model, dtype) for dtype in DTYPES for model in MODELS}


def lines(model: str, dtype: str) -> tuple[dict[str, Any], ...]:
    """What a process of its own saw of this model and dtype, one entry a request."""
    return _started()[model, dtype].result()


def seen(model: str, dtype: str, **wanted: Any) -> list[dict[str, Any]]:
    found = [line for line in lines(model, dtype) if all(line[k] == v for k, v in wanted.items())]
    assert [line["length"] for line in found] == list(LENGTHS)
    return found


def require_equal(line: dict[str, Any]) -> None:
    """Page digests first, then logits bit for bit, main and draft, then tokens, then what the draft got right."""
    where = {k: line[k] for k in ("ranks", "chunk", "mode", "pass", "length")}
    found, expected = line["seen"], line["expected"]
    assert found["reasons"] == [None, None], where
    sent, landed = found["page_digests"]
    assert sent == landed, where
    assert found["logits"] == expected["logits"], where
    assert found["draft_logits"] == expected["draft_logits"], where
    assert found["tokens"] == expected["tokens"], where
    assert found["accepted"] == expected["accepted"], where


@pytest.mark.contract(3, 8, 97, 100, 113)
@pytest.mark.case("D12", "H3")
@pytest.mark.parametrize(("model", "dtype", "ranks", "chunk", "mode"), EVERY)
def test_a_moved_cache_decodes_as_one_that_stayed(
    model: str, dtype: str, ranks: int, chunk: int, mode: str
) -> None:
    """Each prompt length, moved by each number of ranks, chunk and mode, gives the bits of a run without transfer."""
    for line in seen(model, dtype, ranks=ranks, chunk=chunk, mode=mode, **{"pass": "first"}):
        require_equal(line)
        assert line["seen"]["sent_bytes"] == line["expected_bytes"]


@pytest.mark.contract(140)
@pytest.mark.parametrize(("model", "dtype", "ranks", "chunk", "mode"), EVERY)
def test_a_second_pass_gives_the_first_ones_bits(
    model: str, dtype: str, ranks: int, chunk: int, mode: str
) -> None:
    """The same prompts once more, now served from both caches where a chunk fits, give the same bits."""
    for line in seen(model, dtype, ranks=ranks, chunk=chunk, mode=mode, **{"pass": "second"}):
        require_equal(line)
        cached = (line["length"] - 1) // chunk * chunk
        assert line["seen"]["cached_tokens"][0] == cached


@pytest.mark.contract(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_eight_ranks_store_an_eighth_each(model: str, dtype: str) -> None:
    """The pages of each rank of eight are an eighth of the prompt's, within one page."""
    chunk, mode = (256, "monolithic") if model == "smollm2" else (64, "per_layer")
    for line in seen(model, dtype, ranks=8, chunk=chunk, mode=mode, **{"pass": "first"}):
        counts = line["seen"]["pages_by_rank"]
        total = -(-line["length"] // 64)
        assert (len(counts), sum(counts)) == (8, total)
        assert max(counts) - total / 8 < 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_draft_is_right_now_and_then(dtype: str) -> None:
    """Some proposals are accepted and some are not, so that an equal count says something."""
    accepted = [line["seen"]["accepted"] for line in lines("glm-dsa-tiny", dtype)]
    assert sum(accepted) > 0
    assert min(accepted) < 11
