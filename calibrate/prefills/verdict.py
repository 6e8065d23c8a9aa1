"""AccuracyLimits: what a user, or the project's gate, requires of predictions, and which limits they meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from calibrate.prefills.fit import PrefillCheck

LimitName = Literal["median_error", "largest_error", "coverage", "interval_score"]
_WORDS: dict[LimitName, str] = {
    "median_error": "median error {}",
    "largest_error": "largest error {}",
    "coverage": "{} inside the 80 % interval",
    "interval_score": "interval score {}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitCheck:
    """One limit, and whether the predictions meet it."""

    name: LimitName
    limit: float  # a share, or an interval score
    value: float  # the value of the predictions
    ok: bool

    @property
    def text(self) -> str:
        """The value and the limit: "median error 4.1 % (at most 20 %)"."""
        bound = "at least" if self.name == "coverage" else "at most"
        return f"{_WORDS[self.name].format(self._format(self.value))} ({bound} {self._format(self.limit)})"

    def _format(self, value: float) -> str:
        if self.name == "interval_score":
            return f"{value:.2f}"
        return f"{100 * value:.3g} %"


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyLimits:
    """Limits of the errors of predicted prefills; None: no limit."""

    median_error: float | None = None  # largest median of the absolute relative errors
    largest_error: float | None = None  # largest absolute relative error
    coverage: float | None = None  # least share of the measurements inside their 80 % intervals
    interval_score: float | None = None  # largest mean interval score of log TTFT

    def check(self, predictions: PrefillCheck) -> tuple[LimitCheck, ...]:
        """Each limit, with the value of the predictions."""
        sizes = np.abs([row.rel_error for row in predictions.rows])
        values: dict[LimitName, tuple[float | None, float]] = {
            "median_error": (self.median_error, float(np.median(sizes))),
            "largest_error": (self.largest_error, float(np.max(sizes))),
            "coverage": (self.coverage, predictions.coverage),
            "interval_score": (self.interval_score, predictions.interval_score),
        }
        checks = []
        for name, (limit, value) in values.items():
            if limit is None:
                continue
            is_met = value >= limit if name == "coverage" else value <= limit
            checks.append(LimitCheck(name=name, limit=limit, value=value, ok=is_met))
        return tuple(checks)
