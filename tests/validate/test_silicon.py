"""Scores of predictors on settings that known constants made."""

from __future__ import annotations

import numpy as np
import pytest

from tests.calibrate.engines.test_engines import made_up
from validate.silicon import coverage_left_out, score


def test_a_page_scores_any_predictor() -> None:
    settings = made_up()
    measured = settings.of("prefill_s").astype(float)
    lines = score(settings, {"right": measured, "double": 2 * measured, "some": np.where(measured > 0.1, np.nan, 1.0)})
    (whole,) = [line for line in lines if line.startswith("| all |")]
    assert whole.startswith(f"| all | {np.sum(measured <= 0.1)} | 0.0% | 100.0%")


def test_intervals_of_other_groups_hold_eight_of_ten() -> None:
    logs = np.random.default_rng(0).normal(0.0, 0.2, 4000)
    engines = np.arange(4000) % 2
    assert coverage_left_out(logs, np.arange(4000) % 5, engines) == pytest.approx(0.8, abs=0.02)
