"""FleetSearch finds the cheapest fleet: first uniform fleets of each type of group, then fleets with two length ranges.

A target percentile allows a certain number of late requests. Each range of lengths (bucket) has its own
queue, so a fleet's number of late requests is the sum over its buckets, and each bucket is simulated once per number of
groups. The least number of groups of a bucket suffices if no request of the other bucket is late. Larger numbers of
groups are options if they reduce the late requests. The search takes the cheapest combination within the limit.

A design has one or two buckets, cut at quantiles of the requests and of the work. The best designs with two buckets are
refined with finer cuts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvrsim.arguments import SearchArgs
from kvrsim.executors.access import execution_of
from kvrsim.program import Array
from kvrsim.strategies import get_strategy
from planner.candidates import Candidate, Search
from planner.capacity.decode import DecodeFleet, Decoding, decodes
from planner.capacity.fleet import (
    Fleet,
    FleetRun,
    GpuGroup,
    GroupPool,
    GroupType,
    Indices,
    PoolRun,
    Service,
    fewest_groups,
    gpus_of,
    route,
    run_fleet,
    run_pool,
)
from planner.capacity.hits import cache_hits, times_by_turn
from planner.capacity.prefixes import PrefixTraffic, Turns
from planner.capacity.request import CapacityRequest
from planner.capacity.result import (
    FleetAnswer,
    FleetInterval,
    GroupAnswer,
    Infeasible,
    SizeInterval,
    format_share,
    replications_interval,
    trace_interval,
)
from planner.capacity.serving import LateLimit, number_late
from planner.capacity.times import ServiceTimes
from planner.capacity.work import MANY, Work
from planner.capacity.workload import Workload
from planner.percentile import percentile_of

# Percentiles of TTFT that an answer has.
_PERCENTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 92.5, 95, 96, 97, 98, 98.5, 99, 99.5, 99.9, 100)
_REQUEST_QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)  # shares of the requests at which designs are cut
_WORK_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)  # shares of all new tokens at which designs are cut
_OPTIONS = 3  # most numbers of groups tried above the least one of a bucket: 10 changes no fleet of 8 questions
_SAME_COST = 1e-9  # relative difference below which two costs are equal
_SAFE_LOAD = 0.9  # factor on the mean number of busy groups for a lower bound, since a trace may end with a backlog
_FINER = (-0.5, -0.25, -0.125, 0.125, 0.25, 0.5)  # exponents of 2: ratios of nearby cuts to a cut
_FINALISTS = 3  # best designs that are cut more finely, simulated with all requests, or with other replicas
_SCALES = (0.8, 1.0, 1.25, 1.6, 2.0, 3.0)  # factors on the numbers of replicas that meet the target
_BELOW = tuple(2.0**-step for step in range(10))  # factors on the most replicas, if no fleet meets the target

_MOST_TIMES = 4.0  # largest multiple of the requests for which the answer is simulated
_TIMES_STEP = 0.05  # resolution of this multiple


class Bucket:
    """The requests that one group of a design serves, in every workload."""

    def __init__(self, simulator: FleetSimulator, group: GpuGroup, members: Sequence[Indices]) -> None:
        self.simulator = simulator
        self.group = group
        self.members = members
        slo_s = simulator.target.slo_s
        services = simulator.services(group.type)
        self.requests = sum(map(len, members))
        self.late_alone = 0  # number of requests that would be late even without a queue
        busy_s = 0.0
        for service, mine in zip(services, members, strict=True):
            self.late_alone += number_late(service.answer_s[mine], slo_s)
            busy_s += float(service.busy_s[mine].sum())
            if service.steps is None:
                busy_s += float(service.hold_s[mine].sum())
        # Average number of busy groups, if all work ends by the deadline of the last request.
        self.load = busy_s / sum(workload.duration_s + slo_s for workload in simulator.workloads)
        if simulator.request.has_turns:
            self.load = 0.0  # unknown: turns arrive later if groups are slower
        self._late: dict[int, int] = {}
        self.whole_runs: dict[int, list[PoolRun]] = {}  # those of the fewest groups found to be enough, by their number

    def late(self, replicas: int) -> int:
        """Number of late requests with that many groups; if more are late than may be, only some may be counted.

        Of groups that also decode, it is the larger of the numbers with a late first token and with a long TPOT.
        """
        if replicas not in self._late:
            simulator = self.simulator
            target = simulator.target
            late_first = 0
            late_tokens = 0
            runs: list[PoolRun] = []
            services = simulator.services(self.group.type)
            for workload, service, mine in zip(simulator.workloads, services, self.members, strict=True):
                if not len(mine):
                    continue
                arrival_s = workload.arrival_s[mine]
                selected = service.select(mine)
                pool = GroupPool(arrival_s=arrival_s, service=selected, replicas=replicas)
                run = run_pool(pool, simulator.limit)
                runs.append(run)
                simulator.work.simulate(len(mine))
                late_first += number_late(run.end_s + selected.hold_s - run.arrival_s, target.slo_s)
                if run.tpot_s is not None and target.tpot_s is not None:
                    late_tokens += number_late(run.tpot_s, target.tpot_s)
                if max(late_first, late_tokens) > simulator.allowed:
                    break
            self._late[replicas] = max(late_first, late_tokens)
            if self._late[replicas] <= simulator.allowed and len(runs) == len(simulator.workloads):
                self.whole_runs = {replicas: runs}
        return self._late[replicas]


class FleetSimulator:
    """Simulations of pools and fleets on one or more given workloads; results are cached."""

    def __init__(
        self, request: CapacityRequest, workloads: Sequence[Workload], times: ServiceTimes, work: Work | None = None
    ) -> None:
        self.request = request
        self.workloads = workloads
        self.times = times
        self.target = request.target
        self.limits = request.limits
        self.requests = sum(map(len, workloads))
        self.allowed = self.target.most_late(self.requests)  # requests of all workloads together that may be late
        self.work = work or Work()
        # A simulation may end as soon as more requests are late.
        self.limit = LateLimit(ttft_s=request.target.slo_s, tpot_s=request.target.tpot_s, allowed=self.allowed)
        self.decoding = None
        if request.target.tpot_s is not None:
            self.decoding = Decoding(times, request.limits, request.target, self.work)
        self._services: dict[GroupType, list[Service]] = {}
        self._buckets: dict[Fleet, Bucket] = {}

    def under(self, request: CapacityRequest, times: ServiceTimes) -> FleetSimulator:
        """A simulator of the same requests under another policy of strategies; groups that also decode are the same."""
        other = FleetSimulator(request, self.workloads, times, self.work)
        other._services = {group: services for group, services in self._services.items() if group.colocated}
        other._buckets = {fleet: bucket for fleet, bucket in self._buckets.items() if fleet[-1].type.colocated}
        return other

    def on(self, workloads: Sequence[Workload]) -> FleetSimulator:
        """A simulator of other workloads, with an empty cache."""
        return FleetSimulator(self.request, workloads, self.times, self.work)

    def faster(self, factor: float) -> FleetSimulator:
        """A simulator where the same requests arrive `factor` times as fast; service times are unchanged."""
        other = self.on([workload.faster(factor) for workload in self.workloads])
        other._services = self._services
        return other

    def services(self, group: GroupType) -> list[Service]:
        """Service times of each workload on groups of this type."""
        if group not in self._services:
            transfer = self.request.transfer
            self._services[group] = [self.times.service(group, workload, transfer) for workload in self.workloads]
        return [
            self._with_prefixes(service, workload.turns)
            for service, workload in zip(self._services[group], self.workloads, strict=True)
        ]

    def _with_prefixes(self, service: Service, turns: Turns | None) -> Service:
        """The service times with the caches of turns, if the workload has turns."""
        if turns is None:
            return service
        tokens = service.new_tokens + service.cached_prefix + service.decode_steps + 1
        token_bytes = float(service.cache_bytes.sum() / tokens.sum())
        traffic = PrefixTraffic(turns=turns, tiers=self.request.tiers, token_bytes=token_bytes)
        return replace(service, prefixes=traffic)

    def _services_on(self, fleet: Fleet, number: int) -> dict[GroupType, Service]:
        return {group.type: self.services(group.type)[number] for group in fleet}

    def buckets(self, design: Fleet) -> list[Bucket]:
        """The buckets of a design: the requests of each of its groups.

        If all requests fit in the memory of all groups, equal groups of different designs share a bucket.
        """
        keys: list[Fleet] = [(*design, group) for group in design]
        if all(self._fits_all(group.type) for group in design):
            keys = [(group,) for group in design]
        if any(key not in self._buckets for key in keys):
            pools = [
                route(workload.new_tokens, self._services_on(design, number), design)
                for number, workload in enumerate(self.workloads)
            ]
            for index, (key, group) in enumerate(zip(keys, design, strict=True)):
                if key not in self._buckets:
                    self._buckets[key] = Bucket(self, group, [np.flatnonzero(pool == index) for pool in pools])
        return [self._buckets[key] for key in keys]

    def _fits_all(self, group: GroupType) -> bool:
        """Whether all requests fit in the memory of groups of this type."""
        return all(np.isfinite(service.ttft_s).all() for service in self.services(group))

    def ttft_alone_s(self, group: GroupType) -> Array:
        """TTFTs of the requests of all workloads, without queueing, with the transfer of the caches."""
        return np.concatenate([service.answer_s for service in self.services(group)])

    def runs(self, fleet: Fleet, limit: LateLimit | None = None) -> list[FleetRun]:
        """Simulations of a whole fleet, one per workload; limit: see run_pool."""
        serves: list[Callable[[GroupPool], PoolRun]] = [partial(run_pool, limit=limit)] * len(self.workloads)
        earlier = self._earlier_runs(fleet)
        if earlier is None:
            self.work.simulate(self.requests)
        else:
            serves = [partial(_served_before, run) for run in earlier]
        return [
            run_fleet(workload, self._services_on(fleet, number), fleet, serve)
            for number, (workload, serve) in enumerate(zip(self.workloads, serves, strict=True))
        ]

    def _earlier_runs(self, fleet: Fleet) -> list[PoolRun] | None:
        """The runs of a uniform fleet that the search for its size has simulated; None: it has not."""
        if len(fleet) > 1:
            return None
        (group,) = fleet
        design = group.of(1)
        for key in ((design,), (design, design)):
            if key in self._buckets and group.replicas in self._buckets[key].whole_runs:
                return self._buckets[key].whole_runs[group.replicas]
        return None

    def ttft_s(self, fleet: Fleet) -> Array:
        """TTFTs of the requests of all workloads; inf: never served."""
        return np.concatenate([run.ttft_s for run in self.runs(fleet)])

    def answer(self, fleet: Fleet) -> FleetAnswer:
        """Simulate a fleet on every workload, with its interval if the interval must meet the target."""
        runs = self.runs(fleet)
        horizon_s = sum(run.horizon_s for run in runs)
        target = self.target
        limits = self.limits
        ttft_s = np.concatenate([run.ttft_s for run in runs])
        in_time = int((ttft_s <= target.slo_s).sum())
        meets = len(ttft_s) - in_time <= self.allowed
        colocated = fleet[0].type.colocated
        runs, decode, no_decode = self._decoded(fleet, runs)
        tpot_s = tpot_of(runs)
        if colocated and target.tpot_s is not None and tpot_s is not None:
            meets = meets and number_late(tpot_s, target.tpot_s) <= self.allowed
        working = gpus_of(fleet)
        largest = max(group.type.gpus for group in fleet)
        if decode is not None:
            working += decode.num_gpus
            largest = max(largest, decode.gpus_per_group)
        idle = limits.idle_gpus(working, largest)
        interval = None
        is_safe = None
        if self.request.sure:
            interval = self.interval(fleet, runs)
            is_safe = meets and interval is not None and interval.safe
            meets = is_safe
        utilisation = 0.0
        goodput_per_s = 0.0
        if horizon_s:
            utilisation = sum(run.busy_gpu_s for run in runs) / (gpus_of(fleet) * horizon_s)
            goodput_per_s = in_time / horizon_s
        served = [run.workload.context_len[np.isfinite(run.ttft_s)] for run in runs]
        by_percentile = {
            percent: percentile_of(ttft_s, percent) for percent in sorted({*_PERCENTILES, target.percentile})
        }
        return FleetAnswer(
            num_gpus=gpus_of(fleet),
            serving="colocated" if colocated else "split",
            groups=tuple(self._group(group, index, runs) for index, group in enumerate(fleet)),
            meets=meets,
            p50_ttft_s=by_percentile[50],
            p95_ttft_s=by_percentile[95],
            p99_ttft_s=by_percentile[99],
            max_ttft_s=by_percentile[100],
            target_ttft_s=by_percentile[target.percentile],
            p50_tpot_s=None if tpot_s is None else percentile_of(tpot_s, 50),
            p99_tpot_s=None if tpot_s is None else percentile_of(tpot_s, 99),
            target_tpot_s=None if tpot_s is None else percentile_of(tpot_s, target.percentile),
            in_time=in_time / len(ttft_s),
            utilisation=utilisation,
            goodput_per_s=goodput_per_s,
            cost_per_hour=self.limits.cost_per_hour(fleet),
            requests=len(ttft_s),
            unserved=int(np.isinf(ttft_s).sum()),
            idle_gpus=idle,
            idle_cost_per_hour=limits.prices[largest] * idle if limits.prices else None,
            longest_served=int(np.concatenate(served).max(initial=0)) or None,
            p50_kv_transfer_s=self._transfer_s(fleet, runs, 50),
            p99_kv_transfer_s=self._transfer_s(fleet, runs, 99),
            prefix_cache=cache_hits(runs, [workload.cached_prefix for workload in self.workloads]),
            by_turn=times_by_turn(runs, target.percentile),
            decode=decode,
            no_decode=no_decode,
            interval=interval,
            is_safe=is_safe,
            ttft_s=by_percentile,
            fleet=fleet,
            runs=tuple(runs),
        )

    def _decoded(self, fleet: Fleet, runs: list[FleetRun]) -> tuple[list[FleetRun], DecodeFleet | None, str | None]:
        """The runs with their TPOTs, and the GPUs that decode for a split fleet, or why there are none."""
        if self.decoding is None or fleet[0].type.colocated or not any(decodes(run).any() for run in runs):
            return runs, None, None
        found = self.decoding.fleet(runs)
        if isinstance(found, str):
            return runs, None, found
        decode, tpots_s = found
        runs = [replace(run, tpot_s=tpot_s) for run, tpot_s in zip(runs, tpots_s, strict=True)]
        most = self.limits.max_gpus
        if gpus_of(fleet) + decode.num_gpus > most:
            why = f"prefill takes {gpus_of(fleet)} and decoding {decode.num_gpus} GPUs, more than the {most} allowed"
            return runs, None, why
        return runs, decode, None

    def interval(self, fleet: Fleet, runs: Sequence[FleetRun]) -> FleetInterval | None:
        """The interval of the requested percentile; None: the percentile is that of an unserved request.

        If all prefills take `factor` times as long, the queues are those of requests that arrive `factor` times as
        fast, on a longer time scale. The sampling error is independent of the model's; their logarithms are added in
        quadrature.
        """
        ttft_s = [run.ttft_s for run in runs]
        percentile = self.target.percentile
        value_s = percentile_of(np.concatenate(ttft_s), percentile)
        if not math.isfinite(value_s):
            return None
        if self.request.source.is_random:
            sampled = replications_interval(ttft_s, percentile)
        else:
            sampled = trace_interval(np.concatenate(ttft_s), percentile, self.request.seed)
        if sampled is None:
            sampled = (value_s, value_s)
        prefill = self.prefill_at_percentile(fleet, runs)
        factors = (prefill.interval.low_s / prefill.ttft_s, prefill.interval.high_s / prefill.ttft_s)
        ends = []
        for factor, end_s in zip(factors, sampled, strict=True):
            modelled_s = factor * percentile_of(self.faster(factor).ttft_s(fleet), percentile)
            error = math.hypot(math.log(modelled_s / value_s), math.log((end_s or value_s) / value_s))
            ends.append(value_s * math.exp(math.copysign(error, factor - 1)))
        low_s, high_s = ends
        return FleetInterval(
            low_s=min(low_s, value_s),
            high_s=high_s if math.isfinite(high_s) else None,
            safe=high_s <= self.target.slo_s,
        )

    def slower(self, factor: float) -> FleetSimulator:
        """A simulator in which all times are `factor` times as long: on another scale of time, faster requests."""
        target = self.target
        tpot_s = None if target.tpot_s is None else target.tpot_s / factor
        request = replace(self.request, target=replace(target, slo_s=target.slo_s / factor, tpot_s=tpot_s), sure=False)
        workloads = [workload.faster(factor) for workload in self.workloads]
        other = FleetSimulator(request, workloads, self.times, self.work)
        other._services = self._services
        return other

    def size_interval(self, answer: FleetAnswer) -> SizeInterval:
        """The sizes of the answer's design at both ends of the interval of its prefills."""
        prefill = self.prefill_at_percentile(answer.fleet, answer.runs)
        ends = [
            self.slower(end_s / prefill.ttft_s)._best_of(answer.fleet)
            for end_s in (prefill.interval.low_s, prefill.interval.high_s)
        ]
        low, high = ends
        return SizeInterval(
            low_gpus=None if low is None else low.total_gpus,
            high_gpus=None if high is None else high.total_gpus,
            low_cost_per_hour=None if low is None else low.total_cost_per_hour,
            high_cost_per_hour=None if high is None else high.total_cost_per_hour,
        )

    def withstands(self, answer: FleetAnswer) -> float:
        """The multiple of the requests, up to _MOST_TIMES, that the rented GPUs serve in time; rounded down.

        The spare ones do not work; the rest of the last node works as further groups of the same design.
        """
        low = 1.0
        high = _MOST_TIMES
        while high - low > _TIMES_STEP:
            middle = (low + high) / 2
            more = self.faster(middle)
            if self.request.has_turns:  # more sessions, not shorter pauses
                more = self.on(replace(self.request, source=self.request.source.times(middle)).workloads())
            if more._is_enough(answer):
                low = middle
            else:
                high = middle
        return round(math.floor(low / _TIMES_STEP) * _TIMES_STEP, 2)

    def _best_of(self, fleet: Fleet) -> FleetAnswer | None:
        """The smallest fleet of the same design that meets the target; None: there is none."""
        fit = FleetSearch(self).fit(tuple(group.of(1) for group in fleet))
        if fit is None:
            return None
        answer = self.answer(fit.fleet)
        return answer if answer.meets and answer.no_decode is None else None

    def _is_enough(self, answer: FleetAnswer) -> bool:
        """Whether a fleet meets the target for these workloads without its spare GPUs.

        Where some GPUs of its last node do not work, the design may have as many groups as these nodes hold.
        """
        if -answer.working_gpus % self.limits.node_gpus:
            nodes = math.ceil(answer.working_gpus / self.limits.node_gpus)
            best = self._best_of(answer.fleet)
            return best is not None and best.working_gpus <= nodes * self.limits.node_gpus
        runs = self.runs(answer.fleet, self.limit)
        ttft_s = np.concatenate([run.ttft_s for run in runs])
        if number_late(ttft_s, self.target.slo_s) > self.allowed:
            return False
        if answer.decode is not None and self.decoding is not None:
            (pool,) = self.decoding.pools(runs, [answer.decode.gpus_per_group])
            return pool.late(answer.decode.replicas, self.allowed) <= self.allowed
        tpot_s = tpot_of(runs)
        if tpot_s is None or self.target.tpot_s is None:
            return True
        return number_late(tpot_s, self.target.tpot_s) <= self.allowed

    def prefill_at_percentile(self, fleet: Fleet, runs: Sequence[FleetRun]) -> Candidate:
        """The prefill of the served request whose TTFT is the requested percentile, alone on its group."""
        run = runs[0]
        served = np.flatnonzero(np.isfinite(run.ttft_s))
        order = served[np.argsort(run.ttft_s[served], kind="stable")]
        last = order[min(len(order) - 1, int(self.target.percentile / 100 * len(order)))]
        index = int(run.pool[last])
        group = fleet[index]
        gpus = group.type.gpus
        name = self._group(group, index, runs).strategy
        by_name = {
            strategy.name: strategy for strategy in itertools.chain.from_iterable(self.times.layouts(gpus).values())
        }
        scenario = self.times.scenario.on_gpus(gpus)
        new_tokens = max(int(run.workload.new_tokens[last]), gpus)
        here = replace(scenario, request=replace(scenario.request, context_len=new_tokens, cached_prefix=0))
        strategy = by_name.get(name) or get_strategy(name)
        return Search(options=SearchArgs(method="analytical")).candidate(execution_of(here, strategy))

    def least_tpot_s(self, fleet: Fleet, runs: Sequence[FleetRun]) -> float | None:
        """The requested percentile of TPOT with as many GPUs that decode as the limits allow; None: none can decode."""
        if self.decoding is None:
            return None
        return self.decoding.least_tpot_s(runs, self.limits.max_gpus - gpus_of(fleet))

    def _transfer_s(self, fleet: Fleet, runs: Sequence[FleetRun], percentile: float) -> float | None:
        """Percentile of the time from the first token until the cache has left the group, over the served requests."""
        if self.request.transfer is None or fleet[0].type.colocated:
            return None
        parts = list[Array]()
        for index, group in enumerate(fleet):
            for service, run in zip(self.services(group.type), runs, strict=True):
                parts.append(service.hold_s[run.pool == index])
        hold_s = np.concatenate(parts)
        if not len(hold_s):
            return None
        return percentile_of(hold_s, percentile)

    def _group(self, group: GpuGroup, index: int, runs: Sequence[FleetRun]) -> GroupAnswer:
        seconds: Counter[str] = Counter()
        for service, run in zip(self.services(group.type), runs, strict=True):
            mine = run.pool == index
            spent = np.bincount(service.length_class[mine], service.ttft_s[mine], minlength=len(service.strategies))
            for name, spent_s in zip(service.strategies, spent.tolist(), strict=True):
                seconds[name] += spent_s
        shares = {name: spent_s / seconds.total() for name, spent_s in seconds.most_common() if spent_s}
        return GroupAnswer(
            gpus_per_group=group.type.gpus,
            replicas=group.replicas,
            weights=group.type.weights,
            strategy=next(iter(shares), "none"),
            strategies=shares,
            context_range=(group.least_new, group.most_new),
            requests=sum(int((run.pool == index).sum()) for run in runs),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetFit:
    """A design with the fewest replicas that meet the target."""

    design: Fleet  # one group per bucket, with its number of replicas; 0 for an empty bucket
    cost: float  # the objective: GPUs, or cost per hour
    late: int  # number of late requests, without those that are never served
    never_served: int  # number of requests that fit in no group's memory

    @property
    def fleet(self) -> Fleet:
        """The groups of the design, without those of empty buckets."""
        return tuple(group for group in self.design if group.replicas)

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs per group, one per bucket."""
        return tuple(group.type.gpus for group in self.design)


class FleetSearch:
    """A search over designs within the limits of a request.

    dearest: fleets that cost more than this multiple of the best one are left out. below: fleets that cost as much are
    left out, too.
    """

    def __init__(self, simulator: FleetSimulator, *, dearest: float = math.inf, below: float = math.inf) -> None:
        self.simulator = simulator
        self.dearest = dearest
        self.below = below
        self.limits = simulator.limits
        self.work = simulator.work
        self.longest = max(int(workload.new_tokens.max()) for workload in simulator.workloads)
        if simulator.request.has_turns:  # a prompt that is in no cache
            self.longest = max(int(workload.context_len.max()) for workload in simulator.workloads)
        serving = simulator.request.serving
        self.types: list[GroupType] = []  # types of groups that only prefill
        if serving != "colocated":
            self.types = list(itertools.chain.from_iterable(map(simulator.times.types, self.limits.sizes)))
        self.colocated: list[GroupType] = []  # types of groups that also decode; they serve all lengths
        if serving != "split":
            found = map(simulator.times.colocated, self.limits.sizes)
            self.colocated = [group for group in found if group is not None]
        self._simulated = set[Fleet]()  # designs
        self._answers: dict[Fleet, FleetAnswer] = {}  # those of the first fits, which bound the cost of all others
        self._least = math.inf  # cost of the best answer
        self._least_decoding = 0.0  # lowest cost of the GPUs that decode, of the fleets so far
        if simulator.decoding is not None:
            self._least_decoding = min(map(self.limits.cost, self.limits.sizes))

    def all_fits(self, stretch: Workload | None = None) -> list[FleetFit]:
        """Fleets that meet the target, best first: those that also decode, then those that only prefill.

        These are all uniform fleets, and the best mixed fleet of each pair of group sizes. stretch: part of the
        requests on which all designs are simulated first; only the best of them, and those that miss the target there,
        are then simulated with all requests. None: all designs are simulated with all requests.
        """
        if stretch is not None:
            designs = self._finalists(stretch)
            if designs:
                together = self._bounding([design for design in designs if design[0].type.colocated])
                return [*together, *self._bounding([design for design in designs if not design[0].type.colocated])]
        together = self._bounding(self.uniform(self.colocated))
        apart = self._bounding(self.uniform(self.types))
        if self.simulator.request.mixed and self.types and not self.work.is_late:
            apart = _best_of_sizes(self.mixed(apart))
        return [*together, *apart]

    def _finalists(self, stretch: Workload) -> list[Fleet]:
        """The best designs of each serving on a part of the requests, and the uniform designs that miss the target."""
        part = FleetSearch(self.simulator.on([stretch]), dearest=self.dearest)
        fits = part.all_fits()
        best = [fit.design for fit in fits if fit.design[0].type.colocated][:_FINALISTS]
        best += [fit.design for fit in fits if not fit.design[0].type.colocated][:_FINALISTS]
        designs = list[Fleet]()
        for design in best:
            *others, last = (group.of(1) for group in design)
            designs.append((*others, replace(last, most_new=max(last.most_new, self.longest))))
        met = {fit.design[0].type for fit in fits if len(fit.design) == 1}
        missed = [design[0].type for design in part._simulated if len(design) == 1 and design[0].type not in met]
        if designs:
            designs += self.uniform(missed)
        return designs

    def _bounding(self, designs: Iterable[Fleet]) -> list[FleetFit]:
        """The fits of designs, best first; the design with the least load is tried first, as its cost bounds others."""
        fits = self.fits(sorted(designs, key=self._load_cost))
        if fits and not self.work.is_late:
            self._answer(fits[0].fleet)
        return fits

    def _load_cost(self, design: Fleet) -> float:
        """The mean cost of the busy groups of a design."""
        buckets = self.simulator.buckets(design)
        return sum(self.limits.cost(bucket.group.type.gpus) * max(1.0, bucket.load) for bucket in buckets)

    def uniform(self, types: Iterable[GroupType]) -> list[Fleet]:
        """Designs of a single bucket, one per type of group."""
        return [self._design((group,), ()) for group in types]

    def largest(self) -> list[Fleet]:
        """The largest uniform fleet of each type of group within the limits."""
        designs = self.uniform([*self.types, *self.colocated])
        return [(group.of(self.limits.max_gpus // group.type.gpus),) for (group,) in designs]

    def fits(self, designs: Sequence[Fleet], earlier: Sequence[FleetFit] = ()) -> list[FleetFit]:
        """The earlier fits, and those of designs that may be wanted, best first.

        A design of two buckets is wanted if it costs less than all fits or, where the cheapest fit does not serve all
        requests, no more.
        """
        fits = list(earlier)
        for design in self.work.in_time(designs, lambda: bool(fits)):
            at_most = self._most_cost(design)
            if len(design) > 1 and fits:
                cheapest = min(fits, key=lambda fit: (fit.cost, fit.never_served))
                cost = cheapest.cost
                if not cheapest.never_served:
                    cost *= 1 - _SAME_COST
                at_most = min(at_most, cost)
            fit = self.fit(design, at_most=at_most)
            if fit is not None:
                fits.append(fit)
                if self._least == math.inf:
                    self._answer(fit.fleet)
            if fit is not None or at_most == math.inf:
                self._simulated.add(design)
        return sorted(fits, key=lambda fit: (fit.cost, fit.never_served, fit.late, len(fit.design), fit.sizes))

    def _most_cost(self, design: Fleet) -> float:
        """The most that the groups of a design may cost, so that its fleet may be wanted."""
        most = min(self.dearest * self._least * (1 + _SAME_COST), self.below * (1 - _SAME_COST))
        if not design[0].type.colocated:
            most -= self._least_decoding
        return most

    @property
    def least_split_cost(self) -> float:
        """The cost of one of the smallest groups that only prefill, and of one that decodes if any does."""
        return min(map(self.limits.cost, self.limits.sizes)) + self._least_decoding

    def _answer(self, fleet: Fleet) -> FleetAnswer:
        """The answer of a fleet, with more groups if the interval must meet the target."""
        if fleet not in self._answers:
            answer = self.simulator.answer(fleet)
            if self.simulator.request.sure:
                answer = self.more_groups(answer)
            self._answers[fleet] = answer
            if answer.meets and answer.no_decode is None:
                self._least = min(self._least, self.cost(answer))
        return self._answers[fleet]

    def mixed(self, earlier: Sequence[FleetFit]) -> list[FleetFit]:
        """The earlier fits, and fits of designs with two buckets: first all cuts are tried, then cuts near the best."""
        pairs = [pair for pair in itertools.product(self._best_types(), repeat=2) if pair[0].gpus <= pair[1].gpus]
        designs = [self._design(pair, (border,)) for border, pair in itertools.product(self._cuts(), pairs)]
        fits = self.fits(designs, earlier)
        best = [fit for fit in fits if len(fit.design) == 2][:_FINALISTS]
        finer = itertools.chain.from_iterable(self._finer(fit.design) for fit in best)
        return self.fits(list(finer), fits)

    def fit(self, design: Fleet, at_most: float = math.inf) -> FleetFit | None:
        """The cheapest numbers of replicas with which a design meets the target; None if there are none."""
        buckets = self.simulator.buckets(design)
        never_served = self.simulator.requests - sum(bucket.requests for bucket in buckets)
        allowed = self.simulator.allowed - never_served
        room = allowed - sum(bucket.late_alone for bucket in buckets)
        cost = [self.limits.cost(group.type.gpus) for group in design]
        least = [math.ceil(_SAFE_LOAD * bucket.load) for bucket in buckets]
        if room < 0 or np.dot(cost, least) > at_most:
            return None
        options: list[list[tuple[int, int]]] = []
        for number, bucket in enumerate(buckets):
            most = self.limits.max_gpus // bucket.group.type.gpus
            if math.isfinite(at_most):
                spare = at_most - np.dot(cost, least) + cost[number] * least[number]
                most = min(most, int(spare / cost[number] + 1e-9))
            options.append(self._options(bucket, room, most, single=len(design) == 1))
            if not options[-1]:
                return None
            least[number] = options[-1][0][0]
        return self._cheapest(design, options, cost, never_served)

    def least_replicas(self, bucket: Bucket, allowed: int, most: int) -> int | None:
        """Return the fewest groups with at most `allowed` late requests; None if `most` groups are too few."""
        if not bucket.requests:
            return 0
        return fewest_groups(lambda replicas: bucket.late(replicas) <= allowed, math.ceil(bucket.load), most)

    def answers(self, fits: Sequence[FleetFit]) -> list[FleetAnswer]:
        """The fleets of the fits that meet the target, best first: those with a fleet that decodes, by total cost."""
        answers = list[FleetAnswer]()
        in_order = sorted(fits, key=lambda fit: fit.cost)
        for fit in self.work.in_time(in_order, lambda: any(answer.meets for answer in answers)):
            if fit.cost <= self._most_cost(fit.fleet):
                answers.append(self._answer(fit.fleet))
        return self.in_order(answers)

    def cost(self, answer: FleetAnswer) -> float:
        """Cost of the whole fleet: its GPUs or its price per hour."""
        if self.limits.by_cost:
            return answer.total_cost_per_hour or 0.0
        return float(answer.total_gpus)

    def in_order(self, answers: Iterable[FleetAnswer]) -> list[FleetAnswer]:
        """Those of the fleets that meet the target, best first."""

        def key(answer: FleetAnswer) -> tuple[bool, float, int, float]:
            return answer.no_decode is not None, self.cost(answer), answer.unserved, answer.target_ttft_s

        return sorted((answer for answer in answers if answer.meets), key=key)

    def more_groups(self, answer: FleetAnswer) -> FleetAnswer:
        """Add the groups that help most until the interval meets the target, or until this has no effect."""
        while not answer.meets:
            fleet = answer.fleet
            before = answer
            answers = list[FleetAnswer]()
            for index, group in enumerate(fleet):
                larger = (*fleet[:index], group.of(group.replicas + 1), *fleet[index + 1 :])
                if gpus_of(larger) <= self.limits.max_gpus:
                    answers.append(self.simulator.answer(larger))
            if not answers:
                break
            answer = min(answers, key=lambda larger: (not larger.meets, _high_s(larger)))
            if not answer.meets and _high_s(answer) >= _high_s(before):
                break
        return answer

    def with_safety(self, answer: FleetAnswer) -> FleetAnswer:
        """A simulated fleet with its interval, and whether it is safe."""
        interval = answer.interval or self.simulator.interval(answer.fleet, answer.runs)
        is_safe = answer.meets and interval is not None and interval.safe
        return replace(answer, interval=interval, is_safe=is_safe)

    def _with_mark(self, answer: FleetAnswer, safe: Iterable[FleetAnswer]) -> FleetAnswer:
        """A simulated fleet with whether it is safe; safe: fleets that are.

        A fleet that misses the target is not safe, and one with more groups of the same design than a safe one is.
        """
        if answer.is_safe is not None:
            return answer
        if not answer.meets:
            return replace(answer, is_safe=False)
        if any(_has_all_groups(answer.fleet, smaller.fleet) for smaller in safe):
            return replace(answer, is_safe=True)
        return self.with_safety(answer)

    def around(self, fits: Sequence[FleetFit], answers: Sequence[FleetAnswer]) -> tuple[FleetAnswer, ...]:
        """Fleets of the best designs, with fewer and more groups; without designs, fractions of the largest fleets.

        answers: fleets that are simulated already, of which the first is among the results.
        """
        finalists = _FINALISTS
        if self.simulator.requests > MANY:
            finalists = 1
        designs = [fit.fleet for fit in fits[:finalists]]
        scales: Sequence[float] = _SCALES
        if not designs:
            designs = self.largest()
            scales = _BELOW
        fleets = [answers[0].fleet] if answers else []
        for design, scale in itertools.product(designs, scales):
            rounded = math.floor if scale < 1 else math.ceil  # of few groups, one less
            scaled = tuple(group.of(max(1, rounded(group.replicas * scale))) for group in design)
            if scaled not in fleets and gpus_of(scaled) <= self.limits.max_gpus:
                fleets.append(scaled)
        by_fleet = {answer.fleet: answer for answer in answers}
        safe = [answer for answer in answers if answer.is_safe]
        for fleet in self.work.in_time(sorted(fleets, key=gpus_of), lambda: True):
            answer = by_fleet.get(fleet) or self.simulator.answer(fleet)
            answer = replace(self._with_mark(answer, safe), runs=())
            if answer.is_safe:
                safe.append(answer)
            by_fleet[fleet] = answer
        simulated = [by_fleet[fleet] for fleet in fleets if fleet in by_fleet]
        around = [answer for answer in simulated if answer.no_decode is None]
        return tuple(around or answers)

    def nearest_miss(self) -> FleetAnswer:
        """The uniform fleet within the limits with the least requested percentile; if all are infinite, most served."""
        answers = map(self.simulator.answer, self.largest())
        return min(answers, key=lambda answer: (answer.target_ttft_s, answer.unserved))

    def infeasible(self, fits: Sequence[FleetFit]) -> list[Infeasible]:
        """Group sizes whose uniform fleets miss the target, and the reason for the type with fewest late requests."""
        nearest: dict[int, tuple[int, GpuGroup]] = {}
        for design, (group,) in zip(self.uniform([*self.types, *self.colocated]), self.largest(), strict=True):
            if design not in self._simulated:
                continue
            late = number_late(self.simulator.ttft_alone_s(group.type), self.simulator.target.slo_s)
            size = group.type.gpus
            if size not in nearest or late < nearest[size][0]:
                nearest[size] = (late, group)
        feasible = {fit.sizes[0] for fit in fits if len(fit.design) == 1}
        reasons = [self._reason(group) for size, (_, group) in nearest.items() if size not in feasible]
        tried_mixed = len(self.types) > 1 and self.simulator.request.mixed
        if not fits and tried_mixed and any(reason.code != "memory" for reason in reasons):
            reasons.append(Infeasible(None, "mixed", "fleets of two sizes of group do not meet it either"))
        return reasons

    def _reason(self, group: GpuGroup) -> Infeasible:
        """The reason why the largest uniform fleet of this type misses the target."""
        simulator = self.simulator
        target = self.simulator.target
        reason = partial(Infeasible, group.type.gpus)
        percent = f"{target.percentile:g} % of the TTFTs"
        above = f"above {target.slo_s:g} s"
        alone_s = simulator.ttft_alone_s(group.type)
        never = int(np.isinf(alone_s).sum())
        late = number_late(alone_s, target.slo_s)
        if never > simulator.allowed:
            share = f"{format_share(never / len(alone_s))} of the contexts do not fit in memory"
            return reason("memory", f"{share}; at most {100 - target.percentile:.4g} % may")
        if late > simulator.allowed:
            reached_s = percentile_of(alone_s, target.percentile)
            return reason("alone", f"even with no queue {percent} take up to {reached_s:.3g} s, {above}")
        answer = simulator.answer((group,))
        reached_s = answer.target_ttft_s
        if answer.meets or reached_s <= target.slo_s:
            return reason("interval", f"the upper end of the interval stays {above} with {group.num_gpus} GPUs")
        busy = simulator.buckets((group.of(1),))[0].load * group.type.gpus
        late_in_queue = f"with {group.num_gpus} GPUs {percent} take up to {reached_s:.3g} s, {above}"
        return reason("queue", f"{late_in_queue} ({busy:.3g} GPUs would be busy all the time)")

    def _best_types(self) -> list[GroupType]:
        """The type with the least load and the type with the fastest prompts, for each group size."""
        alone_s = {group: self.simulator.ttft_alone_s(group) for group in self.types}
        served = {group: int(np.isfinite(alone_s[group]).sum()) for group in self.types}

        def load(group: GroupType) -> tuple[float, float]:
            return -served[group], self.simulator.buckets(self._design((group,), ()))[0].load

        def slowest_s(group: GroupType) -> tuple[float, float]:
            return -served[group], percentile_of(alone_s[group], self.simulator.target.percentile)

        best = set[GroupType]()
        for size in self.limits.sizes:
            serving = [group for group in self.types if group.gpus == size and served[group]]
            if serving:
                best.add(min(serving, key=load))
                best.add(min(serving, key=slowest_s))
        return [group for group in self.types if group in best]

    def _options(self, bucket: Bucket, room: int, most: int, *, single: bool) -> list[tuple[int, int]]:
        """Candidate numbers of groups, ascending, each with its number of late requests, descending."""
        first = self.least_replicas(bucket, bucket.late_alone + room, most)
        if first is None:
            return []
        if first == 0:
            return [(0, 0)]
        options = [(first, bucket.late(first))]
        if single:
            return options
        for replicas in range(first + 1, min(most, first + _OPTIONS) + 1):
            if options[-1][1] <= bucket.late_alone:
                break
            late = bucket.late(replicas)
            if late < options[-1][1]:
                options.append((replicas, late))
        return options

    def _cheapest(
        self, design: Fleet, options: list[list[tuple[int, int]]], cost: list[float], never_served: int
    ) -> FleetFit | None:
        allowed = self.simulator.allowed - never_served
        fits = list[FleetFit]()
        for combination in itertools.product(*options):
            replicas, late = zip(*combination, strict=True)
            groups = tuple(bucket.of(count) for bucket, count in zip(design, replicas, strict=True))
            if sum(late) <= allowed and gpus_of(groups) <= self.limits.max_gpus:
                price = float(np.dot(cost, replicas))
                fits.append(FleetFit(design=groups, cost=price, late=sum(late), never_served=never_served))
        best = min(fits, key=lambda fit: (fit.cost, fit.late, *(group.replicas for group in fit.design)), default=None)
        if best is None:
            return None
        # A design with an empty bucket has only one bucket; such designs are tried separately.
        has_empty_bucket = len(design) > 1 and len(best.fleet) < len(design)
        return None if has_empty_bucket else best

    def _design(self, types: Sequence[GroupType], cuts: Sequence[int]) -> Fleet:
        """A design with one bucket per type of group, divided at these lengths."""
        ends = (0, *cuts, self.longest)
        return tuple(
            GpuGroup(type=group, least_new=ends[bucket] + 1, most_new=ends[bucket + 1])
            for bucket, group in enumerate(types)
        )

    def _cuts(self) -> list[int]:
        """Candidate cuts: lengths at quantiles of the requests and of the work."""
        new = np.sort(np.concatenate([workload.new_tokens for workload in self.simulator.workloads]))
        work = np.cumsum(new.astype(float))
        by_work = [new[np.searchsorted(work, share * work[-1])] for share in _WORK_QUANTILES]
        by_count = [new[int(share * (len(new) - 1))] for share in _REQUEST_QUANTILES]
        return self._usable(int(border) for border in (*by_work, *by_count))

    def _finer(self, design: Fleet) -> Iterator[Fleet]:
        """Designs with the same types of groups and nearby cuts."""
        border = design[0].most_new
        for near in self._usable(int(border * 2.0**step) for step in _FINER):
            yield self._design([group.type for group in design], (near,))

    def _usable(self, cuts: Iterable[int]) -> list[int]:
        """Cuts rounded to a sixteenth of the power of two below them, so that they are easy to read."""
        usable = set[int]()
        for border in cuts:
            step = 1 << max(0, border.bit_length() - 5)
            rounded = max(1, round(border / step) * step)
            if rounded < self.longest:
                usable.add(rounded)
        return sorted(usable)


def _served_before(run: PoolRun, pool: GroupPool) -> PoolRun:
    """The result of a pool, kept from an earlier simulation."""
    assert len(run.end_s) == len(pool.arrival_s)
    return run


def tpot_of(runs: Sequence[FleetRun]) -> Array | None:
    """TPOT of each request with more than one output token; None: the fleet does not decode, or no request has any."""
    parts: list[Array] = []
    for run in runs:
        if run.tpot_s is not None:
            parts.append(run.tpot_s[decodes(run)])
    if not parts or not sum(map(len, parts)):
        return None
    return np.concatenate(parts)


def _has_all_groups(fleet: Fleet, smaller: Fleet) -> bool:
    """Whether a fleet has all groups of another one of the same design."""
    if [group.of(1) for group in fleet] != [group.of(1) for group in smaller]:
        return False
    return all(group.replicas >= fewer.replicas for group, fewer in zip(fleet, smaller, strict=True))


def _high_s(answer: FleetAnswer) -> float:
    """The upper end of the interval; inf: unknown, or the percentile is never served."""
    if answer.interval is None or answer.interval.high_s is None:
        return math.inf
    return answer.interval.high_s


def _best_of_sizes(fits: Sequence[FleetFit]) -> list[FleetFit]:
    """The best fit of each combination of group sizes, from fits in order of cost."""
    best: dict[tuple[int, ...], FleetFit] = {}
    for fit in fits:
        best.setdefault(fit.sizes, fit)
    return list(best.values())
