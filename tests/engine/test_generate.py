"""Prefill chunks, handover and steps that a draft lengthens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.core.chunks import plan_chunks
from app.core.ids import PageArray
from app.engine.base import DraftStep, ForwardStep, NoHooks
from app.engine.generate import TOP_K, Continuation, Handover, prefill_chunk
from app.engine.local import run_locally
from app.engine.models.toy import ToyEngine
from app.engine.sampling import Sampler, Sampling
from app.errors import BadInput, InvalidRequest
from tests.engine.rig import PAGE, Notes, bound, page_bytes, prompt_of

GREEDY = Sampler(Sampling())


def drafting(draft: bool = True) -> ToyEngine:
    engine = ToyEngine(page_size=PAGE, layers=3, draft=draft, index_layers=(0, 2))
    bound(engine)
    return engine


def handed(
    engine: ToyEngine, prompt: list[int], pages: PageArray, *, sampler: Sampler = GREEDY, drafts: bool = True
) -> Handover:
    found = None
    for plan in plan_chunks(len(prompt), page_size=PAGE, chunk_tokens=64):
        assert found is None
        found = prefill_chunk(engine, prompt, plan, pages, NoHooks(), sampler, drafts=drafts)
    assert found is not None
    return found


def test_a_handover_carries_the_drafts_output_for_the_last_row() -> None:
    """The token, its log-probability, the draft's hidden state and its best tokens, best first."""
    engine, prompt = drafting(), prompt_of(130)
    found = handed(engine, prompt, np.arange(3))
    assert found.hidden is not None and found.hidden.shape == (engine.hidden_size + 16,)
    assert found.hidden.dtype == np.float32
    assert found.logits is not None and found.token == int(found.logits.argmax())
    assert found.log_probability == float(torch.log_softmax(found.logits, -1)[found.token])
    assert found.top_ids.shape == (TOP_K,) and found.top_ids.dtype == np.int32
    assert found.draft_logits is not None
    assert found.top_ids[0] == int(found.draft_logits.argmax())
    assert (np.diff(found.top_log_probabilities) <= 0).all()


def test_without_a_draft_the_handover_is_a_token() -> None:
    """No draft, or one that is not run: no hidden state and no further tokens, and the same first token."""
    prompt, pages = prompt_of(130), np.arange(3)
    plain, unused = (
        handed(drafting(draft=False), prompt, pages),
        handed(drafting(), prompt, pages, drafts=False),
    )
    for found in (plain, unused):
        assert found.hidden is None and len(found.top_ids) == 0 and found.draft_logits is None
    assert plain.token == unused.token


def test_each_draft_row_takes_the_token_behind_its_own() -> None:
    """Chunk by chunk the draft's rows are those of one forward over tokens shifted by one."""
    engine, prompt, pages = drafting(), prompt_of(130), np.arange(3)
    first = handed(engine, prompt, pages)
    (pool,) = bound(engine)
    handed(engine, prompt, pages)
    chunked = page_bytes([pool], pages)["draft.kv"].copy()
    whole = engine.forward(_step(prompt, pages), NoHooks())
    assert whole.hidden is not None and engine.draft is not None
    given = DraftStep(tokens=[*prompt[1:], first.token], start=0, pages=pages, hidden=whole.hidden)
    engine.draft.forward(given, NoHooks())
    assert (page_bytes([pool], pages)["draft.kv"] == chunked).all()


def _step(prompt: list[int], pages: PageArray) -> ForwardStep:
    return ForwardStep(tokens=prompt, start=0, pages=pages)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("proposals", [1, 3])
def test_speculative_steps_give_the_tokens_of_plain_ones(length: int, proposals: int) -> None:
    """However many tokens are proposed, tokens and the logits they come from are those of one at a time."""
    engine, prompt = drafting(), prompt_of(length)
    plain = run_locally(engine, prompt, chunk_tokens=64, new_tokens=40)
    found = run_locally(engine, prompt, chunk_tokens=64, new_tokens=40, proposals=proposals)
    assert (found.tokens, found.logits) == (plain.tokens, plain.logits)
    assert 0 < found.accepted <= found.proposed
    assert (plain.accepted, plain.proposed) == (0, 0)
    assert len(found.draft_logits) == 1 + 39 - found.accepted and len(plain.draft_logits) == 1


def test_rejected_rows_are_written_over() -> None:
    """After speculation the pages hold what plain decoding leaves, the draft's rows included."""
    engine, prompt, pages = drafting(), prompt_of(100), np.arange(3)
    (pool,) = bound(engine)
    run = run_locally(engine, prompt, chunk_tokens=64, new_tokens=30, proposals=3, pages=pages)
    assert run.accepted < run.proposed
    rows = 100 + len(run.tokens) - 1
    found = {n: b.tensor.clone() for n, b in pool.buffers.items()}
    (clean,) = bound(engine)
    tokens = [*prompt, *run.tokens]
    out = engine.forward(_step(tokens[:rows], pages), NoHooks())
    assert out.hidden is not None and engine.draft is not None
    engine.draft.forward(
        DraftStep(tokens=tokens[1 : rows + 1], start=0, pages=pages, hidden=out.hidden), NoHooks()
    )
    for name, buffer in clean.buffers.items():
        whole = buffer.tensor[:, :3].reshape(buffer.tensor.shape[0], 3 * PAGE, -1)[:, :rows]
        mine = found[name][:, :3].reshape(whole.shape[0], 3 * PAGE, -1)[:, :rows]
        assert torch.equal(mine, whole), name


def test_a_step_proposes_no_more_than_it_is_asked_for_and_has_room_for() -> None:
    """Limits of a request and the end of its pages shorten a step; past the end there is none."""
    engine, prompt, pages = drafting(), prompt_of(124), np.arange(2)
    found = handed(engine, prompt, pages)
    steps = Continuation(engine, pages, len(prompt), found, GREEDY, 3)
    out = steps.step(NoHooks(), at_most=2)
    assert out.proposed == 1 and len(out.tokens) <= 2
    while steps.position < 128:
        out = steps.step(NoHooks())
        assert out.proposed <= 3 and steps.position <= 128
    with pytest.raises(InvalidRequest, match="2 pages do not hold 129 tokens"):
        steps.step(NoHooks())


def test_without_a_draft_or_with_a_temperature_a_step_is_one_token() -> None:
    """No draft, no handover of one, and sampling: one token a step, and the draft's layers stay silent."""
    prompt, pages = prompt_of(100), np.arange(3)
    warm = Sampler(Sampling(temperature=0.8, seed=3))
    engine = drafting()
    for case, sampler, drafts in (
        (drafting(draft=False), GREEDY, True),
        (engine, warm, True),
        (engine, GREEDY, False),
    ):
        notes = Notes()
        found = handed(case, prompt, pages, sampler=sampler, drafts=drafts)
        steps = Continuation(case, pages, len(prompt), found, sampler, 3)
        outs = [steps.step(notes) for _ in range(3)]
        assert all((len(out.tokens), out.proposed, out.accepted) == (1, 0, 0) for out in outs)
        assert set(notes.sources.values()) == {"target"}


def test_digests_come_only_when_asked_for() -> None:
    """A step names digests of its logits, and of the draft's behind its last token, with tracing on alone."""
    engine, prompt, pages = drafting(), prompt_of(100), np.arange(3)
    found = handed(engine, prompt, pages)
    quiet = Continuation(engine, pages, len(prompt), found, GREEDY, 2).step(NoHooks())
    assert all(chosen.logits is None and chosen.draft_logits is None for chosen in quiet.tokens)
    found = handed(engine, prompt, pages)
    traced = Continuation(engine, pages, len(prompt), found, GREEDY, 2, digests=True).step(NoHooks())
    assert [chosen.token for chosen in traced.tokens] == [chosen.token for chosen in quiet.tokens]
    assert all(chosen.logits for chosen in traced.tokens)
    assert [bool(chosen.draft_logits) for chosen in traced.tokens] == [False] * traced.accepted + [True]


def test_a_handover_that_lost_the_drafts_hidden_state_is_seen() -> None:
    """Another hidden state or another best token in the handover changes what the draft proposes."""
    engine, prompt, pages = drafting(), prompt_of(100), np.arange(3)
    found = handed(engine, prompt, pages)
    assert found.hidden is not None
    right = Continuation(engine, pages, 100, found, GREEDY, 2, digests=True)._propose(2, NoHooks())
    for wrong in (
        Handover(
            token=found.token, log_probability=0.0, hidden=found.hidden[::-1].copy(), top_ids=found.top_ids
        ),
        Handover(token=found.token, log_probability=0.0, hidden=found.hidden, top_ids=found.top_ids[1:]),
    ):
        assert Continuation(engine, pages, 100, wrong, GREEDY, 2)._propose(2, NoHooks()) != right


def test_a_negative_number_of_proposals_is_refused() -> None:
    """Proposals are a count."""
    with pytest.raises(BadInput, match="-1 tokens"):
        Continuation(drafting(), np.arange(1), 1, Handover(token=1, log_probability=0.0), GREEDY, -1)


@pytest.mark.contract(140)
@pytest.mark.parametrize("proposals", [0, 2])
def test_a_second_pass_over_a_cached_prefix_gives_the_first_ones_output(proposals: int) -> None:
    """With the first pages kept, computing the rest alone gives the same tokens, logits and draft logits."""
    engine, prompt = drafting(), prompt_of(200)
    first = run_locally(engine, prompt, chunk_tokens=64, new_tokens=16, proposals=proposals)
    again = run_locally(
        engine, prompt, chunk_tokens=64, new_tokens=16, proposals=proposals, cached_tokens=128
    )
    assert again == first


def test_the_last_draft_row_of_a_prefix_depends_on_the_token_behind_it() -> None:
    """Two prompts with the same first page differ in that page's last draft row, and in nothing else of it."""
    engine, pages = drafting(), np.arange(2)
    (pool,) = bound(engine)
    prompt, stored = prompt_of(100), []
    for following in (1, 2):
        prompt[64] = following
        handed(engine, prompt, pages)
        stored.append({n: b.tensor[:, 0].clone() for n, b in pool.buffers.items()})
    for name in ("target.kv", "target.index"):
        assert torch.equal(stored[0][name], stored[1][name])
    rows = [content["draft.kv"].view(PAGE, -1) for content in stored]
    assert torch.nonzero((rows[0] != rows[1]).any(-1)).flatten().tolist() == [63]


def test_local_runs_need_pages_for_prompt_and_answer() -> None:
    """Too short a page table is refused before anything is computed."""
    with pytest.raises(BadInput, match="2 pages do not hold a prompt of 100 and 64 new tokens"):
        run_locally(drafting(), prompt_of(100), chunk_tokens=64, new_tokens=64, pages=np.arange(2))
