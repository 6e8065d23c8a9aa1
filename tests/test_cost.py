"""Costs: what attention covers, what a layer moves, and that no profile beats the datasheet."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrsim.cost.layer import LayerCosts
from kvrsim.errors import InputError
from kvrsim.model import ModelSpec
from kvrsim.profile import CalibrationProfile, HostRates
from kvrsim.program import Array, Compute
from kvrsim.request import Request
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES


def tokens(*values: float) -> Array:
    return np.array(values, dtype=float)


@pytest.fixture(scope="module")
def scenario(make: Any, config: Any) -> Scenario:
    """A small model on a GPU whose every rate is one: seconds are FLOPs or bytes."""
    rng = random.Random(0)
    cluster = make.cluster(rng, 2, topologies=("switch",))
    profile: CalibrationProfile = make.profile(rng, cluster.gpu, sends="overlap", host=False)
    kernels = replace(
        profile.kernels,
        gemm_flops_per_s=1.0,
        attention_flops_per_s={"eager": 1.0, "flash": 1.0},
        hbm_bytes_per_s=1e30,
        score_bytes=0.0,
        head_on_all_tokens=False,
    )
    return Scenario(
        model=config(),
        cluster=cluster,
        request=Request(context_len=1000),
        profile=replace(profile, kernels=kernels),
        kernel="eager",
    )


def with_rates(scenario: Scenario, **rates: Any) -> Scenario:
    assert scenario.profile is not None
    return replace(scenario, profile=replace(scenario.profile, kernels=replace(scenario.profile.kernels, **rates)))


def costs_of(scenario: Scenario, model: ModelSpec | None = None) -> LayerCosts:
    return (scenario if model is None else replace(scenario, model=model)).layer_costs()[0]


def test_projections_cost_two_flops_a_weight(scenario: Scenario) -> None:
    costs = costs_of(scenario)
    assert costs.qkv_s(tokens(1, 10)) == pytest.approx([2 * 3 * 64 * 64, 20 * 3 * 64 * 64])
    weights = 64 * 64 + 3 * 64 * 96
    assert costs.output_mlp_s(tokens(1, 10)) == pytest.approx([2 * weights, 20 * weights])


def test_eager_computes_the_whole_rectangle(scenario: Scenario) -> None:
    seconds = costs_of(scenario).attention_s(tokens(3, 3), tokens(0, 7))
    assert seconds == pytest.approx([4 * 64 * 3 * 3, 4 * 64 * 3 * 10])


def test_flash_leaves_the_masked_half(scenario: Scenario) -> None:
    """Half of the chunk's own square, all of the prefix's rectangle."""
    flash = costs_of(replace(scenario, kernel="flash"))
    seconds = flash.attention_s(tokens(6, 6), tokens(0, 10))
    assert seconds == pytest.approx([4 * 64 * 18, 4 * 64 * (18 + 60)])


def test_the_score_matrix_moves_through_memory(scenario: Scenario) -> None:
    slow = with_rates(scenario, hbm_bytes_per_s=1.0, score_bytes=28.0)
    more = costs_of(slow).attention_s(tokens(3), tokens(7)) - costs_of(scenario).attention_s(tokens(3), tokens(7))
    assert more == pytest.approx([28 * 4 * 3 * 10])
    one_byte = costs_of(replace(slow, request=Request(context_len=1000, dtype="fp8")))
    flops = costs_of(scenario).attention_s(tokens(3), tokens(7))
    assert one_byte.attention_s(tokens(3), tokens(7)) - flops == pytest.approx([14 * 4 * 3 * 10])


@given(chunk=st.integers(1, 60), prefix=st.integers(0, 60), window=st.integers(1, 80))
@settings(max_examples=100)
def test_windows(scenario: Scenario, config: Any, chunk: int, prefix: int, window: int) -> None:
    """Flash covers what is not masked, half of the diagonal; eager the chunk's square and the window's tail."""
    model = config(model_type="mistral", sliding_window=window)
    flash = costs_of(replace(scenario, kernel="flash"), model).attention_s(tokens(chunk), tokens(prefix))
    seen = sum(min(query + 1, window) for query in range(prefix, prefix + chunk))
    diagonal = 0.5 * sum(query < window for query in range(prefix, prefix + chunk))
    assert flash == pytest.approx([4 * 64 * (seen - diagonal)])
    eager = costs_of(scenario, model).attention_s(tokens(chunk), tokens(prefix))
    assert eager == pytest.approx([4 * 64 * chunk * (min(prefix, window) + chunk)])


def test_a_window_wider_than_the_context_changes_nothing(scenario: Scenario, config: Any) -> None:
    for kernel in ("eager", "flash"):
        here = replace(with_rates(scenario, hbm_bytes_per_s=1.0), kernel=kernel)
        wide = costs_of(here, config(model_type="mistral", sliding_window=1000))
        plain = costs_of(here)
        for chunk, prefix in ((tokens(5), tokens(0)), (tokens(9), tokens(900))):
            assert wide.attention_s(chunk, prefix) == pytest.approx(plain.attention_s(chunk, prefix))
            assert wide.append_s(chunk, prefix) == pytest.approx(plain.append_s(chunk, prefix))
            assert wide.handed_kv_bytes(prefix + chunk) == pytest.approx(plain.handed_kv_bytes(prefix + chunk))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_eager_code_repeats_shared_heads(kv_heads: int, scenario: Scenario, config: Any) -> None:
    model = config(num_key_value_heads=kv_heads)
    times = {}
    for kernel in ("eager", "flash"):
        here = replace(scenario, kernel=kernel)
        slow = costs_of(with_rates(here, hbm_bytes_per_s=1.0), model).attention_s(tokens(3), tokens(7))
        times[kernel] = (slow - costs_of(here, model).attention_s(tokens(3), tokens(7))).item()
    repeated = 0 if kv_heads == 4 else 10 * 2 * (kv_heads + 4) * 16 * 2
    assert times == {"eager": pytest.approx(repeated), "flash": pytest.approx(0)}


def test_shared_heads_send_less(scenario: Scenario, config: Any) -> None:
    sizes = [costs_of(scenario, config(num_key_value_heads=heads)).kv_bytes(tokens(5)).item() for heads in (4, 2, 1)]
    assert sizes == [5 * 2 * 64 * 2, 5 * 2 * 32 * 2, 5 * 2 * 16 * 2]


@pytest.mark.parametrize("active", [1, 2, 8])
def test_only_active_experts_compute(active: int, scenario: Scenario, config: Any) -> None:
    keys = dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=active)
    costs = costs_of(scenario, config(**keys))
    weights = 64 * 64 + active * 3 * 64 * 96 + 64 * 8
    assert costs.output_mlp_s(tokens(10)) == pytest.approx([2 * 10 * weights])


def test_shared_experts_compute_for_every_token(scenario: Scenario, config: Any) -> None:
    keys = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40)
    costs = costs_of(scenario, config(model_type="qwen2_moe", **keys))
    weights = 64 * 64 + 2 * 3 * 64 * 24 + 64 * 8 + 3 * 64 * 40 + 64
    assert costs.output_mlp_s(tokens(10)) == pytest.approx([2 * 10 * weights])


def test_shared_experts_move_their_own_width(scenario: Scenario, config: Any) -> None:
    """An element-wise kernel a step: ten bytes a feature of the gated MLP, routed experts and shared one alike."""
    slow = with_rates(scenario, gemm_flops_per_s=1e30, hbm_bytes_per_s=1.0, fused=False)
    keys = dict(model_type="qwen2_moe", num_experts=8, num_experts_per_tok=2)

    def seconds(routed: int, shared: int) -> float:
        widths = dict(moe_intermediate_size=routed, shared_expert_intermediate_size=shared)
        return float(costs_of(slow, config(**keys, **widths)).output_mlp_s(tokens(1)).item())

    assert seconds(25, 40) - seconds(24, 40) == pytest.approx(2 * 10)
    assert seconds(24, 41) - seconds(24, 40) == pytest.approx(10)


@given(seed=st.integers(0, 2**32), batch=st.integers(2, 9))
@settings(max_examples=40)
def test_a_batch_costs_as_many_times_as_much(seed: int, batch: int, make: Any) -> None:
    """Calibrated rates know no fixed cost; messages carry all sequences."""
    rng = random.Random(seed)
    scenario = make.scenario(rng, roofline=False)
    one = replace(scenario, request=replace(scenario.request, batch=1))
    many = replace(scenario, request=replace(scenario.request, batch=batch))
    chunk, prefix = tokens(1, 50), tokens(0, 90)
    for less, more in zip(one.layer_costs(), many.layer_costs(), strict=True):
        assert more.qkv_s(chunk) == pytest.approx(batch * less.qkv_s(chunk))
        assert more.append_s(chunk, prefix) == pytest.approx(batch * less.append_s(chunk, prefix))
        assert more.attention_s(chunk, prefix) == pytest.approx(batch * less.attention_s(chunk, prefix))
        assert more.output_mlp_s(chunk) == pytest.approx(batch * less.output_mlp_s(chunk))
        assert more.kv_bytes(chunk) == pytest.approx(batch * less.kv_bytes(chunk))
        assert more.host_qkv_s == less.host_qkv_s


def head_of(scenario: Scenario, chunk: float) -> float:
    program = scenario.program(STRATEGIES["single"], [tokens(chunk)])
    head = program.epilogue[-1][-1]
    assert isinstance(head, Compute)
    assert head.name == "head"
    return head.device_s.item()


def test_the_head_is_for_one_token_or_all(scenario: Scenario) -> None:
    flops = 2 * 64 * 101
    assert head_of(scenario, 50) == pytest.approx(flops)
    assert head_of(with_rates(scenario, head_on_all_tokens=True), 50) == pytest.approx(50 * flops)


def test_the_head_reads_its_weights_once_whatever_the_batch(scenario: Scenario) -> None:
    slow = with_rates(scenario, gemm_flops_per_s=1e30, hbm_bytes_per_s=1.0)
    for batch in (1, 8):
        here = replace(slow, request=Request(context_len=1000, batch=batch))
        assert head_of(here, 50) == pytest.approx(64 * 101 * 2)


def test_host_shares_add_up(scenario: Scenario) -> None:
    host = HostRates(layer_s=0.003, gather_piece_s=1e-4)
    assert scenario.profile is not None
    costs = costs_of(replace(scenario, profile=replace(scenario.profile, host=host)))
    assert costs.host_qkv_s + costs.host_attention_s + costs.host_output_mlp_s == pytest.approx(0.003)
    assert costs.host_all_gather_s(4) == pytest.approx(4e-4)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_no_profile_beats_the_datasheet(seed: int, make: Any) -> None:
    """Attention and element-wise work at rates below the peaks take longer than the roofline says."""
    rng = random.Random(seed)
    scenario = make.scenario(rng, roofline=False)
    kernels = replace(scenario.profile.kernels, score_bytes=28.0)
    scenario = replace(scenario, profile=replace(scenario.profile, kernels=kernels))
    roofline = replace(scenario, profile=None)
    chunk, prefix = tokens(5000, 9000), tokens(0, 70000)
    for real, least in zip(scenario.layer_costs(), roofline.layer_costs(), strict=True):
        assert (real.attention_s(chunk, prefix) >= least.attention_s(chunk, prefix) * (1 - 1e-12)).all()
        assert (real.append_s(chunk, prefix) >= least.append_s(chunk, prefix)).all()
        nbytes = tokens(1e9)
        assert (real.cost.traffic_s(nbytes) >= least.cost.traffic_s(nbytes) * (1 - 1e-12)).all()
        flops_s = 2.0 * scenario.request.batch * chunk * 1e6 / scenario.cluster.gpu.peak_flops[0][1]
        assert (real.cost.gemm_s(chunk, 1e6) >= flops_s * (1 - 1e-12)).all()


def test_the_roofline_reads_weights_at_least_once(scenario: Scenario) -> None:
    roofline = replace(scenario, profile=None)
    gpu = roofline.cluster.gpu
    seconds = roofline.cost.gemm_s(tokens(1e-9, 1e9), 1e6)
    assert seconds == pytest.approx([2e6 / gpu.hbm_bytes_per_s, 2e15 / gpu.peak_flops[0][1]])


def test_a_gpu_refuses_what_it_cannot_compute(scenario: Scenario) -> None:
    gpu = replace(scenario.cluster.gpu, peak_flops=(("fp16", 1e14),))
    roofline = replace(
        scenario,
        profile=None,
        cluster=replace(scenario.cluster, gpu=gpu),
        request=Request(context_len=10, dtype="fp8"),
    )
    with pytest.raises(InputError) as caught:
        _ = roofline.cost
    assert caught.value.argument == "--dtype"
