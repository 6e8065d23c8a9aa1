"""Boundaries on a grid, as chunks, and around a centre."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.search.minimise import (
    around,
    chunks_between,
    combinations,
    distinct,
    rounded,
    shifts,
    unique_rows,
    valid,
)
from tests.building import examples


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, list[float]]:
    """Ranks, a stride and tokens with room for a multiple a boundary, and real-valued chunks of any size."""
    ranks = draw(st.integers(2, 9))
    stride = draw(st.integers(1, 64))
    tokens = draw(st.integers(ranks * stride, 4096))
    return ranks, stride, tokens, draw(st.lists(st.floats(0.0, tokens), min_size=ranks, max_size=ranks))


@given(cuts())
def test_rounding_leaves_every_chunk_a_token(cut: tuple[int, int, int, list[float]]) -> None:
    ranks, stride, tokens, chunks = cut
    found = rounded(np.array(chunks), stride, tokens)
    assert valid(found[None], tokens).all()
    assert (found % stride == 0).all()
    assert chunks_between(found, tokens).sum() == tokens
    assert len(chunks_between(found, tokens)) == ranks
    assert (distinct(found, stride, tokens) == found).all()  # what is right stays


@given(st.integers(1, 6), st.integers(1, 64), st.integers(100, 4096))
def test_neighbours_are_within_two_strides(count: int, stride: int, tokens: int) -> None:
    center = np.arange(1, count + 1) * (tokens // (count + 1))
    rows = around(center, stride, tokens)
    assert valid(rows, tokens).all()
    assert (abs(rows - center) <= 2 * stride).all()
    assert (rows == center).all(axis=1).any()


@given(st.integers(1, 4), st.integers(0, 400), st.integers(1, 400))
def test_shifts_come_in_blocks(count: int, first: int, size: int) -> None:
    everything = shifts(count)
    assert len(np.unique(everything, axis=0)) == combinations(count)
    assert (shifts(count, first, first + size) == everything[first : first + size]).all()


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=9))
@examples(20)
def test_unique_rows_are_numpys(rows: list[list[int]]) -> None:
    assert unique_rows(np.array(rows)).tolist() == np.unique(rows, axis=0).tolist()
    flat = np.array([row[0] for row in rows])
    assert unique_rows(flat).tolist() == np.unique(flat).tolist()
