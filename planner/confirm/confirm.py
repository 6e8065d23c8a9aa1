"""Confirm a plan: measure its candidates on this machine, round-robin, and compare them with their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.executors.run import run_program
from kvrsim.program import Compute, Op, Program
from kvrsim.results.question import Question
from kvrsim.results.results import StrategyPrediction
from kvrsim.results.timeline import Timeline
from kvrsim.runtime.host import busy_note, started_by_torchrun
from kvrsim.runtime.plan import Job, Parts, Report, Timing
from kvrsim.runtime.ranks import launch
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S
from kvrsim.strategies.pipeline import layers_of
from kvrsim.units import format_bytes, format_seconds
from planner.candidates import Candidate, Search, strategies_to_compare
from planner.confirm.candidates import further_candidates, strategies_here
from planner.confirm.hardware import NO_REFERENCE, Hardware, MemoryBudget, Mode, Reporter
from planner.confirm.result import Confirmation, MeasuredCandidate, Targets
from planner.plan import Ranking


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

    strategies: names; "all" for every strategy that can be measured here; None for the paper's strategies.
    virtual: replay all ranks on one device; None: only if the machine has fewer devices than the scenario has GPUs.
    Raises InputError without a profile of this machine, where the machine cannot run the scenario or a strategy, or
    where no candidate fits in its memory; RankError where a rank fails.
    """
    reporter = reporter or Reporter()
    scenario = hardware.runnable(scenario)
    mode, mode_notes = _mode(scenario, hardware, virtual)
    names, name_notes = strategies_here(scenario, strategies, mode, hardware)
    ranking = Ranking.of(scenario, strategies_to_compare(scenario, names), Search(), disturbance=None)
    candidates = {one.strategy.name: one for one in ranking.candidates}
    if KVR_S.name in candidates:
        candidates |= further_candidates(candidates[KVR_S.name], ranking.candidates, top - 1)
    budget = MemoryBudget.of(scenario, hardware, mode)
    budget.check(list(candidates.values()))
    check = budget.fits_reference(scenario)
    notes = [*warnings, *mode_notes, *name_notes, *_left_out(candidates, budget), *[NO_REFERENCE] * (not check)]
    notes += busy_note()
    candidates = {name: one for name, one in candidates.items() if budget.fits(one)}
    rounds = hardware.warmups + hardware.repeats
    expected = format_seconds(rounds * sum(one.ttft_s for one in candidates.values()))
    times = f"{hardware.warmups} + {hardware.repeats} times each: about {expected} of prefills by the profile"
    for note in (*notes, f"measuring {len(candidates)} candidates, {times}"):
        reporter.note(note)
    report = measured_here(list(candidates.values()), hardware, mode, check=check, reporter=reporter)
    measured = [
        MeasuredCandidate(prediction=_prediction(name, one), timing=timing, predicted=one.timeline)
        for (name, one), timing in zip(candidates.items(), report.timings, strict=True)
    ]
    return Confirmation(
        question=Question.of(scenario, seed=hardware.seed, top=top, virtual=mode == "virtual"),
        mode=mode,
        candidates=tuple(measured),
        chosen=min(range(len(measured)), key=lambda index: measured[index].predicted_s),
        conditions=report.conditions,
        targets=targets or Targets(),
        warnings=tuple(notes),
    )


def _mode(scenario: Scenario, hardware: Hardware, virtual: bool | None) -> tuple[Mode, tuple[str, ...]]:
    """Choose separate processes or virtual ranks; also return notes on the choice."""
    wanted, devices = scenario.cluster.num_gpus, hardware.devices
    if virtual is None and wanted > devices and not started_by_torchrun():
        what = f"{devices} {'GPU' if hardware.device == 'cuda' else 'core'}{'s' * (devices != 1)}"
        return "virtual", (f"{wanted} ranks on {what}: virtual ranks, one after another; messages are modelled",)
    if virtual:
        return "virtual", ()
    return "ranks", (f"{wanted} ranks on {devices} devices: they slow each other down",) * (wanted > devices)


def _left_out(candidates: dict[str, Candidate], budget: MemoryBudget) -> list[str]:
    """Name the candidates that do not fit in memory."""
    large = [
        f"{name} ({format_bytes(budget.needed_bytes(one))})" for name, one in candidates.items() if not budget.fits(one)
    ]
    return [f"not measured, because it does not fit in the {budget.name}: {', '.join(large)}"] if large else []


def _prediction(name: str, candidate: Candidate) -> StrategyPrediction:
    return StrategyPrediction(
        strategy=name,
        partition=candidate.partition.chunk_lens,
        layers=layers_of(candidate.per_rank, candidate.strategy),
        ttft_s=candidate.ttft_s,
        ttft_low_s=candidate.interval.low_s,
        ttft_high_s=candidate.interval.high_s,
        fits=candidate.fits,
        memory=candidate.memory,
    )


def measured_here(
    candidates: Sequence[Candidate], hardware: Hardware, mode: Mode, *, check: bool, reporter: Reporter
) -> Report:
    """Measure candidates of one scenario on ranks in separate processes, or on virtual ranks in turn on one device.

    Equal partitions are measured once. check: compare the logits with those of a single process.
    """
    from kvrsim.runtime.measure import run_job
    from kvrsim.runtime.virtual import run_virtual

    scenario, plans = candidates[0].scenario, [hardware.run_plan(one) for one in candidates]
    times = dict(repeats=hardware.repeats, warmups=hardware.warmups)
    job = Job(model=hardware.choice(scenario), plans=tuple(dict.fromkeys(plans)), check_logits=check, **times)
    count = len(job.plans) * (hardware.repeats + hardware.warmups + 3) * (2 if mode == "virtual" else 1) + 2
    num_ranks = 1 if mode == "virtual" else scenario.cluster.num_gpus
    how = hardware.launch(scenario, num_ranks, hardware.longest_s(candidates), count)
    run = run_virtual if mode == "virtual" else run_job
    report: Report = launch(run, job, how=how, on_progress=reporter.progress)[-1]
    by_plan = dict(zip(job.plans, report.timings, strict=True))
    timings = [by_plan[plan] for plan in plans]
    repetitions = f"{hardware.repeats} after {hardware.warmups} warm-ups, plans interleaved"
    conditions = {**report.conditions, "repetitions": repetitions}
    gather = "a ring of sends between neighbours" if hardware.gather(scenario) == "ring" else "the backend's own"
    if mode == "virtual":
        timings = [_composed(one, timing) for one, timing in zip(candidates, timings, strict=True)]
        conditions["ranks"] = f"{scenario.cluster.num_gpus}, virtual, one after another on one device"
        conditions["modelled"] = f"messages and waiting, by {scenario.cluster.describe()}"
        gather = "modelled"
    return Report(timings=tuple(timings), conditions=conditions | {"all-gather of tsp": gather})


def _composed(candidate: Candidate, timing: Timing) -> Timing:
    """Return the measurements with the TTFTs and the timeline composed of measured parts."""
    ttft_s, timeline = composed_s(candidate, timing.parts), composed_timeline(candidate, timing.parts)
    return replace(timing, ttft_s=ttft_s, timeline=timeline)


def composed_s(candidate: Candidate, repeats: Sequence[Sequence[Parts]]) -> tuple[float, ...]:
    """Return the TTFT of each repetition, composed of measured parts and modelled messages.

    repeats: measured parts by repetition and rank.
    """
    program = _measured_program(candidate, repeats)
    return tuple(map(float, run_program(program, candidate.per_rank.cluster)[-1]))


def composed_timeline(candidate: Candidate, repeats: Sequence[Sequence[Parts]]) -> Timeline:
    """Return the timeline of the median repetition."""
    from kvrsim.executors.event import EventSimulation  # this import loads SimPy

    order = np.argsort(composed_s(candidate, repeats))
    median_program = _measured_program(candidate, [repeats[order[(len(order) - 1) // 2]]])
    return EventSimulation(median_program, candidate.per_rank.cluster).timeline


def _measured_program(candidate: Candidate, repeats: Sequence[Sequence[Parts]]) -> Program:
    """Return the program with measured device times, shape (repetitions,); every layer is a separate kind.

    Messages, and the host's time for them, are not measured; their times are those of the profile.
    """
    chunks = columns(np.tile(candidate.partition.chunk_lens, (len(repeats), 1)))
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
    """Return the operation with its measured time, which includes the times of the host and of the mask."""
    if not isinstance(op, Compute):
        return op
    measured_s = np.array([parts.get((layer, op.name), 0.0) for parts in repeats])
    return Compute(name=op.name, device_s=measured_s, kind=op.kind)
