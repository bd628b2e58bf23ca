"""From layer notes to bytes: contexts over the real engine, between two pools of pages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from app.core.chunks import ChunkPlan, plan_chunks
from app.core.digests import page_digests, require_equal_digests
from app.core.geometry import BufferSpec, CacheGeometry
from app.core.groups import plan_groups
from app.core.holds import Quarantine
from app.core.ids import PageArray, RoomId
from app.core.lanes import PageLane
from app.core.owners import owned, rank_positions
from app.core.pages import destination_pages, pages_for, slice_positions
from app.core.runs import coalesce
from app.errors import Corruption, PeerAborted, TransferFailed
from app.transfer.base import Block, Status
from app.transfer.context import ChunkContext
from app.transfer.fake import Fault
from app.transfer.fifo import RoomFifos
from tests.conftest import Track
from tests.transfer.conftest import StartRig
from tests.transfer.rig import PEER, QUICK, EngineDestination, LayerEvent, Pool, Rig, event_wait, eventually

ROOM = RoomId(7)
PAGE = 64


def buffer(
    layers: Sequence[int], kind: str = "kv", *, item_bytes: int = 64, draft: bool = False
) -> BufferSpec:
    return BufferSpec(
        owner="draft" if draft else "target",
        kind=kind,
        layer_ids=tuple(layers),
        item_bytes=item_bytes,
        dtype="uint8",
    )


DEEP = CacheGeometry(
    page_size=PAGE,
    buffers=(
        buffer(range(78)),
        buffer(range(0, 78, 3), "index", item_bytes=12),
        buffer([78], item_bytes=160, draft=True),
    ),
)
FLAT = CacheGeometry(page_size=PAGE, buffers=(buffer(range(4)),))


class Transfer:
    """One room between two pools of a rig's engine."""

    def __init__(self, rig: Rig, geometry: CacheGeometry, pages: int = 24) -> None:
        self.rig = rig
        self.geometry = geometry
        self.ours, self.theirs = Pool(geometry, pages, seed=3), Pool(geometry, pages)
        self.destinations: list[EngineDestination] = []

    async def start(self) -> Transfer:
        await self.rig.engine.register(self.ours.regions)
        self.rig.engine.add_peer(PEER, self.theirs.regions)
        return self

    def context(
        self, source: PageArray, target: PageArray, *, start: int = 0, group: int | None = 8
    ) -> ChunkContext:
        destination = EngineDestination(
            self.rig.engine, PEER, self.ours.layouts, self.theirs.layouts, coalesce(source, target)
        )
        self.destinations.append(destination)
        layers = self.geometry.layers
        return ChunkContext(
            room=ROOM,
            start=start,
            layers=layers,
            groups=plan_groups(layers, group) if group else (),
            destinations=[destination],
            event_wait=event_wait,
        )

    def require_equal(self, source: PageArray, target: PageArray) -> None:
        """The target pages hold the source pages' bytes in every buffer, and no other page was touched."""
        for name in self.ours.layouts:
            expected = np.zeros_like(self.theirs.view(name))
            expected[:, target] = self.ours.view(name)[:, source]
            assert np.array_equal(self.theirs.view(name), expected), name


async def start(start_rig: StartRig, geometry: CacheGeometry, **options: object) -> Transfer:
    return await Transfer(await start_rig(**options), geometry).start()


SOURCE, TARGET = np.array([3, 4, 5, 0, 11]), np.array([20, 21, 7, 8, 2])


@pytest.mark.contract(100, 109, 110, 113, 117)
async def test_both_modes_move_the_same_bytes(start_rig: StartRig) -> None:
    """79 layers go in 10 submits per layer and in 79 after the forward; bytes and totals are equal."""
    sent = []
    for group in (8, None):
        transfer = await start(start_rig, DEEP)
        context = transfer.context(SOURCE, TARGET, group=group)
        for layer in range(78):  # the draft layer fires no hook
            context.note(layer, LayerEvent(fired=True))
            await asyncio.sleep(0)
        sent.append(await asyncio.wait_for(context.finish(), 20))
        transfer.require_equal(SOURCE, TARGET)
        assert context.submits == (10 if group else 79)
    assert sent == [5 * DEEP.page_bytes()] * 2


@pytest.mark.contract(104, 115)
@pytest.mark.case("G2")
async def test_a_layer_is_sent_as_it_is_when_its_event_fires(start_rig: StartRig) -> None:
    """Bytes that the device writes before its event are the bytes that arrive; a second firing is void."""
    transfer = await start(start_rig, FLAT)
    context = transfer.context(SOURCE, TARGET, group=1)
    written = LayerEvent()
    context.note(0, written)
    context.note(0, LayerEvent(fired=True))
    await asyncio.sleep(0.03)
    assert transfer.rig.submitted() == []
    transfer.ours.view("target.kv")[0, SOURCE] = 99
    written.fire()
    for layer in (1, 2, 3):
        context.note(layer, None)
    await context.finish()
    assert (transfer.theirs.view("target.kv")[0, TARGET] == 99).all()
    transfer.require_equal(SOURCE, TARGET)


@pytest.mark.contract(97, 110, 120, 121)
@pytest.mark.case("C1")
@pytest.mark.case("C6")
@pytest.mark.parametrize("chunk_tokens", [50, 64, 100, 1000])
@pytest.mark.parametrize("first", [0, 2])
async def test_chunks_of_a_room_make_the_whole_prompt(
    start_rig: StartRig, track: Track, chunk_tokens: int, first: int
) -> None:
    """However a prompt is cut, and whatever decode holds, its missing positions arrive once, in place."""
    transfer, fifos, tokens = await start(start_rig, FLAT), track(RoomFifos()), 300
    total = pages_for(tokens, PAGE)
    source = np.random.default_rng(1).permutation(24)[:total]
    wanted = np.random.default_rng(2).permutation(24)[: total - first]
    target = destination_pages(wanted, prompt_tokens=tokens, first_position=first, page_size=PAGE)
    plans = plan_chunks(tokens, page_size=PAGE, chunk_tokens=chunk_tokens, first_position=first)
    contexts = [
        fifos.register(
            transfer.context(
                slice_positions(source, 0, p.first_page, p.last_page),
                slice_positions(target, first, p.first_page, p.last_page),
                start=p.start,
                group=2,
            )
        )
        for p in plans
    ]
    assert transfer.rig.submitted() == []
    sent = 0
    for context in contexts:
        for layer in range(4):
            context.note(layer, None)
        sent += await fifos.finish(ROOM)
    assert sent == len(wanted) * FLAT.page_bytes()
    assert transfer.rig.engine.counters["bytes"] == sent
    transfer.require_equal(source[first:], target)


@pytest.mark.contract(97)
@pytest.mark.parametrize("chunk_tokens", [64, 130, 4096])
async def test_eight_ranks_make_the_whole_prompt(start_rig: StartRig, chunk_tokens: int) -> None:
    """Eight ranks send their own positions of every chunk: together all pages arrive, each once."""
    transfer, tokens = await start(start_rig, FLAT), 20 * PAGE + 5
    total = pages_for(tokens, PAGE)
    source = np.random.default_rng(1).permutation(24)[:total]
    target = np.random.default_rng(2).permutation(24)[:total]
    contexts = []

    def part(pages: PageArray, plan: ChunkPlan, rank: int) -> PageArray:
        chunk = slice_positions(pages, 0, plan.first_page, plan.last_page)
        return owned(chunk, plan.first_page, rank_positions(total, rank, 8))[0]

    plans = plan_chunks(tokens, page_size=PAGE, chunk_tokens=chunk_tokens)
    for plan, rank in itertools.product(plans, range(8)):
        contexts.append(
            transfer.context(part(source, plan, rank), part(target, plan, rank), start=plan.start)
        )
    sent = [await context.finish() for context in contexts]
    assert sum(sent) == total * FLAT.page_bytes()
    transfer.require_equal(source, target)


@pytest.mark.contract(111)
@pytest.mark.case("A6")
async def test_an_abort_during_chunk_1_of_5(start_rig: StartRig, track: Track) -> None:
    """Nothing of chunks 2..4 is submitted, pages go back only after the drain, the next room goes on."""
    transfer = await start(start_rig, FLAT, plan=lambda session, block: Fault(delay_s=0.05))
    rig, fifos, lane, quarantine = transfer.rig, track(RoomFifos()), track(PageLane(20)), Quarantine()
    pages = lane.allocate(20)
    assert pages is not None
    contexts = [
        fifos.register(transfer.context(pages[i * 4 : i * 4 + 4], pages[i * 4 : i * 4 + 4], start=i * 256))
        for i in range(5)
    ]
    for layer in range(4):
        contexts[0].note(layer, None)
    await fifos.finish(ROOM)
    for layer in range(4):
        contexts[1].note(layer, None)
    await eventually(lambda: rig.engine.statistics()["peers"][PEER]["in_flight"] > 0)
    reason = PeerAborted("the client has gone", room=ROOM)
    dropped = fifos.drop(ROOM, reason)
    held = quarantine.hold(
        room=ROOM,
        reason="draining",
        pages=20,
        now_s=0.0,
        for_s=60.0,
        give_back=lambda: lane.release(pages),
    )
    for context in contexts[2:]:
        for layer in range(4):
            context.note(layer, None)
    assert lane.allocate(1) is None
    for context in dropped:
        await asyncio.wait_for(context.drained(), 10)
    assert rig.engine.statistics()["peers"][PEER]["in_flight"] == 0
    assert quarantine.release(held)
    assert lane.free_pages == 20
    assert [len(d.submits) for d in transfer.destinations] == [1, 1, 0, 0, 0]
    before = len(rig.submitted())
    after = fifos.register(transfer.context(SOURCE, TARGET))
    assert await fifos.finish(ROOM) == 5 * FLAT.page_bytes()
    assert after.submits == 1
    assert len(rig.submitted()) > before


@pytest.mark.case("A5")
async def test_a_late_landing_keeps_the_pages_of_a_chunk(start_rig: StartRig) -> None:
    """A failed chunk is drained only when its write can land no more: then B's bytes stay B's."""
    late = Fault(status=Status.FAILED, lands_after_s=0.15)
    transfer = await start(
        start_rig, FLAT, limits=replace(QUICK, retries=0), plan=lambda session, block: late
    )
    context = transfer.context(SOURCE, TARGET)
    with pytest.raises(TransferFailed):
        await context.finish()
    context.drop(TransferFailed("given up"))
    await asyncio.wait_for(context.drained(), 10)
    transfer.rig.land()
    transfer.theirs.view("target.kv")[:, TARGET] = 55
    await asyncio.sleep(0.05)
    transfer.rig.land()
    assert (transfer.theirs.view("target.kv")[:, TARGET] == 55).all()


@pytest.mark.case("N2")
@pytest.mark.case("F3")
async def test_one_failed_room_of_four(start_rig: StartRig) -> None:
    """The first write of room 1 fails without retries: rooms 2 to 4 finish over the same engine."""
    failed: list[Block] = []

    def plan(session: str, block: Block) -> Fault:
        if failed:
            return Fault()
        failed.append(block)
        return Fault(status=Status.FAILED)

    transfer = await start(start_rig, FLAT, limits=replace(QUICK, retries=0), plan=plan)
    rooms = [transfer.context(np.array([i, i + 1]), np.array([i, i + 1])) for i in range(0, 8, 2)]
    ended = await asyncio.gather(*(room.finish() for room in rooms), return_exceptions=True)
    assert isinstance(ended[0], TransferFailed)
    assert ended[1:] == [2 * FLAT.page_bytes()] * 3
    assert [room.error is None for room in rooms] == [False, True, True, True]


@pytest.mark.case("N3")
async def test_one_flipped_byte_is_corruption(start_rig: StartRig) -> None:
    """The engine reports success and one byte differs: the digests name its layer and position."""
    transfer = await start(start_rig, FLAT)
    victim = transfer.theirs.layouts["target.kv"].address(2, int(TARGET[3]))
    transfer.rig.plan = lambda session, block: Fault(flip_byte=block.destination == victim)
    sent = page_digests(FLAT, {"target.kv": transfer.ours.view("target.kv")}, SOURCE, "full")
    await transfer.context(SOURCE, TARGET).finish()
    landed = page_digests(FLAT, {"target.kv": transfer.theirs.view("target.kv")}, TARGET, "full")
    with pytest.raises(Corruption) as caught:
        require_equal_digests(FLAT, sent, landed, pages=TARGET, mode="full", room=7)
    place = {"layer": 2, "position": 3, "page": int(TARGET[3]), "buffer": "target.kv"}
    assert caught.value.fields() == {"room": 7, **place}
    assert sum(a != b for a, b in zip(sent, landed, strict=True)) == 1
