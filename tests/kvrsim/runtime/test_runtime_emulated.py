"""Emulated links take their time; sleeping ranks over them take as long as the recurrence says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.errors import InputError
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.ranks import Launch, launch
from kvrsim.runtime.transport import Egress, EmulatedLink, MessageTraffic
from kvrsim.scenario import Partition

pytestmark = pytest.mark.slow

LATENCY_S = 0.002
CONTEXT_LEN = 512
MESSAGES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e6)), max_size=30)  # seconds since the last, bytes


def arrivals(egress: Egress, messages: list[tuple[float, float]]) -> list[float]:
    now_s, found = 0.0, []
    for gap_s, nbytes in messages:
        now_s += gap_s
        found.append(egress.arrival_s(nbytes, now_s))
    return found


@given(messages=MESSAGES, share=st.floats(0, 0.9), seed=st.integers(0, 100))
def test_messages_keep_their_order_their_time_and_others_only_delay_them(
    messages: list[tuple[float, float]], share: float, seed: int
) -> None:
    link = EmulatedLink(bandwidth_bytes_per_s=1e6, latency_s=0.01)
    alone = arrivals(Egress(link, None, (0, 1), 0.0), messages)
    traffic = MessageTraffic(pairs=((0, 1),), share=share, message_bytes=1e5, seed=seed)
    beside = arrivals(Egress(link, traffic, (0, 1), 0.0), messages)
    assert beside == arrivals(Egress(link, traffic, (0, 1), 0.0), messages)
    assert arrivals(Egress(link, traffic, (1, 2), 0.0), messages) == alone
    now_s = 0.0
    for (gap_s, nbytes), soonest_s, later_s in zip(messages, alone, beside, strict=True):
        now_s += gap_s
        assert soonest_s >= now_s + nbytes / 1e6 + 0.01 - 1e-9
        assert later_s >= soonest_s - 1e-9
    assert all(second >= first for first, second in itertools.pairwise(beside))


def test_others_take_their_share_of_a_link() -> None:
    link = EmulatedLink(bandwidth_bytes_per_s=1e6)
    traffic = MessageTraffic(pairs=((0, 1),), share=0.5, message_bytes=1e3)
    egress = Egress(link, traffic, (0, 1), 0.0)
    num_busy = sum(egress.arrival_s(0.0, now_s) > now_s for now_s in range(1, 4000))
    assert 0.45 < num_busy / 4000 < 0.55


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"bandwidth_bytes_per_s": 0}, "link_bandwidth"),
        ({"bandwidth_bytes_per_s": 1, "latency_s": -1}, "link_latency"),
    ],
)
def test_a_link_that_cannot_be_is_refused(settings: dict[str, float], option: str) -> None:
    with pytest.raises(InputError) as error:
        EmulatedLink(**settings)
    assert error.value.parameter == option


@pytest.mark.parametrize("settings", [{"share": 1.0, "message_bytes": 1}, {"share": 0.1, "message_bytes": 0}])
def test_traffic_that_cannot_be_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match="side traffic"):
        MessageTraffic(pairs=((0, 1),), **settings)


def kvr_s(partition: Partition) -> float:
    """TTFT by the recurrence: a rank goes on when its own K and V and its prefix's are there."""
    clocks, layers = [0.0] * len(partition.chunk_lens), workers.GEOMETRY.num_hidden_layers
    free_s = [0.0] * len(clocks)
    for _ in range(layers):
        arrived_s = 0.0
        for rank, (chunk, prefix) in enumerate(zip(partition.chunk_lens, partition.boundaries, strict=False)):
            before_s, after_s = workers.layer_s(chunk, prefix)
            ready_s = max(clocks[rank] + before_s, arrived_s)
            nbytes = (prefix + chunk) * workers.TOKEN_BYTES
            free_s[rank] = max(free_s[rank], ready_s) + nbytes / workers.BYTES_PER_S
            arrived_s = free_s[rank] + LATENCY_S
            clocks[rank] = ready_s + after_s
    return clocks[-1]


def test_four_and_eight_sleeping_ranks_take_as_long_as_the_recurrence_says() -> None:
    for num_ranks in (4, 8):
        even = Partition.even(CONTEXT_LEN, num_ranks)
        uneven = Partition(chunk_lens=(even.chunk_lens[0] * 2 - 8, *even.chunk_lens[1:-1], 8))
        plans = [RunPlan(strategy="kvr", partition=one, receives_ahead=None) for one in (even, uneven)]
        plans.append(RunPlan(strategy="tsp", partition=even))
        how = Launch(num_ranks=num_ranks, timeout_s=20, deadline_s=50)
        report = launch(workers.sleeping, plans, LATENCY_S, None, how=how)[-1]
        alone_s = workers.GEOMETRY.num_hidden_layers * sum(workers.layer_s(400, 0))
        assert alone_s <= min(report.drift_s) < 3 * alone_s  # every rank by itself, all at once
        for timing, partition in zip(report.timings, (even, uneven), strict=False):
            expected_s = kvr_s(partition)
            assert expected_s - 1e-3 < min(timing.ttft_s)
            assert min(timing.ttft_s) < 1.3 * expected_s + 0.02, timing.plan.label  # other work only slows
        tsp = report.timings[2]
        piece_s = even.chunk_lens[0] * workers.TOKEN_BYTES / workers.BYTES_PER_S
        step_s = sum(workers.layer_s(even.chunk_lens[0], CONTEXT_LEN - even.chunk_lens[0]))
        bound_s = workers.GEOMETRY.num_hidden_layers * (step_s + (num_ranks - 1) * (piece_s + LATENCY_S))
        assert bound_s - 1e-3 < min(tsp.ttft_s) < 1.3 * bound_s + 0.05
        assert report.conditions["transport"] == "emulated 0.8 Gbit/s, 2000 us"


def test_side_traffic_slows_real_ranks_down() -> None:
    plan = RunPlan(strategy="kvr", partition=Partition.even(512, 2), receives_ahead=None)
    traffic = MessageTraffic(pairs=((0, 1),), share=0.8, message_bytes=2e6)
    how = Launch(num_ranks=2, timeout_s=20, deadline_s=50)
    alone = launch(workers.sleeping, [plan], 0.0, None, how=how)[-1].timings[0]
    beside = launch(workers.sleeping, [plan], 0.0, traffic, how=how)[-1].timings[0]
    assert beside.median_s > alone.median_s
