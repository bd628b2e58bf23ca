"""Storing and reading by owner, and the ranks of one forward."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from app.core.geometry import BufferSpec, CacheGeometry
from app.engine.base import NoHooks
from app.engine.paged.formats import index_format
from app.engine.paged.parallel import RankTeam, SharedAccess, SharedForward
from app.engine.paged.rows import RankPools, RankRows, RowLayout, RowStatistics
from app.engine.paged.splits import split_rows
from app.errors import BadInput, IntegrityError, InvalidRequest
from app.tiers.device import DevicePool
from tests.engine.rig import Notes, page_bytes, table

PAGE = 4
FORM = index_format(page_size=PAGE, width=8, compute=torch.float32)
GEOMETRY = CacheGeometry(
    page_size=PAGE,
    buffers=(
        BufferSpec(
            owner="target", kind="index", layer_ids=(0, 2), item_bytes=FORM.item_bytes, dtype=FORM.name
        ),
    ),
)
NAME = "target.index"


def pools_of(ranks: int, pages: int = 8) -> tuple[RankPools, list[DevicePool]]:
    pools = [DevicePool(GEOMETRY, pages, 1) for _ in range(ranks)]
    return RankPools(GEOMETRY, {NAME: FORM}, pools), pools


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def deposits(rows: torch.Tensor, start: int, ranks: int, layout: RowLayout) -> list[RankRows]:
    return [
        RankRows(layout=layout, positions=torch.from_numpy(start + part), rows=FORM.encode(rows[part]))
        for part in split_rows(len(rows), ranks, "zigzag")
    ]


@pytest.mark.contract(2)
@pytest.mark.contract(3)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_store_one_copy_and_materialise_an_unshared_pool(ranks: int) -> None:
    """Each page is in its owner's pool alone, and all owners' pages together are an unshared pool's bytes."""
    rows, pages = rows_of(30), table(ranks, 8, 8)
    shared, pools = pools_of(ranks)
    for rank in range(ranks):
        shared.store_owned(
            rank, NAME, 2, torch.from_numpy(pages), deposits(rows, 0, ranks, RowLayout.RANK_LOCAL)
        )
    alone, unshared = pools_of(1)
    whole = RankRows(layout=RowLayout.SEQUENCE, positions=torch.arange(30), rows=FORM.encode(rows))
    alone.store_owned(0, NAME, 2, torch.arange(8), [whole])

    found = torch.zeros(8, PAGE, FORM.row_bytes, dtype=torch.uint8)
    for rank in range(ranks):
        places, encoded = shared.owned_rows(rank, NAME, 2, torch.from_numpy(pages))
        found[places] = encoded
    assert torch.equal(
        found.flatten(0, 1), alone.formats[NAME].gather(alone.region(0, NAME, 2), torch.arange(8))
    )
    assert (page_bytes(pools, pages)[NAME] == page_bytes(unshared, np.arange(8))[NAME]).all()
    written = [int(pool.buffers[NAME].tensor.flatten(2).any(-1).sum()) for pool in pools]
    assert sum(written) == 8 and max(written) == -(-8 // ranks)


@pytest.mark.contract(136)
def test_rank_local_rows_go_by_their_positions_and_not_by_the_chunks_offset() -> None:
    """In a later chunk each rank's rows land at their own positions, which no offset of the chunk would give."""
    rows, start, ranks = rows_of(16), 8, 2
    pages = torch.from_numpy(table(ranks, 8, 6))
    shared, _ = pools_of(ranks)
    local = deposits(rows, start, ranks, RowLayout.RANK_LOCAL)
    assert local[0].positions.tolist() == [8, 9, 10, 11, 20, 21, 22, 23]
    for rank in range(ranks):
        shared.store_owned(rank, NAME, 0, pages, local)
    for position in range(start, start + 16):
        rank, physical = divmod(int(pages[position // PAGE]), 8)
        stored = FORM.gather(shared.region(rank, NAME, 0), torch.tensor([physical]))[position % PAGE]
        assert torch.equal(stored, FORM.encode(rows)[position - start]), position


@pytest.mark.contract(138)
def test_rows_of_a_rank_without_the_rank_local_marker_are_refused() -> None:
    """With several ranks the marker decides, whatever the shape: rows marked as a sequence are not stored."""
    shared, pools = pools_of(2)
    rows = deposits(rows_of(8), 0, 2, RowLayout.SEQUENCE)
    with pytest.raises(BadInput, match="one of 2 ranks are marked sequence") as caught:
        shared.store_owned(1, NAME, 0, torch.arange(2), rows)
    assert caught.value.rank == 1
    assert not any(pool.buffers[NAME].tensor.any() for pool in pools)


@pytest.mark.contract(138)
def test_the_marker_is_cleared_after_capture() -> None:
    """After each accessor no current rows are left that the next layer could take for its own."""
    shared, seen = shared_forward(2, 8), []
    parts = split_rows(8, 2, "zigzag")

    def work(rank: int) -> torch.Tensor:
        access = SharedAccess(shared, rank, parts[rank], RowStatistics())
        full = access.exchange(0, {NAME: rows_of(8)[parts[rank]]}, ends="target")
        seen.append(dict(shared.current[rank]))
        return full[NAME]

    views = run(shared, work)
    assert seen == [{}, {}] and shared.current == [{}, {}]
    assert all(torch.equal(view, FORM.decode(FORM.encode(rows_of(8)))) for view in views)


def test_positions_and_rows_must_be_equally_many() -> None:
    """A deposit that names more positions than it has rows is refused."""
    with pytest.raises(BadInput, match="3 rows for 4 positions"):
        RankRows(layout=RowLayout.RANK_LOCAL, positions=torch.arange(4), rows=torch.zeros(3, FORM.row_bytes))


def test_the_ranks_pools_must_be_of_one_size() -> None:
    """A logical page names its owner only when all pools have equally many pages."""
    with pytest.raises(BadInput, match=r"\[8, 9\]"):
        RankPools(GEOMETRY, {NAME: FORM}, [DevicePool(GEOMETRY, pages, 1) for pages in (8, 9)])


def shared_forward(
    ranks: int, count: int, hooks: Notes | NoHooks | None = None, start: int = 0
) -> SharedForward:
    pools, _ = pools_of(ranks)
    return SharedForward(pools, table(ranks, 8, 8), start, count, hooks or NoHooks())


def run(shared: SharedForward, work: object) -> list[torch.Tensor]:
    team = RankTeam(shared.pools.ranks, threads=1)
    try:
        return team.run(work, shared.abort)  # type: ignore[arg-type]
    finally:
        team.close()


@pytest.mark.case("D12")
def test_a_rank_without_rows_still_stores_and_takes_part() -> None:
    """One row over four ranks: the owner of its page stores it, though another rank computed it."""
    pools, stores = pools_of(4)
    pages = np.array([3 * 8 + 5, 0], dtype=np.int64)
    notes = Notes()
    shared = SharedForward(pools, pages, 0, 1, notes)
    parts = split_rows(1, 4, "zigzag")
    (computing,) = [rank for rank, part in enumerate(parts) if len(part)]
    assert computing != 3

    def work(rank: int) -> torch.Tensor:
        access = SharedAccess(shared, rank, parts[rank], RowStatistics())
        if rank != computing:
            access.idle([(0, (NAME,), "target")])
            return torch.empty(0)
        return access.exchange(0, {NAME: rows_of(1)}, ends="target")[NAME]

    assert torch.equal(run(shared, work)[computing], FORM.decode(FORM.encode(rows_of(1))))
    assert stores[3].buffers[NAME].tensor[0, 5].any()
    assert notes.calls == [("write", 0)]


def test_hooks_are_called_once_and_on_the_forward_thread() -> None:
    """However many ranks, a layer's hooks fire once an accessor, on the thread that called forward."""
    threads: list[threading.Thread] = []

    class Here(Notes):
        def before_read(self, layer: int) -> None:
            super().before_read(layer)
            threads.append(threading.current_thread())

        def after_write(self, layer: int, source: object) -> None:
            super().after_write(layer, source)  # type: ignore[arg-type]
            threads.append(threading.current_thread())

    notes = Here()
    shared = shared_forward(4, 8, notes, start=4)
    parts = split_rows(8, 4, "contiguous")

    def work(rank: int) -> torch.Tensor:
        access = SharedAccess(shared, rank, 4 + parts[rank], RowStatistics())
        access.exchange(0, {NAME: rows_of(2)}, ends=None)
        return access.exchange(2, {NAME: rows_of(2)}, ends="target")[NAME]

    run(shared, work)
    assert notes.calls == [("read", 0), ("read", 2), ("write", 2)]
    assert set(threads) == {threading.current_thread()}


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failing_rank_ends_the_forward_on_all_with_its_error(failing: int) -> None:
    """The first error is raised, not the broken barrier that it leaves the other ranks."""
    shared = shared_forward(4, 8)
    ended: list[int] = []

    def work(rank: int) -> torch.Tensor:
        access = SharedAccess(shared, rank, split_rows(8, 4, "zigzag")[rank], RowStatistics())
        try:
            access.exchange(0, {NAME: rows_of(2)}, ends="target")
            if rank == failing:
                raise InvalidRequest("out of rows")
            return access.exchange(2, {NAME: rows_of(2)}, ends="target")[NAME]
        finally:
            ended.append(rank)

    with pytest.raises(InvalidRequest, match="out of rows"):
        run(shared, work)
    assert sorted(ended) == [0, 1, 2, 3]


def test_ranks_at_different_layers_are_an_error() -> None:
    """Ranks whose models have run apart do not store one layer's rows as another's."""
    shared = shared_forward(2, 8)

    def work(rank: int) -> torch.Tensor:
        access = SharedAccess(shared, rank, split_rows(8, 2, "zigzag")[rank], RowStatistics())
        return access.exchange(2 * rank, {NAME: rows_of(4)}, ends="target")[NAME]

    with pytest.raises(IntegrityError, match="different layers"):
        run(shared, work)


def test_a_page_table_that_is_too_short_is_refused() -> None:
    """A forward past the end of its page table is refused before any rank starts."""
    with pytest.raises(InvalidRequest, match="8 pages do not hold 33 tokens"):
        shared_forward(2, 33)
