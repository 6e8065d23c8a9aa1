"""Confirming a plan: its candidates are measured on this machine, round-robin, and compared with their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvrsim.executors.run import run_program
from kvrsim.program import Compute, Op, Program
from kvrsim.results.question import Question
from kvrsim.results.results import StrategyPrediction
from kvrsim.results.timeline import Timeline
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S, get_strategy
from kvrsim.strategies.pipeline import layers_of
from kvrsim.units import format_seconds, scale
from planner.candidates import Candidate, Search, strategies_to_compare
from planner.confirm.candidates import Feasible, MemoryBudget, further_candidates, strategies_here
from planner.confirm.hardware import Hardware, Mode, Reporter, is_busy, other_device_note
from planner.confirm.result import ClockDrift, Confirmation, MeasuredCandidate, Targets
from planner.plan import Ranking

if TYPE_CHECKING:
    from kvrsim.runtime.measure import Job, JobReport
    from kvrsim.runtime.plan import RunPlan
    from kvrsim.runtime.virtual import VirtualReport

Parts = Mapping[tuple[int | None, str], float]  # seconds by layer (None: outside the layers) and the simulator's name

_LEAST_IDLE = 3  # rounds; with fewer, all rounds count
# TSP's gathered pieces arrive where they stay: what is left to join is the rank's own chunk.
_MEASURED_AS = {"assemble": "append"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What was measured of one candidate."""

    ttft_s: tuple[float, ...]  # by round
    other_cores: tuple[float | None, ...]  # by round
    logits_error: float | None
    logits_scale: float | None
    timeline: Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What was measured of all candidates, and on what."""

    samples: tuple[Samples, ...]
    conditions: Mapping[str, str]
    drift_s: tuple[float, ...] = ()  # by round; empty: not measured


def confirm(
    scenario: Scenario,
    hardware: Hardware,
    *,
    strategies: Sequence[str] | None = None,
    top: int = 3,
    virtual: bool | None = None,
    targets: Targets | None = None,
    warnings: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> Confirmation:
    """Plan, measure the strategies and their `top` best partitions, and compare them with the predictions.

    strategies: names, "all" for every one that can be measured here, None for the paper's.
    virtual: replay all ranks on one device; None: where the machine has fewer devices than the scenario has GPUs.
    Raises InputError without a profile, where the machine cannot run the scenario or a strategy, or where no candidate
    fits in its memory; RankError where a rank fails.
    """
    reporter = reporter or Reporter()
    scenario = hardware.runnable(scenario)
    mode, mode_notes = _mode(scenario, hardware, virtual)
    names, name_notes = strategies_here(scenario, strategies, mode, hardware)
    ranking = Ranking.of(scenario, strategies_to_compare(scenario, names), Search(), disturbance=None)
    candidates = {one.strategy.name: one for one in ranking.candidates}
    if KVR_S.name in candidates:
        candidates |= further_candidates(candidates[KVR_S.name], ranking.candidates, top - 1)
    feasible = Feasible.of(candidates, MemoryBudget.of(scenario, hardware, mode))
    candidates = feasible.candidates
    notes = (*warnings, *mode_notes, *name_notes, *feasible.notes, *hardware.notes())
    seconds = [one.ttft_s for one in candidates.values()]
    rounds = hardware.warmups + hardware.repeats
    expected = f"about {format_seconds(sum(seconds) * rounds)} of prefills by the profile"
    for note in (
        *notes,
        f"measuring {len(seconds)} candidates, {hardware.warmups} + {hardware.repeats} times each: {expected}",
    ):
        reporter.note(note)
    plans = [hardware.run_plan(one) for one in candidates.values()]
    job = hardware.job(scenario, tuple(dict.fromkeys(plans)), check=feasible.reference)
    measure = _measure_virtual if mode == "virtual" else _measure_ranks
    measurement = measure(hardware, list(candidates.values()), plans, job, reporter)
    idle, idle_notes = _idle_rounds(measurement.samples)
    drift = drift_of(scenario, [measurement.drift_s[one] for one in idle]) if measurement.drift_s else None
    measured = [
        _measured(name, one, samples, idle, drift)
        for (name, one), samples in zip(candidates.items(), measurement.samples, strict=True)
    ]
    best = next(one for one in ranking.ranked if one.strategy.name in candidates)
    if best is not ranking.ranked[0]:  # the plan's choice is not measured
        chosen = min(range(len(measured)), key=lambda index: measured[index].predicted_s)
    else:
        chosen = list(candidates).index(best.strategy.name)
    assert scenario.profile is not None
    return Confirmation(
        question=Question.of(scenario, seed=hardware.seed, top=top, virtual=mode == "virtual"),
        mode=mode,
        candidates=tuple(measured),
        chosen=chosen,
        tsp=_tsp(scenario, hardware, mode),
        measured=_measured_parts(mode, logits=feasible.reference),
        modelled=_modelled_parts(mode, scenario, hardware),
        conditions=measurement.conditions,
        drift=drift,
        targets=targets or Targets(),
        warnings=(*notes, *idle_notes, *other_device_note(scenario.profile.gpu, measurement.conditions["device"])),
    )


def _mode(scenario: Scenario, hardware: Hardware, virtual: bool | None) -> tuple[Mode, tuple[str, ...]]:
    """Choose separate processes or virtual ranks; also return notes on the choice."""
    from kvrsim.runtime.ranks import started_by_torchrun

    wanted, devices = scenario.cluster.num_gpus, hardware.devices
    if virtual is None and wanted > devices and not started_by_torchrun():
        what = f"{devices} {'GPU' if hardware.device == 'cuda' else 'core'}{'s' * (devices != 1)}"
        return "virtual", (f"{wanted} ranks on {what}: virtual ranks, one after another; messages are modelled",)
    if virtual:
        return "virtual", ()
    return "ranks", (f"{wanted} ranks on {devices} devices: they slow each other down",) * (wanted > devices)


def _measure_ranks(
    hardware: Hardware, candidates: Sequence[Candidate], plans: Sequence[RunPlan], job: Job, reporter: Reporter
) -> Measurement:
    """Measure every candidate on ranks in separate processes, each partition once."""
    from kvrsim.runtime.measure import run_job
    from kvrsim.runtime.ranks import launch

    scenario = candidates[0].scenario
    count = len(job.plans) * (hardware.repeats + hardware.warmups + 3) + 2
    how = hardware.launch(scenario.cluster.num_gpus, max(one.ttft_s for one in candidates), count)
    job = replace(job, drift_tokens=drift_tokens(scenario))
    report: JobReport = launch(run_job, job, how=how, on_progress=reporter.progress)[-1]
    differences = dict(zip(job.plans, report.differences, strict=False))  # empty where logits were not compared
    samples = {}
    for plan, timing, timeline in zip(job.plans, report.bench.timings, report.bench.timelines, strict=True):
        difference = differences.get(plan)
        samples[plan] = Samples(
            ttft_s=timing.ttft_s,
            other_cores=timing.other_cores,
            logits_error=difference.logits if difference else None,
            logits_scale=difference.logits_scale if difference else None,
            timeline=timeline,
        )
    return Measurement(
        samples=tuple(samples[plan] for plan in plans),
        conditions=report.bench.conditions,
        drift_s=report.bench.drift_s,
    )


def _measure_virtual(
    hardware: Hardware, candidates: Sequence[Candidate], plans: Sequence[RunPlan], job: Job, reporter: Reporter
) -> Measurement:
    """Measure every candidate's ranks one after another on one device."""
    from kvrsim.runtime.ranks import launch
    from kvrsim.runtime.virtual import run_virtual

    count = len(job.plans) * (hardware.repeats + hardware.warmups) * 2 + 2
    how = hardware.launch(1, max(one.ttft_s for one in candidates), count)
    report: VirtualReport = launch(run_virtual, job, how=how, on_progress=reporter.progress)[-1]
    timings = dict(zip(job.plans, report.timings, strict=True))
    samples = tuple(
        Samples(
            ttft_s=composed_s(candidate, timings[plan].repeats),
            other_cores=timings[plan].other_cores,
            logits_error=timings[plan].logits_error,
            logits_scale=timings[plan].logits_scale,
            timeline=composed_timeline(candidate, timings[plan].repeats),
        )
        for candidate, plan in zip(candidates, plans, strict=True)
    )
    ranks = f"{candidates[0].scenario.cluster.num_gpus}, virtual, one after another"
    return Measurement(samples=samples, conditions=report.conditions | {"ranks": ranks})


def composed_s(candidate: Candidate, repeats: Sequence[Sequence[Parts]]) -> tuple[float, ...]:
    """Return the TTFT of each repetition: measured parts, joined by the model of the links.

    repeats: by repetition, by rank.
    """
    program = _measured_program(candidate, repeats)
    return tuple(map(float, run_program(program, candidate.per_rank.cluster)[-1]))


def composed_timeline(candidate: Candidate, repeats: Sequence[Sequence[Parts]]) -> Timeline:
    """Return the timeline of the median repetition."""
    from kvrsim.executors.event import EventSimulation  # SimPy, only where it is needed

    order = np.argsort(composed_s(candidate, repeats))
    median_program = _measured_program(candidate, [repeats[order[(len(order) - 1) // 2]]])
    return EventSimulation(median_program, candidate.per_rank.cluster).timeline


def _measured_program(candidate: Candidate, repeats: Sequence[Sequence[Parts]]) -> Program:
    """Return the program with measured device times, shape (repetitions,), every layer a kind of its own.

    What is not measured (messages, and what the host adds to them) is the profile's.
    """
    from kvrsim.compile import build_program

    chunks = [np.full(len(repeats), float(chunk)) for chunk in candidate.partition.chunk_lens]
    program = build_program(candidate.per_rank, candidate.strategy, chunks)
    ranks, kinds = range(program.num_ranks), program.layer_kind_index

    def timed(ops: Sequence[Op], rank: int, layer: int | None) -> tuple[Op, ...]:
        return tuple(_timed(op, [parts[rank] for parts in repeats], layer) for op in ops)

    return replace(
        program,
        prologue=tuple(timed(program.prologue[rank], rank, None) for rank in ranks),
        layers=tuple(
            tuple(timed(program.layers[kind][rank], rank, layer) for rank in ranks) for layer, kind in enumerate(kinds)
        ),
        layer_kind_index=tuple(range(len(kinds))),
        epilogue=tuple(timed(program.epilogue[rank], rank, None) for rank in ranks),
    )


def _timed(op: Op, repeats: Sequence[Parts], layer: int | None) -> Op:
    """Return the operation with its measured time, which contains the host's; the embedding's contains the mask's."""
    if not isinstance(op, Compute):
        return op
    key = (layer, _MEASURED_AS.get(op.name, op.name))
    measured_s = np.array([parts.get(key, 0.0) for parts in repeats])
    return Compute(name=op.name, device_s=measured_s, kind=op.kind)


def drift_tokens(scenario: Scenario) -> int:
    """Return the length of an even chunk, which every round times on all ranks at once."""
    return scenario.request.new_tokens // scenario.cluster.num_gpus


def drift_of(scenario: Scenario, samples_s: Sequence[float]) -> ClockDrift:
    """Compare the predicted prefill of an even chunk with the measured ones."""
    tokens = drift_tokens(scenario)
    alone = replace(scenario.on_gpus(1), request=replace(scenario.request, context_len=tokens))
    single = Candidate(scenario=alone, strategy=get_strategy("single"), partition=Partition(chunk_lens=(tokens,)))
    return ClockDrift(num_tokens=tokens, predicted_s=single.ttft_s, samples_s=tuple(samples_s))


def corrected_for(drift: ClockDrift, scenario: Scenario) -> Scenario:
    """Return the scenario with all kernels scaled by the measured speed factor."""
    assert scenario.profile is not None
    profile = replace(scenario.profile, kernels=scale(scenario.profile.kernels, 1 / drift.speed))
    return replace(scenario, profile=profile)


def _measured(
    name: str, candidate: Candidate, samples: Samples, rounds: Sequence[int], drift: ClockDrift | None
) -> MeasuredCandidate:
    """Join what was predicted and measured of a candidate, in these rounds."""
    corrected = None if drift is None else replace(candidate, scenario=corrected_for(drift, candidate.scenario))
    return MeasuredCandidate(
        prediction=StrategyPrediction(
            strategy=name,
            partition=candidate.partition.chunk_lens,
            layers=layers_of(candidate.per_rank, candidate.strategy),
            ttft_s=candidate.ttft_s,
            ttft_low_s=candidate.interval.low_s,
            ttft_high_s=candidate.interval.high_s,
            fits=candidate.fits,
            memory=candidate.memory,
        ),
        drift_corrected_s=None if corrected is None else corrected.ttft_s,
        samples_s=tuple(samples.ttft_s[number] for number in rounds),
        logits_error=samples.logits_error,
        logits_scale=samples.logits_scale,
        predicted=candidate.timeline,
        measured=samples.timeline,
    )


def _idle_rounds(samples: Sequence[Samples]) -> tuple[list[int], tuple[str, ...]]:
    """Return the rounds in which no other process used the machine, for all candidates; and notes on the others."""
    rounds = range(len(samples[0].ttft_s))
    busy = [any(is_busy(one.ttft_s[number], one.other_cores[number]) for one in samples) for number in rounds]
    if not any(busy):
        return list(rounds), ()
    text = f"{sum(busy)} of {len(busy)} rounds"
    if busy.count(False) >= min(_LEAST_IDLE, len(busy)):
        idle = [number for number in rounds if not busy[number]]
        return idle, (f"{text} left out: other processes used the machine",)
    return list(rounds), (f"other processes used the machine in {text}; all are counted",)


def _tsp(scenario: Scenario, hardware: Hardware, mode: Mode) -> str:
    """Name the all-gather, and what attention covers."""
    covers = "attention up to the chunk's end" if scenario.kernel == "flash" else "attention over the whole context"
    if mode == "virtual":
        return f"all-gather modelled; {covers}"
    how = "a ring of sends between neighbours" if hardware.gather(scenario) == "ring" else "the backend's own"
    return f"all-gather: {how}; {covers}"


def _measured_parts(mode: Mode, *, logits: bool) -> tuple[str, ...]:
    whole = "TTFT of whole prefills"
    parts = "every part of every layer on every rank, alone on one device"
    return (whole if mode == "ranks" else parts, *(["logits"] if logits else []))


def _modelled_parts(mode: Mode, scenario: Scenario, hardware: Hardware) -> tuple[str, ...]:
    if mode == "virtual":
        return (f"messages and waiting, by {scenario.cluster.describe()}", "that ranks do not slow each other down")
    if hardware.emulated:
        return (f"links: messages are held back as by {scenario.cluster.describe()}",)
    return ()
