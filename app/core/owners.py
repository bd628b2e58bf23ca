"""Which rank sends which positions of a prompt.

Every rank computes the same answer from the prompt's page count alone, so it does not depend on how the
prompt is chunked. A rank's part is one range of positions: filtering a chunk is then two comparisons
and a slice, whatever the chunk's length.
"""

from __future__ import annotations

from app.core.ids import PageArray
from app.errors import BadInput


def rank_positions(total_pages: int, rank: int, ranks: int) -> range:
    """Positions that `rank` of `ranks` sends; the ranges of all ranks tile 0..total_pages."""
    if not 0 <= rank < ranks:
        raise BadInput(f"rank {rank} is outside 0..{ranks}", rank=rank)
    share, extra = divmod(total_pages, ranks)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))


def owned(pages: PageArray, first_position: int, mine: range) -> tuple[PageArray, int]:
    """The pages of a chunk that lie in `mine`, as a view, and the position of the first of them."""
    low = max(mine.start - first_position, 0)
    high = max(min(mine.stop - first_position, len(pages)), low)
    return pages[low:high], first_position + low
