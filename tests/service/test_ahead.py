"""Digests of layers that have landed are compared while the rest of the forward still runs."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import Corruption, KvferryError
from app.service import handover
from app.transfer.messages import Ahead, Complete
from tests.support.faults import MessageFault
from tests.support.harness import PAGE, Cluster, Legs, eventually, prompt_of

LAYERS = tuple(range(12))
LAST = (10, 11)
"""The last group: 12 layers go as 8, 2, 2."""


@pytest.fixture(autouse=True)
def any_forward_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_WORTH_A_MESSAGE_S", 0.0)


async def stopped_before_the_end(cluster: Cluster) -> Legs:
    """A request of two chunks whose forward waits at layer 10 of the last one."""
    brake = cluster.brake(cluster.prefill)
    brake.at_layer(10, start=2 * PAGE)
    legs = cluster.start_both(prompt_of(3 * PAGE))
    await eventually(brake.reached.is_set)
    await eventually(lambda: cluster.wire.answered("ahead", legs.room))
    brake.release()
    return legs


async def start(cluster: Cluster) -> None:
    await cluster.start(prefill={"prefill": {"chunk_tokens": 2 * PAGE}})


async def test_only_the_last_group_is_left_to_compare(cluster: Cluster) -> None:
    """Ten layers are compared before the forward has ended; the last word carries the other two's digests."""
    await start(cluster)
    legs = await stopped_before_the_end(cluster)
    await cluster.expect_local(legs)
    (ahead,) = (s.message for s in cluster.wire.sent("ahead", legs.room))
    (complete,) = (s.message for s in cluster.wire.sent("complete", legs.room))
    assert isinstance(ahead, Ahead) and isinstance(complete, Complete)
    assert (ahead.layers, complete.layers) == (LAYERS[:10], LAST)
    assert len(complete.digests) == 2 * 3  # full digests: 3 pages a layer
    await cluster.free()


async def test_a_lost_word_ahead_costs_nothing(cluster: Cluster) -> None:
    """When the word ahead is refused a connection, the last word carries every layer's digests."""
    await start(cluster)
    cluster.wire.rule = lambda sent: MessageFault(refused=True) if sent.kind == "ahead" else None
    legs = cluster.start_both(prompt_of(3 * PAGE))
    await cluster.expect_local(legs)
    (complete,) = (s.message for s in cluster.wire.sent("complete", legs.room))
    assert isinstance(complete, Complete)
    assert complete.layers == LAYERS
    await cluster.free()


async def test_a_difference_found_ahead_fails_both_legs(cluster: Cluster) -> None:
    """Bytes that differ are found before the forward has ended, and neither leg succeeds."""
    await start(cluster)
    received = cluster.decode.context.digests

    async def other(*args: object, **kwargs: object) -> list[int]:
        return [value ^ 1 for value in await received(*args, **kwargs)]  # type: ignore[arg-type]

    cluster.decode.context.digests = other  # type: ignore[method-assign]
    legs = await stopped_before_the_end(cluster)
    for reason in await legs.failed():
        assert isinstance(reason, KvferryError)
        assert isinstance(reason, Corruption)
        assert "target.kv layer 0 position 0" in reason.message
    assert cluster.wire.sent("complete", legs.room) == []
    await cluster.free()


async def test_layers_that_nobody_compared_are_no_success(cluster: Cluster) -> None:
    """A last word that leaves out layers which were not compared ahead is refused; the room goes on waiting."""
    await start(cluster)
    gate = asyncio.Event()
    cluster.wire.rule = lambda sent: (
        MessageFault(refused=True) if sent.kind == "ahead"
        else MessageFault(until=gate) if sent.kind == "complete"
        else None
    )  # fmt: skip
    legs = cluster.start_both(prompt_of(3 * PAGE))
    await eventually(lambda: cluster.wire.sent("complete", legs.room))
    honest = cluster.wire.sent("complete", legs.room)[0].message
    assert isinstance(honest, Complete)
    short = honest.model_copy(update={"layers": LAST, "digests": honest.digests[-6:]})
    path = f"/v1/peer/rooms/{legs.room}/complete"
    status, slug = await cluster.post(cluster.decode, path, short)
    assert (status, slug) == (502, "peer-refused")
    assert not legs.decode.landed.is_set()
    gate.set()
    await cluster.expect_local(legs)
    await cluster.free()
