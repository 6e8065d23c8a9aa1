"""The beam search over pieces: its times are the executor's, and it finds the best pieces on its nodes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import kvrsim
from kvrsim.execution import place
from kvrsim.executors.run import Runner
from kvrsim.hardware import SlowGpu, UnevenCluster
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.search.beam import Beam
from tests.building import executed

SEARCHED = get_strategy("pp-s")
NODES = np.array([0.0, 500, 900, 1600, 2200, 3000, 3400, 4096])


def scenario_of(profile: str, engine: str) -> Scenario:
    """Three GPUs, one of them slow; with eager profiles, messages hold the stages."""
    scenario, _ = kvrsim.make_scenario(ctx=4096, gpus=3, model="falcon-7b", profile=profile, engine=engine)
    scenario = place(scenario, SEARCHED).placed
    return replace(scenario, cluster=UnevenCluster.of(scenario.cluster, [SlowGpu(rank=1, factor=1.5)], []))


@pytest.mark.parametrize(
    ("profile", "engine"),
    [
        ("a100-eager", "none"),
        ("a100-eager", "vllm"),
        ("a100-flash", "none"),
        ("a100-flash", "vllm"),
        ("roofline", "none"),
    ],
)
def test_finds_the_best_of_all_pieces_at_the_times_of_the_executor(profile: str, engine: str) -> None:
    """Times of the search and of the executor differ only by the seconds per request."""
    scenario, layers = scenario_of(profile, engine), (12, 9, 11)
    runner = Runner(executed(scenario, replace(SEARCHED, stage_layers=layers)))
    ttft_s = {}
    for number in range(len(NODES) - 1):
        for inner in itertools.combinations(range(1, len(NODES) - 1), number):
            lengths = np.diff(NODES[[0, *inner, len(NODES) - 1]])
            ttft_s[inner] = float(runner.finish_s(lengths[:, None])[-1, 0])
    best = Beam(executed(scenario, SEARCHED), NODES, 1.0).best([layers])
    offset_s = ttft_s[tuple(best[0].inner)] - best[0].ttft_s
    assert offset_s >= -1e-12
    assert all(ttft_s[tuple(one.inner)] - one.ttft_s == pytest.approx(offset_s, abs=1e-9) for one in best)
    assert ttft_s[tuple(best[0].inner)] == min(ttft_s.values())


def test_pieces_are_within_the_limits() -> None:
    """Each piece has at least `least` tokens and at most the limit of the node at which it begins."""
    scenario = scenario_of("a100-flash", "none")
    found = Beam(executed(scenario, SEARCHED), NODES, 600.0, np.full(len(NODES), 1500.0)).best(
        [(11, 10, 11), (16, 8, 8)]
    )
    for one in found:
        lengths = np.diff(NODES[[0, *one.inner, len(NODES) - 1]])
        assert 600 <= lengths.min() <= lengths.max() <= 1500
    assert {one.layers for one in found} == {(11, 10, 11), (16, 8, 8)}
