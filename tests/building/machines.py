"""Random GPUs, links and clusters, from slow ones to faster ones than any on sale today."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.choices import DTYPES
from kvrsim.hardware import Cluster, GatherRates, GpuSpec, LinkSpec
from tests.building.drawing import Draws, log, maybe, strategy_of


def any_gpu(rng: Draws) -> GpuSpec:
    """A random GPU: 10^12 to 10^15 FLOP/s and 10^11 to 10^13 bytes/s of memory."""
    flops = log(rng, 12, 15)
    return GpuSpec(
        name="random",
        memory_bytes=80 * 10**9,
        hbm_bytes_per_s=log(rng, 11, 13),
        peak_flops=dict.fromkeys(DTYPES, flops),
        num_sms=100,
        source="drawn at random",
    )


def any_link(rng: Draws, *, decades: tuple[float, float] = (7, 12)) -> LinkSpec:
    """A random link; half of the links have a rate of short messages, and half have rates of all-gathers."""
    bandwidth, latency = log(rng, *decades), maybe(rng, 0.0, lambda: log(rng, -7, -3))
    return LinkSpec(
        name="random",
        bandwidth_bytes_per_s=bandwidth,
        latency_s=latency,
        source="drawn at random",
        short_bytes_per_s=maybe(rng, None, lambda: bandwidth * log(rng, 0, 2)),
        gather=maybe(rng, None, lambda: any_gather_rates(rng, bandwidth)),
    )


def any_gather_rates(rng: Draws, bandwidth: float) -> GatherRates:
    """Random all-gather rates of both protocols; either protocol may be the faster one."""
    return GatherRates(
        launch_s=maybe(rng, 0.0, lambda: log(rng, -6, -4)),
        hop_s=maybe(rng, 0.0, lambda: log(rng, -7, -5)),
        small_bytes_per_s=bandwidth * log(rng, -1, 0.5),
        large_bytes_per_s=bandwidth * log(rng, -0.5, 0.5),
        setup_s=maybe(rng, 0.0, lambda: log(rng, -6, -3)),
        own_share=maybe(rng, 0.0, lambda: rng.random()),
    )


def any_cluster(
    rng: Draws,
    num_gpus: int,
    *,
    topologies: tuple[str, ...] = ("switch", "chain", "nodes"),
    decades: tuple[float, float] = (7, 12),
) -> Cluster:
    """A cluster with a random topology; nodes have one to three GPUs."""
    topology = rng.choice(topologies)
    nodes = topology == "nodes"
    return Cluster(
        name="random",
        gpu=any_gpu(rng),
        num_gpus=num_gpus,
        link=any_link(rng, decades=decades),
        topology=topology,  # type: ignore[arg-type]
        gpus_per_node=rng.randint(1, 3) if nodes else None,
        network=any_link(rng, decades=decades) if nodes else None,
    )


def plain(cluster: Cluster) -> Cluster:
    """The same cluster without rates of short messages and of all-gathers."""
    network = cluster.network
    return replace(
        cluster,
        link=replace(cluster.link, short_bytes_per_s=None, gather=None),
        network=None if network is None else replace(network, short_bytes_per_s=None, gather=None),
    )


gpus = strategy_of(any_gpu)
clusters = strategy_of(any_cluster)
