"""Both legs of a request agree on its end, promptly, whoever ends it and when."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from app.core.lifecycle import State
from app.errors import ClientGone, InvalidRequest, PageMismatch, PeerAborted, PromptTooLong
from app.service.awake import within
from app.transfer.base import Status
from app.transfer.fake import Fault
from app.transfer.messages import Destination
from tests.support.faults import MessageFault
from tests.support.harness import PAGE, WITHIN_S, Cluster, Legs, eventually, prompt_of

GONE = "the client closed its connection"


async def introduced(cluster: Cluster) -> None:
    """One request, so that the nodes know each other."""
    await cluster.start()
    await cluster.serve(prompt_of(5))
    await cluster.free()


def destination(cluster: Cluster, *, tokens: int, pages: int) -> Destination:
    return Destination(
        instance=cluster.decode.instance,
        prefill_instance=cluster.prefill.instance,
        prompt_tokens=tokens,
        first_position=0,
        pages=tuple(range(pages)),
        slot=0,
        generation=1000,
    )


@pytest.mark.case("B1")
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_prompt_over_the_limit_ends_both_legs(cluster: Cluster, first: str) -> None:
    """1,001 tokens with a limit of 1,000: prefill fails the room, decode ends with the error and 0 tokens."""
    await cluster.start(prefill={"prefill": {"max_input_tokens": 1000}}, decode={"cache": {"pages": 80}})
    request = cluster.request(prompt_of(1001))
    if first == "prefill":
        legs = Legs(request=request, prefill=cluster.start_prefill(request))
        await legs.answered()
        legs.decode = cluster.start_decode(request)
    else:
        decode = cluster.start_decode(request)
        await eventually(lambda: cluster.wire.answered("destine", request.room))
        legs = Legs(request=request, prefill=cluster.start_prefill(request), decode=decode)
    assert await legs.answered() == []
    for job in legs.jobs:
        assert isinstance(job.life.reason, PromptTooLong)
        assert job.life.reason.message == "the prompt has 1001 tokens, the limit is 1000"
    assert cluster.writer.submitted == []
    await cluster.free()


@pytest.mark.case("B1")
async def test_a_short_page_list_is_refused(cluster: Cluster) -> None:
    """A list of one page for a prompt of 16 pages fails that room; nothing is sent."""
    await introduced(cluster)
    submitted = len(cluster.writer.submitted)
    request = cluster.request(prompt_of(16 * PAGE))
    job = cluster.start_prefill(request)
    path = f"/v1/peer/rooms/{request.room}"
    message = destination(cluster, tokens=16 * PAGE, pages=1)
    assert await cluster.post(cluster.prefill, path, message, "PUT") == (409, "page-mismatch")
    await job.answered.wait()
    assert isinstance(job.life.reason, PageMismatch)
    assert "need 16 pages and 0 look-ahead, the destination has 1: [0] (1)" in job.life.reason.message
    assert len(cluster.writer.submitted) == submitted
    await cluster.free()


@pytest.mark.case("B4", "B10")
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_refusal_at_decode_reaches_prefill(cluster: Cluster, first: str) -> None:
    """Decode rejects before it holds anything: prefill is told at once, long before its deadline, and holds nothing."""
    await cluster.start()
    request = cluster.request(prompt_of(40), new_tokens=0)
    legs = Legs(request=request)
    async with asyncio.timeout(5):  # deadlines.bootstrap_s is 30 s
        if first == "prefill":
            legs.prefill = cluster.start_prefill(request)
            legs.decode = cluster.start_decode(request)
            mine, theirs = await legs.failed()
            assert isinstance(mine, PeerAborted)
        else:
            legs.decode = cluster.start_decode(request)
            await eventually(lambda: cluster.wire.answered("abort", request.room))
            with pytest.raises(PeerAborted, match="max_new_tokens is 0, the limit is 1024"):
                cluster.start_prefill(request)
            theirs = (await legs.failed())[1]
    assert isinstance(theirs, InvalidRequest)
    assert theirs.message == "max_new_tokens is 0, the limit is 1024"
    assert cluster.wire.sent("destine") == []
    await cluster.free()


@pytest.mark.case("B5")
async def test_an_abort_after_prefill_has_finished_leaves_decode_alone(cluster: Cluster) -> None:
    """Everything has landed and decode has not started on it: an abort of prefill's leg takes nothing away."""
    await cluster.start()
    async with cluster.decode.context.forwards.turn(timeout_s=5):
        legs = cluster.start_both(prompt_of(40))
        await eventually(lambda: legs.decode.life.state is State.DECODING)
        await legs.prefill.answered.wait()
        answer = await cluster.call(cluster.prefill, "POST", f"/abort/{legs.room}")
        assert answer.status_code == 404
        assert cluster.held(cluster.decode)["pages"] == 3
    await cluster.expect_local(legs)
    await cluster.free()


@pytest.mark.case("B5")
@pytest.mark.contract(124)
async def test_pages_that_nobody_fetches_are_freed_by_timeout(cluster: Cluster) -> None:
    """Decode never hears that all has landed: both sides free their pages by timeout, once."""
    # time enough for the forward on a machine that stands still for a moment
    await cluster.start(prefill={"deadlines": {"message_s": 0.2}}, decode={"deadlines": {"transfer_s": 4.0}})
    cluster.wire.rule = lambda sent: MessageFault(copies=0) if sent.kind in ("complete", "failed") else None
    legs = cluster.start_both(prompt_of(40))
    await eventually(lambda: legs.prefill.life.state is State.METADATA)
    assert cluster.held(cluster.prefill)["pages"] == 3
    reasons = await legs.failed()
    assert [r.slug for r in reasons if r] == ["deadline", "deadline"]
    await cluster.free()
    assert len(cluster.wire.sent("abort", legs.room)) == 1


@pytest.mark.case("B8")
@pytest.mark.parametrize("state", [State.BOOTSTRAPPING, State.WAITING, State.TRANSFERRING, State.METADATA])
async def test_the_client_of_prefill_goes(cluster: Cluster, state: State) -> None:
    """In each state of the prefill leg: its answer is prompt, decode fails too, and free = initial."""
    await cluster.start()
    told = asyncio.Event()
    cluster.wire.rule = lambda sent: MessageFault(until=told) if sent.kind == "complete" else None
    brake = cluster.brake(cluster.prefill)
    async with AsyncExitStack() as stack:
        if state is State.BOOTSTRAPPING:
            await stack.enter_async_context(_all_pages(cluster))
        elif state is State.WAITING:
            await stack.enter_async_context(cluster.prefill.context.forwards.turn(timeout_s=5))
        elif state is State.TRANSFERRING:
            brake.at_layer(5)
        legs = cluster.start_both(prompt_of(40))
        await eventually(lambda: legs.prefill.life.state is state)
        if state is State.TRANSFERRING:
            await eventually(brake.reached.is_set)
        assert legs.prefill.fail(ClientGone(GONE))
        brake.release()
        await within(legs.prefill.answered.wait(), WITHIN_S)
    mine, theirs = await legs.failed()
    assert isinstance(mine, ClientGone)
    assert isinstance(theirs, ClientGone), theirs
    told.set()
    await cluster.free()


def _all_pages(cluster: Cluster) -> AsyncExitStack:
    """Decode has no page left, so that it names none."""
    gate = cluster.decode.context.gate
    pages = gate.cache.allocate(gate.cache.free_pages)
    assert pages is not None
    stack = AsyncExitStack()
    stack.callback(gate.give, pages)
    return stack


@pytest.mark.case("B8", "B10", "B11")
@pytest.mark.parametrize("state", [State.BOOTSTRAPPING, State.WAITING, State.METADATA, State.DECODING])
async def test_the_client_of_decode_goes(cluster: Cluster, state: State) -> None:
    """In each state of the decode leg, the time before its first step included: free = initial."""
    await cluster.start(prefill={"transfer": {"retries": 1, "retry_after_s": 0.01, "late_landing_s": 0.5}})
    greeted = asyncio.Event()
    brake = cluster.brake(cluster.prefill)
    async with AsyncExitStack() as stack:
        if state is State.BOOTSTRAPPING:
            cluster.wire.rule = lambda sent: MessageFault(until=greeted) if sent.kind == "handshake" else None
        elif state is State.WAITING:
            brake.at_layer(5)
        elif state is State.METADATA:  # a retried write: decode waits until it cannot land once more
            failing = iter([Fault(status=Status.FAILED)])
            cluster.writer.plan = lambda session, block: next(failing, Fault())
        else:
            await stack.enter_async_context(cluster.decode.context.forwards.turn(timeout_s=5))
        legs = cluster.start_both(prompt_of(40))
        await eventually(lambda: legs.decode.life.state is state)
        assert legs.decode.fail(ClientGone(GONE))
        await within(legs.decode.answered.wait(), WITHIN_S)
        brake.release()
        mine, theirs = await legs.failed()
    assert isinstance(theirs, ClientGone)
    if state in (State.BOOTSTRAPPING, State.WAITING):
        assert isinstance(mine, PeerAborted) and mine.message == GONE
    else:
        assert mine is None  # its part had been done
    greeted.set()
    await cluster.free()


@pytest.mark.case("B8")
async def test_the_client_of_decode_goes_during_a_step(cluster: Cluster) -> None:
    """The step ends at its next layer, its pages go back after that, and prefill is not disturbed."""
    await cluster.start()
    brake = cluster.brake(cluster.decode)
    brake.at(lambda step, layer: layer == 3)
    legs = cluster.start_both(prompt_of(40), new_tokens=20)
    await eventually(brake.reached.is_set)
    legs.decode.fail(ClientGone(GONE))
    await asyncio.sleep(0.05)
    assert cluster.held(cluster.decode)["pages"] == 4
    brake.release()
    mine, theirs = await legs.failed()
    assert mine is None and isinstance(theirs, ClientGone)
    assert len(brake.steps) == 1
    await cluster.free()


@pytest.mark.case("B9")
async def test_an_abort_takes_a_waiting_room_out_of_the_queue(cluster: Cluster) -> None:
    """Queued at prefill and aborted by decode: gone from the queue, its slot free, before any turn came."""
    await cluster.start()
    async with cluster.prefill.context.forwards.turn(timeout_s=5):
        legs = cluster.start_both(prompt_of(40))
        await eventually(lambda: cluster.prefill.context.forwards.waiting == 1)
        legs.decode.fail(ClientGone(GONE))
        await cluster.free()
        mine, _ = await legs.failed()
        assert isinstance(mine, PeerAborted)
    await cluster.serve(prompt_of(40, salt=1))
    await cluster.free()


@pytest.mark.case("B10")
@pytest.mark.parametrize("how", ["job", "operator"])
async def test_a_failing_prefill_fails_decode(cluster: Cluster, how: str) -> None:
    """Decode is failed with prefill's reason at once, not after its timeout; an operator's abort as well."""
    await cluster.start()
    cluster.writer.hold()
    legs = cluster.start_both(prompt_of(40))
    await eventually(cluster.writer.in_flight)
    if how == "job":
        legs.prefill.fail(InvalidRequest("no"))
    else:
        body = json.dumps({"reason": "no"}).encode()
        answer = await cluster.call(cluster.prefill, "POST", f"/abort/{legs.room}", body)
        assert answer.json() == {"room": legs.room, "aborted": True, "drained": False}
    mine, theirs = await legs.failed()
    assert cluster.writer.in_flight(), "neither side waited for the drain"
    assert mine is not None and theirs is not None
    assert (mine.slug, mine.message) == (theirs.slug, theirs.message)
    assert len(cluster.wire.sent("failed", legs.room)) == 1
    cluster.writer.let_go()
    await cluster.free()


@pytest.mark.case("B10")
@pytest.mark.contract(124)
async def test_a_failing_decode_fails_prefill(cluster: Cluster) -> None:
    """Prefill stops its forward within a layer of decode's abort, which is sent once."""
    await cluster.start()
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(2)
    legs = cluster.start_both(prompt_of(40))
    await eventually(brake.reached.is_set)
    legs.decode.fail(InvalidRequest("no"))
    await eventually(lambda: legs.prefill.life.failing)
    brake.release()
    mine, _ = await legs.failed()
    assert isinstance(mine, PeerAborted) and mine.message == "no"
    assert legs.prefill.phases.forward_end == 0
    assert len(cluster.wire.sent("abort", legs.room)) == 1
    assert cluster.writer.submitted == []
    await cluster.free()
