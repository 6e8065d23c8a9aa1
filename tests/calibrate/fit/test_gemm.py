"""Fits of matrix products: the clock is recovered from rows measured in loops; products of a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.data import Measurement
from calibrate.fit.fit import has_waves
from calibrate.fit.gemm import at_burst, fit_clock, fit_gemm, fit_types_section, head_bytes_per_s
from calibrate.fit.profile import systematic_log_sd
from kvrsim.errors import InputError
from kvrsim.hardware import load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.gemm import GEMM_TYPES, Product
from kvrsim.kernels.profile import Clock, load_profile
from tests.building import measurements as small
from tests.building.tables import at, perf_table
from tests.calibrate.fit.test_profile import FLASH, GEMM, H100, fit, gemm_rows, timed

GPU = load_gpu("h100")
CLOCK = Clock(sustained_share=0.85, time_constant_s=0.1)
RATE = 7e14
SHAPES = [
    (tokens, k, n) for tokens in (1024, 4096, 16384, 32768) for k in (2048, 8192) for n in range(2048, 32769, 1024)
]


def rows(
    clock: Clock | None, *, warmups: int = 18, repeats: int = 36, source: str = "a", noise: float = 0.0
) -> list[Measurement]:
    """Products at RATE, measured in loops of `repeats` products after `warmups`."""
    dice, result = np.random.default_rng(0), []
    for tokens, fan_in, fan_out in SHAPES:
        burst_s = 2.0 * tokens * fan_in * fan_out / RATE * dice.uniform(1 - noise, 1 + noise)
        seconds = burst_s
        if clock is not None:
            ends = clock.loaded_s(np.array([warmups * burst_s, (warmups + repeats) * burst_s]))
            seconds = float(ends[1] - ends[0]) / repeats
        about: dict[str, Any] = {"tokens": tokens, "in_features": fan_in, "out_features": fan_out, "dtype": "bf16"}
        result.append(small.row("gemm", seconds, warmups=warmups, repeats=repeats, source=source, **about))
    return result


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_clock_comes_back(noise: float) -> None:
    result = fit_clock(rows(CLOCK, noise=noise), GPU)
    assert result is not None
    assert result.clock.sustained_share == pytest.approx(0.85, rel=0.002 + 0.3 * noise)
    assert result.clock.time_constant_s == pytest.approx(0.1, rel=0.01 + 5 * noise)
    assert result.num_rows == len(SHAPES)
    assert result.describe().startswith("8")


def test_no_clock_where_nothing_falls_or_nothing_is_known_of_loops() -> None:
    assert fit_clock(rows(None, noise=0.1), GPU) is None
    unknown = [replace(row, warmups=None, repeats=None) for row in rows(CLOCK)]
    assert fit_clock(unknown, GPU) is None
    assert at_burst(unknown, CLOCK) == unknown
    assert at_burst(rows(CLOCK), None) == rows(CLOCK)


def test_rows_come_back_to_the_burst_clock() -> None:
    for row in at_burst(rows(CLOCK), CLOCK):
        flops = 2.0 * (row.tokens or 0) * (row.in_features or 0) * (row.out_features or 0)
        assert row.median_s == pytest.approx(flops / RATE, rel=1e-6)


def test_the_systematic_error_is_how_far_other_tables_are() -> None:
    own, twice, half = rows(None), rows(None, source="b"), rows(None, source="c")
    near = [replace(row, median_s=1.1 * row.median_s) for row in twice]
    assert systematic_log_sd("gemm", own, near) == pytest.approx(np.log(1.1))
    assert systematic_log_sd("gemm", own, [*near, *half]) == pytest.approx(np.log(1.1) / np.sqrt(2))
    assert systematic_log_sd("gemm", own, near[:5]) is None
    assert systematic_log_sd("send_recv", own, near) is None


# -- Quantised products have separate rates; products too fast for random data are refused.


@pytest.mark.slow
def test_products_that_no_random_data_reach_are_refused() -> None:
    """Rows at 88 % of the datasheet's peak are accepted; rows 10 % faster are refused."""
    faster = [replace(one, median_s=one.median_s / 1.1) for one in gemm_rows()]
    fit([*gemm_rows(), *timed(FLASH)], attention_kernel="fa2")
    with pytest.raises(InputError, match=r"9\d% of the datasheet of a100-80gb', accepted: products of random data"):
        fit([*faster, *timed(FLASH)], attention_kernel="fa2")


@pytest.mark.slow
def test_quantised_products_have_rates_of_their_own() -> None:
    """FP8 with twice the rate gets its own rates; a type with few rows, or that the GPU lacks, gets none."""
    width, double = GEMM_TYPES["fp8"], replace(GEMM, flops_per_s=560e12, concurrent_tiles=132)

    def eighth(one: Measurement) -> Measurement:
        tokens, product = float(one.tokens or 0), Product(one.in_features or 0, one.out_features or 0)
        return replace(one, dtype="fp8", median_s=float(double.form_s(np.array(tokens), product, width)))

    eighths = list(map(eighth, gemm_rows() * 2))
    rows = [*gemm_rows(), *timed(FLASH), *eighths, *(replace(one, dtype="nvfp4") for one in eighths[:100])]
    rates = fit(rows, gpu=H100, attention_kernel="fa2")[0].kernels.gemm_types
    assert set(rates) == {"fp8"}
    product, tokens = Product(4096, 8192), np.array([1024.0, 4096.0])
    want = double.form_s(tokens, product, width)
    assert rates["fp8"].seconds(tokens, (product,), width) == pytest.approx(want, rel=0.05)
    assert fit(rows, attention_kernel="fa2")[0].kernels.gemm_types == {}


def test_a_type_of_another_source_replaces_that_of_the_profile(tmp_path: Path) -> None:
    profile = load_profile("h200-flash")
    width, known = GEMM_TYPES["fp8"], profile.kernels.gemm_types["fp8"]
    about = {"device": "H200", "kernel_source": "trtllm", "op_name": "gemm", "gemm_dtype": "fp8"}
    table = []
    for tokens, k, n in SHAPES[::3]:
        seconds = 2.0 * float(known.form_s(np.array(float(tokens)), Product(k, n), width))
        table.append(about | {"m": tokens, "n": n, "k": k, "latency": 1e3 * seconds})
    root = perf_table(tmp_path, "t1/gemm/trtllm/1.0/gemm", table)
    part = JsonObject(fields={"fp8": at("aiconfigurator:t1/trtllm/1.0", root)}, where="recipes")
    rates = dict(fit_types_section(part, profile).rates)
    product, tokens_of = Product(4096, 8192), np.array([2048.0, 8192.0])
    assert rates.pop("fp8").form_s(tokens_of, product, width) == pytest.approx(
        2.0 * known.form_s(tokens_of, product, width), rel=0.1
    )
    assert rates == {kind: one for kind, one in profile.kernels.gemm_types.items() if kind != "fp8"}


# -- the user's own machine


def test_products_of_a_cpu_hardly_step() -> None:
    result = fit_gemm(small.gemm_rows(), small.cpu(), keep_shapes={(512, 512), (512, 1376), (1376, 512), (512, 256)})
    assert not has_waves(small.cpu())
    assert has_waves(load_gpu("l40s"))
    assert result.rates.step == 16
    assert len(result.rates.measured) == 4
    tokens = np.arange(64.0, 2048.0, 16.0)
    for shape in ((512, 512), (512, 1376), (1376, 512)):
        predicted = result.rates.seconds(tokens, (Product(*shape),), 4)
        true = np.array([small.gemm_s(one, *shape) for one in tokens])
        np.testing.assert_allclose(predicted, true, rtol=0.03)
        assert (np.diff(predicted) / predicted[1:] < 0.25).all()


def test_logits_stream_their_weights() -> None:
    head = small.row("head", 512 * 32000 * 4 / small.HEAD, in_features=512, out_features=32000)
    assert head_bytes_per_s([head], small.cpu()) == pytest.approx(small.HEAD, rel=1e-3)
    assert head_bytes_per_s([replace(head, median_s=1e-9)], small.cpu()) == small.cpu().hbm_bytes_per_s
    assert head_bytes_per_s([], small.cpu()) is None
