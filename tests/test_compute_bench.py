"""Timing of layers: the parts add up to the layer, the rows say what was timed, CUDA's path runs on a fake."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from calibrate import compute_bench
from calibrate.campaign import Policy, Skipped, estimate
from calibrate.clock import CudaClock
from calibrate.compute_bench import LAYERS, ComputeBench, ComputeSetup
from calibrate.compute_rows import compute_rows
from calibrate.grid import Point, grid
from kvrsim.architectures import read_config
from kvrsim.errors import InputError
from kvrsim.model import ModelSpec
from kvrsim.units import JsonObject

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 96},
    "qwen3": SIZES | {"model_type": "qwen3", "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16},
    "falcon": SIZES | {"model_type": "falcon", "multi_query": True, "parallel_attn": True},
    "falcon-40b": SIZES | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
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


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_a_layer_add_up_and_become_rows(name: str) -> None:
    setup = setup_of(name)
    bench = ComputeBench.build(setup)
    samples = {}
    for point in ("sdpa 64+0", "sdpa 64+64", "sdpa 128+32"):
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
    assert shapes == {(gemm.in_features, gemm.out_features) for gemm in (*layer.qkv, layer.output, *layer.mlp)}
    seen = {row.operation for row in rows}
    expected = {"attention", "layer", "before_attention", "after_attention", "cache_append", "prepare", "head"}
    assert expected <= seen
    assert ("rotary" in seen) or setup.model.alibi
    assert all(row.spread_s == 0.0 for row in rows if row.operation == "layer")
    bench.close()


def test_rotary_does_not_hold_the_norms_of_queries_and_keys() -> None:
    """The cost model counts those norms by themselves: a rotary rate that held them would count them twice."""
    bench = ComputeBench.build(setup_of("qwen3"))
    model = bench._models["sdpa"]
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            module.register_forward_hook(lambda *_: time.sleep(0.02))
    taken = bench.sample("sdpa 64+0")
    assert taken["before_attention"] > 0.04
    assert taken["rotary"] < 0.02
    bench.close()


def test_means_hold_what_is_often_late_and_draw_in_what_is_far_off() -> None:
    setup = setup_of("llama")
    bench = ComputeBench.build(setup)
    once = bench.sample("sdpa 64+0")
    scales = (1.0, 1.0, 1.0, 1.2, 1.4, 30.0)
    rows = bench.rows({"sdpa 64+0": [{name: scale * one for name, one in once.items()} for scale in scales]})
    layer = next(row for row in rows if row.operation == "layer")
    assert layer.median_s == pytest.approx(1.1 * once["layer"])
    fence = 1.35 + 1.5 * 0.35  # the third quartile and one and a half interquartile ranges
    assert layer.mean_s == layer.expected_s == pytest.approx((sum(scales[:5]) + fence) / 6 * once["layer"])
    bench.close()


def test_points_take_their_kernels_and_share_their_weights() -> None:
    bench = ComputeBench.build(setup_of("llama", kernels=("sdpa", "eager", "flash")))
    kernels = {Point.parse(point).kernel for point in bench.points()}
    assert kernels == {"sdpa", "eager", "flash"}
    first, second, third = (bench._models[kernel] for kernel in ("sdpa", "eager", "flash"))
    assert len(bench.setup.config) == len(CONFIGS["llama"])
    weights = {model.base_model.layers[0].mlp.up_proj.weight.data_ptr() for model in (first, second, third)}
    assert len(weights) == 1
    assert len(first.base_model.layers) == LAYERS
    for kernel in kernels:
        assert bench.sample(f"{kernel} 64+64")["attention"] > 0


def test_longer_points_are_expected_to_take_longer() -> None:
    bench = ComputeBench.build(setup_of("llama", max_context=1024))
    assert bench.expected_s("sdpa 64+0") < bench.expected_s("sdpa 1024+0")
    assert bench.expected_s("sdpa 512+0") < bench.expected_s("sdpa 512+512")
    assert estimate(bench, Policy(budget_s=1e-6)).points == ("sdpa 64+0",)


def test_what_does_not_fit_into_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ComputeBench.build(setup_of("llama"))
    monkeypatch.setattr(compute_bench, "_free_bytes", lambda: 1000)
    with pytest.raises(Skipped, match="GiB are free"):
        bench.sample("sdpa 64+0")


def test_a_device_that_is_out_of_memory_skips_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ComputeBench.build(setup_of("llama"))

    def explode(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(ComputeBench, "_timed", explode)
    with pytest.raises(Skipped, match="out of the device's memory"):
        bench.sample("sdpa 64+0")


def test_on_cuda_the_device_is_held_until_the_host_is_ahead_and_both_are_timed(fake_cuda: Any) -> None:
    built = ComputeBench.build(setup_of("llama"))
    cuda = fake_cuda
    cuda.event_s = 1e-3
    bench = ComputeBench(built.setup, CudaClock(cuda), _models=built._models)
    bench._probe()
    assert bench.points()[0] == "host sdpa"
    taken = bench.sample("sdpa 64+0")
    assert taken["cache_append"] == pytest.approx(1e-3, abs=1e-9), "one mark to the next"
    assert len(cuda.slept_cycles) >= 2, "the second forward of a sample finds the device busy"
    host = bench.sample("host sdpa")
    assert set(host) == {"host_layer"}
    assert 0 < host["host_layer"] < 1.0
    rows = bench.rows({"host sdpa": [host, host, host]})
    assert [(row.operation, row.dtype) for row in rows] == [("host_layer", "fp32")]
    assert bench.expected_s("host sdpa") > 0


def test_hooks_are_taken_off_again() -> None:
    bench = ComputeBench.build(setup_of("llama"))
    bench.sample("sdpa 64+0")
    model = bench._models["sdpa"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_timed_is_refused() -> None:
    from kvrsim.model import load_model

    common = {"device": "cpu", "dtype": "fp32", "kernels": ("sdpa",), "max_context": 64, "threads": 1}
    with pytest.raises(InputError, match=r"model.*dense"):
        ComputeSetup(model=load_model("mixtral-8x7b"), config={}, **common)


def test_the_grid_separates_chunk_from_prefix() -> None:
    points = grid(4096, ("sdpa", "eager"))
    assert len(set(points)) == len(points)
    assert all(point.chunk + point.prefix <= 4096 for point in points)
    assert all(Point.parse(point.key) == point for point in points)
    prefixes = {chunk: {p.prefix for p in points if p.chunk == chunk and p.kernel == "sdpa"} for chunk in (64, 1024)}
    assert all(len(found) >= 3 for found in prefixes.values())
    assert {point.kernel for point in points} == {"sdpa", "eager"}
    assert grid(10, ("sdpa",)) != []
    assert compute_rows({}, spec_of(CONFIGS["llama"]), dtype="fp32", device="x") == []
