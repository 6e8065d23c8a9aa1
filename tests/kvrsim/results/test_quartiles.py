"""Quartiles and the standard error of a median."""

from __future__ import annotations

import numpy as np
import pytest

from kvrsim.interp import interquartile_range, median_error, quartiles


def test_quartiles_interpolate() -> None:
    assert quartiles((5.0, 1.0, 2.0, 3.0, 4.0)) == (2.0, 3.0, 4.0)
    assert interquartile_range((5.0, 1.0, 2.0, 3.0, 4.0)) == 2.0
    assert interquartile_range((5.0,)) == median_error((5.0,)) == 0.0


def test_the_error_of_a_median_is_that_of_normal_values() -> None:
    draws = np.random.default_rng(0).normal(size=(2000, 101))
    expected = float(np.median(draws, axis=1).std())
    assert float(np.mean([median_error(row.tolist()) for row in draws])) == pytest.approx(expected, rel=0.05)
