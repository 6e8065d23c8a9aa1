"""Campaign: the points of a bench, measured round-robin until their medians are precise or the time budget is used up.

Points are measured round-robin so that clock drift affects all of them equally. A journal next to the CSV keeps each
sample, so that an interrupted campaign can resume.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Protocol

from calibrate.data import Measurement, write_measurements
from kvrsim.errors import KvrsimError
from kvrsim.interp import median_error
from kvrsim.io.journal import Journal
from kvrsim.progress import OnProgress
from kvrsim.runtime.gpu_state import GpuLog
from kvrsim.runtime.host import busy_note

LEAST_SAMPLES = 3  # minimum number of samples per point
_MOST_SAMPLES = 25  # maximum number of samples per point
_ERROR = 0.01  # accepted relative standard error of a median
_MOST_OF_BUDGET = 0.2  # share of the budget that one point may take

Point = Any  # a hashable value; its text names the point in messages
Seconds = Mapping[str, float]  # seconds of one repetition by the name of the timed part


class SkippedPoint(KvrsimError):  # noqa: N818 - a signal of the bench, not an error
    """A point cannot be measured here; the message says why."""


class Bench(Protocol):
    """An object that measures one point after the other."""

    def points(self) -> Sequence[Point]:
        """Return the points, most informative first."""

    def expected_s(self, point: Point) -> float:
        """Return the estimated seconds of one sample."""

    def sample(self, point: Point) -> Seconds:
        """Return one repetition: seconds by name of the timed part. Raises SkippedPoint if memory is too small."""

    def rows(self, samples: Mapping[Point, Sequence[Seconds]]) -> list[Measurement]:
        """Return rows with medians and spreads."""

    def close(self) -> None:
        """Release the memory, and end the processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """What is measured, and the file for the rows."""

    title: str  # title in messages
    build: Callable[[], Bench]
    about: Mapping[str, Any]  # command, versions, machine and date, with which the CSV and the journal begin
    origin: Callable[[list[Measurement]], Mapping[str, Any]]  # the rest of the rows' origin for the CSV
    output: Path  # path of the CSV
    gpus: Sequence[int] = ()  # CUDA's numbers of the timed GPUs; their clock and power are logged

    def journal(self) -> Journal:
        """Journal of this campaign's samples; the caller that uses the CSV removes the journal."""
        about = {"campaign": self.title, **self.about}
        about.pop("date", None)
        return Journal(Path(f"{self.output}.journal"), about)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a campaign."""

    rows: list[Measurement]
    samples: int  # total number of samples
    skipped: Mapping[str, str]  # points that were not measured, and why
    device: Mapping[str, Any]  # clock, power and throttling of the GPUs, and other processes; empty if unknown
    notes: tuple[str, ...]  # notes for the user, such as "other processes use the machine"

    @property
    def median_spread(self) -> float | None:
        """Median over all rows of interquartile range / median of the repeats."""
        spreads = [row.spread_s / row.median_s for row in self.rows if row.spread_s is not None]
        if not spreads:
            return None
        return round(median(spreads), 4)


def within_budget(bench: Bench, budget_s: float) -> list[Point]:
    """Return the points whose LEAST_SAMPLES fit into the budget, most informative first."""
    points: list[Point] = []
    total_s = 0.0
    for point in bench.points():
        cost_s = (LEAST_SAMPLES + 1) * bench.expected_s(point)  # the first run warms up
        if not points or (cost_s <= _MOST_OF_BUDGET * budget_s and total_s + cost_s <= budget_s):
            points.append(point)
            total_s += cost_s
    return points


def measure(campaign: Campaign, budget_s: float, on_progress: OnProgress | None = None) -> Outcome:
    """Measure every point LEAST_SAMPLES times, then points with imprecise medians until the budget is used up.

    Writes the CSV. on_progress: called with the seconds done, the budget, and the name of the point. Samples and
    seconds of an interrupted campaign count. The journal stays until the caller removes it.
    """
    notes = busy_note()
    log = GpuLog(campaign.gpus)  # before the bench starts processes on the GPUs
    with campaign.journal() as journal, contextlib.closing(campaign.build()) as bench, log:
        points = within_budget(bench, budget_s)
        skipped: dict[str, str] = {}
        for point in bench.points():
            if point not in points:
                skipped[str(point)] = f"would not fit into {budget_s:.0f} s"
        samples: dict[Point, list[Seconds]] = {point: [] for point in points}
        point_named = {str(point): point for point in points}
        earlier = [result for result in journal.results if result["point"] in point_named]
        for result in earlier:
            samples[point_named[result["point"]]].append(result["seconds"])
        began_s = monotonic()
        if earlier:
            notes = (*notes, f"resumed from {len(earlier)} samples of an interrupted run")
            began_s -= earlier[-1]["elapsed_s"]

        def visit(point: Point) -> None:
            if on_progress is not None:
                total = sum(map(len, samples.values()))
                text = f"{campaign.title}: {total} samples of {len(samples)} points; {point}; seconds"
                on_progress(min(monotonic() - began_s, budget_s), budget_s, text)
            try:
                samples[point].append(bench.sample(point))
                line = {"point": str(point), "seconds": samples[point][-1], "elapsed_s": monotonic() - began_s}
                journal.append(line)
            except SkippedPoint as reason:
                del samples[point]
                skipped[str(point)] = str(reason)

        for repetition in range(LEAST_SAMPLES):
            for point in [point for point, times in samples.items() if len(times) <= repetition]:
                visit(point)
        imprecise = deque(point for point, times in samples.items() if not _is_precise(times))
        while imprecise and monotonic() - began_s < budget_s:
            point = imprecise.popleft()
            visit(point)
            if point in samples and not _is_precise(samples[point]):
                imprecise.append(point)  # its next turn is after those of the others
        rows = bench.rows(samples)
    notes = (*notes, *log.notes())
    device = dict(log.state)
    state = {"device_state": device} if device else {}
    write_measurements(campaign.output, rows, origin={**campaign.about, **campaign.origin(rows), **state})
    count = sum(map(len, samples.values()))
    return Outcome(rows=rows, samples=count, skipped=skipped, device=device, notes=notes)


def _is_precise(samples: Sequence[Seconds]) -> bool:
    totals = [sum(seconds.values()) for seconds in samples]
    return len(totals) >= _MOST_SAMPLES or median_error(totals) <= _ERROR * median(totals)
