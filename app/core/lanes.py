"""The L1 page allocators: one lane, and the lanes of several ranks.

free extents   [2..5) [9..10) [16..40)
allocate 3     -> the smallest extent that fits whole: 2,3,4
allocate 20    -> 16..36
allocate 26    -> largest extents first until the count is reached; or None, and nothing changed

The extents are native (csrc/include/kvferry/extents.hpp); pages that are freed are joined at once, so a lane
that gives None is exhausted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from app import _native
from app.core.ids import PageArray
from app.errors import BadInput


class PageLane(_native.PageLane):
    """Hands out the pages 0..pages-1. Not thread-safe: one task decides.

    `allocate(count)` gives `count` pages in ascending runs, or None (and no change) when too few are free.
    `release(pages)` raises BadInput, and changes nothing, on a foreign, repeated or already free page.
    """


class OwnerLanes(_native.OwnerLanes):
    """Lanes 0..lanes-1 of `pages` pages each: a logical page is lane * pages + its physical page.

    `alloc_pages_with_owners([o0, o1, ...])` gives one logical page for each entry, of that lane and in that
    order, contiguous within a lane where the lane allows it; or None, and no change, when a lane has too few
    (`deficits` says which, and by how many). `reserve` is the same under the number of a holder, whose pages
    `commit` keeps and `roll_back` frees, over all lanes, in one call.
    """

    def owners_of(self, pages: PageArray) -> npt.NDArray[np.int8]:
        """The owner rank of each logical page; the same on every rank."""
        return (pages // self.pages).astype(np.int8)

    def owners_of_slots(self, slots: npt.NDArray[np.int64], page_size: int) -> npt.NDArray[np.int8]:
        """The owner of each page of a node, from the first token slot of the page: what a backup goes by.

        `slots` are the node's token slots, page after page; the last page may be a valid tail. The answer is the
        same on every rank, also on one that owns none of these pages. BadInput on a first slot that is off the
        page grid or of no lane.
        """
        if page_size < 1:
            raise BadInput(f"a page has at least one token, not {page_size}")
        first = np.asarray(slots, dtype=np.int64)[::page_size]
        limit = self.lanes * self.pages * page_size
        wrong = (first % page_size != 0) | (first < 0) | (first >= limit)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise BadInput(
                f"page {at} starts at slot {first[at]}: not the first slot of a page, or outside 0..{limit}"
            )
        return self.owners_of(first // page_size)

    def physical(self, pages: PageArray) -> PageArray:
        """The number of each logical page in its owner's pool."""
        return pages % self.pages

    def is_free(self, pages: PageArray) -> npt.NDArray[np.bool_]:
        """Which of these logical pages nobody holds."""
        return np.asarray(self._states[pages] == 0)
