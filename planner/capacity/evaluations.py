"""Evaluations: simulations of pools and fleets on given workloads, each run once and remembered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvrsim.program import Array
from planner.capacity.fleet.decoding import Decoding
from planner.capacity.fleet.fast import run_pool
from planner.capacity.fleet.fleet import Conditions, FleetRun, GroupPlan, Indices, route, run_fleet
from planner.capacity.fleet.layouts import WHOLE, Kind
from planner.capacity.fleet.service import Service
from planner.capacity.fleet.times import ServiceTimes
from planner.capacity.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """`percentile` percent of all requests have a TTFT of at most `slo_s`."""

    slo_s: float
    percentile: float  # up to 100: all of them

    def allowed(self, requests: int) -> int:
        """Requests that may be late."""
        return requests - max(1, math.ceil(self.percentile / 100 * requests - 1e-9))


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBucket:
    """Prompts of a range of new tokens (ends included) on groups of one kind."""

    gpus_per_group: int
    least_new: int
    most_new: int
    weights: str = WHOLE  # how the weights lie on a group

    @property
    def kind(self) -> Kind:
        """Size and layout of the groups."""
        return Kind(self.gpus_per_group, self.weights)

    def with_replicas(self, replicas: int) -> GroupPlan:
        """Groups that serve the bucket."""
        return GroupPlan(
            gpus_per_group=self.gpus_per_group,
            replicas=replicas,
            least_new=self.least_new,
            most_new=self.most_new,
            weights=self.weights,
        )


Design = tuple[LengthBucket, ...]  # by rising length; together they cover all lengths


@dataclass(slots=True)
class Evaluations:
    """Workloads (one, or replications), service times for them, and results so far."""

    workloads: Sequence[Workload]
    times: ServiceTimes
    conditions: Conditions
    target: Target
    decoding: Decoding = field(default_factory=Decoding)
    simulated: int = 0  # requests, over all simulations
    _services: dict[Kind, list[Service]] = field(default_factory=dict)
    _members: dict[tuple[object, ...], list[Indices]] = field(default_factory=dict)
    _misses: dict[tuple[object, ...], int] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        """Requests of all workloads."""
        return sum(map(len, self.workloads))

    @property
    def allowed(self) -> int:
        """Requests of all workloads together that may be late."""
        return self.target.allowed(self.requests)

    def on(self, workloads: Sequence[Workload]) -> Evaluations:
        """Of other workloads: nothing is simulated yet."""
        return Evaluations(workloads, self.times, self.conditions, self.target, self.decoding)

    def compressed(self, factor: float) -> Evaluations:
        """Of the same requests in 1/`factor` of the time, which take as long to serve."""
        other = self.on([workload.compressed(factor) for workload in self.workloads])
        other._services = self._services
        return other

    def services(self, kind: Kind) -> list[Service]:
        """Service times of each workload on such groups."""
        if kind not in self._services:
            self._services[kind] = [
                self.times.service(kind.gpus, workload, self.decoding, kind.weights) for workload in self.workloads
            ]
        return self._services[kind]

    def members(self, design: Design, index: int) -> list[Indices]:
        """Indices of the requests that one bucket of a design serves, one array a workload."""
        key = self._key(design, index)
        if key not in self._members:
            plans = [bucket.with_replicas(1) for bucket in design]
            found = []
            for number, workload in enumerate(self.workloads):
                services = {bucket.kind: self.services(bucket.kind)[number] for bucket in design}
                found.append(np.flatnonzero(route(workload.new_tokens, services, plans) == index))
            self._members[key] = found
        return self._members[key]

    def _key(self, design: Design, index: int) -> tuple[object, ...]:
        """A cache key; where all requests fit in memory everywhere, it is the same for equal buckets of all designs."""
        everywhere = all(
            np.isfinite(service.ttft_s).all() for bucket in design for service in self.services(bucket.kind)
        )
        return (design[index],) if everywhere else (*design, index)

    def never_served(self, design: Design) -> int:
        """Requests that do not fit in the memory of any group of the design."""
        return self.requests - sum(len(one) for index in range(len(design)) for one in self.members(design, index))

    def late_alone(self, design: Design, index: int) -> int:
        """Requests of a bucket that are late even without a queue."""
        pairs = zip(self.services(design[index].kind), self.members(design, index), strict=True)
        return sum(int((service.ttft_s[mine] > self.target.slo_s).sum()) for service, mine in pairs)

    def load(self, design: Design, index: int) -> float:
        """Average number of busy groups of a bucket, if all work ends when the last request is due."""
        busy_s = 0.0
        for service, mine in zip(self.services(design[index].kind), self.members(design, index), strict=True):
            busy_s += float((service.busy_s[mine] + service.hold_s[mine]).sum())
        return busy_s / sum(workload.duration_s + self.target.slo_s for workload in self.workloads)

    def misses(self, design: Design, index: int, replicas: int) -> int:
        """Late requests of a bucket with that many groups."""
        key = (*self._key(design, index), replicas)
        if key not in self._misses:
            late = 0
            for number, mine in enumerate(self.members(design, index)):
                if len(mine):
                    arrival_s = self.workloads[number].arrival_s[mine]
                    service = self.services(design[index].kind)[number].of(mine)
                    run = run_pool(self.conditions.pool(arrival_s, service, replicas))
                    late += int((run.end_s - arrival_s > self.target.slo_s).sum())
                    self.simulated += len(mine)
            self._misses[key] = late
        return self._misses[key]

    def runs(self, plans: Sequence[GroupPlan]) -> list[FleetRun]:
        """Simulations of a whole fleet, one a workload."""
        found = []
        for number, workload in enumerate(self.workloads):
            services = {plan.kind: self.services(plan.kind)[number] for plan in plans}
            found.append(run_fleet(workload, services, plans, self.conditions))
            self.simulated += len(workload)
        return found

    def ttft_alone_s(self, kind: Kind) -> Array:
        """TTFTs without queueing, of all workloads."""
        return np.concatenate([service.ttft_s for service in self.services(kind)])
