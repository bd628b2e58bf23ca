"""One writer a metadata slot, one request a room."""

from __future__ import annotations

import asyncio
import json

import pytest

from app.core.lifecycle import State
from app.core.rooms import parse_room
from app.core.slots import Metadata, SlotFormat
from app.errors import ClientGone, Corruption, InvalidRequest, NoCapacity, RoomInUse
from app.transfer.base import Block
from app.transfer.fake import Fault
from tests.support.harness import PAGE, Cluster, eventually, is_slot, prompt_of

GONE = "the client closed its connection"


@pytest.mark.case("E1")
async def test_a_slot_has_no_second_owner_while_its_record_is_in_flight(cluster: Cluster) -> None:
    """A's delayed record lands after A has gone: B has another slot meanwhile, and B's first token is B's."""
    await cluster.start(decode={"cache": {"slots": 2}})
    held = iter([True])
    mine: set[int] = set()

    def first_record(block: Block) -> bool:
        if is_slot(block) and next(held, False):
            mine.add(id(block))
        return id(block) in mine

    cluster.writer.hold(first_record)
    a = cluster.start_both(prompt_of(40))
    await eventually(lambda: mine)
    slot_of_a = a.decode.slot
    a.decode.fail(ClientGone(GONE))
    await a.answered()
    b = cluster.start_both(prompt_of(40, salt=1))
    await eventually(lambda: b.decode.slot is not None)
    assert b.decode.slot is not None and slot_of_a is not None
    assert b.decode.slot.index != slot_of_a.index
    async with cluster.decode.context.forwards.turn(timeout_s=5):
        await eventually(lambda: b.decode.landed.is_set())
        c = cluster.start_both(prompt_of(40, salt=2))
        reasons = await c.failed()
        assert isinstance(reasons[1], NoCapacity)  # rather than A's slot
        cluster.writer.let_go()
    await cluster.expect_local(b)
    await cluster.free()
    for salt in (3, 4):
        await cluster.serve(prompt_of(40, salt=salt))
    await cluster.free()


@pytest.mark.case("E1")
async def test_a_foreign_record_is_no_first_token(cluster: Cluster) -> None:
    """Bytes of an earlier owner in a slot fail the room that reads them; they are never its first token."""
    await cluster.start()
    context = cluster.decode.context
    a = context.slots.take(parse_room(1))
    assert a is not None
    context.slots.release(a)
    b = context.slots.take(parse_room(2))
    assert b is not None and b.index == a.index
    record = SlotFormat().encode(a.room, a.generation, Metadata(first_token=65, log_probability=0.0))
    context.pool.write_slot(b.index, record)
    with pytest.raises(Corruption, match="was written for room 1 generation 1, not for 2 generation 2"):
        context.pool.read_slot(b)
    mine = SlotFormat().encode(b.room, b.generation, Metadata(first_token=66, log_probability=0.0))
    context.pool.write_slot(b.index, mine)
    record_read = context.pool.read_slot(b)
    assert record_read is not None and record_read.first_token == 66
    context.slots.release(b)
    await cluster.free()


@pytest.mark.case("E2")
async def test_a_slot_that_was_not_written_yet_is_no_failure(cluster: Cluster) -> None:
    """Room 12 takes over the slot of room 11: polled before the write it says 'not yet'."""
    await cluster.start(decode={"cache": {"slots": 1}})
    eleven = await cluster.serve(prompt_of(40), room=11)
    await cluster.free()
    cluster.writer.hold(is_slot)
    twelve = cluster.start_both(prompt_of(40, salt=1), room=12)
    await eventually(cluster.writer.in_flight)
    ref = twelve.decode.slot
    assert ref is not None and ref.generation == eleven.decode.generation + 1
    assert cluster.decode.context.pool.read_slot(ref) is None
    assert twelve.decode.life.state is State.WAITING
    cluster.writer.let_go()
    await cluster.expect_local(twelve)
    await cluster.free()


@pytest.mark.case("E2")
async def test_a_foreign_record_truly_written_fails_the_room(cluster: Cluster) -> None:
    """The record of room 11 in the slot of room 12 is corruption, and only room 12 fails."""
    await cluster.start(decode={"cache": {"slots": 1}})
    await cluster.serve(prompt_of(40), room=11)
    await cluster.free()
    cluster.writer.plan = lambda session, block: Fault(lands_after_s=-1) if is_slot(block) else Fault()
    cluster.writer.hold(is_slot)
    twelve = cluster.start_both(prompt_of(40, salt=1), room=12)
    await eventually(cluster.writer.in_flight)
    ref = twelve.decode.slot
    assert ref is not None
    record = SlotFormat().encode(
        parse_room(11), ref.generation - 1, Metadata(first_token=65, log_probability=0.0)
    )
    cluster.decode.context.pool.write_slot(ref.index, record)
    cluster.writer.let_go()
    _, reason = await twelve.failed()
    assert isinstance(reason, Corruption)
    assert reason.message.startswith("slot 0 was written for room 11")
    assert await twelve.tokens() == []
    cluster.writer.plan = None
    await cluster.serve(prompt_of(40, salt=2))
    await cluster.free()


@pytest.mark.case("E3")
async def test_a_second_request_with_a_live_room_is_refused(cluster: Cluster) -> None:
    """Two live requests with room 7: the second gets 409 from both nodes, the first completes."""
    await cluster.start()
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(3)
    first = cluster.start_both(prompt_of(40), room=7)
    await eventually(brake.reached.is_set)
    with pytest.raises(RoomInUse, match="room 7 is in use"):
        cluster.start_both(prompt_of(20, salt=1), room=7)
    port = int(cluster.prefill.url.rpartition(":")[2])
    body = {
        "input_ids": prompt_of(20, salt=1),
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": 7,
    }
    for node in (cluster.prefill, cluster.decode):
        answer = await cluster.call(node, "POST", "/generate", json.dumps(body).encode())
        assert answer.status_code == 409
        assert answer.json()["type"] == "urn:kvferry:problem:room-in-use"
    brake.release()
    await cluster.expect_local(first)
    await cluster.free()


@pytest.mark.case("E3")
async def test_a_room_is_not_reused_while_it_drains(cluster: Cluster) -> None:
    """An aborted room whose writes are still in flight cannot be opened again on either side."""
    await cluster.start(prefill={"deadlines": {"tombstone_s": 0.01}})
    cluster.writer.hold()
    legs = cluster.start_both(prompt_of(40), room=7)
    await eventually(cluster.writer.in_flight)
    legs.decode.fail(ClientGone(GONE))
    await legs.answered()
    await asyncio.sleep(0.03)
    with pytest.raises(RoomInUse):
        cluster.start_prefill(cluster.request(prompt_of(20), room=7))
    with pytest.raises(RoomInUse):
        cluster.start_decode(cluster.request(prompt_of(20), room=7))
    cluster.writer.let_go()
    await cluster.free()
    await cluster.serve(prompt_of(20, salt=1), room=7)
    await cluster.free()


@pytest.mark.case("E5")
async def test_a_room_is_never_derived_from_a_missing_id(cluster: Cluster) -> None:
    """Without a room both nodes refuse the request with 422, and no two requests share one."""
    with pytest.raises(InvalidRequest, match="bootstrap_room is missing"):
        parse_room(None)
    await cluster.start()
    body = {"input_ids": prompt_of(PAGE), "bootstrap_host": "127.0.0.1", "bootstrap_port": 20000}
    for node in (cluster.prefill, cluster.decode):
        for room in ({}, {"bootstrap_room": None}):
            answer = await cluster.call(node, "POST", "/generate", json.dumps(body | room).encode())
            assert answer.status_code == 422
            assert answer.json()["type"] == "urn:kvferry:problem:invalid-request"
        assert node.statistics()["rooms"]["opened"] == 0
    await cluster.free()
