"""Pace: how fast a machine computes while a plan is confirmed, against how fast it did when it was calibrated.

Between a calibration and a run clocks change, neighbours come and go, and ranks that compute side by side share caches
and power. So every round of a confirmation also times a prefill of an even chunk on all ranks at once, without a
message, and compares it with what the profile says of it. Predictions stay as they were; what is told beside them is
how far off they are once every operation takes longer by that one factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from kvrsim.scenario import Scenario
from planner.simulate import run_simulation


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """One prefill on every rank at once, predicted for one rank alone, and measured."""

    num_tokens: int
    predicted_s: float
    samples_s: tuple[float, ...]  # by round, the mean of the ranks

    @property
    def measured_s(self) -> float:
        """The median."""
        return median(self.samples_s)

    @property
    def speed(self) -> float:
        """Below 1: slower than when it was calibrated."""
        return self.predicted_s / self.measured_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "num_tokens": self.num_tokens,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "speed": self.speed,
            "samples_s": list(self.samples_s),
        }


def pace_tokens(scenario: Scenario) -> int:
    """An even chunk."""
    return scenario.request.new_tokens // scenario.cluster.num_gpus


def pace_of(scenario: Scenario, samples_s: tuple[float, ...]) -> Pace:
    """What the profile says of a prefill of an even chunk, beside what was measured."""
    tokens = pace_tokens(scenario)
    alone = replace(scenario.on_gpus(1), request=replace(scenario.request, context_len=tokens))
    predicted = run_simulation(alone, strategy="single")
    return Pace(num_tokens=tokens, predicted_s=predicted.ttft_s, samples_s=samples_s)


def at_pace(scenario: Scenario, pace: Pace) -> Scenario:
    """The same with everything computed at the pace that was measured."""
    assert scenario.profile is not None
    profile = replace(scenario.profile, kernels=scenario.profile.kernels.faster(pace.speed))
    return replace(scenario, profile=profile)
