"""Leases: prefill writes only into rooms that decode has confirmed a short time ago."""

from __future__ import annotations

import asyncio
import time

import pytest

from app.errors import ClientGone, LeaseExpired, PeerAborted
from app.transfer.messages import Heartbeat, RoomUse
from tests.support.faults import MessageFault, Sent
from tests.support.harness import Cluster, eventually, prompt_of

QUICK = {"lease_s": 0.5, "heartbeat_s": 0.1, "heartbeat_misses": 100}
QUIET = MessageFault(copies=0)


def unheard(*kinds: str):  # type: ignore[no-untyped-def]
    """Messages of these kinds are lost."""

    def rule(sent: Sent) -> MessageFault | None:
        return QUIET if sent.kind in kinds else None

    return rule


@pytest.mark.case("A14")
async def test_a_room_that_waits_longer_than_its_lease_is_confirmed_again(cluster: Cluster) -> None:
    """A forward that takes three leases succeeds: heartbeats confirm the room meanwhile."""
    await cluster.start(prefill={"deadlines": QUICK})
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(0)
    legs = cluster.start_both(prompt_of(40))
    await eventually(brake.reached.is_set)
    await asyncio.sleep(3 * QUICK["lease_s"])
    brake.release()
    await cluster.expect_local(legs)
    assert cluster.prefill.heartbeats.expired == 0
    assert len(cluster.wire.sent("heartbeat")) >= 4
    await cluster.free()


@pytest.mark.case("A14")
async def test_nothing_is_written_without_a_confirmation(cluster: Cluster) -> None:
    """Decode's answers are lost: the lease runs out, no byte is submitted, both legs fail with the reason."""
    await cluster.start(prefill={"deadlines": QUICK})
    cluster.wire.rule = unheard("heartbeat")
    legs = cluster.start_both(prompt_of(40))
    mine, theirs = await legs.failed()
    assert isinstance(mine, LeaseExpired) and "0.5 s (deadlines.lease_s)" in mine.message
    assert cluster.decode.url in mine.message
    assert isinstance(theirs, LeaseExpired)
    assert cluster.writer.blocks() == []
    assert cluster.prefill.heartbeats.expired >= 1
    await cluster.free()


@pytest.mark.case("A14", "A11")
@pytest.mark.contract(124)
async def test_an_abort_that_is_never_heard_ends_the_writes(cluster: Cluster) -> None:
    """Decode gives a room up and every word of it is lost: no later layer or chunk is written."""
    await cluster.start(prefill={"deadlines": QUICK})
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(1)
    legs = cluster.start_both(prompt_of(400))
    await eventually(brake.reached.is_set)
    cluster.wire.rule = unheard("abort")
    legs.decode.fail(ClientGone("the client closed its connection"))
    await legs.decode.answered.wait()
    written = len(cluster.writer.blocks())
    await eventually(lambda: legs.prefill.life.reason)
    assert isinstance(legs.prefill.life.reason, PeerAborted)
    assert "given the room up" in legs.prefill.life.reason.message
    brake.release()
    await legs.prefill.answered.wait()
    assert len(cluster.writer.blocks()) == written
    assert cluster.prefill.context.forwards.count <= 1, "the second chunk was never started"
    cluster.decode.context.quarantine.expire(time.monotonic() + 1000)
    await cluster.free()


async def test_decode_confirms_a_use_and_not_a_number(cluster: Cluster) -> None:
    """Another generation, another instance and a room that never was are all given up."""
    await cluster.start()
    cluster.writer.hold()
    legs = cluster.start_both(prompt_of(40))
    await eventually(cluster.writer.in_flight)
    mine = RoomUse(room=legs.room, generation=legs.decode.generation)
    others = RoomUse(room=legs.room, generation=mine.generation + 1), RoomUse(room=5, generation=1)
    message = Heartbeat(instance=cluster.prefill.instance, rooms=(mine, *others))
    assert cluster.decode_rooms.heartbeat(message).gone == others
    stranger = Heartbeat(instance="0123456789", rooms=(mine,))
    assert cluster.decode_rooms.heartbeat(stranger).gone == (mine,)
    cluster.writer.let_go()
    await cluster.expect_local(legs)
    await cluster.free()
    # prefill may ask before it has read the answer to its last word: what has ended well is not given up
    assert cluster.decode_rooms.heartbeat(message).gone == others[1:]


async def test_a_parked_room_is_left_to_its_own_deadline(cluster: Cluster) -> None:
    """Decode has given up a room whose request never came: heartbeats do not ask about it, it expires."""
    await cluster.start(prefill={"deadlines": {**QUICK, "parked_s": 1.0}})
    legs = cluster.start_both(prompt_of(40))
    await cluster.expect_local(legs)
    await cluster.free()
    lonely = cluster.start_decode(cluster.request(prompt_of(40, salt=1)))
    await eventually(lambda: len(cluster.prefill_rooms.table) == 1)
    cluster.wire.rule = unheard("abort")
    lonely.fail(ClientGone("the client closed its connection"))
    await lonely.answered.wait()
    cluster.decode.context.quarantine.expire(time.monotonic() + 1000)
    await cluster.free()
