"""Confirmation: predicted and measured TTFTs of a plan's candidates, and whether the targets are met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvrsim.hardware import Cluster, MemoryLimit
from kvrsim.interp import interquartile_range, median_error
from kvrsim.io.schema import fields_to_json
from kvrsim.memory import RankMemory
from kvrsim.results.question import Question
from kvrsim.results.results import stages_to_json
from kvrsim.results.timeline import Timeline
from planner.confirm.drift import ClockDrift
from planner.confirm.orders import Orders, is_order, ranks_of
from planner.confirm.parts import differences

if TYPE_CHECKING:
    import pandas

Mode = Literal["ranks", "virtual"]
_SIGNIFICANT = 2.0  # standard errors, above which a difference of two medians is significant


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Limits that a confirmation has to meet."""

    regret: float = 0.03  # of the choice's TTFT, where it is significant
    error: float = 0.07  # median absolute relative error of the predicted TTFTs
    logits: float | None = None  # largest difference over the largest logit; None: by the dtype

    def logits_for(self, dtype: str) -> float:
        """By default the rounding error of sums in another order."""
        return {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}[dtype] if self.logits is None else self.logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to run the prefill, predicted and measured."""

    strategy: str  # its name; "kvr-s #2" for the second best partition of kvr-s
    partition: tuple[int, ...]  # new tokens a rank, or a pipeline's pieces
    layers: tuple[int, ...] | None = None  # of each stage of a pipeline
    predicted_s: float
    predicted_low_s: float
    predicted_high_s: float
    drift_corrected_s: float | None  # predicted, corrected for clock drift; None: drift was not measured
    samples_s: tuple[float, ...]  # measured TTFTs, by round; under virtual ranks composed of measured parts
    logits_error: float | None  # largest difference from a single process's; None: not compared
    logits_scale: float | None  # largest logit, by magnitude
    predicted: Timeline = field(repr=False, compare=False)
    measured: Timeline | None = field(repr=False, compare=False)  # of one more prefill
    memory: tuple[RankMemory, ...] = ()  # predicted, of each GPU; empty: not worked out

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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "strategy": self.strategy,
            "partition": list(self.partition),
            **stages_to_json(self.partition, self.layers),
            "predicted_ttft_s": self.predicted_s,
            "predicted_low_s": self.predicted_low_s,
            "predicted_high_s": self.predicted_high_s,
            "measured_ttft_s": self.median_s,
            "measured_iqr_s": self.iqr_s,
            "rel_error": self.rel_error,
            "rel_error_at_pace": self.rel_error_after_drift,
            "samples_s": list(self.samples_s),
            "measured_minus_predicted_s": differences(self),
            "logit_error": self.logits_error,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmation:
    """The answer to `kvrsim confirm`."""

    question: Question
    model: str
    profile: str
    cluster: Cluster
    attention: str  # kernel
    dtype: str
    num_gpus: int
    context_len: int
    mode: Mode
    candidates: tuple[Candidate, ...]
    chosen: int  # the plan's choice among them
    tsp: str  # which all-gather, and what attention covers
    measured: tuple[str, ...]  # which parts of the "measured" TTFTs were measured
    modelled: tuple[str, ...]  # and which were modelled
    conditions: Mapping[str, str]  # machine, libraries, repetitions
    drift: ClockDrift | None  # of the ranks' clocks since the calibration; None: not measured
    targets: Targets
    warnings: tuple[str, ...]
    memory_limit: MemoryLimit | None = None  # of each GPU, beside the candidates' memory

    @property
    def choice(self) -> Candidate:
        """The candidate that the plan predicts to be the fastest."""
        return self.candidates[self.chosen]

    @property
    def best(self) -> Candidate:
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
        """Of each candidate: its places by prediction and by measurement, and those that it ties with."""
        predicted = ranks_of([one.predicted_s for one in self.candidates])
        measured = ranks_of([one.median_s for one in self.candidates])
        return [
            {
                "predicted_rank": predicted[index],
                "measured_rank": measured[index],
                "tied_with": [
                    other.strategy for other in self.candidates if other is not one and not is_order(one, other)
                ],
            }
            for index, one in enumerate(self.candidates)
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
        found = [one.logits_error for one in self.candidates if one.logits_error is not None]
        # Unlike max(), np.max() keeps NaN.
        return float(np.max(found)) if found else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """One sentence for each target that is not met."""
        targets, found = self.targets, []
        if self.regret > targets.regret and self.regret_beyond_spread:
            found.append(f"regret {self.regret:.1%} is above {targets.regret:.1%}, and significant")
        if self.median_error > targets.error:
            found.append(
                f"predictions are off by {self.median_error:.1%} (median), above {targets.error:.1%}{self._drift_note}"
            )
        limit = targets.logits_for(self.dtype)
        for one in self.candidates:
            if one.logits_error is None or one.logits_scale is None:
                continue
            if not one.logits_error <= limit * max(one.logits_scale, 1e-30):  # NaN fails, too
                shown = f"{one.logits_error:.2g}, largest logit {one.logits_scale:.2g}"
                found.append(f"{one.strategy}: logits differ from one process's by {shown}, above {limit:.0e} of it")
        return tuple(found)

    @property
    def _drift_note(self) -> str:
        """Says where clock drift alone explains that the error is above its target."""
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
        """Plain JSON values."""
        return {
            **self.question.header(),
            **fields_to_json(self, "model", "profile", "cluster", "attention", "dtype"),
            **fields_to_json(self, "num_gpus", "context_len", "mode"),
            "candidates": [
                one.to_dict() | {"chosen": one is self.choice} | places
                for one, places in zip(self.candidates, self.places(), strict=True)
            ],
            "orders": self.orders.to_dict(),
            "best_measured": {"strategy": self.best.strategy, "partition": list(self.best.partition)},
            **fields_to_json(self, "regret", "regret_spread", "regret_beyond_spread", "median_error"),
            "median_error_at_pace": self.median_error_after_drift,
            "pace": None if self.drift is None else self.drift.to_dict(),
            "max_logit_error": self.max_logit_error,
            "ok": self.ok,
            "reasons": list(self.reasons),
            "targets": {
                "regret": self.targets.regret,
                "median_error": self.targets.error,
                "logits": self.targets.logits_for(self.dtype),
            },
            **fields_to_json(self, "tsp", "measured", "modelled", "conditions", "warnings"),
        }

    def to_frame(self) -> pandas.DataFrame:
        """One row a candidate."""
        import pandas

        return pandas.DataFrame([one.to_dict() for one in self.candidates])
