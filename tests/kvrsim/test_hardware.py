"""GPUs, links, clusters and their files; paths between GPUs; measured collectives."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrsim.builder import make_scenario
from kvrsim.choices import TOPOLOGIES
from kvrsim.errors import InputError
from kvrsim.executors.batch import run_batch
from kvrsim.executors.event import EventSimulation
from kvrsim.hardware import (
    AllReduceRates,
    Cluster,
    GatherRates,
    MeasuredAllReduce,
    MemoryLimit,
    builtin_clusters,
    builtin_gpus,
    load_cluster,
    load_gpu,
    load_link,
)
from kvrsim.kernels.tensor_parallel import group_of
from kvrsim.model.load import load_model
from kvrsim.program import AllGather, Program
from tests.building import any_cluster, tokens

GPU = {"name": "mine", "memory_bytes": 24e9, "hbm_bytes_per_s": 1e12, "peak_flops": {"fp16": 1e14}, "num_sms": 64}
LINK = {"name": "wire", "bandwidth_bytes_per_s": 1e9, "latency_s": 0}
CLUSTER = {"name": "lab", "gpu": "a100-80gb", "num_gpus": 4, "link": "nvlink3", "topology": "switch"}
NODES = {**CLUSTER, "num_gpus": 8, "topology": "nodes", "gpus_per_node": 4, "network": "ib-hdr200"}


def written(folder: Path, content: object) -> Path:
    path = folder / "mine.json"
    path.write_text(json.dumps(content))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    message = str(caught.value)
    assert message.startswith("cluster ")
    assert "\n" not in message
    return message


# Built-in data


@pytest.mark.parametrize("name", builtin_gpus())
def test_builtin_gpu_is_plausible(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.name == name
    assert "NVIDIA" in gpu.source
    assert 2e10 < gpu.memory_bytes < 3e11
    assert 1e11 < gpu.hbm_bytes_per_s < 1e13
    assert gpu.peak_flops["fp16"] == gpu.peak_flops["bf16"]
    assert 20 <= gpu.num_sms <= 200


@pytest.mark.parametrize("name", builtin_clusters())
def test_builtin_cluster(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.num_gpus % (cluster.gpus_per_node or 2) == 0
    assert (cluster.topology == "nodes") == (cluster.gpus_per_node is not None)
    assert load_cluster(name, 3) == replace(cluster, num_gpus=3)
    assert name in cluster.describe()


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, math.nan, True, None])
def test_a_memory_fraction_that_is_none(fraction: Any) -> None:
    with pytest.raises(InputError, match=r"^memory_fraction: got '.*', accepted: a number above 0 and at most 1"):
        MemoryLimit(gpu_memory_bytes=2**30, memory_fraction=fraction)


EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_cluster_is_named_as_its_file_and_cites_its_figures(path: Path) -> None:
    cluster = load_cluster(path)
    assert cluster.name == path.stem
    assert "datasheet" in cluster.gpu.source or cluster.gpu.name in builtin_gpus()
    assert (cluster.gpu.like is None) == (cluster.gpu.name == "mi355x")


# Power limits


@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_a_power_limit_slows_arithmetic_by_its_root(share: float) -> None:
    gpu = load_gpu("h100")
    assert gpu.power_w == 700
    limited = replace(load_cluster("h100-nvlink"), power_limit_w=share * 700)
    assert limited.arithmetic_share == pytest.approx(share**0.5)
    assert load_cluster("h100-nvlink").arithmetic_share == 1


@pytest.mark.parametrize("limit", [701.0, 419.0, 1.0])
def test_a_power_limit_out_of_range_is_refused(limit: float, tmp_path: Path) -> None:
    message = refusal(written(tmp_path, CLUSTER | {"gpu": "h100", "power_limit_w": limit}))
    assert f"power_limit_w: got '{limit}', accepted: 420 to 700 W" in message


def test_a_power_limit_needs_the_default_power(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, CLUSTER | {"gpu": GPU, "power_limit_w": 100}))
    assert message.endswith("accepted: a limit where power_w of mine is given")


# Paths


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_paths_are_symmetric_and_never_faster_than_the_link(topology: Any, tmp_path: Path) -> None:
    cluster = replace(load_cluster(written(tmp_path, NODES)), topology=topology)
    for src, dst in permutations(range(8), 2):
        path = cluster.path(src, dst)
        assert path == cluster.path(dst, src)
        assert path.bandwidth_bytes_per_s <= cluster.link.bandwidth_bytes_per_s
        assert path.latency_s >= cluster.link.latency_s
        assert path.shared_bus == (topology == "bus")


def test_chain_goes_hop_by_hop() -> None:
    chain = replace(load_cluster(), topology="chain")
    assert chain.path(2, 3) == load_cluster().path(2, 3)
    assert chain.path(6, 1).latency_s == pytest.approx(5 * chain.link.latency_s)
    assert chain.path(6, 1).bandwidth_bytes_per_s == chain.link.bandwidth_bytes_per_s


def test_nodes_are_joined_by_the_network(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, NODES))
    assert cluster.path(0, 3).bandwidth_bytes_per_s == 300e9
    assert cluster.path(3, 4).bandwidth_bytes_per_s == 25e9
    assert cluster.path(0, 7) == cluster.path(4, 3)


# Measured links

GATHER = GatherRates(
    launch_s=3e-6, hop_s=1e-6, small_bytes_per_s=1e9, large_bytes_per_s=4e9, setup_s=0.0, own_share=0.0
)


def measured(cluster: Cluster, latency_s: float = 1e-3) -> Cluster:
    """The cluster with links of 1 GB/s, 4 GB/s for short messages, and rates of all-gathers."""
    link = replace(cluster.link, bandwidth_bytes_per_s=1e9, latency_s=latency_s)
    return replace(cluster, link=replace(link, short_bytes_per_s=4e9, gather=GATHER))


def test_short_messages_hide_in_the_latency() -> None:
    """A message takes max(1 ms + n / 4 GB/s, n / 1 GB/s); up to 4/3 MB, part of its time is hidden by the latency."""
    path = measured(load_cluster()).path(0, 1)
    nbytes = np.array([0, 4e5, 4e6 / 3, 4e6])
    assert path.busy_s(nbytes) == pytest.approx([0, 1e-4, 1e-3 / 3, 3e-3])
    assert path.latency_s == 1e-3
    assert load_cluster().path(0, 1).busy_s(nbytes) == pytest.approx(nbytes / 300e9)


def test_gathers_have_rates_of_their_own() -> None:
    path = measured(load_cluster()).path(0, 1)
    nbytes = np.array([1e3, 4e6])
    assert path.gather_step_s(nbytes, 3) == pytest.approx([1.25e-6, 1e-6 + 1e-3])  # two pieces at 4 GB/s; half a step
    assert (path.gather_launch_s, path.gather_latency_s) == (3e-6, 0)
    plain = load_cluster().path(0, 1)
    assert (plain.gather_step_s(nbytes, 3) == plain.busy_s(nbytes)).all()
    assert (plain.gather_launch_s, plain.gather_latency_s) == (0, plain.latency_s)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_measurements_hold_where_pairs_have_a_link(topology: Any, tmp_path: Path) -> None:
    """Measured rates hold for direct links only, not over several hops or a bus; the network has its own rates."""
    cluster = replace(measured(load_cluster(written(tmp_path, NODES))), topology=topology)
    path = cluster.path(2, 3)
    holds = topology in ("switch", "nodes")
    assert (path.short_bytes_per_s, path.gather) == ((4e9, GATHER) if holds else (None, None))
    between = cluster.path(3, 4)
    assert between.short_bytes_per_s == (4e9 if topology == "switch" else None)


def test_measurements_do_not_hold_for_another_link() -> None:
    cluster = measured(load_cluster())
    for changed in (cluster.with_link(2e9), cluster.with_link(latency_s=0.0)):
        assert (changed.link.short_bytes_per_s, changed.link.gather) == (None, None)
    assert cluster.with_link() is cluster
    assert replace(cluster, num_gpus=2).link == cluster.link


# Changes of clusters


@pytest.mark.parametrize("bandwidth", [0, -1, math.nan, math.inf])
def test_bad_bandwidth(bandwidth: float) -> None:
    with pytest.raises(InputError, match=r"^link_bandwidth: "):
        load_cluster().with_link(bandwidth)


@pytest.mark.parametrize("num_gpus", [0, -1, 1.5, True, "8", 2**16 + 1])
def test_bad_num_gpus(num_gpus: Any) -> None:
    with pytest.raises(InputError, match=r"^gpus: "):
        load_cluster(num_gpus=num_gpus)


def test_bad_topology() -> None:
    bad: Any = "ring"
    with pytest.raises(InputError, match=r"^topology: got 'ring', accepted: switch, bus, chain, nodes$"):
        replace(load_cluster(), topology=bad)
    with pytest.raises(InputError, match=r"^topology: got 'nodes', accepted: switch, bus or chain"):
        replace(load_cluster(), topology="nodes")


# Files of users


def test_user_cluster(tmp_path: Path) -> None:
    content = {**CLUSTER, "gpu": GPU, "link": LINK, "_about": "a comment"}
    cluster = load_cluster(written(tmp_path, content), num_gpus=2)
    assert (cluster.name, cluster.num_gpus, cluster.gpu.memory_bytes) == ("lab", 2, 24_000_000_000)
    assert (cluster.link.latency_s, cluster.gpus_per_node, cluster.network) == (0, None, None)
    assert "mine.json" in cluster.gpu.source


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"topology": "ring"}, "topology: got 'ring'"),
        ({"gpu": "a100"}, "gpu: got 'a100', accepted: an object ({...}), or one of "),
        ({"gpu": {**GPU, "colour": "green"}}, "key in gpu: got 'colour'"),
        ({"gpu": {**GPU, "peak_flops": {}}}, "gpu.peak_flops: got '{}'"),
        ({"gpu": {**GPU, "peak_flops": {"fp64": 1}}}, "key in gpu.peak_flops: got 'fp64'"),
    ],
)
def test_bad_key(tmp_path: Path, changes: dict[str, Any], place: str) -> None:
    assert f"mine.json: {place}" in refusal(written(tmp_path, {**CLUSTER, **changes}))


@pytest.mark.parametrize("load", [load_cluster, load_gpu, load_link])
@pytest.mark.parametrize("name", ["nope", "", "a\0b", "x" * 5000, "no/such.json"])
def test_unknown_name_lists_the_known_ones(load: Any, name: str) -> None:
    with pytest.raises(
        InputError, match=r"accepted: a JSON file, (a size such as 2x8xh100 \(GPUs: .*\), )?or one of "
    ) as caught:
        load(name)
    assert "\n" not in str(caught.value)


# Collectives: all-reduces by their measured rows, all-gathers by their two protocols.


def table(num_gpus: int, factor: float = 1.0) -> MeasuredAllReduce:
    """Rates of all-reduces: 4 us, 1 GB/s up to 1 KiB, 100 GB/s from 1 MiB on; both rates divided by `factor`."""
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


@pytest.mark.parametrize("wrong", [(), (table(8), table(2)), (table(2), table(2))])
def test_numbers_of_gpus_rise(wrong: tuple[MeasuredAllReduce, ...]) -> None:
    with pytest.raises(InputError, match="rising"):
        AllReduceRates(measured=wrong)


def all_reduce_s(cluster: str, profile: str, size: int, nbytes: float) -> float:
    """Seconds of an all-reduce in a tensor-parallel group of all GPUs of a node."""
    scenario, _ = make_scenario(ctx=1024, gpus=size, cluster=cluster, profile=profile, model="llama-2-70b")
    group = group_of(scenario.cluster, size, load_model("llama-2-70b"))
    return float(group.all_reduce_s(np.array(nbytes)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_group_inside_a_node_takes_what_was_measured(size: int) -> None:
    """64 MiB over A100s took 390 to 595 us; two all-gathers would take longer."""
    measured = {2: 390e-6, 4: 542e-6, 8: 595e-6}[size]
    assert all_reduce_s("a100-nvlink", "a100-flash", size, 2.0**26) == pytest.approx(measured, rel=0.01)


def test_links_of_the_same_kind_with_less_bandwidth() -> None:
    """An A800 has 200 GB/s each way instead of 300, an H800 200 instead of 450."""
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


def test_collectives_are_as_measured_where_single_messages_are_not() -> None:
    scenario, notes = make_scenario(ctx=4096, gpus=4, cluster="b200-nvlink5", model="llama-3-8b")
    assert scenario.profile is not None
    assert scenario.profile.name == "b200-flash"
    assert scenario.cluster.link.all_reduce == scenario.profile.links.all_reduce
    assert scenario.cluster.link.bandwidth_bytes_per_s == load_cluster("b200-nvlink5").link.bandwidth_bytes_per_s
    assert any(note.startswith("links: nominal figures of nvlink5 for single messages") for note in notes)
    assert "measured" not in scenario.cluster.describe()  # the figures beside the name are those of messages
    assert "measured" in make_scenario(ctx=4096, gpus=4, cluster="8xh100")[0].cluster.describe()


TWO_PROTOCOLS = GatherRates(
    launch_s=100.0, hop_s=10.0, small_bytes_per_s=1.0, large_bytes_per_s=4.0, setup_s=4.0, own_share=0.5
)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_both_executors_gather_in_that_time(ranks: int) -> None:
    cluster = any_cluster(random.Random(0), ranks, topologies=("switch",))
    cluster = replace(cluster, link=replace(cluster.link, latency_s=1000.0, gather=TWO_PROTOCOLS))
    gather = (AllGather(nbytes=tokens(40)),)
    none = ((),) * ranks
    twice = Program(strategy="test", prologue=none, layers=((gather,) * ranks,), layer_kind_index=(0, 0), epilogue=none)
    want = [2 * TWO_PROTOCOLS.seconds(tokens(40 * ranks), ranks).item()] * ranks
    assert run_batch(twice, cluster)[:, 0] == pytest.approx(want)
    assert EventSimulation(twice, cluster).finish_s == pytest.approx(want)
