"""Candidates: computed values agree with the executors, are computed once, and depend on the fields only."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given

import kvrsim
from kvrsim.arguments import SearchArgs
from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.executors.run import Runner, run_partition
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import (
    _CHEAP_S,
    Candidate,
    ComparedStrategies,
    Search,
    all_for,
    least_bytes,
    rare_for,
    search_all,
    strategies_to_compare,
)
from planner.work import first_s
from tests.building import Draws, any_scenario, draws, examples


def scenario_of(**options: object) -> Scenario:
    return kvrsim.make_scenario(**{"ctx": "4k", "gpus": 4, "model": "llama-3-8b"} | options)[0]  # type: ignore[arg-type]


@given(rng=draws())
@examples(20)
def test_both_executors_agree_with_a_candidate(rng: Draws) -> None:
    scenario = any_scenario(rng, num_gpus=(1, 4))
    compared = strategies_to_compare(scenario, None)
    one = Search(options=SearchArgs(method="analytical")).candidate(rng.choice(compared.executions))
    event = run_partition(one.execution, one.partition, executor="event")
    assert event.finish_s == pytest.approx(one.finish_s, rel=1e-9)
    assert one.timeline.end_s == pytest.approx(max(one.finish_s), rel=1e-9)
    assert one.interval.low_s <= one.ttft_s <= one.interval.high_s
    assert one.ttft_without_communication_s <= one.ttft_s * (1 + 1e-9)
    assert all(wait_s >= 0 for wait_s in one.waits)
    used = one.execution.placed.num_gpus * one.execution.placed.data_groups  # `single` leaves GPUs idle
    assert used == (1 if one.strategy.name == "single" else one.scenario.num_gpus)
    assert len(one.waits) == len(one.memory) == used


def test_what_was_computed_is_neither_computed_again_nor_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Search().candidate(execution_of(scenario_of(), get_strategy("tsp")))
    before = one.ttft_s, one.memory, one.program
    copy = pickle.loads(pickle.dumps(one))
    assert "program" not in vars(copy)
    assert copy.ttft_s == before[0]
    monkeypatch.setattr("kvrsim.compile.build_program", None)
    assert (one.ttft_s, one.memory) == before[:2]
    assert one.program is before[2]


@pytest.mark.parametrize("name", ["single", "tsp", "kvr-s", "zigzag", "tp", "pp", "tp4+pp1"])
def test_a_plan_and_a_simulation_are_about_the_same_candidate(name: str) -> None:
    one = Search().candidate(execution_of(scenario_of(), get_strategy(name)))
    question = {"ctx": "4k", "gpus": 4, "model": "llama-3-8b"}
    (planned,) = kvrsim.plan(**question, strategies=[name]).strategies
    simulated = kvrsim.simulate(**question, strategy=name)
    for result in (planned, simulated):
        assert (result.ttft_s, result.memory, result.fits) == (one.ttft_s, one.memory, one.fits)
        assert (result.ttft_low_s, result.ttft_high_s) == (one.interval.low_s, one.interval.high_s)


@given(rng=draws())
@examples(20)
def test_every_row_is_reproduced_from_its_partition(rng: Draws) -> None:
    """Also if the search budget left a strategy unsearched."""
    scenario = any_scenario(rng, num_gpus=(1, 6))
    search = Search(options=SearchArgs(search_budget=rng.choice([0.0, 0.1, 1.0])))
    for one in search_all(strategies_to_compare(scenario, None), search).by_name.values():
        strategy = get_strategy(one.strategy.name)
        again = Search(partition=one.partition.chunk_lens).candidate(execution_of(scenario, strategy))
        assert again.strategy == one.strategy
        assert again.ttft_s == pytest.approx(one.ttft_s, rel=1e-9)
        assert again.memory == one.memory


@pytest.mark.parametrize(
    "question",
    [
        {"model": "qwen3-32b", "cluster": "2x8xh100", "ctx": "32k", "search_budget": 0.1, "batch": 2, "dtype": "fp8"},
        {"model": "qwen3.5-35b-a3b", "cluster": "8xh200", "ctx": "1m", "engine": "sglang", "batch": 2},
        {"model": "llama-3.1-8b", "cluster": "8xl40s", "ctx": "8k", "search_budget": 0},
    ],
    ids=str,
)
def test_a_simulation_of_a_row_has_the_time_and_stages_of_the_row(question: dict[str, object]) -> None:
    plan = kvrsim.plan(**question)
    scenario = {name: value for name, value in question.items() if name != "search_budget"}
    rows = [row for row in plan.strategies if row.layers is not None]
    assert {row.searched for row in rows} >= {True, False}
    for row in rows:
        again = kvrsim.simulate(**scenario, strategy=row.strategy, partition=row.partition)
        assert (again.ttft_s, again.layers, again.memory) == (row.ttft_s, row.layers, row.memory)


def test_a_scenario_per_rank_is_computed_once_per_strategy() -> None:
    scenario = scenario_of()
    tp, kvr = get_strategy("tp"), get_strategy("kvr-s")
    assert execution_of(scenario, tp).placed is execution_of(scenario, tp).placed
    assert execution_of(scenario, tp).placed.gpus_per_rank == 4
    assert execution_of(scenario, kvr).placed.cluster.num_gpus == 4


@pytest.mark.parametrize(
    ("strategy", "search", "parameter"),
    [
        ("kvr-p", Search(), "table"),
        ("kvr-s", Search(partition=(4096,)), "partition"),
        ("kvr-s", Search(options=SearchArgs(stride=0)), "stride"),
    ],
)
def test_mistakes_name_the_parameter(strategy: str, search: Search, parameter: str) -> None:
    with pytest.raises(InputError) as caught:
        search.candidate(execution_of(scenario_of(), get_strategy(strategy)))
    assert caught.value.parameter == parameter


def test_a_given_partition_is_not_searched() -> None:
    chunks = (2000, 1000, 600, 496)
    one = Search(partition=chunks).candidate(execution_of(scenario_of(), get_strategy("kvr-s")))
    assert (one.partition, one.search) == (Partition(chunk_lens=chunks), None)
    assert one == Candidate(execution=one.execution, partition=one.partition)


def test_what_cannot_fit_is_left_out_before_any_simulation() -> None:
    scenario = scenario_of(model="llama-3.1-70b", cluster="h100-2x8-ndr400", gpus=16, ctx="32k")
    compared, everything = strategies_to_compare(scenario, None), strategies_to_compare(scenario, ["all"])
    assert compared.strategies == everything.strategies
    names = [one.name for one in compared.strategies]
    assert "kvr-s" in compared.not_compared
    assert {"tp4+kvr-s", "pp-s"} <= set(names)
    assert not set(names) & set(compared.not_compared)
    for name in ("tp8+ring", "kvr-e", "pp2+cp8", "tp16+pp1"):  # no search, so their memory is exact
        one = Search().candidate(execution_of(scenario, get_strategy(name)))
        assert one.fits or name in compared.not_compared


LARGE_BUS = {"gpus": 16, "ctx": "16k", "topology": "bus"}


def test_what_takes_longer_than_the_budget_is_named_and_the_budget_decides() -> None:
    scenario = scenario_of(**LARGE_BUS)
    compared = strategies_to_compare(scenario, None)
    names = {one.name for one in compared.strategies}
    little = search_all(compared, Search(options=SearchArgs(search_budget=0)))
    (too_long,) = [group for group in little.not_tried if "budget" in group.why]
    assert {"pp", "pp-s"} <= set(too_long.strategies)
    assert names - set(little.by_name) <= {name for group in little.not_tried for name in group.strategies}
    assert not set(too_long.strategies) & set(little.by_name)
    more = search_all(compared, Search(options=SearchArgs(search_budget=1)))
    assert set(more.by_name) > set(little.by_name)


def test_whatever_runs_and_fits_is_compared_or_named() -> None:
    scenario = scenario_of(model="qwen3-30b-a3b", cluster="h100-nvlink", ctx="16k")
    compared = strategies_to_compare(scenario, None)
    comparison = search_all(compared, Search(options=SearchArgs(search_budget=0)))
    not_tried = {name for group in comparison.not_tried for name in group.strategies}
    assert not not_tried & set(comparison.by_name)
    names = {*comparison.by_name, *not_tried, *compared.not_compared}
    known = {execution_of(scenario, get_strategy(name)).layout for name in names}
    for name in ("tp2+striped", "tp2+kvr-e", "tp2+pp2+cp1", "dp2+tp2+ep4", "cp4+ep4", "tp2+cp2-i", "pp2+dp2+ep2"):
        try:
            one = Search().candidate(execution_of(scenario, get_strategy(name)))
        except InputError:
            continue
        assert one.execution.layout in known or not one.fits


@pytest.mark.parametrize("fraction", [0.25, 0.1, 0.08, 0.06])
def test_nothing_fits_only_if_all_that_could_fit_was_tried(fraction: float) -> None:
    """The rare strategies are tried where no other one fits."""
    scenario = scenario_of(ctx="64k", cluster="h100-nvlink", memory_fraction=fraction)
    least = {one.strategy.name: least_bytes(one) for one in (*all_for(scenario)[0], *rare_for(scenario))}
    could_fit = {name for name, nbytes in least.items() if nbytes <= scenario.memory_limit.nbytes}
    comparison = search_all(strategies_to_compare(scenario, None), Search())
    if not any(one.fits for one in comparison.by_name.values()):
        assert could_fit <= set(comparison.by_name)
        assert not comparison.not_tried


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [128, 256])
def test_rings_of_many_ranks_are_compared_by_default(ranks: int) -> None:
    scenario = kvrsim.make_scenario(gpus=ranks, ctx=10240 * ranks)[0]
    comparison = search_all(strategies_to_compare(scenario, None), Search())
    fitting = {name for name, one in comparison.by_name.items() if one.fits}
    assert {"ring", "striped", "zigzag-ring"} <= fitting


def test_a_searched_pipeline_finds_pieces_that_fit() -> None:
    """The fastest pieces need more memory than short ones, which fit."""
    options = {"model": "llama-7b", "cluster": "4xa100-40gb", "ctx": "128k", "batch": 2, "memory_fraction": 0.91}
    scenario = kvrsim.make_scenario(**options)[0]
    assert Search().candidate(execution_of(scenario, get_strategy("pp-s"))).fits


@pytest.mark.parametrize("name", ["zigzag", "pp4+cp2"])
def test_a_timeline_on_a_bus_is_an_answer_though_rounding_grows(name: str) -> None:
    scenario = kvrsim.make_scenario(model="llama-3.1-8b", cluster="l40s-pcie", ctx="8k", gpus=8)[0]
    one = Search().candidate(execution_of(scenario, get_strategy(name)))
    assert one.timeline.end_s == pytest.approx(one.ttft_s, rel=1e-2)
    assert one.timeline_error == pytest.approx(one.timeline.end_s / one.ttft_s - 1)


def test_where_nothing_can_fit_the_nearest_is_compared() -> None:
    compared = strategies_to_compare(scenario_of(model="llama-3.1-405b", gpus=2), None)
    assert len(compared.strategies) == 1
    assert compared.not_compared


def test_chunked_prefill_fits_where_one_step_does_not() -> None:
    scenario = scenario_of(model="llama-7b", gpus=1, ctx="16k", cluster="a100-nvlink", profile="a100-eager")
    whole, steps = (Search().candidate(execution_of(scenario, get_strategy(name))) for name in ("single", "pp1"))
    assert (whole.fits, steps.fits) == (False, True)
    assert max(steps.partition.chunk_lens) <= 8192


@pytest.mark.slow
def test_a_budget_leaves_the_best_within_two_percent_of_all() -> None:
    """The budget is not read from a clock, so answers are reproducible; a budget of 0 leaves rough partitions."""
    scenario = scenario_of(model="llama-3.1-70b", cluster="h100-2x8-ndr400", gpus=16, ctx="32k")
    compared, everything = strategies_to_compare(scenario, None), strategies_to_compare(scenario, ["all"])

    def best_s(of: ComparedStrategies, budget_s: float) -> float:
        return min(
            one.ttft_s
            for one in search_all(of, Search(options=SearchArgs(search_budget=budget_s))).by_name.values()
            if one.fits
        )

    whole_s, limited_s = best_s(everything, 0.0), best_s(compared, 3.0)
    assert limited_s == best_s(compared, 3.0)
    assert limited_s <= 1.02 * whole_s
    assert limited_s <= best_s(compared, 0.0)


def test_waits_and_memory_cover_every_group_of_gpus() -> None:
    scenario = scenario_of(gpus=8, model="deepseek-v3", cluster="8xh200", batch=2)
    one = Search().candidate(execution_of(scenario, get_strategy("dp2+tp4")))
    assert len(one.waits) == len(one.memory) == 8


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.5])
def test_long_first_simulations_keep_to_the_budget(budget: float) -> None:
    """Counted in modelled seconds; what is left out is named."""
    question = {"model": "qwen3.5-35b-a3b", "cluster": "32x8xh100", "ctx": "64k"}
    compared = strategies_to_compare(kvrsim.make_scenario(**question)[0], None)
    seconds = {one.strategy.name: first_s(one) for one in (*compared.executions, *compared.rare)}
    long = [name for name, first in seconds.items() if first > _CHEAP_S]
    comparison = search_all(compared, Search(options=SearchArgs(search_budget=budget)))
    tried = sum(seconds[name] for name in long if name in comparison.by_name)
    assert tried <= budget
    not_tried = {name for group in comparison.not_tried for name in group.strategies}
    assert {*comparison.by_name, *not_tried} == set(seconds)


def test_errors_and_limits_of_a_slow_strategy_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = kvrsim.make_scenario(model="llama-3.1-8b", cluster="16x8xh100", ctx="64k", engine="vllm")[0]
    one = Search().candidate(execution_of(scenario, get_strategy("ring")))
    assert one.is_slow
    assert one.ttft_s > 0

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a simulation")

    monkeypatch.setattr(Runner, "finish_s", refuse)
    assert one.interval.low_s < one.ttft_s < one.interval.high_s
    assert one.sensitivities == one.estimated_sensitivities
    assert 0.9 < sum(limit.share for limit in one.limits) < 1.01
    assert 0 <= one.exposed_comm_s < one.ttft_s
