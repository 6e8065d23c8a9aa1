"""Quantised products have rates of their own; products too fast for random data are refused; decoding is compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibrate.data import Measurement
from calibrate.fit.attention import fit_flash
from kvrsim.errors import InputError
from kvrsim.kernels.gemm import GEMM_TYPES, Product
from tests.calibrate.fit.test_fit import A100, FLASH, GEMM, H100, fit, gemm_rows, timed


def test_products_that_no_random_data_reach_are_refused() -> None:
    """At 280 of 312 TFLOP/s and with starts it is 88 %; a tenth faster is too fast."""
    faster = [replace(one, median_s=one.median_s / 1.1) for one in gemm_rows()]
    fit([*gemm_rows(), *timed(FLASH)])
    with pytest.raises(InputError, match=r"9\d% of the datasheet of a100-80gb', accepted: products of random data"):
        fit([*faster, *timed(FLASH)])


def test_quantised_products_have_rates_of_their_own() -> None:
    """FP8 at twice the rate, with the pass that quantises; types with few rows, or that the GPU lacks, have none."""
    width, double = GEMM_TYPES["fp8"], replace(GEMM, flops_per_s=560e12, concurrent_tiles=132)

    def eighth(one: Measurement) -> Measurement:
        tokens, product = float(one.tokens or 0), Product(one.in_features or 0, one.out_features or 0)
        return replace(one, dtype="fp8", median_s=float(double.form_s(np.array(tokens), product, width)))

    eighths = list(map(eighth, gemm_rows() * 2))
    rows = [*gemm_rows(), *timed(FLASH), *eighths, *(replace(one, dtype="nvfp4") for one in eighths[:100])]
    rates = fit(rows, gpu=H100)[0].kernels.gemm_types
    assert set(rates) == {"fp8"}
    product, tokens = Product(4096, 8192), np.array([1024.0, 4096.0])
    want = double.form_s(tokens, product, width)
    assert rates["fp8"].seconds(tokens, (product,), width) == pytest.approx(want, rel=0.05)
    assert fit(rows)[0].kernels.gemm_types == {}


def test_single_queries_behind_a_prefix_are_compared_and_not_fitted() -> None:
    calls = timed(FLASH)
    decoding = [replace(one, chunk=1, prefix=4095, median_s=1.0) for one in calls[:3]]
    found = fit_flash([*calls, *decoding], A100, kernel="fa2")
    assert found.rates == fit_flash(calls, A100, kernel="fa2").rates
    (told,) = (check for check in found.checks if "one query" in check.label)
    assert len(told.measured_s) == 3
