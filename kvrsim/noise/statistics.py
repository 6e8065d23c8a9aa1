"""Distribution: TTFTs of many runs under noise, summed up with what is not known of the summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrsim.choices import OBJECTIVES
from kvrsim.errors import InputError

_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_NORMAL = 1.959964  # standard deviations either side that hold 95 % of a normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure of the distribution, and 95 % confidence limits from the samples."""

    value_s: float
    low_s: float | None  # None: too few samples to say
    high_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """TTFTs of runs that differ in nothing but the noise drawn."""

    num_samples: int
    seed: int
    quiet_s: float  # TTFT without the random part of the noise
    mean: Estimate
    p50: Estimate
    p95: Estimate
    p99: Estimate
    worst_s: float

    @classmethod
    def of(cls, ttft_s: Sequence[float], *, quiet_s: float, seed: int) -> Distribution:
        """Sum the samples up."""
        ordered = np.sort(np.asarray(ttft_s, dtype=float))
        percentiles = {name: _percentile(ordered, share) for name, share in _SHARES.items()}
        return cls(
            num_samples=len(ordered),
            seed=seed,
            quiet_s=quiet_s,
            mean=_mean(ordered),
            worst_s=float(ordered[-1]),
            **percentiles,
        )

    def objective_s(self, name: str) -> float:
        """The figure of that name."""
        estimate: Estimate = getattr(self, check_objective(name))
        return estimate.value_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        content: dict[str, Any] = {"samples": self.num_samples, "seed": self.seed, "quiet_ttft_s": self.quiet_s}
        for name in OBJECTIVES:
            estimate: Estimate = getattr(self, name)
            content[f"{name}_s"] = estimate.value_s
            content[f"{name}_low_s"], content[f"{name}_high_s"] = estimate.low_s, estimate.high_s
        return content | {"worst_s": self.worst_s, "mean_increase": self.mean.value_s / self.quiet_s - 1}


def check_objective(name: str) -> str:
    """The name, if it is one of OBJECTIVES; else InputError."""
    if name not in OBJECTIVES:
        raise InputError("objective", name, ", ".join(OBJECTIVES))
    return name


def objective_of(ttft_s: np.typing.NDArray[np.float64], name: str) -> np.typing.NDArray[np.float64]:
    """The figure of that name of each row of samples; shape (..., samples) -> (...)."""
    if name == "mean":
        return np.asarray(ttft_s.mean(axis=-1))
    return np.asarray(np.quantile(ttft_s, _SHARES[check_objective(name)], axis=-1))


def _mean(ordered: np.typing.NDArray[np.float64]) -> Estimate:
    mean, count = float(ordered.mean()), len(ordered)
    if count < 2:
        return Estimate(value_s=mean, low_s=None, high_s=None)
    half = _NORMAL * float(ordered.std(ddof=1)) / math.sqrt(count)
    return Estimate(value_s=mean, low_s=mean - half, high_s=mean + half)


def _percentile(ordered: np.typing.NDArray[np.float64], share: float) -> Estimate:
    """Limits by order statistics: how many samples lie below a percentile is binomial, whatever the distribution."""
    count = len(ordered)
    below = np.cumsum([_binomial(count, below, share) for below in range(count + 1)])
    low, high = int(np.searchsorted(below, 0.025)), int(np.searchsorted(below, 0.975))
    value_s = float(np.quantile(ordered, share))  # between two samples, which few samples leave far apart
    return Estimate(
        value_s=value_s,
        low_s=min(value_s, float(ordered[low - 1])) if low >= 1 else None,
        high_s=max(value_s, float(ordered[high])) if high < count else None,
    )


def _binomial(count: int, successes: int, share: float) -> float:
    ways = math.lgamma(count + 1) - math.lgamma(successes + 1) - math.lgamma(count - successes + 1)
    return math.exp(ways + successes * math.log(share) + (count - successes) * math.log1p(-share))
