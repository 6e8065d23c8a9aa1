"""Random GPUs, links and clusters, from slow to better than any of today."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.choices import DTYPES
from kvrsim.hardware import Cluster, GatherRates, GpuSpec, LinkSpec
from tests.building.drawing import Draws, log, maybe, strategy_of


def any_gpu(rng: Draws) -> GpuSpec:
    """From a small card to several of today's."""
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
    """From a slow network to better than NVLink; short messages and all-gathers as others, or as measured."""
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
    """Either protocol the faster, or the first for short messages alone."""
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
    """Any layout; nodes of one to three GPUs."""
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
    """The same cluster with nothing known of short messages and all-gathers."""
    network = cluster.network
    return replace(
        cluster,
        link=replace(cluster.link, short_bytes_per_s=None, gather=None),
        network=None if network is None else replace(network, short_bytes_per_s=None, gather=None),
    )


gpus = strategy_of(any_gpu)
clusters = strategy_of(any_cluster)
