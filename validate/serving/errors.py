"""How far predictions under an engine are from published prefills, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrsim.engine.engine import SHORT_TOKENS, Engine
from planner.uncertainty.interval import interval
from validate.serving.rows import ServingRow, case_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingError:
    """One prefill beside its prediction."""

    row: ServingRow
    predicted_s: float
    low_s: float  # of the 80 % prediction interval
    high_s: float

    @property
    def rel_error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.row.ttft_s - 1

    @property
    def inside(self) -> bool:
        """Whether the interval holds the measurement."""
        return self.low_s <= self.row.ttft_s <= self.high_s

    @property
    def is_short(self) -> bool:
        """Whether most of the time may be what the engine adds."""
        return self.row.tokens < SHORT_TOKENS


def errors_of(rows: Sequence[ServingRow], engine: Engine) -> list[ServingError]:
    """Every row predicted under one engine."""
    found = []
    for row in rows:
        case = case_of(row, engine)
        predicted_s = case.ttft_s()
        sure = interval(case.scenario, case.strategy, case.partition, predicted_s)
        found.append(ServingError(row=row, predicted_s=predicted_s, low_s=sure.low_s, high_s=sure.high_s))
    return found
