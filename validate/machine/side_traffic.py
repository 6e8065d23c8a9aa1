"""Side traffic in the simulator: others' messages queue on some links with ours, as the runtime's emulated links do."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kvrsim.errors import InputError
from kvrsim.executors.event import Link, Replay
from kvrsim.hardware.cluster import Cluster
from kvrsim.program import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Messages at random times, ahead of ours that come later."""

    pairs: tuple[tuple[int, int], ...]  # links by (sender, receiver)
    share: float  # of those links' time, below 1
    message_bytes: float  # of each message

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise InputError("side traffic", self.share, "a share of the link's time above 0 and below 1")


class NoisyReplay(Replay):
    """One prefill beside side traffic; the same seed, the same times."""

    def __init__(self, program: Program, cluster: Cluster, traffic: Traffic, seed: int) -> None:
        assert not cluster.shares_bandwidth, "side traffic has links of its own to queue on"
        self.traffic, self.seed = traffic, seed
        super().__init__(program, cluster, record=False)

    def link(self, src: int, dst: int) -> Link:
        """The link, beside whose messages others come from now on."""
        is_new = (src, dst) not in self.links
        link = super().link(src, dst)
        if is_new and (src, dst) in self.traffic.pairs:
            self.env.process(self._others(link, random.Random(f"{self.seed}:{src}:{dst}")))
        return link

    def _others(self, link: Link, rng: random.Random) -> Generator[Any, Any, None]:
        busy_s = self.traffic.message_bytes / link.path.bandwidth_bytes_per_s
        while True:
            yield self.env.timeout(rng.expovariate(self.traffic.share / busy_s))
            self.env.process(link.transmit(self.traffic.message_bytes, busy_s))


def noisy_ttft_s(program: Program, cluster: Cluster, traffic: Traffic, seeds: Sequence[int]) -> tuple[float, ...]:
    """TTFT under each seed's traffic."""
    return tuple(NoisyReplay(program, cluster, traffic, seed).finish_s[-1] for seed in seeds)
