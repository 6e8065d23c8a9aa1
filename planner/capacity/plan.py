"""plan_capacity: find a fleet for requests and a target, alternatives, and reasons why other fleets miss the target."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvrsim.arguments import OnProgress
from kvrsim.builder import notes_on
from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.errors import InputError
from kvrsim.notes import without
from kvrsim.results.question import Question
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, get_strategy, label_of
from kvrsim.units import format_seconds
from planner.capacity.fleet import FleetLimits
from planner.capacity.request import CapacityRequest
from planner.capacity.result import CapacityPlan, FleetAnswer, Infeasible, groups_of
from planner.capacity.search import FleetSearch, FleetSimulator
from planner.capacity.times import ServiceTimes, StrategyPolicy, service_times
from planner.capacity.work import Work
from planner.capacity.workload import Lengths, Workload
from planner.deploy_engines import engines_with
from planner.processes import Pool

LONG = 60_000  # number of requests above which designs are searched on a part of the workload
_STRETCH = 40_000  # number of requests in the part of the workload
_ALTERNATIVES = 8


def plan_capacity(
    scenario: Scenario,
    request: CapacityRequest,
    policy: StrategyPolicy | None = None,
    *,
    warnings: Sequence[str] = (),
    pool: Pool | None = None,
    on_progress: OnProgress | None = None,
) -> CapacityPlan:
    """Search the cheapest fleet that meets the target.

    If the policy names no strategies, the answer has only strategies of engines. A note is added if other strategies
    need fewer GPUs, or if only other strategies meet the target.

    policy: the strategies that groups may run. pool: processes that simulate groups; None: this process. If its time
    budget ends, strategies and designs that are not simulated are left out, with a note. Raises InputError where no
    group size has a strategy.
    """
    pool = pool or Pool()
    policy = replace(policy or StrategyPolicy(), packs=request.pack_tokens is not None)
    workloads = [
        request.source.workload(request.seed, number)
        for number in range(request.replications if request.source.is_random else 1)
    ]
    if request.tpot_s is not None and workloads[0].output_tokens.max() < 2:
        raise InputError("tpot", request.tpot_s, "with requests of more than one output token")
    times = service_times(scenario, workloads, policy, request.pack_tokens)
    count = sum(map(len, workloads))
    work = Work(request, count, len(_stretch(workloads) or range(count)) * request.mixed, pool, on_progress)
    is_free = (
        policy.names is None and not policy.engines
    )  # whether a second search, of strategies of engines, may follow

    def plan_by(times: ServiceTimes, searches: float) -> CapacityPlan:
        limits = _limits(scenario, request.limits, times.policy)
        times.fill(limits.sizes, work, searches)
        if not (sizes := tuple(filter(times.layouts, limits.sizes))):
            raise InputError("time_budget", f"{pool.time_budget_s:g}s", "a longer time: no group is simulated yet")
        simulator = FleetSimulator(replace(request, limits=replace(limits, sizes=sizes)), workloads, times, work)
        return _plan(simulator, warnings)

    theory = plan_by(times, 1.3 if is_free else 1.0)
    if not is_free or theory.answer is None or theory.answer.engine is not None:
        return theory
    practice = plan_by(times.under(replace(policy, deployable=True)), 1.0)
    if practice.answer is None:
        note = "no fleet that an engine has today meets the target"
        if work.left_out or times.left_out:
            note = (
                f"--time-budget {work.pool.time_budget_s:g}s ended before all fleets that an engine has were simulated"
            )
        return replace(theory, warnings=(*theory.warnings, note))
    if theory.answer.num_gpus >= practice.answer.num_gpus:
        return practice
    fewer = f"with strategies that no engine has: {theory.answer.num_gpus} GPUs, {theory.answer.describe()}"
    return replace(practice, warnings=(*practice.warnings, f"{fewer} (--strategies all)"))


def _plan(simulator: FleetSimulator, warnings: Sequence[str]) -> CapacityPlan:
    """Search the cheapest fleet that meets the target, given the service times of groups."""
    begin_s, work = time.perf_counter(), simulator.work
    request, workloads, times = simulator.request, simulator.workloads, simulator.times
    scenario, policy, sizes = times.scenario, times.policy, request.limits.sizes
    search = FleetSearch(simulator)
    fits = search.all_fits(_stretch(workloads))
    fleets = search.answers(fits)
    nearest = None if fleets else search.nearest_miss()
    tried = search.around(fits, fleets if nearest is None else [nearest])
    infeasible = search.infeasible(fits)
    longest = replace(scenario.request, context_len=max(int(one.context_len.max()) for one in workloads))
    largest = replace(scenario.on_gpus(max(sizes)), request=replace(longest, cached_prefix=0))
    fleets = [replace(one, engine=_engines_of(one, largest)) for one in fleets[: 1 + _ALTERNATIVES]]
    if fleets:
        best = fleets[0]
        decoders = simulator.decoders(best.runs[0])
        if isinstance(decoders, str):
            infeasible.append(Infeasible(None, "decode", decoders))
        else:
            fleets = [replace(one, decode=decoders) for one in fleets]
        interval = best.interval or simulator.interval(best.fleet, best.runs)
        short = simulator if sum(map(len, workloads)) <= LONG else simulator.on(workloads[:1])
        growth = short.growth(best.fleet) if len(workloads[0]) <= LONG else None
        fleets[0] = replace(fleets[0], interval=interval, growth=growth)
    in_memory = {one.gpus_per_group for one in infeasible if one.code == "memory"}
    notes = [
        *dict.fromkeys((*without(warnings, "context-range"), *workloads[0].notes, *notes_on(largest))),
        *_memory_notes(workloads, times, [size for size in sizes if size not in in_memory]),
    ]
    if times.left_out or work.left_out:
        missing = [f"on {groups_of([size])} {', '.join(names)}" for size, names in times.left_out.items()]
        missing += [f"{work.left_out} designs of fleets"] * (work.left_out > 0)
        notes.append(f"--time-budget {work.pool.time_budget_s:g}s ended before all was simulated: {'; '.join(missing)}")
    if left_out := policy.left_out(largest):
        notes.append(f"not tried: {', '.join(left_out)}; --strategies tries those that it names, or all")
    return CapacityPlan(
        question=_question(largest, request, policy),
        scenario=largest,
        request=request,
        answer=fleets[0] if fleets else None,
        nearest_miss=nearest,
        alternatives=tuple(replace(answer, runs=()) for answer in fleets[1:]),
        infeasible=tuple(infeasible),
        workload=workloads[0].summary(),
        kv_transfer=None if request.transfer is None else request.transfer.summary(workloads),
        simulated_requests=work.simulated,
        seconds=time.perf_counter() - begin_s,
        warnings=tuple(notes),
        would_meet=() if nearest is None else tuple(_would_meet(nearest, request, workloads, times)),
        tried=tried,
    )


def _engines_of(fleet: FleetAnswer, largest: Scenario) -> str | None:
    """Engines that have the strategies of all groups of a fleet; None if no engine has. A server runs one strategy."""
    names: set[str] | None = None
    for group in fleet.groups:
        here = largest.on_gpus(group.gpus_per_group)
        each = [
            set(engines_with(get_strategy(name), here))
            for name in group.strategies
            if name in STRATEGIES or "+" in name
        ]
        one = each[0] if len(each) == 1 == len(group.strategies) else set()
        names = one if names is None else names & one
    return ", ".join(name for name in DEPLOY_ENGINES if name in (names or ())) or None


def _would_meet(
    nearest: FleetAnswer, request: CapacityRequest, workloads: Sequence[Workload], times: ServiceTimes
) -> Iterator[str]:
    """Changed targets that the fleet meets: a longer TTFT, a lower percentile, or shorter contexts."""
    target = request.target
    if math.isfinite(nearest.target_ttft_s):
        yield f"--slo-ttft {format_seconds(nearest.target_ttft_s * 1.01).replace(' ', '')}, with {nearest.describe()}"
    share = math.floor(1000 * nearest.in_time) / 10
    if 0 < share < target.percentile:
        yield f"--percentile {share:g}, with the same fleet"
    new, prefix = _lengths(workloads)
    alone_s = np.min([times.least_s(size, new, prefix) for size in request.limits.sizes], axis=0)
    late = alone_s > target.slo_s
    if 0 < late.sum() < len(late):
        cap = int(new[late].min()) - 1
        yield f"prompts of at most {cap} new tokens: {late.mean():.2%} of the requests take longer even alone"


def _limits(scenario: Scenario, limits: FleetLimits, policy: StrategyPolicy) -> FleetLimits:
    """The limits with only those group sizes that some strategy supports. Raises InputError if there are none."""
    if not (sizes := tuple(size for size in limits.sizes if policy.layouts(scenario.on_gpus(size)))):
        text = ",".join(label_of(one) for one in policy.names or ())
        where = "".join(f" and that {engine.title} has" for engine in policy.engines)
        raise InputError("strategies", text, f"a strategy that runs on {groups_of(limits.sizes)}{where}")
    return replace(limits, sizes=sizes)


def _stretch(workloads: Sequence[Workload]) -> Workload | None:
    """Requests on which mixed designs are searched first: a busy part, or the first replication; None: all requests."""
    first = workloads[0]
    if len(workloads) == 1 and len(first) <= LONG:
        return None
    return first if len(first) <= _STRETCH else first.busiest(_STRETCH)


def _question(largest: Scenario, request: CapacityRequest, policy: StrategyPolicy) -> Question:
    return Question.of(
        largest,
        seed=request.seed,
        strategies=None if policy.names is None else [label_of(one) for one in policy.names],
        slo_ttft_s=request.target.slo_s,
        percentile=request.target.percentile,
        objective=request.objective,
        group_sizes=list(request.limits.sizes),
        deployable_on=[engine.name for engine in policy.engines],
    )


def _memory_notes(workloads: Sequence[Workload], times: ServiceTimes, sizes: Sequence[int]) -> Iterator[str]:
    """Notes on contexts that exceed the memory of groups; one note for all sizes with the same contexts."""
    notes: dict[str, list[int]] = {}
    new, prefix = _lengths(workloads)
    for size in sizes:
        if len(lengths := (new + prefix)[np.isinf(times.least_s(size, new, prefix))]):
            note = f"{len(lengths)} contexts, from {int(lengths.min())} tokens on, do not fit in the memory of"
            notes.setdefault(note, []).append(size)
    return (f"{note} {groups_of(alike)}" for note, alike in notes.items())


def _lengths(workloads: Sequence[Workload]) -> Sequence[Lengths]:
    """New tokens and cached prefixes of all requests."""
    return [np.concatenate([getattr(one, name) for one in workloads]) for name in ("new_tokens", "cached_prefix")]
