"""Limits that a user states for predictions, and the answer whether they are met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from kvrsim.arguments import Arguments, Help, Share, written
from kvrsim.errors import InputError
from kvrsim.io.annotations import Range
from kvrsim.io.schema import fields_to_json

if TYPE_CHECKING:
    from calibrate.prefills.verdict import AccuracyLimits, LimitCheck

NOT_MET = 1  # exit code if a limit is not met


class LimitArgs(Arguments):
    """Limits that the predictions must meet."""

    def __post_init__(self) -> None:
        for name in ("max_median_error", "min_coverage", "max_error"):
            share = getattr(self, name)
            if share is not None and share > 1:
                raise InputError(name, share, "a share of at most 100%, such as 10%")

    max_median_error: Annotated[
        Share, Help("Fail if the median absolute error is larger.", metavar="SHARE", section="Target")
    ] = written("20%")
    min_coverage: Annotated[
        Share,
        Help("Fail if a smaller share of the rows lies inside the 80 % intervals.", metavar="SHARE", section="Target"),
    ] = written("70%")
    max_error: Annotated[
        Share | None,
        Help("Fail if the absolute error of one row is larger. Default: no limit.", metavar="SHARE", section="Target"),
    ] = None
    max_interval_score: Annotated[
        float | None,
        Range(above=0.0, most=1000.0),
        Help(
            "Fail if the mean of width + 10 × miss of the intervals of log TTFT is larger. Default: no limit.",
            metavar="SCORE",
            section="Target",
        ),
    ] = None

    @property
    def wanted(self) -> AccuracyLimits:
        """The limits as values."""
        from calibrate.prefills.verdict import AccuracyLimits

        return AccuracyLimits(
            median_error=self.max_median_error,
            largest_error=self.max_error,
            coverage=self.min_coverage,
            interval_score=self.max_interval_score,
        )


def verdict_json(verdict: Sequence[LimitCheck]) -> list[dict[str, Any]]:
    """The limits as plain JSON values."""
    return [fields_to_json(limit) | {"limit": round(limit.limit, 9)} for limit in verdict]


def verdict_line(verdict: Sequence[LimitCheck], num_rows: int) -> str:
    """The sentence that answers: whether the predictions pass, and the values that decide."""
    rows = f"{num_rows} row{'s' * (num_rows > 1)}"
    missed = [limit.text for limit in verdict if not limit.ok]
    met = [limit.text for limit in verdict if limit.ok]
    if not missed:
        return f"Pass: the predictions of {rows} meet every limit: {', '.join(met)}."
    also = f" Met: {', '.join(met)}." if met else ""
    return f"Fail: the predictions of {rows} miss {len(missed)} of {len(verdict)} limits: {', '.join(missed)}.{also}"
