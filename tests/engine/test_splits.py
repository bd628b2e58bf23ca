"""Which rows each rank computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.paged.splits import Split, split_rows
from app.errors import BadInput

SPLITS = st.sampled_from(["zigzag", "contiguous"])


@given(rows=st.integers(1, 700), ranks=st.integers(1, 8), split=SPLITS)
def test_the_ranks_rows_tile_a_chunk(rows: int, ranks: int, split: Split) -> None:
    """Every row of a chunk is computed by one rank, in ascending order there, and shares are about equal."""
    parts = split_rows(rows, ranks, split)
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    assert all((np.diff(part) > 0).all() for part in parts)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 2


def test_zigzag_gives_a_rank_an_early_and_a_late_piece() -> None:
    """Of 2N pieces rank r takes r and 2N-1-r, so the rows attended to are about the same for all."""
    parts = split_rows(16, 4, "zigzag")
    assert [part.tolist() for part in parts] == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert len({int(part.sum()) for part in parts}) == 1


def test_a_chunk_shorter_than_the_ranks_leaves_some_without_rows() -> None:
    """Three rows over eight ranks are three ranks' work."""
    splits: list[Split] = ["zigzag", "contiguous"]
    for split in splits:
        assert sum(len(part) > 0 for part in split_rows(3, 8, split)) == 3


def test_an_empty_chunk_is_refused() -> None:
    """There is no split of no rows."""
    with pytest.raises(BadInput, match="0 rows over 2"):
        split_rows(0, 2, "zigzag")
