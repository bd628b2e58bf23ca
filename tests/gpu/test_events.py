"""Layer events and the L1 pool on a CUDA device.

Run where one is: python -m pytest -m gpu tests/gpu, with `-c /dev/null --rootdir .` before it where the
plug-ins that pyproject.toml configures are missing: these tests need torch, xxhash and pytest only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import torch

from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import RoomId
from app.core.slots import Metadata, SlotFormat, SlotTable
from app.tiers.device import DevicePool
from app.tiers.events import EventBridge

pytestmark = pytest.mark.gpu

T = TypeVar("T")

LAYERS, PAGES, SLOTS = 4, 6, 3
ITEM_BYTES = 1 << 16
LONG_CYCLES = 600_000_000
"""Some 0.3 s on the devices at hand; nothing below depends on how long it really is."""


def cuda() -> torch.device:
    """The device; the test is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")
    return torch.device("cuda", torch.cuda.current_device())


def geometry() -> CacheGeometry:
    """Two buffers, the second of which holds every other layer."""
    layers = tuple(range(LAYERS))
    return CacheGeometry(
        page_size=64,
        buffers=(
            BufferSpec(owner="target", kind="kv", layer_ids=layers, item_bytes=ITEM_BYTES, dtype="uint8"),
            BufferSpec(owner="target", kind="index", layer_ids=layers[::2], item_bytes=512, dtype="uint8"),
        ),
    )


def run(work: Coroutine[Any, Any, T], *, limit_s: float = 60.0) -> T:
    """Run a coroutine; a test that hangs fails."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, limit_s)

    return asyncio.run(bounded())


class Ticker:
    """Counts how often the loop came round while something else was awaited."""

    def __init__(self) -> None:
        self.ticks = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.ticks += 1


def read_beside(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to the host on a stream of its own, which waits for nothing but itself."""
    stream = torch.cuda.Stream()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        target.copy_(tensor, non_blocking=True)
    stream.synchronize()
    return target


@pytest.mark.contract(104)
def test_an_event_is_awaited_while_the_loop_goes_on_and_its_bytes_are_there() -> None:
    """The loop keeps ticking under a long kernel; after the wait the bytes written before it are visible."""
    device = cuda()
    pool = DevicePool(geometry(), PAGES, SLOTS, device=device)
    bridge = EventBridge(device)
    page = pool.buffers["target.kv"].tensor[1, 2]
    torch.cuda.synchronize()

    async def work() -> tuple[int, torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LONG_CYCLES)
            page.fill_(0xA5)
            event = bridge.record()
        assert event is not None
        assert not event.query(), "the kernel was too short for this test"
        assert not read_beside(page).any(), "nothing may be there before the event"
        async with Ticker() as ticker:
            await bridge.wait(event)
        assert event.query()
        return ticker.ticks, read_beside(page)

    try:
        ticks, seen = run(work())
        assert ticks >= 20
        assert bool((seen == 0xA5).all())
    finally:
        bridge.close()
        pool.close()


def test_a_layers_event_does_not_wait_for_later_layers() -> None:
    """Waiting is for the work before the event: a later kernel is still running when the wait returns."""
    device = cuda()
    bridge = EventBridge(device)
    first = torch.zeros(ITEM_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()

    async def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LONG_CYCLES // 8)
            first.fill_(1)
            early = bridge.record()
            torch.cuda._sleep(LONG_CYCLES * 4)
            late = bridge.record()
        assert early is not None
        assert late is not None
        await bridge.wait(early)
        assert bool((read_beside(first) == 1).all())
        assert not late.query(), "the wait has taken in work after its event"
        await bridge.wait(late)
        assert late.query()

    try:
        run(work())
    finally:
        bridge.close()


def test_layers_of_a_forward_thread_arrive_in_order_with_their_bytes() -> None:
    """A forward records an event a layer on its own thread; the loop sees each layer complete, in order."""
    device = cuda()
    pool = DevicePool(geometry(), PAGES, SLOTS, device=device)
    bridge = EventBridge(device)
    tensor = pool.buffers["target.kv"].tensor
    torch.cuda.synchronize()

    async def work() -> list[tuple[int, bool]]:
        loop = asyncio.get_running_loop()
        noted: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

        def forward() -> None:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for layer in range(LAYERS):
                    torch.cuda._sleep(LONG_CYCLES // 4)
                    tensor[layer].fill_(layer + 1)
                    loop.call_soon_threadsafe(noted.put_nowait, (layer, bridge.record()))

        thread = threading.Thread(target=forward)
        thread.start()
        seen: list[tuple[int, bool]] = []
        async with Ticker() as ticker:
            for _ in range(LAYERS):
                layer, event = await noted.get()
                await bridge.wait(event)
                seen.append((layer, bool((read_beside(tensor[layer]) == layer + 1).all())))
        thread.join()
        assert ticker.ticks >= 20
        return seen

    try:
        assert run(work()) == [(layer, True) for layer in range(LAYERS)]
    finally:
        bridge.close()
        pool.close()


def test_more_waits_than_threads_all_end() -> None:
    """Waits beyond the bridge's threads queue up and return, with the loop free meanwhile."""
    device = cuda()
    bridge = EventBridge(device, threads=2)
    torch.cuda.synchronize()

    async def work() -> int:
        events = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(9):
                torch.cuda._sleep(LONG_CYCLES // 9)
                events.append(bridge.record())
        async with Ticker() as ticker:
            await asyncio.gather(*(bridge.wait(event) for event in events))
        assert all(event is not None and event.query() for event in events)
        return ticker.ticks

    try:
        assert run(work()) >= 20
    finally:
        bridge.close()


def test_an_event_that_has_happened_costs_no_thread() -> None:
    """A wait on finished work returns at once, also when the bridge's threads are gone."""
    device = cuda()
    bridge = EventBridge(device)
    event = bridge.record()
    torch.cuda.synchronize()
    bridge.close()
    run(bridge.wait(event))
    run(bridge.wait(None))


@pytest.mark.contract(108)
def test_a_pool_on_the_device_has_the_layout_of_one_on_the_host() -> None:
    """Addresses follow base + layer * stride + page * item; typed views write into the same bytes."""
    device = cuda()
    with DevicePool(geometry(), PAGES, SLOTS, device=device) as pool:
        for spec in geometry().buffers:
            buffer = pool.buffers[spec.name]
            assert buffer.tensor.device == device
            assert buffer.tensor.is_contiguous()
            assert buffer.length == spec.pool_bytes(PAGES)
            assert not bool(buffer.tensor.any())
            assert buffer.layer_stride == PAGES * spec.item_bytes
            for layer in spec.layer_ids:
                slot = spec.slot(layer)
                expected = buffer.base + slot * buffer.layer_stride + 3 * spec.item_bytes
                assert buffer.tensor[slot, 3].data_ptr() == expected
        rows = pool.typed("target.index", 2, torch.float32, (512 // 4,))
        rows[5].fill_(1.5)
        raw = pool.buffers["target.index"].tensor[1, 5].cpu().numpy().tobytes()
        assert raw == torch.full((128,), 1.5).numpy().tobytes()
        assert not bool(pool.buffers["target.index"].tensor[0].any())
        assert pool.total_bytes == geometry().pool_bytes(PAGES) + SlotFormat().offset(SLOTS)


def test_metadata_slots_stay_on_the_host() -> None:
    """Slots are records that the host reads: they never lie on the device."""
    device = cuda()
    with DevicePool(geometry(), PAGES, SLOTS, device=device) as pool:
        assert pool.slots.device.type == "cpu"
        slot = SlotTable(SLOTS).take(RoomId(7))
        assert slot is not None
        assert pool.read_slot(slot) is None
        record = SlotFormat().encode(
            slot.room, slot.generation, Metadata(first_token=5, log_probability=-0.5)
        )
        assert pool.write_slot(slot.index, record) == pool.slots.data_ptr() + SlotFormat().offset(slot.index)
        read = pool.read_slot(slot)
        assert read is not None
        assert (read.first_token, read.log_probability) == (5, -0.5)
        pool.clear_slot(slot)
        assert pool.read_slot(slot) is None
