"""Laws for any machine: more work never takes less time, and a faster machine never takes more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.choices import Topology
from kvrsim.compile import build_program
from kvrsim.executors.event import EventSimulation
from kvrsim.hardware import load_cluster
from kvrsim.program import Compute, Op, Program, Recv, Send
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from kvrsim.units import scale
from planner.candidates import Search
from planner.search.minimise import Evaluator
from planner.search.search import search
from planner.simulate import run_simulation
from tests.building import (
    Draws,
    any_divisible,
    any_partition,
    any_scenario,
    as_measured,
    draws,
    examples,
    executed,
    faster,
    scenarios,
)

NAMES = ("single", "tsp", "kvr-e", "kvr-s")
SEARCHED = 1.002  # a search is at most 0.2 % above the best
EXACT = 1 + 1e-9


def ttft_s(scenario: Scenario, name: str) -> float:
    return run_simulation(scenario, strategy=name).ttft_s


def with_tokens(scenario: Scenario, more: int) -> Scenario:
    request = scenario.request
    return replace(scenario, request=replace(request, context_len=request.context_len + more))


@pytest.mark.parametrize("name", [*NAMES, "kvr-direct", "tp", "tp2+kvr-s", "zigzag", "striped"])
@given(rng=draws(), times=st.integers(1, 5))
@examples(20)
def test_never_falls_with_context(name: str, rng: Draws, times: int) -> None:
    """The context grows by the same number of tokens per rank, so that all even chunks grow. A search may end within
    0.2 % of the best."""
    scenario = any_scenario(rng, num_gpus=(1, 5)) if name in NAMES else any_divisible(rng)
    if rng.random() < 0.5:
        scenario = as_measured(rng, scenario)
    longer = with_tokens(scenario, (1 if name in NAMES else 2) * times * scenario.cluster.num_gpus)
    slack = EXACT if name in ("single", "tsp", "kvr-e") else SEARCHED
    assert ttft_s(scenario, name) <= ttft_s(longer, name) * slack


@pytest.mark.parametrize("name", ["tsp", "kvr-e", "ring", "zigzag"])
@given(scenario=scenarios(num_gpus=(2, 5), topologies=("bus",)), times=st.integers(1, 5))
@examples(15)
def test_on_a_bus_a_fall_with_context_is_no_more_than_what_sharing_costs(
    name: str, scenario: Scenario, times: int
) -> None:
    """TTFT on a bus may fall with context (see the next test), but never below the TTFT with one path per pair.

    With a path per pair, all times are sums and maxima of durations that never fall with a chunk, so TTFT never falls.
    A bus gives a flow at most the bandwidth of such a path. So TTFT(longer, bus) >= TTFT(shorter, own paths).
    """
    longer = with_tokens(scenario, 2 * times * scenario.cluster.num_gpus)
    link = scenario.cluster.link
    own, own_longer = (one.with_own_links(link.bandwidth_bytes_per_s, link.latency_s) for one in (scenario, longer))
    assert ttft_s(own, name) <= ttft_s(own_longer, name) * EXACT
    assert ttft_s(own_longer, name) <= ttft_s(longer, name) * EXACT


def test_more_work_may_end_earlier_on_a_bus() -> None:
    """If rank 1 computes one second longer, its message leaves the bus free for the message that rank 2 needs first."""
    cluster = load_cluster("a100-10gbs-bus", num_gpus=3).with_link(1.0, 0.0)

    def finish_s(work_s: float, topology: Topology) -> float:
        def work(seconds: float) -> Compute:
            return Compute(name="work", device_s=np.array([seconds]))

        send = Send(dst=2, nbytes=np.array([1.0]))
        layer = ((work(1.0), send), (work(work_s), send), (Recv(src=0), work(10.0), Recv(src=1)))
        nothing: tuple[tuple[Op, ...], ...] = ((), (), ())
        program = Program(strategy="x", prologue=nothing, layers=(layer,), layer_kind_index=(0,), epilogue=nothing)
        return EventSimulation(program, replace(cluster, topology=topology), record=False).finish_s[-1]

    assert [finish_s(seconds, "bus") for seconds in (1.0, 2.0)] == pytest.approx([13.0, 12.0])
    assert [finish_s(seconds, "switch") for seconds in (1.0, 2.0)] == pytest.approx([12.0, 12.0])


@given(scenario=scenarios(num_gpus=(1, 5), topologies=("switch", "chain")), factor=st.floats(1.0, 100.0))
@examples(25)
def test_a_search_never_loses_with_bandwidth(scenario: Scenario, factor: float) -> None:
    better = replace(scenario.cluster, link=scale(scenario.cluster.link, 1 / factor))
    assert ttft_s(replace(scenario, cluster=better), "kvr-s") <= ttft_s(scenario, "kvr-s") * SEARCHED


@pytest.mark.parametrize("name", NAMES)
@given(scenario=scenarios(num_gpus=(1, 5)), factor=st.floats(1.0, 100.0))
@examples(25)
def test_never_rises_with_the_machine(name: str, scenario: Scenario, factor: float) -> None:
    slack = SEARCHED if name == "kvr-s" else EXACT
    assert ttft_s(faster(scenario, factor), name) <= ttft_s(scenario, name) * slack


@pytest.mark.parametrize("name", ["single", "tsp", "kvr-e"])
@given(scenario=scenarios(num_gpus=(1, 5), host=False), factor=st.floats(1e-3, 1e3))
@examples(30)
def test_every_rate_times_k_is_every_time_over_k(name: str, scenario: Scenario, factor: float) -> None:
    assert ttft_s(faster(scenario, factor), name) == pytest.approx(ttft_s(scenario, name) / factor, rel=1e-9)


@given(rng=draws())
@examples(30)
def test_a_rank_takes_at_least_its_own_work(rng: Draws) -> None:
    scenario = any_scenario(rng, num_gpus=(1, 5), topologies=("switch", "chain", "nodes", "bus"))
    cut = any_partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)
    for name in ("tsp", "kvr-e"):
        result = run_simulation(scenario, strategy=name, search=Search(partition=cut))
        program = build_program(executed(scenario, STRATEGIES[name]), [np.array([float(chunk)]) for chunk in cut])
        for rank in result.per_rank:
            ops = [op for _, op in program.ops(rank.rank)]
            device_s = sum(op.device_s.item() for op in ops if isinstance(op, Compute))
            assert rank.compute_s == pytest.approx(device_s)
            assert rank.wait_s >= -1e-9 * result.ttft_s
        last_host_s = sum(op.host_s for op in ops)
        assert result.ttft_s >= last_host_s * (1 - 1e-9)


@given(scenario=scenarios(num_gpus=(1, 6)))
@examples(50)
def test_searched_chunks_are_no_slower_than_even_ones(scenario: Scenario) -> None:
    assert ttft_s(scenario, "kvr-s") <= ttft_s(scenario, "kvr-e") * SEARCHED


@given(rng=draws())
@examples(20)
def test_links_that_cost_nothing_are_the_best(rng: Draws) -> None:
    scenario = any_scenario(rng, num_gpus=(2, 5))
    strategy = STRATEGIES["kvr-s"]
    cut = np.array([any_partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus)], dtype=float)
    free = Evaluator(executed(scenario.without_communication, strategy)).ttft_s(cut)
    assert free <= Evaluator(executed(scenario, strategy)).ttft_s(cut) * EXACT
    assert (
        search(executed(scenario.without_communication, strategy)).ttft_s
        <= search(executed(scenario, strategy)).ttft_s * SEARCHED
    )
