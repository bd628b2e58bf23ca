"""Several context-parallel ranks of one forward, each on a thread of its own.

    each rank            deposit | store what I own,          | take the full view
    at each accessor     rows    | copy it into the full view | go on with my attention
                              barrier                      barrier

Ranks without rows in a short chunk compute nothing and still store, copy and wait: they own pages. Rank 0 is the
forward thread itself; hooks are called there. The first error of any rank ends the forward on all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch

from app.core.ids import PageArray, Source
from app.core.pages import pages_for
from app.engine.base import LayerHooks
from app.engine.paged.rows import RankPools, RankRows, RowLayout, RowStatistics, require_pages, require_same

T = TypeVar("T")


class RankTeam:
    """The threads of the ranks above 0. They live as long as the engine, and sleep between forwards."""

    def __init__(self, ranks: int, threads: int) -> None:
        self.ranks = ranks
        # torch keeps the thread count per thread; equal counts are what makes equal bits
        self._others = ThreadPoolExecutor(
            max(ranks - 1, 1),
            thread_name_prefix="kvferry-rank",
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )

    def run(self, work: Callable[[int], T], abort: Callable[[], None]) -> list[T]:
        """`work(rank)` on every rank at once, rank 0 here. Raises the first error, after all have ended.

        `abort` is called as soon as a rank has failed, so that no other rank waits for it.
        """
        errors: list[BaseException] = []
        lock = threading.Lock()

        def guarded(rank: int) -> T | None:
            try:
                return work(rank)
            except BaseException as error:
                with lock:
                    errors.append(error)
                abort()
                return None

        # each rank in a copy of the caller's context, so that log lines carry its room
        futures = [self._others.submit(copy_context().run, guarded, rank) for rank in range(1, self.ranks)]
        results = [guarded(0), *(future.result() for future in futures)]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results  # type: ignore[return-value]

    def close(self) -> None:
        self._others.shutdown(wait=False, cancel_futures=True)


class SharedForward:
    """What the ranks of one forward share: the deposits and the full views of one accessor at a time."""

    def __init__(self, pools: RankPools, table: PageArray, start: int, count: int, hooks: LayerHooks) -> None:
        require_pages(table, start + count, pools.page_size)
        self.pools = pools
        self.start = start
        self.length = start + count
        self.hooks = hooks
        self.used = pages_for(self.length, pools.page_size)
        self.table = torch.from_numpy(table[: self.used])
        self.devices = list(dict.fromkeys(pools.devices))
        self.current: list[Mapping[str, RankRows]] = [{} for _ in range(pools.ranks)]
        self.calls: list[object] = [None] * pools.ranks
        self.views: dict[str, dict[torch.device, torch.Tensor]] = {}
        self.barrier = threading.Barrier(pools.ranks)

    def abort(self) -> None:
        self.barrier.abort()


class SharedAccess:
    """One rank's side of a shared forward; `positions` are the rows that it computes, maybe none."""

    def __init__(
        self,
        shared: SharedForward,
        rank: int,
        positions: Sequence[int] | PageArray,
        statistics: RowStatistics,
    ) -> None:
        self.start = shared.start
        self.rank = rank
        self._shared = shared
        self._device = shared.pools.devices[rank]
        self._table = shared.table.to(self._device)
        self._positions = torch.as_tensor(positions, dtype=torch.int64, device=self._device)
        self._statistics = statistics

    def exchange(
        self, layer: int, rows: Mapping[str, torch.Tensor], *, ends: Source | None
    ) -> dict[str, torch.Tensor]:
        shared, pools = self._shared, self._shared.pools
        names = tuple(rows)
        if self.rank == 0:
            if shared.start:
                shared.hooks.before_read(layer)
            shared.views = {
                name: {device: pools.empty_view(name, shared.used, device) for device in shared.devices}
                for name in names
            }
        shared.calls[self.rank] = (layer, names, ends)
        shared.current[self.rank] = {name: self._marked(name, current) for name, current in rows.items()}
        waited_s = self._wait()

        require_same(shared.calls)
        views = shared.views
        began_s = time.perf_counter()
        for name in names:
            currents = [current[name] for current in shared.current]
            pools.store_owned(self.rank, name, layer, self._table, currents)
        stored_s = time.perf_counter()
        for name in names:
            self._materialise(name, layer, views[name])
        materialised_s = time.perf_counter()
        self._settle()
        waited_s += self._wait()

        # captured by every owner: nothing of this layer may be taken for the next one's
        shared.current[self.rank] = {}
        if self.rank == 0 and ends is not None:
            shared.hooks.after_write(layer, ends)
        self._statistics.add(
            RowStatistics(
                store_s=stored_s - began_s,
                materialise_s=materialised_s - stored_s,
                wait_s=waited_s,
                accesses=1,
            )
        )
        return {name: views[name][self._device].flatten(0, 1)[: shared.length] for name in names}

    def idle(self, schedule: Sequence[tuple[int, tuple[str, ...], Source | None]]) -> None:
        """Take part in a forward without rows of one's own: the accessors that the others' models call."""
        for layer, names, ends in schedule:
            widths = {name: self._shared.pools.formats[name].row_bytes for name in names}
            self.exchange(layer, {n: torch.empty((0, w)) for n, w in widths.items()}, ends=ends)

    def _materialise(self, name: str, layer: int, views: Mapping[torch.device, torch.Tensor]) -> None:
        """Decode the pages that this rank owns into the full view of every device."""
        pools = self._shared.pools
        places, encoded = pools.owned_rows(self.rank, name, layer, self._table)
        if not len(places):
            return
        rows = pools.formats[name].decode(encoded.flatten(0, 1)).unflatten(0, (len(places), pools.page_size))
        for device, view in views.items():
            view[places.to(device)] = rows.to(device)

    def _marked(self, name: str, current: torch.Tensor) -> RankRows:
        form = self._shared.pools.formats[name]
        empty = torch.empty((0, form.row_bytes), dtype=torch.uint8, device=self._device)
        encoded = form.encode(current) if len(current) else empty
        return RankRows(layout=RowLayout.RANK_LOCAL, positions=self._positions, rows=encoded)

    def _settle(self) -> None:
        """On CUDA another rank's stream reads what this one has only enqueued."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _wait(self) -> float:
        began_s = time.perf_counter()
        self._shared.barrier.wait()
        return time.perf_counter() - began_s
