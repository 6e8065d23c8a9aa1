"""Expert parallelism: GPUs hold whole experts; exchanges of tokens, memory, bytes and errors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import kvrsim
from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.memory import memory_of
from kvrsim.program import AllToAll, Compute, Program
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from planner.plan import make_plan
from planner.search.search import search
from planner.table.table import TableSetting
from tests.building import Draws, any_divisible, any_partition, draws, examples, executed

NAMES = ("kvr-s", "tsp", "zigzag", "ring", "ulysses", "tp", "tp2+kvr-s")
QWEN: dict[str, Any] = {"model": "qwen3-30b-a3b", "cluster": "h100-nvlink", "gpus": 4, "ctx": "8k"}


def spread(rng: Draws, name: str) -> tuple[Scenario, tuple[int, ...]]:
    """A random mixture-of-experts model on four GPUs, and random chunks."""
    scenario = any_divisible(rng, kind=rng.choice(["mixtral", "qwen3_moe"]))
    imbalance = rng.choice([None, 1.0, 1.7])
    placed = place(replace(scenario, expert_parallel=True, expert_imbalance=imbalance), get_strategy(name)).placed
    return placed, any_partition(rng, placed.request.new_tokens, placed.cluster.num_gpus)


def program_of(scenario: Scenario, name: str, cut: tuple[int, ...]) -> Program:
    return build_program(executed(scenario, get_strategy(name)), columns(cut))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(rng=draws())
@examples(20)
def test_tokens_go_to_their_experts_and_back(name: str, rng: Draws) -> None:
    """Each layer with experts has two exchanges of tokens, other layers have none; all ranks have equal work."""
    placed, cut = spread(rng, name)
    program, ranks = program_of(placed, name, cut), placed.cluster.num_gpus
    for kind, costs in zip(program.layers, placed.layer_costs(), strict=True):
        exchanged = [[op for op in ops if isinstance(op, AllToAll) and op.payload == "tokens"] for ops in kind]
        if costs.experts is None or ranks == 1:
            assert not any(exchanged)
            continue
        work = [next(op for op in ops if isinstance(op, Compute) and op.name == "experts").device_s for ops in kind]
        assert all(one == pytest.approx(work[0]) for one in work)
        sent, back = (np.stack([ops[index].nbytes[:, 0] for ops in exchanged]) for index in (0, 1))
        widths = (costs.experts.dispatched_bytes, costs.experts.combined_bytes)
        for here, there in itertools.permutations(range(ranks), 2):
            to = (there - here) % ranks - 1
            from_there = (here - there) % ranks - 1
            assert sent[here, to] / widths[0] == pytest.approx(back[there, from_there] / widths[1])
            assert sent[here, to] <= placed.request.batch * cut[here] * widths[0]


@pytest.mark.slow
@given(rng=draws())
@examples(20)
def test_each_expert_is_held_once(rng: Draws) -> None:
    """All GPUs together hold each expert once, with and without groups; other weights do not change."""
    for name in ("kvr-s", "tp", "tp2+kvr-s"):
        placed, cut = spread(rng, name)
        whole = place(replace(placed.on_gpus(1), group=None), get_strategy("single")).placed.model
        width = placed.request.dtype_bytes
        experts = sum(
            layer.num_experts * sum(gemm.weight_bytes(width) for gemm in layer.mlp)
            for layer in whole.layers
            if layer.num_experts
        )
        parts = memory_of(executed(placed, get_strategy(name)), Partition(chunk_lens=cut))
        share = placed.share
        others = sum(
            layer.num_experts * sum(gemm.weight_bytes(width) for gemm in layer.mlp)
            for layer in share.layers
            if layer.num_experts
        )
        assert others * placed.num_gpus == experts
        assert all(part.weights == share.weight_bytes(width) for part in parts)


def test_more_imbalance_takes_longer_and_a_single_gpu_knows_none() -> None:
    ttft = [
        kvrsim.simulate(**QWEN, strategy="zigzag", expert_parallel=True, expert_imbalance=one).ttft_s
        for one in (1.0, 1.5, 3.0)
    ]
    assert ttft == sorted(ttft)
    assert ttft[0] < ttft[-1]
    alone, spread_alone = (
        kvrsim.simulate(**QWEN | {"gpus": 1}, strategy="single", expert_parallel=one).ttft_s for one in (False, True)
    )
    assert alone == spread_alone


def test_groups_send_nothing_more() -> None:
    """All GPUs of a group have the same tokens, so whole experts need the same all-reduces as sliced experts."""
    sliced, whole = (
        make_scenario(**QWEN, expert_parallel=one, **({"expert_imbalance": 1.0} if one else {}))[0]
        for one in (False, True)
    )
    for scenario in (sliced, whole):
        placed = place(scenario, get_strategy("tp")).placed
        ops = [op for _, op in program_of(placed, "tp", (placed.request.new_tokens,)).ops(0)]
        assert not any(isinstance(op, AllToAll) for op in ops)
    one, other = (place(scenario, get_strategy("tp")).placed.share for scenario in (sliced, whole))
    assert one.weight_bytes(2) == pytest.approx(other.weight_bytes(2))
    assert {layer.num_experts for layer in one.layer_kinds} == {128}
    assert {layer.num_experts for layer in other.layer_kinds} == {32}


def test_kvr_s_is_searched_without_a_bound() -> None:
    scenario, notes = make_scenario(**QWEN | {"ctx": "2k"}, expert_parallel=True)
    result = search(executed(scenario, get_strategy("kvr-s")))
    assert result.lower_bound_s is None
    even = search(executed(scenario, get_strategy("kvr-s")), method="analytical").ttft_s
    assert result.ttft_s <= even
    plan = make_plan(scenario, strategies=["kvr-s", "kvr-e"])
    assert (plan.bounds.lower_bound_s, plan.bounds.gap, plan.bounds.best) == (None, None, None)
    assert any("32 of each layer's experts on each of 4 GPUs; the busiest has 1.35 times" in note for note in notes)


def test_tables_tell_how_experts_lie() -> None:
    plain, spread_out, uneven = (
        make_scenario(**QWEN, **more)[0]
        for more in ({}, {"expert_parallel": True}, {"expert_parallel": True, "expert_imbalance": 2.0})
    )
    assert len(TableSetting.of(plain).differences(spread_out)) == 1
    assert TableSetting.of(spread_out).differences(uneven) != []
    assert TableSetting.of(uneven).differences(uneven) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"model": "llama-3-8b"},
            "expert_parallel: got 'yes', accepted: a mixture of experts, which llama-3-8b is not",
        ),
        ({"gpus": 3}, "expert_parallel: got '3 GPUs', accepted: a number of GPUs that the 128 experts"),
        ({"expert_imbalance": 0.5}, "expert_imbalance: got '0.5', accepted: a number from 1 to 1000"),
    ],
)
def test_refusals(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_scenario(**QWEN | {"expert_parallel": True} | more)
    assert str(caught.value).startswith(message)
