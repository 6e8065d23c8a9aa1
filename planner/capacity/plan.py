"""plan_capacity: find a fleet for requests and a target, alternatives, and reasons why other fleets miss the target."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.builder import notes_on
from kvrsim.choices import DEPLOY_ENGINES
from kvrsim.engine import SHORT_TOKENS
from kvrsim.errors import InputError
from kvrsim.execution import place
from kvrsim.notes import without
from kvrsim.progress import OnProgress
from kvrsim.results.question import Question
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, get_strategy, label_of
from kvrsim.units import format_seconds
from planner.capacity.fleet import FleetLimits
from planner.capacity.request import CapacityRequest
from planner.capacity.result import (
    CapacityPlan,
    ClusterAnswer,
    FleetAnswer,
    GroupAnswer,
    Growth,
    Infeasible,
    format_share,
    groups_of,
)
from planner.capacity.search import FleetFit, FleetSearch, FleetSimulator
from planner.capacity.times import ServiceTimes, StrategyPolicy, service_times
from planner.capacity.work import Work
from planner.capacity.workload import Lengths, Workload
from planner.deploy_engines import engines_with
from planner.processes import Pool
from planner.uncertainty.intervals import layout_notes

LONG = 40_000  # requests of a trace above which designs are compared on this number of them first
_ALTERNATIVES = 8  # most other fleets in the answer
_DEAREST = 2.0  # cost over that of the answer, above which groups that prefill are no alternative
GROWTH = (1.5, 2.0, 3.0)  # multiples of the requests for which the question is asked again
_MOST_IN_GROWTH = 600_000  # largest number of requests for which growth is searched: about a minute


def plan_capacity(
    scenario: Scenario,
    request: CapacityRequest,
    policy: StrategyPolicy | None = None,
    *,
    warnings: Sequence[str] = (),
    pool: Pool | None = None,
    on_progress: OnProgress | None = None,
) -> CapacityPlan:
    """Search the cheapest fleet that meets the target, and the fleets for more requests.

    If the policy names no strategies, the answer has only strategies of engines. A note is added if other strategies
    need fewer GPUs, or if only other strategies meet the target.

    policy: the strategies that groups may run. pool: processes that simulate groups; None: this process. If its time
    budget ends, strategies and designs that are not simulated are left out, with a note. Raises InputError where no
    group size has a strategy.
    """
    begin_s = time.perf_counter()
    packed = replace(policy or StrategyPolicy(), packs=request.budget is not None or request.has_turns)
    sizing = Sizing(scenario, packed, Work(pool, on_progress))
    outcome = sizing.search(request, "fleets")
    plan = _report(outcome, warnings)
    if plan.answer is not None and not sizing.work.is_late:
        simulator = outcome.search.simulator
        sizing.work.begin("the interval of the size")
        size_interval = simulator.size_interval(plan.answer)
        answer = replace(plan.answer, size_interval=size_interval, withstands=simulator.withstands(plan.answer))
        plan = replace(plan, answer=answer)
    if plan.answer is not None:
        growth, note = sizing.growth(request)
        plan = replace(plan, growth=growth)
        if note is not None:
            plan = replace(plan, warnings=(*plan.warnings, note))
    seconds = time.perf_counter() - begin_s
    return replace(plan, simulated_requests=sizing.work.simulated, seconds=seconds)


def cheapest_of(names: Sequence[str], plans: Sequence[CapacityPlan]) -> CapacityPlan:
    """The plan of the cheapest of several clusters, or of the smallest if some have no price, with all answers."""
    answers = [
        ClusterAnswer(cluster=name, answer=plan.answer, growth=plan.growth)
        for name, plan in zip(names, plans, strict=True)
    ]
    priced = all(plan.first.total_cost_per_hour is not None for plan in plans)

    def cost(plan: CapacityPlan) -> tuple[bool, float]:
        value: float | None = plan.first.total_gpus
        if priced:
            value = plan.first.total_cost_per_hour
        return plan.answer is None, value or 0.0

    best = min(plans, key=cost)
    return replace(best, by_cluster=tuple(answers))


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOutcome:
    """What a search found."""

    search: FleetSearch
    largest: Scenario  # the longest context on the largest group
    fits: list[FleetFit]
    fleets: list[FleetAnswer]  # fleets that meet the TTFT target, best first; those without a fleet that decodes last
    tried: tuple[FleetAnswer, ...] | None  # the best designs, with fewer and more groups; None: not simulated yet
    left_out: int  # designs for which the time budget was too short
    notes: tuple[str, ...] = ()

    @property
    def feasible(self) -> list[FleetAnswer]:
        """The fleets for which there is a fleet that decodes, if one is requested."""
        return [fleet for fleet in self.fleets if fleet.no_decode is None]


class Sizing:
    """Searches of fleets for different amounts of traffic, on the same groups."""

    def __init__(self, scenario: Scenario, policy: StrategyPolicy, work: Work) -> None:
        self.scenario = scenario
        self.policy = policy
        self.work = work
        self._times: ServiceTimes | None = None  # those of the last search

    def search(self, request: CapacityRequest, stage: str, *, only_best: bool = False) -> FleetOutcome:
        """The fleets for the requests; only with strategies of engines, unless the policy or the target needs others.

        stage: what the fleets are for, in reports of progress. only_best: leave out fleets that cannot be the answer.
        """
        workloads = request.workloads()
        if request.target.tpot_s is not None and workloads[0].output_tokens.max() < 2:
            raise InputError("tpot", request.target.tpot_s, "with requests of more than one output token")
        times = service_times(self.scenario, workloads, self.policy, request.step_budget, self._times)
        self._times = times
        self.work.begin(stage)
        asks_for_none = self.policy.names is None and not self.policy.engines
        dearest = 1.0 if only_best else _DEAREST
        if not asks_for_none:
            return self._search(request, workloads, times, dearest=dearest)
        deployable = times.under(replace(self.policy, deployable=True))
        practice = None
        if any(deployable.layouts(size) for size in request.limits.sizes):
            practice = self._search(request, workloads, deployable, dearest=dearest)
        if practice is None or not practice.feasible:
            theory = self._search(request, workloads, times, dearest=dearest, earlier=practice)
            if not theory.feasible:
                return theory
            note = "no fleet that an engine has today meets the target"
            if theory.left_out or times.left_out:
                budget_s = self.work.pool.time_budget_s
                note = f"--time-budget {budget_s:g}s ended before all fleets that an engine has were simulated"
            return replace(theory, notes=(note,))
        if only_best:
            return practice
        cost = practice.search.cost(practice.feasible[0])
        if cost <= practice.search.least_split_cost:  # other strategies only prefill
            return practice
        theory = self._search(request, workloads, times, dearest=1.0, below=cost, earlier=practice)
        if not theory.feasible or theory.search.cost(theory.feasible[0]) >= cost:
            return practice
        fewer = theory.feasible[0]
        note = f"with strategies that no engine has: {fewer.total_gpus} GPUs, {fewer.describe()} (strategies all)"
        return replace(practice, notes=(note,))

    def _search(
        self,
        request: CapacityRequest,
        workloads: Sequence[Workload],
        times: ServiceTimes,
        *,
        dearest: float,
        below: float = math.inf,
        earlier: FleetOutcome | None = None,
    ) -> FleetOutcome:
        """The fleets with the strategies of a policy; dearest and below: see FleetSearch; earlier: another policy's."""
        limits = _limits(self.scenario, request.limits, times.policy)
        times.fill(limits.sizes, self.work)
        sizes = tuple(filter(times.layouts, limits.sizes))
        if not sizes:
            budget_s = self.work.pool.time_budget_s
            raise InputError("time_budget", f"{budget_s:g}s", "a longer time: no group is simulated yet")
        limited = replace(request, limits=replace(limits, sizes=sizes))
        if earlier is None:
            simulator = FleetSimulator(limited, workloads, times, self.work)
        else:
            simulator = earlier.search.simulator.under(limited, times)
        search = FleetSearch(simulator, dearest=dearest, below=below)
        fits = search.all_fits(_stretch(workloads))
        fleets = search.answers(fits)
        tried = None
        if request.sure and fleets:  # groups are added one by one until the interval is safe; a cheaper fleet may be
            tried = search.around(fits, fleets)
            by_fleet = {answer.fleet: answer for answer in (*tried, *fleets)}
            fleets = search.in_order(by_fleet.values())
        longest_context = max(int(workload.context_len.max()) for workload in workloads)
        longest = replace(self.scenario.request, context_len=longest_context)
        largest = replace(self.scenario.on_gpus(max(sizes)), request=replace(longest, cached_prefix=0))
        fleets = [replace(fleet, engine=_engines_of(fleet, largest)) for fleet in fleets]
        left_out = self.work.left_out
        return FleetOutcome(search=search, largest=largest, fits=fits, fleets=fleets, tried=tried, left_out=left_out)

    def growth(self, request: CapacityRequest) -> tuple[tuple[Growth, ...], str | None]:
        """The answers to the same question with more requests, and a note if some are not simulated."""
        growth: list[Growth] = []
        for factor in GROWTH:
            source = request.source.times(factor)
            requests = source.num_requests
            if source.is_random:
                requests *= request.replications
            if requests > _MOST_IN_GROWTH:
                return tuple(growth), f"{factor:g} times the requests are too many to simulate here; use `rate_scale`"
            if self.work.pool.is_late():
                return tuple(growth), f"the time budget ended before {factor:g} times the requests were simulated"
            outcome = self.search(replace(request, source=source), f"{factor:g} times the requests", only_best=True)
            if outcome.left_out:
                return tuple(growth), f"the time budget ended before {factor:g} times the requests were simulated"
            growth.append(_growth(factor, outcome.feasible))
        return tuple(growth), None


def _growth(factor: float, feasible: Sequence[FleetAnswer]) -> Growth:
    """The answer for `factor` times the requests; feasible: the fleets that meet the target, best first."""
    if not feasible:
        return Growth(times=factor, num_gpus=None, decode_gpus=0, cost_per_hour=None)
    best = feasible[0]
    return Growth(
        times=factor,
        num_gpus=best.total_gpus,
        decode_gpus=0 if best.decode is None else best.decode.num_gpus,
        cost_per_hour=best.total_cost_per_hour,
    )


def _report(outcome: FleetOutcome, warnings: Sequence[str]) -> CapacityPlan:
    """The plan of a search: the answer, fleets beside it, reasons and notes."""
    search = outcome.search
    simulator = outcome.search.simulator
    fits = outcome.fits
    request = simulator.request
    workloads = simulator.workloads
    times = simulator.times
    policy = times.policy
    sizes = request.limits.sizes
    largest = outcome.largest
    fleets = outcome.feasible
    infeasible = search.infeasible(fits)
    nearest = None
    interval_notes: tuple[str, ...] = ()
    if fleets:
        best = fleets[0]
        runs = best.runs or tuple(simulator.runs(best.fleet))
        fleets[0] = search.with_safety(replace(best, runs=runs))
        if fleets[0].interval is not None:
            prefill = simulator.prefill_at_percentile(best.fleet, runs)
            interval_notes = tuple(layout_notes(prefill.execution))
    elif outcome.fleets:
        nearest = outcome.fleets[0]
        infeasible = [Infeasible(None, "decode", nearest.no_decode or ""), *infeasible]
    else:
        nearest = search.nearest_miss()
    tried = outcome.tried
    if nearest is not None:
        tried = search.around(fits, [nearest])
    elif tried is None:
        tried = search.around(fits, fleets)
    # Notes on the lengths of `warnings` are those of the command line's default context, not of the requests.
    notes_of_lengths = ["context-range"]
    if min(int(workload.new_tokens.min()) for workload in workloads) >= SHORT_TOKENS:
        notes_of_lengths.append("engine, short")
    out_of_memory = {groups.gpus_per_group for groups in infeasible if groups.code == "memory"}
    notes = [
        *dict.fromkeys((*without(warnings, *notes_of_lengths), *workloads[0].notes, *notes_on(largest))),
        *interval_notes,
        *_memory_notes(workloads, times, [size for size in sizes if size not in out_of_memory]),
    ]
    notes += _search_notes(outcome, workloads)
    longest_sequence = max(int((workload.context_len + workload.output_tokens).max()) for workload in workloads)
    return CapacityPlan(
        question=_question(largest, request, policy),
        scenario=largest,
        request=request,
        answer=fleets[0] if fleets else None,
        nearest_miss=nearest,
        alternatives=_alternatives(fleets),
        infeasible=tuple(infeasible),
        workload=workloads[0].summary(),
        kv_transfer=None if request.transfer is None else request.transfer.summary(workloads),
        simulated_requests=simulator.work.simulated,
        seconds=0.0,
        warnings=(*notes, *outcome.notes),
        longest_sequence=longest_sequence,
        would_meet=() if nearest is None else tuple(_would_meet(nearest, simulator)),
        by_cluster=(),
        growth=(),
        tried=tried,
    )


def _search_notes(outcome: FleetOutcome, workloads: Sequence[Workload]) -> Iterator[str]:
    """What the search has not simulated, or only with a part of the requests, and what its caches assume."""
    simulator = outcome.search.simulator
    times = simulator.times
    largest = outcome.largest
    if times.left_out or outcome.left_out:
        missing = [f"on {groups_of([size])} {', '.join(names)}" for size, names in times.left_out.items()]
        if outcome.left_out:
            missing.append(f"{outcome.left_out} designs of fleets")
        budget_s = simulator.work.pool.time_budget_s
        yield f"--time-budget {budget_s:g}s ended before all was simulated: {'; '.join(missing)}"
    mixers = (layer.mixer for layer in largest.model.layers)
    if simulator.request.has_turns and any(mixer is not None and mixer.state_bytes(2.0) > 0 for mixer in mixers):
        yield "prefix caches are taken to keep the states of recurrent layers after every block of tokens"
    stretch = _stretch(workloads)
    if stretch is not None:
        part = f"{len(stretch)} of the {simulator.requests} requests"
        yield f"designs were compared on {part}; the best of them, and all that is shown, on all requests"
    if left_out := replace(times.policy, deployable=False).left_out(largest):
        yield f"not tried: {', '.join(left_out)}; the option strategies tries those that it names, or all"


def _alternatives(fleets: Sequence[FleetAnswer]) -> tuple[FleetAnswer, ...]:
    """The next fleets after the first; the last of them serve more requests, or serve them in the other way, if any."""
    alternatives = [replace(answer, runs=()) for answer in fleets[1:]]
    shown = alternatives[:_ALTERNATIVES]
    serves_more = (answer for answer in alternatives if answer.unserved < fleets[0].unserved)
    other_way = (answer for answer in alternatives if answer.serving != fleets[0].serving)
    for answer in (next(serves_more, None), next(other_way, None)):
        if answer is not None and answer not in shown:
            shown.append(answer)
    return tuple(shown)


def _engines_of(fleet: FleetAnswer, largest: Scenario) -> str | None:
    """Engines that have the strategies of all groups of a fleet; None if no engine has."""
    common = set(DEPLOY_ENGINES)
    for group in fleet.groups:
        common &= _engines_of_group(group, largest.on_gpus(group.gpus_per_group))
    return ", ".join(name for name in DEPLOY_ENGINES if name in common) or None


def _engines_of_group(group: GroupAnswer, scenario: Scenario) -> set[str]:
    """Engines that have the strategy of a group; none if the group runs several, as a server runs one strategy."""
    if len(group.strategies) != 1:
        return set()
    (name,) = group.strategies
    if name not in STRATEGIES and "+" not in name:  # a strategy of the user
        return set()
    return set(engines_with(place(scenario, get_strategy(name))))


def _would_meet(nearest: FleetAnswer, simulator: FleetSimulator) -> Iterator[str]:
    """Changed targets that the fleet meets: a longer TTFT or TPOT, a lower percentile, or shorter contexts."""
    request = simulator.request
    times = simulator.times
    target = request.target
    if nearest.meets:  # no fleet decodes for it
        least_s = simulator.least_tpot_s(nearest.fleet, nearest.runs)
        if least_s is not None and target.tpot_s is not None and least_s > target.tpot_s:
            yield f"--tpot {math.ceil(1e4 * least_s) / 10:g}ms, with {nearest.describe()} for prefill"
        return
    if math.isfinite(nearest.target_ttft_s):
        yield f"--slo-ttft {format_seconds(nearest.target_ttft_s * 1.01).replace(' ', '')}, with {nearest.describe()}"
    share = math.floor(1000 * nearest.in_time) / 10
    if 1 <= share < target.percentile:
        yield f"--percentile {share:g}, with the same fleet"
    new, prefix = _lengths(simulator.workloads)
    alone_s = np.min([times.least_s(size, new, prefix) for size in request.limits.sizes], axis=0)
    late = alone_s > target.slo_s
    if 0 < late.sum() < len(late):
        cap = int(new[late].min()) - 1
        yield f"prompts of at most {cap} new tokens: {late.mean():.2%} of the requests take longer even alone"


def _limits(scenario: Scenario, limits: FleetLimits, policy: StrategyPolicy) -> FleetLimits:
    """The limits with only those group sizes that some strategy supports. Raises InputError if there are none."""
    sizes = tuple(size for size in limits.sizes if policy.layouts(scenario.on_gpus(size)))
    if not sizes:
        text = ",".join(map(label_of, policy.names or ()))
        where = "".join(f" and that {engine.title} has" for engine in policy.engines)
        raise InputError("strategies", text, f"a strategy that runs on {groups_of(limits.sizes)}{where}")
    return replace(limits, sizes=sizes)


def _stretch(workloads: Sequence[Workload]) -> Workload | None:
    """Requests on which designs are compared first: a busy part, or the first replication; None: all requests."""
    first = workloads[0]
    if len(first) > LONG:
        return first.busiest(LONG)
    if len(workloads) > 1:
        return first
    return None


def _question(largest: Scenario, request: CapacityRequest, policy: StrategyPolicy) -> Question:
    strategies = None
    if policy.names is not None:
        strategies = list(map(label_of, policy.names))
    return Question.of(
        largest,
        seed=request.seed,
        strategies=strategies,
        slo_ttft_s=request.target.slo_s,
        percentile=request.target.percentile,
        sure=request.sure,
        requests=request.source.name,
        rate_scale=request.source.rate_scale,
        tpot_s=request.target.tpot_s,
        serving=request.serving,
        max_num_batched_tokens=request.budget,
        price_per_gpu_hour=_prices_of(request.limits),
        objective=request.objective,
        group_sizes=list(request.limits.sizes),
        deployable_on=[engine.name for engine in policy.engines],
    )


def _prices_of(limits: FleetLimits) -> float | dict[str, float] | None:
    """The price of all GPUs, or the prices by size of group; None: no price."""
    prices = set(limits.prices.values())
    if len(prices) == 1:
        return prices.pop()
    return {str(size): price for size, price in limits.prices.items()} or None


def _memory_notes(workloads: Sequence[Workload], times: ServiceTimes, sizes: Sequence[int]) -> Iterator[str]:
    """Notes on contexts that exceed the memory of groups in every layout; one note for all sizes with the same."""
    notes: dict[str, list[int]] = {}
    new, prefix = _lengths(workloads)
    for size in sizes:
        lengths = (new + prefix)[np.isinf(times.least_s(size, new, prefix))]
        if len(lengths):
            share = format_share(len(lengths) / len(new))
            note = f"{share} of the contexts, from {int(lengths.min())} tokens on, do not fit in the memory of"
            notes.setdefault(note, []).append(size)
    return (f"{note} {groups_of(alike)}" for note, alike in notes.items())


def _lengths(workloads: Sequence[Workload]) -> tuple[Lengths, Lengths]:
    """New tokens and cached prefixes of all requests."""
    new_tokens = np.concatenate([workload.new_tokens for workload in workloads])
    cached_prefix = np.concatenate([workload.cached_prefix for workload in workloads])
    return new_tokens, cached_prefix
