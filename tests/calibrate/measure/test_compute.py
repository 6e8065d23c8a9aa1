"""Timing of layers: parts add up to the layer, rows describe what was timed, the CUDA path runs on a fake device."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from calibrate.measure import compute as compute_bench
from calibrate.measure import forward as forward_timer
from calibrate.measure.campaign import SkippedPoint
from calibrate.measure.compute import BARE_LAYER, ComputeBench, Point, compute_rows, grid
from calibrate.measure.forward import LAYERS, ComputeSetup, ForwardTimer
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.load import read_config
from kvrsim.model.spec import ModelSpec
from kvrsim.runtime.marks import CudaClock

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 96},
    "falcon": SIZES | {"model_type": "falcon", "multi_query": True, "parallel_attn": True},
    "falcon-rw": SIZES | {"model_type": "falcon", "multi_query": False, "parallel_attn": False, "alibi": True},
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return read_config(JsonObject(fields=config, where="test"), "tiny")


def setup_of(name: str, kernels: tuple[str, ...] = ("sdpa",), max_context: int = 256) -> ComputeSetup:
    config = CONFIGS[name]
    return ComputeSetup(
        model=spec_of(config),
        config=config,
        device="cpu",
        dtype="fp32",
        kernels=kernels,
        max_context=max_context,
        threads=torch.get_num_threads(),
    )


def at(chunk: int, prefix: int = 0, kernel: str = "sdpa", kind: str = "") -> Point:
    return Point(kernel=kernel, chunk=chunk, prefix=prefix, kind=kind)


HOST = at(64, kind="host")


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_a_layer_add_up_and_become_rows(name: str) -> None:
    setup = setup_of(name)
    bench = ComputeBench.build(setup)
    samples = {}
    for point in (at(64), at(64, 64), at(128, 32)):
        taken = bench.sample(point)
        samples[point] = [taken, taken]
        parts = ("before_attention", "cache_append", "attention", "after_attention")
        assert taken["layer"] == pytest.approx(sum(taken[part] for part in parts), rel=1e-9)
        products = [key for key in taken if key.startswith("gemm ")]
        assert products
        assert all(0 < taken[key] < taken["layer"] for key in products)
        assert 0 < taken["norm"] < taken["layer"]
    rows = bench.rows(samples)
    shapes = {(row.in_features, row.out_features) for row in rows if row.operation == "gemm"}
    layer = setup.model.layers[0]
    assert shapes == {
        (gemm.in_features, gemm.out_features) for gemm in (*layer.mixer.projections, *layer.mixer.output, *layer.mlp)
    }
    seen = {row.operation for row in rows}
    expected = {"attention", "layer", "before_attention", "after_attention", "cache_append", "prepare", "head"}
    assert expected <= seen
    assert ("rotary" in seen) or setup.model.alibi
    assert all(row.spread_s == 0.0 for row in rows if row.operation == "layer")
    bench.close()


def test_means_hold_what_is_often_late_and_draw_in_what_is_far_off() -> None:
    setup = setup_of("llama")
    bench = ComputeBench.build(setup)
    once = {name: seconds for name, seconds in bench.sample(at(64)).items() if name != BARE_LAYER}
    scales = (1.0, 1.0, 1.0, 1.2, 1.4, 30.0)
    rows = bench.rows({at(64): [{name: scale * one for name, one in once.items()} for scale in scales]})
    layer = next(row for row in rows if row.operation == "layer")
    assert layer.median_s == pytest.approx(1.1 * once["layer"])
    fence = 1.35 + 1.5 * 0.35  # third quartile plus one and a half interquartile ranges
    assert layer.mean_s == layer.expected_s == pytest.approx((sum(scales[:5]) + fence) / 6 * once["layer"])
    bench.close()


def test_points_take_their_kernels_and_share_their_weights() -> None:
    bench = ComputeBench.build(setup_of("llama", kernels=("sdpa", "eager", "flash")))
    blocks = [point for point in bench.points() if point.kind == "block"]
    kernels = {point.kernel for point in bench.points() if point not in blocks}
    assert kernels == {"sdpa", "eager", "flash"}
    assert blocks == [at(size, size, kernel, "block") for kernel in ("flash", "sdpa") for size in (128, 64)]
    taken = {point: [bench.sample(point)] for point in blocks}
    assert all(bench.expected_s(point) > 0 for point in blocks)
    rows = bench.rows(taken)
    assert [row.operation for row in rows] == ["block", "merge"] * len(blocks)
    assert {(row.chunk, row.prefix, row.num_attention_heads) for row in rows if row.operation == "block"} == {
        (128, 128, 4),
        (64, 64, 4),
    }
    assert {row.bytes for row in rows if row.operation == "merge"} == {12 * 4 * 17 * 128, 12 * 4 * 17 * 64}
    first, second, third = (bench.timer.models[kernel] for kernel in ("sdpa", "eager", "flash"))
    assert len(bench.setup.config) == len(CONFIGS["llama"])
    weights = {model.base_model.layers[0].mlp.up_proj.weight.data_ptr() for model in (first, second, third)}
    assert len(weights) == 1
    assert len(first.base_model.layers) == LAYERS
    for kernel in kernels:
        assert bench.sample(at(64, 64, kernel))["attention"] > 0


def test_what_does_not_fit_into_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ComputeBench.build(setup_of("llama"))
    monkeypatch.setattr(forward_timer, "free_memory", lambda: 1000.0)
    with pytest.raises(SkippedPoint, match="GiB are free"):
        bench.sample(at(64))


@pytest.fixture
def on_cuda(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> ComputeBench:
    """A bench on a fake device: a mark takes 1 ms, the last product of a layer 10 ms."""
    for module in (compute_bench, forward_timer):
        monkeypatch.setattr(module, "HEAT_S", 0.05)
    built = ComputeBench.build(setup_of("llama"))
    fake_cuda.event_s = 1e-3
    bench = ComputeBench(built.setup, ForwardTimer(built.setup, CudaClock(fake_cuda), models=built.timer.models))
    for layer in built.timer.models["sdpa"].base_model.layers:
        _make_longer(layer.mlp.down_proj, fake_cuda)
    bench._probe()
    return bench


def _make_longer(module: Any, cuda: Any) -> None:
    forward = module.forward

    def longer(*arguments: Any) -> Any:
        cuda.compute(10e-3)
        return forward(*arguments)

    module.forward = longer


def test_on_cuda_the_device_is_held_until_the_host_is_ahead_and_both_are_timed(
    on_cuda: ComputeBench, fake_cuda: Any
) -> None:
    assert on_cuda.points()[0] == HOST
    taken = on_cuda.sample(at(64))
    assert len(fake_cuda.slept_cycles) >= 2, "the second forward of a sample finds the device busy"
    assert taken["gemm 96 64"] == pytest.approx(10e-3)
    host = on_cuda.sample(HOST)
    assert set(host) == {"host_layer", "host_prepare"}
    assert 0 < host["host_layer"] < 1.0
    assert 0 < host["host_prepare"] < 1.0
    rows = on_cuda.rows({HOST: [host, host, host]})
    assert [(row.operation, row.dtype) for row in rows] == [("host_layer", "fp32"), ("host_prepare", "fp32")]
    assert on_cuda.expected_s(HOST) > 0


def test_what_marks_take_on_the_device_is_in_no_part(on_cuda: ComputeBench) -> None:
    taken = on_cuda.sample(at(64))
    assert taken["layer"] == pytest.approx(10e-3), "26 marks of 1 ms each are in none of it"
    for part in ("cache_append", "rotary", "activation", "residual", "norm", "attention", "prepare"):
        assert taken[part] == pytest.approx(0.0, abs=1e-12), part


def test_a_heated_forward_follows_another_one_not_the_hold(
    on_cuda: ComputeBench, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hold needs little power, and would let the clock rise again."""
    issued: list[str] = []
    compute, sleep = fake_cuda.compute, fake_cuda._sleep

    def compute_noted(seconds: float) -> None:
        if seconds == 10e-3:  # a layer
            issued.append("layer")
        compute(seconds)

    def sleep_noted(cycles: int) -> None:
        issued.append("hold")
        sleep(cycles)

    monkeypatch.setattr(fake_cuda, "compute", compute_noted)
    monkeypatch.setattr(fake_cuda, "_sleep", sleep_noted)
    cold = on_cuda.timer.forward(at(64))
    after_hold = issued[len(issued) - issued[::-1].index("hold") :]
    assert after_hold == ["layer"] * LAYERS
    hot = on_cuda.timer.forward(at(64), heat=True)
    after_hold = issued[len(issued) - issued[::-1].index("hold") :]
    assert after_hold == ["layer"] * 2 * LAYERS
    assert hot["layer"] == pytest.approx(cold["layer"]), "only the last one is timed"


def test_parts_are_scaled_to_layers_timed_without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_bench, "_MARKED_S", 100.0)  # layers then count as short on any machine
    setup = setup_of("llama")
    bench = ComputeBench.build(setup)
    once = dict(bench.sample(at(64)))
    assert BARE_LAYER in once, "short layers are timed without marks, too"
    common: dict[str, Any] = {"dtype": "fp32", "device": "x"}

    def rows_of(bare_s: float) -> dict[str, float]:
        samples = {at(64): [once | {BARE_LAYER: bare_s}] * 3}
        return {row.operation: row.median_s for row in compute_rows(samples, setup.model, **common)}

    whole, half = rows_of(once["layer"]), rows_of(0.5 * once["layer"])
    assert half["layer"] == pytest.approx(0.5 * whole["layer"])
    assert half["gemm"] == pytest.approx(0.5 * whole["gemm"])
    assert half["head"] == whole["head"], "it is outside of the layers"
    assert rows_of(2 * once["layer"]) == whole, "marks make nothing faster"
    bench.close()


def test_what_cannot_be_timed_is_refused() -> None:
    from kvrsim.model.load import load_model

    common = {"device": "cpu", "dtype": "fp32", "kernels": ("sdpa",), "max_context": 64, "threads": 1}
    with pytest.raises(InputError, match=r"model.*dense"):
        ComputeSetup(model=load_model("mixtral-8x7b"), config={}, **common)


def test_the_grid_separates_chunk_from_prefix() -> None:
    points = grid(4096, ("sdpa", "eager"))
    assert len(set(points)) == len(points)
    assert all(point.chunk + point.prefix <= 4096 for point in points)
    prefixes = {chunk: {p.prefix for p in points if p.chunk == chunk and p.kernel == "sdpa"} for chunk in (64, 1024)}
    assert all(len(result) >= 3 for result in prefixes.values())
    assert {point.kernel for point in points} == {"sdpa", "eager"}
    assert grid(10, ("sdpa",)) != []
    assert compute_rows({}, spec_of(CONFIGS["llama"]), dtype="fp32", device="x") == []
