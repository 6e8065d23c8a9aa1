"""PrefillCheck: how far a profile and its engine are from measured prefills, without fitting anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from calibrate.prefills.cases import PrefillCase
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy


class Span(Protocol):
    """The two ends of a prediction interval, seconds."""

    @property
    def low_s(self) -> float: ...

    @property
    def high_s(self) -> float: ...


# The 80 % interval of a TTFT: planner.uncertainty.interval.interval, which this package does not import.
IntervalOf = Callable[[Scenario, Strategy, Partition, float], Span]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRow:
    """One measured prefill beside its prediction."""

    case: str  # in words
    measured_s: float
    predicted_s: float
    low_s: float  # of the 80 % prediction interval
    high_s: float

    @property
    def rel_error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def inside(self) -> bool:
        """Whether the interval holds the measurement."""
        return self.low_s <= self.measured_s <= self.high_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "case": self.case,
            "measured_s": self.measured_s,
            "predicted_s": self.predicted_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "rel_error": self.rel_error,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCheck:
    """All rows, and their errors together."""

    rows: tuple[CheckedRow, ...]

    @property
    def median_ape(self) -> float:
        """Median of the absolute relative errors, as a fraction."""
        return float(np.median(np.abs([row.rel_error for row in self.rows])))

    @property
    def mape(self) -> float:
        """Mean of the absolute relative errors."""
        return float(np.mean(np.abs([row.rel_error for row in self.rows])))

    @property
    def coverage(self) -> float:
        """Share of the measurements that their intervals hold."""
        return float(np.mean([row.inside for row in self.rows]))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "n": len(self.rows),
            "median_ape": self.median_ape,
            "mape": self.mape,
            "coverage": self.coverage,
        }


def check_prefills(
    cases: Sequence[PrefillCase], interval_of: IntervalOf, on_progress: Callable[[str], None] | None = None
) -> PrefillCheck:
    """Predict each case, with its 80 % interval."""
    rows = []
    for number, case in enumerate(cases, start=1):
        if on_progress is not None:
            on_progress(f"predicting row {number} of {len(cases)}")
        predicted_s = case.ttft_s()
        span = interval_of(case.scenario, case.strategy, case.partition, predicted_s)
        rows.append(
            CheckedRow(
                case=case.row.case,
                measured_s=case.row.ttft_s,
                predicted_s=predicted_s,
                low_s=span.low_s,
                high_s=span.high_s,
            )
        )
    return PrefillCheck(rows=tuple(rows))
