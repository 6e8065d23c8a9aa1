"""Fits of scans and convolutions recover the rates that made the rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from calibrate.fit.recurrence import fit_recurrence
from calibrate.importers.aiconfigurator import RecurrenceRows
from kvrsim.hardware import load_gpu
from kvrsim.kernels.recurrence import ConvolutionRates, KindRates, ScanRates

RATES = KindRates(
    scan=ScanRates(start_s=4e-5, chunk_s=1.4e-6, flops_per_s=2.5e14, cached_bytes=5e7, bytes_per_s=2.1e12),
    convolution=ConvolutionRates(start_s=4e-6, cached_bytes_per_s=7e12, cached_bytes=7e6, bytes_per_s=2.9e12),
)
GPU = load_gpu("h100")


def made(kind: str, rates: KindRates, *, slower: float = 1.0) -> RecurrenceRows:
    """Scans and convolutions with 6 head counts and 10 lengths; slower: factor of the times."""
    shapes = list(product((2, 8, 16, 24, 32, 64), (64 * 2**power for power in range(10)), (True, False)))
    heads, tokens, scan = (np.array(column, dtype=float) for column in zip(*shapes, strict=True))
    full = np.full(len(shapes), 128.0)
    rows = RecurrenceRows(
        kind=kind,
        source=f"a test, {slower}",
        kernel=np.where(scan > 0, "chunk", "causal_conv1d_fn"),
        batch=np.ones(len(shapes)),
        tokens=tokens,
        num_key_heads=heads,
        key_head_dim=full,
        num_value_heads=heads,
        value_head_dim=full,
        conv_kernel=np.full(len(shapes), 4.0),
        seconds=full,
    )
    scan_s, convolution_s = rates.scan.seconds(*rows.arguments), rates.convolution.seconds(*rows.arguments)
    return replace(rows, seconds=slower * np.where(rows.is_scan, scan_s, convolution_s))


def test_known_rates_are_found_again() -> None:
    fitted = fit_recurrence({"gated_delta": made("gated_delta", RATES)}, GPU)
    result = fitted.rates.kinds["gated_delta"]
    assert result.scan.chunk_s == pytest.approx(1.4e-6, rel=0.05)
    assert result.scan.bytes_per_s == pytest.approx(2.1e12, rel=0.05)
    assert result.convolution.bytes_per_s == pytest.approx(2.9e12, rel=0.05)
    assert fitted.own.errors().mape < 0.01
    assert fitted.cross_validated.errors().mape < 0.02
    assert fitted.operation.systematic_log_sd is None
    assert fitted.operation.seen["num_value_heads"] == (2.0, 64.0)


def test_what_other_tables_say_is_an_error_that_all_sizes_share() -> None:
    rows = {kind: made(kind, RATES) for kind in ("gated_delta", "kda")}
    fitted = fit_recurrence(rows, GPU, [made("kda", RATES, slower=2.0)])
    assert fitted.operation.systematic_log_sd == pytest.approx(np.log(2.0), rel=1e-3)
    assert fitted.rates.alike_log_sd < 0.02  # the rows of both kinds were made by the same rates
