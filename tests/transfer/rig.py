"""Memory, fake drivers and fake destinations for the tests of this folder."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from app.core.geometry import CacheGeometry
from app.core.runs import Runs
from app.transfer.base import Batch, Block, Region, Status
from app.transfer.blocks import BufferLayout, Layouts, plan_blocks
from app.transfer.engine import Engine, Limits
from app.transfer.fake import FakeDriver, Fault, FaultPlan

PEER = "fake:peer"
OTHER = "fake:other"
QUICK = Limits(
    window_descriptors=4,
    window_bytes=4096,
    descriptor_bytes=1024,
    deadline_s=10.0,
    retries=2,
    retry_after_s=0.03,
    late_landing_s=0.2,
)


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Return once the condition holds; AssertionError when it never does."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "this did not happen in time"
        await asyncio.sleep(0.002)


@dataclass(eq=False)
class Memory:
    """Bytes of one node, at real addresses."""

    name: str
    size: int
    array: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.array = np.zeros(self.size, dtype=np.uint8)

    @property
    def base(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def region(self) -> Region:
        return Region(self.name, self.base, self.size)

    def fill(self, seed: int = 1) -> Memory:
        self.array[:] = np.random.default_rng(seed).integers(1, 256, self.size, dtype=np.uint8)
        return self


class Driver(FakeDriver):
    """A fake driver that measures its windows, and whose probe can be held up."""

    def __init__(self, plan: FaultPlan | None, rig: Rig) -> None:
        super().__init__(plan)
        self.rig = rig
        self.in_flight: dict[int, tuple[str, Block]] = {}
        self.most: Counter[str] = Counter()
        self.most_bytes: Counter[str] = Counter()
        self.probed: list[str] = []
        self.closed = False

    def submit(self, session: str, block: Block) -> int:
        number = super().submit(session, block)
        if number:
            self.in_flight[number] = (session, block)
            mine = [b.length for s, b in self.in_flight.values() if s == session]
            self.most[session] = max(self.most[session], len(mine))
            self.most_bytes[session] = max(self.most_bytes[session], sum(mine))
        return number

    def check(self, submitted: int) -> Status:
        status = super().check(submitted)
        if status is not Status.PENDING:
            del self.in_flight[submitted]
        return status

    def probe(self, session: str) -> bool:
        self.probed.append(session)
        return self.rig.answers(session)

    def close(self) -> None:
        super().close()
        self.closed = True


@dataclass(eq=False)
class Rig:
    """An engine over fake drivers. `plan` may be changed while it runs."""

    limits: Limits = QUICK
    plan: FaultPlan | None = None
    answers: Callable[[str], bool] = lambda session: True
    drivers: list[Driver] = field(default_factory=list)
    source: Memory = field(default_factory=lambda: Memory("source", 1 << 16).fill())
    target: Memory = field(default_factory=lambda: Memory("target", 1 << 16))
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self.make, self.limits)

    def make(self) -> FakeDriver:
        driver = Driver(lambda session, block: self.plan(session, block) if self.plan else Fault(), self)
        self.drivers.append(driver)
        return driver

    async def start(self) -> Rig:
        await self.engine.start()
        await self.engine.register([self.source.region])
        for peer in (PEER, OTHER):
            self.engine.add_peer(peer, [self.target.region])
        return self

    def block(self, at: int, length: int, *, to: int | None = None) -> Block:
        """A block at an offset of the source; it goes to the same offset unless `to` says otherwise."""
        return Block(self.source.base + at, self.target.base + (at if to is None else to), length)

    def submit(self, at: int, length: int, *, session: str = PEER, label: str = "") -> Batch:
        return self.engine.submit(session, [self.block(at, length)], label=label)

    def landed(self, at: int, length: int) -> bool:
        return bool((self.source.array[at : at + length] == self.target.array[at : at + length]).all())

    def submitted(self) -> list[tuple[str, Block]]:
        return [write for driver in self.drivers for write in driver.submitted]

    def land(self) -> None:
        """Let every write land whose time has come: the fake drivers copy only when they are called."""
        for driver in self.drivers:
            driver.land()

    async def idle(self) -> None:
        await eventually(lambda: not any(w.busy for w in self.engine._pump.windows.values()))


class Pool:
    """All pages of one node for a geometry, and where they lie."""

    def __init__(self, geometry: CacheGeometry, pages: int, *, seed: int | None = None) -> None:
        self.pages = pages
        self.buffers = {
            b.name: Memory(b.name, b.pool_bytes(pages)).fill(seed or 1)
            if seed is not None
            else Memory(b.name, b.pool_bytes(pages))
            for b in geometry.buffers
        }
        self.layouts: Layouts = {
            b.name: BufferLayout(
                spec=b, base=self.buffers[b.name].base, layer_stride=pages * b.item_bytes, pages=pages
            )
            for b in geometry.buffers
        }

    @property
    def regions(self) -> list[Region]:
        return [memory.region for memory in self.buffers.values()]

    def view(self, name: str) -> npt.NDArray[np.uint8]:
        """[layers, pages, item_bytes] of one buffer."""
        spec = self.layouts[name].spec
        return self.buffers[name].array.reshape(len(spec.layer_ids), self.pages, spec.item_bytes)


@dataclass(eq=False)
class EngineDestination:
    """Sends runs of pages through a real engine, as a node does."""

    engine: Engine
    session: str
    source: Layouts
    target: Layouts
    runs: Runs
    label: str = ""
    submits: list[list[int]] = field(default_factory=list)

    def submit(self, layers: Sequence[int]) -> Batch | None:
        blocks = plan_blocks(self.source, self.target, self.runs, layers)
        if not blocks:
            return None
        self.submits.append(list(layers))
        return self.engine.submit(self.session, blocks, label=self.label)

    async def wait(self, batches: Sequence[Batch]) -> None:
        await self.engine.wait(batches)

    async def settle(self, batches: Sequence[Batch]) -> None:
        await self.engine.settle(batches)


@dataclass(eq=False)
class FakeDestination:
    """Records what it is asked; its batches end when the test says so, at once when `instant`."""

    instant: bool = True
    layer_bytes: int = 100
    empty: frozenset[int] = frozenset()
    error: Exception | None = None
    submits: list[list[int]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    waits: list[list[Batch]] = field(default_factory=list)

    def submit(self, layers: Sequence[int]) -> Batch | None:
        if self.error:
            raise self.error
        full = [layer for layer in layers if layer not in self.empty]
        if not full:
            return None
        self.submits.append(list(layers))
        batch = Batch(
            number=len(self.batches) + 1,
            session=PEER,
            blocks=len(full),
            total_bytes=len(full) * self.layer_bytes,
            deadline_s=0.0,
        )
        self.batches.append(batch)
        if self.instant:
            self.end(batch)
        return batch

    def end(self, batch: Batch, error: Any = None) -> None:
        batch.error = error
        batch.finished.set()
        batch.idle.set()

    async def wait(self, batches: Sequence[Batch]) -> None:
        self.waits.append(list(batches))
        for batch in batches:
            await batch.finished.wait()
            if batch.error:
                raise batch.error

    async def settle(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            await batch.idle.wait()


class LayerEvent:
    """A device event that fires when the test says so."""

    def __init__(self, *, fired: bool = False) -> None:
        self._fired = asyncio.Event()
        if fired:
            self._fired.set()

    def fire(self) -> None:
        self._fired.set()

    async def wait(self) -> None:
        await self._fired.wait()


async def event_wait(event: LayerEvent | None) -> None:
    if event is not None:
        await event.wait()


def flaky(*answers: Fault) -> FaultPlan:
    """The given faults for the first writes, then none."""
    left = list(answers)
    return lambda session, block: left.pop(0) if left else Fault()


FAILS = Fault(status=Status.FAILED)
