"""Transports: values are data and nothing else; emulated links take their time; the backend suits the devices."""

from __future__ import annotations

import io
import itertools
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.errors import InputError
from kvrsim.runtime.faults import Fault, RankError
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.ranks import Launch, launch
from kvrsim.runtime.transport import Egress, EmulatedLink, MessageTraffic, _DataUnpickler, choose_backend
from kvrsim.scenario import Partition

PLAN = workers.kvr(3, 4)


@pytest.mark.parametrize(
    "value", [None, 1.5, "x", [1, (2, "y")], {(None, "a"): PLAN}, (PLAN, Fault(rank=0, kind="died", message="m"))]
)
def test_data_classes_and_plain_values_travel(value: Any) -> None:
    assert _DataUnpickler(io.BytesIO(pickle.dumps(value))).load() == value


@pytest.mark.parametrize("value", [Path("x"), InputError("a", 1, "b"), launch, workers.Evil("x"), Any])
def test_other_classes_and_functions_do_not(value: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no data class"):
        _DataUnpickler(io.BytesIO(pickle.dumps(value))).load()


def test_what_another_rank_pickles_is_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "run"
    with pytest.raises(RankError, match="rank 1 has sent something unexpected"):
        launch(workers.sends_a_pickle, str(trap), how=Launch(num_ranks=2))
    assert not trap.exists()
    with pytest.raises(FileNotFoundError):  # and it would have been
        pickle.loads(pickle.dumps(workers.Evil(str(trap / "deeper"))))


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        ([f"GPU-{number}" for number in range(16)], "nccl"),  # two nodes of 8, of which each rank sees 8 or 1
        (["GPU-a", "GPU-b"], "nccl"),
        (["GPU-a", "GPU-a"], "gloo"),
        (["GPU-a", None], "gloo"),
        ([None, None], "gloo"),
        (["GPU-a"], "nccl"),
    ],
)
def test_nccl_where_each_rank_has_a_gpu_of_its_own(devices: list[str | None], backend: str) -> None:
    assert choose_backend(devices, None) == backend
    assert choose_backend(devices, "gloo") == "gloo"
    if backend == "nccl":
        assert choose_backend(devices, "nccl") == "nccl"
    else:
        with pytest.raises(InputError, match="accepted: gloo"):
            choose_backend(devices, "nccl")


LATENCY_S, BYTES_PER_S = 0.002, 100e6
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
    alone = arrivals(Egress(link, (0, 1), 0.0), messages)
    traffic = MessageTraffic(pairs=((0, 1),), share=share, message_bytes=1e5, seed=seed)
    shared = replace(link, traffic=traffic)
    beside = arrivals(Egress(shared, (0, 1), 0.0), messages)
    assert beside == arrivals(Egress(shared, (0, 1), 0.0), messages)
    assert arrivals(Egress(shared, (1, 2), 0.0), messages) == alone
    now_s = 0.0
    for (gap_s, nbytes), soonest_s, later_s in zip(messages, alone, beside, strict=True):
        now_s += gap_s
        assert soonest_s >= now_s + nbytes / 1e6 + 0.01 - 1e-9
        assert later_s >= soonest_s - 1e-9
    assert all(second >= first for first, second in itertools.pairwise(beside))


def test_others_take_their_share_of_a_link() -> None:
    link = EmulatedLink(bandwidth_bytes_per_s=1e6)
    traffic = MessageTraffic(pairs=((0, 1),), share=0.5, message_bytes=1e3)
    shared = replace(link, traffic=traffic)
    egress = Egress(shared, (0, 1), 0.0)
    num_busy = sum(egress.arrival_s(0.0, now_s) > now_s for now_s in range(1, 4000))
    assert 0.45 < num_busy / 4000 < 0.55


@pytest.mark.parametrize(
    ("settings", "option"),
    [({"bandwidth_bytes_per_s": 0}, "link_bandwidth"), ({"bandwidth_bytes_per_s": 1, "latency_s": -1}, "link_latency")],
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
            free_s[rank] = max(free_s[rank], ready_s) + nbytes / BYTES_PER_S
            arrived_s = free_s[rank] + LATENCY_S
            clocks[rank] = ready_s + after_s
    return clocks[-1]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_sleeping_ranks_are_never_faster_than_the_recurrence(num_ranks: int) -> None:
    even = Partition.even(CONTEXT_LEN, num_ranks)
    uneven = Partition(chunk_lens=(even.chunk_lens[0] * 2 - 8, *even.chunk_lens[1:-1], 8))
    plans = [RunPlan(strategy="kvr", partition=one) for one in (even, uneven)]
    plans.append(RunPlan(strategy="tsp", partition=even))
    link = EmulatedLink(bandwidth_bytes_per_s=BYTES_PER_S, latency_s=LATENCY_S)
    report = launch(workers.sleeping, plans, link, how=Launch(num_ranks=num_ranks))[-1]
    layers = workers.GEOMETRY.num_hidden_layers
    piece_s = even.chunk_lens[0] * workers.TOKEN_BYTES / BYTES_PER_S
    step_s = sum(workers.layer_s(even.chunk_lens[0], CONTEXT_LEN - even.chunk_lens[0]))
    tsp_s = layers * (step_s + (num_ranks - 1) * (piece_s + LATENCY_S))
    for timing, least_s in zip(report.timings, (kvr_s(even), kvr_s(uneven), tsp_s), strict=True):
        assert min(timing.ttft_s) > least_s - 1e-3, timing.plan.label  # other work only slows
    assert min(report.drift_s) >= layers * sum(workers.layer_s(400, 0))  # every rank by itself, all at once
    assert report.conditions["transport"] == "emulated 0.8 Gbit/s, 2000 us"


@pytest.mark.slow
def test_side_traffic_slows_real_ranks_down() -> None:
    plan = workers.kvr(256, 256)
    link = EmulatedLink(bandwidth_bytes_per_s=BYTES_PER_S)
    traffic = MessageTraffic(pairs=((0, 1),), share=0.8, message_bytes=2e6)
    alone, shared = (
        launch(workers.sleeping, [plan], one, how=Launch(num_ranks=2))[-1].timings[0]
        for one in (link, replace(link, traffic=traffic))
    )
    assert shared.median_s > alone.median_s
