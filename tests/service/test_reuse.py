"""A page or slot is given to its next owner only when nothing can land on it any more."""

from __future__ import annotations

import asyncio
import time

import pytest

from app.errors import (
    ClientGone,
    DeadlineExceeded,
    PeerAborted,
    SettingsError,
    TransferFailed,
)
from app.service.awake import within
from app.transfer.base import Block, Status
from app.transfer.fake import Fault
from app.transfer.messages import Abort, Complete, RankSent
from tests.support.faults import MessageFault
from tests.support.harness import (
    PAGE,
    WITHIN_S,
    Cluster,
    eventually,
    is_slot,
    node_settings,
    page_list,
    prompt_of,
)

GONE = "the client closed its connection"


@pytest.mark.case("A1")
@pytest.mark.contract(111)
async def test_a_held_write_keeps_its_pages_from_the_next_request(cluster: Cluster) -> None:
    """Pages 14..44 of an aborted request go to nobody until the engine call on them has returned."""
    await cluster.start(prefill={"cache": {"pages": 256}})
    gate = cluster.decode.context.gate
    below = await gate.take(14, timeout_s=1)
    first = cluster.start_both(prompt_of(30 * PAGE + 8), new_tokens=4)
    await eventually(lambda: first.decode.pages is not None)
    cluster.hold_room(first)
    assert page_list(first.decode) == list(range(14, 45))
    await eventually(cluster.writer.in_flight)
    assert first.decode.fail(ClientGone(GONE))
    await first.answered()  # the caller hears of it without waiting for the drain
    assert cluster.writer.in_flight()

    gate.give(below)
    second = cluster.start_both(prompt_of(32 * PAGE - 8, salt=1), new_tokens=4)
    third = cluster.start_both(prompt_of(4 * PAGE, salt=2), new_tokens=4)
    await cluster.expect_local(second)
    assert not set(page_list(second.decode)) & set(range(14, 45))
    await cluster.expect_local(third)
    fourth = cluster.start_both(prompt_of(40 * PAGE, salt=3), new_tokens=4)
    await eventually(lambda: gate.waiting == 1)
    await asyncio.sleep(0.05)
    assert fourth.decode.pages is None  # only 33 pages are free
    cluster.writer.let_go()
    await cluster.expect_local(fourth)
    await cluster.free()


@pytest.mark.case("A2")
@pytest.mark.contract(111, 124, 125)
@pytest.mark.parametrize("what", ["pages", "slot"])
async def test_the_abort_is_acknowledged_when_nothing_is_in_flight(cluster: Cluster, what: str) -> None:
    """ABORT during a write of pages or of the metadata record: one ACK, after the engine has returned."""
    await cluster.start()
    cluster.writer.hold(is_slot if what == "slot" else lambda block: not is_slot(block))
    legs = cluster.start_both(prompt_of(40))
    await eventually(lambda: legs.prefill.metadata is not None)
    await eventually(lambda: cluster.writer.in_flight() == (1 if what == "slot" else 12))
    legs.decode.fail(ClientGone(GONE))
    mine, theirs = await legs.failed()
    assert isinstance(mine, PeerAborted) and mine.message == GONE
    assert isinstance(theirs, ClientGone)
    await asyncio.sleep(0.1)
    assert len(cluster.wire.sent("abort", legs.room)) == 1
    assert cluster.wire.answered("abort", legs.room) == []
    assert cluster.held(cluster.decode)["slots"] == 1
    cluster.writer.let_go()
    await cluster.free()
    assert cluster.wire.answered("abort", legs.room) == [
        (200, {"room": legs.room, "drained": True, "known": True, "instance": cluster.prefill.instance})
    ]
    assert len(cluster.wire.sent("abort", legs.room)) == 1


@pytest.mark.case("A2")
@pytest.mark.parametrize("state", ["transferring", "parked"])
async def test_two_aborts_of_one_room_get_one_ack_each(cluster: Cluster, state: str) -> None:
    """Ranks that give one room up are answered once each, after the drain, and nothing ends twice."""
    await cluster.start()
    cluster.writer.hold()
    request = cluster.request(prompt_of(40))
    decode = cluster.start_decode(request)
    table = cluster.prefill_rooms.table
    await eventually(lambda: request.room in table)
    if state == "transferring":
        cluster.start_prefill(request)
        await eventually(cluster.writer.in_flight)
    abort = Abort(instance=cluster.decode.instance, reason="given up")
    asks = [asyncio.create_task(cluster.prefill_rooms.abort(request.room, abort)) for _ in range(2)]
    decode.fail(ClientGone(GONE))
    await asyncio.sleep(0.1)
    if state == "transferring":
        assert not any(ask.done() for ask in asks)
        assert not cluster.wire.answered("abort", request.room)
    cluster.writer.let_go()
    answers = [await ask for ask in asks]
    assert [(answer.drained, answer.known) for answer in answers] == [(True, True)] * 2
    await cluster.free()
    assert [status for status, _ in cluster.wire.answered("abort", request.room)] == [200]
    assert [r["room"] for r in table.ended()] == [request.room]
    assert cluster.prefill.context.quarantine._next == 2, "the room was held once"


@pytest.mark.case("A4")
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_peer_without_drain_acknowledgement_is_refused(cluster: Cluster, side: str) -> None:
    """The handshake is refused with the reason, on either side, and no byte moves."""
    await cluster.start()
    lacking = cluster.prefill if side == "prefill" else cluster.decode
    other = cluster.decode if side == "prefill" else cluster.prefill
    mine = lacking.introduction().model_copy(update={"capabilities": ("absolute-positions",)})
    lacking.context.peers._me = lambda: mine
    legs = cluster.start_both(prompt_of(40))
    _, reason = await legs.failed()
    assert reason is not None and reason.slug == "peer-refused"
    assert reason.message.endswith("the peer lacks drain-ack: pages could not be freed safely")
    assert (other.context.peers.refused, len(other.context.peers)) == (1, 0)
    assert cluster.writer.submitted == []
    await cluster.free()


@pytest.mark.case("A5")
async def test_pages_of_a_failed_write_wait_for_its_late_landing(cluster: Cluster) -> None:
    """The engine says -1, the bytes land later: the pages are quarantined past that, and B's are intact."""
    late_s, settle_s = 0.4, 0.7
    await cluster.start(prefill={"transfer": {"late_landing_s": settle_s}}, decode={"cache": {"pages": 40}})
    cluster.writer.plan = lambda session, block: Fault(
        delay_s=0.05, status=Status.FAILED, lands_after_s=late_s
    )
    first = cluster.start_both(prompt_of(31 * PAGE))
    _, reason = await first.failed()
    assert isinstance(reason, TransferFailed)
    cluster.writer.plan = None
    second = cluster.start_both(prompt_of(30 * PAGE, salt=1))
    await eventually(lambda: cluster.decode.context.gate.waiting == 1)
    assert cluster.writer._landings, "the bytes are still to come"
    await eventually(lambda: second.decode.pages is not None)
    assert not cluster.writer._landings
    await cluster.expect_local(second)
    assert set(page_list(first.decode)) & set(page_list(second.decode))
    await cluster.free()


@pytest.mark.case("A5")
async def test_a_retried_write_does_not_land_over_decoded_rows(cluster: Cluster) -> None:
    """A write fails, its retry succeeds and the first bytes land late: decoding starts after that."""
    await cluster.start(
        prefill={"transfer": {"retries": 1, "retry_after_s": 0.01, "late_landing_s": 0.5}},
    )
    failing = iter([Fault(status=Status.FAILED, lands_after_s=0.3)] * 4)
    cluster.writer.plan = lambda session, block: next(failing, Fault())
    legs = cluster.start_both(prompt_of(PAGE + 3), new_tokens=10)
    await cluster.expect_local(legs)
    assert not cluster.writer._landings
    assert cluster.prefill.statistics()["transfer"]["retries"] > 0
    await cluster.free()


@pytest.mark.case("A5")
async def test_a_retried_metadata_write_keeps_both_slots(cluster: Cluster) -> None:
    """The record's first write lands late: neither its source nor its slot has another owner by then."""
    await cluster.start(
        prefill={"transfer": {"retries": 1, "retry_after_s": 0.01, "late_landing_s": 0.8}},
    )
    failing = iter([Fault(status=Status.FAILED, lands_after_s=0.3)])
    cluster.writer.plan = lambda session, block: next(failing, Fault()) if is_slot(block) else Fault()
    legs = cluster.start_both(prompt_of(PAGE), new_tokens=1)
    await eventually(lambda: legs.decode.landed.is_set())
    assert legs.decode.settled_at_s > time.monotonic()
    assert (cluster.held(cluster.prefill)["slots"], cluster.held(cluster.decode)["slots"]) == (1, 1)
    await cluster.expect_local(legs)
    assert not cluster.writer._landings
    await cluster.free()


@pytest.mark.case("A13")
@pytest.mark.contract(124)
async def test_a_dead_peer_holds_pages_for_a_bounded_time(cluster: Cluster) -> None:
    """No completion ever comes: pages go back at the deadline; a completion after that is ignored."""
    with pytest.raises(SettingsError, match="must outlive the engine's own timeout"):
        node_settings("decode", deadlines={"quarantine_s": 3.0})
    await cluster.start(
        decode={
            "transfer": {"deadline_s": 3.0},
            "deadlines": {
                "transfer_s": 0.3,
                "quarantine_s": 3.2,
                "lease_s": 0.1,
                "heartbeat_s": 0.04,
                # the room's own deadline ends it, not the silence
                "heartbeat_misses": 100,
                "message_s": 0.2,
            },
        }
    )
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(0)
    legs = cluster.start_both(prompt_of(40))
    await eventually(brake.reached.is_set)
    cluster.wire.rule = lambda sent: MessageFault(refused=True)
    await within(legs.decode.answered.wait(), WITHIN_S)
    assert isinstance(legs.decode.life.reason, DeadlineExceeded)
    assert len(cluster.wire.sent("abort", legs.room)) == 1
    assert cluster.held(cluster.decode)["pages"] == 3
    (hold,) = cluster.decode.context.quarantine.snapshot(time.monotonic())
    assert hold["age_s"] + hold["left_s"] == pytest.approx(3.2, abs=0.01)
    await eventually(lambda: not cluster.held(cluster.decode)["pages"])
    assert cluster.decode.context.quarantine.expired == 1
    late = Complete(
        instance=cluster.prefill.instance,
        generation=legs.decode.generation,
        sent_bytes=0,
        ranks=(RankSent(rank=0, positions=(), sent_bytes=0),),
    )
    path = f"/v1/peer/rooms/{legs.room}/complete"
    answer = await cluster.call(cluster.decode, "POST", path, late.model_dump_json().encode())
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:kvferry:problem:unknown-room")
    legs.prefill.fail(ClientGone(GONE))
    brake.release()
    await cluster.free()


@pytest.mark.case("A13")
@pytest.mark.parametrize("abort", ["before", "after"])
async def test_pages_that_were_not_proven_idle_are_not_acknowledged(cluster: Cluster, abort: str) -> None:
    """When prefill's own hold ends by its deadline, an abort is answered, but not as a drain."""
    await cluster.start()
    cluster.writer.hold()
    legs = cluster.start_both(prompt_of(40))
    await eventually(cluster.writer.in_flight)
    arrives = asyncio.Event()
    cluster.wire.rule = lambda sent: MessageFault(until=arrives) if sent.kind == "abort" else None
    legs.prefill.fail(ClientGone(GONE))
    await legs.answered()
    await eventually(lambda: cluster.wire.sent("abort", legs.room))
    if abort == "before":
        arrives.set()
        await asyncio.sleep(0.1)  # it is there and waits for the drain
    cluster.prefill.context.quarantine.expire(time.monotonic() + 1000)
    arrives.set()
    await eventually(lambda: cluster.wire.answered("abort", legs.room))
    assert cluster.wire.answered("abort", legs.room)[0][1]["drained"] is False
    assert cluster.held(cluster.decode)["pages"] == 3
    cluster.decode.context.quarantine.expire(time.monotonic() + 1000)
    cluster.writer.let_go()
    await cluster.free()


def test_block_of_a_slot_is_told_apart() -> None:
    """The harness tells a metadata record from pages by its length."""
    assert is_slot(Block(0, 0, 512))
    assert not is_slot(Block(0, 0, PAGE * 64))
