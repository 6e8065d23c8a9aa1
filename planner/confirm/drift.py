"""Clock drift: how fast a machine computes during a confirmation, relative to its calibration.

Between a calibration and a run clock rates and other load change, and ranks that compute side by side share caches
and power. So every round of a confirmation also times a prefill of an even chunk on all ranks at once, without
messages, and compares it with the profile's prediction. The predictions themselves are not changed; their error is
also given with every operation scaled by this one speed factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from kvrsim.io.schema import fields_to_json
from kvrsim.scenario import Scenario
from kvrsim.units import scale
from planner.simulate import run_simulation


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockDrift:
    """One prefill on every rank at once: predicted for one rank alone, and measured."""

    num_tokens: int
    predicted_s: float
    samples_s: tuple[float, ...]  # one a round, the mean of the ranks

    @property
    def measured_s(self) -> float:
        """Median."""
        return median(self.samples_s)

    @property
    def speed(self) -> float:
        """Speed factor; below 1: slower than during the calibration."""
        return self.predicted_s / self.measured_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return fields_to_json(self, "num_tokens", "predicted_s", "measured_s", "speed", "samples_s")


def drift_tokens(scenario: Scenario) -> int:
    """Length of an even chunk."""
    return scenario.request.new_tokens // scenario.cluster.num_gpus


def drift_of(scenario: Scenario, samples_s: tuple[float, ...]) -> ClockDrift:
    """The predicted prefill of an even chunk beside the measured ones."""
    tokens = drift_tokens(scenario)
    alone = replace(scenario.on_gpus(1), request=replace(scenario.request, context_len=tokens))
    predicted = run_simulation(alone, strategy="single")
    return ClockDrift(num_tokens=tokens, predicted_s=predicted.ttft_s, samples_s=samples_s)


def corrected_for(drift: ClockDrift, scenario: Scenario) -> Scenario:
    """The scenario with all kernels scaled by the measured speed factor."""
    assert scenario.profile is not None
    profile = replace(scenario.profile, kernels=scale(scenario.profile.kernels, 1 / drift.speed))
    return replace(scenario, profile=profile)
