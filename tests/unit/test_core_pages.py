"""Page arithmetic: which pages of the two sides pair, by absolute position."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.ids import PageArray
from app.core.pages import (
    as_pages,
    destination_pages,
    destination_row,
    floor_to_page,
    missing_positions,
    pages_for,
    require_equal_counts,
    slice_positions,
    suffix_rows,
    summary,
)
from app.errors import BadInput, PageMismatch

PAGE = 64


def pages(*numbers: int) -> PageArray:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.contract(93, 94)
def test_unequal_counts_are_refused_with_summaries() -> None:
    """Source and destination lists of different lengths raise, and the message shows both compactly."""
    source, destination = np.arange(100, 400, dtype=np.int64), pages(7, 8, 40)
    with pytest.raises(PageMismatch) as caught:
        require_equal_counts(source, destination)
    assert caught.value.message == ("source has 300 pages, destination 3: [100..399] (300) -> [7..8, 40] (3)")
    require_equal_counts(source, source[::-1])


def test_a_summary_stays_short() -> None:
    """A list of many scattered pages is summed up in a few runs and its length."""
    scattered = list(range(0, 2000, 2))
    assert summary(scattered) == "[0, 2, 4, ..., 1996, 1998] (1000)"
    assert summary([]) == "[] (0)"
    assert summary([5, 6, 7, 9]) == "[5..7, 9] (4)"


@pytest.mark.case("C1")
def test_positions_are_absolute() -> None:
    """With 31 of 32 pages already at decode, position 31 goes to decode's first missing page."""
    local, wanted = np.arange(500, 532, dtype=np.int64), pages(77)
    target = destination_pages(wanted, prompt_tokens=2048, first_position=31, page_size=PAGE)
    assert missing_positions(2048, 31, PAGE) == 1
    assert slice_positions(local, 0, 31, 32).tolist() == [531]
    assert slice_positions(target, 31, 31, 32).tolist() == [77]


@pytest.mark.case("C3")
def test_a_later_start_takes_the_later_pages() -> None:
    """Decode asks for the last two of four pages: c and d go, not a and b."""
    a_b_c_d = pages(10, 20, 30, 40)
    assert slice_positions(a_b_c_d, 0, 2, 4).tolist() == [30, 40]


@pytest.mark.contract(99)
@pytest.mark.case("C4")
def test_the_row_that_is_received_is_the_delta() -> None:
    """Prefix pages [5,9] and delta pages [11,12] for 128 + 66 tokens: the destination is [11,12]."""
    assert destination_row(pages(5, 9), pages(11, 12), 128, PAGE).tolist() == [11, 12]
    with pytest.raises(PageMismatch, match="source has 3 pages, destination 2"):
        destination_row(pages(5, 9, 10), pages(11, 12), 128, PAGE)
    with pytest.raises(PageMismatch, match="page grid, not at token 100"):
        destination_row(pages(5, 9), pages(11, 12), 100, PAGE)


@pytest.mark.contract(99)
def test_suffix_rows_begin_after_the_prefix() -> None:
    """A prefix of 128 and an extension of 64 tokens are the rows 128..191."""
    rows = suffix_rows(128, 64)
    assert (rows[0], rows[-1], len(rows)) == (128, 191, 64)
    with pytest.raises(BadInput, match="negative lengths: -1, 64"):
        suffix_rows(-1, 64)


@pytest.mark.case("C7")
def test_a_lookahead_page_receives_nothing() -> None:
    """128 tokens and a list of three pages, one of them look-ahead: two pairs move."""
    three = pages(4, 5, 6)
    found = destination_pages(three, prompt_tokens=128, first_position=0, page_size=PAGE, lookahead=1)
    assert found.tolist() == [4, 5]


@pytest.mark.case("C8")
def test_a_sampled_token_adds_no_prompt_page() -> None:
    """128 prompt tokens are two pages at both ends; a third one that nobody announced is an error."""
    assert pages_for(128, PAGE) == 2
    with pytest.raises(PageMismatch) as caught:
        destination_pages(pages(4, 5, 6), prompt_tokens=128, first_position=0, page_size=PAGE)
    assert caught.value.message == (
        "128 tokens from position 0 need 2 pages and 0 look-ahead, the destination has 3: [4..6] (3)"
    )
    assert destination_pages(pages(4, 5), prompt_tokens=128, first_position=0, page_size=PAGE).tolist() == [
        4,
        5,
    ]


@pytest.mark.parametrize(("first", "start", "stop"), [(2, 1, 3), (0, 3, 5), (0, 3, 2)])
def test_a_slice_outside_the_list_is_refused(first: int, start: int, stop: int) -> None:
    """Positions before, behind or in reverse of what the list holds raise instead of being clipped."""
    with pytest.raises(PageMismatch, match=f"positions {start}..{stop} are outside {first}..{first + 4}"):
        slice_positions(pages(1, 2, 3, 4), first, start, stop)


def test_missing_positions_stay_inside_the_prompt() -> None:
    """A receiver cannot lack pages from behind the prompt's last one."""
    assert missing_positions(130, 3, PAGE) == 0
    with pytest.raises(PageMismatch, match=r"first missing position 4 is outside 0\.\.3"):
        missing_positions(130, 4, PAGE)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([3, -1], "negative page number: -1"),
        ([3, 4, 3], "a page stands twice in"),
        (np.zeros((2, 2), np.int64), "one dimension, not 2"),
    ],
)
def test_page_lists_are_validated(bad: object, message: str) -> None:
    """Negative, repeated and nested page numbers are refused."""
    with pytest.raises(BadInput, match=message):
        as_pages(bad)  # type: ignore[arg-type]


def test_rounding_to_pages() -> None:
    """Padded lengths round up, floors round down, and a negative length is refused."""
    assert [pages_for(n, PAGE) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
    assert [floor_to_page(n, PAGE) for n in (0, 63, 64, 130)] == [0, 0, 64, 128]
    with pytest.raises(BadInput, match="negative token count: -1"):
        pages_for(-1, PAGE)
