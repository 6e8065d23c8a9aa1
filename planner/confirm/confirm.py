"""Confirm a plan: measure its candidates on this machine, round-robin, and compare them with their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.executors.access import execution_of
from kvrsim.executors.run import run_program
from kvrsim.program import Compute, Op, Program
from kvrsim.results.question import Question
from kvrsim.results.results import StrategyPrediction
from kvrsim.runtime.gpu_state import GpuLog
from kvrsim.runtime.host import busy_note, started_by_torchrun
from kvrsim.runtime.plan import RUN_STRATEGIES, Job, Parts, RankSettings, Report, Timing
from kvrsim.runtime.ranks import launch
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S, STRATEGIES, Strategy, get_strategy, usual_names
from kvrsim.units import format_bytes, format_count, format_seconds
from planner.candidates import Candidate, Search, all_for, strategies_to_compare
from planner.confirm.hardware import NO_REFERENCE, Hardware, MemoryBudget, Mode, Reporter
from planner.confirm.result import Confirmation, MeasuredCandidate, Targets
from planner.confirm.saved import SavedPlan, SavedRow
from planner.plan import Ranking
from planner.search.minimise import Evaluator, around, chunks_between

_LEAST_DISTANCE = 1 / 16  # share of the even chunk; a measurement cannot distinguish partitions that differ by less
_PARTITIONS = 3  # partitions of KVR that are measured without a saved plan: the best, and the next best ones
_PLAN_ROWS = 5  # fastest strategies of a saved plan that are measured
_REFERENCES = ("tsp", "single")  # strategies that are measured with every saved plan: the paper's baselines
_MORE_PREFILLS = 3  # prefills of a plan beside the measured ones for which time is allowed: with hooks, for the logits
_REFERENCE_PREFILLS = 2  # prefills for which time is allowed once: the reference of the logits takes longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which candidates are measured."""

    strategies: Sequence[str] | None = None  # names; "all": every one that can be measured; None: the default
    top: int | None = None  # number of the plan's fastest, or without a plan of partitions of KVR; None: the default
    plan: SavedPlan | None = None  # the plan whose strategies and partitions are measured; None: a new one is made


def confirm(
    scenario: Scenario,
    hardware: Hardware,
    *,
    choice: Choice | None = None,
    virtual: bool | None = None,
    targets: Targets | None = None,
    warnings: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> Confirmation:
    """Measure the candidates of a plan, and compare them with the predictions.

    choice: the candidates; None: the paper's strategies and the next best partitions of KVR.
    virtual: replay all ranks on one device; None: only if the machine has fewer devices than the scenario has GPUs.
    Raises InputError without a profile of this machine, where the machine cannot run the scenario or a strategy, or
    where no candidate fits in its memory; RankError where a rank fails.
    """
    choice = choice or Choice()
    scenario = hardware.runnable(scenario)
    mode, mode_notes = _mode(scenario, hardware, virtual)
    if choice.plan is None:
        candidates, choice_notes = _planned_here(scenario, choice, mode, hardware)
    else:
        candidates, choice_notes = _of_plan(scenario, choice, choice.plan, mode, hardware)
    notes = (*warnings, *mode_notes, *choice_notes)
    timings, conditions, notes = measured_here(candidates, hardware, mode, notes=notes, reporter=reporter)
    planned_s: dict[str, float] = {}
    if choice.plan is not None:
        planned_s = {row.strategy: row.ttft_s for row in choice.plan.rows}
    measured = []
    for name, timing in timings.items():
        candidate = candidates[name]
        measured.append(
            MeasuredCandidate(
                prediction=_prediction(name, candidate),
                timing=timing,
                predicted=candidate.timeline,
                planned_s=planned_s.get(name),
            )
        )
    return Confirmation(
        question=Question.of(scenario, seed=hardware.seed, top=choice.top, virtual=mode == "virtual"),
        mode=mode,
        candidates=tuple(measured),
        chosen=_chosen(measured, choice.plan),
        plan=choice.plan,
        conditions=conditions,
        targets=targets or Targets(),
        warnings=notes,
    )


def _planned_here(
    scenario: Scenario, choice: Choice, mode: Mode, hardware: Hardware
) -> tuple[dict[str, Candidate], tuple[str, ...]]:
    """Plan the chosen strategies with the profile; return them and the next best partitions of KVR, and notes."""
    names, notes = strategies_here(scenario, choice.strategies, mode, hardware)
    ranking = Ranking.of(strategies_to_compare(scenario, names), Search())
    candidates = {candidate.strategy.name: candidate for candidate in ranking.candidates}
    if KVR_S.name in candidates:
        count = (choice.top or _PARTITIONS) - 1
        candidates |= further_candidates(candidates[KVR_S.name], ranking.candidates, count)
    return candidates, notes


def _of_plan(
    scenario: Scenario, choice: Choice, plan: SavedPlan, mode: Mode, hardware: Hardware
) -> tuple[dict[str, Candidate], tuple[str, ...]]:
    """Return the plan's first strategies that run here, kvr-s and the references, with the plan's partitions; notes.

    Raises InputError for a strategy that is named and not in the plan, or that cannot be measured here.
    """
    rows = {row.strategy: row for row in plan.rows}
    if choice.strategies is not None:
        for name in choice.strategies:
            if name not in rows:
                raise InputError("strategies", name, f"those of {plan.file} that fit: {', '.join(rows)}")
            _check_measurable(name, scenario, mode, hardware)
        return {name: _with_partition(scenario, rows[name]) for name in choice.strategies}, ()
    candidates: dict[str, Candidate] = {}
    left_out: list[str] = []
    wanted = choice.top or _PLAN_ROWS
    for name, row in rows.items():
        if not wanted and name not in (KVR_S.name, *_REFERENCES):
            continue
        try:
            _check_measurable(name, scenario, mode, hardware)
        except InputError:
            left_out.append(name)
            continue
        candidates[name] = _with_partition(scenario, row)
        wanted = max(0, wanted - 1)
    for name in _REFERENCES:
        if name not in rows:
            _check_measurable(name, scenario, mode, hardware)
            candidates[name] = Search().candidate(execution_of(scenario, STRATEGIES[name]))
    notes: tuple[str, ...] = ()
    if left_out:
        notes = (f"in the plan, but not measured, because they do not run here: {', '.join(left_out)}",)
    return candidates, notes


def _with_partition(scenario: Scenario, row: SavedRow) -> Candidate:
    """Return a strategy of a plan with the plan's partition. Raises InputError if the partition does not fit."""
    strategy = get_strategy(row.strategy, "strategies")
    if row.layers is not None:
        strategy = replace(strategy, stage_layers=row.layers)
    execution = execution_of(scenario, strategy)
    tokens = scenario.request.new_tokens
    num_chunks = len(row.partition)
    if not strategy.is_pipeline:
        num_chunks = execution.cluster.num_gpus
    try:
        partition = Partition.of(row.partition, num_tokens=tokens, num_ranks=num_chunks)
    except InputError as error:
        raise InputError("plan", f"{row.strategy} with chunks {error.value}", error.accepted) from None
    return Candidate(execution=execution, partition=partition)


def _chosen(measured: Sequence[MeasuredCandidate], plan: SavedPlan | None) -> int:
    """Index of the plan's best strategy that was measured; without a plan, of the fastest by prediction."""
    names = [candidate.strategy for candidate in measured]
    if plan is not None:
        for row in plan.rows:
            if row.strategy in names:
                return names.index(row.strategy)
    return min(range(len(measured)), key=lambda index: measured[index].predicted_s)


def _mode(scenario: Scenario, hardware: Hardware, virtual: bool | None) -> tuple[Mode, tuple[str, ...]]:
    """Choose separate processes or virtual ranks; also return notes on the choice."""
    num_gpus = scenario.cluster.num_gpus
    devices = hardware.devices
    if virtual:
        return "virtual", ()
    if num_gpus <= devices:
        return "ranks", ()
    if virtual is None and not started_by_torchrun():
        what = format_count(devices, "GPU" if hardware.device == "cuda" else "core")
        return "virtual", (f"{num_gpus} ranks on {what}: virtual ranks, one after another; messages are modelled",)
    return "ranks", (f"{num_gpus} ranks on {devices} devices: they slow each other down",)


def _prediction(name: str, candidate: Candidate) -> StrategyPrediction:
    return StrategyPrediction(
        strategy=name,
        partition=candidate.partition.chunk_lens,
        layers=candidate.execution.stage_layers,
        ttft_s=candidate.ttft_s,
        ttft_low_s=candidate.interval.low_s,
        ttft_high_s=candidate.interval.high_s,
        fits=candidate.fits,
        memory=candidate.memory,
    )


def strategies_here(
    scenario: Scenario, names: Sequence[str] | None, mode: Mode, hardware: Hardware
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the strategies to measure, and notes on those that the machine or the model does not allow.

    names: "all" means every strategy that is planned and can be measured here; None means the paper's strategies.
    Raises InputError for a strategy that cannot be measured here.
    """
    if scenario.cluster.num_gpus == 1:
        return ("single",), ()
    if names is None:
        names = usual_names("paper")
    chosen = [name for name in dict.fromkeys(names) if name != "all"]
    for name in chosen:
        _check_measurable(name, scenario, mode, hardware)
    if "all" not in names:
        return tuple(chosen), ()
    planned, notes = all_for(scenario)
    reasons = dict[str, list[str]]()
    for execution in planned:
        name = execution.strategy.name
        try:
            _check_measurable(name, scenario, mode, hardware)
            chosen.append(name)
        except InputError as error:
            reasons.setdefault(error.accepted, []).append(name)
    left_out = [f"not measured: {', '.join(left)} (accepted: {reason})" for reason, left in reasons.items()]
    return tuple(dict.fromkeys(chosen)), (*notes, *left_out)


def _check_measurable(name: str, scenario: Scenario, mode: Mode, hardware: Hardware) -> None:
    """Raise InputError where planner or runtime cannot run a strategy on this model and number of ranks."""
    allowed = [run for run in RUN_STRATEGIES if _is_measurable(STRATEGIES[run], mode)]
    if name not in allowed:
        where = "what the runtime runs without a table"
        if mode == "virtual":
            where = "what one device can replay in turn"
        raise InputError("strategies", name, f"{where}: {', '.join(allowed)}, or all")
    execution = execution_of(scenario, STRATEGIES[name])
    even = Partition.even(scenario.request.new_tokens, execution.cluster.num_gpus)
    hardware.check(Candidate(execution=execution, partition=even))


def _is_measurable(strategy: Strategy, mode: Mode) -> bool:
    """Whether a strategy can be measured in a mode. A partition from a table is not read here."""
    if strategy.partition_rule == "table":
        return False
    return mode == "ranks" or strategy.is_replayable


def partitions_around(execution: Execution, center: Sequence[int], stride: int) -> list[tuple[tuple[int, ...], float]]:
    """Return partitions with boundaries up to two strides from the centre's, and their predicted TTFTs, sorted."""
    tokens = sum(center)
    rows = chunks_between(around(np.cumsum(center)[:-1], stride, tokens), tokens)
    if not len(rows):
        return []
    ttft_s = Evaluator(execution.by(KVR_S)).ttft_s(rows.astype(float))
    return [(tuple(rows[index].tolist()), float(ttft_s[index])) for index in np.argsort(ttft_s, kind="stable")]


def further_candidates(kvr_s: Candidate, others: Sequence[Candidate], count: int) -> dict[str, Candidate]:
    """Return, by name, the partitions with the least predicted TTFT that differ from the others and from each other."""
    center = kvr_s.partition
    if count < 1 or len(center.chunk_lens) < 2:
        return {}
    apart = max(1, round(center.num_tokens / len(center.chunk_lens) * _LEAST_DISTANCE))
    ends = [np.array(other.partition.boundaries) for other in others if other.strategy.name.startswith("kvr")]
    further: dict[str, Candidate] = {}
    for chunks, _ in partitions_around(kvr_s.execution, center.chunk_lens, apart):
        partition = Partition(chunk_lens=chunks)
        boundaries = np.array(partition.boundaries)
        if any(np.abs(boundaries - other).max() < apart for other in ends):
            continue
        ends.append(boundaries)
        further[f"{KVR_S.name} #{len(further) + 2}"] = replace(kvr_s, partition=partition, search=None)
        if len(further) == count:
            break
    return further


def measured_here(
    candidates: Mapping[str, Candidate],
    hardware: Hardware,
    mode: Mode,
    *,
    notes: Sequence[str],
    check: bool = True,
    reporter: Reporter | None,
) -> tuple[dict[str, Timing], dict[str, str], tuple[str, ...]]:
    """Measure candidates of one scenario on ranks in separate processes, or on virtual ranks in turn on one device.

    Return the timings of the candidates that fit in memory, the conditions, and the notes with further ones. Equal
    partitions are measured once. check: compare the logits with those of a single process, if that fits in memory.
    Raises InputError if no candidate fits.
    """
    reporter = reporter or Reporter()
    scenario = next(iter(candidates.values())).scenario
    budget = MemoryBudget.of(scenario, hardware, mode)
    needed_bytes = budget.check(candidates)
    fitting: dict[str, Candidate] = {}
    large: list[str] = []
    for name, candidate in candidates.items():
        if needed_bytes[name] <= budget.limit_bytes:
            fitting[name] = candidate
        else:
            large.append(f"{name} ({format_bytes(needed_bytes[name])})")
    notes = list(notes)
    if large:
        notes.append(f"not measured, because it does not fit in the {budget.name}: {', '.join(large)}")
    compared = check and budget.fits_reference(scenario)
    if check and not compared:
        notes.append(NO_REFERENCE)
    notes.extend(busy_note())
    for note in notes:
        reporter.note(note)
    if len(candidates) > 1:
        reporter.note(_announcement(fitting, hardware))
    plans = {name: hardware.run_plan(candidate) for name, candidate in fitting.items()}
    job = Job(
        model=hardware.choice(scenario),
        plans=tuple(dict.fromkeys(plans.values())),
        check_logits=compared,
        repeats=hardware.repeats,
        warmups=hardware.warmups,
    )
    log = GpuLog(hardware.gpus_of(scenario.cluster.num_gpus))
    with log:
        report = _report(job, scenario, hardware, mode, hardware.longest_s(list(fitting.values())), reporter)
    for note in log.notes():
        reporter.note(note)
        notes.append(note)
    timing_of = dict(zip(job.plans, report.timings, strict=True))
    timings = {name: timing_of[plan] for name, plan in plans.items()}
    if mode == "virtual":
        timings = {name: compose(fitting[name], timing) for name, timing in timings.items()}
    conditions = {**report.conditions, **log.conditions(), **_conditions(scenario, hardware, mode)}
    return timings, conditions, tuple(notes)


def _announcement(candidates: Mapping[str, Candidate], hardware: Hardware) -> str:
    """Say how often the candidates are measured, and how long this takes by the profile."""
    rounds = hardware.warmups + hardware.repeats
    expected_s = rounds * sum(candidate.ttft_s for candidate in candidates.values())
    times = f"{hardware.warmups} + {hardware.repeats} times each: about {format_seconds(expected_s)}"
    return f"measuring {len(candidates)} candidates, {times} of prefills by the profile"


def _report(
    job: Job, scenario: Scenario, hardware: Hardware, mode: Mode, longest_s: float, reporter: Reporter
) -> Report:
    """Run a job on the ranks, or on one device in turn; longest_s: predicted seconds of its longest prefill."""
    from kvrsim.runtime.measure import run_job, run_virtual

    count = len(job.plans) * (job.warmups + job.repeats + _MORE_PREFILLS)
    if mode == "virtual":
        how = hardware.launch(scenario, 1, longest_s, 2 * count + _REFERENCE_PREFILLS)
        reports = launch(run_virtual, job, how=how, on_progress=reporter.progress)
    else:
        how = hardware.launch(scenario, scenario.cluster.num_gpus, longest_s, count + _REFERENCE_PREFILLS)
        if hardware.side_traffic_bytes is not None:
            return _report_beside_traffic(job, how, hardware.side_traffic_bytes, reporter)
        reports = launch(run_job, job, how=how, on_progress=reporter.progress)
    report: Report = reports[-1]
    return report


def _report_beside_traffic(job: Job, how: RankSettings, nbytes: int, reporter: Reporter) -> Report:
    """Run a job on the ranks while a sidecar sends messages between random pairs of neighbours."""
    from kvrsim.runtime.measure import run_job
    from kvrsim.runtime.sidecar import Sidecar

    with Sidecar(how, nbytes, job.model.seed) as sidecar:
        reports = launch(run_job, job, how=how, on_progress=reporter.progress)
    report: Report = reports[-1]
    return replace(report, conditions={**report.conditions, **sidecar.conditions()})


def _conditions(scenario: Scenario, hardware: Hardware, mode: Mode) -> dict[str, str]:
    """Describe the repetitions, and what is modelled instead of measured."""
    conditions = {"repetitions": f"{hardware.repeats} after {hardware.warmups} warm-ups, plans interleaved"}
    if mode == "virtual":
        conditions["all-gather of tsp"] = "modelled"
        conditions["ranks"] = f"{scenario.cluster.num_gpus}, virtual, one after another on one device"
        conditions["modelled"] = f"messages and waiting, by {scenario.cluster.describe()}"
    elif hardware.gather(scenario) == "ring":
        conditions["all-gather of tsp"] = "a ring of sends between neighbours"
    else:
        conditions["all-gather of tsp"] = "the backend's own"
    return conditions


def compose(candidate: Candidate, timing: Timing) -> Timing:
    """Return measurements of virtual ranks with TTFTs composed of measured parts and modelled messages.

    The timeline is that of the median repetition.
    """
    from kvrsim.executors.event import EventSimulation  # this import loads SimPy

    cluster = candidate.execution.cluster
    repeats = timing.parts
    finish_s = run_program(_measured_program(candidate, repeats), cluster)
    ttft_s = tuple(map(float, finish_s[-1]))
    median = np.argsort(ttft_s)[(len(ttft_s) - 1) // 2]
    timeline = EventSimulation(_measured_program(candidate, [repeats[median]]), cluster).timeline
    return replace(timing, ttft_s=ttft_s, timeline=timeline)


def _measured_program(candidate: Candidate, repeats: Sequence[Sequence[Parts]]) -> Program:
    """Return the program with measured device times, shape (repetitions,); every layer is a separate kind.

    repeats: measured parts by repetition and rank. Messages, and the host's time for them, are not measured; their
    times are those of the profile.
    """
    chunks = columns(np.tile(candidate.partition.chunk_lens, (len(repeats), 1)))
    program = build_program(candidate.execution, chunks)
    ranks = range(program.num_ranks)
    kinds = program.layer_kind_index

    def timed(ops: Sequence[Sequence[Op]], layer: int | None = None) -> tuple[tuple[Op, ...], ...]:
        """Return the operations of each rank with their measured times."""
        timed_ops = []
        for rank in ranks:
            parts = [repeat[rank] for repeat in repeats]
            timed_ops.append(tuple(_with_times(op, parts, layer) for op in ops[rank]))
        return tuple(timed_ops)

    return replace(
        program,
        prologue=timed(program.prologue),
        layers=tuple(timed(program.layers[kind], layer) for layer, kind in enumerate(kinds)),
        layer_kind_index=tuple(range(len(kinds))),
        epilogue=timed(program.epilogue),
    )


def _with_times(op: Op, repeats: Sequence[Parts], layer: int | None) -> Op:
    """Return the operation with its measured time, which includes the times of the host and of the mask."""
    if not isinstance(op, Compute):
        return op
    measured_s = np.array([parts.get((layer, op.name), 0.0) for parts in repeats])
    return Compute(name=op.name, device_s=measured_s, kind=op.kind)
