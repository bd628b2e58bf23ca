"""Page plans as arrays: token groups to pages, pages to token slots, runs to addresses.

Everything here takes arrays of the host. An array of a device is refused by looking at where it lies, never by
reading it: a copy to the host would wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from app import _native
from app.core.ids import PageArray
from app.core.runs import Runs
from app.errors import BadInput

TokenArray = npt.NDArray[np.int64]


class Term(NamedTuple):
    """One layer of one buffer at both ends: addresses of its page 0, bytes of a page, pages of the pools."""

    name: str
    source_base: int
    destination_base: int
    item_bytes: int
    source_pages: int
    destination_pages: int


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """What to copy: parallel arrays of addresses and bytes, all runs of a term after another."""

    source: npt.NDArray[np.int64]
    destination: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.length)


def require_host(array: Any) -> None:
    """BadInput when an array lies on a device; reads nothing of it."""
    device = getattr(array, "device", "cpu")
    if getattr(device, "type", device) != "cpu":
        raise BadInput(f"page plans take arrays of the host, not of {device}")


def pages_of_groups(tokens: TokenArray, page_size: int, pages: int) -> PageArray:
    """The page of each group of `page_size` token indices, in the caller's order.

    BadInput, naming the value, on a group that is partial, off the page grid or not contiguous, on a page
    outside 0..pages and on a page that stands in two groups.
    """
    require_host(tokens)
    return _native.pages_of_groups(tokens, page_size, pages)


def slots_of_pages(pages: PageArray, page_size: int, tokens: int | None = None) -> TokenArray:
    """Token indices of pages in their order: the first `tokens` of them, or of whole pages by default.

    BadInput unless `tokens` need exactly these pages: the slots behind a valid tail are never handed out.
    """
    require_host(pages)
    return _native.slots_of_pages(pages, page_size, len(pages) * page_size if tokens is None else tokens)


def plan_addresses(terms: Sequence[Term], runs: Runs) -> Addresses:
    """Addresses that copy `runs` of each term. PageMismatch, naming page and buffer, outside a pool."""
    source, destination, length = _native.plan_addresses(terms, runs.source, runs.destination, runs.count)
    return Addresses(source=source, destination=destination, length=length)
