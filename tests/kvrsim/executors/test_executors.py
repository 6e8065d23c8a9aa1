"""Executors on small programs. Laws for all strategies: tests/laws."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.builder import make_scenario
from kvrsim.compile import build_program
from kvrsim.executors.batch import layer_matrix, run_batch, segment_of
from kvrsim.executors.event import EventSimulation
from kvrsim.hardware import load_cluster
from kvrsim.program import AllGather, AllToAll, Compute, Op, Program, Recv, RingPass, Send, host_s_of
from kvrsim.strategies import get_strategy
from tests.building import examples, executed
from tests.building.programs import small_cluster


@given(
    seconds=st.lists(st.tuples(st.floats(0, 10), st.sampled_from([0.0, 0.0, 20.0]) | st.floats(0, 10)), max_size=20),
    clock_s=st.just(0.0) | st.floats(0, 50),
    host_s=st.floats(0, 50),
)
@examples(200)
def test_operations_in_a_row_are_one_segment(seconds: list[tuple[float, float]], clock_s: float, host_s: float) -> None:
    """A segment equals `end = max(max(device, host_begin) + device_s, host_begin + host_s)`, operation by operation."""
    segment = segment_of([Compute(name="work", device_s=np.array([one]), host_s=host) for one, host in seconds])
    at_once_s = np.maximum(clock_s + segment.device_s, host_s + segment.floor_s)
    for device_s, own_host_s in seconds:
        clock_s, host_s = max(max(clock_s, host_s) + device_s, host_s + own_host_s), host_s + own_host_s
    assert at_once_s == pytest.approx(clock_s, rel=1e-12)
    assert segment.host_s + 1.0 == pytest.approx(sum(host for _, host in seconds) + 1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "model"), [("zigzag-ring", "llama-7b"), ("zigzag", "llama-7b"), ("kvr-s", "gemma-3-27b")]
)
def test_partitions_do_not_depend_on_the_others_of_their_batch(name: str, model: str) -> None:
    """A large batch leaves its last partitions to a second run; a small batch waits until all are steady."""
    scenario = make_scenario(ctx=16384, gpus=8, model=model)[0]
    chunks = np.random.default_rng(0).dirichlet(np.full(8, 50.0), size=2048) * 16384
    program = build_program(executed(scenario, get_strategy(name)), list(np.ascontiguousarray(chunks.T)))
    together_s = run_batch(program, scenario.cluster)
    parts_s = [run_batch(program.rows(rows), scenario.cluster) for rows in np.split(np.arange(2048), 8)]
    assert together_s == pytest.approx(np.concatenate(parts_s, axis=1), rel=1e-11, abs=0)


@given(seed=st.integers(0, 2**32))
@examples(60)
def test_a_layer_is_a_matrix(seed: int) -> None:
    """The ends of ranks follow from the begins of their devices and of their hosts, which begin together."""
    rng = random.Random(seed)
    cluster = replace(small_cluster(rng, 4), topology="switch", network=None, gpus_per_node=None)

    def work(most_host_s: int = 3) -> Compute:
        seconds = np.array([rng.randint(0, 4), rng.randint(0, 4)], dtype=float)
        return Compute(name="work", device_s=seconds, host_s=float(rng.randint(0, most_host_s)))

    def gather(among: int | None) -> AllGather:
        return AllGather(nbytes=np.array([rng.randint(0, 3), rng.randint(0, 3)]) * 1.0, among=among)

    groups, host_s = rng.choices([None, 2], k=rng.randint(0, 2)), float(rng.randint(0, 9))
    layer = tuple((work(), *(op for among in groups for op in (gather(among), work()))) for _ in range(4))
    begins = tuple((work()._replace(host_s=host_s),) for _ in layer)
    program = Program(strategy="test", prologue=begins, layers=(layer,), layer_kind_index=(0,), epilogue=((),) * 4)
    seconds, floor_s, issued_s = layer_matrix(layer, cluster.path, (2,))
    starts_s = np.stack([np.maximum(op.device_s, host_s) for (op,) in begins])
    finish_s = np.maximum((seconds + starts_s).max(axis=1), host_s + floor_s)
    assert run_batch(program, cluster) == pytest.approx(finish_s, rel=1e-12)
    assert issued_s.tolist() == [sum(map(host_s_of, own)) for own in layer]


def test_a_message_may_be_received_in_a_later_layer() -> None:
    """Such layers are run in one, because their states do not contain messages in flight."""
    one, work = np.ones(1), Compute(name="work", device_s=np.array([3.0]))
    layers = (((Send(dst=1, nbytes=one), work), (work,)), ((work,), (Recv(src=0), work)))
    none: tuple[tuple[Op, ...], ...] = ((), ())
    program = Program(strategy="test", prologue=none, layers=layers, layer_kind_index=(0, 1) * 9, epilogue=none)
    cluster = load_cluster(num_gpus=2).with_link(bandwidth_bytes_per_s=0.1, latency_s=1.0)
    finish_s = EventSimulation(program, cluster, record=False).finish_s
    assert run_batch(program, cluster)[:, 0].tolist() == list(finish_s) == [54.0, 94.0]


EXCHANGES: dict[str, Op] = {
    "all-gather": AllGather(nbytes=np.array([2.0])),
    "ring": RingPass(name="work", device_s=np.ones((3, 1)), nbytes=np.full((2, 1), 2.0), host_s=(0.0,) * 3),
    "all-to-all": AllToAll(nbytes=np.array([[2.0], [1.0]])),
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
@pytest.mark.parametrize("senders", [(0,), (2, 0), (0, 1, 2)])
def test_an_exchange_waits_for_earlier_messages_on_its_links(exchange: Op, senders: tuple[int, ...]) -> None:
    """Each sender has a message of 10 seconds on the link to its next rank when the exchange begins."""
    ops: list[list[Op]] = [[exchange], [exchange], [exchange]]
    for rank in senders:
        ops[rank].insert(0, Send(dst=(rank + 1) % 3, nbytes=np.array([10.0])))
        ops[(rank + 1) % 3].append(Recv(src=rank))
    layer = tuple(map(tuple, ops))
    program = Program(strategy="test", prologue=((),) * 3, layers=(layer,), layer_kind_index=(0, 0), epilogue=((),) * 3)
    cluster = load_cluster(num_gpus=3).with_link(bandwidth_bytes_per_s=1.0, latency_s=0.5)
    finish_s = EventSimulation(program, cluster, record=False).finish_s
    assert max(finish_s) > 20
    assert run_batch(program, cluster)[:, 0].tolist() == pytest.approx(list(finish_s), rel=1e-12)
