"""The candidates of a confirmation measured: on ranks in separate processes, or in turn on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvrsim.results.timeline import Timeline
from kvrsim.scenario import Scenario
from planner.confirm.candidates import Named
from planner.confirm.drift import drift_tokens
from planner.confirm.hardware import Hardware
from planner.confirm.virtual import composed_s, composed_timeline

if TYPE_CHECKING:
    from kvrsim.runtime.measure import Job
    from kvrsim.runtime.plan import RunPlan
    from kvrsim.runtime.ranks import OnProgress
    from kvrsim.runtime.virtual import VirtualTiming


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One candidate's measurements."""

    samples_s: tuple[float, ...]  # one a round
    other_cores: tuple[float | None, ...]  # the same
    logits_error: float | None
    logits_scale: float | None
    timeline: Timeline | None


def run_ranks(
    scenario: Scenario,
    hardware: Hardware,
    named: Sequence[Named],
    plans: Sequence[RunPlan],
    job: Job,
    longest_s: float,
    on_progress: OnProgress | None,
) -> tuple[list[Measured], dict[str, str], tuple[float, ...]]:
    """Measure every candidate on ranks in separate processes, each partition once."""
    from kvrsim.runtime.measure import JobReport, run_job
    from kvrsim.runtime.ranks import launch

    count = len(job.plans) * (hardware.repeats + hardware.warmups + 3) + 2
    how = hardware.launch(scenario.cluster.num_gpus, longest_s, count * longest_s)
    job = replace(job, drift_tokens=drift_tokens(scenario))
    report: JobReport = launch(run_job, job, how=how, on_progress=on_progress)[-1]
    differences = report.differences or [None] * len(job.plans)  # of logits, where they were compared
    found = {
        plan: Measured(
            samples_s=timing.ttft_s,
            other_cores=timing.other_cores,
            logits_error=None if difference is None else difference.logits,
            logits_scale=None if difference is None else difference.logits_scale,
            timeline=timeline,
        )
        for plan, timing, timeline, difference in zip(
            job.plans, report.bench.timings, report.bench.timelines, differences, strict=True
        )
    }
    return [found[plan] for plan in plans], report.bench.conditions, report.bench.drift_s


def run_virtual_ranks(
    scenario: Scenario,
    hardware: Hardware,
    named: Sequence[Named],
    plans: Sequence[RunPlan],
    job: Job,
    longest_s: float,
    on_progress: OnProgress | None,
) -> tuple[list[Measured], dict[str, str], tuple[float, ...]]:
    """Measure every candidate's ranks one after another on one device."""
    from kvrsim.runtime.ranks import launch
    from kvrsim.runtime.virtual import VirtualReport, run_virtual

    count = len(job.plans) * (hardware.repeats + hardware.warmups) * 2 + 2
    how = hardware.launch(1, longest_s, count * longest_s)
    report: VirtualReport = launch(run_virtual, job, how=how, on_progress=on_progress)[-1]
    timings = dict(zip(job.plans, report.timings, strict=True))
    found = [_composed(scenario, one, timings[plan]) for one, plan in zip(named, plans, strict=True)]
    return found, report.conditions | {"ranks": f"{scenario.cluster.num_gpus}, virtual, one after another"}, ()


def _composed(scenario: Scenario, named: Named, timing: VirtualTiming) -> Measured:
    strategy = named.as_run
    placed = scenario.on_gpus(len(named.partition.chunk_lens))
    return Measured(
        samples_s=composed_s(placed, strategy, named.partition, timing.repeats),
        other_cores=timing.other_cores,
        logits_error=timing.logits_error,
        logits_scale=timing.logits_scale,
        timeline=composed_timeline(placed, strategy, named.partition, timing.repeats),
    )
