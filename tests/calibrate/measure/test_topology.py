"""The links that join the ranks are recognised by the times of messages."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.data import Measurement
from calibrate.measure.links import Flow, find_layout, link_points, measured_link
from kvrsim.errors import InputError

MAX_BYTES = 2**24
SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class World:
    """Machines whose messages are timed without a machine."""

    num_ranks: int
    latency_s: float = 1e-5
    rate: float = 1e10  # bytes/s of a link
    bus: bool = False  # one rate for all
    half_duplex: bool = False
    node: int | None = None  # ranks
    network: float = 1e9  # bytes/s between nodes, of one message
    shared_network: bool = True  # whether a node's messages share it

    def seconds(self, flow: Flow, flows: tuple[Flow, ...], nbytes: int) -> float:
        """Of one of several messages that begin together."""
        rate = self.rate
        if self.apart(flow):
            crossing = [other for other in flows if self.apart(other)]
            rate = self.network / (len(crossing) if self.shared_network else 1)
        elif self.bus:
            rate /= len(flows)
        elif self.half_duplex and flow[::-1] in flows:
            rate /= 2
        return self.latency_s + nbytes / rate

    def apart(self, flow: Flow) -> bool:
        return self.node is not None and flow[0] // self.node != flow[1] // self.node

    def rows(self, seed: int = 0, noise: float = 0.0) -> list[Measurement]:
        """As the bench makes them, each up to `noise` off."""
        dice = random.Random(seed)
        rows = []
        for point in link_points(self.num_ranks, "nccl", MAX_BYTES):
            if point.flows and point.kind != "issue":
                seconds = {
                    f"{src}>{dst}": self.seconds((src, dst), point.flows, point.nbytes)
                    * (1 + dice.uniform(-noise, noise))
                    for src, dst in point.flows
                }
                rows += point.rows([seconds], backend="nccl", device="made", hosts=["here"] * self.num_ranks)
        return rows


@given(seed=SEEDS, num_ranks=st.integers(4, 8), rate=st.floats(1e8, 1e12))
def test_a_switch_is_recognised(seed: int, num_ranks: int, rate: float) -> None:
    layout = find_layout(World(num_ranks=num_ranks, rate=rate).rows(seed, noise=0.1))
    assert (layout.topology, layout.gpus_per_node, layout.full_duplex) == ("switch", None, True)


@given(seed=SEEDS, num_ranks=st.integers(2, 8), rate=st.floats(1e8, 1e11))
def test_a_bus_is_recognised(seed: int, num_ranks: int, rate: float) -> None:
    layout = find_layout(World(num_ranks=num_ranks, rate=rate, bus=True).rows(seed, noise=0.1))
    assert (layout.topology, layout.gpus_per_node, layout.full_duplex) == ("bus", None, False)


@given(
    seed=SEEDS,
    shape=st.sampled_from([(2, 4), (2, 6), (2, 8), (3, 6), (4, 8)]),
    slower=st.floats(2.5, 50.0),
    shared=st.booleans(),
)
def test_nodes_are_recognised(seed: int, shape: tuple[int, int], slower: float, shared: bool) -> None:
    node, num_ranks = shape
    world = World(num_ranks=num_ranks, node=node, network=1e10 / slower, shared_network=shared, latency_s=1e-6)
    layout = find_layout(world.rows(seed, noise=0.1))
    assert (layout.topology, layout.gpus_per_node) == ("nodes", node)
    assert layout.link.bandwidth_bytes_per_s == pytest.approx(world.rate, rel=0.15)
    assert layout.network is not None
    share = world.network / (num_ranks // 2 if shared else 1)  # messages between ranks half of all apart
    assert layout.network.bandwidth_bytes_per_s == pytest.approx(share, rel=0.35)


@given(seed=SEEDS)
def test_two_ranks_tell_their_directions(seed: int) -> None:
    apart = find_layout(World(num_ranks=2).rows(seed, noise=0.1))
    assert (apart.topology, apart.full_duplex) == ("switch", True)
    assert "fewer than four ranks" in apart.why


def test_a_switch_of_half_duplex_links() -> None:
    layout = find_layout(World(num_ranks=4, half_duplex=True).rows())
    assert (layout.topology, layout.full_duplex) == ("switch", False)
    assert "which kvrsim does not model" in layout.why


def test_the_ratios_are_said() -> None:
    layout = find_layout(World(num_ranks=4, bus=True, latency_s=1e-9).rows())
    assert "2 messages of separate pairs take 2.00 times as long as alone (on a bus 2, a switch 1)" in layout.why
    assert layout.why.endswith("a bus.")


def renumbered(rows: list[Measurement], order: list[int]) -> list[Measurement]:
    import dataclasses

    return [dataclasses.replace(row, src=order[row.src or 0], dst=order[row.dst or 0]) for row in rows]


def test_nodes_out_of_order_are_said_but_no_layout() -> None:
    rows = [row for row in World(num_ranks=4, node=2).rows() if row.messages == 1]
    layout = find_layout(renumbered(rows, [0, 2, 1, 3]))
    assert layout.topology == "switch"
    assert "ranks 0+2, 1+3; number ranks node by node" in layout.why
    assert "assumed to be a switch" in layout.why


def test_pairs_that_differ_need_not_be_nodes() -> None:
    rows = [row for row in World(num_ranks=4).rows() if row.messages == 1]
    slow = [row if {row.src, row.dst} != {0, 1} else _slower(row) for row in rows]
    assert find_layout(slow).topology == "switch"
    assert "do not join equal nodes" in find_layout(slow).why


def _slower(row: Measurement) -> Measurement:
    import dataclasses

    return dataclasses.replace(row, median_s=3 * row.median_s)


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
        find_layout([], argument="--links")
    with pytest.raises(InputError, match="one message at a time"):
        measured_link(together, "mine")
