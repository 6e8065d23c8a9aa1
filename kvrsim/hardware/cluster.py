"""Cluster: GPUs, links and their layout, from shipped datasheets or a user's file."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

from kvrsim.choices import TOPOLOGIES, Topology
from kvrsim.errors import InputError
from kvrsim.hardware.gpu import GpuSpec
from kvrsim.hardware.links import LinkSpec, Path
from kvrsim.io.json_text import JsonObject
from kvrsim.io.schema import Limits, read
from kvrsim.units import format_bandwidth, format_seconds

DEFAULT_CLUSTER = "a100-nvlink"
MAX_GPUS = 2**16
GpuCount = Annotated[int, Limits(least=1, most=MAX_GPUS)]

_DATA = pathlib.Path(__file__).parents[1] / "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """GPUs of one kind and the links between them.

    switch: each ordered pair of GPUs has its own full-duplex path. chain: neighbours have one, others go
    hop by hop. bus: all flows share one bandwidth. nodes: inside a node as a switch, between nodes over the
    network.
    """

    name: str  # built-in name, or what the user's file says
    gpu: GpuSpec  # every GPU
    num_gpus: GpuCount  # GPUs in all
    link: LinkSpec  # between GPUs; under nodes, inside a node
    topology: Topology  # see above
    gpus_per_node: GpuCount | None = None  # GPUs that `link` joins, under nodes; else None
    network: LinkSpec | None = None  # between nodes, one GPU's share of it; else None

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise InputError("topology", self.topology, ", ".join(TOPOLOGIES))
        if self.topology == "nodes" and (self.network is None or self.gpus_per_node is None):
            accepted = "switch, bus or chain (nodes needs a cluster file with gpus_per_node and network)"
            raise InputError("topology", self.topology, accepted)
        if isinstance(self.num_gpus, bool) or not isinstance(self.num_gpus, int):
            raise InputError("gpus", self.num_gpus, "a whole number of at least 1")
        if not 1 <= self.num_gpus <= MAX_GPUS:
            raise InputError("gpus", self.num_gpus, f"a whole number from 1 to {MAX_GPUS}")

    @classmethod
    def read(cls, data: JsonObject) -> Cluster:
        """As a cluster file has it; a GPU or a link may be the name of a built-in one."""
        for key in ("gpus_per_node", "network"):
            if data.fields.get("topology") == "nodes" and not data.has(key):
                raise data.error(key, "a value, which nodes need")
        links = {key: LinkSpec.read(_part(data, key, "links")) for key in ("link", "network") if data.has(key)}
        return read(cls, data, gpu=GpuSpec.read(_part(data, "gpu", "gpus")), **links)

    @property
    def shares_bandwidth(self) -> bool:
        """Whether flows compete for one bandwidth, so that durations depend on what else is in flight."""
        return self.topology == "bus" and self.num_gpus > 1

    def slowness(self, rank: int) -> float:
        """How many times as long as the others a rank computes; see kvrsim.hardware.uneven."""
        assert 0 <= rank < self.num_gpus, rank
        return 1.0

    def path(self, src: int, dst: int) -> Path:
        """The way from rank `src` to another rank `dst`."""
        assert src != dst, src
        assert 0 <= min(src, dst) <= max(src, dst) < self.num_gpus, (src, dst)
        link, hops = self.link, 1
        if self.topology == "chain":
            hops = abs(dst - src)
        elif self.topology == "nodes":
            assert self.gpus_per_node is not None
            assert self.network is not None
            link = link if src // self.gpus_per_node == dst // self.gpus_per_node else self.network
        return Path(
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            latency_s=hops * link.latency_s,
            shared_bus=self.topology == "bus",
            short_bytes_per_s=link.short_bytes_per_s if self.topology in ("switch", "nodes") else None,
            gather=link.gather if self.topology in ("switch", "nodes") else None,
            all_reduce=link.all_reduce if self.topology in ("switch", "nodes") else None,
        )

    def with_link(
        self, bandwidth_bytes_per_s: float | None = None, latency_s: float | None = None, name: str = "user"
    ) -> Cluster:
        """The same cluster with another link (under nodes, the one inside a node); None keeps what is.

        What was measured of short messages and collectives does not hold for it.
        """
        if bandwidth_bytes_per_s is None and latency_s is None:
            return self
        bandwidth = self.link.bandwidth_bytes_per_s if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s
        latency = self.link.latency_s if latency_s is None else latency_s
        source = f"{name}, instead of {self.link.name}"
        link = LinkSpec(name=name, bandwidth_bytes_per_s=bandwidth, latency_s=latency, source=source)
        return replace(self, link=link)

    def with_measured(self, link: LinkSpec) -> Cluster:
        """The same cluster with a link as it was measured (under nodes, the one inside a node)."""
        return replace(self, link=link)

    def with_num_gpus(self, num_gpus: int) -> Cluster:
        return replace(self, num_gpus=num_gpus)

    def with_topology(self, topology: Topology) -> Cluster:
        return replace(self, topology=topology)

    def describe(self) -> str:
        """One line for people."""
        bandwidth = format_bandwidth(self.link.bandwidth_bytes_per_s)
        link = f"{self.link.name}, {bandwidth}, {format_seconds(self.link.latency_s)}"
        if self.network is not None and self.topology == "nodes":
            network = self.network
            between = f"{format_bandwidth(network.bandwidth_bytes_per_s)} a GPU, {format_seconds(network.latency_s)}"
            link = f"{link}; nodes of {self.gpus_per_node} over {network.name}, {between}"
        return f"{self.name}: {self.num_gpus} x {self.gpu.name}, {self.topology} ({link})"


def builtin_gpus() -> tuple[str, ...]:
    return tuple(sorted(_shipped("gpus")))


def builtin_clusters() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (_DATA / "clusters").glob("*.json")))


def load_gpu(name_or_path: str | pathlib.Path, argument: str = "gpu") -> GpuSpec:
    """A built-in GPU or a JSON file that describes one."""
    shipped = _shipped("gpus")
    return GpuSpec.read(shipped.get(str(name_or_path)) or _user_file(name_or_path, argument, shipped))


def load_link(name_or_path: str | pathlib.Path, argument: str = "link") -> LinkSpec:
    """A built-in link or a JSON file that describes one."""
    shipped = _shipped("links")
    return LinkSpec.read(shipped.get(str(name_or_path)) or _user_file(name_or_path, argument, shipped))


def prefix_link(cluster: Cluster, place: Literal["host", "remote"]) -> LinkSpec:
    """What a GPU loads a cached prefix over, nominally: its host link, or the network, a GPU's share of it."""
    if place == "remote" and cluster.network is not None:
        return cluster.network
    links = JsonObject.read(_DATA / "prefix_links.json", "prefix_links")
    if place == "remote":
        return load_link(links.text("remote"))
    host = links.child("host")
    return load_link(host.text(cluster.gpu.name, host.text("other")))


def load_cluster(
    name_or_path: str | pathlib.Path = DEFAULT_CLUSTER,
    num_gpus: int | None = None,
    argument: str = "cluster",
) -> Cluster:
    """A built-in cluster or a JSON file; `num_gpus` takes the place of the file's."""
    name = str(name_or_path)
    if name in builtin_clusters():
        cluster = Cluster.read(JsonObject.read(_DATA / "clusters" / f"{name}.json", argument))
    else:
        cluster = Cluster.read(_user_file(name, argument, builtin_clusters()))
    return cluster if num_gpus is None else cluster.with_num_gpus(num_gpus)


def _shipped(kind: Literal["gpus", "links"]) -> dict[str, JsonObject]:
    """The shipped objects of a kind, by name."""
    content = JsonObject.read(_DATA / f"{kind}.json", kind)
    return {name: content.child(name) for name in content.fields if not name.startswith("_")}


_Names = TypeVar("_Names", dict[str, JsonObject], tuple[str, ...])


def _user_file(name_or_path: str | pathlib.Path, argument: str, builtin: _Names) -> JsonObject:
    """A user's file; what is neither a built-in name nor a file is refused with the names."""
    path = pathlib.Path(name_or_path)
    try:
        is_file = path.exists() and not path.is_dir()
    except (OSError, ValueError):  # a path that is too long or forbidden
        is_file = False
    if not is_file:
        raise InputError(argument, name_or_path, f"a JSON file, or one of {', '.join(sorted(builtin))}")
    return JsonObject.read(path, argument)


def _part(spec: JsonObject, key: str, kind: Literal["gpus", "links"]) -> JsonObject:
    """The object under a key, or the shipped one that the key names."""
    value = spec.fields.get(key)
    if isinstance(value, dict):
        return spec.child(key)
    shipped = _shipped(kind)
    if not isinstance(value, str) or value not in shipped:
        raise spec.error(key, f"an object ({{...}}), or one of {', '.join(sorted(shipped))}")
    return shipped[value]
