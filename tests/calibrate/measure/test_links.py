"""Points of the link campaign, and their timing between real processes over gloo."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.data import Measurement
from calibrate.measure.links import Flow, LinkBench, LinkPoint, find_topology, link_points, measured_link, patterns
from calibrate.measure.ranks import HOLD_S, LinkRank, LinkSetup
from kvrsim.errors import InputError
from kvrsim.runtime.marks import _CYCLES_PER_S, CudaClock

SMALL = 2**16


# Points of the campaign.


@given(num_ranks=st.integers(2, 9), max_bytes=st.integers(1024, 2**30), backend=st.sampled_from(["gloo", "nccl"]))
def test_points_are_informative_first(num_ranks: int, max_bytes: int, backend: str) -> None:
    points = link_points(num_ranks, backend, max_bytes)
    assert len(set(points)) == len({str(point) for point in points}) == len(points)
    first = [point for point in points if point.kind == "send" and set(point.flows[0]) == {0, 1}]
    others = [point for point in points if point.kind in ("send", "pairs") and point not in first]
    assert all(points.index(one) < points.index(other) for one in first for other in others), "a pair at all sizes"
    sends = {point.flows[0] for point in points if point.kind == "send"}
    assert len(sends) == num_ranks * (num_ranks - 1)
    for point in points:
        assert set(point.ranks) <= set(range(num_ranks))
        assert 0 < point.nbytes <= max_bytes
        assert point.kind != "gather" or point.nbytes % point.num_ranks == 0
        assert point.kind != "pairs" or point.nbytes * 16 >= max_bytes


@given(num_ranks=st.integers(2, 32))
def test_no_rank_sends_or_receives_two_messages_at_once(num_ranks: int) -> None:
    for flows in patterns(num_ranks):
        assert len({src for src, _ in flows}) == len({dst for _, dst in flows}) == len(flows) > 1


def test_rows_are_medians_and_interquartile_ranges() -> None:
    bench = LinkBench(LinkSetup(num_ranks=2), "made")
    pair = [{"0>1": second, "1>0": 2 * second} for second in (1.0, 2.0, 3.0, 4.0, 9.0)]
    both = LinkPoint(kind="pairs", flows=((0, 1), (1, 0)), nbytes=2**26)
    gather = LinkPoint(kind="gather", kernel="gloo", num_ranks=2, nbytes=1024)
    rows = bench.rows({both: pair, gather: [{"all_gather": 5.0}]})
    assert [(row.operation, row.src, row.dst, row.messages, row.ranks, row.nodes) for row in rows] == [
        ("all_gather", None, None, 1, 2, 1),
        ("send_recv", 0, 1, 2, 2, 1),
        ("send_recv", 1, 0, 2, 2, 1),
    ]
    assert [(row.median_s, row.spread_s) for row in rows] == [(5.0, None), (3.0, 2.0), (6.0, 4.0)]


def test_messages_too_short_to_be_timed_are_refused() -> None:
    with pytest.raises(InputError, match="max_bytes: got '7', accepted: 1 KiB to 16 GiB"):
        LinkSetup(num_ranks=2, max_bytes=7)


# Timing between real processes.


def gloo(timeout_s: float = 300.0) -> LinkBench:
    pytest.importorskip("torch")
    return LinkBench(LinkSetup(num_ranks=2, max_bytes=SMALL, timeout_s=timeout_s), "CPU")


@pytest.mark.slow
def test_gloo_is_timed() -> None:
    bench = gloo()
    try:
        samples = {point: [bench.sample(point)] for point in bench.points()}
        rows = bench.rows(samples)
    finally:
        bench.close()
    assert len(rows) == len(samples) + sum(point.kind == "pairs" for point in samples)  # one row per message
    assert {(row.operation, row.kernel) for row in rows} == {
        ("send_recv", "gloo"),
        ("all_gather", "gloo"),
        ("all_gather", "gloo_p2p_ring"),
        ("all_reduce", "gloo"),
        ("all_reduce", "gloo_p2p_ring"),
        ("host_message", "gloo"),
    }
    assert all(row.median_s > 0 for row in rows)
    assert {row.nodes for row in rows if row.operation != "host_message"} == {1}
    assert all(bench.expected_s(point) > 0 for point in samples)


# On a GPU the host's calls are not part of a transfer's time.


class SlowHost:
    """Links whose calls take the host longer than the transfers take the device."""

    call_s = 0.01
    transfer_s = 3e-4

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def isend(self, edge: Flow, tensor: Any) -> SlowHost:
        time.sleep(self.call_s)
        return self

    irecv = isend

    def wait(self) -> None:
        self.cuda.compute(self.transfer_s)


def rank_on(cuda: Any, rank: int, monkeypatch: pytest.MonkeyPatch) -> LinkRank:
    """A rank of two on a stand-in of a GPU, whose device also spends the time of a hold."""
    monkeypatch.setattr(cuda, "_sleep", lambda cycles: cuda.compute(cycles / _CYCLES_PER_S))
    result = LinkRank.__new__(LinkRank)
    monkeypatch.setattr(result, "rank", rank, raising=False)
    monkeypatch.setattr(result, "clock", CudaClock(cuda), raising=False)
    monkeypatch.setattr(result, "links", SlowHost(cuda), raising=False)
    monkeypatch.setattr(result, "incoming", [0], raising=False)
    monkeypatch.setattr(result, "outgoing", [0], raising=False)
    monkeypatch.setattr(result, "_meet", lambda ranks: None, raising=False)
    return result


def test_a_message_begins_when_the_senders_device_comes_to_it(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = rank_on(fake_cuda, 0, monkeypatch)
    [(began_s, arrived_s)] = sender.exchange(flows=[(0, 1)], nbytes=1, repeats=1)
    assert began_s == pytest.approx(sender.clock.start_s + HOLD_S, abs=1e-9)
    assert arrived_s is None


def test_a_message_arrives_when_the_receivers_device_has_it(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = rank_on(fake_cuda, 1, monkeypatch)
    [(_, arrived_s)] = receiver.exchange(flows=[(0, 1)], nbytes=1, repeats=1)
    assert arrived_s == pytest.approx(receiver.clock.start_s + SlowHost.transfer_s, abs=1e-9)


def test_a_ring_lasts_as_long_as_on_the_device(fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_on(fake_cuda, 0, monkeypatch)

    def ring() -> None:
        for _ in range(3):
            rank.links.isend((0, 1), None).wait()

    for began_s, ended_s in rank._spans_s(ring, num_ranks=2, repeats=2):
        assert ended_s - began_s == pytest.approx(3 * SlowHost.transfer_s, abs=1e-9)


# -- Links between the ranks are recognised by the times of messages.

MAX_BYTES = 2**24
SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class World:
    """Simulated machines: the times of messages follow a formula."""

    num_ranks: int
    latency_s: float = 1e-5
    rate: float = 1e10  # bytes/s of a link
    bus: bool = False  # all messages share the rate

    def seconds(self, flows: tuple[Flow, ...], nbytes: int) -> float:
        """Seconds of each of several messages that begin together."""
        return self.latency_s + nbytes * (len(flows) if self.bus else 1) / self.rate

    def rows(self, seed: int = 0, noise: float = 0.0) -> list[Measurement]:
        """Rows as the bench makes them; each time has a random error of up to `noise`."""
        dice = random.Random(seed)
        rows = []
        for point in link_points(self.num_ranks, "nccl", MAX_BYTES):
            if point.flows and point.kind != "issue":
                seconds = {
                    f"{src}>{dst}": self.seconds(point.flows, point.nbytes) * (1 + dice.uniform(-noise, noise))
                    for src, dst in point.flows
                }
                rows += point.rows([seconds], backend="nccl", device="made")
        return rows


@given(seed=SEEDS, num_ranks=st.integers(2, 8), rate=st.floats(1e8, 1e11), bus=st.booleans())
def test_a_bus_and_a_switch_are_recognised(seed: int, num_ranks: int, rate: float, bus: bool) -> None:
    world = World(num_ranks=num_ranks, rate=rate, bus=bus)
    topology, why = find_topology(world.rows(seed, noise=0.1))
    assert topology == ("bus" if bus else "switch")
    assert f"a {topology}" in why


@given(seed=SEEDS, rate=st.floats(1e8, 1e11), latency=st.floats(1e-6, 1e-4))
def test_a_link_is_as_fast_as_its_best_message(seed: int, rate: float, latency: float) -> None:
    rows = World(num_ranks=3, rate=rate, latency_s=latency).rows(seed)
    link = measured_link(rows, "mine")
    assert link.bandwidth_bytes_per_s == pytest.approx(MAX_BYTES / (latency + MAX_BYTES / rate), rel=1e-3)
    assert link.latency_s == pytest.approx(latency + 1024 / rate, rel=1e-3)
    assert (link.name, link.source) == ("mine", "kvrsim calibrate links")


def test_nothing_to_go_by_is_refused() -> None:
    rows = World(num_ranks=2).rows()
    together = [row for row in rows if row.messages > 1]
    with pytest.raises(InputError, match="links: got '0 such rows'"):
        find_topology([], argument="--links")
    with pytest.raises(InputError, match="one message at a time"):
        measured_link(together, "mine")
