"""Side traffic in the simulator: others' messages queue on some links with ours, as the runtime's emulated links do."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

from kvrsim.executors.event import EventSimulation
from kvrsim.executors.network import Link
from kvrsim.hardware import Cluster
from kvrsim.program import Program
from kvrsim.runtime.emulated import MessageTraffic


def noisy_ttft_s(
    program: Program, cluster: Cluster, traffic: MessageTraffic, seeds: Sequence[int]
) -> tuple[float, ...]:
    """TTFT under each seed's traffic; the same seed gives the same times."""
    assert not cluster.shares_bandwidth, "side traffic has links of its own to queue on"
    return tuple(_ttft_s(program, cluster, traffic, seed) for seed in seeds)


def _ttft_s(program: Program, cluster: Cluster, traffic: MessageTraffic, seed: int) -> float:
    def on_link(src: int, dst: int, link: Link) -> None:
        if traffic.share > 0 and (src, dst) in traffic.pairs:
            link.env.process(_others(link, traffic, random.Random(f"{seed}:{src}:{dst}")))

    return EventSimulation(program, cluster, record=False, on_link=on_link).finish_s[-1]


def _others(link: Link, traffic: MessageTraffic, rng: random.Random) -> Generator[Any, Any, None]:
    busy_s = traffic.message_bytes / link.path.bandwidth_bytes_per_s
    while True:
        yield link.env.timeout(rng.expovariate(traffic.share / busy_s))
        link.env.process(link.transmit(traffic.message_bytes, busy_s))
