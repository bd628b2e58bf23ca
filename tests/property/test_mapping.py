"""Chunks, owners, groups and runs over any prompt."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.chunks import plan_chunks
from app.core.groups import plan_groups
from app.core.owners import owned, rank_positions
from app.core.pages import pages_for
from app.core.runs import coalesce

_QUICK = settings(max_examples=80, deadline=None)


@pytest.mark.contract(97)
@_QUICK
@given(
    tokens=st.integers(1, 3000),
    chunk_tokens=st.integers(1, 700),
    page_size=st.sampled_from([1, 16, 64]),
    ranks=st.integers(1, 8),
    data=st.data(),
)
def test_every_wanted_position_is_sent_once_by_its_owner(
    tokens: int, chunk_tokens: int, page_size: int, ranks: int, data: st.DataObject
) -> None:
    """Over all chunks and ranks each wanted position is sent once, by the same rank for every chunking."""
    total = pages_for(tokens, page_size)
    first = data.draw(st.integers(0, total))
    cached = data.draw(st.integers(0, tokens - 1))
    plans = plan_chunks(
        tokens, page_size=page_size, chunk_tokens=chunk_tokens, cached_tokens=cached, first_position=first
    )
    whole = np.arange(total, dtype=np.int64)
    sent: dict[int, int] = {}
    for plan, rank in itertools.product(plans, range(ranks)):
        mine = rank_positions(total, rank, ranks)
        pages, at = owned(whole[plan.first_page : plan.last_page], plan.first_page, mine)
        for position in range(at, at + len(pages)):
            assert position not in sent
            assert position in mine
            sent[position] = rank
    assert sorted(sent) == list(range(first, total))


@pytest.mark.contract(95)
@_QUICK
@given(
    total=st.integers(0, 300), first=st.integers(0, 320), count=st.integers(0, 300), ranks=st.integers(1, 9)
)
def test_the_owner_filter_is_a_membership_test(total: int, first: int, count: int, ranks: int) -> None:
    """For every rank, the filter and a test of each position against the rank's set agree."""
    pages = np.arange(5000, 5000 + count, dtype=np.int64)
    for rank in range(ranks):
        mine = rank_positions(total, rank, ranks)
        members = set(mine)
        found, _ = owned(pages, first, mine)
        assert found.tolist() == [5000 + i for i in range(count) if first + i in members]


@pytest.mark.contract(117)
@_QUICK
@given(layers=st.integers(0, 100), size=st.integers(1, 20), taper=st.booleans())
def test_groups_hold_every_layer_once_in_order(layers: int, size: int, taper: bool) -> None:
    """Groups tile the layers, none exceeds the size, and a tapered plan never grows toward its end."""
    groups = plan_groups(range(layers), size, taper=taper)
    assert [layer for g in groups for layer in g] == list(range(layers))
    sizes = [len(g) for g in groups]
    assert all(1 <= n <= size for n in sizes)
    assert sizes == sorted(sizes, reverse=True)
    if not taper:
        assert len(groups) == -(-layers // size)


@_QUICK
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_runs_expand_to_the_pairs(pairs: list[tuple[int, int]]) -> None:
    """Expanding the runs gives the pairs back in order, and no two neighbouring runs could be merged."""
    source = np.array([s for s, _ in pairs], dtype=np.int64)
    destination = np.array([d for _, d in pairs], dtype=np.int64)
    runs = coalesce(source, destination)
    listed = list(zip(runs.source.tolist(), runs.destination.tolist(), runs.count.tolist(), strict=True))
    assert [(s + i, d + i) for s, d, n in listed for i in range(n)] == pairs
    for (s, d, n), (s2, d2, _) in itertools.pairwise(listed):
        assert (s + n, d + n) != (s2, d2)
    assert runs.pages == len(pairs)
