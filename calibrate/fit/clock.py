"""fit_clock: how far and how fast the clock falls under load, from products that were timed in loops.

A collector runs a product again and again without a pause, so a row of L seconds was measured after `warmups` x L
seconds under load and during `repeats` x L more. Short products are timed at the burst clock, long ones at the
sustained one; where the change lies between them is the time constant. at_burst turns measured seconds into those of
the burst clock, as a profile's rates are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibrate.data.measurement import Measurement
from calibrate.fit.solver import HALF, Parameter, Some, column, solve, sources_of
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.profile import Clock
from kvrsim.program import Array

# Products that fill a GPU: of others the rate depends on their shape more than on the clock.
_LEAST_TOKENS, _LEAST_FEATURES = 1024, 2048
_LEAST_ROWS, _MOST_ROWS = 200, 3000
_LONG_S, _SHORT_S = 0.3, 0.03  # under load; without rows on both sides nothing can be said
_NO_FALL = 0.96  # share, from which on the fall is not told from the spread of shapes
_LONGEST_S = 1.0  # time constant; a fall that seems slower is one over sizes
_TURNS = 12  # of the iteration that inverts a loop's mean


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedClock:
    """A clock, and what it was fitted to."""

    clock: Clock
    source: str
    num_rows: int

    def describe(self) -> str:
        """One line for a profile's provenance."""
        share, tau = self.clock.sustained_share, self.clock.time_constant_s
        of = f"{self.num_rows} products of at least {_LEAST_TOKENS} tokens and {_LEAST_FEATURES} features"
        return f"{share:.1%} of the burst rate after long load, time constant {1e3 * tau:.0f} ms; {of}: {self.source}"


def fit_clock(rows: Sequence[Measurement], gpu: GpuSpec) -> FittedClock | None:
    """From half-precision products whose loops are known; None without enough of them, or where no fall is seen.

    Rows of several sources may have loops of different length, which tells a fall over time from one over sizes; each
    source has a rate of its own.
    """
    found = [row for row in rows if _fills(row) and row.warmups is not None and row.repeats is not None]
    loaded_s = np.array([(row.warmups + row.repeats) * row.expected_s for row in found])  # type: ignore[operator]
    if len(found) < _LEAST_ROWS or loaded_s.max() < _LONG_S or loaded_s.min() > _SHORT_S:
        return None
    order = np.argsort(loaded_s)[:: max(1, len(found) // _MOST_ROWS)]
    found = [found[index] for index in order]
    flops = 2.0 * column(found, "tokens") * column(found, "in_features") * column(found, "out_features")
    loops = _Loops.of(found)
    peak = max(flops for _, flops in gpu.peak_flops)
    sources = sorted({row.source for row in found})
    names = np.array([f"rate_{sources.index(row.source)}" for row in found])

    def predict(values: Mapping[str, float], some: Some) -> Array:
        clock = Clock(sustained_share=values["sustained_share"], time_constant_s=values["time_constant_s"])
        rates = np.array([values[name] for name in names[some]])
        return loops.take(some).mean_s(clock, flops[some] / rates)

    solved = solve(
        (
            Parameter(name="sustained_share", start=0.88, low=0.3, high=1.0),
            Parameter(name="time_constant_s", start=0.1, low=2e-3, high=_LONGEST_S),
            *(Parameter(name=name, start=0.4 * peak, low=1e-2 * peak, high=peak) for name in sorted(set(names))),
        ),
        predict,
        column(found, "expected_s"),
        starts=4,
    )
    if solved["sustained_share"] > _NO_FALL or solved["time_constant_s"] >= _LONGEST_S:
        return None
    clock = Clock(sustained_share=solved["sustained_share"], time_constant_s=solved["time_constant_s"])
    return FittedClock(clock=clock, source=sources_of(found), num_rows=len(found))


def at_burst(rows: Sequence[Measurement], clock: Clock | None) -> list[Measurement]:
    """The rows with their seconds at the burst clock; those whose loop is not known stay."""
    known = [index for index, row in enumerate(rows) if row.warmups is not None and row.repeats is not None]
    if clock is None or not known:
        return list(rows)
    some = [rows[index] for index in known]
    measured_s = column(some, "expected_s")
    burst_s = burst_seconds(measured_s, column(some, "warmups"), column(some, "repeats"), clock)
    found = list(rows)
    for index, factor in zip(known, (burst_s / measured_s).tolist(), strict=True):
        row = found[index]
        mean_s = None if row.mean_s is None else row.mean_s * factor
        found[index] = replace(row, median_s=row.median_s * factor, mean_s=mean_s)
    return found


def burst_seconds(measured_s: Array, warmups: Array, repeats: Array, clock: Clock | None) -> Array:
    """Seconds at the burst clock of what loops took that ran so often before they were timed, and meanwhile."""
    if clock is None:
        return measured_s
    loops, burst_s = _Loops(warmups=warmups, repeats=repeats), measured_s
    for _ in range(_TURNS):
        burst_s = burst_s * measured_s / loops.mean_s(clock, burst_s)
    return burst_s


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Loops:
    """How often operations ran before and while they were timed."""

    warmups: Array
    repeats: Array

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> _Loops:
        return cls(warmups=column(rows, "warmups"), repeats=column(rows, "repeats"))

    def take(self, some: Some) -> _Loops:
        return _Loops(warmups=self.warmups[some], repeats=self.repeats[some])

    def mean_s(self, clock: Clock, busy_s: Array) -> Array:
        """What a loop says one operation takes that takes `busy_s` at the burst clock."""
        before_s = clock.stretched_s(self.warmups * busy_s)
        return (clock.stretched_s((self.warmups + self.repeats) * busy_s) - before_s) / self.repeats


def _fills(row: Measurement) -> bool:
    return (
        row.operation == "gemm"
        and row.dtype in HALF
        and (row.tokens or 0) >= _LEAST_TOKENS
        and min(row.in_features or 0, row.out_features or 0) >= _LEAST_FEATURES
    )
