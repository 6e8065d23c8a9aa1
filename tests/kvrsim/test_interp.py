"""Interpolation, percentiles, quartiles and the standard error of a median."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.interp import cell, interquartile_range, log_interp, median_error, quartiles
from planner.percentile import percentile_of


def test_quartiles_interpolate() -> None:
    assert quartiles((5.0, 1.0, 2.0, 3.0, 4.0)) == (2.0, 3.0, 4.0)
    assert interquartile_range((5.0, 1.0, 2.0, 3.0, 4.0)) == 2.0
    assert interquartile_range((5.0,)) == median_error((5.0,)) == 0.0


def test_the_error_of_a_median_is_that_of_normal_values() -> None:
    draws = np.random.default_rng(0).normal(size=(2000, 101))
    expected = float(np.median(draws, axis=1).std())
    assert float(np.mean([median_error(row.tolist()) for row in draws])) == pytest.approx(expected, rel=0.05)


grids = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=8, unique=True).map(sorted)


@given(grids, st.data())
def test_log_interp_goes_through_its_points_and_stays_between_them(grid: list[float], data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(1e-6, 1e6), min_size=len(grid), max_size=len(grid)))
    assert log_interp(grid, grid, values) == pytest.approx(values)
    x = data.draw(st.floats(1e-3, 1e9))
    assert min(values) * (1 - 1e-9) <= float(log_interp(x, grid, values)) <= max(values) * (1 + 1e-9)
    low, share = cell(x, grid)
    if len(grid) > 1:
        assert grid[low] + float(share) * (grid[low + 1] - grid[low]) == pytest.approx(x)
    assert grid[0] <= x <= grid[-1] or len(grid) == 1 or not 0 <= float(share) <= 1


@given(st.lists(st.integers(0, 100), min_size=1, max_size=50), st.floats(0.1, 100))
def test_a_percentile_is_the_least_value_that_as_many_do_not_exceed(values: list[int], percent: float) -> None:
    result = percentile_of(values, percent)
    assert sum(value <= result for value in values) >= percent / 100 * len(values) - 1e-6
    assert all(sum(value <= less for value in values) < percent / 100 * len(values) for less in values if less < result)
    assert percentile_of([*values, math.inf], 100) == math.inf
