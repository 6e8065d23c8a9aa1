"""Steady state: when all times advance alike, and which layers repeat."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.executors.steady import periods_of, steady_advance
from kvrsim.program import Array, Compute, Program
from tests.building import examples

STATES = [np.array([[0.0], [1.0]]), np.array([[2.0], [3.0]]), np.array([[4.0], [5.0]])]


@pytest.mark.parametrize(
    ("states", "issued_s", "advance_s"),
    [
        (STATES, 2.0, 2.0),
        (STATES, 2.1, None),  # the host delays the next period
        (STATES[:2], 0.0, None),
        ([*STATES[:2], STATES[1]], 0.0, None),  # the advances differ
        ([*STATES[:2], STATES[2] + [[0.0], [0.1]]], 0.0, None),  # one rank is later
    ],
)
def test_an_advance(states: list[Array], issued_s: float, advance_s: float | None) -> None:
    advances_s = steady_advance(states, issued_s)
    assert (None if advances_s is None else advances_s.item()) == advance_s


@given(parts=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(1, 9)), max_size=3))
@examples(100)
def test_periods_give_the_layers_again(parts: list[tuple[list[int], int]]) -> None:
    """No period of at most three layers that repeats five times or more is missed."""
    kinds = tuple(kind for period, times in parts for kind in period * times)
    none = ((Compute(name="work", device_s=np.ones(1)),),)
    program = Program(strategy="test", prologue=none, layers=(none,) * 3, layer_kind_index=kinds, epilogue=none)
    periods = periods_of(program)
    assert tuple(kind for period, times in periods for kind in period * times) == kinds
    if len(parts) == 1 and parts[0][1] >= 5:
        assert len(periods) <= 2
        assert len(parts[0][0]) % len(periods[0][0]) == 0
