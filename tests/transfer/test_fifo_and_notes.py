"""Chunks of rooms, first in and first out, and the hooks of a forward."""

from __future__ import annotations

import asyncio

import pytest

from app.core.groups import plan_groups
from app.core.ids import RoomId
from app.errors import IntegrityError, PeerAborted, TransferFailed
from app.transfer.context import ChunkContext
from app.transfer.fifo import RoomFifos
from app.transfer.notes import ForwardNotes
from tests.conftest import Track
from tests.transfer.rig import FakeDestination, LayerEvent, event_wait, eventually

LAYERS = 4


def chunk(room: int, start: int, to: FakeDestination) -> ChunkContext:
    return ChunkContext(
        room=RoomId(room),
        start=start,
        layers=range(LAYERS),
        groups=plan_groups(range(LAYERS), 2),
        destinations=[to],
        event_wait=event_wait,
    )


@pytest.mark.contract(110, 119)
async def test_a_chunk_is_registered_once(track: Track) -> None:
    """The same (room, start) gives the first context back, a new start is appended, rooms are apart."""
    fifos, to = track(RoomFifos()), FakeDestination()
    first = fifos.register(chunk(7, 0, to))
    assert fifos.register(chunk(7, 0, to)) is first
    second = fifos.register(chunk(7, 64, to))
    other = fifos.register(chunk(8, 0, to))
    assert fifos.active(RoomId(7)) == (first, second)
    assert fifos.active(RoomId(8)) == (other,)
    assert len(fifos) == 3
    assert to.submits == []


@pytest.mark.contract(107, 120)
async def test_chunks_finish_first_in_first_out(track: Track) -> None:
    """Each finish pops the room's front chunk and returns its bytes; one too many is harmless."""
    fifos = track(RoomFifos())
    to = [FakeDestination(layer_bytes=10), FakeDestination(layer_bytes=1)]
    fifos.register(chunk(7, 0, to[0]))
    fifos.register(chunk(7, 64, to[1]))
    assert await fifos.finish(RoomId(7)) == 40
    assert to[1].submits == []
    assert await fifos.finish(RoomId(7)) == 4
    assert len(fifos) == 0
    assert await fifos.finish(RoomId(7)) == 0
    assert await fifos.finish(RoomId(99)) == 0


async def test_a_failed_chunk_has_left_its_fifo(track: Track) -> None:
    """A finish that raises has popped its chunk: the next finish is the next chunk's."""
    fifos = track(RoomFifos())
    fifos.register(chunk(7, 0, FakeDestination(error=TransferFailed("refused"))))
    fifos.register(chunk(7, 64, FakeDestination()))
    with pytest.raises(TransferFailed, match="refused"):
        await fifos.finish(RoomId(7))
    assert await fifos.finish(RoomId(7)) == 400


@pytest.mark.contract(111, 120)
@pytest.mark.case("A6")
async def test_a_dropped_room_leaves_and_blocks_nobody(track: Track) -> None:
    """Five chunks, an abort during chunk 1: chunks 2..4 are never submitted and the next room goes on."""
    fifos, loop = track(RoomFifos()), asyncio.get_running_loop()
    to = [FakeDestination(instant=False) for _ in range(5)]
    chunks = [fifos.register(chunk(7, 64 * i, to[i])) for i in range(5)]
    after = FakeDestination()
    fifos.register(chunk(8, 0, after))

    async def forward(number: int) -> None:
        notes = ForwardNotes(loop, [chunks[number]], lambda: None)
        for layer in range(LAYERS):
            notes.after_write(layer, "target")
        await asyncio.sleep(0.01)

    await forward(0)
    to[0].end(to[0].batches[0])
    to[0].end(to[0].batches[1])
    assert await fifos.finish(RoomId(7)) == 400
    await forward(1)
    reason = PeerAborted("the client has gone", room=7)
    dropped = fifos.drop(RoomId(7), reason)
    assert dropped == tuple(chunks[1:])
    for number in (1, 2, 3, 4):
        with pytest.raises(PeerAborted, match="the client has gone"):
            await forward(number)
        chunks[number].note(0, None)
        chunks[number].note(1, None)
    assert [len(d.submits) for d in to] == [2, 2, 0, 0, 0]
    drained = asyncio.gather(*(c.drained() for c in dropped))
    await asyncio.sleep(0.01)
    assert not drained.done()
    for batch in to[1].batches:
        to[1].end(batch)
    await asyncio.wait_for(drained, 5)
    assert fifos.active(RoomId(7)) == ()
    assert await fifos.finish(RoomId(8)) == 400
    assert fifos.drop(RoomId(7), reason) == ()
    assert len(fifos) == 0


def test_a_fifo_out_of_order_is_found() -> None:
    """The integrity check names a room whose chunks are not in the order of their tokens."""
    fifos, to = RoomFifos(), FakeDestination()
    fifos.register(chunk(7, 64, to))
    fifos.register(chunk(7, 0, to))
    with pytest.raises(IntegrityError, match=r"room 7 has chunks at \[64, 0\]"):
        fifos.check_integrity()


@pytest.mark.contract(106, 120)
async def test_a_layer_end_records_one_event_and_serves_every_chunk() -> None:
    """From the forward thread: one event a layer, one note for each active chunk, each sent once."""
    loop, to = asyncio.get_running_loop(), [FakeDestination(), FakeDestination()]
    chunks = [chunk(7, 0, to[0]), chunk(7, 64, to[1])]
    events: list[LayerEvent] = []
    noted: list[tuple[int, int, object]] = []
    for one in chunks:
        note = one.note

        def spy(layer: int, event: object, start: int = one.start, note: object = note) -> None:
            noted.append((start, layer, event))
            note(layer, event)  # type: ignore[operator]

        one.note = spy  # type: ignore[method-assign]

    def record() -> LayerEvent:
        events.append(LayerEvent(fired=True))
        return events[-1]

    notes = ForwardNotes(loop, chunks, record)

    def forward() -> None:
        for layer in range(LAYERS):
            notes.before_read(layer)
            notes.after_write(layer, "target")

    await asyncio.to_thread(forward)
    await eventually(lambda: [len(d.submits) for d in to] == [2, 2])
    assert len(events) == LAYERS
    assert noted == [(start, layer, events[layer]) for layer in range(LAYERS) for start in (0, 64)]
    assert [d.submits for d in to] == [[[0, 1], [2, 3]]] * 2
    assert [await c.finish() for c in chunks] == [400, 400]


@pytest.mark.contract(106)
async def test_without_a_chunk_a_layer_end_records_nothing() -> None:
    """With no active context the hook makes no event and queues nothing; progress is still told."""
    progress: list[int] = []

    def record() -> None:
        raise AssertionError("no event is wanted")

    notes = ForwardNotes(asyncio.get_running_loop(), [], record, progress=lambda: progress.append(1))
    for layer in range(LAYERS):
        notes.after_write(layer, "target")
    assert len(progress) == LAYERS


async def test_a_cancelled_forward_stops_within_a_layer() -> None:
    """The reason of an aborted room is raised at the next layer end, and nothing is noted any more."""
    to, reasons = FakeDestination(), [None, None, PeerAborted("gone", room=7)]
    notes = ForwardNotes(
        asyncio.get_running_loop(), [chunk(7, 0, to)], lambda: None, cancelled=lambda: reasons.pop(0)
    )
    notes.after_write(0, "target")
    notes.after_write(1, "target")
    with pytest.raises(PeerAborted, match="gone"):
        notes.after_write(2, "target")
    await asyncio.sleep(0.01)
    assert to.submits == [[0, 1]]


@pytest.mark.case("F11")
async def test_a_failed_write_stops_the_forward_within_a_layer() -> None:
    """A chunk of which a write has failed is not computed to its end: its error is raised at a layer end."""
    to = FakeDestination(instant=False)
    notes = ForwardNotes(asyncio.get_running_loop(), [chunk(7, 0, to)], lambda: None)
    notes.after_write(0, "target")
    notes.after_write(1, "target")
    await asyncio.sleep(0.01)
    to.end(to.batches[0], TransferFailed("a write failed"))
    with pytest.raises(TransferFailed, match="a write failed"):
        notes.after_write(2, "target")
