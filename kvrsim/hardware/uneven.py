"""UnevenCluster: a cluster some of whose GPUs or links are slower than the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from kvrsim.hardware.cluster import Cluster
from kvrsim.hardware.links import Path
from kvrsim.units import scale


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowGpu:
    """A GPU that takes longer for everything."""

    rank: int  # of the GPU, from 0
    factor: float  # its times over the others', at least 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """A link between two GPUs that has less bandwidth than the others, both ways."""

    first: int  # the lower rank
    second: int  # the higher rank
    factor: float  # the others' bandwidth over its own, at least 1


@dataclass(frozen=True, kw_only=True, slots=True)
class UnevenCluster(Cluster):
    """The same GPUs and links but for these."""

    slow_gpus: tuple[SlowGpu, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster, slow_gpus: Sequence[SlowGpu], slow_links: Sequence[SlowLink]) -> Cluster:
        """The cluster itself where nothing is slow."""
        gpus = tuple(gpu for gpu in slow_gpus if gpu.factor != 1)
        links = tuple(link for link in slow_links if link.factor != 1)
        if not gpus and not links:
            return cluster
        same = {field.name: getattr(cluster, field.name) for field in fields(Cluster)}
        return cls(**same, slow_gpus=gpus, slow_links=links)

    def slowness(self, rank: int) -> float:
        """How many times as long a rank computes."""
        return next((gpu.factor for gpu in self.slow_gpus if gpu.rank == rank), 1.0)

    def path(self, src: int, dst: int) -> Path:
        """The way from rank `src` to `dst`; in a chain, as slow as the slowest link on it."""
        path = Cluster.path(self, src, dst)
        factor = max((link.factor for link in self.slow_links if self._passes(link, src, dst)), default=1.0)
        return path if factor == 1.0 else scale(path, factor, only_rates=True)

    def _passes(self, link: SlowLink, src: int, dst: int) -> bool:
        low, high = min(src, dst), max(src, dst)
        if self.topology == "chain":
            return low <= link.first and link.second <= high
        return (low, high) == (link.first, link.second)

    def describe(self) -> str:
        """One line for people."""
        slow = [f"GPU {gpu.rank} {gpu.factor:g} times slower" for gpu in self.slow_gpus]
        slow += [f"link {link.first}-{link.second} {link.factor:g} times slower" for link in self.slow_links]
        return f"{Cluster.describe(self)}; {', '.join(slow)}"
