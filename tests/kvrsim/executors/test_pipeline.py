"""Pipelines: a batch of several stage layouts gives the times of the single programs, also with slow GPUs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns, pipeline_computes_s
from kvrsim.execution import place
from kvrsim.executors.pipeline import run_pipeline
from kvrsim.executors.run import Runner, run_program
from kvrsim.hardware import SlowGpu, SlowLink, UnevenCluster
from kvrsim.program import computes_s
from kvrsim.strategies import get_strategy
from tests.building import Draws, any_rows, any_run, draws, examples, executed

SEARCHED = get_strategy("pp-s")
LAYOUTS = np.array([[10, 10, 12], [1, 1, 30], [30, 1, 1], [10, 10, 12]])


@pytest.mark.parametrize("name", ["pp", "pp2+cp2"])
@given(rng=draws())
@examples(20)
def test_any_pipeline(name: str, rng: Draws) -> None:
    """A pipeline equals its program: hosts that lead or delay, messages that hosts issue, uneven machines."""
    strategy = get_strategy(name)
    scenario = any_run(rng, strategy, topologies=("switch", "nodes"), layers=(4, 9), tokens=(4, 400))
    pieces = columns(any_rows(rng, scenario, strategy, 4))
    finish_s = run_pipeline(executed(scenario, strategy), pieces, scenario.cluster, scenario.cost)
    want_s = run_program(build_program(executed(scenario, strategy), pieces), scenario.cluster)
    assert finish_s is None or finish_s == pytest.approx(want_s, rel=1e-11, abs=0)


@pytest.mark.parametrize("topology", ["switch", "bus"])
@pytest.mark.parametrize("profile", ["a100-eager", "a100-flash"])
def test_a_batch_of_layouts_equals_each_program(profile: str, topology: str) -> None:
    """Cases: messages that hold streams or overlap, host time of operations, one slow GPU and one slow link."""
    scenario, _ = make_scenario(ctx=1000, gpus=3, profile=profile, topology=topology, link_bandwidth=1e9)
    scenario = place(scenario, SEARCHED).placed
    links = [SlowLink(first=0, second=1, factor=16)] if topology == "switch" else []
    scenario = replace(scenario, cluster=UnevenCluster.of(scenario.cluster, [SlowGpu(rank=1, factor=1.6)], links))
    rows = [(400, 300, 300), (500, 499, 1), (1, 1, 998), (250, 500, 250)]
    chunks = np.stack(columns(rows))
    finish_s = Runner(executed(scenario, SEARCHED)).finish_s(chunks, stage_layers=LAYOUTS.T)
    at_once = run_pipeline(executed(scenario, SEARCHED), list(chunks), scenario.cluster, scenario.cost, LAYOUTS.T)
    assert at_once == pytest.approx(finish_s, rel=1e-12)
    for index, (row, layout) in enumerate(zip(rows, LAYOUTS.tolist(), strict=True)):
        strategy = replace(SEARCHED, stage_layers=tuple(layout))
        alone = run_program(build_program(executed(scenario, strategy), columns(row)), scenario.cluster)
        assert finish_s[:, index] == pytest.approx(alone[:, 0], rel=1e-9)


@pytest.mark.parametrize("profile", ["a100-eager", "a100-flash"])
@pytest.mark.parametrize(("name", "gpus"), [("pp2+cp4", 8), ("pp", 4), ("pp1", 1)])
def test_pipelines_equal_their_programs(name: str, gpus: int, profile: str) -> None:
    """Finish times and compute times of stages with one rank and with context ranks, with slow GPUs and links."""
    strategy = get_strategy(name)
    scenario = place(make_scenario(ctx=3000, gpus=gpus, profile=profile, link_bandwidth=1e10)[0], strategy).placed
    if gpus == 8:
        links = [SlowLink(first=first, second=first + 1, factor=first + 3) for first in (1, 4, 5)]
        slow = [SlowGpu(rank=2, factor=1.3), SlowGpu(rank=7, factor=1.7)]
        scenario = replace(scenario, cluster=UnevenCluster.of(scenario.cluster, slow, links))
    pieces = columns((1000, 999, 700, 301))
    execution = executed(scenario, strategy)
    finish_s = run_pipeline(execution, pieces, scenario.cluster, scenario.cost)
    program = build_program(execution, pieces)
    assert finish_s == pytest.approx(run_program(program, scenario.cluster), rel=1e-9)
    compute_s = pipeline_computes_s(execution, pieces)
    assert compute_s == pytest.approx(computes_s(program), rel=1e-12)
