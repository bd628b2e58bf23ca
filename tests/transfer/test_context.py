"""One chunk's context: layers, events, groups, finishing, dropping. The destinations are fakes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.core.groups import plan_groups
from app.core.ids import RoomId
from app.errors import DeadlineExceeded, PeerAborted, TransferFailed
from app.transfer.context import ChunkContext
from app.transfer.statistics import TransferStatistics
from tests.transfer.rig import FakeDestination, LayerEvent, event_wait

ROOM = RoomId(7)


def context(
    destinations: list[FakeDestination],
    *,
    layers: int = 4,
    group: int = 2,
    per_layer: bool = True,
    start: int = 0,
) -> ChunkContext:
    return ChunkContext(
        room=ROOM,
        start=start,
        layers=range(layers),
        groups=plan_groups(range(layers), group) if per_layer else (),
        destinations=destinations,
        event_wait=event_wait,
    )


async def turn(times: int = 5) -> None:
    """Let tasks that are ready run."""
    for _ in range(times):
        await asyncio.sleep(0)


@pytest.mark.contract(117)
async def test_79_layers_go_in_10_submits() -> None:
    """Groups of 8 make ten submits of 79 layers, each layer once and in order."""
    to = FakeDestination()
    chunk = context([to], layers=79, group=8)
    for layer in range(79):
        chunk.note(layer, None)
        await turn()
    assert await chunk.finish() == 7900
    assert [len(s) for s in to.submits] == [8] * 9 + [7]
    assert [layer for s in to.submits for layer in s] == list(range(79))
    assert (chunk.submits, chunk.groups_sent) == (10, 10)


@pytest.mark.contract(118)
async def test_a_layer_inside_a_group_starts_nothing() -> None:
    """At a layer that ends no group no task is made and nothing is sent; the last layer flushes the rest."""
    to = FakeDestination()
    chunk = context([to], layers=7, group=4)
    tasks = asyncio.all_tasks()
    for layer in (0, 1, 2):
        chunk.note(layer, None)
        assert asyncio.all_tasks() == tasks
    await turn()
    assert to.submits == []
    chunk.note(3, None)
    await turn()
    assert to.submits == [[0, 1, 2, 3]]
    for layer in (4, 5):
        chunk.note(layer, None)
    await turn()
    assert len(to.submits) == 1
    chunk.note(6, None)
    await turn()
    assert to.submits[1:] == [[4, 5, 6]]
    await chunk.finish()


@pytest.mark.contract(104)
@pytest.mark.case("G2")
async def test_a_layer_is_not_read_before_its_event() -> None:
    """All layers of a group are noted; while one event has not fired nothing is submitted."""
    to = FakeDestination()
    chunk = context([to])
    late = LayerEvent()
    chunk.note(0, LayerEvent(fired=True))
    chunk.note(1, late)
    await turn()
    assert to.submits == []
    late.fire()
    await turn()
    assert to.submits == [[0, 1]]


@pytest.mark.contract(104)
@pytest.mark.case("G2")
async def test_groups_stay_in_order_when_events_do_not() -> None:
    """A group whose events fired early waits for the group before it."""
    to = FakeDestination()
    chunk = context([to])
    late = LayerEvent()
    for layer, event in ((0, late), (1, None), (2, None), (3, None)):
        chunk.note(layer, event)
    await turn()
    assert to.submits == []
    late.fire()
    await chunk.finish()
    assert to.submits == [[0, 1], [2, 3]]


@pytest.mark.contract(115)
async def test_the_first_event_of_a_layer_counts() -> None:
    """A second firing of a layer does not replace its event: the first one is awaited."""
    to = FakeDestination()
    chunk = context([to])
    first = LayerEvent()
    chunk.note(0, first)
    chunk.note(0, LayerEvent(fired=True))
    chunk.note(1, None)
    await turn()
    assert to.submits == []
    first.fire()
    await turn()
    assert to.submits == [[0, 1]]


@pytest.mark.contract(105, 114)
async def test_a_layer_counts_once() -> None:
    """However many forwards fire a layer, it is sent once, and a finish sends nothing again."""
    to = FakeDestination()
    chunk = context([to])
    for _ in range(3):
        chunk.note(0, None)
        await turn()
    assert to.submits == []
    for layer in (1, 1, 2, 3, 0, 3):
        chunk.note(layer, None)
        await turn()
    first, second = await chunk.finish(), await chunk.finish()
    chunk.note(1, None)
    await turn()
    assert to.submits == [[0, 1], [2, 3]]
    assert first == second == 400


@pytest.mark.contract(105, 109)
async def test_foreign_and_empty_layers_are_skipped() -> None:
    """A layer that this chunk does not have is ignored, and a group that holds nothing makes no batch."""
    to = FakeDestination(empty=frozenset({2, 3}))
    chunk = context([to])
    for layer in (99, 0, 1, 2, 3):
        chunk.note(layer, None)
    assert await chunk.finish() == 200
    assert to.submits == [[0, 1]]
    assert (chunk.submits, chunk.groups_sent) == (1, 1)


@pytest.mark.contract(113)
async def test_finish_sends_what_fired_no_hook() -> None:
    """Layers without a note go out at the finish, and the bytes equal those of the monolithic mode."""
    to, whole = FakeDestination(), FakeDestination()
    chunk = context([to], layers=6)
    for layer in (0, 1, 2):
        chunk.note(layer, None)
    await turn()
    sent = await chunk.finish()
    assert to.submits == [[0, 1], [2, 3, 4, 5]]
    assert sent == await context([whole], layers=6, per_layer=False).finish()


@pytest.mark.contract(100, 103)
async def test_the_monolithic_mode_sends_after_the_forward() -> None:
    """Without groups nothing goes out during the forward; then one submit a layer and one wait for all."""
    to = FakeDestination(empty=frozenset({2}))
    chunk = context([to], per_layer=False)
    for layer in range(4):
        chunk.note(layer, None)
    await turn()
    assert to.submits == []
    assert await chunk.finish() == 300
    assert to.submits == [[0], [1], [3]]
    assert to.waits == [to.batches]


@pytest.mark.contract(103)
async def test_a_failed_submit_stops_and_drains() -> None:
    """Monolithic: the third submit fails, no further one follows, and what was submitted is drained."""
    to = FakeDestination(instant=False)
    submit = to.submit

    def failing(layers: Any) -> Any:
        if len(to.submits) == 2:
            to.error = TransferFailed("the queue is full")
        return submit(layers)

    to.submit = failing  # type: ignore[method-assign]
    chunk = context([to], per_layer=False)
    with pytest.raises(TransferFailed, match="the queue is full"):
        await chunk.finish()
    assert to.submits == [[0], [1]]
    drained = asyncio.create_task(chunk.drained())
    await turn()
    assert not drained.done()
    to.end(to.batches[0])
    await turn()
    assert not drained.done()
    to.end(to.batches[1])
    await asyncio.wait_for(drained, 5)


@pytest.mark.contract(105, 115)
@pytest.mark.case("F11")
async def test_a_failed_submit_fails_the_chunk_closed() -> None:
    """After a submit has failed no later group is sent, and the finish raises the first reason, twice."""
    to = FakeDestination(error=TransferFailed("refused"))
    chunk = context([to])
    for layer in (0, 1):
        chunk.note(layer, None)
    await turn()
    assert chunk.fault is not None
    to.error = None
    for layer in (2, 3):
        chunk.note(layer, None)
    await turn()
    for _ in range(2):
        with pytest.raises(TransferFailed, match="refused"):
            await chunk.finish()
    assert to.submits == []


@pytest.mark.contract(106)
async def test_a_workers_exception_marks_its_context() -> None:
    """An error of any kind in one context's worker fails that context, with its room, and no other."""
    bad, good = FakeDestination(error=ZeroDivisionError("oops")), FakeDestination()
    chunks = [context([bad]), context([good], start=64)]
    for layer in range(4):
        for chunk in chunks:
            chunk.note(layer, None)
    await turn()
    with pytest.raises(TransferFailed, match="a group was not sent: oops") as caught:
        await chunks[0].finish()
    assert caught.value.room == 7
    assert await chunks[1].finish() == 400


@pytest.mark.contract(115)
async def test_a_finish_past_its_deadline_is_a_failure() -> None:
    """A finish that waits too long for an event or a batch fails the chunk for good."""
    late, to = LayerEvent(), FakeDestination(instant=False)
    chunk = context([FakeDestination()])
    chunk.note(0, late)
    for waits in (chunk, context([to])):
        with pytest.raises(DeadlineExceeded, match=r"the chunk was not finished within 0\.02 s") as caught:
            await waits.finish(timeout_s=0.02)
        assert caught.value.room == 7
    late.fire()
    to.end(to.batches[0])
    with pytest.raises(DeadlineExceeded):
        await chunk.finish()
    assert chunk.submits == 0


@pytest.mark.contract(105)
async def test_finish_waits_for_every_batch() -> None:
    """The finish returns when the last batch has landed, whichever it is."""
    to = FakeDestination(instant=False)
    chunk = context([to])
    for layer in range(4):
        chunk.note(layer, None)
    finish = asyncio.create_task(chunk.finish())
    await turn()
    first, second = to.batches
    to.end(second)
    await turn()
    assert not finish.done()
    to.end(first)
    assert await asyncio.wait_for(finish, 5) == 400


@pytest.mark.contract(113)
async def test_two_finishes_at_once_send_once() -> None:
    """Two coroutines that finish the same chunk send each layer once and both see all bytes."""
    for per_layer in (True, False):
        to, late = FakeDestination(), LayerEvent()
        chunk = context([to], per_layer=per_layer)
        chunk.note(0, late)
        both = asyncio.gather(chunk.finish(), chunk.finish())
        await turn()
        late.fire()
        assert await asyncio.wait_for(both, 5) == [400, 400]
        assert sorted(layer for s in to.submits for layer in s) == [0, 1, 2, 3]


@pytest.mark.contract(111)
@pytest.mark.case("A6")
async def test_a_dropped_chunk_submits_nothing_more() -> None:
    """After a drop no note, event or finish submits; it is drained only when its write has ended."""
    to, late = FakeDestination(instant=False), LayerEvent()
    chunk = context([to], layers=6)
    for layer, event in ((0, None), (1, None), (2, late), (3, None)):
        chunk.note(layer, event)
    await turn()
    assert to.submits == [[0, 1]]
    reason = PeerAborted("the client has gone", room=7)
    chunk.drop(reason)
    chunk.drop(PeerAborted("again"))
    drained = asyncio.create_task(chunk.drained())
    late.fire()
    for layer in (4, 5):
        chunk.note(layer, None)
    await turn()
    assert not drained.done()
    to.end(to.batches[0])
    with pytest.raises(PeerAborted, match="the client has gone"):
        await chunk.finish()
    await asyncio.wait_for(drained, 5)
    assert to.submits == [[0, 1]]
    assert chunk.error is reason


@pytest.mark.contract(122)
async def test_several_destinations_are_served_after_the_forward() -> None:
    """With two destinations per-layer mode is off: both get every layer, one submit each."""
    both = [FakeDestination(), FakeDestination()]
    chunk = context(both)
    assert not chunk.per_layer
    for layer in range(4):
        chunk.note(layer, None)
    await turn()
    assert [to.submits for to in both] == [[], []]
    assert await chunk.finish() == 800
    assert [to.submits for to in both] == [[[0], [1], [2], [3]]] * 2


@pytest.mark.contract(122, 128)
async def test_without_a_destination_nothing_is_sent_nor_reported() -> None:
    """A dummy sender has no destination: its chunk finishes with 0 bytes and leaves no statistics."""
    chunk = context([])
    for layer in range(4):
        chunk.note(layer, None)
    sent = await chunk.finish()
    await chunk.drained()
    statistics = TransferStatistics()
    statistics.record("http://peer", sent_bytes=sent, seconds=1.0)
    assert (sent, chunk.submits, chunk.groups_sent) == (0, 0, 0)
    assert statistics.snapshot() == {}


@pytest.mark.contract(98)
async def test_a_chunk_without_pages_finishes() -> None:
    """A last chunk that sends no page finishes with 0 bytes: its metadata can follow at once."""
    to = FakeDestination(empty=frozenset(range(4)))
    for per_layer in (True, False):
        chunk = context([to], per_layer=per_layer)
        for layer in range(4):
            chunk.note(layer, None)
        assert await asyncio.wait_for(chunk.finish(), 5) == 0
    assert to.submits == []


async def test_a_failed_write_is_a_fault_before_the_finish() -> None:
    """The first failed batch shows as the chunk's fault at once; no later finish is needed to see it."""
    to = FakeDestination(instant=False)
    chunk = context([to])
    for layer in (0, 1):
        chunk.note(layer, None)
    await turn()
    assert chunk.fault is None
    to.end(to.batches[0], TransferFailed("a write failed"))
    assert chunk.fault is to.batches[0].error


async def test_the_settling_time_is_the_latest() -> None:
    """A chunk settles with the last of its batches; one without batches has settled."""
    to = FakeDestination()
    chunk = context([to])
    assert chunk.settled_at_s() == 0.0
    await chunk.finish()
    to.batches[0].settled_at_s = 5.0
    assert chunk.settled_at_s() == 5.0
