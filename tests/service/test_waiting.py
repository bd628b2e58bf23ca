"""Waiting for pages and for the forward thread: in order, bounded, and safe to give up at any moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import anyio
import pytest

from app.errors import DeadlineExceeded, NoCapacity
from app.service.forwards import Forwards
from app.service.gates import PageGate
from app.tiers.prefix import PrefixCache
from tests.conftest import Track
from tests.support.harness import Cluster, eventually, prompt_of


@pytest.fixture
def forwards() -> Iterator[Forwards]:
    made = Forwards(threads=1, stall_s=60)
    yield made
    made.close()


@pytest.fixture
def gate(track: Track) -> PageGate:
    return PageGate(track(PrefixCache(page_size=4, pages=8, reuse=False)), max_waiting=3)


async def test_pages_go_to_whoever_asked_first(gate: PageGate) -> None:
    """A small request does not overtake a large one that has waited longer."""
    held = await gate.take(6, timeout_s=1)
    large = asyncio.create_task(gate.take(4, timeout_s=5))
    await asyncio.sleep(0)
    small = asyncio.create_task(gate.take(1, timeout_s=5))
    await asyncio.sleep(0.01)
    assert not large.done() and not small.done()
    gate.give(held)
    gate.give(await large)
    gate.give(await small)
    assert (gate.cache.free_pages, gate.waiting) == (8, 0)


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_waiter_takes_no_page(gate: PageGate, granted: bool) -> None:
    """Cancelled before its pages were granted, or in the very moment after: they go to the next in line."""
    held = await gate.take(8, timeout_s=1)
    first = asyncio.create_task(gate.take(8, timeout_s=5))
    await asyncio.sleep(0)
    second = asyncio.create_task(gate.take(8, timeout_s=5))
    await asyncio.sleep(0.01)
    if granted:
        gate.give(held)
        first.cancel()
    else:
        first.cancel()
        await asyncio.sleep(0)
        gate.give(held)
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.give(await second)
    assert (gate.cache.free_pages, gate.waiting) == (8, 0)


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_scope_loses_no_page(gate: PageGate, granted: bool) -> None:
    """A room that fails while it waits leaves the queue; one whose pages had been granted has them to return."""
    held = await gate.take(8, timeout_s=1)
    scope = anyio.CancelScope()
    taken = []

    async def wait() -> None:
        with scope:
            taken.append(await gate.take(1, timeout_s=5))
            await asyncio.sleep(5)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    assert gate.waiting == 1
    if granted:
        gate.give(held)
        scope.cancel()
    else:
        scope.cancel()
        await asyncio.sleep(0.01)
        assert gate.waiting == 0
        gate.give(held)
    await task
    for pages in taken:
        gate.give(pages)
    assert (gate.cache.free_pages, gate.waiting) == (8, 0)
    assert granted or not taken


@pytest.mark.case("F9")
async def test_the_page_queue_is_bounded(gate: PageGate) -> None:
    """More pages than there are, a full queue and a wait that is too long have their own errors."""
    with pytest.raises(NoCapacity, match="9 pages are needed and this node has 8"):
        await gate.take(9, timeout_s=1)
    held = await gate.take(8, timeout_s=1)
    waiting = [asyncio.create_task(gate.take(1, timeout_s=0.1)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(NoCapacity, match="3 requests wait for pages already"):
        await gate.take(1, timeout_s=1)
    for task in waiting:
        with pytest.raises(DeadlineExceeded, match=r"no 1 pages within 0\.1 s"):
            await task
    gate.give(held)
    assert (gate.cache.free_pages, gate.waiting) == (8, 0)


async def test_a_cancelled_turn_passes_on(forwards: Forwards) -> None:
    """Whoever gives up while waiting, or as its turn comes, leaves the thread to the next."""
    order: list[str] = []

    async def worker(name: str) -> None:
        async with forwards.turn(timeout_s=5):
            order.append(name)

    async with forwards.turn(timeout_s=1):
        waiting = worker("a"), worker("b"), worker("c")
        a, b, c = (asyncio.create_task(each) for each in waiting)
        await asyncio.sleep(0.01)
        assert forwards.waiting == 3
        b.cancel()
        await asyncio.wait([b])
        assert forwards.waiting == 2
    a.cancel()  # its turn has just been given to it
    await asyncio.wait([a, c])
    assert order == ["c"]
    assert forwards.waiting == 0


@pytest.mark.parametrize("by", ["task", "timeout", "scope"])
async def test_a_forward_outlasts_every_cancellation(forwards: Forwards, by: str) -> None:
    """Neither a cancelled task nor a timeout nor a scope lets go of a running forward's pages or turn."""
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go.wait(10)
        time.sleep(0.02)
        ended.set()

    scope = anyio.CancelScope()

    async def serve() -> str:
        try:
            with scope:
                async with forwards.turn(timeout_s=1), asyncio.timeout(0.05 if by == "timeout" else 10):
                    await forwards.run(work)
                    await asyncio.sleep(5)
        except TimeoutError:
            assert ended.is_set()
            return "timeout"
        finally:
            assert ended.is_set(), "given up while the thread was still at work"
        return "scope"

    task = asyncio.create_task(serve())
    while not begun.is_set():
        await asyncio.sleep(0.005)
    if by == "task":
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()
    elif by == "scope":
        scope.cancel()
    await asyncio.sleep(0.1)
    assert not task.done()
    go.set()
    if by == "task":
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert await task == by
    async with forwards.turn(timeout_s=1):
        assert await forwards.run(lambda: 7) == 7


async def test_pages_that_come_back_by_themselves_go_to_who_waits(cluster: Cluster) -> None:
    """Pages that the housekeeping has freed, which tells nobody, are granted to a waiting request none the less."""
    await cluster.start()
    gate = cluster.prefill.context.gate
    pages = await gate.take(gate.cache.free_pages, timeout_s=1)
    legs = cluster.start_both(prompt_of(40))
    await eventually(lambda: gate.waiting)
    gate.cache.release(pages)
    await cluster.expect_local(legs)
    await cluster.free()
