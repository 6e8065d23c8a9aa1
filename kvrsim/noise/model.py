"""Noise: what disturbs a prefill, as the user describes it: side traffic, jitter, slow GPUs and slow links."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from kvrsim.errors import InputError
from kvrsim.hardware.cluster import Cluster
from kvrsim.hardware.uneven import SlowGpu, SlowLink, UnevenCluster
from kvrsim.io.schema import Limits, Share, fields_to_json

DWELL_S = 0.01
MOST_SLOWER = 1000.0  # times; beyond it, a link or GPU is broken rather than slow
LEAST_DWELL_S, MOST_DWELL_S = 1e-4, 1e6
MOST_SHARE = 0.999  # of a link: the rest has to pass
LinkShare = Annotated[float, Limits(least=0.0, most=MOST_SHARE)]
Slowdown = Annotated[float, Limits(least=0.0, most=MOST_SLOWER)]
Dwell = Annotated[float, Limits(least=LEAST_DWELL_S, most=MOST_DWELL_S)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SideTraffic:
    """Others' traffic, both ways, between one pair of neighbouring GPUs at a time, drawn anew for every slot of time.

    While a pair carries it, its link has `1 - share` of its bandwidth left and both GPUs compute slower: copies
    take memory bandwidth, and a library's send and receive kernels take multiprocessors.
    """

    duty: Share = 1.0  # share of the slots in which there is any, 0 to 1
    share: LinkShare = 0.5  # of the pair's bandwidth that it takes, 0 to less than 1
    slowdown: Slowdown = 0.0  # of compute on both GPUs: operations take 1 + slowdown times as long
    dwell_s: Dwell = DWELL_S  # seconds for which it stays with a pair

    @property
    def is_quiet(self) -> bool:
        """Whether it changes nothing."""
        return self.duty == 0 or (self.share == 0 and self.slowdown == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """All that disturbs a prefill; the fixed part is known to the planner, the random part is drawn."""

    side_traffic: SideTraffic | None = None
    compute_jitter: float = 0.0  # standard deviation of the logarithm of an operation's duration; the mean stays
    message_jitter: float = 0.0  # the same of a message's time on its link
    slow_gpus: tuple[SlowGpu, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()
    name: str = field(default="", compare=False)  # as the user gave it

    @property
    def is_random(self) -> bool:
        """Whether two runs may differ."""
        traffic = self.side_traffic is not None and not self.side_traffic.is_quiet
        return traffic or self.compute_jitter > 0 or self.message_jitter > 0

    def placed_on(self, cluster: Cluster) -> Cluster:
        """The cluster with its slow GPUs and links: the part of the noise that does not change from run to run.

        Raises InputError for a GPU or a link that is not there, and for noise that a bus has no place for.
        """
        last = cluster.num_gpus - 1
        for gpu in self.slow_gpus:
            if gpu.rank > last:
                raise InputError("noise", f"slow-gpu:{gpu.rank}", f"a GPU from 0 to {last}")
        for link in self.slow_links:
            if link.second > last:
                raise InputError("noise", f"slow-link:{link.first}-{link.second}", f"GPUs from 0 to {last}")
            if cluster.topology == "chain" and link.second != link.first + 1:
                raise InputError("noise", f"slow-link:{link.first}-{link.second}", "neighbours, since it is a chain")
        takes_a_share = self.side_traffic is not None and not self.side_traffic.is_quiet and self.side_traffic.share > 0
        if cluster.shares_bandwidth and (self.slow_links or takes_a_share):
            what = "slow-link" if self.slow_links else "side-traffic"
            raise InputError("noise", what, "share=0, jitter or slow-gpu on a bus, which has no link of a pair")
        return UnevenCluster.of(cluster, self.slow_gpus, self.slow_links)

    def on_ranks(self, num_gpus: int) -> Noise:
        """What is left of it on the first so many GPUs."""
        return replace(
            self,
            slow_gpus=tuple(gpu for gpu in self.slow_gpus if gpu.rank < num_gpus),
            slow_links=tuple(link for link in self.slow_links if link.second < num_gpus),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as read_noise takes them."""
        traffic = self.side_traffic
        content: dict[str, Any] = {}
        if traffic is not None:
            content["side_traffic"] = fields_to_json(traffic)
        if self.compute_jitter or self.message_jitter:
            content["jitter"] = {"compute": self.compute_jitter, "messages": self.message_jitter}
        if self.slow_gpus:
            content["slow_gpus"] = [{"gpu": gpu.rank, "factor": gpu.factor} for gpu in self.slow_gpus]
        if self.slow_links:
            content["slow_links"] = [{"gpus": [one.first, one.second], "factor": one.factor} for one in self.slow_links]
        return content

    def describe(self) -> str:
        """One line for people."""
        return "; ".join(self._parts()) or "none"

    def _parts(self) -> Iterator[str]:
        if traffic := self.side_traffic:
            yield (
                f"side traffic {traffic.duty:.0%} of the time on {traffic.share:.0%} of a pair's link, compute there"
                f" {traffic.slowdown:.1%} slower, a pair for {traffic.dwell_s * 1e3:g} ms"
            )
        if self.compute_jitter or self.message_jitter:
            yield f"jitter {self.compute_jitter:.1%} of operations, {self.message_jitter:.1%} of messages"
        for gpu in self.slow_gpus:
            yield f"GPU {gpu.rank} {gpu.factor:g} times slower"
        for link in self.slow_links:
            yield f"link {link.first}-{link.second} {link.factor:g} times slower"


def joined(parts: list[Noise], text: str) -> Noise:
    """Several noises at once; raises InputError where two describe the same thing."""
    traffic = [part.side_traffic for part in parts if part.side_traffic is not None]
    jitters = [part for part in parts if part.compute_jitter or part.message_jitter]
    gpus = list(itertools.chain.from_iterable(part.slow_gpus for part in parts))
    links = list(itertools.chain.from_iterable(part.slow_links for part in parts))
    places = [gpu.rank for gpu in gpus], [(link.first, link.second) for link in links]
    if len(traffic) > 1 or len(jitters) > 1 or any(len(set(place)) < len(place) for place in places):
        raise InputError("noise", text, "each kind of noise once, and each GPU and link once")
    return Noise(
        side_traffic=traffic[0] if traffic else None,
        compute_jitter=jitters[0].compute_jitter if jitters else 0.0,
        message_jitter=jitters[0].message_jitter if jitters else 0.0,
        slow_gpus=tuple(gpus),
        slow_links=tuple(links),
        name=text,
    )
