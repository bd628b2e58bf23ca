"""A cache over both tiers, and a forward whose bytes are known: what comes back can be compared with it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.core.ids import PageArray
from app.core.pairings import Layout
from app.core.prefix_tree import Namespace
from app.tiers.backup import Reservation
from app.tiers.copiers import LayerCopier
from app.tiers.copy_faults import CopyFault
from app.tiers.copy_queue import CopyQueue
from app.tiers.descriptors import LayerCopy
from app.tiers.hicache import HiCache
from app.tiers.leases import Lease
from app.tiers.page_checks import PageChecks
from tests.tiers import rig
from tests.tiers.rig import WAIT_S, Tiers

PAGE = 4
PLAIN = Namespace("p")
PAIRS = Namespace("p", bigrams=True)


def tokens(count: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + i for i in range(count)]


class Loop:
    """Stands for the event loop: callbacks of the queues' threads wait until the test runs them."""

    def __init__(self) -> None:
        self._callbacks: deque[Callable[[], None]] = deque()

    def post(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def run(self) -> int:
        count = 0
        while self._callbacks:
            self._callbacks.popleft()()
            count += 1
        return count


@dataclass(eq=False)
class Request:
    """A prompt on its way, as a service would lead it."""

    prompt: list[int]
    space: Namespace
    lease: Lease
    table: PageArray
    reservation: Reservation | None = None
    following: int = 7


@dataclass(eq=False)
class CacheRig:
    """One node's tiers, queues and cache. `fault` answers for copies, `copies` are those whose turn has come."""

    tiers: Tiers
    loop: Loop
    backups: CopyQueue
    loads: CopyQueue
    cache: HiCache
    now: list[float]
    fault: Callable[[LayerCopy], CopyFault | None] = lambda copy: None
    copies: list[LayerCopy] = field(default_factory=list)

    # what a service does

    def find(self, prompt: list[int], space: Namespace = PLAIN, **more: Any) -> Lease:
        return self.cache.find(space, prompt, most=len(prompt) - 1, **more)

    def begin(self, prompt: list[int], space: Namespace = PLAIN) -> Request | None:
        """Find, allocate, reserve. None when L1 has no room."""
        lease = self.find(prompt, space)
        own = self.cache.allocate(-(-len(prompt) // PAGE) - len(lease.prefix), lease)
        if own is None:
            self.cache.end(lease)
            return None
        lease.own = own
        made = Request(prompt, space, lease, lease.pages)
        made.reservation = self.cache.reserve(lease, prompt, made.table)
        return made

    def forward(self, requests: Sequence[Request], chunk: int = 0, chunks: int = 1) -> None:
        """Write the rows of one chunk of a batch, layer by layer, with a layer's end after each."""
        ranges, written = [], []
        for of in requests:
            first, whole = len(of.lease.prefix), len(of.prompt) // PAGE
            edges = [first + (whole - first) * n // chunks for n in range(chunks + 1)]
            written.append((of, edges[chunk], edges[chunk + 1]))
            if of.reservation is not None:
                ranges.append((of.reservation, edges[chunk], edges[chunk + 1]))
        batch = self.cache.chunk(ranges)
        copier = self.loads.copier
        for layer in copier.geometry.layers:
            for of in requests:
                of.lease.wait(layer)
            for source in copier.sources(layer):
                for of, start, end in written:
                    for position in range(start, end):
                        self.write(int(of.table[position]), key_of(of, position), layer, source)
                batch.layer_end(source, layer)

    def finish(self, of: Request) -> None:
        """The forward has ended well: keep, and what no layer end has brought."""
        if of.reservation is not None:
            self.cache.finish(of.reservation)
        self.cache.keep(of.lease, of.prompt, of.table)

    def serve(self, prompt: list[int], space: Namespace = PLAIN) -> None:
        """A whole request, settled."""
        of = self.begin(prompt, space)
        assert of is not None
        self.forward([of])
        self.finish(of)
        self.cache.end(of.lease)
        self.settle()

    # bytes

    def write(self, page: int, key: tuple[int, ...], layer: int, source: str) -> None:
        rank, physical = divmod(page, self.tiers.l1[0].pages)
        for name, buffer in self.tiers.l1[rank].buffers.items():
            if buffer.spec.owner == source and buffer.spec.holds(layer):
                item = buffer.tensor[buffer.spec.slot(layer), physical].numpy()
                item[:] = pattern(key, name, layer, len(item))

    def require_bytes(self, prompt: list[int], space: Namespace, pages: PageArray) -> None:
        """Every layer of every buffer of these pages holds what the forward of that prompt wrote."""
        for position, page in enumerate(pages.tolist()):
            rank, physical = divmod(page, self.tiers.l1[0].pages)
            key = (int(space.bigrams), *prompt[: (position + 1) * PAGE + space.bigrams])
            for name, buffer in self.tiers.l1[rank].buffers.items():
                for layer in buffer.spec.layer_ids:
                    item = buffer.tensor[buffer.spec.slot(layer), physical].numpy()
                    assert np.array_equal(item, pattern(key, name, layer, len(item))), (name, layer, position)

    def forget_free(self) -> None:
        """Overwrite every page of L1 that nobody holds."""
        lanes = self.cache.lanes
        free = np.flatnonzero(np.asarray(lanes._states).ravel() == 0)
        for page in free.tolist():
            rank, physical = divmod(page, lanes.pages)
            for buffer in self.tiers.l1[rank].buffers.values():
                buffer.tensor[:, physical] = 0xEE

    def leave_l1(self) -> None:
        """Evict all that nobody holds from L1, and overwrite it."""
        self.cache.lanes.release(self.cache.tree.evict(1, self.cache.pages))
        self.forget_free()

    # time

    def settle(self) -> None:
        """Until every copy is quiet and all has been heard of it."""
        for queue in (self.backups, self.loads):
            queue.drain(WAIT_S)
        self.loop.run()

    def until(self, done: Callable[[], bool]) -> None:
        """Run callbacks until something is so."""
        end = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end
            self.loop.run()
            time.sleep(0.001)

    def counts(self) -> tuple[int, int, int, int, int]:
        """Free pages of both tiers, pins, leases, tickets."""
        stats = self.cache.tree.stats()
        return (
            self.cache.free_pages + stats.l1_pages,
            self.cache.host.lanes.free_pages + stats.l2_pages,
            stats.pins,
            self.cache.leases,
            stats.tickets,
        )

    @property
    def initial(self) -> tuple[int, int, int, int, int]:
        return (self.cache.pages, self.cache.host.pages, 0, 0, 0)


def key_of(of: Request, position: int) -> tuple[int, ...]:
    """What the rows of a page depend on: all tokens before its end, and one more where there is a draft."""
    return (int(of.space.bigrams), *of.prompt[: (position + 1) * PAGE + of.space.bigrams])


def pattern(key: tuple[int, ...], name: str, layer: int, length: int) -> np.ndarray:
    return np.random.default_rng(abs(hash((key, name, layer)))).integers(0, 256, length, dtype=np.uint8)


def held(gate: threading.Event) -> Callable[[LayerCopy], CopyFault | None]:
    """Every copy waits until the gate is open, then it is good."""

    def fault(copy: LayerCopy) -> CopyFault | None:
        assert gate.wait(WAIT_S)
        return None

    return fault


@contextmanager
def cache_rig(
    *,
    ranks: int = 1,
    l1_pages: int = 16,
    l2_pages: int = 24,
    layout: Layout = "layer_page_first",
    checks: bool = True,
    draft: bool = True,
    **more: Any,
) -> Iterator[CacheRig]:
    """Everything is at its starting count when it closes, or the test fails."""
    more = {"l1_room": 0.0, "l2_room": 0.0, "load_deadline_s": WAIT_S} | more
    with rig.tiers(layout, ranks=ranks, l1_pages=l1_pages, l2_pages=l2_pages, draft=draft) as pools:
        loop, now = Loop(), [1000.0]
        made: list[CacheRig] = []

        def faults(copy: LayerCopy) -> CopyFault | None:
            made[0].copies.append(copy)
            return made[0].fault(copy)

        copier: LayerCopier = pools.copier
        with (
            CopyQueue(copier, name="backups", faults=faults) as backups,
            CopyQueue(copier, name="loads", faults=faults) as loads,
        ):
            cache = HiCache(
                backups=backups,
                loads=loads,
                post=loop.post,
                clock=lambda: now[0],
                checks=PageChecks(pools.l1) if checks else None,
                **more,
            )
            made.append(CacheRig(pools, loop, backups, loads, cache, now))
            yield made[0]
            made[0].settle()
            cache.check_integrity()
            assert made[0].counts() == made[0].initial
            assert cache.flush().complete
            assert (cache.free_pages, cache.host.lanes.free_pages) == (cache.pages, cache.host.pages)
