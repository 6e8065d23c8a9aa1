"""Many partitions at once on a bus: each as the event executor runs it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program, columns
from kvrsim.executors.bus.alike import run_alike
from kvrsim.executors.bus.flows import FlowGraph
from kvrsim.executors.bus.lanes import run_lanes
from kvrsim.executors.bus.moments import SharedRun
from kvrsim.executors.bus.run import run_shared
from kvrsim.executors.event import EventSimulation
from kvrsim.program import Program
from kvrsim.scenario import Partition
from kvrsim.strategies import get_strategy
from planner.candidates import per_rank_scenario
from tests.building import Draws, any_partition, any_placed, draws, examples


def assert_as_replayed(program: Program, cluster: object) -> None:
    together = run_shared(program, cluster)  # type: ignore[arg-type]
    for index in range(program.num_rows):
        replay = EventSimulation(program.row(index), cluster, record=False)  # type: ignore[arg-type]
        assert together[:, index] == pytest.approx(np.array(replay.finish_s), rel=1e-9, abs=0)


@pytest.mark.parametrize("names", [("kvr-s", "kvr-b"), ("kvr-direct", "tsp"), ("ring", "ulysses"), ("pp", "tp2+kvr-s")])
@given(rng=draws())
@examples(12)
def test_every_partition_as_replayed_alone(names: tuple[str, str], rng: Draws) -> None:
    strategy = get_strategy(rng.choice(names))
    placed, cut = any_placed(rng, strategy, topologies=("bus",))
    tokens, ranks = placed.request.new_tokens, placed.cluster.num_gpus
    if strategy.pipeline:
        number = len(cut)
        cuts = [cut, *(any_partition(rng, tokens, number) for _ in range(2))]
    else:
        even = Partition.even(tokens, ranks).chunk_lens  # of which many messages move at the same time
        cuts = [cut, even, *(any_partition(rng, tokens, ranks) for _ in range(2))]
    assert_as_replayed(build_program(placed, strategy, columns(cuts)), placed.cluster)


@pytest.mark.parametrize("name", ["kvr-s", "kvr-direct", "pp"])
@given(rng=draws())
@examples(12)
def test_lanes_as_the_graph_of_moments(name: str, rng: Draws) -> None:
    strategy = get_strategy(name)
    placed, cut = any_placed(rng, strategy, topologies=("bus",))
    cuts = [cut, *(any_partition(rng, placed.request.new_tokens, len(cut)) for _ in range(3))]
    program = build_program(placed, strategy, columns(cuts))
    by_lanes = run_lanes(program, placed.cluster)
    if by_lanes is not None:  # messages hold no sender, and there are some
        graph = SharedRun(FlowGraph.of(program, placed.cluster)).run()
        assert by_lanes == pytest.approx(graph, rel=1e-12, abs=0)


@pytest.mark.parametrize("name", ["tsp", "ring", "zigzag", "ulysses"])
@pytest.mark.parametrize("bandwidth", [1e9, 1e11])
def test_layers_alike_as_all_of_them(name: str, bandwidth: float) -> None:
    scenario, _ = make_scenario(gpus=4, ctx=4096, topology="bus", link_bandwidth=bandwidth)
    placed = per_rank_scenario(scenario, get_strategy(name))
    for cuts in ([(1024,) * 4], [(1024,) * 4, (1000, 1100, 996, 1000)]):
        program = build_program(placed, get_strategy(name), columns(cuts))
        whole = SharedRun(FlowGraph.of(program, placed.cluster)).run()
        found = run_alike(program, placed.cluster)
        assert found is None or found == pytest.approx(whole, rel=1e-11, abs=0)
        assert run_shared(program, placed.cluster) == pytest.approx(whole, rel=1e-11, abs=0)
    even = build_program(placed, get_strategy("zigzag"), columns((1024,) * 4))
    assert run_alike(even, placed.cluster) is not None
