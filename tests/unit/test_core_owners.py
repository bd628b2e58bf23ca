"""Which rank sends which positions."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.owners import owned, rank_positions
from app.errors import BadInput


@pytest.mark.contract(95)
@pytest.mark.parametrize("total", [0, 1, 7, 8, 100])
@pytest.mark.parametrize(("first", "count"), [(0, 100), (3, 10), (99, 1), (40, 0), (100, 5)])
def test_the_filter_equals_a_membership_test(total: int, first: int, count: int) -> None:
    """Filtering a chunk to a rank keeps exactly the pages whose position the rank owns, as a view."""
    pages = np.arange(1000, 1000 + count, dtype=np.int64)
    for rank in range(8):
        mine = rank_positions(total, rank, 8)
        members = set(mine)
        found, at = owned(pages, first, mine)
        assert found.tolist() == [p for i, p in enumerate(pages.tolist()) if first + i in members]
        assert found.base is pages
        if len(found):
            assert pages[at - first] == found[0]


@pytest.mark.contract(95)
def test_the_filter_copies_nothing() -> None:
    """A contiguous part shares the chunk's memory: the cost does not grow with its length."""
    pages = np.arange(1 << 20, dtype=np.int64)
    found, at = owned(pages, 0, rank_positions(len(pages), 3, 8))
    assert len(found) == 1 << 17
    assert np.shares_memory(found, pages)
    assert at == found[0]


def test_a_foreign_rank_is_refused() -> None:
    """A rank outside the ranks raises and is named."""
    with pytest.raises(BadInput, match=r"rank 8 is outside 0\.\.8") as caught:
        rank_positions(10, 8, 8)
    assert caught.value.rank == 8
