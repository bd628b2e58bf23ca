"""The engine over a driver that works: windows, bounds, waiting, closing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from app.errors import BadInput, IntegrityError, TransferFailed
from app.transfer.base import Block
from app.transfer.engine import Engine, Limits
from app.transfer.fake import FakeDriver, Fault
from tests.transfer.conftest import StartRig
from tests.transfer.rig import OTHER, PEER, QUICK, Rig, eventually


@pytest.mark.contract(101)
async def test_submit_returns_at_once_and_wait_takes_all(start_rig: StartRig) -> None:
    """Batches get numbers while nothing has been written; one wait returns when all have landed."""
    rig = await start_rig(plan=lambda session, block: Fault(delay_s=0.1))
    batches = [rig.submit(at, 2000) for at in (0, 5000, 10_000)]
    assert len({b.number for b in batches}) == 3
    assert not any(b.finished.is_set() for b in batches)
    assert not rig.target.array.any()
    await rig.engine.wait(batches)
    assert all(rig.landed(at, 2000) for at in (0, 5000, 10_000))
    await rig.engine.settle(batches)
    assert rig.engine.counters["bytes"] == 6000


async def test_long_blocks_are_cut(start_rig: StartRig) -> None:
    """A block longer than a descriptor lands whole and touches no byte beside it."""
    rig = await start_rig()
    batch = rig.engine.submit(PEER, [rig.block(100, 10_001), rig.block(20_000, 1)])
    await rig.engine.wait([batch])
    assert [b.length for _, b in rig.submitted()] == [1024] * 9 + [785, 1]
    expected = np.zeros_like(rig.target.array)
    for at, length in ((100, 10_001), (20_000, 1)):
        expected[at : at + length] = rig.source.array[at : at + length]
    assert (rig.target.array == expected).all()
    assert (batch.total_bytes, batch.blocks) == (10_002, 2)


@pytest.mark.parametrize(
    "limits",
    [
        replace(QUICK, window_descriptors=3, window_bytes=1 << 20),
        replace(QUICK, window_descriptors=100, window_bytes=2500),
        replace(QUICK, window_descriptors=1, window_bytes=1),
    ],
)
async def test_windows_are_never_exceeded(start_rig: StartRig, limits: Limits) -> None:
    """Per peer, no more descriptors and bytes are in the driver than the window allows."""
    rig = await start_rig(limits=limits, plan=lambda session, block: Fault(delay_s=0.002))
    batches = [rig.submit(at * 3000, 2900, session=session) for at in range(8) for session in (PEER, OTHER)]
    await rig.engine.wait(batches)
    (driver,) = rig.drivers
    for session in (PEER, OTHER):
        assert 1 <= driver.most[session] <= limits.window_descriptors
        # one descriptor may always be under way, whatever its size
        assert driver.most_bytes[session] <= max(limits.window_bytes, limits.descriptor_bytes)
    assert max(driver.most.values()) == min(limits.window_descriptors, max(limits.window_bytes // 1024, 1))


async def test_blocks_outside_the_regions_are_refused(start_rig: StartRig) -> None:
    """A block that leaves its source or destination region raises, and nothing of its batch is sent."""
    rig = await start_rig()
    size, source, target = rig.source.size, rig.source.base, rig.target.base
    good = rig.block(0, 100)
    for bad, message in (
        (Block(source - 1, target, 100), "source .* is outside the registered regions"),
        (Block(source + size - 99, target, 100), "source .* is outside the registered regions"),
        (Block(target, target, 100), "source .* is outside the registered regions"),
        (Block(source, target - 1, 100), "destination .* is outside the peer's regions"),
        (Block(source, target + size - 99, 100), "destination .* is outside the peer's regions"),
        (Block(source, source, 100), "destination .* is outside the peer's regions"),
        (Block(source, target, 0), "a block of 0 bytes"),
        (Block(source, target, -5), "a block of -5 bytes"),
    ):
        with pytest.raises(BadInput, match=message):
            rig.engine.submit(PEER, [good, bad])
    with pytest.raises(BadInput, match="no peer with session fake:nobody"):
        rig.engine.submit("fake:nobody", [good])
    await rig.engine.wait([rig.submit(size - 100, 100)])
    assert [b for _, b in rig.submitted()] == [rig.block(size - 100, 100)]


async def test_an_empty_batch_has_ended(start_rig: StartRig) -> None:
    """A batch without blocks is finished and idle at once, and the driver hears nothing of it."""
    rig = await start_rig()
    batch = rig.engine.submit(PEER, [])
    await rig.engine.wait([batch])
    await rig.engine.settle([batch])
    await rig.engine.wait([])
    assert rig.submitted() == []
    assert rig.engine.counters["batches"] == 0


async def test_a_dropped_peer_is_forgotten(start_rig: StartRig) -> None:
    """Dropping a peer lets its writes end, refuses new ones and leaves no window; it may come back."""
    rig = await start_rig(plan=lambda session, block: Fault(delay_s=0.05))
    batch = rig.submit(0, 100)
    await eventually(lambda: PEER in rig.engine.statistics()["peers"])
    rig.engine.drop_peer(PEER)
    with pytest.raises(BadInput, match=f"no peer with session {PEER}"):
        rig.submit(0, 100)
    await rig.engine.wait([batch])
    await eventually(lambda: PEER not in rig.engine.statistics()["peers"])
    rig.engine.drop_peer(PEER)
    rig.engine.add_peer(PEER, [rig.target.region])
    await rig.engine.wait([rig.submit(0, 100)])


async def test_statistics_show_the_window(start_rig: StartRig) -> None:
    """Counts, session, transport and each peer's queue are there while writes are under way."""
    rig = await start_rig(plan=lambda session, block: Fault(delay_s=0.2))
    batch = rig.submit(0, 8000)
    await eventually(lambda: rig.engine.counters["descriptors"] == 4)
    found = rig.engine.statistics()
    assert found["peers"] == {PEER: {"queued": 4, "in_flight": 4, "in_flight_bytes": 4096}}
    assert (found["session"], found["transport"]) == (rig.drivers[0].session, "fake")
    with pytest.raises(IntegrityError, match=f"descriptors left for {PEER}"):
        rig.engine.check_integrity()
    await rig.engine.wait([batch])


async def test_closing_twice_is_harmless() -> None:
    """The second close does nothing; regions are unregistered, drivers closed, submits refused."""
    rig = await Rig().start()
    await rig.engine.wait([rig.submit(0, 100)])
    await rig.engine.close()
    await rig.engine.close()
    (driver,) = rig.drivers
    assert driver.regions == []
    assert driver.closed
    with pytest.raises(TransferFailed, match="the transfer engine is not running"):
        rig.submit(0, 100)


async def test_closing_fails_what_has_not_ended() -> None:
    """Nobody waits for ever for a write that was under way or queued when the engine was closed."""
    rig = await Rig(plan=lambda session, block: Fault(delay_s=3600)).start()
    batches = [rig.submit(0, 8000), rig.submit(0, 100, session=OTHER)]
    await eventually(lambda: rig.engine.counters["descriptors"] == 5)
    await rig.engine.close()
    for batch in batches:
        with pytest.raises(TransferFailed, match="the transfer engine was closed"):
            await asyncio.wait_for(rig.engine.wait([batch]), 10)
    await asyncio.wait_for(rig.engine.settle(batches), 10)
    rig.engine.check_integrity()


async def test_an_engine_that_does_not_start_leaves_no_thread() -> None:
    """The driver's fault is raised by start, and the engine's thread has ended."""

    def broken() -> FakeDriver:
        raise TransferFailed("the transfer engine did not start: code -1")

    engine = Engine(broken)
    with pytest.raises(TransferFailed, match="did not start: code -1"):
        await engine.start()
    with pytest.raises(TransferFailed, match="not running"):
        engine.submit(PEER, [])
    await engine.close()


async def test_memory_that_cannot_be_registered_is_an_error(start_rig: StartRig) -> None:
    """A failed registration is raised, and writes from that memory stay refused."""
    rig = await start_rig()

    def refuse(region: object) -> None:
        raise TransferFailed("cannot register pool (4096 bytes): code -1")

    rig.drivers[0].register = refuse  # type: ignore[method-assign]
    with pytest.raises(TransferFailed, match="cannot register pool"):
        await rig.engine.register([rig.target.region])
    with pytest.raises(BadInput, match="outside the registered regions"):
        rig.engine.submit(PEER, [Block(rig.target.base, rig.target.base + 512, 100)])


@pytest.mark.contract(123)
async def test_success_is_not_logged(start_rig: StartRig) -> None:
    """A hundred good batches write no log line at INFO or above."""
    rig = await start_rig()
    with capture_logs() as logs:
        await rig.engine.wait([rig.submit(at * 100, 100, label=f"room:{at}") for at in range(100)])
    assert [line for line in logs if line["log_level"] != "debug"] == []
