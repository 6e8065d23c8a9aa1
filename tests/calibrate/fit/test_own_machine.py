"""Fits to layers measured on one's own machine: a CPU's rates come back, whole layers are the sum of their parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from calibrate.data import Measurement, Provenance
from calibrate.fit.attention import AttentionRows, fit_blocked, fit_eager
from calibrate.fit.elementwise import fit_prepare
from calibrate.fit.fit import has_waves
from calibrate.fit.gemm import fit_gemm, head_bytes_per_s
from calibrate.fit.profile import Label, fit_profile
from calibrate.fit.report import LAYERS, layer_costs
from calibrate.measure.device import gpu_of, link_of
from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec, load_gpu
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.attention import AttentionRates, BlockedRates, EagerRates, MeasuredSizes
from kvrsim.kernels.elementwise import after_mixer, before_mixer
from kvrsim.kernels.gemm import Product
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.model.load import read_config

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
}
MODEL = read_config(JsonObject(fields=CONFIG, where="test"), "small")
GPU = {
    "name": "a-cpu",
    "memory_bytes": 8_000_000_000,
    "hbm_bytes_per_s": 20e9,
    "peak_flops": {"fp32": 100e9},
    "num_sms": 1,
    "source": "made up",
}
LINK = {"name": "measured", "bandwidth_bytes_per_s": 2e9, "latency_s": 1e-4, "source": "made up"}
ORIGIN: dict[str, Any] = {
    "gpu": GPU,
    "model": CONFIG,
    "model_name": "small",
    "threads": 1,
    "versions": {"torch": "2.13.0", "python": "3.11.7"},
    "command": "kvrsim calibrate compute -m small",
    "date": "2026-01-01",
}
LINKS: dict[str, Any] = {"link": LINK, "topology": "bus", "num_gpus": 2, "gpus_per_node": None}
CHUNKS = (64, 128, 256, 512, 1024, 2048)
PREFIXES = (0, 64, 512, 1024, 2048)
SDPA = BlockedRates(
    causal_flops_per_s=65e9, rectangle_flops_per_s=56e9, start_s=2e-4, query_s=1e-7, key_block=512, skips_masked=False
)
MERGED = replace(SDPA, rectangle_flops_per_s=60e9, key_block=64, skips_masked=True, join_s=2e-7)
UNSKIPPED = replace(SDPA, causal_flops_per_s=56e9, key_block=2**30)  # as torch's math backend
EAGER = EagerRates(flops_per_s=80e9, bytes_per_s=20e9, start_s=1.5e-4)
PAGED = replace(EAGER, measured=MeasuredSizes(sizes=(8e6, 1.2e7, 4e7), factors=(1.0, 2.2, 2.6)))
BYTES_PER_S = {"norm": 50e9, "rotary": 15e9, "activation": 14e9, "residual": 16e9, "embedding": 6e9}
START_S, COPY, HEAD, REQUEST_S, MASK_S = 1e-5, 12e9, 9e9, 6e-4, 8e-10


def cpu() -> GpuSpec:
    spec = Provenance.of([ORIGIN]).gpu
    assert spec is not None
    return spec


def row(operation: str, seconds: float, **fields: Any) -> Measurement:
    defaults = {"kernel": "torch", "device": "A CPU, 1 thread", "dtype": "fp32", "source": "made up"}
    return Measurement(operation=operation, median_s=float(seconds), **(defaults | fields))


def gemm_s(tokens: float, fan_in: int, fan_out: int) -> float:
    """Near proportional to rows, a little dearer for few."""
    return 2 * tokens * fan_in * fan_out / 80e9 * (1 + 0.3 * math.exp(-tokens / 200)) + 2e-5


def gemm_rows(chunks: tuple[int, ...] = CHUNKS) -> list[Measurement]:
    layer = MODEL.layers[0]
    gemms = (*layer.mixer.projections, *layer.mixer.output, *layer.mlp)
    shapes = {(gemm.in_features, gemm.out_features) for gemm in gemms}
    return [
        row("gemm", gemm_s(chunk, *shape), tokens=chunk, in_features=shape[0], out_features=shape[1])
        for chunk in chunks
        for shape in sorted(shapes)
    ]


def calls(rates: AttentionRates, kernel: str, **fields: Any) -> list[Measurement]:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    rows = [
        row("attention", 1.0, kernel=kernel, chunk=chunk, prefix=prefix, **heads, **fields)
        for chunk in CHUNKS
        for prefix in PREFIXES
    ]
    seconds = AttentionRows.of(rows).predicted_s(rates)
    return [replace(one, median_s=float(time)) for one, time in zip(rows, seconds, strict=True)]


def elementwise_rows() -> list[Measurement]:
    before = before_mixer(MODEL, MODEL.layers[0], fused=False)
    after = after_mixer(MODEL, MODEL.layers[0], fused=False, intermediate=1376)
    steps = {step.op: step for step in (*before, *after) if step.op != "copy"}
    rows = []
    for chunk in CHUNKS:
        for op, step in steps.items():
            nbytes = round(step.nbytes * chunk * 2)
            seconds = step.kernels * START_S + nbytes / BYTES_PER_S[op]
            rows.append(row(op, seconds, tokens=chunk, bytes=nbytes))
        nbytes = 4 * chunk * 512 * 2
        rows.append(row("embedding", START_S + nbytes / BYTES_PER_S["embedding"], tokens=chunk, bytes=nbytes))
        nbytes = 2 * chunk * MODEL.layer_cache_bytes(1, 4)
        rows.append(row("cache_append", START_S + nbytes / COPY, chunk=chunk, prefix=0, bytes=nbytes))
    return rows


def prepare_rows() -> list[Measurement]:
    return [
        row("prepare", REQUEST_S + MASK_S * chunk * (chunk + prefix), kernel="sdpa", chunk=chunk, prefix=prefix)
        for chunk in CHUNKS
        for prefix in PREFIXES
    ]


def other_rows() -> list[Measurement]:
    head = row("head", 512 * 32000 * 4 / HEAD, in_features=512, out_features=32000)
    return [*gemm_rows(), *elementwise_rows(), *prepare_rows(), head]


def link_rows() -> list[Measurement]:
    return [
        row("send_recv", 1e-4 + nbytes / 2e9, dtype=None, bytes=nbytes, ranks=2, nodes=1, src=0, dst=1)
        for nbytes in (2**power for power in range(10, 27, 2))
    ]


def fit(rows: list[Measurement], *origins: dict[str, Any]) -> Any:
    told = origins or (ORIGIN, LINKS)
    gpu = gpu_of(rows, None, told)
    return fit_profile(rows, Label(name="mine"), gpu=gpu, link=link_of(gpu, None, told), origins=told)


@pytest.fixture(scope="module")
def fitted() -> Any:
    rows = [*other_rows(), *calls(MERGED, "flash"), *calls(SDPA, "sdpa"), *calls(EAGER, "eager"), *link_rows()]
    return fit(rows)


# -- element types


# -- known rates come back


@pytest.mark.parametrize(
    ("rates", "name"),
    [(SDPA, "sdpa"), (MERGED, "flash")],
)
def test_kernels_by_what_they_cover_come_back(rates: BlockedRates, name: str) -> None:
    found = fit_blocked(calls(rates, name), cpu(), name=name, skips_masked=rates.skips_masked, head_dim=64)
    assert found.own.errors().mape < 0.01
    assert found.cross_validated.errors().mape < 0.02
    assert found.rates.key_block == rates.key_block
    assert found.rates.rectangle_flops_per_s == pytest.approx(rates.rectangle_flops_per_s, rel=0.02)
    assert found.rates.causal_flops_per_s == pytest.approx(rates.causal_flops_per_s, rel=0.02)
    assert found.rates.measured is None


def test_factors_by_queries_come_back() -> None:
    true = replace(SDPA, measured=MeasuredSizes(sizes=(64.0, 256.0, 1024.0), factors=(1.6, 1.2, 1.0)))
    found = fit_blocked(calls(true, "sdpa"), cpu(), name="sdpa", skips_masked=False, head_dim=64)
    assert found.rates.measured is not None
    assert found.own.errors().mape < 0.04


def test_eager_scores_that_leave_the_cache_come_back() -> None:
    rows = calls(PAGED, "eager")
    found = fit_eager(rows, cpu(), head_dim=64)
    assert found.rates.measured is not None
    assert len(found.rates.measured.sizes) <= 20
    assert found.own.errors().median_ape < 0.02
    assert found.own.errors().mape < 0.05
    plain = fit_eager(calls(EAGER, "eager"), cpu(), head_dim=64)
    assert plain.rates.measured is None
    assert plain.own.errors().mape < 0.002


def test_products_of_a_cpu_hardly_step() -> None:
    found = fit_gemm(gemm_rows(), cpu(), keep_shapes={(512, 512), (512, 1376), (1376, 512), (512, 256)})
    assert not has_waves(cpu())
    assert has_waves(load_gpu("l40s"))
    assert found.rates.step == 16
    assert len(found.rates.measured) == 4
    tokens = np.arange(64.0, 2048.0, 16.0)
    for shape in ((512, 512), (512, 1376), (1376, 512)):
        predicted = found.rates.seconds(tokens, (Product(*shape),), 4)
        true = np.array([gemm_s(one, *shape) for one in tokens])
        np.testing.assert_allclose(predicted, true, rtol=0.03)
        assert (np.diff(predicted) / predicted[1:] < 0.25).all()


def test_logits_stream_their_weights() -> None:
    head = row("head", 512 * 32000 * 4 / HEAD, in_features=512, out_features=32000)
    assert head_bytes_per_s([head], cpu()) == pytest.approx(HEAD, rel=1e-3)
    assert head_bytes_per_s([replace(head, median_s=1e-9)], cpu()) == cpu().hbm_bytes_per_s
    assert head_bytes_per_s([], cpu()) is None


def test_what_comes_before_the_first_layer() -> None:
    found = fit_prepare(prepare_rows())
    assert found.step_s == pytest.approx(REQUEST_S, rel=0.02)
    assert found.mask_element_s == pytest.approx(MASK_S, rel=0.02)
    no_mask = fit_prepare([replace(one, kernel="flash", median_s=REQUEST_S) for one in prepare_rows()])
    assert (no_mask.step_s, no_mask.mask_element_s) == (pytest.approx(REQUEST_S), 0.0)


# -- the profile


def test_element_wise_rates_and_copies_come_back(fitted: Any) -> None:
    profile: CalibrationProfile = fitted[0]
    rates = profile.kernels.elementwise
    for op, rate in BYTES_PER_S.items():
        assert getattr(rates, op) == pytest.approx(rate, rel=0.02), op
    assert rates.start_s == pytest.approx(START_S, rel=0.02)
    assert rates.copy == pytest.approx(COPY, rel=0.02)
    assert not rates.fused
    assert profile.kernels.whole_attention
    copies = profile.kernels.copies
    assert (copies.own, copies.keep, copies.append, copies.gather) == (1, 0, 0, 0)
    assert profile.kernels.gemm.head_bytes_per_s == pytest.approx(HEAD, rel=1e-3)
    assert profile.host.step_s == pytest.approx(REQUEST_S, rel=0.02)
    assert profile.host.layer_s == 0


def test_a_plan_is_for_the_machine_that_was_measured(fitted: Any) -> None:
    profile: CalibrationProfile = fitted[0]
    assert profile.cluster is not None
    scenario, notes = make_scenario(ctx=2048, gpus=2, model=MODEL, profile=profile)
    assert (scenario.cluster.gpu, scenario.cluster.topology, scenario.request.dtype) == (cpu(), "bus", "fp32")
    assert scenario.cluster.link.bandwidth_bytes_per_s == pytest.approx(2e9, rel=0.02)
    assert scenario.links_are_measured
    assert not notes
    _, far = make_scenario(ctx=2**20, gpus=8, model=MODEL, profile=profile)
    longer, *extrapolated = far
    assert longer == "mine has 2 GPUs; 8 are simulated on a longer bus"
    assert [note.split(":")[0] for note in extrapolated] == ["extrapolated"] * 2
    elsewhere, said = make_scenario(ctx=2048, gpus=2, model=MODEL, profile=profile, cluster="a100-nvlink")
    assert elsewhere.cluster.gpu.name == "a100-80gb"
    assert any("was measured on a-cpu, not on a100-80gb" in note for note in said)


# -- whole layers


def layer_rows(profile: CalibrationProfile, factor: float) -> list[Measurement]:
    rows = []
    for kernel in profile.attention_kernels:
        costs = layer_costs(profile, MODEL, kernel, "fp32")
        for chunk in (64, 1024):
            tokens, prefix = np.array([float(chunk)]), np.array([512.0])
            seconds = (
                costs.qkv_s(tokens) + costs.mixer.append_s(tokens, prefix) + costs.mixer.attention_s(tokens, prefix)
            )
            seconds = (seconds + costs.output_mlp_s(tokens)) * factor
            rows.append(row("layer", seconds[0], kernel=kernel, chunk=chunk, prefix=512))
    return rows


def test_layers_are_compared_but_not_fitted(fitted: Any) -> None:
    profile: CalibrationProfile = fitted[0]
    same = [*other_rows(), *calls(MERGED, "flash"), *calls(SDPA, "sdpa"), *calls(EAGER, "eager"), *link_rows()]
    again, report = fit([*same, *layer_rows(profile, 1.25)])
    assert again == profile
    assert report.layers is not None
    assert report.layers.label == LAYERS
    errors = report.layers.errors()
    assert (errors.num_rows, errors.bias) == (6, pytest.approx(-0.2, abs=1e-6))
    assert report.to_dict()["layers"]["mape"] == pytest.approx(0.2, abs=1e-6)
    assert "6 whole layers, which were not fitted" in report.to_markdown()
    assert fitted[1].layers is None


# -- what is refused


@pytest.mark.parametrize(("share", "refused"), [(0.2, False), (0.3, True)])
def test_a_campaign_may_spread_further(share: float, refused: bool) -> None:
    rows = [replace(one, spread_s=one.median_s * share) for one in [*other_rows(), *calls(SDPA, "sdpa")]]
    if refused:
        with pytest.raises(InputError, match="gemm rows with a median spread of 30%"):
            fit(rows)
    else:
        assert fit(rows)[0].attention_kernels == ("sdpa",)


# -- origins


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", {"model_type": "bert"}, "model_type"),
        ("topology", "ring", r"origin: topology: got 'ring', accepted: switch"),
    ],
)
def test_a_bad_origin_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit([*other_rows(), *calls(SDPA, "sdpa")], ORIGIN | LINKS | {key: value})
