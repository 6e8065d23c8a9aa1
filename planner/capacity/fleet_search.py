"""FleetSearch: the fleets that meet the target, their simulations, and why others do not meet it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.interp import percentile_of
from kvrsim.program import Array
from planner.capacity.answer import Cause, Curves, FleetAnswer, GroupAnswer, Infeasible
from planner.capacity.confidence import Interval, of_replications, of_trace
from planner.capacity.designs import DesignSearch, Fit
from planner.capacity.evaluations import Design, Evaluations
from planner.capacity.fleet.fleet import FleetRun, GroupPlan
from planner.capacity.fleet.times import ServiceTimes
from planner.capacity.request import CapacityRequest
from planner.capacity.workloads.workload import Workload

_FINALISTS_OF_MANY = 2  # mixed designs of a long workload that are tried on all requests


@dataclass(slots=True)
class FleetSearch:
    """One search: the request, the evaluations so far, and the search over designs."""

    request: CapacityRequest
    evaluations: Evaluations
    search: DesignSearch

    def fits(self, stretch: Workload | None, times: ServiceTimes) -> list[Fit]:
        """All uniform fleets that meet the target, and the best cut of each combination of group sizes.

        stretch: part of the requests, on which mixed designs are searched first; None: search on all requests.
        """
        fits = self.search.fits(self.search.uniform())
        if not self.request.mixed:
            return fits
        if stretch is None:
            return _best_of_sizes(self.search.mixed(fits))
        part = DesignSearch(evaluations_of(self.request, [stretch], times), self.request.limits)
        finalists = _best_of_sizes(part.mixed(part.fits(part.uniform())))
        self.evaluations.simulated += part.evaluations.simulated
        designs = [self._stretched(fit.design) for fit in finalists if len(fit.design) > 1]
        return _best_of_sizes(self.search.fits(designs[:_FINALISTS_OF_MANY], fits))

    def _stretched(self, design: Design) -> Design:
        """The design with its last bucket extended to the longest of all requests."""
        return (*design[:-1], replace(design[-1], most_new=max(design[-1].most_new, self.search.longest)))

    def cost(self, answer: FleetAnswer) -> float:
        """The objective: GPUs, or cost an hour."""
        return sum(self.search.limits.cost(group.gpus_per_group) * group.replicas for group in answer.groups)

    def answer(self, plans: Sequence[GroupPlan]) -> FleetAnswer:
        """Simulate a fleet on every workload."""
        runs = self.evaluations.runs(plans)
        target = self.request.target
        ttft_s = np.concatenate([run.ttft_s for run in runs])
        interval = self._interval(runs, ttft_s)
        missed = int((ttft_s > target.slo_s).sum())
        meets = missed <= self.evaluations.allowed
        if self.request.needs_confidence:
            meets = meets and interval.high_s is not None and interval.high_s <= target.slo_s
        horizon_s = sum(run.horizon_s for run in runs)
        prices = self.search.limits.prices
        cost = sum(prices[plan.gpus_per_group] * plan.num_gpus for plan in plans) if prices else None
        workload = self.evaluations.workloads[0]
        return FleetAnswer(
            num_gpus=runs[0].num_gpus,
            groups=tuple(self._group(plan, index, runs) for index, plan in enumerate(plans)),
            meets=meets,
            p50_ttft_s=percentile_of(ttft_s, 50),
            p95_ttft_s=percentile_of(ttft_s, 95),
            p99_ttft_s=percentile_of(ttft_s, 99),
            max_ttft_s=percentile_of(ttft_s, 100),
            target=interval,
            in_time=float((ttft_s <= target.slo_s).mean()),
            utilisation=sum(run.utilisation * run.horizon_s for run in runs) / horizon_s if horizon_s else 0.0,
            goodput_per_s=sum(run.goodput_per_s(target.slo_s) * run.horizon_s for run in runs) / horizon_s
            if horizon_s
            else 0.0,
            cost_per_hour=cost,
            requests=len(ttft_s),
            unserved=sum(run.unserved for run in runs),
            p50_kv_transfer_s=self._transfer_s(plans, runs, 50),
            p99_kv_transfer_s=self._transfer_s(plans, runs, 99),
            curves=Curves(
                arrival_s=workload.arrival_s,
                begin_s=runs[0].begin_s,
                ttft_s=runs[0].ttft_s,
                new_tokens=workload.new_tokens,
            ),
        )

    def with_confidence(self, fit: Fit, answer: FleetAnswer) -> FleetAnswer | None:
        """Add groups where they help most, until the upper confidence bound meets the target; None: it never does."""
        plans = fit.plans
        while not answer.meets:
            more = [
                (*plans[:index], replace(plan, replicas=plan.replicas + 1), *plans[index + 1 :])
                for index, plan in enumerate(plans)
            ]
            more = [one for one in more if sum(plan.num_gpus for plan in one) <= self.search.limits.max_gpus]
            if not more:
                return None
            before = answer
            tried = [(self.answer(one), one) for one in more]
            answer, plans = min(tried, key=lambda pair: (not pair[0].meets, _high_s(pair[0])))
            if not answer.meets and _high_s(answer) >= _high_s(before):
                return None
        return answer

    def nearest_miss(self) -> FleetAnswer:
        """The fastest uniform fleet within the limits."""
        return min((self.answer(plans) for plans in self.largest()), key=lambda answer: answer.target.value_s)

    def infeasible(self, fits: Sequence[Fit]) -> list[Infeasible]:
        """Group sizes whose uniform fleets do not meet the target, and why; of each, the kind that serves most."""
        found = {fit.sizes[0] for fit in fits if len(fit.design) == 1}
        nearest: dict[int, tuple[int, GroupPlan]] = {}
        for (plan,) in self.largest():
            late = int((self.evaluations.ttft_alone_s(plan.kind) > self.request.target.slo_s).sum())
            if plan.gpus_per_group not in nearest or late < nearest[plan.gpus_per_group][0]:
                nearest[plan.gpus_per_group] = late, plan
        reasons = []
        for size, (_, plan) in nearest.items():
            if size not in found:
                code, reason = self._reason(plan)
                reasons.append(Infeasible(gpus_per_group=size, code=code, reason=reason))
        tried_mixed = len(self.search.kinds) > 1 and self.request.mixed
        if not fits and tried_mixed and any(one.code != "memory" for one in reasons):
            reason = "fleets of two sizes of group do not meet it either"
            reasons.append(Infeasible(gpus_per_group=None, code="mixed", reason=reason))
        return reasons

    def _interval(self, runs: Sequence[FleetRun], ttft_s: Array) -> Interval:
        percentile = self.request.target.percentile
        if not self.request.source.is_random:
            return of_trace(ttft_s, percentile, self.request.seed)
        return of_replications([run.ttft_s for run in runs], percentile)

    def _transfer_s(self, plans: Sequence[GroupPlan], runs: Sequence[FleetRun], percentile: float) -> float | None:
        """That percentile of the time from the first token until the cache has left, of requests that are served."""
        if self.evaluations.decoding.transfer is None:
            return None
        each = [
            service.hold_s[run.pool == index]
            for index, plan in enumerate(plans)
            for service, run in zip(self.evaluations.services(plan.kind), runs, strict=True)
        ]
        return percentile_of(served, percentile) if len(served := np.concatenate(each)) else None

    def _group(self, plan: GroupPlan, index: int, runs: Sequence[FleetRun]) -> GroupAnswer:
        seconds: dict[str, float] = {}
        requests = 0
        for service, run in zip(self.evaluations.services(plan.kind), runs, strict=True):
            mine = run.pool == index
            requests += int(mine.sum())
            spent = np.bincount(service.length_class[mine], service.ttft_s[mine], minlength=len(service.strategies))
            for name, spent_s in zip(service.strategies, spent, strict=True):
                if spent_s:
                    seconds[name] = seconds.get(name, 0.0) + float(spent_s)
        total = sum(seconds.values()) or 1.0
        shares = {name: seconds[name] / total for name in sorted(seconds, key=lambda name: -seconds[name])}
        return GroupAnswer(
            gpus_per_group=plan.gpus_per_group,
            replicas=plan.replicas,
            weights=plan.weights,
            strategy=next(iter(shares), "none"),
            strategies=shares,
            context_range=(plan.least_new, plan.most_new),
            requests=requests,
        )

    def largest(self) -> list[tuple[GroupPlan, ...]]:
        """For each kind of group, a uniform fleet of as many groups as the limits allow."""
        most = self.search.limits.max_gpus
        return [(design[0].with_replicas(most // design[0].gpus_per_group),) for design in self.search.uniform()]

    def _reason(self, plan: GroupPlan) -> tuple[Cause, str]:
        """Why the largest uniform fleet of that size does not meet the target."""
        target, size = self.request.target, plan.gpus_per_group
        name = f"{target.percentile:g} % of the TTFTs"
        above = f"above {target.slo_s:g} s"
        alone = self.evaluations.ttft_alone_s(plan.kind)
        never = int(np.isinf(alone).sum())
        late = int((alone > target.slo_s).sum())
        if never > self.evaluations.allowed:
            return (
                "memory",
                f"{never} of {len(alone)} contexts do not fit in memory; at most {self.evaluations.allowed} may",
            )
        if late > self.evaluations.allowed:
            reached = percentile_of(alone, target.percentile)
            return "alone", f"even with no queue {name} take up to {reached:.3g} s, {above}"
        answer = self.answer((plan,))
        reached = answer.target.value_s
        if answer.meets or reached <= target.slo_s:
            return "interval", f"the upper confidence bound stays {above} with {plan.num_gpus} GPUs"
        load = self.evaluations.load(self.search.uniform()[self.search.kinds.index(plan.kind)], 0)
        busy = f"{load * size:.3g} GPUs would be busy all the time"
        return "queue", f"with {plan.num_gpus} GPUs {name} take up to {reached:.3g} s, {above} ({busy})"


def evaluations_of(request: CapacityRequest, workloads: Sequence[Workload], times: ServiceTimes) -> Evaluations:
    """Evaluations of a request on these workloads."""
    return Evaluations(workloads, times, request.conditions, request.target, request.decoding)


def _high_s(answer: FleetAnswer) -> float:
    return math.inf if answer.target.high_s is None else answer.target.high_s


def _best_of_sizes(fits: Sequence[Fit]) -> list[Fit]:
    """The first, so the best, fit of each combination of group sizes."""
    best: dict[tuple[int, ...], Fit] = {}
    for fit in fits:
        best.setdefault(fit.sizes, fit)
    return list(best.values())
