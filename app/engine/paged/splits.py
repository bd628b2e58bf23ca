"""Which rows of a chunk each context-parallel rank computes.

    4 ranks, 16 rows, contiguous     zigzag: 8 pieces, rank r takes r and 7 - r
    rank 0   0  1  2  3              rank 0   0  1 14 15
    rank 1   4  5  6  7              rank 1   2  3 12 13
    rank 2   8  9 10 11              rank 2   4  5 10 11
    rank 3  12 13 14 15              rank 3   6  7  8  9

A later row attends to more rows than an earlier one; zigzag gives each rank about the same work. Who computes a
row says nothing about who stores it: that is the owner of its page.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from app.core.owners import rank_positions
from app.errors import BadInput

Split = Literal["zigzag", "contiguous"]


def split_rows(rows: int, ranks: int, split: Split) -> list[npt.NDArray[np.int64]]:
    """For each rank the offsets of its rows within the chunk, ascending; none where there are too few."""
    if rows < 1 or ranks < 1:
        raise BadInput(f"cannot split {rows} rows over {ranks} ranks")
    if split == "contiguous":
        return [_piece(rows, rank, ranks) for rank in range(ranks)]
    pieces = 2 * ranks
    return [
        np.concatenate([_piece(rows, rank, pieces), _piece(rows, pieces - 1 - rank, pieces)])
        for rank in range(ranks)
    ]


def _piece(rows: int, piece: int, pieces: int) -> npt.NDArray[np.int64]:
    mine = rank_positions(rows, piece, pieces)
    return np.arange(mine.start, mine.stop, dtype=np.int64)
