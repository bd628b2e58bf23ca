"""Chunk plans: what each forward computes and which positions it sends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from app.core.chunks import chunk_page_start, plan_chunks
from app.core.owners import owned, rank_positions
from app.core.pages import floor_to_page, pages_for, slice_positions
from app.errors import BadInput

PAGE = 64


@pytest.mark.contract(96)
def test_a_send_starts_on_the_page_grid() -> None:
    """The first position of a send is its page-aligned token divided by the page size."""
    assert chunk_page_start(8192, PAGE) == 128
    with pytest.raises(BadInput, match="starts on the page grid, not at token 100"):
        chunk_page_start(100, PAGE)


@pytest.mark.case("C6")
def test_a_half_filled_page_waits_for_its_chunk() -> None:
    """130 tokens in chunks of 100: chunk 0 sends page 0, the last chunk sends pages 1 and 2."""
    destination = np.array([40, 7, 19], dtype=np.int64)
    first, last = plan_chunks(130, page_size=PAGE, chunk_tokens=100)
    assert (first.start, first.end, last.start, last.end) == (0, 100, 100, 130)
    assert slice_positions(destination, 0, first.first_page, first.last_page).tolist() == [40]
    assert slice_positions(destination, 0, last.first_page, last.last_page).tolist() == [7, 19]
    assert (first.is_last, last.is_last) == (False, True)


@pytest.mark.contract(98)
def test_a_last_chunk_without_pages_is_still_a_chunk() -> None:
    """When decode holds every page, one last chunk remains: it sends no page and carries the metadata."""
    (only,) = plan_chunks(128, page_size=PAGE, chunk_tokens=512, first_position=2)
    assert (only.pages, only.is_last, only.tokens) == (0, True, 128)


@pytest.mark.contract(121)
@pytest.mark.parametrize("chunk_tokens", [1, 63, 64, 65, 100, 128, 1000])
@pytest.mark.parametrize("cached_tokens", [0, 64, 100, 191])
@pytest.mark.parametrize("first_position", [0, 1, 3])
def test_the_registered_range_is_what_the_chunk_sends(
    chunk_tokens: int, cached_tokens: int, first_position: int
) -> None:
    """Ranges tile the wanted positions in order, and a chunk that is not the last ends on a full page."""
    tokens = 200
    plans = plan_chunks(
        tokens,
        page_size=PAGE,
        chunk_tokens=chunk_tokens,
        cached_tokens=cached_tokens,
        first_position=first_position,
    )
    assert [p.start for p in plans] == [cached_tokens, *(p.end for p in plans[:-1])]
    assert plans[-1].end == tokens
    assert [p.is_last for p in plans] == [False] * (len(plans) - 1) + [True]
    assert plans[0].first_page == first_position
    assert plans[-1].last_page == pages_for(tokens, PAGE)
    for before, after in itertools.pairwise(plans):
        assert before.last_page == after.first_page
        assert before.last_page == max(floor_to_page(before.end, PAGE) // PAGE, first_position)


def test_a_cached_prefix_is_sent_by_the_first_chunk() -> None:
    """Tokens that are not forwarded are sent all the same: decode lacks them."""
    first, second = plan_chunks(300, page_size=PAGE, chunk_tokens=100, cached_tokens=128)
    assert (first.start, first.first_page, first.last_page) == (128, 0, 3)
    assert (second.first_page, second.last_page) == (3, 5)


@pytest.mark.parametrize(
    ("prompt", "chunk", "cached", "message"),
    [
        (0, 64, 0, "cannot cut 0 tokens into chunks of 64"),
        (10, 0, 0, "cannot cut 10 tokens into chunks of 0"),
        (10, 64, 10, "cached prefix of 10 in a prompt of 10 tokens"),
        (10, 64, -1, "cached prefix of -1"),
    ],
)
def test_senseless_cuts_are_refused(prompt: int, chunk: int, cached: int, message: str) -> None:
    """An empty prompt, an empty chunk and a wholly cached prompt raise: a logit is always computed."""
    with pytest.raises(BadInput, match=message):
        plan_chunks(prompt, page_size=PAGE, chunk_tokens=chunk, cached_tokens=cached)


@pytest.mark.contract(97)
@pytest.mark.parametrize("chunk_tokens", [64, 100, 512, 4096, 10_000])
@pytest.mark.parametrize("tokens", [1, 130, 2048, 8192 + 65])
def test_the_union_over_chunks_and_ranks_is_the_whole_mapping(tokens: int, chunk_tokens: int) -> None:
    """For the eight ranks of CP 8 all chunks' pairs make the whole request's mapping, each pair once."""
    total = pages_for(tokens, PAGE)
    random = np.random.default_rng(tokens)
    source, destination = random.permutation(total), random.permutation(total) + 1000
    plans = plan_chunks(tokens, page_size=PAGE, chunk_tokens=chunk_tokens)
    sent: list[tuple[int, int, int]] = []
    for plan, rank in itertools.product(plans, range(8)):
        mine = rank_positions(total, rank, 8)
        from_pages, at = owned(
            slice_positions(source, 0, plan.first_page, plan.last_page), plan.first_page, mine
        )
        to_pages, _ = owned(
            slice_positions(destination, 0, plan.first_page, plan.last_page), plan.first_page, mine
        )
        assert all(position in mine for position in range(at, at + len(from_pages)))
        sent += [(plan.index, s, d) for s, d in zip(from_pages.tolist(), to_pages.tolist(), strict=True)]
    assert sorted(pair[1:] for pair in sent) == sorted(
        zip(source.tolist(), destination.tolist(), strict=True)
    )
    of_first = {d for chunk, _, d in sent if chunk == 0}
    assert of_first.isdisjoint(d for chunk, _, d in sent if chunk == 1)
