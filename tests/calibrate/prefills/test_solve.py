"""Terms of an engine from measured times: recovered where rows identify them, else equal to the prior."""

from __future__ import annotations

import numpy as np
import pytest

from calibrate.prefills.solve import LEAST_NOISE, Array, Prior, solve

LENGTHS = np.array([128, 256, 512, 1024, 2048, 4096, 8192], dtype=float)
PRIORS = (
    Prior(name="request_s", median=0.005, log_sd=1.0),
    Prior(name="layer_s", median=1e-4, log_sd=1.0),
    Prior(name="kernel_scale", median=1.0, log_sd=0.1),
)
TRUTH = np.array([0.012, 6e-4, 1.06])


def slower(terms: Array, lengths: Array = LENGTHS) -> Array:
    """Seconds of a prefill: a constant plus the slower of the host (32 layers) and the device (20 us per token)."""
    return terms[0] + np.maximum(32 * terms[1], terms[2] * 2e-5 * lengths)


def test_a_known_engine_is_recovered() -> None:
    result = solve(slower, slower(TRUTH), PRIORS, range(7))
    assert result.values == pytest.approx(TRUTH, rel=0.03)
    assert np.all(result.narrowed < 0.25)
    assert result.after_s == pytest.approx(slower(TRUTH), rel=0.01)
    assert result.noise_log_sd < 1.5 * LEAST_NOISE


def test_left_out_means_a_fit_without_the_row() -> None:
    """The value for a left-out row equals that of a fit to the other rows alone."""
    rng = np.random.default_rng(2)
    noisy = slower(TRUTH) * np.exp(0.03 * rng.standard_normal(7))
    result = solve(slower, noisy, PRIORS, range(7))
    for row in (0, 3, 6):
        kept = np.arange(7) != row
        other = solve(lambda terms, kept=kept: slower(terms, LENGTHS[kept]), noisy[kept], PRIORS, range(6))
        assert result.left_out_s[row] == pytest.approx(slower(other.values)[row], rel=0.05)  # noise is estimated anew


def test_rows_of_one_case_are_left_out_together() -> None:
    lengths = np.repeat(LENGTHS[-1:], 4)
    seconds = slower(TRUTH, lengths)
    apart = solve(lambda terms: slower(terms, lengths), seconds, PRIORS, range(4))
    together = solve(lambda terms: slower(terms, lengths), seconds, PRIORS, [0, 0, 0, 0])
    assert apart.left_out_s == pytest.approx(seconds, rel=0.02)
    assert together.left_out_s == pytest.approx(together.before_s, rel=1e-3)


def test_a_term_that_no_row_shows_stays_at_the_prior() -> None:
    """With long prompts the device hides the time of the host."""
    lengths = np.array([8192.0, 16384.0])
    result = solve(lambda terms: slower(terms, lengths), slower(TRUTH, lengths), PRIORS, range(2))
    assert result.values[1] == pytest.approx(PRIORS[1].median, rel=1e-3)
    assert result.narrowed[1] == pytest.approx(1.0)
    assert result.narrowed[2] < 0.5


def test_a_host_that_the_prior_hides_is_found() -> None:
    """At the medians of the prior, layer_s has no effect on any row, so the derivative is zero."""
    lengths = np.array([1024.0, 2048.0, 4096.0])
    truth = np.array([0.005, 3e-3, 1.0])
    result = solve(lambda terms: slower(terms, lengths), slower(truth, lengths), PRIORS, range(3))
    assert result.values[1] == pytest.approx(3e-3, rel=0.1)


def test_an_outlier_moves_the_others_little() -> None:
    seconds = slower(TRUTH)
    seconds[3] *= 2.4
    result = solve(slower, seconds, PRIORS, range(7))
    others = np.arange(7) != 3
    assert result.after_s[others] == pytest.approx(slower(TRUTH)[others], rel=0.13)
