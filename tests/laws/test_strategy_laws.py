"""Laws of every strategy, including hybrids and pipelines, for random machines and models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.compile import build_program
from kvrsim.executors.batch import run_batch
from kvrsim.memory import RankMemory, largest_of_even_chunks, memory_of
from kvrsim.model.mixers import Attention, Mixer, Recurrence
from kvrsim.program import AllGather, AllToAll, Op, Program, Recv, RingPass, Send, host_s_of, work_s
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy
from planner.candidates import Search
from planner.simulate import run_simulation
from tests.building import Draws, any_placed, any_run, draws, examples, executed, measured_scenarios, weights_of
from tests.laws.test_executors import HYBRIDS

NAMES = (*(name for name in STRATEGIES if name not in ("kvr-s", "kvr-p")), *HYBRIDS)  # both run kvr-e's program
PARALLEL = tuple(name for name in NAMES if name != "single")


def program_of(scenario: Scenario, strategy: Strategy, cuts: list[tuple[int, ...]]) -> Program:
    return build_program(executed(scenario, strategy), list(np.ascontiguousarray(np.array(cuts, dtype=float).T)))


@given(scenario=measured_scenarios(num_gpus=(1, 1), topologies=("switch", "chain", "bus")))
@examples(50)
def test_one_gpu_makes_all_strategies_equal(scenario: Scenario) -> None:
    alone_s = run_simulation(scenario, strategy="single").ttft_s
    whole = [scenario.request.new_tokens]
    for name in STRATEGIES:
        given_chunks = whole if name == "kvr-p" or STRATEGIES[name].is_pipeline else None
        ttft_s = run_simulation(scenario, strategy=name, search=Search(partition=given_chunks)).ttft_s
        if name == "kvr-b":  # attention in blocks may also be faster on one GPU
            assert ttft_s <= alone_s * (1 + 1e-12)
        else:
            assert ttft_s == pytest.approx(alone_s, rel=1e-12), name


def _least_attention_flops(mixer: Mixer | None, first: int) -> float:
    """Minimum FLOPs of a query, which sees at least `first` keys, or only its own key in chunked attention.

    Half of the query's own key is masked. A state needs no attention FLOPs.
    """
    if mixer is None or isinstance(mixer, Recurrence):
        return 0.0
    seen = 1 if isinstance(mixer, Attention) and mixer.attention_chunk else min(first, mixer.reach or first)
    return 2 * mixer.num_attention_heads * (mixer.head_dim + mixer.v_head_dim) * (seen - 0.5)


@pytest.mark.parametrize("name", NAMES)
@given(rng=draws())
@examples(20)
def test_nothing_beats_its_flops(name: str, rng: Draws) -> None:
    """The limit counts products with weights and unmasked attention, on all GPUs at the datasheet's peak."""
    strategy = get_strategy(name)
    placed, cut = any_placed(rng, strategy)
    model, request = placed.model, placed.request
    first = request.cached_prefix + 1  # keys of the first new token; later tokens have at least as many
    attention = sum(_least_attention_flops(layer.mixer, first) for layer in model.layers)
    flops = request.batch * request.new_tokens * (2 * weights_of(model) + attention)
    least_s = flops / placed.cluster.gpu.peak_flops["fp16"]
    program = program_of(placed, strategy, [cut])
    device_s = sum(work_s(op).item() for rank in range(program.num_ranks) for _, op in program.ops(rank))
    assert device_s * placed.gpus_per_rank >= least_s * (1 - 1e-9)
    finish_s = run_batch(program, placed.cluster)[:, 0]
    assert finish_s.max() >= least_s / placed.num_gpus * (1 - 1e-9)


@pytest.mark.parametrize("name", PARALLEL)
@given(rng=draws(), factor=st.floats(1.0, 100.0))
@examples(15)
def test_never_rises_with_bandwidth(name: str, rng: Draws, factor: float) -> None:
    """With the same chunks, faster links between ranks and inside groups never increase TTFT."""
    strategy = get_strategy(name)
    placed, cut = any_placed(rng, strategy)
    program, faster = (program_of(one, strategy, [cut]) for one in (placed, placed.with_slower_links(1 / factor)))
    before = run_batch(program, placed.cluster)[-1, 0]
    after = run_batch(faster, placed.with_slower_links(1 / factor).cluster)[-1, 0]
    assert after <= before * (1 + 1e-9)
    free = placed.without_communication
    assert run_batch(program_of(free, strategy, [cut]), free.cluster)[-1, 0] <= after * (1 + 1e-9)


def meetings(ops: Sequence[Op]) -> list[type[Op]]:
    return [type(op) for op in ops if isinstance(op, AllGather | RingPass | AllToAll)]


def met_by(rank: int, sequences: Sequence[Sequence[Op]]) -> Iterable[int]:
    """Ranks in a rank's collectives: all ranks, those of its stage, or none for layers without attention."""
    kinds = meetings(sequences[rank])
    if set(kinds) - {AllGather}:
        return range(len(sequences))
    return next((op.members(rank, len(sequences)) for op in sequences[rank] if isinstance(op, AllGather)), ())


@pytest.mark.parametrize("name", PARALLEL)
@given(rng=draws())
@examples(15)
def test_what_is_sent_is_received(name: str, rng: Draws) -> None:
    strategy = get_strategy(name)
    placed, cut = any_placed(rng, strategy)
    program = program_of(placed, strategy, [cut])
    ranks = range(program.num_ranks)
    sequences = [[op for _, op in program.ops(rank)] for rank in ranks]
    for rank in ranks:
        for other in ranks:
            sends = [op.rendezvous for op in sequences[rank] if isinstance(op, Send) and op.dst == other]
            assert sends == [op.rendezvous for op in sequences[other] if isinstance(op, Recv) and op.src == rank]
        for member in met_by(rank, sequences):
            assert meetings(sequences[rank]) == meetings(sequences[member])
        for op in sequences[rank]:
            assert (work_s(op) >= 0).all()
            if isinstance(op, RingPass):
                assert op.device_s.shape[0] == len(op.host_s) == len(ranks) == op.nbytes.shape[0] + 1
            if isinstance(op, AllToAll):
                assert op.nbytes.shape[0] == len(ranks) - 1


@pytest.mark.parametrize("name", PARALLEL)
@given(rng=draws())
@examples(15)
def test_all_gpus_together_hold_the_model_and_the_context(name: str, rng: Draws) -> None:
    strategy = get_strategy(name)
    placed, cut = any_placed(rng, strategy)
    parts = memory_of(executed(placed, strategy), Partition(chunk_lens=cut))
    assert len(parts) == placed.num_gpus
    width = placed.request.dtype_bytes
    assert sum(part.weights for part in parts) >= placed.model.weight_bytes(width)
    new = placed.request.batch * placed.request.new_tokens * placed.model.kv_bytes_per_token(width)
    assert sum(part.kv_cache for part in parts) >= new
    shares_experts = placed.layout is not None and placed.layout.exchange != "none"
    if strategy.group_size == 1 and not strategy.is_pipeline and not shares_experts:
        assert all(part.weights == placed.model.weight_bytes(width) for part in parts)


def launches_of(program: Program, quiet: Program, rank: int) -> tuple[float, float]:
    """Seconds that a rank's device and its host take longer in a program than in the same program without launches."""
    ops = [op for _, op in program.ops(rank)]
    quiet_ops = [op for _, op in quiet.ops(rank)]
    device_s = sum(float(work_s(op).max()) for op in ops) - sum(float(work_s(op).max()) for op in quiet_ops)
    host_s = sum(map(host_s_of, ops)) - sum(map(host_s_of, quiet_ops))
    return device_s, host_s


@pytest.mark.parametrize("name", NAMES)
@given(rng=draws())
@examples(15)
def test_device_and_host_count_the_same_launches(name: str, rng: Draws) -> None:
    """Each kernel of the decoder layers costs the device one start and the host one issue.

    kvr-b is the exception: the host issues further calls of a chunk's query blocks while the device computes.
    """
    strategy = get_strategy(name)
    scenario, chunks = any_placed(rng, strategy, roofline=False)
    quiet = scenario.with_host(replace(scenario.host, launch_s=0.0, kernel_s=0.0))
    launch_s = 1.0
    device = scenario.with_host(replace(quiet.host, launch_s=launch_s))
    host = scenario.with_host(replace(quiet.host, kernel_s=launch_s))
    without, on_device, on_host = (program_of(each, strategy, [chunks]) for each in (quiet, device, host))
    for rank in range(without.num_ranks):
        slowness = scenario.cluster.slowness(rank) / (1.0 - scenario.pending_share)
        device_s, _ = launches_of(on_device, without, rank)
        _, host_s = launches_of(on_host, without, rank)
        assert host_s > 0
        if name == "kvr-b":
            assert device_s >= host_s * (1 - 1e-9)
        else:
            assert host_s * (1 - 1e-9) <= device_s <= host_s * slowness * (1 + 1e-9)


@given(rng=draws())
@examples(15)
def test_a_ring_launches_a_call_and_a_merge_for_each_block(rng: Draws) -> None:
    """A rank of a zigzag ring launches at least two kernels more in a layer for each further rank."""
    single = STRATEGIES["single"]
    ring = STRATEGIES["zigzag-ring"]
    scenario, chunks = any_placed(rng, ring, roofline=False)
    host = replace(scenario.host, launch_s=0.0, kernel_s=1.0)
    ranks = scenario.cluster.num_gpus
    alone = program_of(scenario.on_gpus(1).with_host(host), single, [(sum(chunks),)])
    program = program_of(scenario.with_host(host), ring, [chunks])
    with_attention = sum(scenario.share.layer_kinds[kind].mixer is not None for kind in scenario.share.layer_kind_index)
    alone_s = sum(host_s_of(op) for _, op in alone.ops(0))
    for rank in range(program.num_ranks):
        ring_s = sum(host_s_of(op) for _, op in program.ops(rank))
        assert ring_s - alone_s >= 2 * (ranks - 1) * with_attention * (1 - 1e-6) - 1e-6 * ring_s


@given(rng=draws())
@examples(80)
def test_a_few_ranks_need_what_the_largest_of_all_needs(rng: Draws) -> None:
    """With even chunks: the peak, and the weights and the cache, are those of the programs of all ranks."""
    strategy = rng.choice([one for one in STRATEGIES.values() if not one.is_pipeline and one.name != "kvr-p"])

    execution = executed(any_run(rng, strategy, num_gpus=(2, 24)), strategy)
    partition = Partition.even(execution.request.new_tokens, execution.cluster.num_gpus)
    every = memory_of(execution, partition)
    few = largest_of_even_chunks(execution)
    assert max(rank.total for rank in few) == max(rank.total for rank in every)

    def lasting(rank: RankMemory) -> int:
        return rank.weights + rank.kv_cache + rank.runtime

    assert max(map(lasting, few)) == max(map(lasting, every))
