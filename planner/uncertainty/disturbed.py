"""What noise and requests behind each other add to the simulation of one strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrsim.errors import InputError
from kvrsim.noise import Distribution, Noise, NoiseDraw, noise_of
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.uncertainty.noisy import check_length, check_samples, distribution

DEFAULT_SAMPLES = 200
FIRST_JUDGING_SAMPLE = 10_000  # planning sees none from here on


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """A noise as it is asked for: how many samples, of which seed. Sample 0 is the run that is shown."""

    noise: Noise
    seed: int = 0
    num_samples: int = DEFAULT_SAMPLES

    def check(self, strategy: Strategy) -> None:
        """Refuse a strategy that has no place for noise, and a number of samples that is none."""
        check_samples(self.num_samples)
        check_strategy(strategy)

    def fixed(self, scenario: Scenario) -> Scenario:
        """The scenario with the noise's slow GPUs and links."""
        return with_fixed(scenario, self.noise)

    def check_length(self, quiet_s: float, num_gpus: int) -> None:
        """Refuse prefills so long that their noise would not fit into memory."""
        check_length(self.noise, quiet_s, self.num_samples, num_gpus)

    def judged(self, scenario: Scenario, strategy: Strategy, partition: Partition, quiet_s: float) -> Distribution:
        """TTFTs of samples that planning has not seen."""
        return self.distribution(scenario, strategy, partition, quiet_s, first=FIRST_JUDGING_SAMPLE)

    def draw(self, scenario: Scenario) -> NoiseDraw | None:
        """Sample 0; None where nothing is drawn."""
        return NoiseDraw(self.noise, scenario.cluster.num_gpus, seed=self.seed) if self.noise.is_random else None

    def distribution(
        self, scenario: Scenario, strategy: Strategy, partition: Partition, quiet_s: float, *, first: int = 0
    ) -> Distribution:
        """TTFTs of all samples, numbered from `first`; `quiet_s`: without the random part."""
        if not self.noise.is_random:
            return Distribution.of([quiet_s], quiet_s=quiet_s, seed=self.seed)
        samples = range(first, first + self.num_samples)
        return distribution(scenario, strategy, partition, self.noise, quiet_s=quiet_s, seed=self.seed, samples=samples)


def as_asked(noise: str | Noise | None, num_samples: int, seed: int) -> Disturbance | None:
    """A disturbance from what a user wrote; None without a noise."""
    found = noise_of(noise)
    return None if found is None else Disturbance(noise=found, seed=seed, num_samples=num_samples)


def with_fixed(scenario: Scenario, noise: Noise) -> Scenario:
    """The scenario on a cluster with the noise's slow GPUs and links, which every search and bound then sees."""
    return replace(scenario, cluster=noise.placed_on(scenario.cluster))


def check_strategy(strategy: Strategy) -> None:
    """Refuse strategies in which a rank is not one GPU that runs all layers: noise is defined for each GPU."""
    if strategy.group_size != 1 or strategy.pipeline is not None:
        accepted = "strategies whose ranks are single GPUs that run all layers, with `noise`"
        raise InputError("strategy", strategy.name, accepted)
