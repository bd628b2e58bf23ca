"""Which rank sends which positions of a prompt.

Every rank computes the same answer from the prompt's page count alone, so it does not depend on how the
prompt is chunked. A rank's part is one range of positions: filtering a chunk is then two comparisons
and a slice, whatever the chunk's length. Pages that are owned one by one (`page_owners` of a node) take a pass
over the owners.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from app import _native
from app.core.ids import PageArray
from app.errors import BadInput


def rank_positions(total_pages: int, rank: int, ranks: int) -> range:
    """Positions that `rank` of `ranks` sends; the ranges of all ranks tile 0..total_pages."""
    if not 0 <= rank < ranks:
        raise BadInput(f"rank {rank} is outside 0..{ranks}", rank=rank)
    share, extra = divmod(total_pages, ranks)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))


def plan_owners(pages: int, ranks: int, first: int = 0) -> npt.NDArray[np.int8]:
    """The owner of each of a request's new pages: a range for each rank, in order, from rank `first` on.

    A function of these numbers alone, so every rank computes it alike and no chunk boundary matters. The
    ranges differ by one page at most; ranges rather than turns, so that a rank's pages stay neighbours and
    go in few writes.
    """
    parts = [len(rank_positions(pages, rank, ranks)) for rank in range(ranks)]
    order = (np.arange(ranks) + first) % ranks
    return np.repeat(order, parts).astype(np.int8)


def owned(pages: PageArray, first_position: int, mine: range) -> tuple[PageArray, int]:
    """The pages of a chunk that lie in `mine`, as a view, and the position of the first of them."""
    # comparisons, not min and max: this runs once for each chunk and rank
    low = mine.start - first_position
    if low < 0:
        low = 0
    high = mine.stop - first_position
    if high < low:
        high = low
    return pages[low:high], first_position + low


def owned_by(
    pages: PageArray, owners: npt.NDArray[np.int8], rank: int, first_position: int = 0
) -> tuple[PageArray, PageArray]:
    """The pages of which `rank` is the owner, and their absolute positions; owners[i] is that of pages[i]."""
    return _native.owned_by(pages, owners, rank, first_position)
