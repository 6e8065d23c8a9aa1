"""Collectives: all-reduces through their measured rows, all-gathers by their two protocols."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.errors import InputError
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.hardware import AllReduceRates, GatherRates, MeasuredAllReduce, load_cluster
from kvrsim.kernels.tensor_parallel import group_of
from kvrsim.model.load import load_model
from kvrsim.program import AllGather, Array, Program
from kvrsim.units import scale
from tests.building import any_cluster


def table(num_gpus: int, factor: float = 1.0) -> MeasuredAllReduce:
    """4 us and 1 GB/s up to 1 KiB, 100 GB/s from 1 MiB on, for one GPU; `factor` times slower."""
    rates = (1e9 / factor, 1e11 / factor)
    return MeasuredAllReduce(num_gpus=num_gpus, latency_s=4e-6, nbytes=(2**10, 2**20), bytes_per_s=rates)


RATES = AllReduceRates(measured=(table(2), table(8, factor=4.0)))


def test_measured_sizes_come_back() -> None:
    sizes = np.array([2.0**10, 2.0**20, 2.0**30])
    assert RATES.seconds(sizes, 2) == pytest.approx(4e-6 + sizes / [1e9, 1e11, 1e11])
    assert RATES.seconds(np.array(1.0), 2) == pytest.approx(4e-6 + 1e-9)
    assert RATES.seconds(np.zeros((2, 2)), 2) == pytest.approx(np.full((2, 2), 4e-6))
    assert RATES.seconds(np.array(2.0**15), 2) == pytest.approx(4e-6 + 2**15 / 1e10)


def test_between_numbers_of_gpus_lies_the_time_between() -> None:
    size = np.array(2.0**30)
    assert RATES.seconds(size, 4) == pytest.approx((2 * RATES.seconds(size, 2) + RATES.seconds(size, 8)) / 3)
    assert [RATES.covers(count) for count in (1, 2, 5, 8, 9)] == [False, True, True, True, False]


def test_narrower_links_slow_the_bytes_and_not_the_latency() -> None:
    narrower = scale(RATES, 1.5, only_rates=True)
    for nbytes in (512.0, 2.0**20, 2.0**28):
        whole = RATES.seconds(np.array(nbytes), 2)
        assert narrower.seconds(np.array(nbytes), 2) == pytest.approx(4e-6 + 1.5 * (whole - 4e-6))
    assert scale(RATES, 2.0).seconds(np.array(2.0**20), 8) == pytest.approx(2 * RATES.seconds(np.array(2.0**20), 8))


@pytest.mark.parametrize("wrong", [(), (table(8), table(2)), (table(2), table(2))])
def test_numbers_of_gpus_rise(wrong: tuple[MeasuredAllReduce, ...]) -> None:
    with pytest.raises(InputError, match="rising"):
        AllReduceRates(measured=wrong)


def all_reduce_s(cluster: str, profile: str, size: int, nbytes: float) -> float:
    """Of a tensor-parallel group that is all of a node."""
    scenario, _ = make_scenario(ctx=1024, gpus=size, cluster=cluster, profile=profile, model="llama-2-70b")
    group = group_of(scenario.cluster, size, load_model("llama-2-70b"))
    return float(group.all_reduce_s(np.array(nbytes)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_group_inside_a_node_takes_what_was_measured(size: int) -> None:
    """32 MiB over A100s took 388 to 595 us, of which two all-gathers would be more."""
    measured = {2: 390e-6, 4: 542e-6, 8: 595e-6}[size]
    assert all_reduce_s("a100-nvlink", "a100-flash", size, 2.0**26) == pytest.approx(measured, rel=0.01)


def test_links_of_the_same_kind_with_less_bandwidth() -> None:
    """A800: 200 instead of 300 GB/s each way."""
    for name, like, profile, factor in (
        ("a800-nvlink", "a100-nvlink", "a100-flash", 300 / 200),
        ("h800-nvlink", "h100-nvlink", "h100-flash", 450 / 200),
    ):
        large = all_reduce_s(name, profile, 8, 2.0**29) / all_reduce_s(like, profile, 8, 2.0**29)
        assert large == pytest.approx(factor, rel=1e-3)
        assert all_reduce_s(name, profile, 8, 256.0) < 1.2 * all_reduce_s(like, profile, 8, 256.0)
        narrow, wide = (make_scenario(ctx=1024, cluster=one, profile=profile)[0].cluster for one in (name, like))
        assert narrow.link.bandwidth_bytes_per_s == pytest.approx(wide.link.bandwidth_bytes_per_s / factor)
        assert narrow.link.latency_s == wide.link.latency_s
        assert narrow.link.name.endswith("measured")


def test_without_measurements_it_is_two_all_gathers() -> None:
    cluster = load_cluster("a100-nvlink", 4)
    group = group_of(cluster, 4, load_model("llama-2-70b"))
    nbytes = np.array(2.0**26)
    assert group.measured is None
    assert float(group.all_reduce_s(nbytes)) == pytest.approx(2 * float(group.all_gather_s(nbytes)))


def test_collectives_are_as_measured_where_single_messages_are_not() -> None:
    scenario, notes = make_scenario(ctx=4096, gpus=4, cluster="b200-nvlink5", model="llama-3-8b")
    assert scenario.profile is not None
    assert scenario.profile.name == "b200-flash"
    assert scenario.cluster.link.all_reduce == scenario.profile.links.all_reduce
    assert scenario.cluster.link.bandwidth_bytes_per_s == load_cluster("b200-nvlink5").link.bandwidth_bytes_per_s
    assert any(note.startswith("links: nominal figures of nvlink5 for single messages") for note in notes)


def tokens(*values: float) -> Array:
    return np.array(values, dtype=float)


GATHER = GatherRates(
    launch_s=100.0, hop_s=10.0, small_bytes_per_s=1.0, large_bytes_per_s=4.0, setup_s=4.0, own_share=0.5
)


def test_short_gathers_take_one_protocol_and_long_ones_another() -> None:
    """Three pieces of 2 bytes: 2.5 of them cross a link, 5 s; of 40 bytes 100 x 1 s, or (5 + 2)^2 s."""
    assert GATHER.seconds(tokens(6, 120), 3) == pytest.approx([100 + 20 + 5, 100 + 20 + 49])
    assert GATHER.step_s(tokens(2, 40), 3) == pytest.approx([10 + 2.5, 10 + 24.5])


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_both_executors_gather_in_that_time(ranks: int) -> None:
    cluster = any_cluster(random.Random(0), ranks, topologies=("switch",))
    cluster = cluster.with_measured(replace(cluster.link, latency_s=1000.0, gather=GATHER))
    gather = (AllGather(nbytes=tokens(40)),)
    none = ((),) * ranks
    twice = Program(strategy="test", prologue=none, layers=((gather,) * ranks,), layer_kind_index=(0, 0), epilogue=none)
    want = [2 * GATHER.seconds(tokens(40 * ranks), ranks).item()] * ranks
    assert run_batch(twice, cluster)[:, 0] == pytest.approx(want)
    assert EventSimulation(twice, cluster).finish_s == pytest.approx(want)
