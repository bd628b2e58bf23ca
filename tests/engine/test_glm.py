"""The seeded GLM-MoE-DSA: geometry, bits, ranks, index and draft."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from app.core.ids import PageArray, Source
from app.engine.base import Engine, ForwardStep, NoHooks
from app.engine.local import run_locally
from app.tiers.device import DevicePool
from tests.engine.rig import Notes, bound, forward_all, loaded, page_bytes, prompt_of, table

PROMPT = prompt_of(400)
"""Longer than the 256 rows that are attended to, so that index keys decide which."""


@cache
def glm(**options: Any) -> Engine:
    """Engines are kept; each test binds pools of its own."""
    return loaded("glm-dsa-tiny", **options)


@pytest.mark.contract(57)
@pytest.mark.contract(58)
def test_index_state_is_kept_on_full_layers_and_the_draft_comes_behind() -> None:
    """Four buffers with explicit logical ids; a shared layer has no index, and the draft's are layer 4's."""
    engine = glm()
    buffers = {b.name: (b.layer_ids, b.dtype) for b in engine.geometry.buffers}
    assert buffers == {
        "target.latent": ((0, 1, 2, 3), "float32"),
        "target.index": ((0, 2), "float8_e4m3fn:132"),
        "draft.latent": ((4,), "float32"),
        "draft.index": ((4,), "float8_e4m3fn:132"),
    }
    (pool,) = bound(engine)
    assert pool.buffers["target.index"].tensor.shape[0] == 2
    assert loaded("glm-dsa-tiny", draft=False).geometry.buffers == engine.geometry.buffers[:2]


@pytest.mark.parametrize(("cache_dtype", "bytes_a_token"), [("auto", 2304), ("bfloat16", 1152), ("fp8", 656)])
def test_a_latent_page_has_the_size_of_its_format(cache_dtype: str, bytes_a_token: int) -> None:
    """576 values a token in the format of the cache dtype."""
    latent = glm(cache_dtype=cache_dtype).geometry.buffers[0]
    assert latent.item_bytes == 64 * bytes_a_token


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8"])
def test_pages_anywhere_give_equal_bits_and_equal_bytes(cache_dtype: str) -> None:
    """The same prompt in other pages has the same logits, draft logits and page bytes, bit for bit."""
    engine, found = glm(cache_dtype=cache_dtype), []
    for pages in (np.arange(7), np.array([9, 3, 15, 0, 8, 1, 12])):
        pools = bound(engine)
        found.append((forward_all(engine, PROMPT, pages), page_bytes(pools, pages)))
    (first, stored), (second, moved) = found
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert all((stored[name] == moved[name]).all() for name in stored)


def test_a_cache_in_fewer_bits_is_what_the_forward_reads() -> None:
    """Rounding shows in a chunk's own logits: its rows are read back from the pages, not from the model."""
    logits = []
    for cache_dtype in ("auto", "bfloat16", "fp8"):
        engine = glm(cache_dtype=cache_dtype)
        bound(engine)
        logits.append(forward_all(engine, PROMPT[:100], np.arange(2))[0])
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(logits, 2))
    assert all(float((a - logits[0]).abs().mean()) < 0.3 for a in logits)


@pytest.mark.contract(140)
@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_from_a_cached_prefix_gives_the_whole_runs_bits(ranks: int) -> None:
    """With the same chunk boundaries, the rest of a prompt behind cached pages has the logits of a full run."""
    engine = glm(ranks=ranks)
    bound(engine, ranks=ranks)
    pages = table(ranks, 16, 7)
    whole, draft = forward_all(engine, PROMPT, pages, chunk=128)
    rest, again = forward_all(engine, PROMPT, pages, chunk=128, start=256)
    assert torch.equal(rest, whole[256:]) and torch.equal(again, draft)


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_compute_what_one_rank_computes(ranks: int, split: str) -> None:
    """Repeatable bit for bit, and within rounding of one rank; one copy is stored, an Nth on each rank."""
    alone = glm()
    reference = bound(alone)
    logits, draft = forward_all(alone, PROMPT, np.arange(7))
    engine: Any = glm(ranks=ranks, split=split)
    pages, found = table(ranks, 16, 7), []
    for _ in range(2):
        pools = bound(engine, ranks=ranks)
        found.append((forward_all(engine, PROMPT, pages), page_bytes(pools, pages)))
    (first, stored), (second, again) = found
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert all((stored[name] == again[name]).all() for name in stored)
    assert float((first[0] - logits).abs().max()) < 0.01
    assert float((first[1] - draft).abs().max()) < 0.01
    expected = page_bytes(reference, np.arange(7))["target.latent"].view(np.float32)
    assert float(np.abs(stored["target.latent"].view(np.float32) - expected).max()) < 0.01
    used = [int(pool.buffers["target.latent"].tensor[0].any(-1).sum()) for pool in pools]
    assert sum(used) == 7 and max(used) <= -(-7 // ranks)
    assert len({statistics.accesses for statistics in engine.statistics}) == 1
    assert all(s.accesses and s.store_s > 0 and s.materialise_s > 0 for s in engine.statistics)


@pytest.mark.contract(2)
def test_eight_ranks_store_an_eighth_each() -> None:
    """Bytes written on each of eight ranks are an eighth of one rank's, within one page."""
    pages_of: dict[int, list[int]] = {}
    for ranks in (1, 8):
        engine = glm(ranks=ranks)
        pools = bound(engine, ranks=ranks)
        step = ForwardStep(tokens=prompt_of(1000), start=0, pages=table(ranks, 16, 16))
        engine.forward(step, NoHooks())
        pages_of[ranks] = [int(pool.buffers["target.latent"].tensor[0].any(-1).sum()) for pool in pools]
    assert pages_of[1] == [16]
    assert pages_of[8] == [2] * 8


def test_a_step_shorter_than_the_ranks_works() -> None:
    """Decode's one row over four ranks: three of them compute nothing, and it is the row of one rank."""
    found = []
    for ranks in (1, 4):
        engine = glm(ranks=ranks)
        bound(engine, ranks=ranks)
        pages = table(ranks, 16, 4)
        forward_all(engine, PROMPT[:130], pages)
        out = engine.forward(ForwardStep(tokens=[7], start=130, pages=pages), NoHooks())
        assert out.logits is not None and out.logits.shape == (1, 257)
        found.append(out.logits)
    assert float((found[0] - found[1]).abs().max()) < 0.01


@pytest.mark.contract(139)
@pytest.mark.parametrize("ranks", [1, 2])
def test_stale_rows_are_never_read(ranks: int) -> None:
    """A shorter second request in used pages, and pages full of NaN, give the bits of clean pages."""
    engine, pages = glm(ranks=ranks), table(ranks, 16, 7)
    bound(engine, ranks=ranks)
    clean = forward_all(engine, PROMPT[:70], pages)
    forward_all(engine, prompt_of(400, seed=9), pages)
    used = forward_all(engine, PROMPT[:70], pages)
    for pool in bound(engine, ranks=ranks):
        for buffer in pool.buffers.values():
            buffer.tensor.fill_(255)
    poisoned = forward_all(engine, PROMPT[:70], pages)
    for found in (used, poisoned):
        assert torch.equal(found[0], clean[0]) and torch.equal(found[1], clean[1])


def next_row(engine: Engine, pages: PageArray) -> torch.Tensor:
    out = engine.forward(ForwardStep(tokens=[7], start=len(PROMPT), pages=pages), NoHooks())
    assert out.logits is not None
    return out.logits[0]


def prepared() -> tuple[Engine, DevicePool, PageArray]:
    engine, pages = glm(), np.arange(7)
    (pool,) = bound(engine)
    forward_all(engine, PROMPT, pages)
    return engine, pool, pages


def test_index_keys_matter() -> None:
    """Flipping the index bytes of one page, and nothing else, changes the next row's logits."""
    engine, pool, pages = prepared()
    before = next_row(engine, pages)
    for layer in range(2):
        page = pool.buffers["target.index"].tensor[layer, 2]
        kept = page.clone()
        page[: 64 * 128] ^= 128
        assert not torch.equal(next_row(engine, pages), before), layer
        page.copy_(kept)
    assert torch.equal(next_row(engine, pages), before)


@pytest.mark.parametrize("name", ["target.latent", "target.index"])
def test_swapped_pages_show_in_the_logits(name: str) -> None:
    """Two pages of any buffer in the wrong places change the next row's logits."""
    engine, pool, pages = prepared()
    before = next_row(engine, pages)
    tensor = pool.buffers[name].tensor
    tensor[:, [1, 3]] = tensor[:, [3, 1]]
    assert not torch.equal(next_row(engine, pages), before)


@pytest.mark.parametrize("ranks", [1, 4])
def test_hooks_fire_at_every_accessor_and_once_at_a_layers_end(ranks: int) -> None:
    """Latent and index each wait for earlier rows; each layer ends once a forward, whatever the ranks."""
    engine, notes = glm(ranks=ranks), Notes()
    bound(engine, ranks=ranks)
    forward_all(engine, PROMPT[:130], table(ranks, 16, 3), chunk=128, hooks=notes)
    assert notes.of("write") == [0, 1, 2, 3, 4] * 2
    assert notes.of("read") == [0, 0, 1, 2, 2, 3, 4, 4]
    assert notes.sources == {0: "target", 1: "target", 2: "target", 3: "target", 4: "draft"}
    assert notes.calls[:2] == [("write", 0), ("write", 1)]
    second = notes.calls[5:]
    assert second[:3] == [("read", 0), ("read", 0), ("write", 0)]


def test_a_layer_has_been_written_when_its_end_is_told() -> None:
    """At after_write the latent and the index of every row of the layer are in the pages already."""
    engine, pages = glm(ranks=2), table(2, 16, 3)
    pools = bound(engine, ranks=2)
    told: dict[int, dict[str, np.ndarray[Any, Any]]] = {}

    class Copying(Notes):
        def after_write(self, layer: int, source: Source) -> None:
            told[layer] = page_bytes(pools, pages)

    forward_all(engine, PROMPT[:130], pages, hooks=Copying())
    final = page_bytes(pools, pages)
    for spec in engine.geometry.buffers:
        for layer in spec.layer_ids:
            slot = spec.slot(layer)
            assert final[spec.name][slot].any()
            assert (told[layer][spec.name][slot] == final[spec.name][slot]).all(), (spec.name, layer)


@pytest.mark.parametrize("kind", ["before_read", "after_write"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_an_exception_in_a_hook_ends_the_forward_and_leaves_the_engine_usable(ranks: int, kind: str) -> None:
    """The hook's own error comes out of forward, and the next forward computes what it always did."""

    class Cancelled(Exception):
        pass

    class Failing(Notes):
        def before_read(self, layer: int) -> None:
            self.check("before_read", layer)

        def after_write(self, layer: int, source: Source) -> None:
            self.check("after_write", layer)

        def check(self, at: str, layer: int) -> None:
            if (at, layer) == (kind, 2):
                raise Cancelled(layer)

    engine, pages = glm(ranks=ranks), table(ranks, 16, 3)
    bound(engine, ranks=ranks)
    expected = forward_all(engine, PROMPT[:130], pages, chunk=64)
    with pytest.raises(Cancelled, match="2"):
        forward_all(engine, PROMPT[:130], pages, chunk=64, hooks=Failing())
    again = forward_all(engine, PROMPT[:130], pages, chunk=64)
    assert torch.equal(again[0], expected[0]) and torch.equal(again[1], expected[1])


def test_an_error_in_one_ranks_model_comes_out_of_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails ends the forward of the ranks that wait for it, with its error."""
    engine: Any = glm(ranks=4)
    bound(engine, ranks=4)
    compute = engine.family.rows

    def failing(model: Any, tokens: torch.Tensor, share: Any) -> torch.Tensor:
        if 100 in share.positions.flatten().tolist():
            raise RuntimeError("no memory on this rank")
        result: torch.Tensor = compute(model, tokens, share)
        return result

    monkeypatch.setattr(engine.family, "rows", failing)
    with pytest.raises(RuntimeError, match="no memory on this rank"):
        forward_all(engine, PROMPT[:130], table(4, 16, 3))


@pytest.mark.contract(59)
def test_a_draft_behind_cached_rows_reads_the_full_view_and_says_why() -> None:
    """With ranks, draft rows behind earlier ones are computed from all owners' pages, with a logged reason."""
    engine, pages = glm(ranks=2), table(2, 16, 3)
    bound(engine, ranks=2)
    with capture_logs() as logs:
        whole = forward_all(engine, PROMPT[:130], pages, chunk=64)
        rest = forward_all(engine, PROMPT[:130], pages, chunk=64, start=64)
    told = [log for log in logs if log["event"] == "draft.full_materialisation"]
    assert [log["rows"] for log in told] == [64, 128, 64, 128]
    assert all(log["reason"] and log["log_level"] == "debug" for log in told)
    assert torch.equal(rest[1], whole[1])


@pytest.mark.parametrize("proposals", [1, 3])
def test_the_draft_is_right_now_and_then(proposals: int) -> None:
    """Proposals of the draft layer are accepted sometimes, and every token is the model's own choice."""
    engine = glm()
    bound(engine)
    run = run_locally(engine, PROMPT, chunk_tokens=256, new_tokens=24, proposals=proposals)
    assert 0 < run.accepted < run.proposed
    logits, _ = forward_all(engine, [*PROMPT, *run.tokens], np.arange(7))
    rows = logits[len(PROMPT) - 1 : -1]
    chosen = rows[torch.arange(len(rows)), torch.tensor(run.tokens)]
    behind = rows.amax(-1) - chosen
    # another shape of forward gives other low bits, so a near tie may fall the other way
    assert float(behind.max()) < 0.5 and int((behind > 0).sum()) <= 3


@pytest.mark.contract(140)
def test_a_speculative_run_repeats_bit_for_bit() -> None:
    """The same request in other pages, its prefix cached, has equal logits, draft logits and accepted tokens."""
    engine = glm()
    options: dict[str, Any] = {"chunk_tokens": 128, "new_tokens": 12, "proposals": 2}
    bound(engine)
    first = run_locally(engine, PROMPT, **options)
    assert first.draft_logits
    assert run_locally(engine, PROMPT, cached_tokens=384, **options) == first
    elsewhere = np.arange(15, 7, -1)
    assert run_locally(engine, PROMPT, pages=elsewhere, **options) == first


def test_answers_are_not_a_few_tokens_repeated() -> None:
    """The weights are such that tokens tell something: many different ones in a short answer, no stop."""
    engine = glm()
    bound(engine)
    run = run_locally(engine, PROMPT, chunk_tokens=256, new_tokens=40)
    assert len(run.tokens) == 40 and len(set(run.tokens)) > 12
