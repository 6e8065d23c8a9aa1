"""Confirmation: what a plan promised, and what the machine did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvrsim.timeline import Timeline
from planner.confirm.pace import Pace

if TYPE_CHECKING:
    import pandas

Mode = Literal["ranks", "virtual"]
_MEDIAN_ERROR = 1.25 / 1.35  # standard error of a median of n normal values, in interquartile ranges over sqrt(n)
_SURE = 2.0  # standard errors, beyond which two medians differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """What has to be met."""

    regret: float = 0.03  # of the choice's TTFT, where it can be told from the spread
    error: float = 0.07  # of predicted TTFTs, the median of their magnitudes
    logits: float | None = None  # largest difference over the largest logit; None: by the dtype

    def logits_for(self, dtype: str) -> float:
        """By default what rounding leaves: sums run in another order."""
        return {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}[dtype] if self.logits is None else self.logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to run the prefill, predicted and measured."""

    strategy: str  # "single", "tsp", "kvr-e", "kvr-s"; "kvr-s #2" for its second best partition
    partition: tuple[int, ...]  # new tokens a rank
    predicted_s: float
    predicted_low_s: float
    predicted_high_s: float
    at_pace_s: float | None  # predicted for the pace at which the machine computes now; None: not timed
    samples_s: tuple[float, ...]  # measured TTFTs, by round; under virtual ranks composed of measured parts
    logits_error: float | None  # largest difference from one process's; None: not asked for
    logits_scale: float | None  # largest logit, by magnitude
    predicted: Timeline = field(repr=False, compare=False)
    measured: Timeline | None = field(repr=False, compare=False)  # of one more prefill

    @property
    def median_s(self) -> float:
        """Measured TTFT."""
        return median(self.samples_s)

    @property
    def iqr_s(self) -> float:
        """How far the middle half of the measured TTFTs is spread."""
        low, high = np.percentile(self.samples_s, (25, 75))
        return float(high - low)

    @property
    def rel_error(self) -> float:
        """Above 0: predicted too long."""
        return self.predicted_s / self.median_s - 1

    @property
    def rel_error_at_pace(self) -> float | None:
        """The same for the pace at which the machine computes now."""
        return None if self.at_pace_s is None else self.at_pace_s / self.median_s - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "strategy": self.strategy,
            "partition": list(self.partition),
            "predicted_ttft_s": self.predicted_s,
            "predicted_low_s": self.predicted_low_s,
            "predicted_high_s": self.predicted_high_s,
            "measured_ttft_s": self.median_s,
            "measured_iqr_s": self.iqr_s,
            "rel_error": self.rel_error,
            "rel_error_at_pace": self.rel_error_at_pace,
            "samples_s": list(self.samples_s),
            "logit_error": self.logits_error,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmation:
    """The answer to `kvrsim confirm`."""

    model: str
    profile: str
    cluster: str  # in words
    attention: str  # kernel
    dtype: str
    num_gpus: int
    context_len: int
    mode: Mode
    candidates: tuple[Candidate, ...]
    chosen: int  # the plan's choice among them
    tsp: str  # which all-gather, and what attention covers
    measured: tuple[str, ...]  # what of the "measured" TTFTs was measured
    modelled: tuple[str, ...]  # and what was not
    conditions: Mapping[str, str]  # machine, libraries, repetitions
    pace: Pace | None  # of the ranks' computing, against the calibration's; None: not timed
    targets: Targets
    warnings: tuple[str, ...]

    @property
    def choice(self) -> Candidate:
        """What the plan says is fastest."""
        return self.candidates[self.chosen]

    @property
    def best(self) -> Candidate:
        """What was fastest."""
        return min(self.candidates, key=lambda one: one.median_s)

    @property
    def regret(self) -> float:
        """What the plan's choice loses against the fastest that was measured, as a share of the latter's TTFT."""
        return self.choice.median_s / self.best.median_s - 1

    @property
    def regret_spread(self) -> float:
        """Standard error of the regret: of the differences, round by round, which share the machine's drift."""
        pairs = zip(self.choice.samples_s, self.best.samples_s, strict=True)
        shares = [choice / best - 1 for choice, best in pairs]
        low, high = np.percentile(shares, (25, 75))
        return float(_MEDIAN_ERROR * (high - low) / math.sqrt(len(shares)))

    @property
    def regret_beyond_spread(self) -> bool:
        """Whether the choice is surely slower than the best, and not only by chance."""
        return self.regret > _SURE * self.regret_spread

    @property
    def median_error(self) -> float:
        """Of the predictions, the median magnitude."""
        return median(abs(one.rel_error) for one in self.candidates)

    @property
    def median_error_at_pace(self) -> float | None:
        """The same for the pace at which the machine computes now; None where that was not timed."""
        errors = [abs(one.rel_error_at_pace) for one in self.candidates if one.rel_error_at_pace is not None]
        return median(errors) if errors else None

    @property
    def max_logit_error(self) -> float | None:
        """The largest difference of any candidate's logits from one process's; None: not asked for."""
        found = [one.logits_error for one in self.candidates if one.logits_error is not None]
        # max() would pass over a "not a number".
        return float(np.max(found)) if found else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Targets that are not met, each in a sentence; empty where all are."""
        targets, found = self.targets, []
        if self.regret > targets.regret and self.regret_beyond_spread:
            found.append(f"regret {self.regret:.1%} is above {targets.regret:.1%}, and beyond the spread")
        if self.median_error > targets.error:
            found.append(
                f"predictions are off by {self.median_error:.1%} (median), above {targets.error:.1%}{self._drift}"
            )
        limit = targets.logits_for(self.dtype)
        for one in self.candidates:
            if one.logits_error is None or one.logits_scale is None:
                continue
            if not one.logits_error <= limit * max(one.logits_scale, 1e-30):  # so that "not a number" fails
                shown = f"{one.logits_error:.2g}, largest logit {one.logits_scale:.2g}"
                found.append(f"{one.strategy}: logits differ from one process's by {shown}, above {limit:.0e} of it")
        return tuple(found)

    @property
    def _drift(self) -> str:
        """What of the error is not the model's, for a sentence on it."""
        if self.pace is None or self.median_error_at_pace is None or self.median_error_at_pace > self.targets.error:
            return ""
        return (
            f"; {self.median_error_at_pace:.1%} at the machine's present pace, {self.pace.speed:.2f} of the"
            " calibration's: calibrate again"
        )

    @property
    def ok(self) -> bool:
        """Whether every target is met."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "model": self.model,
            "profile": self.profile,
            "cluster": self.cluster,
            "attention": self.attention,
            "dtype": self.dtype,
            "num_gpus": self.num_gpus,
            "context_len": self.context_len,
            "mode": self.mode,
            "candidates": [one.to_dict() | {"chosen": one is self.choice} for one in self.candidates],
            "best_measured": {"strategy": self.best.strategy, "partition": list(self.best.partition)},
            "regret": self.regret,
            "regret_spread": self.regret_spread,
            "regret_beyond_spread": self.regret_beyond_spread,
            "median_error": self.median_error,
            "median_error_at_pace": self.median_error_at_pace,
            "pace": None if self.pace is None else self.pace.to_dict(),
            "max_logit_error": self.max_logit_error,
            "ok": self.ok,
            "reasons": list(self.reasons),
            "targets": {
                "regret": self.targets.regret,
                "median_error": self.targets.error,
                "logits": self.targets.logits_for(self.dtype),
            },
            "tsp": self.tsp,
            "measured": list(self.measured),
            "modelled": list(self.modelled),
            "conditions": dict(self.conditions),
            "warnings": list(self.warnings),
        }

    def to_frame(self) -> pandas.DataFrame:
        """One row a candidate."""
        import pandas

        return pandas.DataFrame([one.to_dict() for one in self.candidates])
