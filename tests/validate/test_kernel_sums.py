"""Sums of measured kernels: what is added up, what lies between measurements, and what the page claims."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.data import Measurement
from calibrate.importers import read_source
from planner.simulate import run_simulation
from validate.kernel_sums import PAGE, STUDIES, Grid, KernelSum, Ratios, Reading, Study, kernel_sums, page, scenario_of

LAYERS = 32  # of Llama 2 7B
TIMES = {
    **{"emb": 0.2, "input_layernorm": 0.1, "attn_pre_proj": 2.0, "attn_rope": 0.15, "attn_post_proj": 0.6},
    **{"post_attention_layernorm": 0.1, "mlp_up_proj": 3.0, "mlp_act": 0.25, "mlp_down_proj": 1.5, "add": 0.05},
}
SHAPE = {"n_embd": 4096, "n_expanded_embd": 11008, "n_head": 32, "n_kv_head": 32}
LAYER_MS = 2.0 + 0.6 + 3.0 + 1.5 + 2 * 0.1 + 0.15 + 0.25 + 2 * 0.05  # two norms, two additions
VIDUR = next(study for study in STUDIES if study.profile == "a100-vidur")


def write(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    listed = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)
    return str(path)


def layer(tokens: int, factor: float = 1.0, workers: int = 1) -> dict[str, Any]:
    times = {f"time_stats.{name}.median": factor * ms for name, ms in TIMES.items()}
    return times | SHAPE | {"use_gated_mlp": True, "num_tokens": tokens, "num_tensor_parallel_workers": workers}


def attention(chunk: int, ms: float, prefix: int = 0, kv_heads: int = 32) -> dict[str, Any]:
    return {
        **{"time_stats.attn_prefill.median": ms, "n_embd": 4096, "n_q_head": 32, "n_kv_head": kv_heads},
        **{"num_tensor_parallel_workers": 1, "batch_size": 1, "prefill_chunk_size": chunk},
        **{"kv_cache_size": prefix, "is_prefill": True},
    }


def tables(
    folder: Path, layers: Iterable[dict[str, Any]], calls: Iterable[dict[str, Any]], model: str = "Llama-2-7b-hf"
) -> list[Measurement]:
    place = folder / "compute/a100/meta-llama" / model
    return read_source(write(place / "mlp.csv", layers)) + read_source(write(place / "attention.csv", calls))


def study(*tokens: int, layers: bool = True) -> Study:
    names = VIDUR.layers if layers else {}
    return Study(profile="a100-vidur", models=("llama-2-7b",), tokens=tokens, layers=names)


def test_all_kernels_of_a_prefill_are_added_up(tmp_path: Path) -> None:
    """Medians of the model's own rows; not those of tensor-parallel workers, of a prefix, or of another model."""
    layers = [layer(1024, factor) for factor in (0.5, 1.0, 7.0)]
    other = tables(tmp_path, [layer(1024, 9.0)], [attention(1024, 9.0, prefix=64)], "Meta-Llama-3-8B")
    calls = [attention(1024, 0.4), attention(1024, 9.0, prefix=512), attention(1024, 9.0, kv_heads=4)]
    (found,) = kernel_sums(study(1024), tables(tmp_path, layers, calls) + other)
    assert found.sum_s - found.head_s == pytest.approx(1e-3 * (0.2 + LAYERS * (LAYER_MS + 0.4)))
    assert found.own_s == found.head_s < 0.01 * found.sum_s
    assert (found.gemm.source, found.attention.source) == ("measured", "measured")
    assert found.error == pytest.approx(found.predicted_s / found.sum_s - 1)


def test_prefills_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    rows = tables(tmp_path, [layer(1024), layer(2048)], [attention(1024, 0.4)])
    assert [found.tokens for found in kernel_sums(study(1024, 1536, 2048), rows)] == [1024]


# ---- between measurements


def test_a_power_law_is_met_between_and_beyond_points() -> None:
    """t = x^1.5 y is a line in logarithms."""
    grid = Grid.of(("x", "y"), [((x, y), x**1.5 * y) for x in (1, 2, 8) for y in (4, 16)])
    for x, y, how in (
        *((2, 16, "measured"), (4, 4, "between x"), (2, 8, "between y"), (4, 8, "between x, y")),
        *((32, 16, "beyond x"), (4, 64, "between x; beyond y"), (4, 1, "between x; beyond y")),
    ):
        found = grid.at(x, y)
        assert found is not None
        assert (found.seconds, found.source) == (pytest.approx(x**1.5 * y), how)


def test_the_slope_beyond_a_grid_is_not_that_of_two_points_side_by_side() -> None:
    grid = Grid.of(("x",), [((100,), 1.0), ((250,), 2.5), ((251,), 5.0)])
    found = grid.at(502)
    assert found is not None
    assert found.seconds == pytest.approx(5.0 * 2 ** (math.log(5) / math.log(2.51)))


# ---- the page


def made_up(error: float, tokens: int) -> KernelSum:
    part = Reading(seconds=0.5)
    sums = dict(profile="p", model="m", tokens=tokens, gemm=part, attention=part, elementwise_s=0.0, head_s=0.0)
    return KernelSum(**sums, own_s=0.1, predicted_s=1.0 + error)  # type: ignore[arg-type]


def test_the_page_has_every_row_and_a_summary() -> None:
    text = "\n".join(page([made_up(0.1, 1), made_up(-0.3, 2)], [Ratios(gpu="A100", ratios=(0.5, 1.0, 2.0))]))
    assert "| p | 2 | 20.0% | -10.0% | -30.0% (m, 2) | 10.0% to 10.0% |" in text
    assert "| p | m | 1 | 1000.0 | 1100.0 | +10.0% | measured | measured |" in text
    assert "0.50 to 2.00 times NVIDIA's seconds on the A100 (median 1.00" in text
    assert "NVIDIA's seconds" not in "\n".join(page([made_up(0.1, 1)], []))
    assert any("Nothing to sum for q:" in line for line in page([made_up(0.1, 1)], [], ["q"]))


def test_ratios_are_of_long_products_that_both_have() -> None:
    def gemm(tokens: int, seconds: float) -> Measurement:
        about = dict(kernel="k", device="d", source="s", dtype="fp16", in_features=2, out_features=3)
        return Measurement(operation="gemm", tokens=tokens, median_s=seconds, **about)  # type: ignore[arg-type]

    one, other = [gemm(512, 1.0), gemm(1024, 3.0), gemm(4096, 1.0)], [gemm(512, 1.0), gemm(1024, 2.0)]
    assert Ratios.of("A100", one, other).ratios == (1.5,)


def committed() -> list[tuple[str, str, int, float, float]]:
    """Profile, model, tokens, sum and prediction in ms of each row of the page."""
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| [+-]", PAGE.read_text(), re.M)
    return [(name, model, int(tokens), float(sum_ms), float(ms)) for name, model, tokens, sum_ms, ms in rows]


def test_the_committed_page_has_all_studies() -> None:
    wanted = {(one.profile, model, tokens) for one in STUDIES for model in one.models for tokens in one.tokens}
    # A clone of vidur without the large files of its first commits lacks attention of a100-vidur's models.
    found = {row[:3] for row in committed()}
    assert {row for row in wanted - found if row[0] != "a100-vidur"} == set()
    assert found <= wanted


def test_the_committed_page_is_of_these_profiles() -> None:
    for name, model, tokens, _, predicted_ms in committed():
        now_s = run_simulation(scenario_of(name, model, tokens), strategy="single").ttft_s
        assert 1e3 * now_s == pytest.approx(predicted_ms, rel=2e-3, abs=0.051), f"{name} {model} {tokens}"


def test_targets() -> None:
    """Within 4 % on average, a100-flash within 3 %."""
    rows = committed()
    for name, most in (("a100-flash", 0.03), ("h100-flash", 0.04), ("h200-flash", 0.04)):
        errors = [abs(row[4] / row[3] - 1) for row in rows if row[0] == name]
        assert len(errors) == 15
        assert np.mean(errors) <= most
