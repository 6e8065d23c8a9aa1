"""Costs of a layer: attention, copies, kernel launches; no profile is faster than the datasheet."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.engine import NO_HOST, HostRates
from kvrsim.errors import InputError
from kvrsim.kernels.attention import BlockedRates, EagerRates
from kvrsim.kernels.elementwise import (
    ELEMENTWISE_OPS,
    CacheCopies,
    ElementwiseRates,
    Traffic,
    after_mixer,
    before_mixer,
    eager_score_bytes,
)
from kvrsim.kernels.gemm import GemmRates, Product, Tile
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.profile import CalibrationProfile
from kvrsim.model.spec import ModelSpec
from kvrsim.placement import PlacedScenario
from kvrsim.program import Compute
from kvrsim.scenario import Request, Scenario
from kvrsim.strategies import STRATEGIES
from tests.building import Draws, any_cluster, any_profile, any_scenario, draws, examples, executed, tokens
from tests.kvrsim.kernels.test_attention import STEPS


def flops_alone(flops_per_s: float) -> GemmRates:
    """Rates of matrix products with time for FLOPs only."""
    return GemmRates(flops_per_s=flops_per_s, bytes_per_s=1e30, launch_s=0.0, concurrent_tiles=1, tiles=())


# One second per FLOP; the time of steps is negligible.
UNMASKED = replace(STEPS, flops_per_s=1.0, block_s=1e-30)


@pytest.fixture(scope="module")
def scenario(config: Any) -> PlacedScenario:
    """A small model on a GPU with all rates equal to one, so that seconds are FLOPs or bytes."""
    rng = random.Random(0)
    cluster = any_cluster(rng, 2, topologies=("switch",))
    profile: CalibrationProfile = any_profile(rng, cluster.gpu, sends="overlap", host=False)
    kernels = replace(
        profile.kernels,
        gemm=flops_alone(1.0),
        attention={"eager": EagerRates(flops_per_s=1.0, bytes_per_s=1e30, start_s=0.0), "flash": UNMASKED},
        elementwise=ElementwiseRates.uniform(1e30, fused=False),
        head_on_all_tokens=False,
        experts=None,
    )
    return PlacedScenario(
        model=config(),
        cluster=cluster,
        request=Request(context_len=1000),
        profile=replace(profile, kernels=kernels),
        kernel="eager",
    )


def with_rates(scenario: Scenario, **rates: Any) -> Scenario:
    assert scenario.profile is not None
    return replace(scenario, profile=replace(scenario.profile, kernels=replace(scenario.profile.kernels, **rates)))


def with_slow_bytes(scenario: Scenario, *, fused: bool = False) -> Scenario:
    """The scenario with one second per byte of element-wise kernels."""
    return with_rates(scenario, elementwise=ElementwiseRates.uniform(1.0, fused=fused))


def costs_of(scenario: Scenario, model: ModelSpec | None = None) -> LayerCosts:
    return PlacedScenario.of(scenario if model is None else replace(scenario, model=model)).layer_costs()[0]


def test_projections_cost_two_flops_a_weight(scenario: Scenario) -> None:
    costs = costs_of(scenario)
    assert costs.qkv_s(tokens(1, 10)) == pytest.approx([2 * 3 * 64 * 64, 20 * 3 * 64 * 64])
    weights = 64 * 64 + 3 * 64 * 96
    assert costs.output_mlp_s(tokens(1, 10)) == pytest.approx([2 * weights, 20 * weights])


def test_the_score_matrix_moves_through_memory(scenario: Scenario) -> None:
    slow = with_rates(scenario, attention={"eager": EagerRates(flops_per_s=1.0, bytes_per_s=1.0, start_s=0.0)})
    more = costs_of(slow).mixer.attention_s(tokens(3), tokens(7)) - costs_of(scenario).mixer.attention_s(
        tokens(3), tokens(7)
    )
    assert eager_score_bytes(scenario.model) == 28
    assert more == pytest.approx([28 * 4 * 3 * 10])
    wide = costs_of(replace(slow, request=Request(context_len=1000, dtype="fp32")))
    flops = costs_of(scenario).mixer.attention_s(tokens(3), tokens(7))
    assert wide.mixer.attention_s(tokens(3), tokens(7)) - flops == pytest.approx([56 * 4 * 3 * 10])


@given(chunk=st.integers(1, 60), prefix=st.integers(0, 60), window=st.integers(1, 80))
@examples(100)
def test_windows(scenario: Scenario, config: Any, chunk: int, prefix: int, window: int) -> None:
    """Flash computes unmasked elements and half of the diagonal; eager the chunk and up to a window of the prefix."""
    model = config(model_type="mistral", sliding_window=window)
    flash = costs_of(replace(scenario, kernel="flash"), model).mixer.attention_s(tokens(chunk), tokens(prefix))
    seen = sum(min(query + 1, window) for query in range(prefix, prefix + chunk))
    diagonal = 0.5 * sum(query < window for query in range(prefix, prefix + chunk))
    assert flash == pytest.approx([4 * 64 * (seen - diagonal)])
    eager = costs_of(scenario, model).mixer.attention_s(tokens(chunk), tokens(prefix))
    assert eager == pytest.approx([4 * 64 * chunk * (min(prefix, window) + chunk)])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_eager_code_repeats_shared_heads(kv_heads: int, scenario: Scenario, config: Any) -> None:
    model = config(num_key_value_heads=kv_heads)
    times = {}
    for kernel in ("eager", "flash"):
        here = replace(scenario, kernel=kernel)
        slow = costs_of(with_slow_bytes(here), model).mixer.attention_s(tokens(3), tokens(7))
        times[kernel] = (slow - costs_of(here, model).mixer.attention_s(tokens(3), tokens(7))).item()
    repeated = 0 if kv_heads == 4 else 10 * 2 * (kv_heads + 4) * 16 * 2
    assert times == {"eager": pytest.approx(repeated), "flash": pytest.approx(0)}


SHARED = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40)


@pytest.mark.parametrize(
    ("keys", "expert_weights"),
    [
        (dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=1), 3 * 64 * 96),
        (dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=8), 8 * 3 * 64 * 96),
        (dict(model_type="qwen2_moe", **SHARED), 2 * 3 * 64 * 24 + 3 * 64 * 40 + 64),
    ],
)
def test_active_and_shared_experts_compute(
    keys: dict[str, Any], expert_weights: int, scenario: Scenario, config: Any
) -> None:
    costs = costs_of(scenario, config(**keys))
    assert costs.output_mlp_s(tokens(10)) == pytest.approx([2 * 10 * (64 * 64 + 64 * 8 + expert_weights)])


@pytest.mark.parametrize("fused", [False, True])
def test_each_kernel_has_its_own_rate(fused: bool, scenario: Scenario) -> None:
    """One operation takes one second per byte, the others none; every kernel takes half a second more."""
    model = scenario.model
    before = before_mixer(model, model.layers[0], fused=fused)
    after = after_mixer(model, model.layers[0], fused=fused, intermediate=96)
    free = with_rates(scenario, gemm=flops_alone(1e30))
    for op in ELEMENTWISE_OPS:
        rates: dict[str, Any] = {op: 1.0, "start_s": 0.5}
        costs = costs_of(with_rates(free, elementwise=replace(ElementwiseRates.uniform(1e30, fused=fused), **rates)))
        for part, steps in ((costs.qkv_s, before), (costs.output_mlp_s, after)):
            nbytes = sum(step.nbytes for step in steps if step.op == op)
            kernels = sum(step.kernels for step in steps)
            assert part(tokens(1, 10)) == pytest.approx([nbytes + kernels / 2, 10 * nbytes + kernels / 2])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("keys", "before", "after"),
    [
        ({"model_type": "llama"}, 1, 1),
        ({"model_type": "qwen3"}, 1, 1),
        ({"model_type": "gemma2"}, 1, 3),
        ({"model_type": "falcon"}, 1, 0),
        ({"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2}, 2, 0),
        ({"model_type": "phi", "qk_layernorm": True}, 1, 0),
    ],
)
def test_every_norm_of_a_layer_is_costed(
    keys: dict[str, Any], before: int, after: int, fused: bool, scenario: Scenario, config: Any
) -> None:
    """At one second per byte, the time is the bytes of norms over the hidden size and, if any, of queries and keys."""
    model = config(**keys)
    step = 4 if fused or model.final_norm_parameters == 2 * model.hidden_size else 34
    rates = replace(ElementwiseRates.uniform(1e30, fused=fused), norm=1.0)
    costs = costs_of(with_rates(scenario, gemm=flops_alone(1e30), elementwise=rates), model)
    qk_norm = model.layers[0].mixer.qk_norm
    heads = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim if qk_norm else 0
    assert qk_norm == (keys["model_type"] in ("qwen3", "gemma3_text") or "qk_layernorm" in keys)
    assert costs.qkv_s(tokens(3)).item() == pytest.approx(3 * step * (before * model.hidden_size + heads))
    assert costs.output_mlp_s(tokens(3)).item() == pytest.approx(3 * step * after * model.hidden_size, abs=1e-12)


def test_fused_products_are_one(scenario: Scenario) -> None:
    """With fusion, Q, K and V are one launch, and so are gate and up; otherwise each matrix is one launch."""
    tile = Tile(rows=64, cols=64, flops_share=1.0, start_s=0.0)
    gemm = replace(flops_alone(1e30), tiles=(tile,), launch_s=1.0)
    for fused, launches in ((False, (3, 4)), (True, (1, 3))):
        here = with_rates(scenario, gemm=gemm, elementwise=ElementwiseRates.uniform(1e30, fused=fused))
        costs = costs_of(here)
        assert (costs.qkv_s(tokens(9)).item(), costs.output_mlp_s(tokens(9)).item()) == pytest.approx(launches)


def test_a_batch_fills_tiles_together(scenario: Scenario) -> None:
    """Ten sequences of six tokens are sixty rows and fill one tile of 64."""
    tile = Tile(rows=64, cols=64, flops_share=1.0, start_s=1.0)
    here = with_rates(scenario, gemm=replace(flops_alone(1e30), tiles=(tile,)))
    many = replace(here, request=Request(context_len=1000, batch=10))
    assert costs_of(many).qkv_s(tokens(6, 6.4, 7)) == pytest.approx([3, 3, 6])
    assert costs_of(here).qkv_s(tokens(6, 64, 65)) == pytest.approx([3, 3, 6])


def smooth(scenario: Scenario) -> Scenario:
    """The scenario with rates without tiles and without fixed costs."""
    assert scenario.profile is not None
    kernels = scenario.profile.kernels
    return with_rates(
        replace(scenario, kernel="eager"),
        gemm=replace(kernels.gemm, tiles=(), measured=()),
        gemm_types={},
        experts=None,
        attention={"eager": replace(kernels.attention["eager"], start_s=0.0)},
        elementwise=replace(kernels.elementwise, start_s=0.0),
    )


@given(rng=draws(), batch=st.integers(2, 9))
@examples(40)
def test_a_batch_costs_as_many_times_as_much(rng: Draws, batch: int) -> None:
    """A batch takes `batch` times as long if there are no fixed costs, and never less than one sequence."""
    scenario = any_scenario(rng, roofline=False, host=False)
    chunk, prefix = tokens(1, 50), tokens(0, 90)
    for here, least, most in ((smooth(scenario), batch, batch), (scenario, 1, np.inf)):
        one = replace(here, request=replace(here.request, batch=1))
        many = replace(here, request=replace(here.request, batch=batch))
        for less, more in zip(PlacedScenario.of(one).layer_costs(), PlacedScenario.of(many).layer_costs(), strict=True):
            pairs = [
                (less.qkv_s(chunk), more.qkv_s(chunk)),
                (less.mixer.append_s(chunk, prefix), more.mixer.append_s(chunk, prefix)),
                (less.mixer.attention_s(chunk, prefix), more.mixer.attention_s(chunk, prefix)),
                (less.output_mlp_s(chunk), more.output_mlp_s(chunk)),
            ]
            for once, together in pairs:
                assert (together >= least * once * (1 - 1e-9)).all()
                assert (together <= most * np.maximum(once, 1e-300) * (1 + 1e-9)).all()
            assert more.mixer.cache_bytes(chunk) == pytest.approx(batch * less.mixer.cache_bytes(chunk))
            assert more.host_qkv_s == less.host_qkv_s


def head_of(scenario: Scenario, chunk: float) -> float:
    program = build_program(executed(scenario, STRATEGIES["single"]), [tokens(chunk)])
    head = program.epilogue[-1][-1]
    assert isinstance(head, Compute)
    assert head.name == "head"
    return head.device_s.item()


def test_the_head_is_for_one_token_or_all(scenario: Scenario) -> None:
    flops = 2 * 64 * 101
    assert head_of(scenario, 50) == pytest.approx(flops)
    assert head_of(with_rates(scenario, head_on_all_tokens=True), 50) == pytest.approx(50 * flops)


@pytest.mark.parametrize("gpus", [1, 2])
def test_streams_resume_after_communication(gpus: int, scenario: Scenario) -> None:
    assert scenario.profile is not None
    host = HostRates(layer_s=0.0, gather_piece_s=0.0, resume_s=7.0)
    costs = costs_of(replace(scenario, profile=replace(scenario.profile, host=host)).on_gpus(gpus))
    resume_s = 7.0 if gpus > 1 else 0.0
    assert costs.mixer.append_s(tokens(3, 3), tokens(0, 5)) == pytest.approx([resume_s, resume_s])
    assert costs.mixer.concat_s(tokens(3, 3), tokens(0, 5)) == pytest.approx([resume_s, resume_s])


@given(rng=draws())
@examples(60)
def test_no_profile_beats_the_datasheet(rng: Draws) -> None:
    """With rates below the peaks, attention and element-wise work take at least the time of the roofline."""
    scenario = any_scenario(rng, roofline=False)
    roofline = replace(scenario, profile=None)
    chunk, prefix = tokens(5000, 9000), tokens(0, 70000)
    traffic, product = (Traffic("norm", 1e9, 1),), Product(1000, 500)
    for real, least in zip(scenario.layer_costs(), roofline.layer_costs(), strict=True):
        assert (real.mixer.attention_s(chunk, prefix) >= least.mixer.attention_s(chunk, prefix) * (1 - 1e-12)).all()
        assert (real.mixer.append_s(chunk, prefix) >= least.mixer.append_s(chunk, prefix)).all()
        assert (real.cost.traffic_s(chunk, traffic) >= least.cost.traffic_s(chunk, traffic) * (1 - 1e-12)).all()
        flops_s = 2.0 * scenario.request.batch * chunk * 5e5 / scenario.cluster.gpu.peak_flops["fp16"]
        assert (real.cost.row_cost((product,), ())(chunk) >= flops_s * (1 - 1e-12)).all()


def test_the_roofline_reads_weights_at_least_once(scenario: Scenario) -> None:
    roofline = replace(scenario, profile=None)
    gpu = roofline.cluster.gpu
    seconds = PlacedScenario.of(roofline).cost.row_cost((Product(1000, 1000),), ())(tokens(1e-9, 1e9))
    assert seconds == pytest.approx([2e6 / gpu.hbm_bytes_per_s, 2e15 / gpu.peak_flops["fp16"]])


def test_a_gpu_refuses_what_it_cannot_compute(scenario: Scenario) -> None:
    gpu = replace(scenario.cluster.gpu, peak_flops={"fp16": 1e14})
    roofline = replace(
        scenario, profile=None, cluster=replace(scenario.cluster, gpu=gpu), request=Request(context_len=10, dtype="fp8")
    )
    with pytest.raises(InputError) as caught:
        _ = PlacedScenario.of(roofline).cost
    assert caught.value.parameter == "dtype"


def test_a_chunk_may_be_written_into_place(scenario: Scenario) -> None:
    """The chunk is read and written once with one start, for any prefix; other copies are added."""
    free = with_rates(scenario, elementwise=replace(ElementwiseRates.uniform(1.0, fused=False), start_s=0.5))
    for copies, of_all in (
        (CacheCopies(keep=0, append=0, gather=0, own=1), 0),
        (CacheCopies(keep=1, append=0, gather=0, own=1), 1),
    ):
        costs = costs_of(with_rates(free, copies=copies))
        token = 2 * 2 * 64 * 2  # bytes of K and V of four heads of 16, read and written
        for part in (costs.mixer.append_s, costs.mixer.concat_s):
            seconds = part(tokens(5), tokens(7)) - costs.setting.resync_s
            assert seconds == pytest.approx([5 * token + 0.5 + of_all * 12 * token])


def test_one_tokens_logits_stream_their_weights(scenario: Scenario) -> None:
    assert scenario.profile is not None
    tile = Tile(rows=64, cols=64, flops_share=1.0, start_s=1.0)
    gemm = replace(flops_alone(1e30), tiles=(tile,), launch_s=3.0, bytes_per_s=1e30)
    assert head_of(with_rates(scenario, gemm=gemm), 50) == pytest.approx(3 + 2)
    here = with_rates(scenario, gemm=replace(gemm, head_bytes_per_s=2.0))
    assert head_of(here, 50) == pytest.approx(64 * 101 * 2 / 2)
    many = replace(here, request=Request(context_len=1000, batch=8))
    assert head_of(many, 50) == pytest.approx(64 * 101 * 2 / 2)  # no faster than with a batch of one
    few = with_rates(scenario, gemm=replace(gemm, head_bytes_per_s=1e30))
    assert head_of(replace(few, request=Request(context_len=1000, batch=8)), 50) == pytest.approx(5)


@pytest.mark.parametrize("kernel", ["eager", "flash"])
def test_whole_attention_holds_what_is_around_it(kernel: str, scenario: Scenario, config: Any) -> None:
    model = config(num_key_value_heads=2)
    slow = replace(with_slow_bytes(with_rates(scenario, gemm=flops_alone(1e30))), kernel=kernel)
    apart, whole = costs_of(slow, model), costs_of(with_rates(slow, whole_attention=True), model)
    repeated = 10 * 2 * (2 + 4) * 16 * 2 if kernel == "eager" else 0
    chunk, prefix = tokens(3), tokens(7)
    assert apart.mixer.attention_s(chunk, prefix) - whole.mixer.attention_s(chunk, prefix) == pytest.approx([repeated])
    assert apart.output_mlp_s(chunk) - whole.output_mlp_s(chunk) == pytest.approx([3 * 4 * 64])


def test_masked_kernels_cover_all_that_is_gathered(scenario: Scenario) -> None:
    assert scenario.profile is not None
    blocked = BlockedRates(
        causal_flops_per_s=1.0, rectangle_flops_per_s=1.0, start_s=0.0, query_s=0.0, key_block=1, skips_masked=False
    )
    here = with_rates(scenario, attention=dict.fromkeys(("eager", "flash", "sdpa"), blocked))
    for kernel, want in (("flash", 20), ("sdpa", 90)):
        costs = costs_of(replace(here, kernel=kernel))
        assert costs.mixer.gathered_prefix(tokens(10), tokens(20), tokens(100)) == pytest.approx([want])


@pytest.mark.parametrize(("kernel", "mask"), [("eager", 1), ("flash", 0)])
def test_what_a_prefill_does_once(kernel: str, mask: int, scenario: Scenario) -> None:
    """A request and a step take constant times; the mask takes a time per element if the kernel uses a mask."""
    assert scenario.profile is not None
    assert [op.name for op in ops_of(scenario, "tsp", 10, 20)[0]] == ["embedding"]
    rates = replace(scenario.profile.kernels.elementwise, mask_element_s=0.25)
    here = replace(with_rates(scenario, elementwise=rates), kernel=kernel)
    assert here.profile is not None
    here = replace(here, profile=replace(here.profile, host=replace(here.profile.host, request_s=2.0, step_s=3.0)))
    for name, keys in (("tsp", (30, 30)), ("kvr-s", (10, 30))):
        for ops, chunk, width in zip(ops_of(here, name, 10, 20), (10, 20), keys, strict=True):
            once, _, before, *masks = ops
            assert [(op.name, op.host_s, float(op.device_s[0])) for op in (once, before)] == [
                ("request", 2, 2),
                ("step", 3, 3),
            ]
            assert [op.name for op in masks] == ["mask"] * mask
            assert all(op.device_s == pytest.approx([0.25 * chunk * width]) for op in masks)


def ops_of(scenario: Scenario, name: str, *chunks: float) -> list[tuple[Any, ...]]:
    """Operations of each rank before its first layer."""
    return list(build_program(executed(scenario, STRATEGIES[name]), [tokens(chunk) for chunk in chunks]).prologue)


def built_in_costs(model: str, profile: str, host: HostRates | None = None) -> LayerCosts:
    """Costs of a layer of the model on one GPU, with the host of the profile or the given host."""
    scenario, _ = make_scenario(ctx=1024, gpus=1, model=model, profile=profile)
    if host is not None:
        assert scenario.profile is not None
        scenario = replace(scenario, profile=replace(scenario.profile, host=host))
    return PlacedScenario.of(scenario).layer_costs()[0]


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        ("llama-7b", (17, 8, 15)),  # kernels: norm 6, products 3, rotary 8; attention 7, stacked cache 1; rest 15
        # Falcon 7B repeats the shared keys and values
        ("falcon-7b", (22, 9, 7)),  # norm 1, product 1, rotary 8 + 12; attention and MLP share the norm
        ("falcon-1b", (2, 9, 8)),  # ALiBi instead of rotary embedding
    ],
)
def test_kernels_of_a_layer_in_eager_code(model: str, kernels: tuple[int, int, int]) -> None:
    assert built_in_costs(model, "a100-eager").kernels == kernels


def test_code_that_repeats_cos_and_sin_waits_for_the_device() -> None:
    """Only Falcon's eager code with rotary embedding waits for the device."""
    host = HostRates(layer_s=0.0, gather_piece_s=0.0, resume_s=5.0)
    chunk = np.array([64.0])
    for model, profile, waits in (
        ("falcon-7b", "a100-eager", True),
        ("falcon-1b", "a100-eager", False),
        ("llama-7b", "a100-eager", False),
        ("falcon-7b", "a100-flash", False),
    ):
        more_s = built_in_costs(model, profile, host).qkv_s(chunk) - built_in_costs(model, profile, NO_HOST).qkv_s(
            chunk
        )
        assert more_s == pytest.approx([5.0 if waits else 0.0])
