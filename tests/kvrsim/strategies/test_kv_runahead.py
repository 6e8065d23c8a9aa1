"""Attention in query blocks: covered elements, times, and numbers of calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.executors.run import run_partition
from kvrsim.kernels.elementwise import Traffic
from kvrsim.memory import memory_of
from kvrsim.placement import PlacedScenario
from kvrsim.program import Compute, Program
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S, STRATEGIES, Strategy
from tests.building import Draws, any_scenario, draws, examples, executed

KVR_B = STRATEGIES["kvr-b"]


def in_calls(*counts: int) -> Strategy:
    """KVR-B with only these numbers of calls."""
    return replace(KVR_B, name="in-calls", query_blocks=counts)


def program_of(scenario: Scenario, strategy: Strategy, partition: Partition) -> Program:
    return build_program(executed(scenario, strategy), columns(partition.chunk_lens))


def eager(ctx: str = "16k", gpus: int = 4) -> Scenario:
    return make_scenario(ctx=ctx, gpus=gpus, model="llama-7b")[0]


@given(rng=draws())
@examples(25)
def test_one_block_is_kvr(rng: Draws) -> None:
    scenario = any_scenario(rng, num_gpus=(1, 5))
    even = Partition.even(scenario.request.new_tokens, scenario.cluster.num_gpus)
    assert (
        run_partition(executed(scenario, in_calls(1)), even).finish_s
        == run_partition(executed(scenario, KVR_S), even).finish_s
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash"])
@pytest.mark.parametrize("prefix", [0, 512, 8192])
def test_blocks_take_what_calls_of_their_own_take(attention: str, prefix: int) -> None:
    """Blocks take the time of separate calls and one copy of the output. A causal kernel without a prefix skips the
    masked half, so it takes one call."""
    profile = "a100-eager" if attention == "eager" else "roofline" if attention == "sdpa" else "a100-flash"
    scenario = make_scenario(ctx="16k", gpus=2, model="llama-7b", profile=profile, attention=attention)[0]
    costs, one = PlacedScenario.of(scenario).layer_costs()[0], np.ones(1)
    result = costs.mixer.in_blocks_s(1024 * one, prefix * one, [4])[0]
    calls = sum(costs.mixer.attention_s(256 * one, (prefix + 256.0 * number) * one) for number in range(4))
    if attention != "eager" and prefix == 0:
        assert result == costs.mixer.attention_s(1024 * one, 0 * one)
    else:
        joined_s = costs.cost.traffic_s(1024 * one, (Traffic("copy", 4.0 * 4096, 1),))
        assert result == pytest.approx(calls + joined_s, rel=1e-12)


@given(rng=draws())
@examples(25)
def test_more_blocks_never_cover_more(rng: Draws) -> None:
    """With datasheet rates, a call costs only the scores that it covers, and joining outputs costs one copy."""
    scenario = any_scenario(rng, num_gpus=(2, 5), roofline=True, kind=rng.choice(["llama", "mistral", "gemma2"]))
    costs = scenario.layer_costs()[0]
    chunk, prefix = np.meshgrid(np.geomspace(1, 5000, 12), [0.0, 10.0, 1000.0, 20000.0])
    seconds = costs.mixer.in_blocks_s(chunk, prefix, (2, 4, 8, 16))
    for fewer, more in zip(seconds, seconds[1:], strict=False):
        assert (more <= fewer * (1 + 1e-9)).all()


def test_each_rank_takes_the_fastest_number() -> None:
    """For the same chunks, no other number of calls on a rank is faster."""
    scenario, cut = eager(), Partition(chunk_lens=(7168, 4096, 2816, 2304))
    program = program_of(scenario, KVR_B, cut)
    assert program.most_query_blocks is not None

    def attention_of(program: Program, rank: int) -> Compute:
        return next(op for op in program.layers[0][rank] if isinstance(op, Compute) and op.kind == "attention")

    for rank, count in enumerate(program.most_query_blocks):
        own = attention_of(program, rank)
        assert own.query_blocks == count
        for other in KVR_B.query_blocks:
            op = attention_of(program_of(scenario, in_calls(other), cut), rank)
            assert own.device_s <= op.device_s or op.host_s > op.device_s  # the host launches other blocks too slowly
    assert KVR_S.query_blocks == (1,)
    assert program_of(scenario, KVR_S, cut).query_blocks is None


def test_calls_that_the_host_launches_too_slowly_are_not_made() -> None:
    scenario, cut = eager(), Partition.even(16384, 4)
    slow = scenario.with_host(replace(scenario.host, layer_s=10.0))
    assert program_of(slow, KVR_B, cut).most_query_blocks == (1, 1, 1, 1)


def test_the_score_matrix_is_that_of_a_block() -> None:
    scenario, cut = eager(), Partition.even(16384, 4)
    whole, blocks = (memory_of(executed(scenario, one), cut) for one in (KVR_S, in_calls(8)))
    assert [one.scores for one in blocks] == [one.scores // 8 for one in whole]
    assert [one.total < other.total for one, other in zip(blocks, whole, strict=True)] == [True] * 4


def test_a_plan_says_how_many() -> None:
    plan = kvrsim.plan(model="llama-7b", ctx="8k", gpus=2, strategies=["kvr-s", "kvr-b"])
    whole, blocks = plan["kvr-s"].to_dict(), plan["kvr-b"].to_dict()
    assert "query_blocks" not in whole
    assert min(blocks["query_blocks"]) > 1
    assert blocks["ttft_s"] < whole["ttft_s"]
    flash = kvrsim.plan(model="llama-7b", ctx="8k", gpus=2, cluster="h100-nvlink", strategies=["kvr-s", "kvr-b"])
    assert flash.strategies[1].query_blocks == (1, 1)
    assert flash.strategies[1].ttft_s == flash.strategies[0].ttft_s


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v3.2"])
def test_latents_are_refused(model: str) -> None:
    with pytest.raises(kvrsim.InputError, match="latent"):
        kvrsim.simulate(model=model, ctx="8k", gpus=2, strategy="kvr-b")
