"""A shared bus: all flows get equal shares, no bytes are lost, and a single flow gets the whole bandwidth."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import simpy
from hypothesis import example, given
from hypothesis import strategies as st

from kvrsim.executors.batch import compile_blocks
from kvrsim.executors.bus import _Graph, _Run, _steady_finish_s, run_shared
from kvrsim.executors.event import EventSimulation, FairBus
from kvrsim.hardware import Cluster
from kvrsim.program import AllGather, Compute, Op, Program, Recv, Send
from tests.building import any_cluster, examples

Flows = list[tuple[float, float]]  # start (s) and bytes of each flow

flows = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 10)),
        st.one_of(st.sampled_from([1.0, 2.0, 6.0]), st.floats(1e-3, 1e3)),
    ),
    min_size=1,
    max_size=12,
)


def through_the_bus(arriving: Flows, bandwidth: float) -> list[float]:
    """Time at which each flow ends."""
    env = simpy.Environment()
    bus = FairBus(env)
    bus.bandwidth_bytes_per_s = bandwidth
    left = [0.0] * len(arriving)

    def flow(index: int, arrives_s: float, nbytes: float) -> Iterator[simpy.Event]:
        if arrives_s:  # flows at 0 start before the first step of the simulation
            yield env.timeout(arrives_s)
        began_s = yield from bus.transmit(nbytes)
        assert began_s == pytest.approx(arrives_s)
        left[index] = env.now

    for index, (arrives_s, nbytes) in enumerate(arriving):
        env.process(flow(index, arrives_s, nbytes))  # type: ignore[arg-type]
    env.run()
    return left


def fluid(arriving: Flows, bandwidth: float) -> list[float]:
    """The same times by a simple reference: between two events, all active flows lose the same number of bytes."""
    missing = {index: nbytes for index, (_, nbytes) in enumerate(arriving)}
    left = [0.0] * len(arriving)
    now = 0.0
    while missing:
        present = [index for index in missing if arriving[index][0] <= now]
        coming = min((arriving[index][0] for index in missing if arriving[index][0] > now), default=float("inf"))
        if not present:
            now = coming
            continue
        rate = bandwidth / len(present)
        first = min(present, key=missing.__getitem__)
        if now + missing[first] / rate <= coming:
            spent = missing[first]
            now += spent / rate
        else:
            spent = (coming - now) * rate
            now = coming
        for index in present:
            missing[index] -= spent
            if (index == first and now < coming) or missing[index] <= 1e-12 * arriving[index][1]:
                left[index] = now
                del missing[index]
    return left


@given(arriving=flows, bandwidth=st.floats(0.1, 1e3))
@example(arriving=[(0.0, 1.0), (0.0, 1.0)], bandwidth=1.0)
@example(arriving=[(0.0, 1.0)] * 5, bandwidth=1.0)
@example(arriving=[(0.0, 2.0), (1.0, 1.0), (2.0, 2.0)], bandwidth=1.0)
@examples(300)
def test_as_a_fluid(arriving: Flows, bandwidth: float) -> None:
    assert through_the_bus(arriving, bandwidth) == pytest.approx(fluid(arriving, bandwidth), rel=1e-9)


# -- programs on a bus


def bus_cluster(num_gpus: int, latency_s: float = 0.0) -> Cluster:
    cluster: Cluster = any_cluster(random.Random(0), num_gpus, topologies=("bus",))
    return cluster.with_link(bandwidth_bytes_per_s=10.0, latency_s=latency_s)


def one_layer(*ranks: tuple[Op, ...]) -> Program:
    none: tuple[tuple[Op, ...], ...] = tuple(() for _ in ranks)
    return Program(strategy="test", prologue=none, layers=(ranks,), layer_kind_index=(0,), epilogue=none)


def send(dst: int, nbytes: float, *, rendezvous: bool = False) -> Send:
    return Send(dst=dst, nbytes=np.array([nbytes]), rendezvous=rendezvous)


def compute(device_s: float) -> Compute:
    return Compute(name="work", device_s=np.array([device_s]))


def test_messages_share_the_bus() -> None:
    cluster = bus_cluster(4)
    both = one_layer((send(1, 100.0),), (Recv(src=0),), (send(3, 100.0),), (Recv(src=2),))
    assert EventSimulation(both, cluster).finish_s == pytest.approx((0, 20, 0, 20))
    one = one_layer((send(1, 100.0),), (Recv(src=0),), (), ())
    assert EventSimulation(one, cluster).finish_s == pytest.approx((0, 10, 0, 0))
    late = one_layer((send(1, 100.0),), (Recv(src=0),), (compute(5.0), send(3, 100.0)), (Recv(src=2),))
    assert EventSimulation(late, cluster).finish_s == pytest.approx((0, 15, 5, 20))


def test_messages_of_a_pair_keep_their_order() -> None:
    """Messages between two ranks are one flow: the second message waits for the first, even if it is shorter."""
    short_after_long = one_layer((send(1, 100.0), send(1, 10.0)), (Recv(src=0), compute(5.0), Recv(src=0)))
    for topology in ("switch", "bus"):
        replay = EventSimulation(short_after_long, replace(bus_cluster(2), topology=topology))
        assert [span.end_s for span in replay.timeline.of(0, "transfer")] == pytest.approx([10, 11])
        assert replay.finish_s == pytest.approx((0, 15))


def test_latency_does_not_hold_the_bus() -> None:
    both = one_layer((send(1, 100.0),), (Recv(src=0),), (send(3, 100.0),), (Recv(src=2),))
    assert EventSimulation(both, bus_cluster(4, 3.0)).finish_s == pytest.approx((0, 23, 0, 23))


def test_a_ring_on_a_bus() -> None:
    """Three ranks send 100 bytes each in both steps of the ring, so the bus carries 2 x 300 bytes."""
    gather = (AllGather(nbytes=np.array([100.0])),)
    assert EventSimulation(one_layer(gather, gather, gather), bus_cluster(3)).finish_s == pytest.approx((60, 60, 60))


@pytest.mark.parametrize("nbytes", [[1.0, 2.0, 7.0], [3.0, 3.0, 3.0]])
def test_last_departure_of_each_layer(nbytes: list[float]) -> None:
    """The steady state of a bus rests on it: no message of a layer may leave after a rank begins the next layer."""
    layer = tuple((AllGather(nbytes=np.array([size])), compute(size)) for size in nbytes)
    program, cluster = replace(one_layer(*layer), layer_kind_index=(0,) * 4), bus_cluster(3)
    graph = _Graph(cluster, 3, 1)
    graph.take(compile_blocks(program, cluster)[1:2] * 4)
    run = _Run(graph, keeps_left=True)
    run.finish_s()
    spans = EventSimulation(program, cluster).timeline.spans
    last_s = [max(span.end_s for span in spans if span.kind == "transfer" and span.layer == one) for one in range(4)]
    assert run.all_left_s(4)[:, 0] == pytest.approx(last_s, rel=1e-12)


@pytest.mark.parametrize(("nbytes", "is_steady"), [((3.0, 1.0), False), ((2.0, 2.0), True)])
def test_layers_are_skipped_if_no_message_leaves_after_a_rank_begins_the_next(
    nbytes: tuple[float, float], is_steady: bool
) -> None:
    """With 3 and 1 bytes, rank 0 begins the next layer while its own piece is on the bus."""
    layer = tuple((AllGather(nbytes=np.array([size])),) for size in nbytes)
    program, cluster = replace(one_layer(*layer), layer_kind_index=(0,) * 12), bus_cluster(2)
    finish_s = _steady_finish_s(program, cluster, compile_blocks(program, cluster))
    assert (finish_s is not None) == is_steady


@given(seed=st.integers(0, 2**32))
@examples(60)
def test_layers_are_skipped_only_if_all_partitions_advance_alike(seed: int) -> None:
    """In some partitions, a host that is ahead at first delays its device in later layers."""
    rng, cluster = random.Random(seed), bus_cluster(2).with_link(bandwidth_bytes_per_s=1.0, latency_s=1.0)

    def work(most_s: int, host_s: float) -> Compute:
        return Compute(name="work", device_s=np.array(rng.choices(range(most_s), k=4), dtype=float), host_s=host_s)

    hosts_s = [float(rng.randint(0, 6)) for _ in range(2)]
    layer = [(AllGather(nbytes=np.array(rng.choices([0.0, 1.0, 2.0], k=4))), work(5, host_s)) for host_s in hosts_s]
    program = replace(one_layer(*layer), prologue=((work(20, 0.0),), (work(20, 0.0),)), layer_kind_index=(0,) * 20)
    finish_s = run_shared(program, cluster)
    for row in range(4):
        assert finish_s[:, row] == pytest.approx(EventSimulation(program.row(row), cluster).finish_s, rel=1e-11)
