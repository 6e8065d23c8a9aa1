"""GPUs, links and clusters, from datasheets or a user's file, and measured collectives.

A GpuSpec has the figures of a datasheet; a LinkSpec joins two devices; a Cluster combines GPUs and links, and gives the
Path of each message. An UnevenCluster has GPUs or links that are slower than the others. GatherRates holds the rates of
two protocols of ring all-gathers; AllReduceRates those of all-reduces by number of GPUs and bytes.
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Literal

import numpy as np

from kvrsim.choices import DTYPES, TOPOLOGIES, Topology
from kvrsim.errors import InputError, check_rising, check_whole
from kvrsim.interp import cell, log_interp
from kvrsim.io.schema import (
    Check,
    JsonObject,
    Keys,
    NonNegative,
    Range,
    fields_to_json,
    named_object,
    read,
    shipped_files,
)
from kvrsim.program import Array
from kvrsim.units import MAX_BYTES, format_bandwidth, format_bytes, format_seconds, scale


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherRates:
    """Ring all-gathers by the faster of two protocols: a latency-bound one, and one that pipelines chunks of messages.

    Over p ranks with pieces of n bytes, M = (p - 1 + own_share) n bytes pass the busiest link. The seconds are
    launch_s + (p - 1) hop_s + min(M / small, (sqrt(M / large) + sqrt(setup_s))^2).
    """

    launch_s: NonNegative  # seconds to launch the collective
    hop_s: NonNegative  # seconds of each of the p - 1 steps
    small_bytes_per_s: float  # rate of the latency-bound protocol
    large_bytes_per_s: float  # rate of the pipelined protocol for endless messages
    setup_s: NonNegative  # seconds to start the pipeline
    own_share: NonNegative  # cost of copying a rank's own piece, as a share of sending one

    def step_s(self, piece_bytes: Array, num_ranks: int) -> Array:
        """Seconds of one of the p - 1 steps of the ring, for pieces of `piece_bytes`, without the launch."""
        steps = num_ranks - 1
        nbytes = (steps + self.own_share) * piece_bytes
        large_s = (np.sqrt(nbytes / self.large_bytes_per_s) + np.sqrt(self.setup_s)) ** 2
        return np.asarray(self.hop_s + np.minimum(nbytes / self.small_bytes_per_s, large_s) / steps)

    def seconds(self, total_bytes: Array, num_ranks: int) -> Array:
        """Seconds of an all-gather of equal pieces; `total_bytes` is their sum."""
        return self.launch_s + (num_ranks - 1) * self.step_s(total_bytes / num_ranks, num_ranks)


Bytes = Annotated[int, Range(least=1, most=MAX_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredAllReduce:
    """Times of all-reduces on one number of GPUs: latency_s + n / rate.

    The rate is interpolated between measured sizes on logarithmic scales; beyond them, the rate of the nearest holds.
    """

    num_gpus: Annotated[int, Range(least=2, most=2**16)]
    latency_s: NonNegative  # latency, estimated from the smallest tensor
    nbytes: tuple[Bytes, ...]  # bytes of the tensor, ascending
    bytes_per_s: tuple[float, ...]  # rate of the fastest method for each size, without latency

    def __post_init__(self) -> None:
        check_rising("nbytes", self.nbytes, "bytes_per_s", self.bytes_per_s)

    def seconds(self, nbytes: Array) -> Array:
        """Seconds of messages of `nbytes` bytes, an array of any shape."""
        return self.latency_s + nbytes / log_interp(np.maximum(nbytes, 1.0), self.nbytes, self.bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceRates:
    """All-reduces that were measured inside one node, by number of GPUs."""

    measured: tuple[MeasuredAllReduce, ...]  # one table per number of GPUs, in ascending order

    def __post_init__(self) -> None:
        counts = [table.num_gpus for table in self.measured]
        check_rising("measured", counts, "tables", self.measured)

    def covers(self, num_gpus: int) -> bool:
        """Whether `num_gpus` is in the measured range."""
        return self.measured[0].num_gpus <= num_gpus <= self.measured[-1].num_gpus

    def seconds(self, nbytes: Array, num_gpus: int) -> Array:
        """Seconds to all-reduce `nbytes` bytes, an array; interpolated between measured numbers of GPUs."""
        if (exact := next((table for table in self.measured if table.num_gpus == num_gpus), None)) is not None:
            return exact.seconds(nbytes)
        low, share = cell(num_gpus, [table.num_gpus for table in self.measured])
        below_s = self.measured[int(low)].seconds(nbytes)
        return (1 - share) * below_s + share * self.measured[int(low) + 1].seconds(nbytes)


# GPUs, links and clusters

DEFAULT_MEMORY_FRACTION = 0.9  # the default of vLLM's gpu_memory_utilization
PeakFlops = Annotated[
    Mapping[str, float], Keys(DTYPES), Check(f"an object with a number for one or more of {', '.join(DTYPES)}", bool)
]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """Figures of a GPU's datasheet."""

    name: str  # name in gpus.json
    memory_bytes: Bytes  # total device memory, as nvidia-smi reports it
    hbm_bytes_per_s: float  # peak bandwidth of the device memory
    peak_flops: PeakFlops  # FLOP/s of the tensor cores for dense matrices, by dtype
    num_sms: Annotated[int, Range(least=1, most=2**20)]  # streaming multiprocessors; for a CPU: its threads
    source: str  # citation
    memory_source: str | None = None  # citation of memory_bytes; None: as `source`
    power_w: float | None = None  # default power limit of the GPU, watts; None: not stated
    # Measured GPU of the same architecture; its rates are scaled by the datasheets; None: no such GPU.
    like: str | None = None

    @classmethod
    def read(cls, data: JsonObject) -> GpuSpec:
        """Read an entry of gpus.json; its source defaults to the file."""
        return read(cls, data, source=data.text("source", data.where))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """Memory of a GPU that a prefill may use; the rest is a reserve.

    The reserve covers what is not counted in bytes: memory of the driver and of ECC, fragmentation of the allocator's
    heap, other processes on the GPU.
    """

    gpu_memory_bytes: int  # total memory of one GPU
    memory_fraction: float  # share of the memory that may be used, above 0 and at most 1

    def __post_init__(self) -> None:
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise InputError("memory_fraction", fraction, "a number above 0 and at most 1, such as 0.9")

    @property
    def nbytes(self) -> int:
        """Bytes that may be used."""
        return int(self.gpu_memory_bytes * self.memory_fraction)

    def describe(self) -> str:
        """Describe the limit: "limit 72.0 GiB per GPU, 0.9 of its 80.0 GiB"."""
        total = format_bytes(self.gpu_memory_bytes)
        return f"limit {format_bytes(self.nbytes)} per GPU, {self.memory_fraction:g} of its {total}"

    def to_dict(self) -> dict[str, int | float]:
        """Plain JSON values."""
        return fields_to_json(self) | {"memory_limit_bytes": self.nbytes}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpec:
    """A full-duplex link between two devices; its figures are for one direction."""

    name: str  # name in links.json
    bandwidth_bytes_per_s: float  # payload bandwidth in one direction
    latency_s: NonNegative  # time from the first byte sent to the first byte received, including software
    source: str  # citation, or the author of the figure
    short_bytes_per_s: float | None = None  # rate of messages whose time is mostly latency; None: same as for all
    gather: GatherRates | None = None  # rates of all-gathers over such links; None: computed as single messages
    all_reduce: AllReduceRates | None = None  # all-reduces over such links; None: computed as two all-gathers
    like: str | None = None  # measured link of the same kind: its latencies are used, its rates are scaled by bandwidth
    profile: str | None = None  # profile that measured the figures; None: from a datasheet or a user

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise InputError("link_bandwidth", self.bandwidth_bytes_per_s, "a finite bandwidth above 0")
        if not 0 <= self.latency_s < math.inf:
            raise InputError("link_latency", self.latency_s, "a finite time of at least 0")

    @classmethod
    def read(cls, data: JsonObject) -> LinkSpec:
        """Read an entry of links.json; its source defaults to the file."""
        return read(cls, data, source=data.text("source", data.where))


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """All links that a message between two GPUs takes, combined into one."""

    bandwidth_bytes_per_s: float  # bandwidth of the slowest link
    latency_s: float  # sum of the latencies of all links
    shared_bus: bool  # whether all paths of the cluster share this one bandwidth
    short_bytes_per_s: float | None = None  # see LinkSpec
    gather: GatherRates | None = None  # see LinkSpec
    all_reduce: AllReduceRates | None = None  # see LinkSpec

    def busy_s(self, nbytes: Array) -> Array:
        """Seconds that a message of `nbytes` bytes keeps the path busy; it arrives `latency_s` later.

        Where short messages have a rate of their own, the time from end to end is
        max(latency + n / short, n / bandwidth).
        """
        long_s = nbytes * (1.0 / self.bandwidth_bytes_per_s)
        if self.short_bytes_per_s is None:
            return long_s
        return np.maximum(nbytes * (1.0 / self.short_bytes_per_s), long_s - self.latency_s)

    def gather_step_s(self, nbytes: Array, num_ranks: int) -> Array:
        """Seconds that one step of a ring all-gather keeps the path busy."""
        return self.busy_s(nbytes) if self.gather is None else self.gather.step_s(nbytes, num_ranks)

    @property
    def gather_latency_s(self) -> float:
        """Seconds from the end of a step until the piece has arrived; 0 where measured steps include the latency."""
        return self.latency_s if self.gather is None else 0.0

    @property
    def gather_launch_s(self) -> float:
        """Seconds before a rank's first step of an all-gather."""
        return 0.0 if self.gather is None else self.gather.launch_s


DEFAULT_CLUSTER = "a100-nvlink"
MAX_GPUS = 2**16
GpuCount = Annotated[int, Range(least=1, most=MAX_GPUS)]
LEAST_POWER_SHARE = 0.6  # of a GPU's default power limit; below it, clocks fall faster than Cluster.arithmetic_share

_DATA = pathlib.Path(__file__).parent / "data"
_OF_OTHER_NODES = ("a800", "h800")  # clusters with the GPUs of others and narrower links
_SIZE = re.compile(r"(?:([0-9]{1,4})x)?(?:([0-9]{1,5})x)?([a-z][a-z0-9-]*)")  # nodes, GPUs per node, name of GPU


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Cluster:
    """GPUs of one kind and the links between them.

    switch: each ordered pair of GPUs has its own full-duplex path. chain: only neighbours have such a path, and other
    messages go hop by hop. bus: all flows share one bandwidth. nodes: a switch inside each node, a network between
    nodes.
    """

    name: str  # built-in name, or the name in the user's file
    gpu: GpuSpec  # kind of every GPU
    num_gpus: GpuCount  # total number of GPUs
    link: LinkSpec  # link between GPUs; with topology "nodes": inside a node
    topology: Topology  # kind of network; see the docstring of the class
    gpus_per_node: GpuCount | None = None  # GPUs of a node; None unless topology is "nodes"
    network: LinkSpec | None = None  # one GPU's share of the network between nodes; None on one node
    power_limit_w: float | None = None  # power limit of each GPU, watts; None: the GPU's default

    def __repr__(self) -> str:
        return f"<Cluster: {self.describe()}>"

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise InputError("topology", self.topology, ", ".join(TOPOLOGIES))
        if self.topology == "nodes" and (self.network is None or self.gpus_per_node is None):
            accepted = "switch, bus or chain (nodes needs a cluster file with gpus_per_node and network)"
            raise InputError("topology", self.topology, accepted)
        check_whole("gpus", self.num_gpus, 1, MAX_GPUS)
        if self.power_limit_w is None:
            return
        most = self.gpu.power_w
        if most is None:
            raise InputError("power_limit_w", self.power_limit_w, f"a limit where power_w of {self.gpu.name} is given")
        if not LEAST_POWER_SHARE * most <= self.power_limit_w <= most:
            least = f"{LEAST_POWER_SHARE * most:g}"
            accepted = f"{least} to {most:g} W; for less, state the peak_flops that the GPU reaches"
            raise InputError("power_limit_w", self.power_limit_w, accepted)

    @property
    def arithmetic_share(self) -> float:
        """FLOP/s under the power limit divided by FLOP/s at the GPU's default limit: the root of the ratio of limits.

        Power is proportional to clock x voltage^2. If the voltage were proportional to the clock, the exponent would be
        1/3; at the lowest voltage it is 1. Published ratios: H100 of 500 W 0.81 (the root gives 0.85), RTX 3090 of
        300 W 0.94 (0.93), of 280 W 0.95 (0.89), of 250 W 0.85 (0.85); sources in docs/reference/formats.md.
        """
        if self.power_limit_w is None or self.gpu.power_w is None:
            return 1.0
        return math.sqrt(self.power_limit_w / self.gpu.power_w)

    @classmethod
    def read(cls, data: JsonObject) -> Cluster:
        """Read a cluster file; a GPU or a link may be given by the name of a built-in one."""
        links = {key: LinkSpec.read(_part(data, key, "links")) for key in ("link", "network") if data.has(key)}
        return read(cls, data, gpu=GpuSpec.read(_part(data, "gpu", "gpus")), **links)

    @property
    def shares_bandwidth(self) -> bool:
        """Whether flows compete for one bandwidth, so that durations depend on the other messages in flight."""
        return self.topology == "bus" and self.num_gpus > 1

    def slowness(self, rank: int) -> float:
        """Compute time of a rank relative to the others; 1 except in an UnevenCluster."""
        assert 0 <= rank < self.num_gpus, rank
        return 1.0

    def path(self, src: int, dst: int) -> Path:
        """Return the path from rank `src` to another rank `dst`."""
        assert src != dst, src
        assert 0 <= min(src, dst) <= max(src, dst) < self.num_gpus, (src, dst)
        link = self.link
        hops = 1
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

    def with_link(self, bandwidth_bytes_per_s: float | None = None, latency_s: float | None = None) -> Cluster:
        """Return the cluster with another bandwidth and latency of `link`; None keeps a value.

        The new link has no measured rates of short messages and collectives.
        """
        if bandwidth_bytes_per_s is None and latency_s is None:
            return self
        bandwidth = self.link.bandwidth_bytes_per_s if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s
        latency = self.link.latency_s if latency_s is None else latency_s
        source = f"user, instead of {self.link.name}"
        link = LinkSpec(name="user", bandwidth_bytes_per_s=bandwidth, latency_s=latency, source=source)
        return replace(self, link=link)

    def describe(self) -> str:
        """Describe the cluster in one line."""
        bandwidth = format_bandwidth(self.link.bandwidth_bytes_per_s)
        link = f"{self.link.name}, {bandwidth}, {format_seconds(self.link.latency_s)}"
        if self.network is not None and self.topology == "nodes":
            network = self.network
            between = f"{format_bandwidth(network.bandwidth_bytes_per_s)} per GPU, {format_seconds(network.latency_s)}"
            link = f"{link}; nodes of {self.gpus_per_node} over {network.name}, {between}"
        return f"{self.name}: {self.num_gpus} x {self.gpu.name}, {self.topology} ({link})"


def builtin_gpus() -> tuple[str, ...]:
    return tuple(sorted(_builtin("gpus")))


def builtin_clusters() -> tuple[str, ...]:
    return tuple(shipped_files(_DATA / "clusters"))


def load_gpu(name_or_path: str | pathlib.Path, argument: str = "gpu") -> GpuSpec:
    """Load a built-in GPU, or the one that a JSON file describes."""
    return GpuSpec.read(named_object(name_or_path, argument, _builtin("gpus")))


def load_link(name_or_path: str | pathlib.Path, argument: str = "link") -> LinkSpec:
    """Load a built-in link, or the one that a JSON file describes."""
    return LinkSpec.read(named_object(name_or_path, argument, _builtin("links")))


def prefix_link(cluster: Cluster, place: str) -> LinkSpec:
    """The nominal link over which a GPU loads a cached prefix: its host link, or its share of the network."""
    if place == "remote" and cluster.network is not None:
        return cluster.network
    links = JsonObject.read(_DATA / "prefix_links.json", "prefix_links")
    if place == "remote":
        return load_link(links.text("remote"))
    host = links.child("host")
    return load_link(host.text(cluster.gpu.name, host.text("other")))


def load_cluster(
    name_or_path: str | pathlib.Path = DEFAULT_CLUSTER, num_gpus: int | None = None, argument: str = "cluster"
) -> Cluster:
    """Load a built-in cluster, a size such as "2x8xh100", or a JSON file; `num_gpus` replaces its number of GPUs."""
    shipped = shipped_files(_DATA / "clusters")
    cluster = _cluster_of_size(str(name_or_path), argument, tuple(shipped))
    if cluster is None:
        sizes = f"a size such as 2x8xh100 (GPUs: {', '.join(builtin_gpus())})"
        try:
            cluster = Cluster.read(named_object(name_or_path, argument, shipped, sizes))
        except InputError as error:
            if error.guess is not None or error.value != str(name_or_path):
                raise
            raise InputError(error.parameter, error.value, error.accepted, _size_like(str(name_or_path))) from None
    return cluster if num_gpus is None else replace(cluster, num_gpus=num_gpus)


@cache
def cluster_of(gpu: str) -> Cluster | None:
    """A built-in cluster of the GPU, if possible one with a switch, else one without a bus."""
    clusters = [cluster for cluster in map(load_cluster, builtin_clusters()) if cluster.gpu.name == gpu]
    return min(clusters, key=lambda cluster: (cluster.topology != "switch", cluster.topology == "bus"), default=None)


def larger_size(cluster: Cluster, gpus: int) -> str:
    """The size of a cluster of the same GPUs that has at least `gpus`, such as 2x8xh100."""
    node = cluster_of(cluster.gpu.name) or cluster
    if gpus <= node.num_gpus:
        return f"{gpus}x{cluster.gpu.name}"
    return f"{math.ceil(gpus / node.num_gpus)}x{node.num_gpus}x{cluster.gpu.name}"


def _size_like(text: str) -> str | None:
    """The size that a text such as 8h100 or 8xh1000 probably means; None if no GPU has a similar name."""
    from difflib import get_close_matches  # imported only for names that are unknown

    match = re.fullmatch(r"(?:([0-9]{1,4})x)?(?:([0-9]{1,5})x?)?([a-z][a-z0-9-]*)", text.lower())
    near = get_close_matches(match[3], builtin_gpus(), n=1, cutoff=0.75) if match else []
    if match is None or not near:
        return None
    numbers = [number for number in match.groups()[:2] if number]
    return "x".join([*numbers, near[0]])


def _cluster_of_size(text: str, argument: str, names: tuple[str, ...]) -> Cluster | None:
    """Return the cluster of a size such as "h100", "8xh100" or "2x8xh100" (two nodes of eight), else None.

    A node is the built-in cluster of the GPU. Nodes are joined by InfiniBand of 400 Gb/s per GPU.
    """
    match = _SIZE.fullmatch(text.lower())
    if match is None:
        return None
    nodes_text, gpus_text, gpu_text = match.groups()
    gpu = {"a100": "a100-80gb"}.get(gpu_text, gpu_text)
    if gpu not in builtin_gpus() and gpu not in _OF_OTHER_NODES:
        return None
    pattern = re.compile(rf"{gpu_text.removesuffix('-80gb')}-(nvlink\d?|pcie)")
    of_gpu = [name for name in names if pattern.fullmatch(name)]
    if not of_gpu:
        of_gpu = [name for name in names if load_cluster(name).gpu.name == gpu]
    node = load_cluster(of_gpu[0])
    num_nodes = 1
    per_node = node.num_gpus
    if nodes_text and gpus_text:
        num_nodes = int(nodes_text)
        per_node = int(gpus_text)
    elif nodes_text or gpus_text:  # one number: that of all GPUs
        per_node = int(nodes_text or gpus_text)
    if per_node > node.num_gpus and num_nodes == 1 and per_node % node.num_gpus == 0:
        num_nodes = per_node // node.num_gpus
        per_node = node.num_gpus
    if not 1 <= per_node <= node.num_gpus or not 1 <= num_nodes * per_node <= MAX_GPUS:
        raise InputError(argument, text, f"NODESxGPUSx{gpu_text} with 1 to {node.num_gpus} GPUs per node")
    if num_nodes == 1:
        return replace(node, num_gpus=per_node)
    nodes = replace(node, name=text.lower(), topology="nodes", gpus_per_node=per_node, network=load_link("ib-ndr400"))
    return replace(nodes, num_gpus=num_nodes * per_node)


@cache
def _builtin(kind: Literal["gpus", "links"]) -> dict[str, JsonObject]:
    """The shipped objects of a kind, by name."""
    content = JsonObject.read(_DATA / f"{kind}.json", kind)
    return {name: content.child(name) for name in content.fields if not name.startswith("_")}


def _part(spec: JsonObject, key: str, kind: Literal["gpus", "links"]) -> JsonObject:
    """Return the object under a key, or the shipped object that the key's value names."""
    value = spec.fields.get(key)
    if isinstance(value, dict):
        return spec.child(key)
    shipped = _builtin(kind)
    if not isinstance(value, str) or value not in shipped:
        raise spec.error(key, f"an object ({{...}}), or one of {', '.join(sorted(shipped))}")
    return shipped[value]


MOST_SLOWER = 1000.0  # largest factor; a link or GPU beyond it is broken rather than slow
Slower = Annotated[float, Range(least=1.0, most=MOST_SLOWER)]
Rank = Annotated[int, Range(least=0, most=MAX_GPUS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowGpu:
    """A GPU on which all operations take longer."""

    rank: Rank  # from 0
    factor: Slower  # times of the GPU divided by those of the others, at least 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """A link between two GPUs with less bandwidth than the others, in both directions."""

    first: Rank  # lower rank of the two GPUs
    second: Rank  # higher rank of the two GPUs
    factor: Slower  # bandwidth of the others divided by that of the link, at least 1


@dataclass(frozen=True, kw_only=True, slots=True)
class UnevenCluster(Cluster):
    """A cluster with GPUs or links of different speed."""

    slow_gpus: tuple[SlowGpu, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, slow_gpus: Sequence[SlowGpu], slow_links: Sequence[SlowLink]) -> Cluster:
        """Return the cluster with slow GPUs or links; if nothing is slow, the cluster itself."""
        gpus = tuple(gpu for gpu in slow_gpus if gpu.factor != 1)
        links = tuple(link for link in slow_links if link.factor != 1)
        if not gpus and not links:
            return cluster
        same = {field.name: getattr(cluster, field.name) for field in fields(Cluster)}
        return cls(**same, slow_gpus=gpus, slow_links=links)

    def slowness(self, rank: int) -> float:
        """Compute time of a rank relative to the others."""
        return next((gpu.factor for gpu in self.slow_gpus if gpu.rank == rank), 1.0)

    def path(self, src: int, dst: int) -> Path:
        """The path from rank `src` to `dst`; in a chain, as slow as its slowest link."""
        path = Cluster.path(self, src, dst)
        factor = max((link.factor for link in self.slow_links if self._passes(link, src, dst)), default=1.0)
        return path if factor == 1.0 else scale(path, factor, only_rates=True)

    def _passes(self, link: SlowLink, src: int, dst: int) -> bool:
        low = min(src, dst)
        high = max(src, dst)
        if self.topology == "chain":
            return low <= link.first and link.second <= high
        return (low, high) == (link.first, link.second)

    def describe(self) -> str:
        """Describe the cluster in one line."""
        slow = [f"GPU {gpu.rank} {gpu.factor:g} times slower" for gpu in self.slow_gpus]
        slow += [f"link {link.first}-{link.second} {link.factor:g} times slower" for link in self.slow_links]
        return f"{Cluster.describe(self)}; {', '.join(slow)}"
