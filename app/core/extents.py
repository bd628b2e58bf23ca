"""The L2 page allocator: free pages as extents, contiguous pages preferred, reservations that roll back.

free extents   [2..5) [9..10) [16..40)
allocate 3     -> the smallest extent that fits whole: 2,3,4
allocate 26    -> the largest extents first, which needs the fewest runs; the rest from the smallest that fits
reserve        -> the same, under the number of its holder; commit keeps the pages, roll_back frees them all

The extents are native (csrc/include/kvferry/extents.hpp). A caller that copies page by page wants `allocate`;
one that keeps the pages of a node, or copies run by run, wants `allocate_runs`, whose size does not grow with
the pages.
"""

from __future__ import annotations

from app import _native


class PageExtents(_native.PageExtents):
    """Hands out the pages 0..pages-1. Not thread-safe: one task decides.

    `allocate`, `allocate_runs` and `reserve` give None, and change nothing, when too few pages are free. What
    can never be had (no page, or more than there are) is BadInput, and so is giving back a page that is
    foreign, named twice, free or reserved: the call then frees nothing.

    `free_slots` (page numbers, ascending) and `free_extents` are for readers: they walk over the pool, which no
    allocation does.
    """
