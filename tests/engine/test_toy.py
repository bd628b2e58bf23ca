"""The toy engine with an index, a draft and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.core.digests import Bytes3d
from app.engine.base import DraftStep, ForwardStep, NoHooks
from app.engine.local import LocalPair, run_locally
from app.engine.models.toy import ToyEngine
from app.engine.paged.splits import Split
from app.errors import BadInput, InvalidRequest
from app.tiers.device import DevicePool
from tests.engine.rig import PAGE, Notes, bound, forward_all, loaded, page_bytes, prompt_of, table


def small(ranks: int = 1, split: Split = "zigzag") -> ToyEngine:
    return ToyEngine(page_size=PAGE, layers=4, ranks=ranks, draft=True, index_layers=(0, 2), split=split)


def test_the_plain_toy_has_one_buffer_and_no_draft() -> None:
    """The toy stays what it was: K/V only, under its own name and revision."""
    engine = loaded("toy")
    assert [b.name for b in engine.geometry.buffers] == ["target.kv"]
    assert (engine.name, engine.revision, engine.draft) == ("toy", "toy-12x64", None)


@pytest.mark.contract(57)
@pytest.mark.contract(58)
@pytest.mark.case("D5")
def test_state_is_compact_and_the_drafts_buffers_have_their_own_size() -> None:
    """Index rows take room on their layers only; the draft's logical layer comes behind the target's."""
    engine = small()
    buffers = {b.name: b for b in engine.geometry.buffers}
    assert list(buffers) == ["target.kv", "target.index", "draft.kv"]
    assert buffers["target.index"].layer_ids == (0, 2) and buffers["draft.kv"].layer_ids == (4,)
    assert len({b.item_bytes for b in buffers.values()}) == 3
    (pool,) = bound(engine, pages=3)
    assert pool.buffers["target.index"].tensor.shape[0] == 2
    before = {n: b.tensor.clone() for n, b in pool.buffers.items()}
    forward_all(engine, prompt_of(10), np.array([1]))
    for name, buffer in pool.buffers.items():
        changed = (buffer.tensor != before[name]).any(-1)
        assert changed.tolist() == [[False, True, False]] * len(buffers[name].layer_ids)
    assert engine.draft is not None
    assert engine.draft.hidden_size != engine.hidden_size


@pytest.mark.contract(2)
@pytest.mark.contract(4)
@pytest.mark.case("D12")
@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_store_the_bytes_of_one_rank(ranks: int, split: Split) -> None:
    """Any number of ranks, split and chunking store the same bytes, one copy, an Nth on each rank."""
    tokens, pages = prompt_of(300), table(ranks, 16, 5)
    alone = small()
    reference = bound(alone)
    logits, draft = forward_all(alone, tokens, np.arange(5))
    for chunk in (64, 256):
        engine = small(ranks, split)
        pools = bound(engine, ranks=ranks)
        found = forward_all(engine, tokens, pages, chunk=chunk)
        assert torch.equal(found[0], logits) and torch.equal(found[1], draft)
        expected = page_bytes(reference, np.arange(5))
        for name, content in page_bytes(pools, pages).items():
            assert (content == expected[name]).all(), name
        used = [int(pool.buffers["target.kv"].tensor[0].any(-1).sum()) for pool in pools]
        assert sum(used) == 5 and max(used) <= -(-5 // ranks)


def every_byte(pool: DevicePool) -> list[tuple[str, Bytes3d]]:
    return [(name, buffer.tensor.numpy()) for name, buffer in pool.buffers.items()]


def test_every_output_depends_on_every_cached_byte() -> None:
    """One flipped bit of K/V or index changes logits and hidden state, one of the draft's its logits."""
    engine = small()
    (pool,) = bound(engine)
    tokens, pages, rng = prompt_of(100), np.array([2, 0]), np.random.default_rng(5)
    forward_all(engine, tokens, pages)
    assert engine.draft is not None

    def outputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out = engine.forward(ForwardStep(tokens=[9], start=100, pages=pages), NoHooks())
        assert out.logits is not None and out.hidden is not None and engine.draft is not None
        given = DraftStep(tokens=[8], start=100, pages=pages, hidden=out.hidden)
        draft = engine.draft.forward(given, NoHooks())
        assert draft.logits is not None
        return out.logits, out.hidden, draft.logits

    logits, hidden, draft = outputs()
    for name, content in every_byte(pool):
        row_bytes = content.shape[2] // PAGE
        for _ in range(20):
            layer, position = rng.integers(content.shape[0]), int(rng.integers(100))
            at = position % PAGE * row_bytes + int(rng.integers(row_bytes))
            content[layer, pages[position // PAGE], at] ^= 1 << int(rng.integers(8))
            changed = outputs()
            assert not torch.equal(changed[2], draft)
            if name != "draft.kv":
                assert not torch.equal(changed[0], logits) and not torch.equal(changed[1], hidden)
            logits, hidden, draft = changed


def test_swapped_pages_change_every_later_token() -> None:
    """The sum over rows knows where each row stands."""
    engine = small()
    (pool,) = bound(engine)
    pages = np.array([0, 1, 2])
    forward_all(engine, prompt_of(130), pages)
    step = ForwardStep(tokens=[5], start=130, pages=pages)
    before = engine.forward(step, NoHooks()).logits
    index = pool.buffers["target.index"].tensor
    index[:, [0, 1]] = index[:, [1, 0]]
    after = engine.forward(step, NoHooks()).logits
    assert before is not None and after is not None and not torch.equal(before, after)


@pytest.mark.contract(139)
def test_the_toy_never_reads_stale_tails() -> None:
    """Whatever lies behind a sequence's rows and in other pages has no effect on any output."""
    tokens = prompt_of(70)
    for ranks in (1, 2):
        engine, found = small(ranks), []
        for filling in (0, 255):
            for pool in bound(engine, ranks=ranks):
                for buffer in pool.buffers.values():
                    buffer.tensor.fill_(filling)
            found.append(forward_all(engine, tokens, table(ranks, 16, 4)))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_hooks_fire_at_every_accessor_and_once_at_a_layers_end() -> None:
    """Earlier rows are waited for by K/V and index alike; each layer ends once, the draft's as the draft's."""
    engine, notes = small(), Notes()
    bound(engine)
    forward_all(engine, prompt_of(100), np.arange(2), chunk=64, hooks=notes)
    assert notes.of("write") == [0, 1, 2, 3, 4] * 2
    assert notes.of("read") == [0, 0, 1, 2, 2, 3, 4]
    assert notes.sources == {0: "target", 1: "target", 2: "target", 3: "target", 4: "draft"}


def test_a_bad_page_table_step_or_binding_is_refused() -> None:
    """Too few pages, no tokens, hidden states of another width and too few pools each raise a typed error."""
    engine = small(2)
    with pytest.raises(BadInput, match="2 ranks need as many pools, not 1"):
        bound(engine)
    with pytest.raises(BadInput, match="not bound"):
        forward_all(engine, [1], np.arange(1))
    engine = small()
    bound(engine)
    with pytest.raises(InvalidRequest, match="1 pages do not hold 65 tokens"):
        forward_all(engine, prompt_of(65), np.arange(1))
    with pytest.raises(InvalidRequest, match="at least one token"):
        engine.forward(ForwardStep(tokens=[], start=0, pages=np.arange(1)), NoHooks())
    assert engine.draft is not None
    step = DraftStep(tokens=[1], start=0, pages=np.arange(1), hidden=torch.zeros(1, 3))
    with pytest.raises(InvalidRequest, match="1 draft tokens"):
        engine.draft.forward(step, NoHooks())


def test_the_draft_is_right_often_and_not_always() -> None:
    """Some proposals are accepted and some are not, so that both ways are walked."""
    engine = small()
    bound(engine)
    run = run_locally(engine, prompt_of(90), chunk_tokens=64, new_tokens=48, proposals=3)
    assert 0 < run.accepted < run.proposed


def test_a_pair_needs_an_engine_for_each_role() -> None:
    """One engine for both would prefill into one pool and read another; with two the bits are those of one run."""
    one, other = small(), small()
    with pytest.raises(BadInput, match="an engine each"):
        LocalPair(one, one, pages=8)
    prompt = prompt_of(2 * PAGE + 3)
    with DevicePool(one.geometry, 8) as pool:
        one.bind([pool])
        alone = run_locally(one, prompt, chunk_tokens=PAGE, new_tokens=3)
    pair = LocalPair(one, other, pages=8)
    try:
        both = pair.run(prompt, chunk_tokens=PAGE, new_tokens=3)
    finally:
        pair.close()
    assert both.logits == alone.logits
    assert both.draft_logits == alone.draft_logits
    assert both.tokens == alone.tokens
