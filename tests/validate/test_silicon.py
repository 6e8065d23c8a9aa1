"""Scores of predictors on settings that known constants made."""

from __future__ import annotations

import numpy as np
import pytest

from tests.calibrate.engines.test_engines import made_up
from validate.silicon import constant_half_widths, score


def test_a_page_scores_any_predictor() -> None:
    settings = made_up()
    measured = settings.of("prefill_s").astype(float)
    lines = score(settings, {"right": measured, "double": 2 * measured, "some": np.where(measured > 0.1, np.nan, 1.0)})
    (whole,) = [line for line in lines if line.startswith("| all |")]
    assert whole.startswith(f"| all | {np.sum(measured <= 0.1)} | 0.0% | 100.0%")


def test_intervals_of_other_groups_hold_eight_of_ten() -> None:
    logs = np.random.default_rng(0).normal(0.0, 0.2, 4000)
    engines = np.arange(4000) % 2
    half_widths = constant_half_widths(logs, np.arange(4000) % 5, engines)
    assert np.mean(np.abs(logs) <= half_widths) == pytest.approx(0.8, abs=0.02)


def test_a_wider_engine_has_wider_intervals() -> None:
    """An engine takes the errors of all if its own are smaller."""
    logs = np.random.default_rng(0).normal(0.0, 0.2, 4000)
    engines = np.arange(4000) % 2
    half_widths = constant_half_widths(np.where(engines == 0, 3, 1) * logs, np.arange(4000) % 5, engines)
    assert half_widths[engines == 0].min() > 1.2 * half_widths[engines == 1].max()
    assert np.mean(np.abs(logs[engines == 1]) <= half_widths[engines == 1]) > 0.9
