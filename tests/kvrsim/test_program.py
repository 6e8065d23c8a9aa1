"""Programs: what every rank does, in order, and that messages match."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.compile import build_program
from kvrsim.program import AllGather, Compute, Program, Recv, Send
from kvrsim.strategies import STRATEGIES
from tests.building import Draws, any_partition, any_placed, draws, examples


def compute(name: str, device_s: float = 1.0) -> Compute:
    return Compute(name=name, device_s=np.array([device_s]))


def test_ops_run_from_the_prologue_through_all_layers() -> None:
    program = Program(
        strategy="test",
        prologue=((compute("embedding"),),),
        layers=(((compute("wide"),),), ((compute("narrow", 2.0), compute("more")),)),
        layer_kind_index=(0, 1, 0),
        epilogue=((compute("head"),),),
    )
    names = [(layer, op.name) for layer, op in program.ops(0) if isinstance(op, Compute)]
    layers = [(0, "wide"), (1, "narrow"), (1, "more"), (2, "wide")]
    assert names == [(None, "embedding"), *layers, (None, "head")]
    assert program.num_ranks == 1
    assert sum(op.device_s.item() for _, op in program.ops(0) if isinstance(op, Compute)) == 6.0 + 1.0


@pytest.mark.parametrize("name", STRATEGIES)
@given(rng=draws(), batch=st.integers(1, 3))
@examples(25)
def test_programs_of_all_strategies(name: str, rng: Draws, batch: int) -> None:
    strategy = STRATEGIES[name]
    scenario, cut = any_placed(rng, strategy)
    ranks, tokens = scenario.cluster.num_gpus, scenario.request.new_tokens
    cuts = [cut, *(any_partition(rng, tokens, len(cut)) for _ in range(batch - 1))]
    program = build_program(scenario, strategy, list(np.array(cuts, dtype=float).T))
    assert program.num_ranks == ranks
    if strategy.pipeline is None:
        assert len(program.layer_kind_index) == scenario.model.num_hidden_layers
    sequences = [program.ops(rank) for rank in range(ranks)]
    for rank, ops in enumerate(sequences):
        for _, op in ops:
            assert np.min(op.host_s) >= 0
            if isinstance(op, Compute):
                assert op.device_s.shape == (batch,)
                assert (op.device_s >= 0).all()
            if isinstance(op, Send | AllGather):
                assert np.broadcast_shapes(op.nbytes.shape, (batch,)) == (batch,)
                assert (op.nbytes > 0).all()
        for other in range(ranks):
            sends = [(layer, op.rendezvous) for layer, op in ops if isinstance(op, Send) and op.dst == other]
            other_ops = sequences[other]
            recvs = [(layer, op.rendezvous) for layer, op in other_ops if isinstance(op, Recv) and op.src == rank]
            assert sends == recvs
        gathers = [layer for layer, op in ops if isinstance(op, AllGather)]
        assert gathers == [layer for layer, op in sequences[0] if isinstance(op, AllGather)]
    heads = [[op.name for _, op in ops if isinstance(op, Compute)].count("head") for ops in sequences]
    assert heads == [0] * (ranks - 1) + [1]
