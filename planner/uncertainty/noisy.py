"""TTFTs of one partition under samples of a noise, and the limits of what is simulated."""

from __future__ import annotations

import numpy as np

from kvrsim.errors import InputError
from kvrsim.executors.run import ttft_s
from kvrsim.noise import Distribution, Noise, NoiseDraw, SideTraffic
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy

MAX_SAMPLES = 100_000
_MOST_SLOTS = 2.0**24  # of time, all samples, GPUs and links together: 24 bytes each


def distribution(
    scenario: Scenario,
    strategy: Strategy,
    partition: Partition,
    noise: Noise,
    *,
    quiet_s: float,
    seed: int,
    samples: range,
) -> Distribution:
    """TTFTs of one partition under the samples of that seed with these numbers."""
    check_length(noise, quiet_s, len(samples), scenario.cluster.num_gpus)
    draw = NoiseDraw(noise, scenario.cluster.num_gpus, seed=seed, samples=samples)
    samples_s = ttft_s(scenario, strategy, np.array([partition.chunk_lens]), draw=draw)[0]
    return Distribution.of(samples_s, quiet_s=quiet_s, seed=seed)


def check_length(noise: Noise, quiet_s: float, num_samples: int, num_gpus: int) -> None:
    """Refuse side traffic whose slots would not fit into memory; quiet_s: the prefill without noise, seconds.

    Every GPU and every link between neighbours keeps each slot of each sample until the end of the disturbed prefill.
    """
    traffic = noise.side_traffic
    if traffic is None or traffic.is_quiet or num_gpus < 2:
        return
    places = num_samples * (2 * num_gpus - 1)
    longest_s = quiet_s * _expected_slowdown(traffic, num_gpus)
    if longest_s / traffic.dwell_s * places > _MOST_SLOTS:
        least_s = longest_s * places / _MOST_SLOTS
        raise InputError("noise dwell", f"{traffic.dwell_s:g}s", f"at least {1.005 * least_s:.3g}s, or fewer `samples`")


def _expected_slowdown(traffic: SideTraffic, num_gpus: int) -> float:
    """How many times as long the slowest GPU or link takes, in the mean over slots."""
    pairs = num_gpus - 1
    of_link = traffic.duty / pairs
    of_gpu = traffic.duty * min(2, pairs) / pairs
    link = 1 - of_link * traffic.share
    gpu = 1 - of_gpu * (1 - 1 / (1 + traffic.slowdown))
    return 1 / min(link, gpu)


def check_samples(count: int) -> int:
    """A number of samples."""
    if isinstance(count, bool) or not 1 <= count <= MAX_SAMPLES:
        raise InputError("samples", count, f"a whole number from 1 to {MAX_SAMPLES}")
    return count
