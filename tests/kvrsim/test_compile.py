"""Programs in which a rank waits forever are errors of the strategy's author, and the error names the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvrsim
from kvrsim.compile import build_program, columns, waits_for_ever
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.executors.run import run_program
from kvrsim.program import AllGather, Op, Recv, RingPass, Send
from kvrsim.strategies import KVR_E, STRATEGIES, Step, Strategy
from tests.building import Draws, any_scenario, draws, examples, executed


def without(kind: type[Op], of_rank: int) -> Strategy:
    """KV-Runahead with the operations of one kind removed from one rank."""

    def layer(step: Step, rank: int) -> Iterator[Op]:
        yield from (op for op in KVR_E.layer(step, rank) if rank != of_rank or not isinstance(op, kind))

    return replace(KVR_E, name="mine", layer=layer, chains=False)


@pytest.mark.parametrize("kind", ["plan", "simulate"])
def test_a_forgotten_send_is_the_authors_error(kind: str) -> None:
    run: Callable[..., object] = getattr(kvrsim, kind)
    mine = without(Send, 1)
    chosen = {"strategies": [mine]} if kind == "plan" else {"strategy": mine}
    with pytest.raises(InputError, match=r"rank 2 waits for ever in layer 0, for a message from rank 1 \(recv_kv\)"):
        run(ctx="2k", gpus=4, **chosen)


def nothing(kind: type[Op]) -> Op:
    one = np.ones(1)
    if kind is RingPass:
        return RingPass(name="ring", device_s=np.ones((2, 1)), nbytes=np.ones((1, 1)), host_s=(0.0, 0.0))
    return AllGather(nbytes=one)


@pytest.mark.parametrize(
    ("layer", "stuck"),
    [
        (([Send(dst=1, nbytes=np.ones(1))], [Recv(src=0)]), None),
        (([Send(dst=1, nbytes=np.ones(1), rendezvous=True)], []), 0),
        (([Recv(src=1), Send(dst=1, nbytes=np.ones(1))], [Recv(src=0), Send(dst=0, nbytes=np.ones(1))]), 0),
        (([nothing(AllGather)], [nothing(AllGather)]), None),
        (([nothing(AllGather)], [nothing(RingPass)]), 0),
        (([], [nothing(AllGather)]), 1),
    ],
)
def test_a_rank_that_waits_for_ever_is_found(layer: Sequence[Sequence[Op]], stuck: int | None) -> None:
    result = waits_for_ever(layer)
    assert (None if result is None else result[0]) == stuck


@examples(40)
@given(rng=draws(), name=st.sampled_from([name for name, one in STRATEGIES.items() if not one.is_pipeline]))
def test_programs_that_the_executors_end_wait_for_nobody(rng: Draws, name: str) -> None:
    strategy = STRATEGIES[name]
    try:
        scenario = place(any_scenario(rng), strategy).placed
    except InputError:
        return  # the ranks cannot divide the heads
    ranks = scenario.cluster.num_gpus
    program = build_program(executed(scenario, strategy), columns([64] * ranks))
    assert np.isfinite(run_program(program, scenario.cluster)).all()
    assert [waits_for_ever(layer) for layer in program.layers] == [None] * len(program.layers)
