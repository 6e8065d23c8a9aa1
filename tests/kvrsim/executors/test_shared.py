"""Many partitions at once on a bus: each as the event executor runs it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from kvrsim.compile import build_program, columns
from kvrsim.executors.event import EventSimulation
from kvrsim.executors.shared import run_shared
from kvrsim.partition import Partition
from kvrsim.program.operations import Program
from kvrsim.strategies import get_strategy
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
