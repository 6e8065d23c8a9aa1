"""Estimates: they agree with simulations where ranks do not wait, and decide which rare strategies a plan tries."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest

import kvrsim
from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.strategies import get_strategy
from planner.candidates import Search, rare_for, search_all, strategies_to_compare
from planner.estimate import estimate_s
from planner.limits import limits_of
from planner.uncertainty.intervals import interval_of, is_indistinguishable
from planner.uncertainty.sensitivities import Sensitivities, sensitivities

MIXTURE = {"model": "qwen3-30b-a3b", "cluster": "2x8xh100", "ctx": "8k"}
QUESTIONS = (
    MIXTURE,
    {"model": "llama-3.1-8b", "cluster": "8xh100", "ctx": "64k", "engine": "vllm"},
    {"model": "deepseek-v3.2", "cluster": "16x8xh200", "gpus": 16, "ctx": "8k", "cached_prefix": "2k"},
)


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_an_estimate_is_close_to_the_simulation(question: dict[str, object]) -> None:
    """Chains are not among these: their first ranks and their last ones wait for messages."""
    scenario = kvrsim.make_scenario(**question)[0]
    names = ["tsp", "zigzag", "interleave", "ring", "zigzag-ring", "ulysses", "tp2+zigzag", "tp4+ring", "dp2+tp4"]
    ratios = dict[str, float]()
    rare = [execution.strategy.name for execution in rare_for(scenario)]
    for name in [*names, *(name for name in rare if "kvr" not in name and "pp" not in name)]:
        try:
            candidate = Search().candidate(execution_of(scenario, get_strategy(name)))
        except InputError:
            continue
        ratios[name] = estimate_s(candidate.execution) / candidate.ttft_s
    assert len(ratios) > 8
    assert {name: ratio for name, ratio in ratios.items() if abs(math.log(ratio)) > 0.1} == {}


def test_an_estimate_of_a_pipeline_is_no_further_off_than_its_pieces() -> None:
    scenario = kvrsim.make_scenario(**MIXTURE)[0]
    for name in ("pp", "tp4+pp", "pp2+cp8", "tp8+pp2+ep8", "dp4+pp4"):
        candidate = Search().candidate(execution_of(scenario, get_strategy(name)))
        assert 0.8 < estimate_s(candidate.execution) / candidate.ttft_s < 1.25


def test_a_chain_takes_at_least_the_mean_work_of_its_ranks() -> None:
    scenario = kvrsim.make_scenario(**MIXTURE)[0]
    for name in ("kvr-s", "kvr-e", "kvr-direct", "tp2+kvr-s"):
        candidate = Search().candidate(execution_of(scenario, get_strategy(name)))
        assert estimate_s(candidate.execution) <= 1.02 * candidate.ttft_s


def test_a_default_comparison_tries_a_rare_strategy_that_an_estimate_finds_faster() -> None:
    question = {"model": "deepseek-v3.2", "cluster": "16x8xh200", "gpus": 16, "ctx": "8k"}
    scenario = kvrsim.make_scenario(**question)[0]
    compared = strategies_to_compare(scenario, None)
    comparison = search_all(compared, Search())
    best_s = min(one.ttft_s for one in comparison.by_name.values() if one.fits)
    rare = {one.strategy.name: one for one in compared.rare if "kvr" not in one.strategy.name}
    rare = {name: execution for name, execution in rare.items() if name not in comparison.by_name}
    left_out = {name: group.why for group in comparison.not_tried for name in group.strategies}
    assert set(rare) <= set(left_out)
    for name, execution in rare.items():
        if "estimate" in left_out[name]:
            assert estimate_s(execution) > 0.98 * best_s


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_estimated_errors_are_close_to_the_simulated_ones(question: dict[str, object]) -> None:
    """Intervals, and the ratio of TTFTs up to which two strategies are indistinguishable."""
    scenario = kvrsim.make_scenario(**question)[0]
    names = ("kvr-s", "kvr-e", "tsp", "zigzag-ring", "tp2+kvr-s", "tp4+ring")
    simulated = list[Sensitivities]()
    estimated = list[Sensitivities]()
    for name in names:
        with suppress(InputError):
            one = Search().candidate(execution_of(scenario, get_strategy(name)))
            simulated.append(sensitivities(one.execution, one.partition, ttft_s=one.ttft_s))
            estimated.append(one.estimated_sensitivities)
    assert len(simulated) > 3
    for near, exact in zip(estimated, simulated, strict=True):
        assert set(near.by_source) == set(exact.by_source)
        assert interval_of(near, 1.0).low_s == pytest.approx(interval_of(exact, 1.0).low_s, rel=0.1)
        assert interval_of(near, 1.0).high_s == pytest.approx(interval_of(exact, 1.0).high_s, rel=0.1)
        assert largest_tie(estimated[0], near) == pytest.approx(largest_tie(simulated[0], exact), abs=0.05)


def largest_tie(first: Sensitivities, second: Sensitivities) -> float:
    """The largest ratio of two TTFTs that is within the interval of their difference, to 0.1 %."""
    ratios = [1 + number / 1000 for number in range(1000)]
    return max(ratio for ratio in ratios if is_indistinguishable(first, second, 1.0, ratio))


def test_estimated_limits_are_close_to_the_simulated_ones() -> None:
    scenario = kvrsim.make_scenario(**MIXTURE)[0]
    for name in ("kvr-s", "tsp", "tp2+kvr-s", "tp4+ring"):
        one = Search().candidate(execution_of(scenario, get_strategy(name)))
        exact = {limit.operation: limit.share for limit in limits_of(one.execution, one.partition)}
        near = {limit.operation: limit.share for limit in limits_of(one.execution, one.partition, is_estimated=True)}
        for operation in {*exact, *near}:
            assert near.get(operation, 0.0) == pytest.approx(exact.get(operation, 0.0), abs=0.12)
