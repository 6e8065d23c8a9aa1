"""One description, two executors: they agree to rounding, in batches as alone, and each time the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrsim.compile import build_program
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import Replay
from kvrsim.program import Array, Program
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from planner.evaluate import Evaluator

SEEDS = st.integers(0, 2**32)
SHARED = ("tsp", "kvr-s")  # kvr-e and kvr-p run kvr-s's program


def program_of(scenario: Scenario, name: str, cuts: list[tuple[int, ...]]) -> Program:
    return build_program(scenario, STRATEGIES[name], list(np.ascontiguousarray(np.array(cuts, dtype=float).T)))


def assert_same(batch: Array, event: tuple[float, ...]) -> None:
    assert batch == pytest.approx(np.array(event), rel=1e-12, abs=0)


@pytest.mark.parametrize("name", SHARED)
@given(seed=SEEDS)
@settings(max_examples=150)
def test_both_executors_agree_on_every_rank(name: str, seed: int, make: Any) -> None:
    rng = random.Random(seed)
    scenario = make.scenario(rng, num_gpus=(1, 6), layers=(1, 6))
    if seed % 3 == 0:
        scenario = make.as_measured(rng, scenario)
    cut = make.partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)
    program = program_of(scenario, name, [cut])
    assert_same(run_batch(program, scenario.cluster)[:, 0], Replay(program, scenario.cluster, record=False).finish_s)


@pytest.mark.parametrize("sends", ["overlap", "rendezvous"])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("topology", ["switch", "chain", "nodes"])
@given(seed=SEEDS, even=st.booleans())
@settings(max_examples=15)
def test_they_agree_on_every_kind_of_machine(
    topology: str, host: bool, sends: str, seed: int, even: bool, make: Any
) -> None:
    """Even chunks bring ties: messages that arrive at the very moment that somebody asks for them."""
    rng = random.Random(seed)
    scenario = make.scenario(
        rng, num_gpus=(2, 5), layers=(2, 8), roofline=False, host=host, sends=sends, topologies=(topology,)
    )
    tokens, ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    cut = (tokens // ranks,) * (ranks - 1) + (tokens - tokens // ranks * (ranks - 1),)
    cut = cut if even else make.partition(rng, tokens, ranks)
    for name in SHARED:
        program = program_of(scenario, name, [cut])
        batch = run_batch(program, scenario.cluster)[:, 0]
        assert_same(batch, Replay(program, scenario.cluster, record=False).finish_s)


@given(seed=SEEDS)
@settings(max_examples=30)
def test_one_gpu(seed: int, make: Any) -> None:
    rng = random.Random(seed)
    scenario = make.scenario(rng, num_gpus=(1, 1))
    program = program_of(scenario, "single", [(scenario.request.new_tokens,)])
    assert_same(run_batch(program, scenario.cluster)[:, 0], Replay(program, scenario.cluster).finish_s)


@pytest.mark.parametrize("name", SHARED)
@given(seed=SEEDS, size=st.integers(2, 12))
@settings(max_examples=50)
def test_a_batch_equals_its_rows(name: str, seed: int, size: int, make: Any) -> None:
    rng = random.Random(seed)
    scenario = make.scenario(rng, num_gpus=(1, 5))
    tokens, ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    cuts = [make.partition(rng, tokens, ranks) for _ in range(size)]
    together = run_batch(program_of(scenario, name, cuts), scenario.cluster)
    assert together.shape == (ranks, size)
    for column, cut in enumerate(cuts):
        alone = run_batch(program_of(scenario, name, [cut]), scenario.cluster)[:, 0]
        assert together[:, column] == pytest.approx(alone, rel=1e-13, abs=0)


@given(seed=SEEDS)
@settings(max_examples=20)
def test_running_a_program_does_not_change_it(seed: int, make: Any) -> None:
    """The executor works in place; the program's own arrays are the caller's."""
    rng = random.Random(seed)
    scenario = make.scenario(rng)
    cuts = [make.partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus) for _ in range(3)]
    for name in SHARED:
        program = program_of(scenario, name, cuts)
        first = run_batch(program, scenario.cluster)
        kept = first.copy()
        assert (run_batch(program, scenario.cluster) == kept).all()
        assert (first == kept).all()


@pytest.mark.parametrize("topology", ["switch", "bus"])
@given(seed=SEEDS)
@settings(max_examples=20)
def test_the_same_timeline_twice(topology: str, seed: int, make: Any) -> None:
    rng = random.Random(seed)
    scenario = make.scenario(rng, num_gpus=(2, 4), topologies=(topology,))
    cut = make.partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)
    for name in SHARED:
        runs = [Replay(program_of(scenario, name, [cut]), scenario.cluster) for _ in range(2)]
        assert runs[0].timeline == runs[1].timeline
        assert runs[0].finish_s == runs[1].finish_s
        quiet = Replay(program_of(scenario, name, [cut]), scenario.cluster, record=False)
        assert quiet.finish_s == runs[0].finish_s
        assert quiet.timeline.spans == ()


@given(seed=SEEDS)
@settings(max_examples=20)
def test_the_planner_evaluates_what_the_executors_run(seed: int, make: Any) -> None:
    rng = random.Random(seed)
    scenario = make.scenario(rng, num_gpus=(1, 4), topologies=("switch", "chain", "nodes", "bus"))
    cuts = [make.partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus) for _ in range(4)]
    evaluator = Evaluator(scenario, STRATEGIES["kvr-s"])
    ttft_s = evaluator.ttft_s(np.array(cuts, dtype=float))
    assert evaluator.evaluations == 4
    assert evaluator.best_s == ttft_s.min()
    for cut, value in zip(cuts, ttft_s, strict=True):
        replay = Replay(program_of(scenario, "kvr-s", [cut]), scenario.cluster, record=False)
        assert value == pytest.approx(replay.finish_s[-1], rel=1e-12)
        assert evaluator.one(cut) == pytest.approx(value, rel=1e-13)
