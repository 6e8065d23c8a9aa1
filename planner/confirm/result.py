"""Confirmation: predicted and measured TTFTs of a plan's candidates, and whether the targets are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.interp import interquartile_range, median_error
from kvrsim.io.schema import fields_to_json
from kvrsim.results.question import Question
from kvrsim.results.results import Answer, StrategyPrediction, stages_to_json
from kvrsim.results.timeline import Span, Timeline
from planner.confirm.hardware import Mode

if TYPE_CHECKING:
    import pandas

LEAST_SAMPLES = 3  # of each candidate, below which there is no spread to judge by
PARTS = ("products", "attention", "cache", "ends", "exchange", "waiting")
_PART_OF_OP = {
    **dict.fromkeys(("qkv", "output+mlp"), "products"),
    **dict.fromkeys(("attention", "merge"), "attention"),
    "append": "cache",
}
_SIGNIFICANT = 2.0  # standard errors, above which a difference of two medians is significant
_ROUNDING = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}  # of sums in another order, over the largest logit


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Limits that a confirmation has to meet."""

    regret: float = 0.03  # of the choice's TTFT, where it is significant
    error: float = 0.07  # median absolute relative error of the predicted TTFTs
    logits: float | None = None  # largest difference over the largest logit; None: by the dtype

    def logits_for(self, dtype: str) -> float:
        """Return the limit of the logits' difference."""
        return _ROUNDING[dtype] if self.logits is None else self.logits


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockDrift:
    """One prefill on every rank at once: predicted for one rank alone, and measured.

    Between a calibration and a run clock rates and other load change, and ranks that compute side by side share caches
    and power. Predictions are not changed; their error is also given with every kernel scaled by this speed factor.
    """

    num_tokens: int
    predicted_s: float
    samples_s: tuple[float, ...]  # per round, the mean of the ranks

    @property
    def measured_s(self) -> float:
        """Median."""
        return median(self.samples_s)

    @property
    def speed(self) -> float:
        """Speed factor; below 1: slower than during the calibration."""
        return self.predicted_s / self.measured_s

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return fields_to_json(self, "num_tokens", "predicted_s", "measured_s", "speed", "samples_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCandidate:
    """One way to run the prefill, predicted and measured."""

    prediction: StrategyPrediction  # its strategy is the candidate's name, such as "kvr-s #2"
    drift_corrected_s: float | None  # predicted, corrected for clock drift; None: drift was not measured
    samples_s: tuple[float, ...]  # measured TTFTs, by round; under virtual ranks composed of measured parts
    logits_error: float | None  # largest difference from a single process's; None: not compared
    logits_scale: float | None  # largest logit, by magnitude
    predicted: Timeline = field(repr=False, compare=False)
    measured: Timeline | None = field(repr=False, compare=False)  # of one more prefill

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
        """Measured TTFT."""
        return median(self.samples_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range of the measured TTFTs."""
        return interquartile_range(self.samples_s)

    @property
    def rel_error(self) -> float:
        """Above 0: predicted too long."""
        return self.predicted_s / self.median_s - 1

    @property
    def rel_error_after_drift(self) -> float | None:
        """The error after correction for clock drift."""
        return None if self.drift_corrected_s is None else self.drift_corrected_s / self.median_s - 1

    def differs_from(self, other: MeasuredCandidate) -> bool:
        """Whether two candidates were measured to differ significantly: by more than both interquartile ranges."""
        if min(len(self.samples_s), len(other.samples_s)) < LEAST_SAMPLES:
            return False
        return abs(self.median_s - other.median_s) > self.iqr_s + other.iqr_s

    def differences(self) -> Mapping[str, float] | None:
        """Return measured minus predicted seconds of each part, on the ranks with the first token."""
        if self.measured is None:
            return None
        predicted, measured = (seconds_by_part(one, first_token_rank(one)) for one in (self.predicted, self.measured))
        return {part: measured[part] - predicted[part] for part in PARTS}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "strategy": self.strategy,
            "partition": list(self.partition),
            **stages_to_json(self.partition, self.prediction.layers),
            "predicted_ttft_s": self.predicted_s,
            "predicted_low_s": self.prediction.ttft_low_s,
            "predicted_high_s": self.prediction.ttft_high_s,
            "measured_ttft_s": self.median_s,
            "measured_iqr_s": self.iqr_s,
            "rel_error": self.rel_error,
            "rel_error_at_pace": self.rel_error_after_drift,
            "samples_s": list(self.samples_s),
            "measured_minus_predicted_s": self.differences(),
            "logit_error": self.logits_error,
        }


def seconds_by_part(timeline: Timeline, rank: int) -> dict[str, float]:
    """Return one rank's seconds by part; time before its last span ends that no span covers is waiting.

    products: matrix products with what is around them. attention: with the merging of partial results and what an
    exchange packs and unpacks. cache: K and V on their way into it. ends: embedding, head and the rest.
    exchange: sends, receives and collectives that hold the rank. waiting: the host, and what has no other name.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    end_s = 0.0
    for span in timeline.spans:
        if span.rank == rank and span.kind != "transfer":
            seconds[_part_of(span)] += span.duration_s
            end_s = max(end_s, span.end_s)
    seconds["waiting"] += max(0.0, end_s - sum(seconds.values()))
    return seconds


def _part_of(span: Span) -> str:
    if span.kind == "compute":
        return _PART_OF_OP.get(span.op, "ends")
    return "waiting" if span.op == "stall" or span.name == "host" else "exchange"


def first_token_rank(timeline: Timeline) -> int:
    """Return the rank that has the first token: the one that runs the head."""
    heads = [span.rank for span in timeline.spans if span.op == "head"]
    return heads[-1] if heads else timeline.num_ranks - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """Pairs of candidates whose measured TTFTs differ significantly, and those predicted in that order.

    All other pairs are ties, and so is every pair with fewer than LEAST_SAMPLES samples.
    """

    significant: tuple[tuple[str, str], ...]  # the faster one by measurement first
    wrong: tuple[tuple[str, str], ...]  # of these, predicted in the other order, or equal
    num_pairs: int

    @classmethod
    def of(cls, candidates: Sequence[MeasuredCandidate]) -> Orders:
        """Compare all pairs."""
        pairs = list(combinations(sorted(candidates, key=lambda one: one.median_s), 2))
        differing = [pair for pair in pairs if pair[0].differs_from(pair[1])]
        wrong = [(fast, slow) for fast, slow in differing if fast.predicted_s >= slow.predicted_s]
        return cls(
            significant=tuple((fast.strategy, slow.strategy) for fast, slow in differing),
            wrong=tuple((fast.strategy, slow.strategy) for fast, slow in wrong),
            num_pairs=len(pairs),
        )

    @property
    def right(self) -> int:
        """Significant pairs that were predicted in the measured order."""
        return len(self.significant) - len(self.wrong)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        significant, wrong = len(self.significant), [list(pair) for pair in self.wrong]
        return {"pairs": self.num_pairs, "significant": significant, "right": self.right, "wrong": wrong}


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmation(Answer):
    """The answer to `kvrsim confirm`."""

    view = "planner.confirm.views"

    question: Question
    mode: Mode
    candidates: tuple[MeasuredCandidate, ...]
    chosen: int  # the plan's choice among them
    tsp: str  # which all-gather, and what attention covers
    measured: tuple[str, ...]  # which parts of the "measured" TTFTs were measured
    modelled: tuple[str, ...]  # and which were modelled
    conditions: Mapping[str, str]  # machine, libraries, repetitions
    drift: ClockDrift | None  # of the ranks' clocks since the calibration; None: not measured
    targets: Targets
    warnings: tuple[str, ...]

    @property
    def choice(self) -> MeasuredCandidate:
        """The candidate that the plan predicts to be the fastest."""
        return self.candidates[self.chosen]

    @property
    def best(self) -> MeasuredCandidate:
        """The candidate that was measured to be the fastest."""
        return min(self.candidates, key=lambda one: one.median_s)

    @property
    def regret(self) -> float:
        """How much slower the plan's choice is than the fastest candidate, as a share of the latter's TTFT."""
        return self.choice.median_s / self.best.median_s - 1

    @property
    def regret_spread(self) -> float:
        """Standard error of the regret, of differences within rounds, so that clock drift cancels out."""
        pairs = zip(self.choice.samples_s, self.best.samples_s, strict=True)
        return median_error([choice / best - 1 for choice, best in pairs])

    @property
    def regret_beyond_spread(self) -> bool:
        """Whether the regret is significant."""
        return self.regret > _SIGNIFICANT * self.regret_spread

    @property
    def orders(self) -> Orders:
        """Which candidates were measured to differ, and whether predictions order them so."""
        return Orders.of(self.candidates)

    def places(self) -> list[dict[str, Any]]:
        """Return each candidate's places by prediction and by measurement (equal ones share one), and its ties."""
        predicted, measured = (
            [1 + sum(other < one for other in seconds) for one in seconds]
            for seconds in ([one.predicted_s for one in self.candidates], [one.median_s for one in self.candidates])
        )
        ties = (
            [other.strategy for other in self.candidates if other is not one and not one.differs_from(other)]
            for one in self.candidates
        )
        return [
            {"predicted_rank": predicted_rank, "measured_rank": measured_rank, "tied_with": tied}
            for predicted_rank, measured_rank, tied in zip(predicted, measured, ties, strict=True)
        ]

    @property
    def median_error(self) -> float:
        """Median absolute relative error of the predictions."""
        return median(abs(one.rel_error) for one in self.candidates)

    @property
    def median_error_after_drift(self) -> float | None:
        """The same after correction for clock drift; None where drift was not measured."""
        errors = [abs(one.rel_error_after_drift) for one in self.candidates if one.rel_error_after_drift is not None]
        return median(errors) if errors else None

    @property
    def max_logit_error(self) -> float | None:
        """The largest difference of any candidate's logits from a single process's; None: not compared."""
        errors = [one.logits_error for one in self.candidates if one.logits_error is not None]
        return float(np.max(errors)) if errors else None  # which keeps NaN, unlike max()

    @property
    def reasons(self) -> tuple[str, ...]:
        """One sentence for each target that is not met."""
        targets, reasons = self.targets, []
        if self.regret > targets.regret and self.regret_beyond_spread:
            reasons.append(f"regret {self.regret:.1%} is above {targets.regret:.1%}, and significant")
        if self.median_error > targets.error:
            by = f"{self.median_error:.1%} (median), above {targets.error:.1%}"
            reasons.append(f"predictions are off by {by}{self._drift_note}")
        limit = targets.logits_for(self.question.dtype)
        for one in self.candidates:
            if one.logits_error is None or one.logits_scale is None:
                continue
            if not one.logits_error <= limit * max(one.logits_scale, 1e-30):  # NaN fails, too
                by = f"{one.logits_error:.2g}, largest logit {one.logits_scale:.2g}"
                reasons.append(f"{one.strategy}: logits differ from one process's by {by}, above {limit:.0e} of it")
        return tuple(reasons)

    @property
    def _drift_note(self) -> str:
        """Explain an error above its target by clock drift, where that alone suffices."""
        error = self.median_error_after_drift
        if self.drift is None or error is None or error > self.targets.error:
            return ""
        return (
            f"; {error:.1%} after correction for clock drift (the machine now runs at {self.drift.speed:.2f} of its"
            " speed during the calibration): calibrate again"
        )

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
            "candidates": [
                one.to_dict() | {"chosen": one is self.choice} | places
                for one, places in zip(self.candidates, self.places(), strict=True)
            ],
            "orders": self.orders.to_dict(),
            "best_measured": {"strategy": self.best.strategy, "partition": list(self.best.partition)},
            **fields_to_json(self, "regret", "regret_spread", "regret_beyond_spread", "median_error"),
            "median_error_at_pace": self.median_error_after_drift,
            "pace": None if self.drift is None else self.drift.to_dict(),
            **fields_to_json(self, "max_logit_error", "ok", "reasons"),
            "targets": {
                "regret": self.targets.regret,
                "median_error": self.targets.error,
                "logits": self.targets.logits_for(self.question.dtype),
            },
            **fields_to_json(self, "tsp", "measured", "modelled", "conditions", "warnings"),
        }

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per candidate."""
        import pandas

        return pandas.DataFrame([one.to_dict() for one in self.candidates])
