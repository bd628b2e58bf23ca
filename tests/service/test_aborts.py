"""A request that is given up submits nothing more and leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from app.core.lifecycle import State
from app.errors import (
    ClientGone,
    InvalidRequest,
)
from tests.support.faults import END
from tests.support.harness import (
    PAGE,
    Cluster,
    eventually,
    page_list,
    prompt_of,
)

GONE = "the client closed its connection"


@pytest.mark.case("A6")
@pytest.mark.contract(107, 111, 125)
async def test_an_abort_in_an_early_chunk_skips_the_later_ones(cluster: Cluster) -> None:
    """Five chunks, abort during chunk 1: no submit for 2..4, the FIFO is empty, the next room is served."""
    await cluster.start()
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(9, start=8 * PAGE)
    legs = cluster.start_both(prompt_of(5 * 8 * PAGE))
    await eventually(brake.reached.is_set)
    fifos = cluster.prefill_rooms.fifos
    assert [c.start for c in fifos.active(legs.request.room)][-3:] == [256, 384, 512]
    legs.decode.fail(ClientGone(GONE))
    await eventually(lambda: legs.prefill.life.failing)
    submitted = len(cluster.writer.submitted)
    follower = cluster.start_both(prompt_of(40, salt=1))
    brake.release()
    await legs.answered()
    assert [step.start for step in brake.steps[:2]] == [0, 8 * PAGE]
    assert fifos.active(legs.request.room) == ()
    await cluster.expect_local(follower)
    assert [step.start for step in brake.steps[2:]] == [0]
    kept = set(page_list(legs.decode)[16:])
    mine = cluster.writer.blocks()[:submitted]
    assert not cluster.pages_in(cluster.decode, mine) & kept
    await cluster.free()
    assert legs.prefill.sent_bytes < 16 * 12 * PAGE * 64
    assert await fifos.finish(legs.request.room) == 0  # a second finish is harmless


@pytest.mark.case("A6")
@pytest.mark.contract(125)
async def test_an_abort_between_two_forwards_starts_no_other(cluster: Cluster) -> None:
    """The room is given up after a chunk's last layer: the next chunk's forward does not begin."""
    await cluster.start()
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(END, start=0)
    legs = cluster.start_both(prompt_of(3 * 8 * PAGE))
    await eventually(brake.reached.is_set)
    legs.decode.fail(ClientGone(GONE))
    await eventually(lambda: legs.prefill.life.failing)
    brake.release()
    await legs.failed()
    assert [step.start for step in brake.steps] == [0]
    await cluster.free()


@pytest.mark.case("A6")
@pytest.mark.contract(111)
async def test_a_layer_end_after_the_abort_submits_nothing(cluster: Cluster) -> None:
    """A group that is complete only after the room has failed is not sent, although its forward still runs."""
    await cluster.start(prefill={"transfer": {"group_layers": 4, "taper": False}})
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(3)
    legs = cluster.start_both(prompt_of(40))
    await eventually(brake.reached.is_set)
    await asyncio.sleep(0.02)
    legs.decode.fail(ClientGone(GONE))
    await eventually(lambda: legs.prefill.life.failing)
    legs.prefill.contexts[0].note(3, None)
    await asyncio.sleep(0.02)
    brake.release()
    await legs.failed()
    assert cluster.writer.submitted == []
    await cluster.free()


@pytest.mark.case("A9")
async def test_a_late_success_does_not_change_a_rejection(cluster: Cluster) -> None:
    """Rejected while transferring, then the engine succeeds: pages are freed once, the first reason stays."""
    await cluster.start()
    cluster.writer.hold()
    legs = cluster.start_both(prompt_of(40))
    await eventually(lambda: legs.prefill.phases.forward_end)
    assert legs.prefill.life.state == State.TRANSFERRING
    assert legs.prefill.fail(InvalidRequest("rejected by policy"))
    assert not legs.prefill.fail(InvalidRequest("a second reason"))
    reasons = await legs.failed()
    assert [(type(r), r.message) for r in reasons if r] == [(InvalidRequest, "rejected by policy")] * 2
    cluster.writer.let_go()
    await cluster.free()
    assert legs.prefill.life.state == State.FAILED
    assert legs.prefill.life.reason.message == "rejected by policy"


@pytest.mark.case("A10")
@pytest.mark.parametrize("chunk", [1, 2])
async def test_abort_between_submit_and_result_of_a_chunk(cluster: Cluster, chunk: int) -> None:
    """Of a middle chunk or of the last: free = initial, one terminal message, and no prefix is kept."""
    await cluster.start()
    prompt = prompt_of(3 * 8 * PAGE)
    brake = cluster.brake(cluster.prefill)
    cluster.writer.hold(
        lambda block: bool(cluster.pages_in(cluster.decode, [block]) & set(range(8 * chunk, 8 * (chunk + 1))))
    )
    if chunk == 1:
        brake.at_layer(0, start=2 * 8 * PAGE)
    legs = cluster.start_both(prompt)
    reached = brake.reached.is_set if chunk == 1 else lambda: legs.prefill.phases.forward_end
    await eventually(lambda: reached() and cluster.writer.in_flight())
    legs.decode.fail(ClientGone(GONE))
    await eventually(lambda: legs.prefill.life.failing)
    brake.release()
    await legs.failed()
    assert (cluster.held(cluster.prefill)["pages"], cluster.held(cluster.decode)["pages"]) == (24, 25)
    cluster.writer.let_go()
    await cluster.free()
    kinds = [s.kind for s in cluster.wire.log if s.room == legs.room]
    assert kinds == ["destine", "abort"]
    for node in (cluster.prefill, cluster.decode):
        assert [r["room"] for r in node.ended_rooms()] == [legs.room]
    before = len(brake.steps)
    await cluster.serve(prompt)
    assert [step.start for step in brake.steps[before:]] == [0, 128, 256]
    await cluster.free()
