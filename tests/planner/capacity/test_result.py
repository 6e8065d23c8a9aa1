"""Confidence intervals of a percentile of TTFT."""

from __future__ import annotations

import numpy as np
import pytest

from kvrsim.interp import percentile_of
from planner.capacity.result import PercentileInterval


def test_the_interval_of_a_trace_holds_its_percentile_and_widens_with_fewer_requests() -> None:
    rng = np.random.default_rng(1)
    many, few = rng.exponential(1.0, 40_000), rng.exponential(1.0, 2_000)
    wide, narrow = (PercentileInterval.of_trace(one, 99, 0) for one in (few, many))
    for interval, values in ((wide, few), (narrow, many)):
        assert interval.low_s is not None
        assert interval.high_s is not None
        assert interval.low_s <= percentile_of(values, 99) <= interval.high_s
    assert narrow.high_s - narrow.low_s < wide.high_s - wide.low_s  # type: ignore[operator]
    assert PercentileInterval.of_trace(few[:50], 99, 0).low_s is None
    assert PercentileInterval.of_trace(np.append(few, [np.inf] * 500), 99, 0).low_s is None


def test_the_bootstrap_covers_as_often_as_it_says() -> None:
    true, covered = -np.log(0.05), 0
    for seed in range(120):
        interval = PercentileInterval.of_trace(np.random.default_rng(seed).exponential(1.0, 4000), 95, seed)
        assert interval.low_s is not None
        assert interval.high_s is not None
        covered += interval.low_s <= true <= interval.high_s
    assert 0.87 <= covered / 120 <= 1.0  # 95 %, within three standard errors of 120 trials, and bootstraps are short


def test_the_interval_of_replications_is_students() -> None:
    values = [np.full(100, value) for value in (1.0, 2.0, 3.0)]
    interval = PercentileInterval.of_replications(values, 99)
    assert interval.value_s == 3.0  # of all requests, as the fleet is judged
    assert interval.high_s == pytest.approx(2.0 + 4.3027 / np.sqrt(3), rel=1e-4)
    assert PercentileInterval.of_replications(values[:1], 99).low_s is None
    one_is_never_served = PercentileInterval.of_replications([*values, np.array([1.0, np.inf])], 90)
    assert one_is_never_served.value_s == 3.0
    assert one_is_never_served.high_s is None
