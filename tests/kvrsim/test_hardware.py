from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim import hardware
from kvrsim.choices import TOPOLOGIES
from kvrsim.errors import InputError
from kvrsim.hardware import (
    Cluster,
    GatherRates,
    MemoryLimit,
    builtin_clusters,
    builtin_gpus,
    load_cluster,
    load_gpu,
    load_link,
)

DATA = Path(hardware.__file__).parent / "data"
NEW = {"gb200", "b300", "gb300", "rtx-pro-6000"}
LINKS = sorted(name for name in json.loads((DATA / "links.json").read_text()) if not name.startswith("_"))

GPU = {
    "name": "mine",
    "memory_bytes": 24e9,
    "hbm_bytes_per_s": 1e12,
    "peak_flops": {"fp16": 1e14},
    "num_sms": 64,
}
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


# What ships


def test_builtin_names() -> None:
    assert set(builtin_gpus()) == {"a100-40gb", "a100-80gb", "h100", "h200", "l40s", "b200", *NEW}
    assert {"nvlink3", "nvlink4", "nvlink5", "pcie4-x16", "pcie5-x16"} <= set(LINKS)
    assert {"a100-nvlink", "h100-nvlink", "l40s-pcie", "a100-10gbs-bus"} <= set(builtin_clusters())


@pytest.mark.parametrize("name", builtin_gpus())
def test_builtin_gpu_is_plausible(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.name == name
    assert "NVIDIA" in gpu.source
    assert 2e10 < gpu.memory_bytes < 3e11
    assert 5e11 < gpu.hbm_bytes_per_s < 1e13
    assert dict(gpu.peak_flops)["fp16"] == dict(gpu.peak_flops)["bf16"]
    assert 100 <= gpu.num_sms <= 200


@pytest.mark.parametrize("name", LINKS)
def test_builtin_link_is_plausible(name: str) -> None:
    link = load_link(name)
    assert link.name == name
    assert 1e10 < link.bandwidth_bytes_per_s < 1e12
    assert 0 < link.latency_s < 1e-4


@pytest.mark.parametrize("name", builtin_clusters())
def test_builtin_cluster(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.num_gpus == (16 if cluster.topology == "nodes" else 8)
    assert load_cluster(name, 3) == cluster.with_num_gpus(3)
    assert name in cluster.describe()


def test_datasheet_figures() -> None:
    cluster = load_cluster()
    assert (cluster.gpu.name, cluster.topology) == ("a100-80gb", "switch")
    assert cluster.link.bandwidth_bytes_per_s == 300e9
    assert dict(cluster.gpu.peak_flops)["fp16"] == 312e12
    assert dict(load_gpu("h100").peak_flops)["fp8"] == 1979e12
    slow = load_cluster("a100-10gbs-bus")
    assert (slow.topology, slow.link.bandwidth_bytes_per_s) == ("bus", 10e9)
    assert load_link("ib-ndr400").bandwidth_bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("a100-40gb", 40960),
        ("a100-80gb", 81920),
        ("h100", 81559),
        ("h200", 143771),
        ("l40s", 46068),
        ("b200", 183359),
        ("gb200", 189471),
        ("b300", 275040),
        ("gb300", 284208),
        ("rtx-pro-6000", 97887),
    ],
)
def test_memory_is_what_the_driver_reports(name: str, mib: int) -> None:
    """Not the decimal gigabytes of the product's name, which are 0.6 to 7 % less."""
    gpu = load_gpu(name)
    assert gpu.memory_bytes == mib * 2**20
    assert gpu.memory_source is not None
    assert gpu.memory_source.startswith(f"{mib} MiB: ")


def test_cluster_files_of_the_first_version_are_read(tmp_path: Path) -> None:
    """They hold the size of the L2 cache, which nothing uses."""
    old = {**CLUSTER, "gpu": {**GPU, "l2_bytes": 6_000_000}}
    new = {**CLUSTER, "gpu": GPU}
    assert load_cluster(written(tmp_path, old)) == load_cluster(written(tmp_path, new))


@given(total=st.integers(1, 2**50), fraction=st.floats(0, 1, exclude_min=True))
def test_a_memory_limit_is_a_share_of_the_memory(total: int, fraction: float) -> None:
    limit = MemoryLimit(gpu_memory_bytes=total, memory_fraction=fraction)
    assert limit.nbytes <= total
    assert limit.nbytes == int(total * fraction)
    assert limit.to_dict()["memory_limit_bytes"] == limit.nbytes
    assert f"{fraction:g} of its" in limit.describe()


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, math.nan, True, None])
def test_a_memory_fraction_that_is_none(fraction: Any) -> None:
    with pytest.raises(InputError, match=r"^memory_fraction: got '.*', accepted: a number above 0 and at most 1"):
        MemoryLimit(gpu_memory_bytes=2**30, memory_fraction=fraction)


# Paths


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_paths_are_symmetric_and_never_faster_than_the_link(topology: Any, tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, NODES)).with_topology(topology)
    for src, dst in permutations(range(8), 2):
        path = cluster.path(src, dst)
        assert path == cluster.path(dst, src)
        assert path.bandwidth_bytes_per_s <= cluster.link.bandwidth_bytes_per_s
        assert path.latency_s >= cluster.link.latency_s
        assert path.shared_bus == (topology == "bus")


def test_chain_goes_hop_by_hop() -> None:
    chain = load_cluster().with_topology("chain")
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
    """1 GB/s, short messages at 4 GB/s, and rates of all-gathers."""
    link = replace(cluster.link, bandwidth_bytes_per_s=1e9, latency_s=latency_s)
    return cluster.with_measured(replace(link, short_bytes_per_s=4e9, gather=GATHER))


def test_short_messages_hide_in_the_latency() -> None:
    """From end to end max(1 ms + n / 4 GB/s, n / 1 GB/s): the latency has hidden all it can at 4/3 MB."""
    path = measured(load_cluster()).path(0, 1)
    nbytes = np.array([0, 4e5, 4e6 / 3, 4e6])
    assert path.busy_s(nbytes) == pytest.approx([0, 1e-4, 1e-3 / 3, 3e-3])
    assert path.latency_s == 1e-3
    assert load_cluster().path(0, 1).busy_s(nbytes) == pytest.approx(nbytes / 300e9)


def test_gathers_have_rates_of_their_own() -> None:
    path = measured(load_cluster()).path(0, 1)
    nbytes = np.array([1e3, 4e6])
    assert path.gather_step_s(nbytes, 3) == pytest.approx([1.25e-6, 1e-6 + 1e-3])  # two pieces over 4 GB/s, half a step
    assert (path.gather_launch_s, path.gather_latency_s) == (3e-6, 0)
    plain = load_cluster().path(0, 1)
    assert (plain.gather_step_s(nbytes, 3) == plain.busy_s(nbytes)).all()
    assert (plain.gather_launch_s, plain.gather_latency_s) == (0, plain.latency_s)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_measurements_hold_where_pairs_have_a_link(topology: Any, tmp_path: Path) -> None:
    """Not hop by hop, nor on a bus; between nodes the network's own."""
    cluster = measured(load_cluster(written(tmp_path, NODES))).with_topology(topology)
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
    assert cluster.with_num_gpus(2).link == cluster.link


# Changes


@given(bandwidth=st.floats(1, 1e13), latency=st.floats(0, 1))
def test_with_link(bandwidth: float, latency: float) -> None:
    cluster = load_cluster()
    both = cluster.with_link(bandwidth, latency)
    assert (both.link.bandwidth_bytes_per_s, both.link.latency_s) == (bandwidth, latency)
    assert "nvlink3" in both.link.source
    assert cluster.with_link(bandwidth).link.latency_s == cluster.link.latency_s
    assert cluster.with_link(latency_s=latency).link.bandwidth_bytes_per_s == 300e9
    assert cluster.with_link() is cluster
    assert both.gpu == cluster.gpu


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, None), (-1, None), (math.nan, None), (math.inf, None)])
def test_bad_bandwidth(bandwidth: float, latency: None) -> None:
    with pytest.raises(InputError, match=r"^link_bandwidth: "):
        load_cluster().with_link(bandwidth, latency)


@pytest.mark.parametrize("latency", [-1, math.nan, math.inf])
def test_bad_latency(latency: float) -> None:
    with pytest.raises(InputError, match=r"^link_latency: "):
        load_cluster().with_link(latency_s=latency)


@pytest.mark.parametrize("num_gpus", [0, -1, 1.5, True, "8", 2**16 + 1])
def test_bad_num_gpus(num_gpus: Any) -> None:
    with pytest.raises(InputError, match=r"^gpus: "):
        load_cluster(num_gpus=num_gpus)


def test_bad_topology() -> None:
    bad: Any = "ring"
    with pytest.raises(InputError, match=r"^topology: got 'ring', accepted: switch, bus, chain, nodes$"):
        load_cluster().with_topology(bad)
    with pytest.raises(InputError, match=r"^topology: got 'nodes', accepted: switch, bus or chain"):
        load_cluster().with_topology("nodes")


# A user's files


def test_user_cluster(tmp_path: Path) -> None:
    content = {**CLUSTER, "gpu": GPU, "link": LINK, "_about": "a comment"}
    cluster = load_cluster(written(tmp_path, content), num_gpus=2)
    assert (cluster.name, cluster.num_gpus, cluster.gpu.memory_bytes) == ("lab", 2, 24_000_000_000)
    assert (cluster.link.latency_s, cluster.gpus_per_node, cluster.network) == (0, None, None)
    assert "mine.json" in cluster.gpu.source


def test_user_gpu_and_link(tmp_path: Path) -> None:
    assert load_gpu(written(tmp_path, GPU)).peak_flops == (("fp16", 1e14),)
    assert load_link(written(tmp_path, LINK)).name == "wire"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"gpus": 8}, "key: got 'gpus', accepted: name, gpu, num_gpus"),
        ({"num_gpus": 0}, "num_gpus: got '0'"),
        ({"num_gpus": 2.5}, "num_gpus: got '2.5'"),
        ({"topology": "ring"}, "topology: got 'ring'"),
        ({"topology": 3}, "topology: got '3'"),
        ({"gpu": "a100"}, "gpu: got 'a100', accepted: an object ({...}), or one of a100-40gb"),
        ({"gpu": 3}, "gpu: got '3'"),
        ({"link": "nvlink9"}, "link: got 'nvlink9'"),
        ({"name": ""}, "name: got ''"),
        ({"gpus_per_node": -1}, "gpus_per_node: got '-1'"),
        ({"gpu": {**GPU, "memory_bytes": -1}}, "gpu.memory_bytes: got '-1'"),
        ({"gpu": {**GPU, "hbm_bytes_per_s": math.nan}}, "gpu.hbm_bytes_per_s: got 'NaN'"),
        ({"gpu": {**GPU, "hbm_bytes_per_s": math.inf}}, "gpu.hbm_bytes_per_s: got 'Infinity'"),
        ({"gpu": {**GPU, "colour": "green"}}, "key in gpu: got 'colour'"),
        ({"gpu": {**GPU, "peak_flops": {}}}, "gpu.peak_flops: got '{}'"),
        ({"gpu": {**GPU, "peak_flops": 1e14}}, "gpu.peak_flops: got"),
        ({"gpu": {**GPU, "peak_flops": {"fp64": 1}}}, "key in gpu.peak_flops: got 'fp64'"),
        ({"gpu": {**GPU, "peak_flops": {"fp16": 0}}}, "gpu.peak_flops.fp16: got '0'"),
        ({"link": {**LINK, "latency_s": -1}}, "link.latency_s: got '-1'"),
        ({"link": {**LINK, "bandwidth_bytes_per_s": 0}}, "link.bandwidth_bytes_per_s: got '0'"),
        ({"link": {"name": "wire", "latency_s": 0}}, "link.bandwidth_bytes_per_s: got 'nothing'"),
        ({"network": {**LINK, "latency_s": "5us"}}, "network.latency_s: got '5us'"),
    ],
)
def test_bad_key(tmp_path: Path, changes: dict[str, Any], place: str) -> None:
    assert f"mine.json: {place}" in refusal(written(tmp_path, {**CLUSTER, **changes}))


@pytest.mark.parametrize("load", [load_cluster, load_gpu, load_link])
@pytest.mark.parametrize("name", ["nope", "", "a\0b", "x" * 5000, "no/such.json"])
def test_unknown_name_lists_the_known_ones(load: Any, name: str) -> None:
    with pytest.raises(InputError, match="accepted: a JSON file, or one of ") as caught:
        load(name)
    assert "\n" not in str(caught.value)
