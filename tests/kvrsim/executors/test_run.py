"""The choice of executors: the fast ones are used where they suit, and blocks have a limited size."""

from __future__ import annotations

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, for_strategy
from kvrsim.executors.batch import compile_blocks
from kvrsim.executors.bus import _steady_finish_s
from kvrsim.executors.run import Runner, ttft_s
from kvrsim.strategies import STRATEGIES


@pytest.mark.parametrize("gpus", [2, 3])
@pytest.mark.parametrize("name", ["kvr-s", "kvr-e"])
def test_the_recurrence_of_chains(name: str, gpus: int) -> None:
    strategy = STRATEGIES[name]
    assert Runner(for_strategy(make_scenario(ctx=1000, gpus=gpus)[0], strategy), strategy).chain is not None


def test_a_bus_in_steady_state() -> None:
    """Layers of a100-eager take longer than their launches, so not all 32 layers are simulated."""
    scenario = for_strategy(make_scenario(ctx=4000, gpus=2, topology="bus")[0], STRATEGIES["tsp"])
    program = build_program(scenario, STRATEGIES["tsp"], [np.full(1, 2000.0)] * 2)
    cluster = scenario.cluster
    assert _steady_finish_s(program, cluster, compile_blocks(program, cluster)) is not None


def test_many_samples_are_run_one_partition_at_a_time() -> None:
    runner = Runner(for_strategy(make_scenario(ctx=1000, gpus=2)[0], STRATEGIES["tsp"]), STRATEGIES["tsp"])
    assert runner.rows_at_once(2**20) == 1


def test_blocks_hold_all_partitions() -> None:
    scenario = for_strategy(make_scenario(ctx=1000, gpus=2)[0], STRATEGIES["kvr-s"])
    rows = np.array([[first, 1000.0 - first] for first in range(1, 1000)] * 20)
    times_s = ttft_s(scenario, STRATEGIES["kvr-s"], rows)
    assert times_s.shape == (len(rows),)
    assert (times_s[:3] == [ttft_s(scenario, STRATEGIES["kvr-s"], row[None])[0] for row in rows[:3]]).all()
