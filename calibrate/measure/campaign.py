"""Campaign: the points of a bench, measured round-robin until their medians are precise or the time budget is used up.

Round-robin, so that clock drift affects all points equally. Every sample is written to a journal at once, so that a
killed campaign resumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from calibrate.data import Measurement, write_measurements
from calibrate.measure.device import CpuLoad, Reading, faults_of, summary
from kvrsim.arguments import OnProgress
from kvrsim.errors import KvrsimError
from kvrsim.interp import median_error
from kvrsim.io.journal import Journal
from kvrsim.io.schema import JsonObject, fields_to_json, read
from kvrsim.runtime.host import busy_cores

LEAST_SAMPLES = 3  # of a point
_LONG_ENOUGH_S = 0.1  # of a visit: the kernel's CPU accounting is too coarse for shorter ones
_MOST_BUSY_SHARE = 0.5  # of the samples; above this the campaign is refused
_ENOUGH_TO_JUDGE = 8  # samples of this run
_MOST_OF_BUDGET = 0.2  # that a point may take
_FORMAT = "kvrsim journal 1"

Seconds = Mapping[str, float]  # of one repetition, by what was timed


class BusyError(KvrsimError):
    """Other processes use the machine, or its clock is limited, so that its times are not representative."""


class Skipped(KvrsimError):  # noqa: N818 - a signal of the bench, not an error
    """A point cannot be measured here; the message says why."""


class Bench(Protocol):
    """Something that is timed point by point."""

    def points(self) -> Sequence[str]:
        """Keys of the points, most informative first; the same in every run."""

    def expected_s(self, point: str) -> float:
        """Estimated seconds of one sample."""

    def sample(self, point: str) -> Seconds:
        """One repetition: seconds by name of the timed part. Raises Skipped where the point does not fit."""

    def rows(self, samples: Mapping[str, Sequence[Seconds]]) -> list[Measurement]:
        """Medians and spreads."""

    def conditions(self) -> Mapping[str, Any] | None:
        """The GPU's clock, power and throttle reasons, read while the last sample was taken; None: not known."""

    def pids(self) -> Sequence[int]:
        """Processes that measure, besides this one."""

    def close(self) -> None:
        """Release memory and processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """When a campaign stops."""

    budget_s: float  # for all points together; every point that is not dropped gets LEAST_SAMPLES
    most_samples: int = 25  # of a point
    error: float = 0.01  # relative standard error of a median that is good enough
    even_if_busy: bool = False  # count samples that were taken while others used the machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a campaign."""

    rows: list[Measurement]
    skipped: Mapping[str, str]  # points that were not measured, and why
    samples: int  # taken in all
    busy: int  # of these, not counted: other processes used the machine, or heat or a power brake slowed the GPU
    load_known: bool  # whether the load of other processes is known
    device: Mapping[str, Any]  # clock, power and throttling of the GPU over all samples; empty: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Plan of a campaign, before it begins."""

    points: tuple[str, ...]  # that are to be measured
    dropped: tuple[str, ...]  # would exceed the budget
    least_s: float  # estimate for LEAST_SAMPLES of each point


def estimate(bench: Bench, policy: Policy) -> Estimate:
    """The points whose LEAST_SAMPLES fit into the budget, most informative first."""
    points: list[str] = []
    total_s = 0.0
    for point in bench.points():
        cost_s = (LEAST_SAMPLES + 1) * bench.expected_s(point)  # the first warms up
        if not points or (cost_s <= _MOST_OF_BUDGET * policy.budget_s and total_s + cost_s <= policy.budget_s):
            points.append(point)
            total_s += cost_s
    dropped = tuple(point for point in bench.points() if point not in points)
    return Estimate(points=tuple(points), dropped=dropped, least_s=total_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One repetition of one point."""

    point: str
    seconds: Seconds
    busy_cores: float | None  # cores that other processes used; None: not known
    device: Mapping[str, Any] | None = None  # clock and power of the GPU, see DeviceWatch; None: not known

    @property
    def is_busy(self) -> bool:
        """Whether other processes used the machine, or heat or a power brake slowed the GPU."""
        return bool(faults_of(self.device)) or (self.busy_cores is not None and self.busy_cores > busy_cores())


@dataclass(kw_only=True, slots=True)
class CampaignJournal:
    """Points and samples of a campaign; each sample is on disk before the next is taken."""

    lines: Journal
    samples: list[Sample] = field(default_factory=list)
    points: tuple[str, ...] | None = None  # of the campaign; None: not decided yet
    finished: bool = False  # whether the campaign is complete
    resumed: int = 0  # samples of an earlier run

    @classmethod
    def open(cls, path: Path, about: Mapping[str, Any], argument: str) -> CampaignJournal:
        """A new journal, or that of an interrupted campaign, without an incomplete last line.

        Raises InputError naming `argument` where the file holds something else or other settings, or another
        process uses it.
        """
        journal = cls(lines=Journal(path=path, form=_FORMAT, about=about, work="calibration", argument=argument))
        for line in journal.lines.resume(_decoded):
            if isinstance(line, Sample):
                journal.samples.append(line)
            elif line is None:
                journal.finished = True
            else:
                journal.points = line
        journal.resumed = len(journal.samples)
        return journal

    def add(self, sample: Sample) -> None:
        """Write a sample; it is on disk when this returns."""
        self.samples.append(sample)
        line = {"point": sample.point, "s": dict(sample.seconds), "busy": sample.busy_cores}
        self.lines.append(line if sample.device is None else line | {"device": dict(sample.device)})

    def plan(self, points: Sequence[str]) -> None:
        """Write the points: a resumed campaign measures the same ones."""
        self.points = tuple(points)
        self.lines.append({"points": list(points)})

    def finish(self) -> None:
        """Mark the campaign as complete: the fit can be repeated without measuring again."""
        self.finished = True
        self.lines.append({"finished": True})

    def of(self, point: str) -> list[Sample]:
        """The samples of one point."""
        return [sample for sample in self.samples if sample.point == point]

    def remove(self) -> None:
        """Delete the file, once its content is in the CSV."""
        self.lines.remove()

    def close(self) -> None:
        """Close the file; another process may resume."""
        self.lines.close()


def _decoded(line: JsonObject) -> Sample | tuple[str, ...] | None:
    """Content of a line: a sample, the planned points, or None for the end of the campaign."""
    if line.has("points"):
        points = line.sequence("points")
        if not all(isinstance(point, str) for point in points):
            raise line.error("points", "an array of texts")
        return tuple(map(str, points))
    if line.has("finished"):
        return None
    seconds = line.child("s")
    return Sample(
        point=line.text("point"),
        seconds={name: seconds.number(name, allow_zero=True) for name in seconds.fields},
        busy_cores=line.number("busy", allow_zero=True) if line.has("busy") else None,
        device=fields_to_json(read(Reading, line.child("device"))) if line.has("device") else None,
    )


def journal_path(output: str | Path) -> Path:
    """Next to the file that the campaign is for."""
    return Path(f"{output}.journal")


def run_campaign(
    bench: Bench, journal: CampaignJournal, policy: Policy, on_progress: OnProgress | None = None
) -> Outcome:
    """Measure every point LEAST_SAMPLES times; then repeat those with imprecise medians until the budget is used up.

    Samples in the journal count; a finished journal is only read. Raises BusyError where other processes used the
    machine during most samples, or its clock was limited.
    """
    if journal.points is None:
        journal.plan(estimate(bench, policy).points)
    points = journal.points or ()
    run = _Run(bench=bench, journal=journal, policy=policy, points=points, on_progress=on_progress)
    if not journal.finished:
        run.measure()
        journal.finish()
    dropped = [point for point in bench.points() if point not in points]
    samples: dict[str, list[Seconds]] = {}
    for point in points:
        if counted := run.counted(point):
            samples[point] = [sample.seconds for sample in counted]
    taken = journal.samples
    return Outcome(
        rows=bench.rows(samples),
        skipped=dict.fromkeys(dropped, f"would not fit into {policy.budget_s:.0f} s") | run.skipped,
        samples=len(taken),
        busy=sum(sample.is_busy for sample in taken),
        load_known=any(sample.busy_cores is not None for sample in taken),
        device=summary([sample.device for sample in taken if sample.device is not None]),
    )


@dataclass(kw_only=True, slots=True)
class _Run:
    bench: Bench
    journal: CampaignJournal
    policy: Policy
    points: Sequence[str]
    on_progress: OnProgress | None
    skipped: dict[str, str] = field(default_factory=dict)
    spent_s: float = 0.0

    def measure(self) -> None:
        for least in range(1, LEAST_SAMPLES + 1):
            for point in self.points:
                if point not in self.skipped and len(self._idle(point)) < least:
                    self._visit(point)
        while self.spent_s < self.policy.budget_s:
            unsteady = [point for point in self.points if not self._is_done(point)]
            for point in unsteady:
                if self.spent_s < self.policy.budget_s:
                    self._visit(point)
            if not unsteady:
                break
        self._check_machine()

    def counted(self, point: str) -> list[Sample]:
        """Samples on an idle machine; of a point that has too few of them, all."""
        idle = self._idle(point)
        return idle if len(idle) >= LEAST_SAMPLES else self.journal.of(point)

    def _idle(self, point: str) -> list[Sample]:
        return [one for one in self.journal.of(point) if self.policy.even_if_busy or not one.is_busy]

    def _is_done(self, point: str) -> bool:
        if point in self.skipped or len(self.journal.of(point)) >= self.policy.most_samples:
            return True
        totals = [sum(sample.seconds.values()) for sample in self.counted(point)]
        return len(totals) >= LEAST_SAMPLES and median_error(totals) <= self.policy.error * median(totals)

    def _visit(self, point: str) -> None:
        """One sample, or several of a short point; a point that cannot be measured is skipped from now on."""
        if self.on_progress is not None:
            self.on_progress(min(self.spent_s, self.policy.budget_s), self.policy.budget_s, self._progress(point))
        load = CpuLoad(own_pids=self.bench.pids())
        started_s = time.monotonic()
        taken: list[tuple[Seconds, Mapping[str, Any] | None]] = []
        try:
            while not taken or (time.monotonic() - started_s < _LONG_ENOUGH_S and len(taken) < LEAST_SAMPLES):
                taken.append((self.bench.sample(point), self.bench.conditions()))
        except Skipped as reason:
            self.skipped[point] = str(reason)
        elapsed_s = time.monotonic() - started_s
        self.spent_s += elapsed_s
        others = load.other_cores() if elapsed_s >= _LONG_ENOUGH_S else 0.0
        for seconds, device in taken:
            self.journal.add(Sample(point=point, seconds=seconds, busy_cores=others, device=device))
        if len(self.journal.samples) - self.journal.resumed >= _ENOUGH_TO_JUDGE:
            self._check_machine()

    def _progress(self, point: str) -> str:
        samples = len(self.journal.samples)
        is_steady = [len(self.journal.of(one)) >= LEAST_SAMPLES and self._is_done(one) for one in self.points]
        steady = sum(is_steady) if samples >= LEAST_SAMPLES * len(self.points) else 0
        late = " (time is up; the rest has too few samples)" if self.spent_s >= self.policy.budget_s else ""
        return f"{samples} samples, {steady} of {len(self.points)} steady; {point}{late}; seconds"

    def _check_machine(self) -> None:
        """Raise BusyError where most samples of this run do not count: after a few seconds, not at the end."""
        samples = [] if self.policy.even_if_busy else self.journal.samples[self.journal.resumed :]
        slowed = [faults for sample in samples if (faults := faults_of(sample.device))]
        if len(slowed) > _MOST_BUSY_SHARE * len(samples):
            reasons = ", ".join(sorted({reason for faults in slowed for reason in faults}))
            raise BusyError(
                f"the GPU's clock is limited ({reasons}); let it cool or raise the limit, and "
                "run the same command again to resume, or measure anyway with --even-if-busy"
            )
        busy = [sample for sample in samples if sample.is_busy]
        if len(busy) > _MOST_BUSY_SHARE * len(samples):
            cores = float(np.median([sample.busy_cores or 0.0 for sample in busy]))
            raise BusyError(
                f"the machine is busy: other processes used {cores:.1f} cores in {len(busy)} of {len(samples)} samples;"
                " stop them and run the same command again to resume, or measure anyway with --even-if-busy"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """What is measured, and where the rows are written."""

    build: Callable[[], Bench]
    about: Mapping[str, Any]  # settings and machine; a journal of others is refused
    origin: Callable[[list[Measurement]], Mapping[str, Any]]  # what the CSV says of its rows, given them
    output: Path  # the CSV


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Result of a campaign, and its journal; the caller removes the journal when nothing has to be repeated."""

    outcome: Outcome
    journal: CampaignJournal


def measure(
    campaign: Campaign,
    policy: Policy,
    *,
    on_estimate: Callable[[Estimate, int], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Measured:
    """Measure, and write the CSV, from a new journal or that of an interrupted run.

    `on_estimate` receives the plan, and how many samples an interrupted run has left. Raises
    InputError for a journal of other settings, BusyError for a machine that other processes use.
    """
    journal = CampaignJournal.open(journal_path(campaign.output), campaign.about, "output")
    try:
        bench = campaign.build()
        try:
            if on_estimate is not None:
                on_estimate(estimate(bench, policy), journal.resumed)
            outcome = run_campaign(bench, journal, policy, on_progress)
        finally:
            bench.close()
        state: dict[str, Any] = {"device_state": dict(outcome.device)} if outcome.device else {}
        if policy.even_if_busy:
            state["even_if_busy"] = True
        write_measurements(campaign.output, outcome.rows, origin={**campaign.origin(outcome.rows), **state})
    except BaseException:
        journal.close()
        raise
    finally:
        if not journal.samples:
            journal.remove()
    return Measured(outcome=outcome, journal=journal)
