"""Reuse of cached prefixes on both sides: less is computed, less moves, the output stays."""

from __future__ import annotations

from typing import Any

import pytest

from app.core.pages import pages_for
from app.errors import ClientGone
from app.transfer.fake import Fault
from tests.support.harness import PAGE, Cluster, eventually, prompt_of

PAGED = {"cache": {"reuse": "page"}}


def sides(model: str = "toy", ranks: int = 1, prefill: str = "page", decode: str = "page") -> tuple[Any, Any]:
    cp = {"size": ranks, "shared_kv": True} if ranks > 1 else {}
    name = {"model": {"name": model}}
    return (
        {**name, "cache": {"reuse": prefill}, "cp": cp},
        {**name, "cache": {"reuse": decode}},
    )


@pytest.mark.contract(140)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("model", ["toy", "toy-dsa"])
async def test_a_second_pass_gives_the_same(cluster: Cluster, model: str, ranks: int) -> None:
    """The same prompt again: served from both caches, with the first one's logits, draft's too, and tokens."""
    await cluster.start(*sides(model, ranks))
    for tokens in (1, PAGE, PAGE + 1, 9 * PAGE + 5):
        first = await cluster.serve(prompt_of(tokens, salt=tokens))
        again = await cluster.serve(prompt_of(tokens, salt=tokens))
        assert [t.token for t in await first.tokens()] == [t.token for t in await again.tokens()]
        reused = (tokens - 1) // PAGE * PAGE
        assert again.prefill.facts["cached_tokens"] == reused
        assert again.decode.facts["cached_tokens"] >= reused
    await cluster.free()
    assert cluster.prefill.context.cache.cached_pages > 0


@pytest.mark.case("C1")
@pytest.mark.contract(99)
@pytest.mark.parametrize("model", ["toy", "toy-dsa"])
async def test_only_missing_pages_move(cluster: Cluster, model: str) -> None:
    """Decode holds 31 pages of a prompt of 32: position 31 moves, into its first missing page, and nothing else."""
    await cluster.start(*sides(model))
    page_bytes = cluster.prefill.context.engine.geometry.page_bytes()
    prompt = prompt_of(32 * PAGE)
    await cluster.serve(prompt[: 31 * PAGE + 1])
    legs = await cluster.serve(prompt)
    assert legs.decode.first_position == 31
    assert legs.prefill.by_rank()[0].positions == ((31, 1),)
    assert legs.prefill.facts["sent_bytes"] == page_bytes
    await cluster.free()


@pytest.mark.contract(52)
@pytest.mark.parametrize("ranks", [1, 4])
async def test_a_cached_prefix_is_sent_with_its_draft_part(cluster: Cluster, ranks: int) -> None:
    """A prefix that prefill has cached and decode has not goes over whole: target, index and draft pages alike."""
    await cluster.start(*sides("toy-dsa", ranks, decode="off"))
    prompt = prompt_of(20 * PAGE)
    geometry = cluster.prefill.context.engine.geometry
    sent = []
    for _ in range(2):
        legs = await cluster.serve(prompt)
        sent.append(legs.prefill.facts["sent_bytes"])
    assert legs.prefill.facts["cached_tokens"] == 19 * PAGE
    assert sent == [20 * geometry.page_bytes()] * 2
    assert {b.owner for b in geometry.buffers} == {"target", "draft"}
    await cluster.free()


@pytest.mark.contract(127)
@pytest.mark.case("L7")
async def test_hits_are_counted_where_they_were(cluster: Cluster) -> None:
    """1,000 tokens, 608 cached at decode and 800 at prefill: the counters say so, and the bytes are what was left."""
    await cluster.start(*sides())
    prompt = prompt_of(1000)
    request = cluster.request(prompt[:801], new_tokens=1)
    prefill, decode = cluster.start_prefill(request), cluster.start_decode(request)
    await eventually(lambda: prefill.life.ended and decode.life.ended)
    context = cluster.decode.context
    context.cache.lanes.release(context.cache.tree.evict(1, 12))
    legs = await cluster.serve(prompt)
    assert legs.prefill.facts["cached_tokens"] == 800
    held = legs.decode.facts["cached_tokens"]
    assert held < 800
    item = cluster.prefill.context.engine.geometry.page_bytes()
    assert legs.prefill.facts["sent_bytes"] == (pages_for(1000, PAGE) - held // PAGE) * item
    reuse = cluster.decode.statistics()["reuse"]
    assert (reuse["looked_up_tokens"], reuse["hit_tokens"]) == (1801, held)
    await cluster.free()


@pytest.mark.contract(98)
async def test_a_prompt_that_decode_has_sends_its_metadata(cluster: Cluster) -> None:
    """Decode holds every page of the prompt: no page moves, and the first token still comes."""
    await cluster.start(*sides())
    prompt = prompt_of(8 * PAGE)
    await cluster.serve(prompt)
    legs = await cluster.serve(prompt)
    assert legs.prefill.facts["sent_bytes"] == 0
    assert legs.decode.first_position == 8
    await cluster.free()


@pytest.mark.contract(142)
async def test_another_next_token_recomputes_the_draft_row(cluster: Cluster) -> None:
    """Prompts that part right after a page boundary: the page's last draft row is computed anew, and right."""
    await cluster.start(*sides("toy-dsa"))
    prompt = prompt_of(8 * PAGE)
    await cluster.serve([*prompt, 1, 2, 3])
    legs = await cluster.serve([*prompt, 4, 5, 6])
    assert legs.prefill.facts["cached_tokens"] == 7 * PAGE
    same = await cluster.serve([*prompt, 1, 9, 9])
    assert same.prefill.facts["cached_tokens"] == 8 * PAGE
    await cluster.free()


async def test_a_conversation_reuses_its_answers(cluster: Cluster) -> None:
    """The next turn's prompt holds the last answer: decode has its rows, and receives only what is new."""
    await cluster.start(*sides("toy-dsa"))
    prompt = prompt_of(5 * PAGE)
    for _ in range(3):
        legs = await cluster.serve(prompt, new_tokens=2 * PAGE)
        answer = [t.token for t in await legs.tokens()]
        before = len(prompt)
        prompt = [*prompt, *answer, 33, 34]
    assert legs.decode.facts["cached_tokens"] >= before - 2 * PAGE
    assert legs.decode.facts["cached_tokens"] > legs.prefill.facts["cached_tokens"]
    await cluster.free()


async def test_exact_reuse_keeps_to_the_chunk_grid(cluster: Cluster) -> None:
    """In exact mode what is reused ends where a chunk does, on both sides, and answers are not kept."""
    exact = {"cache": {"reuse": "exact"}, "prefill": {"chunk_tokens": 4 * PAGE}}
    await cluster.start(exact, exact)
    prompt = prompt_of(10 * PAGE)
    await cluster.serve(prompt, new_tokens=3 * PAGE)
    legs = await cluster.serve(prompt)
    assert legs.prefill.facts["cached_tokens"] == 8 * PAGE
    assert legs.decode.facts["cached_tokens"] == 8 * PAGE
    assert cluster.decode.context.cache.cached_pages == 10
    await cluster.free()


@pytest.mark.case("A10")
async def test_an_aborted_prompt_is_not_in_the_tree(cluster: Cluster) -> None:
    """A prompt given up in its first, a middle and its last chunk leaves nothing behind on either side."""
    await cluster.start(*sides())
    brake = cluster.brake(cluster.prefill)
    prompt = prompt_of(24 * PAGE)
    for start in (0, 8 * PAGE, 16 * PAGE):
        brake.at_layer(5, start=start)
        legs = cluster.start_both(prompt)
        await eventually(brake.reached.is_set)
        legs.decode.fail(ClientGone("gone"))
        await legs.decode.answered.wait()
        await eventually(lambda legs=legs: legs.prefill.life.reason is not None)  # type: ignore[misc]
        brake.release()
        await cluster.free()
        assert cluster.prefill.context.cache.cached_pages == 0
        assert cluster.decode.context.cache.cached_pages == 0
    await cluster.serve(prompt)


async def test_a_failed_transfer_leaves_decode_without_the_prompt(cluster: Cluster) -> None:
    """Pages that did not land are not kept by decode; prefill, which computed them, may reuse its own."""
    await cluster.start(*sides())
    prompt = prompt_of(6 * PAGE)
    cluster.writer.plan = lambda session, block: Fault(refuse=True)
    legs = cluster.start_both(prompt)
    await legs.failed()
    await cluster.free()
    assert cluster.decode.context.cache.cached_pages == 0
    cluster.writer.plan = None
    await cluster.serve(prompt)


async def test_pressure_evicts_what_nobody_uses(cluster: Cluster) -> None:
    """More prompts than pages: old ones make room, each answer is right, and nothing is lost."""
    small = {"cache": {"reuse": "page", "pages": 24}, "prefill": {"max_input_tokens": 20 * PAGE}}
    await cluster.start(small, small)
    for round_ in range(12):
        await cluster.serve(prompt_of(9 * PAGE + round_, salt=round_ % 5))
    await cluster.free()
    for node in (cluster.prefill, cluster.decode):
        assert node.context.cache.evicted_pages > 0


@pytest.mark.contract(132, 133)
@pytest.mark.case("E1")
async def test_the_slot_is_held_until_the_first_step_has_been_processed(cluster: Cluster) -> None:
    """The draft's hidden state is read out of the slot itself: it is given back after that step, and once."""
    await cluster.start(*sides("toy-dsa"))
    brake = cluster.brake(cluster.decode)
    prompt = prompt_of(3 * PAGE)
    brake.at_layer(0)
    legs = cluster.start_both(prompt)
    await eventually(brake.reached.is_set)
    assert legs.decode.slot is not None
    assert cluster.held(cluster.decode)["slots"] == 1
    brake.release()
    await cluster.expect_local(legs)
    await cluster.free()


@pytest.mark.contract(133)
@pytest.mark.case("B11")
@pytest.mark.parametrize("new_tokens", [1, 4])
@pytest.mark.parametrize("how", ["abort", "fault", "finish"])
async def test_every_end_frees_the_slot_once(cluster: Cluster, how: str, new_tokens: int) -> None:
    """An abort before the first step, a fault in it, and an answer that ends there each free the slot, once."""
    await cluster.start(*sides("toy-dsa"))
    brake = cluster.brake(cluster.decode)
    released = []
    release = cluster.decode.context.slots.release
    cluster.decode.context.slots.release = lambda ref: (released.append(ref), release(ref))  # type: ignore[assignment, func-returns-value]
    if how == "fault":
        engine = cluster.decode.context.engine

        def broken(step: Any, hooks: Any) -> Any:
            raise RuntimeError("a fault in the step")

        engine.forward = broken  # type: ignore[method-assign]
    elif how == "abort":
        brake.at_layer(0)
    legs = cluster.start_both(prompt_of(2 * PAGE), new_tokens=new_tokens)
    if how == "abort" and new_tokens > 1:
        await eventually(brake.reached.is_set)
        legs.decode.fail(ClientGone("gone"))
        brake.release()
    await legs.answered()
    await cluster.free()
    assert len(released) == 1
