"""What groups may run: layouts of the weights, their times beside a plan's, and memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns, for_strategy
from kvrsim.errors import InputError
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import run_partition
from kvrsim.memory import fits, memory_of
from kvrsim.program import Compute, Program
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import partition_of
from planner.capacity.fleet.fast import run_pool
from planner.capacity.fleet.layouts import WHOLE, Choice, Kind, weights_of
from planner.capacity.fleet.pool import Pool
from planner.capacity.fleet.prefills import Prefills
from planner.capacity.fleet.times import ServiceTimes
from planner.capacity.workloads.workload import Workload
from planner.packing.serve import serve_whole


def large(gpus: int, ctx: int = 1024) -> Scenario:
    made, _ = make_scenario(ctx=ctx, gpus=gpus, model="llama-3.1-70b", cluster="h100-nvlink", profile="h100-flash")
    return made


def test_strategies_that_need_the_same_weights_share_a_layout() -> None:
    layouts = Choice().layouts(large(8))
    assert {weights: {weights_of(one, 8) for one in strategies} for weights, strategies in layouts.items()} == {
        weights: {weights} for weights in layouts
    }
    assert {"whole", "tp8", "pp8", "tp2", "tp4", "tp2+pp4", "tp4+pp2"} <= set(layouts)
    assert {"single", "tsp", "kvr-s"} <= {one.name for one in layouts[WHOLE]}
    assert "tp4+kvr-s" in {one.name for one in layouts["tp4"]}
    assert list(Choice().layouts(large(1))) == [WHOLE]
    sizes = Choice(asked=("tp2+pp2+cp2", "tp4+pp2", "tp4+cp2")).layouts(large(8, ctx=1))
    assert {weights: [one.name for one in some] for weights, some in sizes.items()} == {
        "tp2+pp2": ["tp2+pp2+cp2"],
        "tp4+pp2": ["tp4+pp2"],
        "tp4": ["tp4+cp2"],
    }


def test_what_is_asked_for_is_what_groups_run() -> None:
    choice = Choice(asked=("tp4+kvr-s",))
    assert {weights: [one.name for one in some] for weights, some in choice.layouts(large(8)).items()} == {
        "tp4": ["tp4+kvr-s"]
    }
    assert choice.layouts(large(1)) == choice.layouts(large(2)) == {}
    assert [one.name for one in Choice(asked=("kvr-s",)).layouts(large(1))[WHOLE]] == ["single"]
    assert "kvr-direct" in Choice().left_out(large(4))
    assert "kvr-direct" in {one.name for one in Choice(asked=("all",)).layouts(large(4))[WHOLE]}
    assert Choice(asked=("all",)).left_out(large(4)) == ()


@pytest.mark.parametrize(("asked", "parameter"), [((), "strategies"), (("tq",), "strategies"), (("kvr-p",), "table")])
def test_what_cannot_be_run_is_refused(asked: tuple[str, ...], parameter: str) -> None:
    with pytest.raises(InputError) as caught:
        Choice(asked=asked)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("name", ["tp", "pp", "tp2+pp", "tp2+kvr-s", "tp4+kvr-s"])
def test_times_at_a_power_of_two_are_those_of_a_plan(name: str) -> None:
    strategy = get_strategy(name)
    knots = np.array([300, 512, 2048, 4096], dtype=np.int64)
    times = Prefills(large(8), strategy).times(0, knots)
    assert times is not None
    for knot, ttft_s in zip(knots.tolist(), times.ttft_s.tolist(), strict=True):
        placed = for_strategy(large(8, knot), strategy)
        planned_s = run_partition(placed, strategy, partition_of(placed, strategy)).ttft_s
        if knot.bit_count() == 1:  # at others, the clock and the partition are a neighbour's
            assert ttft_s == pytest.approx(planned_s, rel=0.015)
        assert ttft_s == pytest.approx(planned_s, rel=0.05)


def test_prompts_behind_each_other_in_a_pipeline_take_as_long_as_alone() -> None:
    """Stages that begin within their slack end no later, by the event executor, so that prompts can overlap."""
    strategy = get_strategy("pp")
    maker = Prefills(large(4), strategy)
    times = maker.times(0, np.array([4096], dtype=np.int64))
    assert times is not None
    assert times.finish[0, 0] < 0.8
    pieces = maker._pieces(np.array([4096]), 0)[0]
    assert pieces > 1
    placed = maker.at(0, 4096)
    program = build_program(placed, strategy, columns(np.full(pieces, 4096 / pieces)))
    slack_s = times.slack_s[0]
    assert (np.diff(slack_s) > 0).all()
    waits = [Compute(name="before", device_s=np.array([late]), host_s=float(late)) for late in slack_s]
    late = replace(program, prologue=tuple((wait, *ops) for wait, ops in zip(waits, program.prologue, strict=True)))
    ends_s = EventSimulation(late, placed.cluster, record=False).finish_s
    assert ends_s[-1] == pytest.approx(times.ttft_s[0], rel=1e-6)


def test_a_pipeline_of_a_fleet_serves_prompts_of_all_lengths_as_the_simulated_stages_do() -> None:
    rng = np.random.default_rng(2)
    lengths, arrival_s = rng.integers(300, 6000, 25), np.cumsum(rng.exponential(0.02, 25))
    none = np.zeros(25, dtype=np.int64)
    workload = Workload(
        name="made",
        kind="csv",
        arrival_s=arrival_s - arrival_s[0],
        context_len=lengths,
        cached_prefix=none,
        output_tokens=none,
    )
    scenario, _ = make_scenario(ctx=6000, gpus=3, model="llama-3-8b", cluster="h100-nvlink")
    times = ServiceTimes.for_workloads(scenario, [workload], choice=Choice(asked=("pp",)))
    run = run_pool(Pool(arrival_s=workload.arrival_s, service=times.service(3, workload, None, "pp3"), replicas=1))
    strategy, asked = get_strategy("pp"), scenario.request

    def program_of(prompt: int) -> Program:
        placed = for_strategy(replace(scenario, request=replace(asked, context_len=int(lengths[prompt]))), strategy)
        return build_program(placed, strategy, columns(partition_of(placed, strategy).chunk_lens))

    served = serve_whole(for_strategy(scenario, strategy).cluster, workload.arrival_s, lengths.tolist(), program_of)
    ttft_s = np.array(served.first_token_s) - workload.arrival_s
    assert (run.end_s - workload.arrival_s).mean() == pytest.approx(np.mean(ttft_s), rel=0.1)
    assert np.mean(ttft_s) > 1.5 * times.service(3, workload, None, "pp3").ttft_s.mean()  # they queue


def test_only_layouts_that_fit_are_kinds_of_groups() -> None:
    times = ServiceTimes(large(1), 4096, 0, Choice(asked=("single", "kvr-s", "tp", "pp")))
    assert times.kinds(1) == (Kind(1),)
    assert times.grids(1)[0].most_new_tokens == 0
    assert times.kinds(4) == (Kind(4, "tp4"), Kind(4, "pp4"))
    new, none = np.array([100, 4096]), np.zeros(2, dtype=np.int64)
    assert np.isinf(times.seconds(4, new, none)).all()
    assert np.isfinite(times.seconds(4, new, none, "tp4")).all()
    assert (times.least_s(4, new, none) <= times.seconds(4, new, none, "pp4")).all()


def test_the_longest_prompt_that_fits_is_the_plans() -> None:
    times = Prefills(large(2), strategy := get_strategy("tp")).times(0, np.array([1, 65536], dtype=np.int64))
    assert times is not None
    most = times.most_new_tokens
    assert 1 < most < 65536
    for tokens, fit in ((most, True), (most + 1, False)):
        placed = for_strategy(large(2, tokens), strategy)
        assert fits(placed, memory_of(placed, strategy, partition_of(placed, strategy))) is fit
