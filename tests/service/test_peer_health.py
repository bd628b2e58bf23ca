"""Peers that die, come back or fall silent: their rooms end, all others go on."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import PeerRefused, PeerUnavailable
from app.service.awake import within
from app.service.node import Node
from app.transfer.breaker import Circuit
from tests.support.faults import MessageFault
from tests.support.harness import WITHIN_S, Cluster, Legs, eventually, prompt_of

QUICK = {"heartbeat_s": 0.1, "heartbeat_misses": 3, "lease_s": 1.0, "breaker_open_s": 0.5}


async def two_prefills(cluster: Cluster) -> tuple[Node, Node]:
    await cluster.start(prefill={"deadlines": QUICK}, decode={"deadlines": QUICK})
    return cluster.prefill, await cluster.add("prefill", deadlines=QUICK)


def start(cluster: Cluster, prefill: Node, salt: int = 0) -> Legs:
    request = cluster.request(prompt_of(40, salt=salt), bootstrap_url=prefill.url)
    return Legs(
        request=request,
        prefill=cluster.start_prefill(request, prefill),
        decode=cluster.start_decode(request),
    )


@pytest.mark.case("J6")
@pytest.mark.contract(124)
async def test_only_the_rooms_of_a_dead_prefill_fail(cluster: Cluster) -> None:
    """One prefill falls silent: its room fails by heartbeats, the other one's succeeds, decode stays ready."""
    dead, alive = await two_prefills(cluster)
    brakes = [cluster.brake(node) for node in (dead, alive)]
    for brake in brakes:
        brake.at_layer(0)
    legs = [start(cluster, dead), start(cluster, alive, salt=1)]
    for brake in brakes:
        await eventually(brake.reached.is_set)
    lost = MessageFault(copies=0)
    cluster.wire.rule = lambda sent: lost if dead.url in (sent.source, sent.url[: len(dead.url)]) else None
    await within(legs[0].decode.answered.wait(), WITHIN_S)
    reason = legs[0].decode.life.reason
    assert isinstance(reason, PeerUnavailable)
    assert f"prefill at {dead.url}: no answer to 3 heartbeats" in reason.message
    assert cluster.decode.why_not_ready() is None
    assert cluster.decode.context.breakers.state(dead.url) is Circuit.OPEN
    assert cluster.decode.context.breakers.state(alive.url) is Circuit.CLOSED
    assert legs[1].decode.life.reason is None
    brakes[1].release()
    await cluster.expect_local(legs[1])
    refused = cluster.start_decode(cluster.request(prompt_of(20), bootstrap_url=dead.url))
    await refused.answered.wait()
    assert isinstance(refused.life.reason, PeerUnavailable)
    assert refused.life.reason.retry_after_s == 1  # what is left of half a second
    assert refused.life.reason.leg == "prefill"
    assert cluster.decode.context.breakers.refused == 1

    # it answers again: one request tries, and the circuit closes
    cluster.wire.rule = lambda sent: None
    brakes[0].release()
    await legs[0].prefill.answered.wait()
    await asyncio.sleep(QUICK["breaker_open_s"])
    await cluster.expect_local(start(cluster, dead, salt=2))
    assert cluster.decode.context.breakers.state(dead.url) is Circuit.CLOSED
    cluster.decode.context.quarantine.expire(float("inf"))
    await cluster.free()


@pytest.mark.case("J2", "J3")
async def test_a_prefill_that_comes_back_is_met_again(cluster: Cluster) -> None:
    """Another instance, with its memory elsewhere, answers under a known url: the next request goes through it."""
    await cluster.start(prefill={"deadlines": QUICK}, decode={"deadlines": QUICK})
    await cluster.serve(prompt_of(40))
    await cluster.free()
    old = cluster.prefill
    url, before = old.url, cluster.decode.context.peers.handshakes
    new = await cluster.add("prefill", deadlines=QUICK)
    await old.stop()
    cluster.nodes.remove(old)
    cluster.wire.apps[url] = cluster.apps[new]
    request = cluster.request(prompt_of(40, salt=1), bootstrap_url=url)
    legs = Legs(request=request, prefill=cluster.start_prefill(request), decode=cluster.start_decode(request))
    await cluster.expect_local(legs)
    assert cluster.decode.context.peers.handshakes == before + 1
    assert cluster.decode.context.peers.of(new.instance) is legs.decode.peer
    with pytest.raises(PeerRefused):
        cluster.decode.context.peers.of(old.instance)
    await cluster.free()


@pytest.mark.case("J6", "J2")
async def test_a_restart_ends_the_rooms_of_the_old_instance_at_once(cluster: Cluster) -> None:
    """A heartbeat is answered by another instance: the room fails, and says which one is gone."""
    await cluster.start(prefill={"deadlines": QUICK}, decode={"deadlines": QUICK})
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(0)
    legs = cluster.start_both(prompt_of(40))
    await eventually(brake.reached.is_set)
    old = cluster.prefill
    app = cluster.apps[old]
    new = cluster.build("prefill", deadlines=QUICK)
    await new.start()
    cluster.wire.apps[old.url] = cluster.apps[new]
    await within(legs.decode.answered.wait(), WITHIN_S)
    assert isinstance(legs.decode.life.reason, PeerUnavailable)
    assert f"instance {old.instance} is gone, {new.instance} answers" in legs.decode.life.reason.message
    assert cluster.decode.heartbeats.replaced == 1
    cluster.wire.apps[old.url] = app
    brake.release()
    await legs.prefill.answered.wait()
    await cluster.free()


@pytest.mark.case("E7")
async def test_a_room_is_used_again_after_its_end(cluster: Cluster) -> None:
    """The same number once more, after the first use has ended well: a second transfer, with equal output."""
    await cluster.start()
    first = await cluster.serve(prompt_of(40))
    await cluster.free()
    written = len(cluster.writer.blocks())
    again = await cluster.serve(prompt_of(40, salt=1), room=first.room)
    assert again.decode.generation != first.decode.generation
    assert len(cluster.writer.blocks()) == 2 * written
    await cluster.free()
