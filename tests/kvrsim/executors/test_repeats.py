"""Layers that repeat are spared, and every rank ends when it does if all of them are walked."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.executors import batch
from kvrsim.executors.batch import run_batch
from kvrsim.executors.repeats import runs
from kvrsim.hardware import Cluster
from kvrsim.program import Array, Compute, Op, Program, Recv, Send
from kvrsim.strategies import STRATEGIES
from tests.building import Draws, any_cluster, any_partition, any_placed, draws, examples

SAME = 1e-10


def walked(program: Program, cluster: Cluster) -> Array:
    """All layers, one after another."""
    with patch.object(batch, "has_runs", return_value=False):
        return run_batch(program, cluster)


def any_order(rng: Draws, num_kinds: int) -> tuple[int, ...]:
    """Kinds of layers in periods that repeat, with others before, between and behind."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        period = [rng.randrange(num_kinds) for _ in range(rng.randint(1, 3))]
        parts.append(period * rng.choice([1, rng.randint(2, 40)]))
    return tuple(chain(*parts))


def any_program(rng: Draws, num_ranks: int) -> Program:
    """Work and messages between any ranks, some of which hold the streams, some issued late."""
    rendezvous, num_rows = rng.random() < 0.5, rng.choice([1, 3])

    def seconds() -> Array:
        return np.array([rng.choice([0.0, 1.0, 10.0 * rng.random()]) for _ in range(num_rows)])

    def host_s() -> float:
        return rng.choice([0.0, 0.0, 0.0, 4.0 * rng.random()])

    def layer() -> tuple[tuple[Op, ...], ...]:
        ops: list[list[Op]] = [[] for _ in range(num_ranks)]
        for _ in range(rng.randint(1, 3 * num_ranks)):
            src, dst = rng.sample(range(num_ranks), 2)
            ops[src].append(Compute(name="work", device_s=seconds(), host_s=host_s()))
            in_turn = not rendezvous and rng.random() < 0.3
            ops[src].append(
                Send(dst=dst, nbytes=1e9 * seconds(), host_s=host_s(), rendezvous=rendezvous, in_turn=in_turn)
            )
            ops[dst].append(Recv(src=src, host_s=host_s(), rendezvous=rendezvous))
        return tuple(map(tuple, ops))

    kinds = tuple(layer() for _ in range(rng.randint(1, 2)))
    work = tuple((Compute(name="work", device_s=seconds(), host_s=host_s()),) for _ in range(num_ranks))
    return Program(
        strategy="mine",
        prologue=work,
        layers=kinds,
        layer_kind_index=any_order(rng, len(kinds)),
        epilogue=((),) * num_ranks,
    )


@pytest.mark.parametrize("name", ["kvr-s", "kvr-direct", "kvr-b", "tsp", "zigzag-ring", "ulysses", "tp"])
@given(rng=draws())
@examples(5)
def test_every_strategy_ends_as_if_all_layers_were_walked(name: str, rng: Draws) -> None:
    placed, cut = any_placed(rng, STRATEGIES[name])
    cuts = [cut, *(any_partition(rng, sum(cut), len(cut)) for _ in range(3))]
    chunks = list(np.ascontiguousarray(np.array(cuts, dtype=float).T))
    program = build_program(placed, STRATEGIES[name], chunks)
    program = replace(program, layer_kind_index=any_order(rng, len(program.layers)))
    assert run_batch(program, placed.cluster) == pytest.approx(walked(program, placed.cluster), rel=SAME, abs=0)


@given(rng=draws())
@examples(60)
def test_any_program_ends_as_if_all_layers_were_walked(rng: Draws) -> None:
    cluster = any_cluster(rng, rng.randint(2, 5), topologies=("switch", "chain", "nodes"))
    program = any_program(rng, cluster.num_gpus)
    assert run_batch(program, cluster) == pytest.approx(walked(program, cluster), rel=SAME, abs=0)


@pytest.mark.parametrize("profile", ["a100-eager", "roofline"])
@given(rng=draws(), seed=st.integers(0, 2**32))
@examples(20)
def test_many_partitions_end_as_if_all_layers_were_walked(profile: str, rng: Draws, seed: int) -> None:
    """Also those of few tokens on some ranks, whose hosts hold the others up."""
    gpus, bandwidth = rng.randint(2, 9), 10.0 ** rng.uniform(7, 12)
    scenario, _ = make_scenario(ctx=4096, gpus=gpus, profile=profile, link_bandwidth=bandwidth)
    shares = np.random.default_rng(seed).dirichlet(np.full(gpus, rng.choice([0.1, 1.0, 50.0])), size=40)
    chunks = list(np.ascontiguousarray((1.0 + shares * (4096 - gpus)).T))
    program = build_program(scenario, STRATEGIES["kvr-s"], chunks)
    program = replace(program, layer_kind_index=(0,) * rng.randint(4, 90))
    assert run_batch(program, scenario.cluster) == pytest.approx(walked(program, scenario.cluster), rel=SAME, abs=0)


@given(rng=draws())
@examples(30)
def test_periods_make_up_all_layers_in_order(rng: Draws) -> None:
    kinds = any_order(rng, 3)
    assert tuple(chain.from_iterable(period * times for period, times in runs(kinds))) == kinds


def test_layers_of_a_kind_and_layers_in_turn_are_one_period() -> None:
    assert list(runs((0,) * 80)) == [((0,), 80)]
    assert list(runs((0, 1, 1) * 9 + (2,))) == [((0, 1, 1), 9), ((2,), 1)]
    assert list(runs((0, 1, 2))) == [((0, 1, 2), 1)]


@pytest.mark.parametrize("profile", ["a100-eager", "roofline"])
def test_a_period_is_walked_a_few_times_however_often_it_repeats(profile: str) -> None:
    """Steps that the evaluator takes for 30 times as many layers are the same."""
    scenario, _ = make_scenario(ctx=4096, gpus=4, profile=profile)
    program = build_program(scenario, STRATEGIES["kvr-s"], [np.array([1024.0])] * 4)
    taken = []
    for layers in (32, 960):
        with patch.object(
            batch.BatchEvaluator, "_recv", autospec=True, side_effect=batch.BatchEvaluator._recv
        ) as steps:
            run_batch(replace(program, layer_kind_index=(0,) * layers), scenario.cluster)
        taken.append(steps.call_count)
    assert taken[0] == taken[1] < 3 * 32
