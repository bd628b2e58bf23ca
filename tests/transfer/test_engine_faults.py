"""The engine over a driver that fails: retries, deadlines, late landings, new drivers."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from app.core.lanes import PageLane
from app.errors import DeadlineExceeded, TransferFailed
from app.transfer.base import Block, Status
from app.transfer.engine import Limits
from app.transfer.fake import Fault
from tests.conftest import Track
from tests.transfer.conftest import StartRig
from tests.transfer.rig import FAILS, OTHER, PEER, QUICK, eventually, flaky

NEVER = Fault(delay_s=3600.0, lands_after_s=-1.0)
NO_RETRY = replace(QUICK, retries=0)


async def test_a_failed_write_is_tried_again(start_rig: StartRig) -> None:
    """One -1 and then success: the batch succeeds, after a pause, with all its bytes."""
    rig = await start_rig(plan=flaky(FAILS))
    started = time.monotonic()
    batch = rig.submit(0, 4000)
    await rig.engine.wait([batch])
    assert time.monotonic() - started >= QUICK.retry_after_s
    assert rig.landed(0, 4000)
    counters = rig.engine.counters
    assert (counters["failures"], counters["retries"], counters["bytes"]) == (1, 1, 4000)
    assert counters["rebuilds"] == 0


async def test_a_retried_write_is_settled_after_its_first_try_could_land(start_rig: StartRig) -> None:
    """A batch that succeeded at its second try is not settled while the first try may still land."""
    rig = await start_rig(plan=flaky(Fault(status=Status.FAILED, lands_after_s=0.15)))
    batch = rig.submit(0, 100)
    await rig.engine.wait([batch])
    assert batch.settled_at_s > time.monotonic()
    await rig.engine.settle([batch])
    rig.land()
    rig.target.array[:] = 0
    await asyncio.sleep(0.05)
    rig.land()
    assert not rig.target.array.any()


@pytest.mark.case("N2")
@pytest.mark.case("F3")
async def test_a_failure_fails_its_own_batch_only(start_rig: StartRig) -> None:
    """Without retries a single -1 fails that room's batch; the rooms after it succeed, the thread lives."""
    rig = await start_rig(limits=NO_RETRY, plan=flaky(FAILS))
    batches = [rig.submit(at, 500) for at in (0, 1000, 2000, 3000)]
    with pytest.raises(TransferFailed, match=f"a write to {PEER} failed"):
        await rig.engine.wait(batches[:1])
    await rig.engine.wait(batches[1:])
    assert [rig.landed(at, 500) for at in (0, 1000, 2000, 3000)] == [False, True, True, True]
    assert rig.engine.counters["retries"] == 0


@pytest.mark.case("F3")
async def test_a_driver_that_raises_fails_one_room(start_rig: StartRig) -> None:
    """The driver raises for room 1: room 1 fails with the reason, rooms 2 to 4 succeed."""
    rig = await start_rig(plan=flaky(Fault(error=RuntimeError("boom"))))
    batches = [rig.submit(at, 500) for at in (0, 1000, 2000, 3000)]
    with pytest.raises(TransferFailed, match="a write did not start: boom"):
        await rig.engine.wait(batches)
    await rig.engine.wait(batches[1:])
    await asyncio.wait_for(rig.engine.settle(batches), 5)
    assert all(rig.landed(at, 500) for at in (1000, 2000, 3000))


async def test_a_status_that_raises_fails_one_room(start_rig: StartRig) -> None:
    """When asking for a status raises, that batch fails, is held for late landings and is not asked again."""
    rig = await start_rig()
    check, asked = rig.drivers[0].check, []

    def broken(submitted: int) -> Status:
        asked.append(submitted)
        if submitted == 1:
            raise ValueError("-7 is no status")
        return check(submitted)

    rig.drivers[0].check = broken  # type: ignore[method-assign]
    first, second = rig.submit(0, 500), rig.submit(1000, 500)
    with pytest.raises(TransferFailed, match="status of a write: -7 is no status"):
        await rig.engine.wait([first])
    await rig.engine.wait([second])
    assert first.settled_at_s > time.monotonic()
    assert asked.count(1) == 1


async def test_a_failed_batch_is_not_tried_again(start_rig: StartRig) -> None:
    """Once one write of a batch could not start, another of it that fails later is not repeated."""
    rig = await start_rig(
        plan=flaky(Fault(delay_s=0.05, status=Status.FAILED), Fault(error=RuntimeError("boom")))
    )
    batch = rig.submit(0, 3000)
    with pytest.raises(TransferFailed, match="did not start: boom"):
        await rig.engine.wait([batch])
    assert not batch.idle.is_set()
    await asyncio.wait_for(rig.engine.settle([batch]), 5)
    assert (rig.engine.counters["failures"], rig.engine.counters["retries"]) == (1, 0)
    assert len(rig.submitted()) == 1


@pytest.mark.case("F11")
async def test_a_refused_write_fails_at_once(start_rig: StartRig) -> None:
    """Id 0 is a failure: the batch fails promptly, 0 is never asked about, and a new driver is built."""
    rig = await start_rig(plan=flaky(Fault(refuse=True)))
    batch = rig.submit(0, 4000)
    with capture_logs() as logs, pytest.raises(TransferFailed, match="the engine refused a write"):
        await rig.engine.wait([batch])
    await asyncio.wait_for(batch.idle.wait(), 5)
    assert batch.settled_at_s == 0.0
    await eventually(lambda: len(rig.drivers) == 2)
    assert rig.submitted() == []
    assert rig.engine.counters["refused"] == 1
    await rig.engine.wait([rig.submit(0, 4000)])
    assert [len(d.submitted) for d in rig.drivers] == [0, 4]
    assert all(line["log_level"] == "warning" for line in logs)


@pytest.mark.case("F11")
async def test_the_first_failure_is_told_at_once(start_rig: StartRig) -> None:
    """Waiting for several batches raises when any has failed, although an earlier one is still under way."""
    slow = Fault(delay_s=0.5)
    rig = await start_rig(limits=NO_RETRY, plan=lambda s, b: FAILS if s == OTHER else slow)
    first, second = rig.submit(0, 100), rig.submit(0, 100, session=OTHER)
    with pytest.raises(TransferFailed, match=f"a write to {OTHER} failed"):
        await rig.engine.wait([first, second])
    assert not first.finished.is_set()
    await rig.engine.wait([first])


@pytest.mark.contract(115)
async def test_a_deadline_fails_the_batch_and_frees_nothing_yet(start_rig: StartRig) -> None:
    """At its deadline a batch fails with DeadlineExceeded; it is idle only when its write has ended."""
    limits = replace(QUICK, deadline_s=0.05, late_landing_s=5.0)
    rig = await start_rig(limits=limits, plan=lambda session, block: Fault(delay_s=0.4))
    batch = rig.submit(0, 8000, label="7:0")
    with pytest.raises(DeadlineExceeded, match="transfer 7:0 outlived its deadline"):
        await rig.engine.wait([batch])
    assert not batch.idle.is_set()
    assert batch.settled_at_s > time.monotonic()
    await asyncio.wait_for(batch.idle.wait(), 5)
    rig.land()
    assert rig.landed(0, 4096)
    # what still waited for its turn at the deadline was never sent
    assert len(rig.submitted()) == 4
    assert rig.engine.counters["deadlines"] == 1


@pytest.mark.case("A5")
async def test_bytes_that_land_late_hit_nobody(start_rig: StartRig, track: Track) -> None:
    """-1 is answered at once and the bytes land later: the pages stay held past it, B's bytes are intact."""
    limits = replace(QUICK, retries=0, late_landing_s=0.3)
    late = Fault(status=Status.FAILED, lands_after_s=0.15)
    rig = await start_rig(limits=limits, plan=flaky(late))
    lane = track(PageLane(4))
    pages_of_a = lane.allocate(4)
    assert pages_of_a is not None
    batch = rig.submit(0, 400)
    with pytest.raises(TransferFailed):
        await rig.engine.wait([batch])
    assert lane.allocate(1) is None
    await rig.engine.settle([batch])
    rig.land()
    assert rig.landed(0, 400)
    lane.release(pages_of_a)
    assert lane.allocate(4) is not None
    rig.target.array[:400] = 77
    await asyncio.sleep(0.05)
    rig.land()
    assert (rig.target.array[:400] == 77).all()


async def test_a_stuck_write_ends_in_bounded_time(start_rig: StartRig) -> None:
    """A write that never ends: the deadline fails it, the settling time frees it, a new driver follows."""
    limits = replace(QUICK, deadline_s=0.05, late_landing_s=0.1)
    rig = await start_rig(limits=limits, plan=flaky(NEVER))
    batch = rig.submit(0, 100)
    with pytest.raises(DeadlineExceeded):
        await rig.engine.wait([batch])
    assert not batch.idle.is_set()
    await asyncio.wait_for(rig.engine.settle([batch]), 5)
    await eventually(lambda: len(rig.drivers) == 2)
    await rig.engine.wait([rig.submit(0, 100)])
    assert [len(d.submitted) for d in rig.drivers] == [1, 1]


async def test_a_wedged_peer_gets_a_new_driver_while_others_go_on(start_rig: StartRig) -> None:
    """One driver cannot reach a peer any more: it is reached through a new one, others' writes run on."""
    rig = await start_rig(limits=replace(QUICK, deadline_s=20.0))

    def plan(session: str, block: Block) -> Fault:
        if session == OTHER:
            return Fault(delay_s=0.3)
        return FAILS if len(rig.drivers) == 1 else Fault()

    rig.plan = plan
    others = rig.submit(0, 4000, session=OTHER)
    await eventually(lambda: rig.engine.counters["descriptors"] == 4)
    wedged = rig.submit(8000, 100)
    await rig.engine.wait([wedged])
    assert rig.landed(8000, 100)
    assert not others.finished.is_set()
    await rig.engine.wait([others])
    assert rig.landed(0, 4000)
    assert rig.engine.counters["rebuilds"] == 1
    assert [{s for s, _ in d.submitted} for d in rig.drivers] == [{PEER, OTHER}, {PEER}]
    assert rig.drivers[1].regions == [rig.source.region]


async def test_a_rebuilt_engine_keeps_its_session(start_rig: StartRig) -> None:
    """Peers write here through the first driver: its session stays, and memory is registered with both."""
    rig = await start_rig(plan=flaky(Fault(refuse=True)))
    session = rig.engine.session
    with pytest.raises(TransferFailed):
        await rig.engine.wait([rig.submit(0, 100)])
    await eventually(lambda: len(rig.drivers) == 2)
    assert rig.engine.session == session
    await rig.engine.register([rig.target.region])
    assert [d.regions for d in rig.drivers] == [[rig.source.region, rig.target.region]] * 2
    assert not rig.drivers[0].closed


async def test_old_drivers_are_closed_once_unused(start_rig: StartRig) -> None:
    """Of several rebuilds only the first and the last driver remain."""
    rig = await start_rig(limits=replace(QUICK, retry_after_s=0.001))
    for count in (2, 3, 4):
        rig.plan = flaky(Fault(refuse=True))
        with pytest.raises(TransferFailed):
            await rig.engine.wait([rig.submit(0, 100)])
        await eventually(lambda count=count: len(rig.drivers) == count)  # type: ignore[misc]
    await eventually(lambda: [d.closed for d in rig.drivers] == [False, True, True, False])


async def test_a_replaced_driver_is_not_closed_while_writes_go_on(start_rig: StartRig) -> None:
    """Closing one stops the interpreter for a second: it waits for an idle moment, unless too many wait."""
    rig = await start_rig(limits=replace(QUICK, retry_after_s=0.001, deadline_s=60.0))
    for count in (2, 3):
        rig.plan = flaky(Fault(refuse=True))
        with pytest.raises(TransferFailed):
            await rig.engine.wait([rig.submit(0, 100)])
        await eventually(lambda count=count: len(rig.drivers) == count)  # type: ignore[misc]
    rig.plan = flaky(Fault(delay_s=1.5))
    slow = rig.submit(0, 100)
    await asyncio.sleep(1.0)
    assert [d.closed for d in rig.drivers] == [False, False, False]
    await rig.engine.wait([slow])
    await eventually(lambda: [d.closed for d in rig.drivers] == [False, True, False])


async def test_many_replaced_drivers_do_not_wait(start_rig: StartRig) -> None:
    """An engine that is never idle keeps four replaced drivers, and closes the oldest beyond them at once."""
    rig = await start_rig(limits=replace(QUICK, retry_after_s=0.001, deadline_s=60.0, late_landing_s=0.01))
    rig.plan = lambda session, block: Fault(delay_s=8.0) if session == OTHER else Fault(refuse=True)
    busy = rig.submit(1000, 100, session=OTHER)
    for count in range(2, 8):
        with pytest.raises(TransferFailed):
            await rig.engine.wait([rig.submit(0, 100)])
        await eventually(lambda count=count: len(rig.drivers) == count)  # type: ignore[misc]
    assert [d.closed for d in rig.drivers] == [False, True, False, False, False, False, False]
    assert not busy.finished.is_set()
    await rig.engine.wait([busy])


async def test_a_dead_peer_costs_no_driver_and_nobody_else(start_rig: StartRig) -> None:
    """A peer that does not answer fails its own rooms at once; no driver is built, others are unaffected."""
    rig = await start_rig(answers=lambda session: session != PEER)
    dead, alive = rig.submit(0, 100), rig.submit(1000, 100, session=OTHER)
    with pytest.raises(TransferFailed, match=f"{PEER} does not answer"):
        await rig.engine.wait([dead])
    await rig.engine.wait([alive])
    await rig.engine.settle([dead, alive])
    assert {s for s, _ in rig.submitted()} == {OTHER}
    assert len(rig.drivers) == 1
    rig.answers = lambda session: True
    await rig.engine.wait([rig.submit(0, 100)])


async def test_a_peer_that_dies_costs_no_driver(start_rig: StartRig) -> None:
    """A peer that answered once and then fails every write without answering: a failure, no new driver."""
    rig = await start_rig()
    await rig.engine.wait([rig.submit(0, 100)])
    rig.plan, rig.answers = (lambda session, block: FAILS), (lambda session: False)
    batch = rig.submit(0, 100)
    with pytest.raises(TransferFailed, match=f"a write to {PEER} failed"):
        await rig.engine.wait([batch])
    await eventually(lambda: rig.drivers[0].probed.count(PEER) >= 2)
    assert rig.engine.counters["failures"] == QUICK.retries + 1
    assert rig.engine.counters["rebuilds"] == 0


async def test_a_contact_that_hangs_stops_nobody_else(start_rig: StartRig) -> None:
    """While the first contact of one peer hangs, others are served, and its own batch meets its deadline."""
    release = threading.Event()
    rig = await start_rig(
        limits=replace(QUICK, deadline_s=0.2),
        answers=lambda session: session != PEER or release.wait(30),
    )
    hangs = rig.submit(0, 100)
    for at in range(1000, 10_000, 1000):
        await rig.engine.wait([rig.submit(at, 100, session=OTHER)])
    assert not hangs.idle.is_set()
    with pytest.raises(DeadlineExceeded):
        await rig.engine.wait([hangs])
    await asyncio.wait_for(hangs.idle.wait(), 5)
    release.set()
    await rig.engine.wait([rig.submit(0, 100)])
    assert rig.drivers[0].probed.count(PEER) == 1


async def test_a_driver_that_cannot_be_rebuilt_is_no_end(start_rig: StartRig) -> None:
    """When building a new driver fails, the old one goes on serving."""
    rig = await start_rig(plan=flaky(Fault(refuse=True)))
    made = threading.Event()

    def broken() -> None:
        made.set()
        raise RuntimeError("no more ports")

    rig.engine._pump.drivers._factory = broken  # type: ignore[assignment]
    with capture_logs() as logs:
        with pytest.raises(TransferFailed):
            await rig.engine.wait([rig.submit(0, 100)])
        await eventually(made.is_set)
        await rig.engine.wait([rig.submit(0, 100)])
    assert any(line["event"] == "engine.thread" for line in logs)
    assert len(rig.drivers) == 1
    assert rig.engine.counters["rebuilds"] == 1


@pytest.mark.contract(123)
async def test_a_new_driver_is_logged_as_a_warning(start_rig: StartRig) -> None:
    """A rebuild is one WARNING line with its reason."""
    rig = await start_rig(plan=flaky(Fault(refuse=True)))
    with capture_logs() as logs:
        with pytest.raises(TransferFailed):
            await rig.engine.wait([rig.submit(0, 100)])
        await eventually(lambda: len(rig.drivers) == 2)
    assert logs == [{"event": "engine.rebuild", "log_level": "warning", "reason": f"{PEER} refused a write"}]


@pytest.mark.parametrize("seed", range(4))
async def test_every_batch_ends_and_settles_whatever_happens(start_rig: StartRig, seed: int) -> None:
    """Under random faults each batch finishes and settles, successes have their bytes, nothing lands later."""
    dice = random.Random(seed)
    limits = Limits(
        window_descriptors=3,
        window_bytes=2000,
        descriptor_bytes=512,
        deadline_s=0.25,
        retries=dice.choice([0, 1, 2]),
        retry_after_s=0.01,
        late_landing_s=0.45,  # longer than any write takes that does land
    )

    def plan(session: str, block: Block) -> Fault:
        kind = dice.random()
        if kind < 0.85:
            return Fault(delay_s=dice.choice([0.0, 0.001, 0.01]))
        if kind < 0.94:
            return Fault(delay_s=0.002, status=Status.FAILED, lands_after_s=dice.choice([0.0, 0.05, 0.15]))
        if kind < 0.96:
            return Fault(refuse=True)
        if kind < 0.98:
            return Fault(error=RuntimeError("boom"))
        return dice.choice([NEVER, Fault(delay_s=0.3)])

    rig = await start_rig(limits=limits, plan=plan, answers=lambda session: dice.random() < 0.95)
    batches = []
    for room in range(40):
        batches.append(
            rig.engine.submit(
                dice.choice([PEER, OTHER]),
                [rig.block(room * 1600 + at, 400) for at in range(0, 1600, 400)],
                label=str(room),
            )
        )
        await asyncio.sleep(0.002)
    for room, batch in enumerate(batches):
        await asyncio.wait_for(batch.finished.wait(), 10)
        if batch.error is None:
            assert rig.landed(room * 1600, 1600)
    await asyncio.wait_for(rig.engine.settle(batches), 10)
    await rig.idle()
    rig.land()
    rig.target.array[:] = 0
    await asyncio.sleep(0.2)
    rig.land()
    assert not rig.target.array.any()
    failed = [b for b in batches if b.error]
    assert 0 < len(failed) < len(batches)
    assert np.isfinite([b.settled_at_s for b in batches]).all()
