"""Control messages that come late, twice, too early or for nobody."""

from __future__ import annotations

import asyncio

import pytest

from app.core.lifecycle import State
from app.errors import ClientGone, InvalidRequest, PeerAborted
from app.transfer.base import Status
from app.transfer.fake import Fault
from app.transfer.messages import Abort, Complete, Destination, Failed, RankSent
from tests.support.faults import MessageFault
from tests.support.harness import Cluster, Legs, eventually, prompt_of

GONE = "the client closed its connection"


@pytest.mark.case("B2")
async def test_the_first_outcome_stays(cluster: Cluster) -> None:
    """A failed room stays failed when success arrives; a failure for a cleared room makes no entry."""
    await cluster.start()
    cluster.writer.hold()
    legs = cluster.start_both(prompt_of(40))
    await eventually(cluster.writer.in_flight)
    legs.decode.fail(InvalidRequest("the first reason"))
    await legs.decode.answered.wait()
    path = f"/v1/peer/rooms/{legs.room}"
    success = Complete(
        instance=cluster.prefill.instance,
        generation=legs.decode.generation,
        sent_bytes=1,
        ranks=(RankSent(rank=0, positions=(), sent_bytes=1),),
    )
    assert await cluster.post(cluster.decode, f"{path}/complete", success) == (404, "unknown-room")
    assert legs.decode.life.state == State.DRAINING
    cluster.writer.let_go()
    await cluster.free()
    assert legs.decode.life.state == State.FAILED
    assert legs.decode.life.reason.message == "the first reason"
    failure = Failed(instance=cluster.prefill.instance, generation=1, slug="transfer-failed", reason="late")
    assert await cluster.post(cluster.decode, f"{path}/failed", failure) == (404, "unknown-room")
    assert len(cluster.decode.rooms()) == 0
    assert cluster.decode.ended_rooms()[-1]["error"]["reason"] == "the first reason"


@pytest.mark.case("B3")
@pytest.mark.contract(126)
async def test_notices_for_foreign_rooms_change_nothing(cluster: Cluster) -> None:
    """Notices for rooms that never were, or that have ended, are refused; nothing is freed twice."""
    await cluster.start()
    legs = await cluster.serve(prompt_of(40))
    await cluster.free()
    nothing = RankSent(rank=0, positions=(), sent_bytes=0)
    complete = Complete(instance=cluster.prefill.instance, generation=1, sent_bytes=0, ranks=(nothing,))
    failed = Failed(instance=cluster.prefill.instance, generation=1, slug="internal", reason="x")
    abort = Abort(instance=cluster.decode.instance, generation=1, reason="x")
    for _ in range(2):
        path = f"/v1/peer/rooms/{legs.room}"
        assert await cluster.post(cluster.decode, f"{path}/complete", complete) == (200, "")
        assert await cluster.post(cluster.decode, f"{path}/failed", failed) == (404, "unknown-room")
        assert await cluster.post(cluster.prefill, f"{path}/abort", abort) == (200, "")
        path = "/v1/peer/rooms/99"
        assert await cluster.post(cluster.decode, f"{path}/complete", complete) == (404, "unknown-room")
        assert await cluster.post(cluster.decode, f"{path}/failed", failed) == (404, "unknown-room")
        assert await cluster.post(cluster.prefill, f"{path}/abort", abort) == (200, "")
    await cluster.free()
    await cluster.serve(prompt_of(40, salt=1))
    await cluster.free()


@pytest.mark.case("B3")
@pytest.mark.parametrize("outcome", ["success", "failure"])
async def test_every_message_twice(cluster: Cluster, outcome: str) -> None:
    """Each control message is delivered twice, at once: the request ends as it would have, once."""
    await cluster.start()
    cluster.wire.rule = lambda sent: MessageFault(copies=2)
    if outcome == "success":
        await cluster.serve(prompt_of(40))
    else:
        cluster.writer.plan = lambda session, block: Fault(status=Status.FAILED)
        legs = cluster.start_both(prompt_of(40))
        reasons = await legs.failed()
        assert [r.slug for r in reasons if r] == ["transfer-failed"] * 2
    await cluster.free()
    assert len(cluster.decode.ended_rooms()) == len(cluster.prefill.ended_rooms()) == 1


@pytest.mark.case("B3")
@pytest.mark.parametrize("new_tokens", [1, 6])
async def test_the_word_of_success_may_be_repeated(cluster: Cluster, new_tokens: int) -> None:
    """Repeated while decode is at work and after its end, it is accepted; pages named again stay unused."""
    await cluster.start()
    brake = cluster.brake(cluster.decode)
    brake.at(lambda step, layer: layer == 0 and step.start == 41)
    legs = cluster.start_both(prompt_of(40), new_tokens=new_tokens)
    if new_tokens > 1:
        await eventually(brake.reached.is_set)
        assert legs.decode.slot is None
    else:
        await legs.answered()
    for kind in ("complete", "destine"):
        (sent,) = cluster.wire.sent(kind, legs.room)
        status, _ = await cluster.wire.deliver(sent)
        assert status in (200, 202), kind
    assert len(cluster.prefill.rooms()) == 0, "the room is not parked anew"
    brake.release()
    if new_tokens > 1:
        await cluster.expect_local(legs)
    await cluster.free()


@pytest.mark.case("B4")
async def test_an_abort_overtakes_the_pages_it_is_about(cluster: Cluster) -> None:
    """Decode's abort arrives before its own page list: the late list is refused, whatever the room was before."""
    await cluster.start()
    await cluster.serve(prompt_of(40), room=7)
    await cluster.free()
    late = asyncio.Event()
    cluster.wire.rule = lambda sent: MessageFault(until=late) if sent.kind == "destine" else None
    request = cluster.request(prompt_of(40, salt=1), room=7)
    decode = cluster.start_decode(request)
    await eventually(lambda: len(cluster.wire.sent("destine")) == 2)
    decode.fail(ClientGone(GONE))
    await cluster.free()
    submitted = len(cluster.writer.submitted)
    late.set()
    await eventually(lambda: len(cluster.wire.answered("destine")) == 2)
    assert cluster.wire.answered("destine")[1][0] == 502
    with pytest.raises(PeerAborted, match=GONE):
        cluster.start_prefill(request)
    await cluster.free()
    assert len(cluster.writer.submitted) == submitted


@pytest.mark.case("B2")
async def test_pages_for_a_failing_room_are_refused_with_its_reason(cluster: Cluster) -> None:
    """A page list that comes again while the room drains is not accepted: it gets the first reason."""
    await cluster.start()
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(3)
    legs = cluster.start_both(prompt_of(40))
    await eventually(brake.reached.is_set)
    legs.prefill.fail(InvalidRequest("the first reason"))
    (sent,) = cluster.wire.sent("destine", legs.room)
    status, problem = await cluster.wire.deliver(sent)
    assert (status, problem["detail"]) == (422, "the first reason")
    brake.release()
    await legs.failed()
    await cluster.free()


async def test_late_words_of_an_earlier_use_of_a_room(cluster: Cluster) -> None:
    """A late abort or page list of a room that has succeeded does nothing to the next use of its number."""
    await cluster.start()
    legs = await cluster.serve(prompt_of(40), room=7)
    await cluster.free()
    abort = Abort(
        instance=cluster.decode.instance,
        generation=legs.decode.generation,
        reason="late",
    )
    path = "/v1/peer/rooms/7/abort"
    assert (await cluster.post(cluster.prefill, path, abort))[0] == 200
    request = cluster.request(prompt_of(40, salt=1), room=7)
    again = Legs(request=request, prefill=cluster.start_prefill(request))
    status, _ = await cluster.wire.deliver(cluster.wire.sent("destine", 7)[0])
    assert (status, again.prefill.destination) == (202, None)
    assert (await cluster.post(cluster.prefill, path, abort))[0] == 200
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(0)
    again.decode = cluster.start_decode(request)
    await eventually(brake.reached.is_set)
    assert (await cluster.post(cluster.prefill, path, abort))[0] == 200
    brake.release()
    await cluster.expect_local(again)
    await cluster.free()


@pytest.mark.contract(125)
@pytest.mark.parametrize("how", ["abort", "failure"])
async def test_a_use_that_was_given_up_never_gets_its_pages_back(cluster: Cluster, how: str) -> None:
    """A repeated announcement comes after the tombstone: the pages that it names may be another room's by now."""
    await cluster.start({"deadlines": {"tombstone_s": 0.05}})
    cluster.writer.hold()
    legs = cluster.start_both(prompt_of(40))
    await eventually(cluster.writer.in_flight)
    announced = cluster.wire.sent("destine", legs.room)[0].message
    assert isinstance(announced, Destination)
    if how == "abort":
        legs.decode.fail(InvalidRequest("given up"))
    else:
        legs.prefill.fail(InvalidRequest("failed here"))
    cluster.writer.let_go()
    await legs.answered()
    await cluster.free()
    await asyncio.sleep(0.1)
    path = f"/v1/peer/rooms/{legs.room}"
    assert await cluster.post(cluster.prefill, path, announced, method="PUT") == (502, "peer-aborted")
    assert len(cluster.prefill.rooms()) == 0


@pytest.mark.case("B2")
async def test_a_late_failure_leaves_the_next_use_alone(cluster: Cluster) -> None:
    """A failure of an earlier use of the number, by its generation, is refused: the room goes on."""
    await cluster.start()
    first = await cluster.serve(prompt_of(20), room=77)
    await cluster.free()
    cluster.writer.hold()
    legs = cluster.start_both(prompt_of(40), room=77)
    await eventually(cluster.writer.in_flight)
    late = Failed(
        instance=cluster.prefill.instance,
        generation=first.decode.generation,
        slug="transfer-failed",
        reason="late",
    )
    path = f"/v1/peer/rooms/{legs.room}/failed"
    status, problem = await cluster.post(cluster.decode, path, late)
    assert (status, problem) == (502, "peer-refused")
    cluster.writer.let_go()
    await cluster.expect_local(legs)
    await cluster.free()
