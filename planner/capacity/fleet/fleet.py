"""A fleet: pools of equal groups, the routing of prompts to pools, and the resulting TTFTs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrsim.choices import Order
from kvrsim.program import Array
from planner.capacity.fleet.fast import run_pool
from planner.capacity.fleet.layouts import WHOLE, Kind
from planner.capacity.fleet.pool import Pool, PoolRun
from planner.capacity.fleet.service import Service
from planner.capacity.workloads.workload import Lengths, Workload

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """Groups of one size, and the prompt lengths that they serve."""

    gpus_per_group: int
    replicas: int
    least_new: int  # the fewest new tokens (context less cached prefix) of their prompts
    most_new: int  # the most new tokens
    weights: str = WHOLE  # how the weights lie on a group

    @property
    def kind(self) -> Kind:
        """Size and layout of the groups."""
        return Kind(self.gpus_per_group, self.weights)

    @property
    def num_gpus(self) -> int:
        """GPUs of all these groups."""
        return self.gpus_per_group * self.replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """How the fleet is operated."""

    order: Order = "first-come"

    def pool(self, arrival_s: Array, service: Service, replicas: int) -> Pool:
        """A pool under these conditions."""
        return Pool(
            arrival_s=arrival_s,
            service=service,
            replicas=replicas,
            order=self.order,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetRun:
    """Results by request; arrays of shape (N,)."""

    arrival_s: Array
    ttft_s: Array  # queueing included; inf: never served
    begin_s: Array
    pool: Indices  # index of the plan that served it; -1: it fits in no group's memory
    num_gpus: int
    busy_gpu_s: float

    @property
    def horizon_s(self) -> float:
        """From the first arrival to the last first token."""
        ends = self.arrival_s + self.ttft_s
        return float(max(ends[np.isfinite(ends)].max(initial=0.0), self.arrival_s[-1]) - self.arrival_s[0])

    @property
    def utilisation(self) -> float:
        """Busy share of all GPU time; decoding on a group counts, waiting inside it does not."""
        return self.busy_gpu_s / (self.num_gpus * self.horizon_s) if self.horizon_s else 0.0

    def goodput_per_s(self, slo_s: float) -> float:
        """Requests a second with a TTFT of at most `slo_s`."""
        return float((self.ttft_s <= slo_s).sum()) / self.horizon_s if self.horizon_s else 0.0

    @property
    def unserved(self) -> int:
        """Requests that fit in no group's memory."""
        return int(np.isinf(self.ttft_s).sum())


def route(new_tokens: Lengths, services: Mapping[Kind, Service], plans: Sequence[GroupPlan]) -> Indices:
    """Index of the plan that serves each prompt: that of its length or, if it does not fit there, the next one.

    Plans are in order of length; -1: it fits nowhere.
    """
    limits = np.array([plan.most_new for plan in plans[:-1]])
    target = np.searchsorted(limits, new_tokens)
    chosen = np.full(len(new_tokens), -1, dtype=np.int64)
    for index, plan in enumerate(plans):
        here = (target <= index) & (chosen < 0) & np.isfinite(services[plan.kind].ttft_s)
        chosen[here] = index
    return chosen


def run_fleet(
    workload: Workload,
    services: Mapping[Kind, Service],
    plans: Sequence[GroupPlan],
    conditions: Conditions,
    serve: Callable[[Pool], PoolRun] = run_pool,
) -> FleetRun:
    """Serve a workload; `services` holds its service times by kind of group, `serve` simulates one pool."""
    pool_of = route(workload.new_tokens, services, plans)
    ttft_s, begin_s = np.full(len(workload), np.inf), np.full(len(workload), np.inf)
    busy = 0.0
    for index, plan in enumerate(plans):
        mine = np.flatnonzero(pool_of == index)
        if not len(mine):
            continue
        service = services[plan.kind].of(mine)
        arrival_s = workload.arrival_s[mine]
        run = serve(conditions.pool(arrival_s, service, plan.replicas))
        ttft_s[mine], begin_s[mine] = run.end_s - arrival_s, run.begin_s
        busy += run.busy_s * plan.gpus_per_group
    return FleetRun(
        arrival_s=workload.arrival_s,
        ttft_s=ttft_s,
        begin_s=begin_s,
        pool=pool_of,
        num_gpus=sum(plan.num_gpus for plan in plans),
        busy_gpu_s=busy,
    )
