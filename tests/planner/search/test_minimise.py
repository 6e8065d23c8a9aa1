"""Boundaries on a grid: as chunks, and around a centre."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.search.minimise import around, chunks_between, distinct, rounded, valid


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, list[float]]:
    """Number of ranks, a stride, at least ranks x stride tokens, and real-valued chunks."""
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
    assert (distinct(found, stride, tokens) == found).all()  # valid boundaries do not change


@given(st.integers(1, 6), st.integers(1, 64), st.integers(100, 4096))
def test_neighbours_are_within_two_strides(count: int, stride: int, tokens: int) -> None:
    center = np.arange(1, count + 1) * (tokens // (count + 1))
    rows = around(center, stride, tokens)
    assert valid(rows, tokens).all()
    assert (abs(rows - center) <= 2 * stride).all()
    assert (rows == center).all(axis=1).any()
