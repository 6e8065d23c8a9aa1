"""Fits of attention recover the rates that made the rows: FlashAttention with narrow heads, latents, CPU kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.data import Measurement
from calibrate.fit.attention import NARROW_HEAD_DIM, PRESETS, fit_blocked, fit_eager, fit_flash, fit_latent
from calibrate.importers.aiconfigurator import WIDTHS, LatentForm
from kvrsim.hardware import load_gpu
from kvrsim.kernels.attention import AttentionCall, BlockedRates, FlashRates, MeasuredSizes
from tests.building import measurements as small
from tests.building.measurements import EAGER, MERGED, SDPA
from tests.building.tables import at, perf_table

H100 = load_gpu("h100")
TRUE = replace(PRESETS["fa3"].rates(H100, {}), softmax_s=0.7 * PRESETS["fa3"].start["block_s"])


def timed(head_dim: int, rates: FlashRates = TRUE) -> list[Measurement]:
    """Attention rows whose times follow from these rates."""
    shapes = [
        {"chunk": 2**power, "prefix": 0, "num_attention_heads": heads, "num_key_value_heads": heads // 4}
        for power in range(7, 14)
        for heads in (4, 8, 16, 32)
    ]
    return small.attention_rows(rates, shapes, head_dim=head_dim, kernel="fa3", device="H100", dtype="bf16")


def test_the_constant_comes_back() -> None:
    result = fit_flash(timed(128), H100, kernel="fa3", narrow=timed(NARROW_HEAD_DIM))
    assert result.rates.softmax_s == pytest.approx(TRUE.softmax_s, rel=0.03)
    assert result.seen["head_dim"] == (NARROW_HEAD_DIM, 128)


# -- The fit of latent attention recovers the rates that made the rows, in both forms.

GPU = load_gpu("h200")
SHARED: dict[LatentForm, int] = {"expanded": 0, "absorbed": 1}


def truth(form: LatentForm) -> Any:
    preset = PRESETS["fa3" if form == "absorbed" else "fa2"]
    return preset.rates(GPU, {"launch_s": 8e-6, "tile_s": 2e-6})


def write(folder: Path, form: LatentForm, framework: str) -> None:
    """Write a table with the times of `truth`; calls with a single query take ten times as long."""
    rows = []
    for heads in (1, 4, 16, 64, 128):
        for chunk in (1, 64, 256, 1024, 2048, 4096, 8192, 16384):
            tokens = np.array([float(chunk)])
            keys, values = WIDTHS[form]
            call = AttentionCall(
                chunk=tokens,
                prefix=0 * tokens,
                causal=tokens * tokens / 2,
                num_attention_heads=heads,
                num_key_value_heads=SHARED[form] or heads,
                head_dim=keys,
                v_head_dim=values,
                score_bytes=28.0,
            )
            seconds = truth(form).seconds(call, 1, 2).item() * (10 if chunk == 1 else 1)
            about = {"device": "d", "kernel_source": "k", "mla_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
            rows.append(
                about | {"batch_size": 1, "isl": chunk, "step": 0, "num_heads": heads, "latency": seconds * 1e3}
            )
    perf_table(folder, f"t1/mla/{framework}/1.0/context_mla", rows)


def test_rates_are_found_again(tmp_path: Path) -> None:
    package = tmp_path / "aiconfigurator_core"
    sources: dict[LatentForm, str] = {
        "expanded": at("aiconfigurator:t1/trtllm/1.0", package),
        "absorbed": at("aiconfigurator:t1/sglang/1.0", package),
    }
    write(tmp_path, "expanded", "trtllm")
    write(tmp_path, "absorbed", "sglang")
    fitted = fit_latent(sources, GPU)
    assert fitted.own.errors().mape < 0.01
    assert fitted.cross_validated.errors().mape < 0.01
    assert fitted.seen["chunk"][0] > 1, "single queries are not fitted"
    assert fitted.rates.expanded.block_s == pytest.approx(truth("expanded").block_s, rel=0.02)
    assert fitted.rates.absorbed is not None
    assert fitted.rates.absorbed.block_s == pytest.approx(truth("absorbed").block_s, rel=0.02)
    assert fitted.source.count("t1/mla") == 2


# -- the user's own machine

PAGED = replace(EAGER, measured=MeasuredSizes(sizes=(8e6, 1.2e7, 4e7), factors=(1.0, 2.2, 2.6)))


@pytest.mark.parametrize(("rates", "name"), [(SDPA, "sdpa"), (MERGED, "flash")])
def test_kernels_by_what_they_cover_come_back(rates: BlockedRates, name: str) -> None:
    result = fit_blocked(small.calls(rates, name), small.cpu(), name=name, skips_masked=rates.skips_masked)
    assert result.own.errors().mape < 0.01
    assert result.cross_validated.errors().mape < 0.02
    assert result.rates.key_block == rates.key_block
    assert result.rates.rectangle_flops_per_s == pytest.approx(rates.rectangle_flops_per_s, rel=0.02)
    assert result.rates.causal_flops_per_s == pytest.approx(rates.causal_flops_per_s, rel=0.02)
    assert result.rates.measured is None


def test_factors_by_queries_come_back() -> None:
    true = replace(SDPA, measured=MeasuredSizes(sizes=(64.0, 256.0, 1024.0), factors=(1.6, 1.2, 1.0)))
    result = fit_blocked(small.calls(true, "sdpa"), small.cpu(), name="sdpa", skips_masked=False)
    assert result.rates.measured is not None
    assert result.own.errors().mape < 0.04


def test_eager_scores_that_leave_the_cache_come_back() -> None:
    rows = small.calls(PAGED, "eager")
    result = fit_eager(rows, small.cpu())
    assert result.rates.measured is not None
    assert len(result.rates.measured.sizes) <= 20
    assert result.own.errors().median_ape < 0.02
    assert result.own.errors().mape < 0.05
    plain = fit_eager(small.calls(EAGER, "eager"), small.cpu())
    assert plain.rates.measured is None
    assert plain.own.errors().mape < 0.002
