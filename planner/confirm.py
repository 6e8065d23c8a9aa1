"""Confirming a plan: its candidates run on the machine, interleaved, beside what the simulator says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.profile import Gather
from kvrsim.results import Plan
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from kvrsim.timeline import Timeline
from planner.confirm_candidates import Named, candidates_of
from planner.confirm_hardware import Hardware, gather_of, other_device, run_plan
from planner.confirm_pace import Pace, at_pace, pace_of, pace_tokens
from planner.confirm_result import Candidate, Confirmation, Mode, Targets
from planner.confirm_virtual import composed_s, composed_timeline
from planner.plan import make_plan
from planner.simulate import run_simulation

if TYPE_CHECKING:
    from kvrsim.runtime.plan import RunPlan
    from kvrsim.runtime.virtual import VirtualTiming

STRATEGIES = ("single", "tsp", "kvr-e", "kvr-s")
_BUSY_CORES = 0.1  # of others, beside which a prefill does not count
_LEAST_QUIET = 3  # rounds, with fewer of which all count
_TELLING_S = 0.2  # of a prefill, below which the system's account of who was busy says nothing

Told = Callable[[str], object]  # a line for people, while it lasts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """What the machine did with one candidate."""

    samples_s: tuple[float, ...]  # by round
    other_cores: tuple[float | None, ...]  # by round
    logits_error: float | None
    logits_scale: float | None
    timeline: Timeline | None


def confirm(
    scenario: Scenario,
    hardware: Hardware,
    *,
    top: int = 3,
    virtual: bool | None = None,
    targets: Targets | None = None,
    warnings: Sequence[str] = (),
    on_note: Told | None = None,
) -> Confirmation:
    """Make a plan, run its strategies and its `top` best partitions, and say how far the plan was off.

    virtual: replay all ranks on one device; None: where the machine has fewer devices than the scenario has GPUs.
    Raises InputError without a profile, or where the machine cannot run the scenario; RankError where a rank fails.
    """
    scenario = hardware.placed(scenario)
    check(scenario, hardware)
    plan = make_plan(scenario, strategies=STRATEGIES if scenario.cluster.num_gpus > 1 else ("single",))
    named = candidates_of(scenario, plan, top)
    mode, notes = _mode(scenario, hardware, virtual)
    if on_note is not None:
        for note in (*warnings, *notes):
            on_note(note)
        on_note(f"measuring {len(named)} candidates, {hardware.warmups} + {hardware.repeats} times each")
    gather = gather_of(scenario.profile, emulated=hardware.emulated)
    plans = [run_plan(scenario, one.run_as, one.partition, gather) for one in named]
    run = _run_virtual if mode == "virtual" else _run_ranks
    found, conditions, pace_s = run(scenario, hardware, named, plans, _seconds(scenario, plan))
    rounds, quiet_notes = _quiet_rounds(found)
    pace = pace_of(scenario, tuple(pace_s[number] for number in rounds)) if pace_s else None
    device = conditions["device"]
    assert scenario.profile is not None
    other = other_device(scenario.profile.gpu, device)
    return Confirmation(
        model=scenario.model.name,
        profile=scenario.profile_name,
        cluster=scenario.cluster.describe(),
        attention=scenario.kernel,
        dtype=scenario.request.dtype,
        num_gpus=scenario.cluster.num_gpus,
        context_len=scenario.request.context_len,
        mode=mode,
        candidates=tuple(
            _candidate(scenario, one, measured, rounds, pace) for one, measured in zip(named, found, strict=True)
        ),
        chosen=next(index for index, one in enumerate(named) if one.strategy == plan.best.strategy),
        tsp=_tsp(scenario, gather, mode),
        measured=_told_measured(mode, hardware),
        modelled=_told_modelled(mode, scenario, hardware),
        conditions=conditions,
        pace=pace,
        targets=targets or Targets(),
        warnings=(*warnings, *notes, *quiet_notes, *([other] if other else [])),
    )


def check(scenario: Scenario, hardware: Hardware, *, needs_profile: bool = True) -> None:
    """InputError where the runtime cannot do what the scenario asks for, before anything is started."""
    if needs_profile and scenario.profile is None:
        raise InputError("profile", scenario.profile_name, "a profile of this machine; kvrsim calibrate all makes one")
    if scenario.request.cached_prefix:
        raise InputError("cached_prefix", scenario.request.cached_prefix, "0: the runtime prefills whole contexts")
    if scenario.cluster.num_gpus > scenario.request.new_tokens:
        raise InputError(
            "gpus", scenario.cluster.num_gpus, f"at most one GPU a token, here {scenario.request.new_tokens}"
        )
    from kvrsim.runtime.geometry import family_of

    family_of(scenario.model.model_type)
    hardware.choice(scenario)


def _mode(scenario: Scenario, hardware: Hardware, virtual: bool | None) -> tuple[Mode, tuple[str, ...]]:
    """Ranks of their own, or virtual ones, and what to say of it."""
    from kvrsim.runtime.host import devices
    from kvrsim.runtime.ranks.launch import started_by_torchrun

    wanted, there = scenario.cluster.num_gpus, devices(hardware.device, hardware.threads)
    if virtual is None and wanted > there and not started_by_torchrun():
        what = "GPU" if hardware.device == "cuda" else "core"
        shown = f"{there} {what}{'s' * (there != 1)}"
        return "virtual", (f"{wanted} ranks on {shown}: virtual ranks, one after another; messages are modelled",)
    if virtual:
        return "virtual", ()
    notes = (f"{wanted} ranks on {there} devices: they slow each other down",) if wanted > there else ()
    return "ranks", notes


def _seconds(scenario: Scenario, plan: Plan) -> float:
    """Of the longest prefill, as predicted; one rank alone may take all there is to compute."""
    return max(result.ttft_s for result in plan.strategies)


def _run_ranks(
    scenario: Scenario, hardware: Hardware, named: Sequence[Named], plans: Sequence[RunPlan], longest_s: float
) -> tuple[list[_Measured], dict[str, str], tuple[float, ...]]:
    """Every candidate on ranks of their own, each partition once."""
    from kvrsim.runtime.job import JobReport, run_job
    from kvrsim.runtime.ranks.launch import launch

    unique = list(dict.fromkeys(plans))
    count = len(unique) * (hardware.repeats + hardware.warmups + 3) + 2
    how = hardware.launch(scenario.cluster.num_gpus, longest_s, count * longest_s)
    job = replace(hardware.job(scenario, tuple(unique)), pace_tokens=pace_tokens(scenario))
    report: JobReport = launch(run_job, job, how=how)[-1]
    found = {
        plan: _Measured(
            samples_s=timing.ttft_s,
            other_cores=timing.other_cores,
            logits_error=difference.logits,
            logits_scale=difference.logits_scale,
            timeline=timeline,
        )
        for plan, timing, timeline, difference in zip(
            unique, report.bench.timings, report.bench.timelines, report.differences, strict=True
        )
    }
    return [found[plan] for plan in plans], report.bench.conditions, report.bench.pace_s


def _run_virtual(
    scenario: Scenario, hardware: Hardware, named: Sequence[Named], plans: Sequence[RunPlan], longest_s: float
) -> tuple[list[_Measured], dict[str, str], tuple[float, ...]]:
    """Every candidate's ranks one after another on one device."""
    from kvrsim.runtime.ranks.launch import launch
    from kvrsim.runtime.virtual import VirtualReport, run_virtual

    unique = list(dict.fromkeys(plans))
    count = len(unique) * (hardware.repeats + hardware.warmups) * 2 + 2
    how = hardware.launch(1, longest_s, count * longest_s)
    report: VirtualReport = launch(run_virtual, hardware.job(scenario, tuple(unique)), how=how)[-1]
    timings = dict(zip(unique, report.timings, strict=True))
    found = [_composed(scenario, one, timings[plan]) for one, plan in zip(named, plans, strict=True)]
    return found, report.conditions | {"ranks": f"{scenario.cluster.num_gpus}, virtual, one after another"}, ()


def _composed(scenario: Scenario, named: Named, timing: VirtualTiming) -> _Measured:
    strategy = get_strategy(named.run_as)
    placed = scenario.on_gpus(len(named.partition.chunk_lens))
    return _Measured(
        samples_s=composed_s(placed, strategy, named.partition, timing.repeats),
        other_cores=timing.other_cores,
        logits_error=timing.logits_error,
        logits_scale=timing.logits_scale,
        timeline=composed_timeline(placed, strategy, named.partition, timing.repeats),
    )


def _candidate(
    scenario: Scenario, named: Named, measured: _Measured, rounds: Sequence[int], pace: Pace | None
) -> Candidate:
    asked: dict[str, Any] = dict(strategy=named.run_as, partition=named.partition.chunk_lens)
    predicted = run_simulation(scenario, **asked, timeline=True)
    assert predicted.timeline is not None
    return Candidate(
        strategy=named.strategy,
        partition=named.partition.chunk_lens,
        predicted_s=predicted.ttft_s,
        predicted_low_s=predicted.ttft_low_s,
        predicted_high_s=predicted.ttft_high_s,
        at_pace_s=None if pace is None else run_simulation(at_pace(scenario, pace), **asked).ttft_s,
        samples_s=tuple(measured.samples_s[number] for number in rounds),
        logits_error=measured.logits_error,
        logits_scale=measured.logits_scale,
        predicted=predicted.timeline,
        measured=measured.timeline,
    )


def _quiet_rounds(found: Sequence[_Measured]) -> tuple[list[int], tuple[str, ...]]:
    """Rounds in which nobody else used the machine, for all candidates alike, and what to say of the others."""
    everyone = range(len(found[0].samples_s))
    quiet = [number for number in everyone if all(_is_quiet(one, number) for one in found)]
    busy = len(everyone) - len(quiet)
    if not busy:
        return list(everyone), ()
    if len(quiet) >= min(_LEAST_QUIET, len(everyone)):
        return quiet, (f"{busy} of {len(everyone)} rounds left out: others used the machine meanwhile",)
    return list(everyone), (f"others used the machine in {busy} of {len(everyone)} rounds; all are counted",)


def _is_quiet(one: _Measured, number: int) -> bool:
    cores = one.other_cores[number]
    return cores is None or one.samples_s[number] < _TELLING_S or cores <= _BUSY_CORES


def _tsp(scenario: Scenario, gather: Gather, mode: Mode) -> str:
    """Which all-gather, and what attention covers."""
    covers = "attention up to the chunk's end" if scenario.kernel == "flash" else "attention over the whole context"
    if mode == "virtual":
        return f"all-gather modelled; {covers}"
    how = "a ring of sends between neighbours" if gather == "ring" else "the backend's own"
    return f"all-gather: {how}; {covers}"


def _told_measured(mode: Mode, hardware: Hardware) -> tuple[str, ...]:
    if mode == "ranks":
        return ("TTFT of whole prefills", "logits")
    return ("every part of every layer on every rank, alone on one device", "logits")


def _told_modelled(mode: Mode, scenario: Scenario, hardware: Hardware) -> tuple[str, ...]:
    if mode == "virtual":
        return (f"messages and waiting, by {scenario.cluster.describe()}", "that ranks do not slow each other down")
    if hardware.emulated:
        return (f"links: messages are held back as by {scenario.cluster.describe()}",)
    return ()
