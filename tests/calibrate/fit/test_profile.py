"""Fits of whole profiles: known rates are recovered, no rate exceeds the datasheet, bad rows are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from calibrate.data import ELEMENTWISE, Measurement, gpu_of, link_of
from calibrate.fit.attention import PRESETS, AttentionRows, fit_eager, fit_flash
from calibrate.fit.elementwise import fit_elementwise, usable_elementwise
from calibrate.fit.fit import HALF
from calibrate.fit.gemm import GemmRows, fit_gemm, usable_gemm
from calibrate.fit.links import SendRates, fit_all_gather, fit_send_recv
from calibrate.fit.profile import LAYERS, FitChoices, Label, fit_profile, layer_costs
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.hardware import GatherRates, load_gpu, load_link
from kvrsim.kernels.attention import AttentionRates, EagerRates
from kvrsim.kernels.gemm import GemmRates, Product, Tile
from kvrsim.kernels.profile import CalibrationProfile
from tests.building import measurements as small

A100, NVLINK3 = load_gpu("a100-80gb"), load_link("nvlink3")
H100 = load_gpu("h100")
DEVICE = "NVIDIA A100-SXM4-80GB"

GEMM = GemmRates(
    flops_per_s=280e12,
    bytes_per_s=1.4e12,
    launch_s=4e-6,
    concurrent_tiles=108,
    tiles=(
        Tile(rows=256, cols=128, flops_share=1.0, start_s=6e-6),
        Tile(rows=128, cols=64, flops_share=0.95, start_s=3e-6),
        Tile(rows=64, cols=64, flops_share=0.85, start_s=1e-6),
    ),
)
GATHER = GatherRates(
    launch_s=8e-6, hop_s=1e-6, small_bytes_per_s=60e9, large_bytes_per_s=230e9, setup_s=5e-6, own_share=0.44
)
SEND = SendRates(bandwidth_bytes_per_s=220e9, latency_s=14e-6, short_bytes_per_s=350e9)
WIDTHS = (1024, 2048, 4096, 8192)


def row(operation: str, seconds: float, **fields: Any) -> Measurement:
    return small.row(operation, seconds, **({"kernel": "some", "device": DEVICE, "dtype": "fp16"} | fields))


def gemm_rows() -> list[Measurement]:
    counts = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
    shapes = [(fan_in, fan_out) for fan_in in WIDTHS for fan_out in WIDTHS]
    return [
        row(
            "gemm",
            float(GEMM.form_s(np.array(float(tokens)), Product(fan_in, fan_out), 2)),
            tokens=tokens,
            in_features=fan_in,
            out_features=fan_out,
        )
        for fan_in, fan_out in shapes
        for tokens in counts
    ]


FEW = gemm_rows()[::5]


def timed(rates: AttentionRates, kernel: str = "flash") -> list[Measurement]:
    """Attention rows whose times follow from these rates."""
    shapes = [
        {"chunk": chunk, "prefix": prefix, "num_attention_heads": heads, "num_key_value_heads": heads // 4}
        for chunk in (64, 128, 256, 512, 1024, 2048, 4096)
        for prefix in (0, 1024, 4096)
        for heads in (4, 8, 16, 32)
    ]
    return small.attention_rows(rates, shapes, head_dim=128, kernel=kernel, device=DEVICE, dtype="fp16")


FLASH = PRESETS["fa2"].rates(A100, {"launch_s": 8e-6, "tile_s": 3e-6, "block_s": 5.5e-6, "alone_share": 0.6})
EAGER = EagerRates(flops_per_s=200e12, bytes_per_s=1.5e12, start_s=3e-5)


def elementwise_rows() -> list[Measurement]:
    rates = dict(zip(ELEMENTWISE, (7e11, 9e11, 1e12, 1.8e12, 3e11), strict=True))
    return [
        row(kind, 2e-6 + tokens * 16384 / rate, tokens=tokens, bytes=tokens * 16384)
        for kind, rate in rates.items()
        for tokens in (128, 512, 1024, 4096, 16384)
    ]


def link_rows() -> list[Measurement]:
    sizes = [2**power for power in range(14, 30)]
    sends = [
        row("send_recv", seconds, bytes=size, ranks=2, nodes=1)
        for size, seconds in zip(sizes, SEND.seconds(np.array(sizes, dtype=float)), strict=True)
    ]
    gathers = [
        row("all_gather", float(GATHER.seconds(np.array(float(size)), ranks)), bytes=size, ranks=ranks, nodes=1)
        for size in sizes
        for ranks in (2, 4, 8)
    ]
    return [*sends, *gathers]


def all_rows() -> list[Measurement]:
    return [*gemm_rows(), *timed(FLASH), *elementwise_rows(), *link_rows()]


def fit(rows: list[Measurement], *, gpu: Any = A100, **choices: Any) -> Any:
    return fit_profile(rows, Label(name="made"), gpu=gpu, link=NVLINK3, choices=FitChoices(**choices))


@pytest.fixture(scope="module")
def fitted() -> Any:
    return fit(all_rows(), attention_kernel="fa2")


# -- fits recover known rates


def test_gemm_form_comes_back() -> None:
    result = fit_gemm(gemm_rows(), A100)
    assert result.own.errors().mape < 0.01
    assert result.cross_validated.errors().mape < 0.02
    assert result.rates.flops_per_s == pytest.approx(GEMM.flops_per_s, rel=0.03)
    assert result.rates.measured == ()


def test_measured_shapes_come_back_where_the_form_cannot_follow() -> None:
    odd = [
        replace(one, median_s=one.median_s * (1.3 if (one.tokens or 0) > 512 else 0.9))
        if (one.in_features, one.out_features) == (4096, 4096)
        else one
        for one in gemm_rows()
    ]
    result = fit_gemm(odd, A100, keep_shapes={(4096, 4096), (1, 1)})
    assert [(shape.in_features, shape.out_features) for shape in result.rates.measured] == [(4096, 4096)]
    mine = GemmRows.of([one for one in odd if (one.in_features, one.out_features) == (4096, 4096)])
    np.testing.assert_allclose(mine.predicted_s(result.rates), mine.seconds, rtol=0.02)
    assert result.interpolated is not None
    assert result.operation.interpolated_log_sd is not None


@pytest.mark.parametrize(("kernel", "gpu"), [("fa2", A100), ("fa3", H100)])
def test_flash_comes_back(kernel: str, gpu: Any) -> None:
    preset = PRESETS[kernel]
    true = preset.rates(gpu, {"block_s": 1.2 * preset.start["block_s"], "launch_s": 9e-6})
    result = fit_flash(timed(true), gpu, kernel=kernel)
    assert result.own.errors().mape < 0.005
    assert result.rates.block_s == pytest.approx(true.block_s, rel=0.02)
    assert result.rates.num_sms == gpu.num_sms


def test_the_nearest_kernel_is_found() -> None:
    result = fit_flash(timed(PRESETS["flashinfer"].rates(A100, {"tile_s": 8e-6})), A100)
    assert (result.rates.tile_rows, result.rates.packs_heads) == (128, True)


def test_eager_comes_back() -> None:
    result = fit_eager(timed(EAGER), A100)
    assert result.own.errors().mape < 0.002
    assert result.rates.start_s == pytest.approx(EAGER.start_s, rel=0.05)
    # At one head_dim, FLOPs are proportional to the bytes of the score matrix: only the sum of both times is known.
    once = 4 * 128 / EAGER.flops_per_s + 28 / EAGER.bytes_per_s
    assert 4 * 128 / result.rates.flops_per_s + 28 / result.rates.bytes_per_s == pytest.approx(once, rel=0.01)


def test_elementwise_comes_back() -> None:
    rates = fit_elementwise(elementwise_rows(), A100, fused=True).rates
    assert rates.start_s == pytest.approx(2e-6, rel=0.01)
    assert (rates.norm, rates.residual) == (pytest.approx(7e11, rel=0.01), pytest.approx(1.8e12, rel=0.01))
    assert rates.copy == rates.residual
    assert rates.fused


# -- laws of fitted rates


def test_fitted_rates_obey_the_datasheet() -> None:
    faster = [replace(one, median_s=one.median_s / 20) for one in all_rows()]
    gemm = fit_gemm(usable_gemm(faster, HALF), A100).rates
    assert gemm.flops_per_s <= dict(A100.peak_flops)["fp16"]
    assert gemm.bytes_per_s <= A100.hbm_bytes_per_s
    assert fit_send_recv(faster, NVLINK3).rates.bandwidth_bytes_per_s <= NVLINK3.bandwidth_bytes_per_s
    assert fit_all_gather(faster, NVLINK3).rates.large_bytes_per_s <= NVLINK3.bandwidth_bytes_per_s
    rates = fit_elementwise(usable_elementwise(faster, HALF), A100, fused=True).rates
    assert max(rates.norm, rates.residual, rates.embedding) <= A100.hbm_bytes_per_s
    assert rates.start_s >= 0


def test_fitted_times_rise_with_size(fitted: Any) -> None:
    profile, _ = fitted
    kernels = profile.kernels
    rows = np.arange(1.0, 40000.0, 7.0)
    for shape in ((4096, 4096), (4096, 12288), (8192, 1024)):
        seconds = kernels.gemm.seconds(rows, (Product(*shape),), 2)
        assert (np.diff(seconds) >= 0).all()
        assert (seconds >= rows * Product(*shape).flops_per_row / dict(A100.peak_flops)["fp16"]).all()
    chunks = np.arange(1.0, 9000.0, 13.0)
    for chunk, prefix in ((chunks, np.zeros_like(chunks)), (np.full_like(chunks, 777.0), chunks)):
        ones = {"num_attention_heads": 32.0, "num_key_value_heads": 8.0, "head_dim": 128.0, "batch": 1.0}
        calls = AttentionRows(
            chunk=chunk, prefix=prefix, expected_s=chunk, **{key: np.full_like(chunk, one) for key, one in ones.items()}
        )
        assert (np.diff(calls.predicted_s(kernels.attention["flash"])) >= 0).all()


# -- the profile


@pytest.mark.slow
def test_same_rows_same_profile_and_what_was_not_measured_is_the_datasheets() -> None:
    rows = FEW + timed(FLASH)
    profile, report = fit(rows, attention_kernel="fa2")
    assert fit(rows, attention_kernel="fa2")[0] == profile
    assert profile.kernels.elementwise.norm == A100.hbm_bytes_per_s
    assert (profile.links.bandwidth_bytes_per_s, profile.links.gather) == (NVLINK3.bandwidth_bytes_per_s, None)
    assert all(profile.operations[kind].num_rows == 0 for kind in ("elementwise", "send_recv", "all_gather"))
    assert any("not measured" in note for note in report.notes)


# -- rows that are refused


def noisy(rows: list[Measurement]) -> list[Measurement]:
    random = np.random.default_rng(0)
    return [replace(one, median_s=float(10 ** random.uniform(-6, -1))) for one in rows]


REFUSED: dict[str, tuple[Callable[[], list[Measurement]], str]] = {
    "no gemm": (lambda: timed(FLASH), "0 gemm rows"),
    "few": (lambda: gemm_rows()[:19] + timed(FLASH), "19 gemm rows"),
    "one size": (lambda: gemm_rows()[::12] * 2 + timed(FLASH), "of 1 sizes"),
    "spread": (
        lambda: [replace(one, spread_s=one.median_s / 5) for one in gemm_rows()] + timed(FLASH),
        "gemm rows with a median spread of 20%",
    ),
    "devices": (
        lambda: gemm_rows() + [replace(one, device="other") for one in gemm_rows()] + timed(FLASH),
        "rows of one device",
    ),
    "noise": (lambda: noisy(FEW) + timed(FLASH), "on which the best fit has an error of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rubbish_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(InputError, match=message) as caught:
        fit(make(), attention_kernel="fa2")
    assert caught.value.parameter == "compute"


# -- helpers


def test_link_of_a_gpu() -> None:
    assert link_of(A100, None).name == "nvlink3"
    assert link_of(A100, "nvlink4").name == "nvlink4"
    assert link_of(load_gpu("l40s"), None).name == "pcie4-x16"
    with pytest.raises(InputError, match="link"):
        link_of(replace(A100, name="another"), None)


def test_all_gathers_that_follow_no_ring_are_left_to_the_datasheet() -> None:
    factors = {2: 5.0, 4: 30.0}
    odd = [
        replace(one, median_s=one.median_s * factors.get(one.ranks or 0, 1.0)) if one.operation == "all_gather" else one
        for one in [*FEW, *timed(FLASH), *link_rows()]
    ]
    profile, report = fit(odd, attention_kernel="fa2")
    assert profile.links.gather is None
    assert profile.operations["all_gather"].num_rows == 0
    assert "the form has an error of" in profile.not_covered
    assert any("far from the form" in note for note in report.notes)


# -- the user's own machine

_ATTENTION = {"flash": small.MERGED, "sdpa": small.SDPA, "eager": small.EAGER}
_CALLS = [row for kernel, rates in _ATTENTION.items() for row in small.calls(rates, kernel)]
OWN_ROWS = [*small.other_rows(), *_CALLS, *small.link_rows()]


def fit_own(rows: list[Measurement], *origins: dict[str, Any]) -> Any:
    origins = origins or (small.ORIGIN, small.LINKS)
    gpu = gpu_of(rows, None, origins)
    return fit_profile(rows, Label(name="mine"), gpu=gpu, link=link_of(gpu, None, origins), origins=origins)


@pytest.fixture(scope="module")
def own_machine() -> Any:
    return fit_own(OWN_ROWS)


@pytest.mark.slow
def test_noise_of_the_own_machine_widens_the_interval_and_is_noted(own_machine: Any) -> None:
    """A machine with noisy measurements still gets a profile."""
    profile, _ = fit_own([*small.other_rows(), *noisy(small.calls(small.SDPA, "sdpa")), *small.link_rows()])
    assert "Attention: the fit is off by" in profile.not_covered
    assert profile.operations["attention"].log_sd > 1 > own_machine[0].operations["attention"].log_sd


def test_element_wise_rates_and_copies_come_back(own_machine: Any) -> None:
    profile: CalibrationProfile = own_machine[0]
    rates = profile.kernels.elementwise
    for op, rate in small.BYTES_PER_S.items():
        assert getattr(rates, op) == pytest.approx(rate, rel=0.02), op
    assert rates.start_s == pytest.approx(small.START_S, rel=0.02)
    assert rates.copy == pytest.approx(small.COPY, rel=0.02)
    assert not rates.fused
    assert profile.kernels.whole_attention
    copies = profile.kernels.copies
    assert (copies.own, copies.keep, copies.append, copies.gather) == (1, 0, 0, 0)
    assert profile.kernels.gemm.head_bytes_per_s == pytest.approx(small.HEAD, rel=1e-3)
    assert profile.host.step_s == pytest.approx(small.REQUEST_S, rel=0.02)
    assert profile.host.layer_s == 0


def test_a_plan_is_for_the_machine_that_was_measured(own_machine: Any) -> None:
    profile: CalibrationProfile = own_machine[0]
    assert profile.cluster is not None
    scenario, notes = make_scenario(ctx=2048, gpus=2, model=small.MODEL, profile=profile)
    assert (scenario.cluster.gpu, scenario.cluster.topology, scenario.request.dtype) == (small.cpu(), "bus", "fp32")
    assert scenario.cluster.link.bandwidth_bytes_per_s == pytest.approx(2e9, rel=0.02)
    assert scenario.links_are_measured
    assert not notes
    _, far = make_scenario(ctx=2**20, gpus=8, model=small.MODEL, profile=profile)
    longer, *extrapolated = far
    assert longer == "mine has 2 GPUs; 8 are simulated on a longer bus"
    assert [note.split(":")[0] for note in extrapolated] == ["extrapolated"] * 2
    elsewhere, text = make_scenario(ctx=2048, gpus=2, model=small.MODEL, profile=profile, cluster="a100-nvlink")
    assert elsewhere.cluster.gpu.name == "a100-80gb"
    assert any("was measured on a-cpu, not on a100-80gb" in note for note in text)


def layer_rows(profile: CalibrationProfile, factor: float) -> list[Measurement]:
    rows = []
    for kernel in profile.attention_kernels:
        costs = layer_costs(profile, small.MODEL, kernel, "fp32")
        for chunk in (64, 1024):
            tokens, prefix = np.array([float(chunk)]), np.array([512.0])
            seconds = (
                costs.qkv_s(tokens) + costs.mixer.append_s(tokens, prefix) + costs.mixer.attention_s(tokens, prefix)
            )
            seconds = (seconds + costs.output_mlp_s(tokens)) * factor
            rows.append(small.row("layer", seconds[0], kernel=kernel, chunk=chunk, prefix=512))
    return rows


@pytest.mark.slow
def test_layers_are_compared_but_not_fitted(own_machine: Any) -> None:
    profile: CalibrationProfile = own_machine[0]
    again, report = fit_own([*OWN_ROWS, *layer_rows(profile, 1.25)])
    assert again == profile
    assert report.layers is not None
    assert report.layers.label == LAYERS
    errors = report.layers.errors()
    assert (errors.num_rows, errors.bias) == (6, pytest.approx(-0.2, abs=1e-6))
    assert report.to_dict()["layers"]["mape"] == pytest.approx(0.2, abs=1e-6)
    assert own_machine[1].layers is None


def test_a_campaign_may_spread() -> None:
    rows = [
        replace(one, spread_s=one.median_s * 0.3) for one in [*small.other_rows(), *small.calls(small.SDPA, "sdpa")]
    ]
    layer = Measurement(
        operation="layer", kernel="sdpa", device="x", dtype="fp32", chunk=64, prefix=0, median_s=1.0, spread_s=0.3,
        source="x",
    )  # fmt: skip
    noisy, _ = fit_own([*rows, layer])
    assert noisy.run_to_run_log_sd == pytest.approx(0.3 / 1.349, rel=0.01)  # intervals are as wide as the spread


def test_a_bad_origin_is_named() -> None:
    with pytest.raises(InputError, match=r"origin: topology: got 'ring', accepted: switch"):
        fit_own(
            [*small.other_rows(), *small.calls(small.SDPA, "sdpa")], small.ORIGIN | small.LINKS | {"topology": "ring"}
        )
