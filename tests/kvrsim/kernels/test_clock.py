"""Work under load takes as long as the integral of a falling rate says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.kernels.profile import Clock

CLOCKS = st.builds(
    Clock,
    sustained_share=st.floats(min_value=0.05, max_value=1.0),
    time_constant_s=st.floats(min_value=1e-4, max_value=10),
)
WORK = st.lists(st.floats(min_value=0.0, max_value=1e4), min_size=1, max_size=8)


@given(clock=CLOCKS, work=WORK)
def test_the_integral_of_the_rate_is_the_work(clock: Clock, work: list[float]) -> None:
    busy = np.array(work)
    seconds = clock.stretched_s(busy)
    share, tau = clock.sustained_share, clock.time_constant_s
    done = share * seconds - (1 - share) * tau * np.expm1(-seconds / tau)
    assert done == pytest.approx(busy, rel=1e-9, abs=1e-15)


@given(clock=CLOCKS, work=WORK)
def test_more_work_takes_longer_and_none_beats_the_burst(clock: Clock, work: list[float]) -> None:
    busy = np.sort(np.array(work))
    seconds = clock.stretched_s(busy)
    assert (np.diff(seconds) >= -1e-9 * seconds[1:]).all()
    assert (seconds >= busy * (1 - 1e-12)).all()
    assert (seconds <= busy / clock.sustained_share * (1 + 1e-9)).all()


def test_short_work_is_at_the_burst_clock_and_long_work_at_the_sustained_one() -> None:
    clock = Clock(sustained_share=0.8, time_constant_s=0.1)
    short, long = clock.stretched_s(np.array([1e-5, 1e4]))
    assert short == pytest.approx(1e-5, rel=1e-4)
    assert long == pytest.approx((1e4 - 0.2 * 0.1) / 0.8)
    assert clock.stretched_s(np.zeros((2, 3))).shape == (2, 3)
    assert (clock.stretched_s(np.zeros(2)) == 0).all()
    assert Clock(sustained_share=1.0, time_constant_s=0.1).stretched_s(np.array([3.0])) == pytest.approx([3.0])
