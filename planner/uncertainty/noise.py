"""TTFTs under noise: samples of one partition, and limits on the size of the simulation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.executors.run import ttft_s as noisy_s
from kvrsim.noise import Distribution, Noise, NoiseDraw, SideTraffic, parse_noise
from kvrsim.placement import PlacedScenario
from kvrsim.program import Array
from kvrsim.progress import OnProgress
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy

if TYPE_CHECKING:
    from planner.processes import Pool

DEFAULT_SAMPLES = 200
MAX_SAMPLES = 100_000
FIRST_PLAN_SAMPLE = 10_000  # first sample of a plan, so that its samples differ from those of `simulate`
_MOST_FACTORS = 55e6  # largest number of factors of jitter that are stored at a time, 8 bytes each
_MOST_SLOTS = 2.0**24  # largest number of time slots of all samples, GPUs and links, 24 bytes each


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """A noise, the seed of its samples, and their number. Sample 0 is the run in the result of a simulation."""

    noise: Noise
    seed: int = 0
    num_samples: int = DEFAULT_SAMPLES
    pool: Pool | None = field(default=None, compare=False, repr=False)  # runs a plan's samples; None: this process

    @classmethod
    def of(cls, noise: str | Noise | None, num_samples: int, seed: int) -> Disturbance | None:
        """The disturbance of a user's noise; None without noise."""
        parsed = parse_noise(noise) if isinstance(noise, str) else noise
        return None if parsed is None else cls(noise=parsed, seed=seed, num_samples=num_samples)

    def check(self, strategy: Strategy) -> None:
        """Raise InputError for too many samples, and for strategies whose ranks are not single GPUs with all layers.

        Noise is defined per GPU.
        """
        if isinstance(self.num_samples, bool) or not 1 <= self.num_samples <= MAX_SAMPLES:
            raise InputError("samples", self.num_samples, f"a whole number from 1 to {MAX_SAMPLES}")
        if strategy.group_size != 1 or strategy.is_pipeline:
            accepted = "strategies whose ranks are single GPUs that run all layers, with `noise`"
            raise InputError("strategy", strategy.name, accepted)

    def with_fixed_part(self, scenario: Scenario) -> Scenario:
        """The scenario with the noise's slow GPUs and links, so that searches and bounds include them."""
        return replace(scenario, cluster=self.noise.place_on(scenario.cluster))

    @property
    def is_even(self) -> bool:
        """Whether all GPUs and all links are alike; else TTFT without noise is that of another scenario."""
        return not self.noise.slow_gpus and not self.noise.slow_links

    def draw(self, scenario: Scenario) -> NoiseDraw | None:
        """The draw of sample 0; None if the noise is not random."""
        return NoiseDraw(self.noise, scenario.cluster.num_gpus, seed=self.seed) if self.noise.is_random else None

    def distribution(
        self,
        execution: Execution,
        partition: Partition,
        ttft_s: float,
        *,
        even_s: float,
        first: int = 0,
        on_progress: OnProgress | None = None,
    ) -> Distribution:
        """TTFTs of all samples, numbered from `first`; scenario: per rank.

        ttft_s: TTFT without the random part of the noise. even_s: TTFT without noise, on the even machine.
        """
        if not self.noise.is_random:
            return Distribution.of([ttft_s], quiet_s=even_s, seed=self.seed)
        num_gpus = execution.cluster.num_gpus
        self.check_length(ttft_s, num_gpus)
        samples = range(first, first + self.num_samples)
        step = max(1, int(_MOST_FACTORS / _factors(execution.placed, num_gpus)))
        parts = list[Array]()
        for done in range(0, len(samples), step):
            if on_progress is not None:
                on_progress(done, len(samples), f"{execution.strategy.name}: samples of noise")
            draw = NoiseDraw(self.noise, num_gpus, seed=self.seed, samples=samples[done : done + step])
            parts.append(noisy_s(execution, np.array([partition.chunk_lens]), draw=draw)[0])
        return Distribution.of(np.concatenate(parts).tolist(), quiet_s=even_s, seed=self.seed)

    def check_length(self, quiet_s: float, num_gpus: int) -> None:
        """Raise InputError if the slots of side traffic do not fit in memory; quiet_s: TTFT without noise, seconds.

        For each sample, all slots until the end of the disturbed prefill are stored, for all GPUs and links between
        neighbours.
        """
        traffic = self.noise.side_traffic
        if traffic is None or traffic.is_quiet or num_gpus < 2:
            return
        places = self.num_samples * (2 * num_gpus - 1)
        longest_s = quiet_s * _expected_slowdown(traffic, num_gpus)
        if longest_s / traffic.dwell_s * places > _MOST_SLOTS:
            least_s = 1.005 * longest_s * places / _MOST_SLOTS
            raise InputError("noise dwell", f"{traffic.dwell_s:g}s", f"at least {least_s:.3g}s, or fewer `samples`")


def _factors(scenario: PlacedScenario, num_gpus: int) -> int:
    """Largest number of factors of jitter per sample: a ring's, for computations and for messages."""
    return 2 * num_gpus * max(512, num_gpus * scenario.share.num_hidden_layers)


def _expected_slowdown(traffic: SideTraffic, num_gpus: int) -> float:
    """The expected slowdown of the slowest GPU or link, as a mean over slots."""
    pairs = num_gpus - 1
    of_link = traffic.duty / pairs
    of_gpu = traffic.duty * min(2, pairs) / pairs
    link = 1 - of_link * traffic.share
    gpu = 1 - of_gpu * (1 - 1 / (1 + traffic.slowdown))
    return 1 / min(link, gpu)
