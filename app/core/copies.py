"""Copies between page lists of host memory.

A layer's pages are uint8 [pages, item_bytes]; any strides will do as long as the bytes of an item lie
together, so a layer of a page-first pool is as good as one of a layer-first pool. The interpreter lock is
released while bytes move: nobody may write to the source or touch the destination until the call returns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from app import _native
from app.core.ids import PageArray

Layer = npt.NDArray[np.uint8]
"""uint8 [pages, item_bytes]."""


def move_pages(source: Layer, pages: PageArray, destination: Layer, to: PageArray) -> None:
    """Page pages[i] of `source` to page to[i] of `destination`; both may be the same pool.

    PageMismatch on lists or items of unequal size. BadInput on a foreign page, a destination that stands
    twice and bytes that would be both read and written. Nothing has moved when it raises.
    """
    _native.copy_pages(source, _indices(pages), destination, _indices(to))


def gather(source: Layer, pages: PageArray, rows: Layer) -> None:
    """The listed pages into consecutive rows. Errors as `move_pages`, and there must be a row for each."""
    _native.copy_pages(source, _indices(pages), rows, np.arange(len(rows), dtype=np.int64))


def scatter(rows: Layer, destination: Layer, pages: PageArray) -> None:
    """Consecutive rows into the listed pages. Errors as `move_pages`, and there must be a page for each."""
    _native.copy_pages(rows, np.arange(len(rows), dtype=np.int64), destination, _indices(pages))


def _indices(pages: PageArray) -> PageArray:
    return np.ascontiguousarray(pages, dtype=np.int64)
