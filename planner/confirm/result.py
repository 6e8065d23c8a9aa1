"""Confirmation: predicted and measured TTFTs of a plan's candidates, and whether the targets are met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import comb
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.interp import median_error
from kvrsim.io.schema import fields_to_json, to_frame, to_json
from kvrsim.results.question import Question
from kvrsim.results.results import Answer, StrategyPrediction, stages_to_json
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.plan import Timing
from planner.confirm.hardware import Mode
from planner.confirm.saved import SavedPlan

if TYPE_CHECKING:
    import pandas

LEAST_SCALE = 1e-30  # least scale of logits, so that equal logits of zero are equal
LEAST_SAMPLES = 3  # fewest measurements of a candidate that show a spread
_ROUNDING = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}  # largest error of reordered sums, divided by the largest logit


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Limits that a confirmation has to meet."""

    regret: float = 0.03  # largest allowed regret, if significant, as a share of the best candidate's TTFT
    median_error: float = 0.07  # largest allowed median of the absolute relative errors of predicted TTFTs
    logits: float | None = None  # largest allowed difference, divided by the largest logit; None: depends on the dtype

    def logits_for(self, dtype: str) -> float:
        """Return the largest allowed difference of the logits."""
        if self.logits is not None:
            return self.logits
        return _ROUNDING[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCandidate:
    """A strategy with a partition, predicted and measured."""

    prediction: StrategyPrediction  # its `strategy` is the candidate's name, such as "kvr-s #2"
    timing: Timing  # measured TTFTs by round; with virtual ranks, these are composed of measured parts
    predicted: Timeline = field(repr=False, compare=False)
    planned_s: float | None = None  # TTFT in the saved plan, predicted with that plan's profile; None: not in a plan

    @property
    def strategy(self) -> str:
        """The candidate's name."""
        return self.prediction.strategy

    @property
    def partition(self) -> tuple[int, ...]:
        """New tokens per rank, or a pipeline's pieces."""
        return self.prediction.partition

    @property
    def predicted_s(self) -> float:
        """Predicted TTFT."""
        return self.prediction.ttft_s

    @property
    def median_s(self) -> float:
        """Median of the measured TTFTs."""
        return self.timing.median_s

    @property
    def rel_error(self) -> float:
        """Predicted divided by measured TTFT, minus 1; above 0, the prediction is too long."""
        return self.predicted_s / self.median_s - 1

    def differs_from(self, other: MeasuredCandidate) -> bool:
        """Whether the measured TTFTs differ significantly: by more than the sum of both interquartile ranges."""
        if min(len(self.timing.ttft_s), len(other.timing.ttft_s)) < LEAST_SAMPLES:
            return False
        return abs(self.median_s - other.median_s) > self.timing.iqr_s + other.timing.iqr_s

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        difference = self.timing.difference
        return {
            **fields_to_json(self, "strategy", "partition"),
            **stages_to_json(self.partition, self.prediction.layers),
            "predicted_ttft_s": self.predicted_s,
            "predicted_low_s": self.prediction.ttft_low_s,
            "predicted_high_s": self.prediction.ttft_high_s,
            "planned_ttft_s": self.planned_s,
            "measured_ttft_s": self.median_s,
            "measured_iqr_s": self.timing.iqr_s,
            "rel_error": self.rel_error,
            "samples_s": list(self.timing.ttft_s),
            "logit_error": difference and difference.logits,
        }


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Confirmation(Answer):
    """The answer to `kvrsim confirm`."""

    question: Question
    mode: Mode
    candidates: tuple[MeasuredCandidate, ...]
    chosen: int  # index of the plan's choice in `candidates`
    conditions: Mapping[str, str]  # machine, libraries, repetitions, and the modelled parts
    targets: Targets
    warnings: tuple[str, ...]
    plan: SavedPlan | None = None  # the plan that was confirmed; None: it was made with the profile of this machine

    @property
    def choice(self) -> MeasuredCandidate:
        """The plan's best candidate that was measured; without a saved plan, the fastest by prediction."""
        return self.candidates[self.chosen]

    @property
    def best_was_best(self) -> bool | None:
        """Whether no candidate was significantly faster than the plan's best; None: that was not measured."""
        if self.plan is not None and self.choice.strategy != self.plan.best:
            return None
        return self.choice is self.best or not self.regret_beyond_spread

    def plan_to_dict(self) -> dict[str, Any] | None:
        """The confirmed plan as plain JSON values: its file, its profile and its best strategy; None: no saved plan."""
        if self.plan is None:
            return None
        return fields_to_json(self.plan, "file", "profile", "best")

    @property
    def best(self) -> MeasuredCandidate:
        """The candidate that was measured to be the fastest."""
        return min(self.candidates, key=lambda candidate: candidate.median_s)

    @property
    def regret(self) -> float:
        """Excess in TTFT of the plan's choice over the fastest candidate, as a share of the fastest one's TTFT."""
        return self.choice.median_s / self.best.median_s - 1

    @property
    def regret_spread(self) -> float:
        """Standard error of the regret, from differences within rounds, in which clock drift cancels out."""
        pairs = zip(self.choice.timing.ttft_s, self.best.timing.ttft_s, strict=True)
        return median_error([choice / best - 1 for choice, best in pairs])

    @property
    def regret_beyond_spread(self) -> bool:
        """Whether the choice and the fastest candidate differ significantly."""
        return self.best.differs_from(self.choice)

    @property
    def significant_pairs(self) -> list[tuple[MeasuredCandidate, MeasuredCandidate]]:
        """Pairs of candidates whose measured TTFTs differ significantly, the faster one first; all others are ties."""
        pairs = combinations(sorted(self.candidates, key=lambda candidate: candidate.median_s), 2)
        return [(fast, slow) for fast, slow in pairs if fast.differs_from(slow)]

    @property
    def wrong_pairs(self) -> list[tuple[str, str]]:
        """Names of the significant pairs whose predicted order is reversed or a tie."""
        pairs = self.significant_pairs
        return [(fast.strategy, slow.strategy) for fast, slow in pairs if fast.predicted_s >= slow.predicted_s]

    @property
    def median_error(self) -> float:
        """Median absolute relative error of the predictions."""
        return median(abs(candidate.rel_error) for candidate in self.candidates)

    @property
    def speed(self) -> float:
        """Median of predicted over measured TTFT: above 1, the machine is faster than predicted."""
        return median(candidate.predicted_s / candidate.median_s for candidate in self.candidates)

    @property
    def max_logit_error(self) -> float | None:
        """Largest difference of the candidates' logits from those of a single process; None: not compared."""
        differences = [candidate.timing.difference for candidate in self.candidates]
        errors = [difference.logits for difference in differences if difference is not None]
        if not errors:
            return None
        return float(np.max(errors))  # unlike max(), this keeps NaN

    @property
    def reasons(self) -> tuple[str, ...]:
        """One sentence for each missed target."""
        targets = self.targets
        reasons = []
        if self.regret > targets.regret and self.regret_beyond_spread:
            reasons.append(f"regret {self.regret:.1%} is above {targets.regret:.1%}, and significant")
        if self.median_error > targets.median_error:
            by = f"{self.median_error:.1%} (median), above {targets.median_error:.1%}"
            reasons.append(f"predictions are off by {by}{self._drift_note}")
        limit = targets.logits_for(self.question.dtype)
        for candidate in self.candidates:
            difference = candidate.timing.difference
            if difference is not None and not difference.logits <= limit * max(difference.logits_scale, LEAST_SCALE):
                # The negated comparison also reports NaN.
                by = f"{difference.logits:.2g}, largest logit {difference.logits_scale:.2g}"
                name = candidate.strategy
                reasons.append(f"{name}: logits differ from one process's by {by}, above {limit:.0e} of it")
        return tuple(reasons)

    @property
    def _drift_note(self) -> str:
        """Return a note if the machine's speed alone explains an error above its target; else an empty text."""
        rest = median(abs((candidate.rel_error + 1) / self.speed - 1) for candidate in self.candidates)
        if len(self.candidates) == 1 or rest > self.targets.median_error:
            return ""
        return f"; all run about {self.speed:.2f} times as fast as predicted: calibrate again"

    @property
    def ok(self) -> bool:
        """Whether every target is met."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            **self.question.header(),
            **fields_to_json(self, "model", "profile", "cluster", "attention", "num_gpus", "context_len", "mode"),
            "dtype": self.question.dtype,
            "candidates": [candidate.to_dict() | {"chosen": candidate is self.choice} for candidate in self.candidates],
            "orders": {
                "pairs": comb(len(self.candidates), 2),
                "significant": len(self.significant_pairs),
                "right": len(self.significant_pairs) - len(self.wrong_pairs),
                "wrong": to_json(self.wrong_pairs),
            },
            "best_measured": fields_to_json(self.best, "strategy", "partition"),
            "saved_plan": self.plan_to_dict(),
            "best_was_best": self.best_was_best,
            **fields_to_json(self, "regret", "regret_spread", "regret_beyond_spread", "median_error", "speed"),
            **fields_to_json(self, "max_logit_error", "ok", "reasons"),
            "targets": fields_to_json(self.targets) | {"logits": self.targets.logits_for(self.question.dtype)},
            **fields_to_json(self, "conditions", "warnings"),
        }

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per candidate."""
        return to_frame(candidate.to_dict() for candidate in self.candidates)
