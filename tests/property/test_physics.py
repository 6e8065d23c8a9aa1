"""What holds on any machine: more work takes no less time, a better machine no more."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrsim.choices import Topology
from kvrsim.compile import build_program
from kvrsim.executors.event import Replay
from kvrsim.hardware.cluster import load_cluster
from kvrsim.partition import Partition
from kvrsim.program import Compute, Op, Program, Recv, Send
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from kvrsim.units import scale
from planner.evaluate import Evaluator
from planner.search.search import search
from planner.simulate import run_simulation

SEEDS = st.integers(0, 2**32)
NAMES = ("single", "tsp", "kvr-e", "kvr-s")
SEARCHED = 1.001  # a search ends within 0.1 % of the best
EXACT = 1 + 1e-9


def ttft_s(scenario: Scenario, name: str) -> float:
    return run_simulation(scenario, strategy=name).ttft_s


def with_tokens(scenario: Scenario, more: int) -> Scenario:
    request = scenario.request
    return replace(scenario, request=replace(request, context_len=request.context_len + more))


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, times=st.integers(1, 5))
@settings(max_examples=25)
def test_never_falls_with_context(name: str, seed: int, times: int, make: Any) -> None:
    """By as many tokens a rank, so that even chunks all grow; a search may end within 0.1 % of the best."""
    rng = random.Random(seed)
    scenario = make.scenario(rng, num_gpus=(1, 5))
    if seed % 2:
        scenario = make.as_measured(rng, scenario)
    longer = with_tokens(scenario, times * scenario.cluster.num_gpus)
    slack = SEARCHED if name == "kvr-s" else EXACT
    assert ttft_s(scenario, name) <= ttft_s(longer, name) * slack


@pytest.mark.parametrize("name", ["tsp", "kvr-e", "ring", "zigzag"])
@given(seed=SEEDS, times=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_on_a_bus_a_fall_with_context_is_no_more_than_what_sharing_costs(
    name: str, seed: int, times: int, make: Any
) -> None:
    """TTFT on a bus may fall with context (see the next test), but never below that of paths of one's own.

    With a path for every pair, all times are sums and maxima of durations, none of which falls with a chunk: TTFT
    never falls. A bus gives no flow more than such a path does. So TTFT(longer, bus) >= TTFT(shorter, own paths).
    """
    scenario = make.scenario(random.Random(seed), num_gpus=(2, 5), topologies=("bus",))
    longer = with_tokens(scenario, 2 * times * scenario.cluster.num_gpus)
    link = scenario.cluster.link
    own, own_longer = (one.with_own_links(link.bandwidth_bytes_per_s, link.latency_s) for one in (scenario, longer))
    assert ttft_s(own, name) <= ttft_s(own_longer, name) * EXACT
    assert ttft_s(own_longer, name) <= ttft_s(longer, name) * EXACT


def test_more_work_may_end_earlier_on_a_bus() -> None:
    """Rank 1 computes a second longer; its message then leaves the bus to that which rank 2 waits for."""
    cluster = load_cluster("a100-10gbs-bus", num_gpus=3).with_link(1.0, 0.0)

    def finish_s(work_s: float, topology: Topology) -> float:
        def work(seconds: float) -> Compute:
            return Compute(name="work", device_s=np.array([seconds]))

        send = Send(dst=2, nbytes=np.array([1.0]))
        layer = ((work(1.0), send), (work(work_s), send), (Recv(src=0), work(10.0), Recv(src=1)))
        nothing: tuple[tuple[Op, ...], ...] = ((), (), ())
        program = Program(strategy="x", prologue=nothing, layers=(layer,), layer_kind_index=(0,), epilogue=nothing)
        return Replay(program, cluster.with_topology(topology), record=False).finish_s[-1]

    assert [finish_s(seconds, "bus") for seconds in (1.0, 2.0)] == pytest.approx([13.0, 12.0])
    assert [finish_s(seconds, "switch") for seconds in (1.0, 2.0)] == pytest.approx([12.0, 12.0])


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, factor=st.floats(1.0, 100.0))
@settings(max_examples=25)
def test_never_rises_with_bandwidth(name: str, seed: int, factor: float, make: Any) -> None:
    scenario = make.scenario(random.Random(seed), num_gpus=(1, 5), topologies=("switch", "chain"))
    faster = scenario.cluster.with_measured(scale(scenario.cluster.link, 1 / factor))
    slack = SEARCHED if name == "kvr-s" else EXACT
    assert ttft_s(replace(scenario, cluster=faster), name) <= ttft_s(scenario, name) * slack


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, factor=st.floats(1.0, 100.0))
@settings(max_examples=25)
def test_never_rises_with_the_machine(name: str, seed: int, factor: float, make: Any) -> None:
    scenario = make.scenario(random.Random(seed), num_gpus=(1, 5))
    slack = SEARCHED if name == "kvr-s" else EXACT
    assert ttft_s(make.faster(scenario, factor), name) <= ttft_s(scenario, name) * slack


@given(seed=SEEDS)
@settings(max_examples=50)
def test_one_gpu_makes_all_strategies_equal(seed: int, make: Any) -> None:
    rng = random.Random(seed)
    scenario = make.scenario(rng, num_gpus=(1, 1), topologies=("switch", "chain", "bus"))
    if seed % 2:
        scenario = make.as_measured(rng, scenario)
    times = [ttft_s(scenario, name) for name in NAMES]
    assert times == pytest.approx([times[0]] * len(times), rel=1e-12)


@pytest.mark.parametrize("name", ["single", "tsp", "kvr-e"])
@given(seed=SEEDS, factor=st.floats(1e-3, 1e3))
@settings(max_examples=30)
def test_every_rate_times_k_is_every_time_over_k(name: str, seed: int, factor: float, make: Any) -> None:
    scenario = make.scenario(random.Random(seed), num_gpus=(1, 5), host=False)
    faster = make.faster(scenario, factor)
    assert ttft_s(faster, name) == pytest.approx(ttft_s(scenario, name) / factor, rel=1e-9)


@pytest.mark.parametrize("name", ["single", "tsp", "kvr-e"])
@given(seed=SEEDS, kernel=st.sampled_from(["eager", "flash"]))
@settings(max_examples=30)
def test_nothing_beats_its_flops(name: str, seed: int, kernel: str, make: Any) -> None:
    """All ranks at the datasheet's peak, on products with weights and unmasked attention alone."""
    rng = random.Random(seed)
    scenario = replace(make.scenario(rng, num_gpus=(1, 5)), kernel=kernel)
    model, request = scenario.model, scenario.request
    gemm = sum(
        sum(part.in_features * part.out_features for part in (*layer.qkv, layer.output, *layer.shared_mlp))
        + max(1, layer.num_experts_per_tok) * sum(part.in_features * part.out_features for part in layer.mlp)
        for layer in model.layers
    )
    pairs = sum(
        sum(min(query + 1, layer.sliding_window or query + 1) - 0.5 for query in (request.cached_prefix,))
        for layer in model.layers
    )  # of each new token at least as many as of the first
    attention = 4 * model.num_attention_heads * model.head_dim * pairs
    flops = request.batch * request.new_tokens * (2 * gemm + attention)
    ranks = 1 if name == "single" else scenario.cluster.num_gpus
    result = run_simulation(scenario, strategy=name)
    least_s = flops / scenario.cluster.gpu.peak_flops[0][1]
    assert sum(rank.compute_s for rank in result.per_rank) >= least_s * (1 - 1e-9)
    # The last rank alone: it has no fewer tokens than any share that even chunks leave.
    share = Partition.even(request.new_tokens, ranks).chunk_lens[-1] / request.new_tokens
    assert result.ttft_s >= least_s * share * (1 - 1e-9)


@given(seed=SEEDS)
@settings(max_examples=30)
def test_a_rank_takes_at_least_its_own_work(seed: int, make: Any) -> None:
    rng = random.Random(seed)
    scenario = make.scenario(rng, num_gpus=(1, 5), topologies=("switch", "chain", "nodes", "bus"))
    cut = make.partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)
    for name in ("tsp", "kvr-e"):
        result = run_simulation(scenario, strategy=name, partition=cut)
        program = build_program(scenario, STRATEGIES[name], [np.array([float(chunk)]) for chunk in cut])
        for rank in result.per_rank:
            ops = [op for _, op in program.ops(rank.rank)]
            device_s = sum(op.device_s.item() for op in ops if isinstance(op, Compute))
            assert rank.compute_s == pytest.approx(device_s)
            assert rank.wait_s >= -1e-9 * result.ttft_s
        last_host_s = sum(op.host_s for op in ops)
        assert result.ttft_s >= last_host_s * (1 - 1e-9)


@given(seed=SEEDS)
@settings(max_examples=50)
def test_searched_chunks_are_no_slower_than_even_ones(seed: int, make: Any) -> None:
    scenario = make.scenario(random.Random(seed), num_gpus=(1, 6))
    assert ttft_s(scenario, "kvr-s") <= ttft_s(scenario, "kvr-e") * SEARCHED


@given(seed=SEEDS)
@settings(max_examples=20)
def test_links_that_cost_nothing_are_the_best(seed: int, make: Any) -> None:
    rng = random.Random(seed)
    scenario = make.scenario(rng, num_gpus=(2, 5))
    strategy = STRATEGIES["kvr-s"]
    cut = np.array([make.partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)], dtype=float)
    free = Evaluator(scenario.without_communication(), strategy).ttft_s(cut)
    assert free <= Evaluator(scenario, strategy).ttft_s(cut) * EXACT
    assert search(scenario.without_communication(), strategy).ttft_s <= search(scenario, strategy).ttft_s * SEARCHED
