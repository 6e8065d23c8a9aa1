"""Confidence intervals of a percentile of TTFT."""

from __future__ import annotations

import numpy as np
import pytest

from planner.capacity.result import replications_interval, trace_interval
from planner.percentile import percentile_of


def test_the_interval_of_a_trace_holds_its_percentile_and_widens_with_fewer_requests() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for values in (rng.exponential(1.0, 40_000), few := rng.exponential(1.0, 2_000)):
        ends = trace_interval(values, 99, 0)
        assert ends is not None
        low_s, high_s = ends
        assert low_s <= percentile_of(values, 99) <= high_s
        widths.append(high_s - low_s)
    assert widths[0] < widths[1]
    assert trace_interval(few[:50], 99, 0) is None
    assert trace_interval(np.append(few, [np.inf] * 500), 99, 0) is None


def test_the_bootstrap_covers_as_often_as_it_says() -> None:
    true = -np.log(0.05)
    rows = np.random.default_rng(0).exponential(1.0, (120, 4000))
    covered = [low_s <= true <= high_s for low_s, high_s in filter(None, (trace_interval(row, 95, 0) for row in rows))]
    assert 0.67 <= np.mean(covered) <= 0.93  # 80 % within three and a half standard errors of 120 trials


def test_the_interval_of_replications_is_students() -> None:
    values = [np.full(100, value) for value in (1.0, 2.0, 3.0)]
    assert replications_interval(values, 99)[1] == pytest.approx(2.0 + 1.8856 / np.sqrt(3), rel=1e-4)
    assert replications_interval(values[:1], 99) is None
    one_is_never_served = [*values, np.array([1.0, np.inf])]
    assert replications_interval(one_is_never_served, 90) is None
