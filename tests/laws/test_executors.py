"""All executors agree with the event executor for all strategies, networks, machines, models, prefixes and hosts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.run import Runner, run_program
from kvrsim.hardware import Cluster
from kvrsim.kernels.attention import SoftmaxCost
from kvrsim.noise import Noise, NoiseDraw
from kvrsim.program import Array, Compute, Op, Program
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy
from tests.building import Draws, any_rows, any_run, draws, examples, executed
from tests.building.programs import small_cluster, small_program

HYBRIDS = (
    *("tp2+kvr-s", "tp2+kvr-direct", "tp2+ring", "tp4+striped", "tp2+zigzag-ring", "tp2+zigzag"),
    *("tp2+ulysses", "tp2+tsp", "tp2+pp", "pp2+cp2"),
)
RUN_OTHERS_PROGRAMS = ("kvr-e", "kvr-p", "pp-s")
NAMES = (*(name for name in STRATEGIES if name not in RUN_OTHERS_PROGRAMS), *HYBRIDS)
NETWORKS = {"own links": ("switch", "chain", "nodes"), "bus": ("bus",)}


def event_finish_s(program: Program, cluster: Cluster) -> Array:
    """Finish times of the event executor, seconds, shape (num_ranks, B)."""
    rows = [EventSimulation(program.row(index), cluster, record=False) for index in range(program.num_rows)]
    return np.array([row.finish_s for row in rows]).T


def rounding_s(program: Program, cluster: Cluster, finish_s: Array) -> Array:
    """Seconds by which the event executor's times change if each computation takes 1e-13 more or less, same shape.

    finish_s: the event executor's times, (num_ranks, B).

    On a bus, ranks that gather can amplify a difference by a factor of three per layer, because it changes which
    messages share the bandwidth.
    """
    rng = np.random.default_rng(0)

    def change(op: Op) -> Op:
        return op._replace(device_s=op.device_s * (1 + 1e-13 * rng.choice([-1, 1]))) if isinstance(op, Compute) else op

    layers = [[[change(op) for op in own] for own in layer] for layer in program.layers]
    return np.abs(event_finish_s(replace(program, layers=layers), cluster) - finish_s)


def assert_executors_agree(scenario: Scenario, strategy: Strategy, rows: list[tuple[int, ...]]) -> None:
    """The executor that Runner chooses, the one for any program, and the event executor must give the same times."""
    program = build_program(executed(scenario, strategy), columns(rows))
    program_s = run_program(program, scenario.cluster)  # first, because it must not change the program
    finish_s = event_finish_s(program, scenario.cluster)
    runner = Runner(executed(scenario, strategy))
    chunks = np.stack(columns(rows))
    last_s = runner.finish_s(chunks, last_only=True)[-1]
    errors_s = np.abs(np.array([runner.finish_s(chunks), program_s]) - finish_s)
    last_errors_s = np.abs(last_s - finish_s[-1])
    if (errors_s > 1e-9 * finish_s).any() or (last_errors_s > 1e-9 * finish_s[-1]).any():
        allowed_s = np.maximum(1e-9 * finish_s, rounding_s(program, scenario.cluster, finish_s).max(axis=0))
        assert scenario.cluster.shares_bandwidth
        assert (errors_s <= allowed_s).all()
        assert (last_errors_s <= allowed_s[-1]).all()


def assert_executors_agree_on_a_small_program(seed: int) -> None:
    """Compare two partitions; in 3 of 10 programs, one sample of noise."""
    rng = random.Random(seed)
    cluster = small_cluster(rng, rng.randint(2, 4))
    program = small_program(rng, cluster.num_gpus, num_rows=2)
    jitter = Noise(compute_jitter=0.3, message_jitter=0.3)
    draw = NoiseDraw(jitter, program.num_ranks, seed=seed, samples=range(1)) if rng.random() < 0.3 else None
    finish_s = run_program(program, cluster, draw).reshape(program.num_ranks, -1)
    for index, times_s in enumerate(finish_s.T):
        event = EventSimulation(program.row(index), cluster, record=False, noise=draw)
        assert times_s == pytest.approx(np.array(event.finish_s), rel=1e-9, abs=0)


@given(seed=st.integers(0, 2**32))
@examples(500)
def test_small_programs(seed: int) -> None:
    """All operations in any order, in layers that repeat."""
    assert_executors_agree_on_a_small_program(seed)


@pytest.mark.parametrize("topologies", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("name", NAMES)
@given(rng=draws())
@examples(16)
def test_every_executor_agrees_with_the_event_executor(name: str, topologies: tuple[str, ...], rng: Draws) -> None:
    """With even chunks, which are among the rows, some messages arrive exactly when a rank begins to wait."""
    strategy = get_strategy(name)
    scenario = any_run(rng, strategy, topologies=topologies)
    assert_executors_agree(scenario, strategy, any_rows(rng, scenario, strategy, 3))


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["switch", "bus"])
@pytest.mark.parametrize("name", ["kvr-s", "tsp", "zigzag", "tp2+pp", "pp2+cp2"])
@given(rng=draws())
@examples(12)
def test_many_layers(name: str, topology: str, rng: Draws) -> None:
    """Executors that skip layers in steady state agree with the event executor."""
    strategy = get_strategy(name)
    scenario = any_run(rng, strategy, topologies=(topology,), layers=(12, 32), num_gpus=(4, 4))
    assert_executors_agree(scenario, strategy, any_rows(rng, scenario, strategy, 2))


@pytest.mark.parametrize("name", ["ring", "striped", "zigzag-ring", "tp2+ring"])
@given(rng=draws())
@examples(25)
def test_a_ring_of_equal_chunks_is_one_rank_s_work_shifted(name: str, rng: Draws) -> None:
    """Blocks that are priced once for all ranks give the times of blocks that are priced rank by rank."""
    strategy = get_strategy(name)
    scenario = any_run(rng, strategy, topologies=("switch", "chain", "nodes"))
    ranks = scenario.cluster.num_gpus
    equal = (max(1, scenario.request.new_tokens // ranks),) * ranks
    uneven = any_rows(rng, scenario, strategy, 1)[0]
    alone = build_program(executed(scenario, strategy), columns([equal]))
    beside = build_program(
        executed(scenario, strategy), columns([equal, uneven, (1, *equal[1:])])
    )  # priced rank by rank
    finish_s = run_program(alone, scenario.cluster)
    assert finish_s[:, 0] == pytest.approx(run_program(beside, scenario.cluster)[:, 0], rel=1e-12, abs=0)
    assert finish_s == pytest.approx(event_finish_s(alone, scenario.cluster), rel=1e-9, abs=0)


@pytest.mark.parametrize("name", ["ring", "striped", "zigzag-ring"])
def test_a_ring_of_equal_chunks_prices_as_many_blocks_as_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[int] = []
    keys_s = SoftmaxCost.keys_s

    def counted(self: SoftmaxCost, chunk: Array, keys: Array) -> Array:
        priced.append(np.size(keys))
        return keys_s(self, chunk, keys)

    monkeypatch.setattr(SoftmaxCost, "keys_s", counted)
    for ranks in (16, 64):
        priced.clear()
        scenario = make_scenario(model="llama-3.1-8b", cluster=f"{ranks // 8}x8xh100", ctx=64 * 256)[0]
        strategy = get_strategy(name)
        build_program(executed(scenario, strategy), columns([(64 * 256 // ranks,) * ranks]))
        assert sum(priced) <= 2 * (ranks - 1)


@pytest.mark.slow
def test_a_bus_can_amplify_rounding() -> None:
    """The executors differ by more than 1e-9, and the event executor from itself, if computations change by 1e-13."""
    question = {"model": "gemma-3-27b", "cluster": "a100-nvlink", "gpus": 8, "ctx": 10, "topology": "bus"}
    scenario, _ = make_scenario(**question, link_bandwidth=1709855427.7567904, link_latency="60us")
    strategy = get_strategy("zigzag")
    rows = [(2, 2, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1, 3)]
    program = build_program(executed(scenario, strategy), columns(rows))
    finish_s = event_finish_s(program, scenario.cluster)
    assert (rounding_s(program, scenario.cluster, finish_s) > 1e-9 * finish_s).any()
    assert (np.abs(run_program(program, scenario.cluster) - finish_s) > 1e-9 * finish_s).any()
    assert_executors_agree(scenario, strategy, rows)


@pytest.mark.parametrize("name", ["kvr-s", "kvr-b", "pp", "tp2+pp", "pp2+cp2"])
@given(rng=draws())
@examples(15)
def test_a_batch_equals_its_rows(name: str, rng: Draws) -> None:
    strategy = get_strategy(name)
    scenario = any_run(rng, strategy)
    rows = any_rows(rng, scenario, strategy, rng.randint(2, 8))
    together = Runner(executed(scenario, strategy)).finish_s(np.stack(columns(rows)))
    for column, row in enumerate(rows):
        alone = Runner(executed(scenario, strategy)).finish_s(np.stack(columns(row)))[:, 0]
        assert together[:, column] == pytest.approx(alone, rel=1e-12, abs=0)
