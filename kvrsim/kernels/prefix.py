"""Where the K and V of a cached prefix lie, and how the ranks' attention reaches them.

whole: every rank has, or loads, the whole prefix. pass-kv: each rank has a share of the tokens, and sends it to the
other ranks in every layer. pass-q: each rank has a share; queries go to the shares, and results return. Shares are even
and interleaved, so a window contains an equal part of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, cast, get_args

import numpy as np

from kvrsim.choices import PREFIX_PLACEMENTS, PrefixAccess, PrefixPlace
from kvrsim.errors import InputError
from kvrsim.hardware import Cluster, Path, prefix_link
from kvrsim.program import Array, Load
from kvrsim.units import MAX_BYTES_PER_S, parse_bandwidth

_ACCEPTED = f"{', '.join(PREFIX_PLACEMENTS)}; host and remote may have a bandwidth per GPU, such as remote:10GB/s"
_LOADED: tuple[PrefixPlace, ...] = ("host", "remote")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixPlacement:
    """The place of the K and V of the cached prefix when the prefill begins."""

    place: PrefixPlace = "all"  # all: every rank; sharded: tokens split over ranks; host: host memory; remote: a store
    bytes_per_s: float | None = None  # bandwidth per GPU; None: that of the GPU's host link or of the network

    def __post_init__(self) -> None:
        if self.place not in get_args(PrefixPlace):
            raise InputError("prefix_placement", self.place, _ACCEPTED)
        if self.bytes_per_s is None:
            return
        if self.place not in _LOADED:
            raise InputError("prefix_placement", self.describe(), f"{self.place} without a bandwidth")
        if not 1 <= self.bytes_per_s <= MAX_BYTES_PER_S:
            raise InputError("prefix_placement", self.bytes_per_s, _ACCEPTED)

    @classmethod
    def parse(cls, text: str, argument: str) -> PrefixPlacement:
        """Parse "host" or "remote:10GB/s". Raises InputError naming the argument for anything else."""
        place, colon, bandwidth = text.partition(":")
        try:
            rate = None
            if colon:
                rate = parse_bandwidth(bandwidth, argument)
            return cls(place=cast(PrefixPlace, place), bytes_per_s=rate)
        except InputError as error:
            raise InputError(argument, text, _ACCEPTED) from error

    def describe(self) -> str:
        """The text that `parse` accepts."""
        if self.bytes_per_s is None:
            return self.place
        return f"{self.place}:{self.bytes_per_s / 1e9:.12g}GB/s"

    def path(self, cluster: Cluster) -> Path | None:
        """The path over which a GPU loads the prefix; None if the prefix is on the GPUs."""
        if self.place not in _LOADED:
            return None
        link = prefix_link(cluster, self.place)
        rate = self.bytes_per_s
        if rate is None:
            rate = link.bandwidth_bytes_per_s
        return Path(bandwidth_bytes_per_s=rate, latency_s=link.latency_s, shared_bus=False)

    def slower(self, cluster: Cluster, factor: float) -> PrefixPlacement:
        """The placement with the link's bandwidth divided by a factor."""
        path = self.path(cluster)
        if path is None:
            return self
        return replace(self, bytes_per_s=path.bandwidth_bytes_per_s / factor)


ON_EVERY_RANK = PrefixPlacement()


class PrefixAccessPlan(NamedTuple):
    """How a rank's attention reaches the cached prefix, in every layer with K and V."""

    access: PrefixAccess = "whole"
    num_ranks: int = 1  # number of ranks that share the prefix
    source: Path | None = None  # path over which each rank loads from outside; None: the prefix is on the GPUs
    source_name: PrefixPlace = "all"
    peers: Path | None = None  # link over which a rank reads the others' shares; None if it does not need them

    @property
    def is_local(self) -> bool:
        """Whether every rank has the whole prefix from the start."""
        return self.access == "whole" and self.source is None

    @property
    def share(self) -> float:
        """Share of the prefix's tokens on each rank where no rank has all; else 0."""
        return 0.0 if self.access == "whole" else 1.0 / self.num_ranks

    def load(self, prefix_bytes: Array, *, reads_peers: bool) -> Load | None:
        """What one rank loads for one layer whose prefix has `prefix_bytes` bytes; None if the rank loads nothing.

        Data from host or store stays in memory; the rank loads it layer after layer from the start of the prefill. The
        rank drops data from other ranks after the layer, so that it holds two layers at most: the current and the next.
        reads_peers: the rank reads the shares of other ranks itself; False if the strategy's messages carry them.
        """
        share_bytes = prefix_bytes
        if self.access != "whole":
            share_bytes = prefix_bytes / self.num_ranks
        if not (reads_peers and self.peers is not None):
            return self.load_own(share_bytes)
        others = prefix_bytes - share_bytes
        seconds = self.peers.busy_s(others)
        latency_s = self.peers.latency_s
        if self.source is None:
            return Load(name="other ranks", nbytes=others, seconds=seconds, latency_s=latency_s, ahead=False)
        # A rank's own share arrives in pieces, which are forwarded immediately: the slower link limits the rate.
        return Load(
            name=self.source_name,
            nbytes=prefix_bytes,
            seconds=np.maximum(self.source.busy_s(share_bytes), seconds),
            latency_s=self.source.latency_s + latency_s,
        )

    def load_own(self, nbytes: Array) -> Load | None:
        """Load of a state or of a rank's part of the prefix from host or store; None if the rank has these bytes."""
        if self.source is None:
            return None
        seconds = self.source.busy_s(nbytes)
        return Load(name=self.source_name, nbytes=nbytes, seconds=seconds, latency_s=self.source.latency_s)


LOCAL_PREFIX = PrefixAccessPlan()


def plan_prefix_access(placement: PrefixPlacement, access: PrefixAccess | None, cluster: Cluster) -> PrefixAccessPlan:
    """Plan the access on a cluster with GPUs or groups as ranks; `access` None: the default of the placement."""
    if placement.place == "all":
        return LOCAL_PREFIX
    path = placement.path(cluster)
    if cluster.num_gpus == 1:
        return PrefixAccessPlan(source=path, source_name=placement.place)
    if access is None:
        access = "pass-kv" if placement.place == "sharded" else "whole"
    peers = None
    if access == "pass-kv":
        peers = _slowest_path(cluster)
    return PrefixAccessPlan(
        access=access, num_ranks=cluster.num_gpus, source=path, source_name=placement.place, peers=peers
    )


def _slowest_path(cluster: Cluster) -> Path:
    """Slowest path to a neighbour; on a bus with one rank's share of the bandwidth, because all ranks read at once."""
    ranks = cluster.num_gpus
    paths = [cluster.path(rank, (rank + 1) % ranks) for rank in range(ranks)]
    slowest = min(paths, key=lambda path: path.bandwidth_bytes_per_s)
    if slowest.shared_bus:
        slowest = replace(slowest, bandwidth_bytes_per_s=slowest.bandwidth_bytes_per_s / ranks)
    return slowest
