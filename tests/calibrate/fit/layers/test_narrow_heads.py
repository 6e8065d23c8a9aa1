"""Narrow heads wait for softmax: the constant comes back from their calls, and shipped profiles have it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calibrate.data import Measurement
from calibrate.fit.attention import NARROW_HEAD_DIM, PRESETS, AttentionRows, fit_flash
from calibrate.fit.profile import FitChoices, UsableRows
from kvrsim.hardware import load_gpu
from kvrsim.kernels.attention import FlashRates
from kvrsim.kernels.profile import load_profile

H100 = load_gpu("h100")
TRUE = replace(PRESETS["fa3"].rates(H100, {}), softmax_s=0.7 * PRESETS["fa3"].start["block_s"])


def timed(head_dim: int, rates: FlashRates = TRUE) -> list[Measurement]:
    """Calls with these rates' times."""
    rows = [
        Measurement(
            operation="attention",
            median_s=1.0,
            kernel="fa3",
            device="H100",
            dtype="bf16",
            source="made up",
            chunk=chunk,
            prefix=0,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4,
            head_dim=head_dim,
        )
        for chunk in (128, 256, 512, 1024, 2048, 4096, 8192)
        for heads in (4, 8, 16, 32)
    ]
    seconds = AttentionRows.of(rows).predicted_s(rates)
    return [replace(one, median_s=float(time)) for one, time in zip(rows, seconds, strict=True)]


def test_the_constant_comes_back() -> None:
    found = fit_flash(timed(128), H100, kernel="fa3", narrow=timed(NARROW_HEAD_DIM))
    assert found.rates.softmax_s == pytest.approx(TRUE.softmax_s, rel=0.03)
    assert found.seen["head_dim"] == (NARROW_HEAD_DIM, 128)
    check = next(line for line in found.lines() if "heads of 64" in line.label)
    assert check.mape < 0.02


def test_without_narrow_calls_nothing_changes() -> None:
    assert fit_flash(timed(128), H100, kernel="fa3").rates.softmax_s == 0


@pytest.mark.parametrize("narrow", [(), timed(NARROW_HEAD_DIM)[:5]])
def test_few_narrow_calls_are_left_out(narrow: Any) -> None:
    rows = [*products(), *timed(128), *narrow]
    assert UsableRows.of(rows, FitChoices(attention_kernel="fa3"), "rows").narrow == []
    rows += timed(NARROW_HEAD_DIM)
    assert len(UsableRows.of(rows, FitChoices(attention_kernel="fa3"), "rows").narrow) >= 28


def products() -> list[Measurement]:
    """Enough to fit."""
    return [
        Measurement(
            operation="gemm",
            median_s=1e-5 * tokens * width / 2**20,
            kernel="cublas",
            device="H100",
            dtype="bf16",
            source="made up",
            tokens=tokens,
            in_features=width,
            out_features=4096,
        )
        for tokens in (64, 128, 256, 512, 1024, 2048)
        for width in (1024, 2048, 4096, 8192)
    ]


@pytest.mark.parametrize("name", ["h100-flash", "b200-flash", "b300-flash"])
def test_shipped_profiles_have_it(name: str) -> None:
    """More than half of a step with heads of 128, so that heads of 64 gain little."""
    rates = load_profile(name).kernels.attention["flash"]
    assert isinstance(rates, FlashRates)
    assert 0.5 < rates.softmax_s / rates.block_s < 1.0


def test_faster_exponentials_of_blackwell_ultra() -> None:
    """NVIDIA doubled the rate of exponentials from B200 to B300, and little else."""
    rates = [load_profile(name).kernels.attention["flash"] for name in ("b200-flash", "b300-flash")]
    softmax = [one.softmax_s for one in rates if isinstance(one, FlashRates)]
    assert softmax[1] < 0.8 * softmax[0]
