"""What holds for every strategy, hybrids and pipelines included, on random machines and models."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrsim.compile import build_program
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import Replay
from kvrsim.memory import memory_of
from kvrsim.partition import Partition
from kvrsim.program import AllGather, AllToAll, Program, Recv, RingPass, Send, work_s
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy
from planner.simulate import run_simulation

SEEDS = st.integers(0, 2**32)
HYBRIDS = ("tp2+kvr-s", "tp2+kvr-direct", "tp2+ring", "tp4+striped", "tp2+zigzag", "tp2+ulysses", "tp2+tsp", "tp2+pp")
NAMES = (*(name for name in STRATEGIES if name not in ("kvr-s", "kvr-p")), *HYBRIDS)  # those two run kvr-e's program
PARALLEL = tuple(name for name in NAMES if name != "single")
SEARCHED = 1.002  # a search, and a pipeline's choice of its pieces, end within 0.2 % of the best


def program_of(scenario: Scenario, strategy: Strategy, cuts: list[tuple[int, ...]]) -> Program:
    return build_program(scenario, strategy, list(np.ascontiguousarray(np.array(cuts, dtype=float).T)))


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS)
@settings(max_examples=40)
def test_both_executors_agree_on_every_rank(name: str, seed: int, make: Any) -> None:
    rng = random.Random(seed)
    placed, cut = make.placed(rng, get_strategy(name))
    program = program_of(placed, get_strategy(name), [cut])
    batch = run_batch(program, placed.cluster)[:, 0]
    assert batch == pytest.approx(np.array(Replay(program, placed.cluster).finish_s), rel=1e-12, abs=0)


@pytest.mark.parametrize("name", PARALLEL)
@given(seed=SEEDS)
@settings(max_examples=10)
def test_a_batch_equals_its_rows(name: str, seed: int, make: Any) -> None:
    rng = random.Random(seed)
    strategy = get_strategy(name)
    placed, cut = make.placed(rng, strategy)
    cuts = [cut, *(make.partition(rng, placed.request.new_tokens, len(cut)) for _ in range(3))]
    together = run_batch(program_of(placed, strategy, cuts), placed.cluster)
    for column, one in enumerate(cuts):
        alone = run_batch(program_of(placed, strategy, [one]), placed.cluster)[:, 0]
        assert together[:, column] == pytest.approx(alone, rel=1e-13, abs=0)


@given(seed=SEEDS)
@settings(max_examples=30)
def test_one_gpu_makes_all_strategies_equal(seed: int, make: Any) -> None:
    rng = random.Random(seed)
    scenario = make.scenario(rng, num_gpus=(1, 1), topologies=("switch", "chain", "bus"))
    if seed % 2:
        scenario = make.as_measured(rng, scenario)
    alone_s = run_simulation(scenario, strategy="single").ttft_s
    whole = [scenario.request.new_tokens]
    for name in STRATEGIES:
        given_chunks = whole if name == "kvr-p" or STRATEGIES[name].pipeline else None
        ttft_s = run_simulation(scenario, strategy=name, partition=given_chunks).ttft_s
        assert ttft_s == pytest.approx(alone_s, rel=1e-12), name


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS)
@settings(max_examples=20)
def test_nothing_beats_its_flops(name: str, seed: int, make: Any) -> None:
    """All GPUs at the datasheet's peak, on the products with weights alone."""
    strategy = get_strategy(name)
    placed, cut = make.placed(random.Random(seed), strategy)
    flops = 2 * placed.request.batch * placed.request.new_tokens * make.weights(placed.model)
    least_s = flops / placed.cluster.gpu.peak_flops[0][1]
    program = program_of(placed, strategy, [cut])
    ops = [[op for _, op in program.ops(rank)] for rank in range(program.num_ranks)]
    device_s = sum(work_s(op).item() for rank in ops for op in rank)
    assert device_s * placed.gpus_per_rank >= least_s * (1 - 1e-9)
    finish_s = run_batch(program, placed.cluster)[:, 0]
    assert finish_s.max() >= least_s / placed.num_gpus * (1 - 1e-9)


@pytest.mark.parametrize("name", PARALLEL)
@given(seed=SEEDS, factor=st.floats(1.0, 100.0))
@settings(max_examples=15)
def test_never_rises_with_bandwidth(name: str, seed: int, factor: float, make: Any) -> None:
    """With the same chunks; their links and those inside a group."""
    strategy = get_strategy(name)
    placed, cut = make.placed(random.Random(seed), strategy)
    program, faster = (program_of(one, strategy, [cut]) for one in (placed, placed.with_slower_links(1 / factor)))
    before = run_batch(program, placed.cluster)[-1, 0]
    after = run_batch(faster, placed.with_slower_links(1 / factor).cluster)[-1, 0]
    assert after <= before * (1 + 1e-9)
    quiet = placed.without_communication()
    assert run_batch(program_of(quiet, strategy, [cut]), quiet.cluster)[-1, 0] <= after * (1 + 1e-9)


@pytest.mark.parametrize("name", ["kvr-direct", "tp", "tp2+kvr-s", "zigzag", "striped"])
@given(seed=SEEDS, times=st.integers(1, 4))
@settings(max_examples=10)
def test_never_falls_with_context(name: str, seed: int, times: int, make: Any) -> None:
    rng = random.Random(seed)
    strategy = get_strategy(name)
    scenario = make.divisible(rng)
    request = scenario.request
    longer = replace(request, context_len=request.context_len + 2 * times * scenario.cluster.num_gpus)
    before, after = (
        run_simulation(replace(scenario, request=one), strategy=strategy.name).ttft_s for one in (request, longer)
    )
    assert before <= after * SEARCHED


@pytest.mark.parametrize("name", PARALLEL)
@given(seed=SEEDS)
@settings(max_examples=15)
def test_what_is_sent_is_received(name: str, seed: int, make: Any) -> None:
    strategy = get_strategy(name)
    placed, cut = make.placed(random.Random(seed), strategy)
    program = program_of(placed, strategy, [cut])
    ranks = range(program.num_ranks)
    sequences = [[op for _, op in program.ops(rank)] for rank in ranks]
    for rank in ranks:
        for other in ranks:
            sends = [op.rendezvous for op in sequences[rank] if isinstance(op, Send) and op.dst == other]
            assert sends == [op.rendezvous for op in sequences[other] if isinstance(op, Recv) and op.src == rank]
        meetings = [type(op) for op in sequences[rank] if isinstance(op, AllGather | RingPass | AllToAll)]
        assert meetings == [type(op) for op in sequences[0] if isinstance(op, AllGather | RingPass | AllToAll)]
        for op in sequences[rank]:
            assert (work_s(op) >= 0).all()
            if isinstance(op, RingPass):
                assert op.device_s.shape[0] == len(op.host_s) == len(ranks) == op.nbytes.shape[0] + 1
            if isinstance(op, AllToAll):
                assert op.nbytes.shape[0] == len(ranks) - 1


@pytest.mark.parametrize("name", PARALLEL)
@given(seed=SEEDS)
@settings(max_examples=15)
def test_all_gpus_together_hold_the_model_and_the_context(name: str, seed: int, make: Any) -> None:
    strategy = get_strategy(name)
    placed, cut = make.placed(random.Random(seed), strategy)
    parts = memory_of(placed, strategy, Partition(chunk_lens=cut))
    assert len(parts) == placed.num_gpus
    width = placed.request.dtype_bytes
    assert sum(part.weights for part in parts) >= placed.model.weight_bytes(width)
    new = placed.request.batch * placed.request.new_tokens * placed.model.kv_bytes_per_token(width)
    assert sum(part.kv_cache for part in parts) >= new
    if strategy.group_size == 1 and strategy.pipeline is None:
        assert all(part.weights == placed.model.weight_bytes(width) for part in parts)
