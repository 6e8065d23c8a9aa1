"""Confirming a plan: its candidates are measured on the machine, round-robin, and compared with their predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.kernels.profile import Gather
from kvrsim.results.question import Question
from kvrsim.results.results import Plan
from kvrsim.scenario import Scenario
from kvrsim.units import format_seconds
from planner.candidates import Search
from planner.confirm.candidates import Fitting, Named, Room, candidates_of, compared, fitting
from planner.confirm.drift import ClockDrift, corrected_for, drift_of
from planner.confirm.hardware import Hardware, devices_of, gather_of, gpu_notes, other_device, run_plan
from planner.confirm.measured import Measured, run_ranks, run_virtual_ranks
from planner.confirm.result import Candidate, Confirmation, Mode, Targets
from planner.plan import make_plan
from planner.simulate import run_simulation

if TYPE_CHECKING:
    from kvrsim.runtime.ranks import OnProgress

_LEAST_IDLE = 3  # rounds; with fewer, all rounds count
_LEAST_ACCOUNTED_S = 0.2  # of a prefill; for shorter ones the system's CPU accounting is too coarse

OnNote = Callable[[str], object]  # takes a line of text while the work goes on


def confirm(
    scenario: Scenario,
    hardware: Hardware,
    *,
    strategies: Sequence[str] | None = None,
    top: int = 3,
    virtual: bool | None = None,
    targets: Targets | None = None,
    warnings: Sequence[str] = (),
    on_note: OnNote | None = None,
    on_progress: OnProgress | None = None,
) -> Confirmation:
    """Make a plan, measure its strategies and its `top` best partitions, and compare them with the predictions.

    strategies: names, "all" for every one that can be measured here, None for the paper's.
    virtual: replay all ranks on one device; None: where the machine has fewer devices than the scenario has GPUs.
    on_note: called with messages. on_progress: called with steps done, steps in all and what is being done.
    Raises InputError without a profile, where the machine cannot run the scenario or a strategy, or where no candidate
    fits in its memory; RankError where a rank fails.
    """
    scenario = hardware.placed(scenario)
    check(scenario, hardware)
    mode, notes = _mode(scenario, hardware, virtual)
    chosen = compared(scenario, strategies, mode, hardware.choice(scenario))
    plan = make_plan(scenario, strategies=chosen.names)
    fit = _fitting(scenario, hardware, candidates_of(scenario, plan, top), mode)
    named, notes = fit.candidates, (*notes, *chosen.notes, *fit.notes, *gpu_notes(hardware.device))
    seconds = {result.strategy: result.ttft_s for result in plan.strategies}
    longest_s = max(seconds[one.run_as] for one in named)
    if on_note is not None:
        for note in (*warnings, *notes):
            on_note(note)
        on_note(_work_note(named, hardware, sum(seconds[one.run_as] for one in named)))
    gather = _gather(scenario, hardware, "tsp")
    plans = [
        run_plan(scenario, one.run_as, one.partition, _gather(scenario, hardware, one.run_as), one.layers)
        for one in named
    ]
    job = hardware.job(scenario, tuple(dict.fromkeys(plans)), check=fit.reference)
    run = run_virtual_ranks if mode == "virtual" else run_ranks
    found, conditions, drift_s = run(scenario, hardware, named, plans, job, longest_s, on_progress)
    rounds, idle_notes = _idle_rounds(found)
    drift = drift_of(scenario, tuple(drift_s[number] for number in rounds)) if drift_s else None
    device = conditions["device"]
    assert scenario.profile is not None
    other = other_device(scenario.profile.gpu, device)
    candidates = tuple(
        _candidate(scenario, one, measured, rounds, drift) for one, measured in zip(named, found, strict=True)
    )
    return Confirmation(
        question=Question.of(scenario, seed=hardware.seed, top=top, virtual=mode == "virtual"),
        model=scenario.model.name,
        profile=scenario.profile_name,
        cluster=scenario.cluster,
        attention=scenario.kernel,
        dtype=scenario.request.dtype,
        num_gpus=scenario.cluster.num_gpus,
        context_len=scenario.request.context_len,
        mode=mode,
        candidates=candidates,
        chosen=_chosen(candidates, plan),
        tsp=_tsp(scenario, gather, mode),
        measured=_measured_parts(mode, fit.reference),
        modelled=_modelled_parts(mode, scenario, hardware),
        conditions=conditions,
        drift=drift,
        targets=targets or Targets(),
        warnings=(*warnings, *notes, *idle_notes, *([other] if other else [])),
        memory_limit=scenario.memory_limit,
    )


def check(scenario: Scenario, hardware: Hardware, *, needs_profile: bool = True) -> None:
    """Raise InputError where the runtime cannot run the scenario, before anything is started."""
    if needs_profile and scenario.profile is None:
        raise InputError("profile", scenario.profile_name, "a profile of this machine; kvrsim calibrate all makes one")
    if scenario.request.cached_prefix:
        raise InputError("cached_prefix", scenario.request.cached_prefix, "0: the runtime prefills whole contexts")
    if scenario.cluster.num_gpus > scenario.request.new_tokens:
        raise InputError(
            "gpus", scenario.cluster.num_gpus, f"at most one GPU a token, here {scenario.request.new_tokens}"
        )
    from kvrsim.runtime.geometry import check_kernel

    check_kernel(scenario.model.model_type, scenario.kernel)
    hardware.choice(scenario)


def _mode(scenario: Scenario, hardware: Hardware, virtual: bool | None) -> tuple[Mode, tuple[str, ...]]:
    """Separate processes or virtual ranks, and notes on the choice."""
    from kvrsim.runtime.ranks import started_by_torchrun

    wanted, there = scenario.cluster.num_gpus, devices_of(hardware)
    if virtual is None and wanted > there and not started_by_torchrun():
        what = "GPU" if hardware.device == "cuda" else "core"
        shown = f"{there} {what}{'s' * (there != 1)}"
        return "virtual", (f"{wanted} ranks on {shown}: virtual ranks, one after another; messages are modelled",)
    if virtual:
        return "virtual", ()
    notes = (f"{wanted} ranks on {there} devices: they slow each other down",) if wanted > there else ()
    return "ranks", notes


def _gather(scenario: Scenario, hardware: Hardware, strategy: str) -> Gather:
    return gather_of(scenario.profile, emulated=hardware.emulated, strategy=strategy)


def _fitting(scenario: Scenario, hardware: Hardware, named: Sequence[Named], mode: Mode) -> Fitting:
    room = Room.of(scenario, hardware.device, devices_of(hardware), mode)
    return fitting(scenario, named, room, mode)


def _chosen(candidates: Sequence[Candidate], plan: Plan) -> int:
    """The plan's choice; where it is not measured, the candidate that is predicted to be the fastest."""
    names = [one.strategy for one in candidates]
    if plan.best.strategy in names:
        return names.index(plan.best.strategy)
    return min(range(len(names)), key=lambda index: candidates[index].predicted_s)


def _work_note(named: Sequence[Named], hardware: Hardware, round_s: float) -> str:
    """What is measured, and how long the prefills should take by the profile."""
    rounds = hardware.warmups + hardware.repeats
    expected = f"about {format_seconds(round_s * rounds)} of prefills by the profile"
    return f"measuring {len(named)} candidates, {hardware.warmups} + {hardware.repeats} times each: {expected}"


def _candidate(
    scenario: Scenario, named: Named, measured: Measured, rounds: Sequence[int], drift: ClockDrift | None
) -> Candidate:
    asked: dict[str, Any] = dict(strategy=named.as_run, search=Search(partition=named.partition.chunk_lens))
    predicted = run_simulation(scenario, **asked, record=["timeline"])
    assert predicted.timeline is not None
    return Candidate(
        strategy=named.strategy,
        partition=named.partition.chunk_lens,
        layers=named.layers,
        predicted_s=predicted.ttft_s,
        predicted_low_s=predicted.ttft_low_s,
        predicted_high_s=predicted.ttft_high_s,
        drift_corrected_s=None if drift is None else run_simulation(corrected_for(drift, scenario), **asked).ttft_s,
        samples_s=tuple(measured.samples_s[number] for number in rounds),
        logits_error=measured.logits_error,
        logits_scale=measured.logits_scale,
        predicted=predicted.timeline,
        measured=measured.timeline,
        memory=tuple(rank.memory for rank in predicted.per_rank),
    )


def _idle_rounds(found: Sequence[Measured]) -> tuple[list[int], tuple[str, ...]]:
    """Rounds in which no other process used the machine, the same for all candidates, and notes on the others."""
    everyone = range(len(found[0].samples_s))
    idle = [
        number
        for number in everyone
        if not any(is_busy(one.samples_s[number], one.other_cores[number]) for one in found)
    ]
    busy = len(everyone) - len(idle)
    if not busy:
        return list(everyone), ()
    if len(idle) >= min(_LEAST_IDLE, len(everyone)):
        return idle, (f"{busy} of {len(everyone)} rounds left out: other processes used the machine",)
    return list(everyone), (f"other processes used the machine in {busy} of {len(everyone)} rounds; all are counted",)


def is_busy(sample_s: float, other_cores: float | None) -> bool:
    """Whether other processes used this machine during a prefill; False where CPU accounting cannot tell."""
    from kvrsim.runtime.host import busy_cores

    return other_cores is not None and sample_s >= _LEAST_ACCOUNTED_S and other_cores > busy_cores()


def _tsp(scenario: Scenario, gather: Gather, mode: Mode) -> str:
    """Which all-gather, and what attention covers."""
    covers = "attention up to the chunk's end" if scenario.kernel == "flash" else "attention over the whole context"
    if mode == "virtual":
        return f"all-gather modelled; {covers}"
    how = "a ring of sends between neighbours" if gather == "ring" else "the backend's own"
    return f"all-gather: {how}; {covers}"


def _measured_parts(mode: Mode, logits: bool) -> tuple[str, ...]:
    whole = "TTFT of whole prefills"
    parts = "every part of every layer on every rank, alone on one device"
    return (whole if mode == "ranks" else parts, *(["logits"] if logits else []))


def _modelled_parts(mode: Mode, scenario: Scenario, hardware: Hardware) -> tuple[str, ...]:
    if mode == "virtual":
        return (f"messages and waiting, by {scenario.cluster.describe()}", "that ranks do not slow each other down")
    if hardware.emulated:
        return (f"links: messages are held back as by {scenario.cluster.describe()}",)
    return ()
