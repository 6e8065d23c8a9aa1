"""Notes about missing rates in a profile and about quantised models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrsim
from kvrsim.errors import InputError
from kvrsim.kernels.gemm import GEMM_TYPES, GemmRates, Product, Tile, sum_costs
from kvrsim.kernels.profile import CalibrationProfile, load_profile
from kvrsim.model.load import config_path
from kvrsim.placement import PlacedScenario
from kvrsim.rate_notes import missing_rate_notes
from kvrsim.scenario import Scenario
from kvrsim.units import scale

FLASH = load_profile("h100-flash")
BARE = replace(FLASH, kernels=replace(FLASH.kernels, latent=None, sparse=None, experts=None, recurrence=None))


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("llama-3-8b", []),
        ("mixtral-8x7b", ["grouped products"]),
        ("deepseek-v3", ["latent attention", "grouped products"]),
        ("deepseek-v3.2", ["sparse attention", "grouped products"]),
        ("qwen3.5-27b", ["gated delta rule"]),
        ("nemotron-h-56b", ["Mamba-2"]),
    ],
)
def test_what_is_counted_is_said(model: str, missing: list[str]) -> None:
    spec = kvrsim.load_model(model)
    notes = list(missing_rate_notes(spec, BARE, 2))
    assert len(notes) == len(missing)
    assert all(f"profile h100-flash has no rates of {one}" in note for one, note in zip(missing, notes, strict=True))
    assert model == "nemotron-h-56b" or not list(missing_rate_notes(spec, FLASH, 2))


CHUNK = np.array([100.0, 2048.0])
AWQ = {"quant_method": "awq", "bits": 4}
FP8 = {"quant_method": "fp8"}


def quantized(folder: Path, config: dict[str, Any], model: str = "llama-3-8b") -> Path:
    content = json.loads(config_path(model, "model").read_text()) | {"quantization_config": config}
    path = folder / "quantized.json"
    path.write_text(json.dumps(content))
    return path


def profile_with(name: str = "h100-flash", **factors: float) -> CalibrationProfile:
    """A shipped profile in which products of these types are `factors` times as fast as in half precision."""
    profile = load_profile(name)
    types = {name: scale(profile.kernels.gemm, 1 / factor) for name, factor in factors.items()}
    return replace(profile, kernels=replace(profile.kernels, clock=None, gemm_types=types))


def made(profile: CalibrationProfile, **options: Any) -> tuple[Scenario, list[str]]:
    scenario, notes = kvrsim.make_scenario(
        ctx="2k", gpus=1, cluster="h100-nvlink", profile=profile, engine="none", **options
    )
    return scenario, [note for note in notes if "quantised" in note or "no rates" in note]


def products_s(scenario: Scenario) -> Any:
    """Seconds of the products of a layer; element-wise kernels take practically no time."""
    assert scenario.profile is not None
    elementwise = scale(scenario.profile.kernels.elementwise, 1e-12)
    kernels = replace(scenario.profile.kernels, elementwise=elementwise)
    changed = replace(scenario, profile=replace(scenario.profile, kernels=kernels))
    (costs,) = PlacedScenario.of(changed).layer_costs()
    return costs.qkv_s(CHUNK) + costs.output_mlp_s(CHUNK)


def test_products_take_their_types_time(tmp_path: Path) -> None:
    """Products of the layers use the rates of FP8; attention and the head do not change."""
    profile = profile_with(fp8=2.0)
    plain, _ = made(profile, model="llama-3-8b")
    fp8, notes = made(profile, model=quantized(tmp_path, FP8))
    width = GEMM_TYPES["fp8"]
    rates = profile.kernels.gemm_types["fp8"]
    shapes = (Product(4096, 6144), Product(4096, 4096), Product(4096, 28672), Product(14336, 4096))
    assert products_s(fp8) == pytest.approx(rates.seconds(CHUNK, shapes, width), rel=1e-6)
    assert products_s(fp8)[1] < 0.62 * products_s(plain)[1]
    head = PlacedScenario.of(fp8).share.lm_head
    logits = Product(head.in_features, head.out_features, compute=head.compute)
    assert PlacedScenario.of(fp8).cost.head_s(CHUNK, logits) == pytest.approx(
        PlacedScenario.of(plain).cost.head_s(CHUNK, logits)
    )
    for one, other in zip(PlacedScenario.of(fp8).layer_costs(), PlacedScenario.of(plain).layer_costs(), strict=True):
        assert one.mixer.attention_s(CHUNK, CHUNK) == pytest.approx(other.mixer.attention_s(CHUNK, CHUNK))
        assert one.mixer.cache_bytes(CHUNK) == pytest.approx(other.mixer.cache_bytes(CHUNK))
    assert len(notes) == 1
    assert "FP8" in notes[0]


def test_inputs_are_quantised_by_kernels_of_their_own(tmp_path: Path) -> None:
    """FP8 adds four kernels: before Q, K, V, the output, gate and up, and down; weight-only formats add none."""
    kernels, other = [], tmp_path / "other"
    other.mkdir()
    for model in ("llama-3-8b", quantized(tmp_path, AWQ), quantized(other, FP8)):
        (costs,) = PlacedScenario.of(made(profile_with(), model=model)[0]).layer_costs()
        kernels.append(costs.kernels)
    plain, awq, fp8 = kernels
    assert awq == plain
    assert (fp8.before - plain.before, fp8.mixer, fp8.after - plain.after) == (1, plain.mixer, 3)


@pytest.mark.parametrize(
    ("config", "types", "priced", "told"),
    [
        (AWQ, {"fp8": 2.0}, None, "priced as bf16, without the time to dequantise"),
        (AWQ, {"int4_wo": 0.5}, 0.5, None),
        (FP8, {"int8_wo": 0.9}, 0.9, "priced as half precision from 8-bit weights"),
        (FP8 | {"weight_block_size": [128, 128]}, {"fp8": 2.0}, 2.0, "priced as FP8"),
        ({"quant_algo": "NVFP4"}, {"fp8": 2.0}, None, "before Blackwell"),
        ({"quant_algo": "NVFP4"}, {"int4_wo": 0.9, "fp8": 2.0}, 0.9, "priced as half precision from 4-bit weights"),
    ],
)
def test_a_type_without_rates_is_priced_as_the_most_similar(
    config: dict[str, Any], types: dict[str, float], priced: float | None, told: str | None, tmp_path: Path
) -> None:
    profile = profile_with(**types)
    plain, _ = made(profile, model="llama-3-8b")
    scenario, notes = made(profile, model=quantized(tmp_path, config))
    seconds = products_s(scenario)[1] / products_s(plain)[1]
    assert seconds == pytest.approx(1 / (priced or 1), rel=0.2)
    assert (seconds == 1) == (priced is None)
    assert len(notes) == (1 if told is None else 2)
    assert all(told is not None and told in note for note in notes[1:])


def test_before_hopper_fp8_is_computed_in_half_precision(tmp_path: Path) -> None:
    a100 = profile_with("a100-flash")
    _, notes = kvrsim.make_scenario(ctx="2k", gpus=1, profile=a100, model=quantized(tmp_path, FP8))
    assert any("as engines do on a GPU without such arithmetic" in note for note in notes)
    int8 = quantized(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    _, notes = kvrsim.make_scenario(ctx="2k", gpus=1, profile=a100, model=int8)
    assert any("INT8; priced as bf16, which is slower" in note for note in notes), "which an A100 computes in"


def test_part_of_a_layer_may_be_quantised(tmp_path: Path) -> None:
    """Matrices in half precision and in FP8 each take the time of their own type."""
    profile = profile_with(fp8=2.0)
    plain, _ = made(profile, model="llama-3-8b")
    whole, _ = made(profile, model=quantized(tmp_path, FP8))
    part, notes = made(profile, model=quantized(tmp_path, FP8 | {"modules_to_not_convert": ["self_attn"]}))
    (costs,), (all_fp8,), (none,) = (
        PlacedScenario.of(part).layer_costs(),
        PlacedScenario.of(whole).layer_costs(),
        PlacedScenario.of(plain).layer_costs(),
    )
    assert costs.qkv_s(CHUNK) == pytest.approx(none.qkv_s(CHUNK))
    assert all_fp8.output_mlp_s(CHUNK)[1] < costs.output_mlp_s(CHUNK)[1] < none.output_mlp_s(CHUNK)[1]
    assert "some products of the layers in FP8" in notes[0]


def test_costs_with_different_steps_add_up() -> None:
    """With tiles of 64 and of 256 rows, the sum is exact at multiples of 64 rows within the table."""
    tile = Tile(rows=64, cols=128, flops_share=1.0, start_s=0.0)
    fine = GemmRates(flops_per_s=1e9, bytes_per_s=1e30, launch_s=1e-3, concurrent_tiles=4, tiles=(tile,))
    coarse = replace(fine, tiles=(replace(tile, rows=256),), launch_s=2e-3)
    smooth = replace(fine, tiles=())
    costs = [rates.row_cost((Product(512, 512),), 2) for rates in (fine, coarse, smooth)]
    rows = 64.0 * np.arange(700)
    together = sum_costs(costs)
    assert together.rows_per_step == 64
    inside = rows <= 512 * 64
    apart = sum(cost(rows) for cost in costs)
    np.testing.assert_allclose(together(rows)[inside], apart[inside], rtol=1e-12)
    np.testing.assert_allclose(together(rows)[~inside], apart[~inside], rtol=0.02)
    assert sum_costs([smooth.row_cost((Product(8, 8),), 2)] * 2)(rows) == pytest.approx(2 * rows * 128 / 1e9)


def test_fp8_is_a_dtype_where_the_profile_has_it() -> None:
    """With dtype fp8 the products of the layers are in FP8; activations, K and V stay in half precision."""
    profile = profile_with(fp8=2.0)
    fp8, notes = made(profile, model="llama-3-8b", dtype="fp8")
    assert fp8.request.dtype_bytes == 2
    assert products_s(fp8)[1] < 0.62 * products_s(made(profile, model="llama-3-8b")[0])[1]
    assert len(notes) == 1
    assert "FP8" in notes[0]
    with pytest.raises(InputError, match=r"dtype: got 'fp8', accepted: what profile h100-flash has: fp16, bf16$"):
        made(profile_with(int4_wo=1.0, int8_wo=1.0), model="llama-3-8b", dtype="fp8")


def test_the_roofline_knows_fp8(tmp_path: Path) -> None:
    """On an H100, FP8 has twice the peak; attention has the peak of half precision."""
    options: dict[str, Any] = {"ctx": "2k", "gpus": 1, "cluster": "h100-nvlink", "profile": "roofline"}
    plain, fp8, file = (
        kvrsim.make_scenario(**options, **more)[0]
        for more in (
            {"model": "llama-3-8b"},
            {"dtype": "fp8", "model": "llama-3-8b"},
            {"model": quantized(tmp_path, FP8)},
        )
    )
    product, large = Product(4096, 4096), np.array([1e6])
    low = product._replace(compute="fp8")
    for scenario in (fp8, file):
        assert PlacedScenario.of(scenario).cost.row_cost((low,), ())(large) == pytest.approx(
            PlacedScenario.of(plain).cost.row_cost((product,), ())(large) / 2
        )
        (costs,), (other,) = PlacedScenario.of(scenario).layer_costs(), PlacedScenario.of(plain).layer_costs()
        assert costs.mixer.attention_s(CHUNK, CHUNK) == pytest.approx(other.mixer.attention_s(CHUNK, CHUNK))
        assert costs.qkv_s(CHUNK)[1] < other.qkv_s(CHUNK)[1]
    few = np.array([1e-9])
    four_bits = product._replace(compute="int4_wo")
    read_s = [PlacedScenario.of(plain).cost.row_cost((one,), ())(few).item() for one in (product, four_bits)]
    assert read_s[1] == pytest.approx(read_s[0] * (0.5 + 2 / 128) / 2)


def test_a_quantised_product_is_measured_where_its_own_type_was() -> None:
    """A shape that was measured in half precision does not count as measured in FP8."""
    kernels = load_profile("h100-flash").kernels
    half = {(shape.in_features, shape.out_features) for shape in kernels.gemm.measured}
    eight = {(shape.in_features, shape.out_features) for shape in kernels.gemm_types["fp8"].measured}
    assert half, "the shipped profile keeps tables of some shapes"
    for shape in half | eight:
        assert kernels.is_measured(Product(*shape)) is (shape in half)
        assert kernels.is_measured(Product(*shape, compute="fp8")) is (shape in eight)
    unlike = replace(kernels, gemm_types={"fp8": replace(kernels.gemm_types["fp8"], measured=())})
    assert not any(unlike.is_measured(Product(*shape, compute="fp8")) for shape in half)
