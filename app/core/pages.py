"""Page arithmetic: how tokens, pages and positions relate, and which pages pair with which.

A position is a page's place in the prompt, counted from its first token. Source and destination are
always aligned by absolute position, never by counting from the tail: the two sides may hold different
prefixes, and a count from the tail then shifts every page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from app.core.ids import PageArray
from app.errors import BadInput, PageMismatch


def as_pages(pages: Iterable[int]) -> PageArray:
    """One-dimensional int64 array; BadInput on negative or repeated page numbers."""
    array: PageArray = np.asarray(list(pages) if not isinstance(pages, np.ndarray) else pages, dtype=np.int64)
    if array.ndim != 1:
        raise BadInput(f"a page list has one dimension, not {array.ndim}")
    if array.size and int(array.min()) < 0:
        raise BadInput(f"negative page number: {int(array.min())}")
    if np.unique(array).size != array.size:
        raise BadInput(f"a page stands twice in {summary(array)}")
    return array


def pages_for(tokens: int, page_size: int) -> int:
    """Whole pages that hold `tokens` tokens (the padded length in pages)."""
    if tokens < 0:
        raise BadInput(f"negative token count: {tokens}")
    return -(-tokens // page_size)


def floor_to_page(tokens: int, page_size: int) -> int:
    return tokens // page_size * page_size


def summary(pages: Sequence[int] | PageArray) -> str:
    """Compact text of a page list: runs and the count, short enough for a log line."""
    runs: list[str] = []
    start = previous = None
    for page in [*map(int, pages), None]:
        if previous is not None and page != previous + 1:
            runs.append(f"{start}" if start == previous else f"{start}..{previous}")
            start = None
        if start is None:
            start = page
        previous = page
    shown = runs if len(runs) <= 6 else [*runs[:3], "...", *runs[-2:]]
    return f"[{', '.join(shown)}] ({len(pages)})"


def stretches(positions: PageArray) -> tuple[tuple[int, int], ...]:
    """Ascending positions as (first, count) of each unbroken stretch."""
    if not len(positions):
        return ()
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    parts = np.split(positions, breaks)
    return tuple((int(part[0]), len(part)) for part in parts)


def require_tiling(parts: Iterable[Iterable[tuple[int, int]]], first: int, stop: int) -> None:
    """PageMismatch unless the stretches of all ranks together are first..stop, each position once."""
    at = first
    for start, count in sorted(stretch for part in parts for stretch in part):
        if start != at:
            kind = "in no rank's part" if start > at else "in the parts of two ranks"
            raise PageMismatch(f"position {min(start, at)} is {kind}; {first}..{stop} were to come")
        at += count
    if at != stop:
        raise PageMismatch(f"the ranks' parts end at position {at}, {first}..{stop} were to come")


def require_equal_counts(source: PageArray, destination: PageArray) -> None:
    """PageMismatch unless both lists are equally long. A shared rule: no path truncates."""
    if len(source) != len(destination):
        raise PageMismatch(
            f"source has {len(source)} pages, destination {len(destination)}: "
            f"{summary(source)} -> {summary(destination)}"
        )


def missing_positions(prompt_tokens: int, first_position: int, page_size: int) -> int:
    """How many pages a receiver lacks that already holds the positions below `first_position`."""
    total = pages_for(prompt_tokens, page_size)
    if not 0 <= first_position <= total:
        raise PageMismatch(f"first missing position {first_position} is outside 0..{total}")
    return total - first_position


def destination_pages(
    pages: PageArray, *, prompt_tokens: int, first_position: int, page_size: int, lookahead: int = 0
) -> PageArray:
    """The destination of the positions `first_position`.. of a prompt.

    `lookahead` counts pages that the receiver took for tokens that it will generate: they stand last and
    nothing is sent to them. Any other length is a PageMismatch.
    """
    needed = missing_positions(prompt_tokens, first_position, page_size)
    if len(pages) != needed + lookahead:
        raise PageMismatch(
            f"{prompt_tokens} tokens from position {first_position} need {needed} pages and {lookahead} "
            f"look-ahead, the destination has {len(pages)}: {summary(pages)}"
        )
    return pages[:needed]


def slice_positions(pages: PageArray, first_position: int, start: int, stop: int) -> PageArray:
    """Pages of the positions start..stop out of a list whose first entry has `first_position`."""
    low, high = start - first_position, stop - first_position
    if not 0 <= low <= high <= len(pages):
        raise PageMismatch(
            f"positions {start}..{stop} are outside {first_position}..{first_position + len(pages)}"
        )
    return pages[low:high]


def destination_row(prefix: PageArray, delta: PageArray, prefix_tokens: int, page_size: int) -> PageArray:
    """The part of a page row (prefix then delta) that has to be received: the delta, whole pages only."""
    if prefix_tokens % page_size:
        raise PageMismatch(f"a reused prefix ends on the page grid, not at token {prefix_tokens}")
    require_equal_counts(prefix, np.arange(prefix_tokens // page_size, dtype=np.int64))
    return delta


def suffix_rows(prefix_tokens: int, extend_tokens: int) -> range:
    """Token rows that decode receives beside a prefix it holds (prefix 128, extend 64: 128..191)."""
    if prefix_tokens < 0 or extend_tokens < 0:
        raise BadInput(f"negative lengths: {prefix_tokens}, {extend_tokens}")
    return range(prefix_tokens, prefix_tokens + extend_tokens)
