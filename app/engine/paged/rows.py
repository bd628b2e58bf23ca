"""One forward's way to the pages of its sequence, on one rank or on several that share one copy.

    ranks compute rows        rank-local rows + positions         owners store              everybody reads
    rank 0  [0 1 | 6 7]  -->  RankRows(RANK_LOCAL, [0 1 6 7]) \\
                                                               >  page p -> pool of its  --> one full view
    rank 1  [2 3 | 4 5]  -->  RankRows(RANK_LOCAL, [2 3 4 5]) /   owner rank                 of all rows

A logical page belongs to rank `page // pages_per_rank`, whoever computed its rows. The view holds the sequence's
rows in order, up to the last one written: what stands behind them in the last page is never read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from app.core.geometry import CacheGeometry
from app.core.ids import PageArray, Source
from app.core.pages import pages_for
from app.engine.base import LayerHooks
from app.engine.paged.formats import PageFormat
from app.errors import BadInput, IntegrityError, InvalidRequest
from app.tiers.device import DevicePool


class RowLayout(Enum):
    """In what order current rows stand. It is said, never guessed from a shape."""

    SEQUENCE = "sequence"
    """All rows of the step, in order: what a single rank computes."""
    RANK_LOCAL = "rank-local"
    """The rows of one rank's pieces, one behind the other; only `positions` says where they belong."""


@dataclass(frozen=True, kw_only=True)
class RankRows:
    """Rows that one rank has just computed, encoded; row i stands at `positions[i]` of the sequence."""

    layout: RowLayout
    positions: torch.Tensor
    rows: torch.Tensor

    def __post_init__(self) -> None:
        if len(self.positions) != len(self.rows):
            raise BadInput(f"{len(self.rows)} rows for {len(self.positions)} positions")


@dataclass(kw_only=True)
class RowStatistics:
    """What sharing costs, in seconds since the engine was made. With ranks at once, of all ranks together."""

    store_s: float = 0.0
    """Storing the rows of owned pages."""
    materialise_s: float = 0.0
    """Reading all rows from their owners into a full view, and decoding them."""
    wait_s: float = 0.0
    """Ranks waiting for each other."""
    accesses: int = 0
    """Layers' accessors served, each rank counted."""

    def add(self, other: RowStatistics) -> None:
        self.store_s += other.store_s
        self.materialise_s += other.materialise_s
        self.wait_s += other.wait_s
        self.accesses += other.accesses


class RankPools:
    """The pools of all ranks with the formats of their buffers: storing and reading by owner."""

    def __init__(
        self, geometry: CacheGeometry, formats: Mapping[str, PageFormat], pools: Sequence[DevicePool]
    ) -> None:
        pages = {pool.pages for pool in pools}
        if len(pages) != 1:
            raise BadInput(f"the ranks' pools must have equally many pages, not {sorted(pages)}")
        (self.pages_per_rank,) = pages
        self.ranks = len(pools)
        self.page_size = geometry.page_size
        self.formats = dict(formats)
        self._buffers = [dict(pool.buffers) for pool in pools]
        # with their numbers, which a pool made on "cuda" does not know
        self.devices = [next(iter(buffers.values())).tensor.device for buffers in self._buffers]

    def region(self, rank: int, name: str, layer: int) -> torch.Tensor:
        """`[pages, item_bytes]` uint8 of one layer in one rank's pool."""
        buffer = self._buffers[rank][name]
        return buffer.tensor[buffer.spec.slot(layer)]

    def store_owned(
        self, rank: int, name: str, layer: int, table: torch.Tensor, currents: Iterable[RankRows]
    ) -> None:
        """Write those of the ranks' current rows whose page `rank` owns. `table` is the page table.

        BadInput for rows of several ranks that are not marked as rank-local.
        """
        region = self.region(rank, name, layer)
        for current in currents:
            if self.ranks > 1 and current.layout is not RowLayout.RANK_LOCAL:
                raise BadInput(
                    f"rows of one of {self.ranks} ranks are marked {current.layout.value}", rank=rank
                )
            positions, rows = current.positions.to(region.device), current.rows.to(region.device)
            pages = table[positions // self.page_size]
            if self.ranks > 1:
                mine = pages // self.pages_per_rank == rank
                positions, pages, rows = positions[mine], pages[mine], rows[mine]
            offsets = positions % self.page_size
            physical = pages % self.pages_per_rank
            self.formats[name].store(region, physical, offsets, rows)

    def owned_rows(
        self, rank: int, name: str, layer: int, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in the page table that `rank` owns, and those pages' rows, encoded.

        The rows are `[places, page_size, row_bytes]`. The ranks' places tile the table, so putting every
        rank's rows to its places gives the bytes of a pool that is not shared.
        """
        places = torch.nonzero(table // self.pages_per_rank == rank).squeeze(1)
        physical = table[places] % self.pages_per_rank
        rows = self.formats[name].gather(self.region(rank, name, layer), physical)
        return places, rows.reshape(len(places), self.page_size, self.formats[name].row_bytes)

    def empty_view(self, name: str, pages: int, device: torch.device) -> torch.Tensor:
        """Room for decoded rows, `[pages, page_size, width]`."""
        codec = self.formats[name].codec
        return torch.empty((pages, self.page_size, codec.width), dtype=codec.compute, device=device)


class RowAccess(Protocol):
    """What a model's cache layers write through and read through, for one forward and one rank."""

    start: int

    def exchange(
        self, layer: int, rows: Mapping[str, torch.Tensor], *, ends: Source | None
    ) -> dict[str, torch.Tensor]:
        """Store current rows `[n, width]` of the named buffers; give all rows so far, `[length, width]`.

        `ends` names the source when nothing more will be written for this layer in this forward.
        """
        ...


class SingleAccess:
    """One rank: its own rows are all rows, and its pool holds every page."""

    def __init__(
        self,
        pools: RankPools,
        table: PageArray,
        start: int,
        count: int,
        hooks: LayerHooks,
        statistics: RowStatistics,
    ) -> None:
        require_pages(table, start + count, pools.page_size)
        device = pools.devices[0]
        self.start = start
        self._pools = pools
        self._length = start + count
        used = pages_for(self._length, pools.page_size)
        self._table = torch.from_numpy(table[:used]).to(device)
        self._positions = torch.arange(start, start + count, device=device)
        self._hooks = hooks
        self._statistics = statistics

    def exchange(
        self, layer: int, rows: Mapping[str, torch.Tensor], *, ends: Source | None
    ) -> dict[str, torch.Tensor]:
        if self.start:
            self._hooks.before_read(layer)
        began_s = time.perf_counter()
        for name, current in rows.items():
            encoded = self._pools.formats[name].encode(current)
            all_rows = RankRows(layout=RowLayout.SEQUENCE, positions=self._positions, rows=encoded)
            self._pools.store_owned(0, name, layer, self._table, [all_rows])
        stored_s = time.perf_counter()
        if ends is not None:
            self._hooks.after_write(layer, ends)
        read_s = time.perf_counter()
        full = {name: self._read(name, layer) for name in rows}
        self._statistics.add(
            RowStatistics(store_s=stored_s - began_s, materialise_s=time.perf_counter() - read_s, accesses=1)
        )
        return full

    def _read(self, name: str, layer: int) -> torch.Tensor:
        form = self._pools.formats[name]
        encoded = form.gather(self._pools.region(0, name, layer), self._table)
        return form.decode(encoded[: self._length])


def require_pages(table: PageArray, length: int, page_size: int) -> None:
    """InvalidRequest when a page table does not hold `length` rows."""
    if pages_for(length, page_size) > len(table):
        raise InvalidRequest(f"{len(table)} pages do not hold {length} tokens")


def require_same(calls: Sequence[object]) -> None:
    """IntegrityError when ranks do not stand at the same accessor: their models have run apart."""
    if any(call != calls[0] for call in calls):
        raise IntegrityError(f"ranks are at different layers: {list(calls)}")
