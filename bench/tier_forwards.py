"""Forwards over both tiers in one process: the price of a backup, and how far a slow load hides behind the layers."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from app.core.chunks import ChunkPlan, plan_chunks
from app.core.ids import PageArray, Source
from app.core.prefix_tree import Namespace
from app.engine.base import ForwardStep, NoHooks
from app.engine.load import load_engine
from app.tiers.backup import ChunkBackup
from app.tiers.copiers import KernelBackend, LayerCopier
from app.tiers.copy_faults import CopyFault
from app.tiers.copy_queue import CopyQueue
from app.tiers.descriptors import LayerCopy
from app.tiers.device import DevicePool
from app.tiers.hicache import HiCache
from app.tiers.host import HostPool
from app.tiers.leases import Lease
from bench.report import BenchFailed, Row, Target

_PAGE = 64
_NEW = 512
"""Tokens that each forward computes."""
_CACHED = 960
"""Tokens in front of them that are loaded, where something is."""
_SLOW = 0.8
"""A copy takes this part of a layer's forward: a slower engine could not hide at all, a faster one tells little."""
_BATCH = 10
_VOCABULARY = 49_000
_SPACE = Namespace("bench")

Advance = Callable[[str], None]


class Hooks(NoHooks):
    """What a service does at the layers of a prefill."""

    def __init__(self, lease: Lease | None = None, chunk: ChunkBackup | None = None) -> None:
        self._lease, self._chunk = lease, chunk

    def before_read(self, layer: int) -> None:
        if self._lease is not None:
            self._lease.wait(layer)

    def after_write(self, layer: int, source: Source) -> None:
        if self._chunk is not None:
            self._chunk.layer_end(source, layer)


class Rig:
    """A model over L1 and L2. Decisions run on this thread: what copies end is run between forwards."""

    def __init__(self, stack: ExitStack, model: str = "smollm2") -> None:
        self.engine, _ = load_engine(name=model, page_size=_PAGE, dtype="auto", device="cpu", threads=1)
        pages = (_CACHED + _NEW) // _PAGE * 2
        pool = DevicePool(self.engine.geometry, pages)
        host = HostPool(self.engine.geometry, 2 * pages, "layer_first")
        stack.callback(pool.close)
        stack.callback(host.close)
        self.engine.bind([pool])
        self.copier = LayerCopier([pool], [host], KernelBackend())
        self.delay_s = 0.0
        self._ends: deque[Callable[[], None]] = deque()
        queues = [
            CopyQueue(self.copier, name="backups"),
            CopyQueue(self.copier, name="loads", faults=self._slow),
        ]
        for queue in queues:
            stack.enter_context(queue)
        self.queues = queues
        self.cache = HiCache(backups=queues[0], loads=queues[1], post=self._ends.append)
        self._draws = random.Random(29)

    def _slow(self, copy: LayerCopy) -> CopyFault:
        return CopyFault(delay_s=self.delay_s)

    def settle(self) -> None:
        """Wait for all copies, and decide what follows."""
        for queue in self.queues:
            queue.drain(60)
        while self._ends:
            self._ends.popleft()()

    def prompt(self, tokens: int) -> list[int]:
        return [self._draws.randrange(100, _VOCABULARY) for _ in range(tokens)]

    def begin(self, prompt: list[int]) -> tuple[Lease, PageArray]:
        lease = self.cache.find(_SPACE, prompt, most=len(prompt) - 1)
        own = self.cache.allocate(-(-len(prompt) // _PAGE) - len(lease.prefix))
        if own is None:
            raise BenchFailed("L1 has no room")
        lease.own = own
        return lease, lease.pages

    def forward(self, prompt: list[int], lease: Lease, pages: PageArray, *, back_up: bool) -> float:
        """Seconds of the forward of what is not cached. Kept and ended afterwards."""
        made = self.cache.reserve(lease, prompt, pages) if back_up else None
        start = len(lease.prefix) * _PAGE
        plan: ChunkPlan = plan_chunks(
            len(prompt), page_size=_PAGE, chunk_tokens=len(prompt), cached_tokens=start
        )[0]
        chunk = (
            self.cache.chunk([(made, plan.start // _PAGE, plan.end // _PAGE)]) if made is not None else None
        )
        began = time.perf_counter()
        step = ForwardStep(tokens=prompt[start:], start=start, pages=pages)
        self.engine.forward(step, Hooks(lease, chunk))
        took = time.perf_counter() - began
        if made is not None:
            self.cache.finish(made)
        self.cache.keep(lease, prompt, pages)
        self.settle()
        self.cache.end(lease)
        self.settle()
        return took

    def empty(self, tier: str) -> None:
        if tier == "l1":
            self.cache.lanes.release(self.cache.tree.evict(1, self.cache.pages))
        else:
            self.cache.flush()


def measure(runs: int, advance: Advance) -> list[Row]:
    with ExitStack() as stack:
        rig = Rig(stack)
        return [*_backup(rig, runs, advance), *_load(rig, runs, advance), *_batch(Rig(stack, "toy-dsa"))]


def _backup(rig: Rig, runs: int, advance: Advance) -> list[Row]:
    """The same forward with and without a backup, in turn."""
    took: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(runs + 1):
        for back_up in (True, False):
            prompt = rig.prompt(_NEW)
            lease, pages = rig.begin(prompt)
            seconds = rig.forward(prompt, lease, pages, back_up=back_up)
            rig.empty("all")
            if turn:
                took[back_up].append(seconds)
        advance("backups")
    return [
        Row(
            work=f"forward of {_NEW} tokens: with backup / without",
            ours=took[True],
            other=took[False],
            unit="ms",
            target=Target(limit=1.03, bound="at most"),
        )
    ]


def _load(rig: Rig, runs: int, advance: Advance) -> list[Row]:
    """A prefix from L2 through a slow copy engine: what the layers wait for it, of the time that it takes."""
    layers = len(rig.engine.geometry.layers)
    statistics = rig.copier.statistics
    waited: list[float] = []
    loading: list[float] = []
    builds: list[int] = []
    alone: list[float] = []
    for turn in range(runs + 1):
        prefix = rig.prompt(_CACHED + 1)
        lease, pages = rig.begin(prefix)
        rig.forward(prefix, lease, pages, back_up=True)
        prompt = [*prefix[:_CACHED], *rig.prompt(_NEW)]
        if not turn:  # without any load: what a layer takes
            lease, pages = rig.begin(prompt)
            alone.append(rig.forward(prompt, lease, pages, back_up=False))
            rig.empty("all")
            rig.delay_s = _SLOW * median(alone) / layers
            advance("loads")
            continue
        rig.empty("l1")
        before = dict(statistics.seconds), statistics.steps["build"]
        began = time.perf_counter()
        lease, pages = rig.begin(prompt)
        if lease.l2_tokens != _CACHED:
            raise BenchFailed(f"{lease.l2_tokens} tokens came from L2, not {_CACHED}")
        rig.forward(prompt, lease, pages, back_up=False)
        builds.append(statistics.steps["build"] - before[1])
        waited.append(statistics.seconds.get("wait", 0.0) - before[0].get("wait", 0.0))
        loading.append(max(layers * rig.delay_s, 1e-9))
        if time.perf_counter() - began < loading[-1]:
            raise BenchFailed("the load took less than its delay")
        rig.empty("all")
        advance("loads")
    return [
        Row(
            work=f"load of {_CACHED} tokens behind a slow engine: waited at layers / its time",
            ours=waited,
            other=loading,
            unit="ms",
            target=Target(limit=0.2, bound="at most"),
            detail={"delay_s": rig.delay_s, "layers": layers},
        ),
        _count("descriptor builds of a load / 1", builds, 1),
    ]


def _batch(rig: Rig) -> list[Row]:
    """Ten prompts in one forward of a model with a draft: submits of each layer."""
    begun = []
    for _ in range(_BATCH):
        prompt = rig.prompt(2 * _PAGE)
        lease, pages = rig.begin(prompt)
        made = rig.cache.reserve(lease, prompt, pages)
        if made is None:
            raise BenchFailed("L2 has no room for the batch")
        begun.append((lease, made))
    chunk = rig.cache.chunk([(made, 0, 2) for _, made in begun])
    rows = []
    sources: tuple[Source, ...] = ("target", "draft")
    for source in sources:
        layers = [n for n in rig.engine.geometry.layers if source in rig.copier.sources(n)]
        for layer in layers:
            chunk.layer_end(source, layer)
        submits = rig.copier.statistics.submits["backup", source]
        rows.append(_count(f"{source} submits a layer, batch of {_BATCH} / 1", [submits / len(layers)], 1))
    rig.settle()
    for lease, _ in begun:
        rig.cache.end(lease)
    rig.settle()
    return rows


def _count(work: str, ours: list[Any], limit: float) -> Row:
    return Row(
        work=work,
        ours=[float(value) for value in ours],
        other=[1.0],
        unit="runs",
        target=Target(limit=limit, bound="at most"),
    )
