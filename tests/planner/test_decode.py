"""Decode steps: what they must read, how they grow, and that engines' fused passes cost no kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.kernels.gemm import GEMM_TYPES, Product
from kvrsim.kernels.profile import builtin_profiles, load_profile
from kvrsim.placement import PlacedScenario
from kvrsim.program import Array
from planner.decode import decoding_rank, step_s
from tests.building import tokens

FEW = np.array([1.0, 8.0, 64.0])  # rows of products in decode steps


def rank_of(model: str, cluster: str, dtype: str | None = None) -> PlacedScenario:
    scenario, _ = make_scenario(ctx=4096, gpus=1, model=model, cluster=cluster, dtype=dtype, engine="vllm")
    return decoding_rank(scenario, 1)


@pytest.mark.parametrize(
    ("model", "cluster", "dtype"),
    [
        ("llama-3.1-8b", "h100-nvlink", None),
        ("llama-3.1-70b", "b200-nvlink5", "fp8"),
        ("glm-5", "b300-nvlink5", "fp8"),
        ("qwen3.5-27b", "h200-nvlink", None),
        ("gpt-oss-120b", "h200-nvlink", None),
    ],
)
def test_a_step_reads_the_weights_of_dense_layers_and_grows(model: str, cluster: str, dtype: str | None) -> None:
    rank = rank_of(model, cluster, dtype)
    share = rank.share
    width = rank.request.dtype_bytes
    dense = sum(layer.weight_bytes(width) for layer in share.layers if not layer.num_experts)
    least_s = dense / rank.cluster.gpu.hbm_bytes_per_s
    steps = [step_s(rank, batch, 4096) for batch in (1, 16, 256)]
    assert least_s < steps[0] < steps[1] < steps[2] < 256 * steps[0]
    contexts = [step_s(rank, 16, context) for context in (16, 4096, 65536)]
    assert contexts[0] <= contexts[1] <= contexts[2]


def test_sparse_attention_reads_chosen_keys_and_index_keys() -> None:
    """From 16k to 32k tokens, a step of GLM-5 grows only by the index keys that it reads."""
    rank = rank_of("glm-5", "b300-nvlink5", "fp8")
    mixers = [layer.mixer for layer in rank.share.layers if layer.mixer is not None]
    index_bytes = 8 * 16384 * sum(mixer.index_key_bytes for mixer in mixers)
    grown_s = step_s(rank, 8, 32768) - step_s(rank, 8, 16384)
    assert 0.3 * index_bytes < grown_s * rank.cluster.gpu.hbm_bytes_per_s < 1.5 * index_bytes


@pytest.mark.parametrize("name", builtin_profiles())
def test_types_that_quantise_start_like_half_precision(name: str) -> None:
    kernels = load_profile(name).kernels
    decoding = kernels.in_decode
    assert decoding.gemm == kernels.gemm
    product = Product(4096, 4096)
    for compute, rates in kernels.gemm_types.items():
        width = GEMM_TYPES[compute]
        if not width.quantised:
            assert decoding.gemm_types[compute] == rates
            continue
        faster = decoding.gemm_types[compute]
        assert faster.launch_s <= kernels.gemm.launch_s
        plain = replace(rates, measured=())
        assert (faster.product_s(FEW, product, width) <= plain.product_s(FEW, product, width)).all()


def test_latents_are_not_expanded() -> None:
    """A layer's decode step is its row costs and attention to the latents: keys and values are not made from them."""
    rank = rank_of("deepseek-v3", "b200-nvlink5")
    costs = rank.layer_costs(rank.decode_cost)[0]
    keys: Array = tokens(1000.0)
    whole_s = costs.qkv_s(tokens(1.0)) + costs.mixer.decode_s(keys) + costs.output_mlp_s(tokens(1.0))
    expand_s = costs.mixer.local_op_s(tokens(1.0))
    assert expand_s is not None
    assert costs.decode_s(keys) == pytest.approx(whole_s - expand_s)
