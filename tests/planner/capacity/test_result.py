"""Confidence intervals of a percentile of TTFT."""

from __future__ import annotations

import numpy as np
import pytest

from kvrsim.interp import percentile_of
from planner.capacity.result import replications_interval, trace_interval


def test_the_interval_of_a_trace_holds_its_percentile_and_widens_with_fewer_requests() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for values in (rng.exponential(1.0, 40_000), few := rng.exponential(1.0, 2_000)):
        low_s, high_s = trace_interval(values, 99, 0)
        assert low_s is not None
        assert high_s is not None
        assert low_s <= percentile_of(values, 99) <= high_s
        widths.append(high_s - low_s)
    assert widths[0] < widths[1]
    assert trace_interval(few[:50], 99, 0) == (None, None)
    assert trace_interval(np.append(few, [np.inf] * 500), 99, 0) == (None, None)


@pytest.mark.slow
def test_the_bootstrap_covers_as_often_as_it_says() -> None:
    true, covered = -np.log(0.05), 0
    for seed in range(120):
        low_s, high_s = trace_interval(np.random.default_rng(seed).exponential(1.0, 4000), 95, seed)
        assert low_s is not None
        assert high_s is not None
        covered += low_s <= true <= high_s
    assert 0.87 <= covered / 120 <= 1.0  # 95 %, within three standard errors of 120 trials, and bootstraps are short


def test_the_interval_of_replications_is_students() -> None:
    values = [np.full(100, value) for value in (1.0, 2.0, 3.0)]
    assert replications_interval(values, 99)[1] == pytest.approx(2.0 + 4.3027 / np.sqrt(3), rel=1e-4)
    assert replications_interval(values[:1], 99) == (None, None)
    one_is_never_served = [*values, np.array([1.0, np.inf])]
    assert replications_interval(one_is_never_served, 90) == (None, None)
