"""The engine's thread and its wait for what it is asked to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from app.service.awake import within
from app.transfer.base import Status
from app.transfer.calls import Calls
from tests.transfer.conftest import StartRig
from tests.transfer.rig import QUICK

ROUNDS = 30_000
"""The queue of the standard library gets stuck after some thousands of waits of this length."""
SHORT_S = 1e-6


def ends(work: Callable[[], None]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_calls_come_in_order_and_the_end_too() -> None:
    """First in, first out, None included; when nothing is left, the whole time is waited for something."""
    calls = Calls()
    done: list[int] = []
    for number in range(3):
        calls.put(partial(done.append, number))
    calls.put(None)
    while (call := calls.get(1.0)) is not None:
        call()
    assert done == [0, 1, 2]
    before = time.monotonic()
    with pytest.raises(TimeoutError):
        calls.get(0.05)  # although the bell has rung for what has been taken
    assert time.monotonic() - before >= 0.05


def test_a_wait_that_is_over_before_it_began_ends() -> None:
    """After a call that was there without a wait, a wait shorter than a thread's pause ends nevertheless."""
    calls = Calls()

    def work() -> None:
        for _ in range(ROUNDS):
            calls.put(None)
            calls.get(SHORT_S)
            with pytest.raises(TimeoutError):
                calls.get(SHORT_S)

    assert ends(work)


def test_nothing_that_many_threads_put_is_lost_or_slept_through() -> None:
    """Eight threads put at once: the getter has everything, each thread's in order, and never waits in vain."""
    calls, each, threads = Calls(), 2_000, 8
    got: list[list[int]] = [[] for _ in range(threads)]

    def put(number: int) -> None:
        for i in range(each):
            calls.put(partial(got[number].append, i))

    def get() -> None:
        for _ in range(each * threads):
            call = calls.get(60.0)
            assert call is not None
            call()

    for number in range(threads):
        threading.Thread(target=put, args=(number,), daemon=True).start()
    assert ends(get)
    assert got == [list(range(each))] * threads


async def test_a_write_is_looked_at_until_it_ends(start_rig: StartRig) -> None:
    """However short the thread's waits are, and whatever it is asked between two looks, it goes on looking."""
    rig = await start_rig(limits=replace(QUICK, poll_s=SHORT_S, deadline_s=120.0))
    (driver,) = rig.drivers
    check, looks = driver.check, 0

    def look(submitted: int) -> Status:
        nonlocal looks
        looks += 1
        if looks % 2:
            rig.engine._pump.call(lambda: None)
        return Status.PENDING if looks < ROUNDS else check(submitted)

    driver.check = look  # type: ignore[method-assign]
    batch = rig.submit(0, 1000)
    await within(rig.engine.wait([batch]), 60.0)
    assert rig.landed(0, 1000)
    assert looks == ROUNDS
