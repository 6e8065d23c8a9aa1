"""What `kvrsim capacity` answers with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvrsim.program import Array
from planner.capacity.confidence import Interval
from planner.workloads.workload import Lengths

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAnswer:
    """Like groups of a fleet."""

    gpus_per_group: int
    replicas: int
    strategy: str  # that most of their time goes to
    strategies: Mapping[str, float]  # share of their time
    context_range: tuple[int, int]  # of new tokens, both ends included: the context less what is cached of it
    requests: int  # that were sent here

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"context_range": list(self.context_range), "strategies": dict(self.strategies)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """What plots are drawn from: one request each, shape (N,)."""

    arrival_s: Array
    begin_s: Array  # inf: never
    ttft_s: Array
    new_tokens: Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetAnswer:
    """One fleet, simulated."""

    num_gpus: int
    groups: tuple[GroupAnswer, ...]
    meets: bool  # the target
    p50_ttft_s: float  # inf: never
    p95_ttft_s: float
    p99_ttft_s: float
    max_ttft_s: float
    target: Interval  # the percentile asked for
    in_time: float  # share of all requests
    utilisation: float  # of all GPUs, over the time that requests came and were served
    goodput_per_s: float  # requests a second whose first token came in time
    cost_per_hour: float | None  # None: no price was given
    retried: int  # requests begun anew after a failure
    lost_gpu_s: float  # GPU time that failures made worthless
    unserved: int  # requests that fit in no memory, or were given up; they count as late
    curves: Curves | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a time that never comes is null."""
        names = ("p50_ttft_s", "p95_ttft_s", "p99_ttft_s", "max_ttft_s")
        values = {"num_gpus": self.num_gpus, "groups": [group.to_dict() for group in self.groups]}
        values |= {name: _finite(getattr(self, name)) for name in names}
        values |= {"utilisation": self.utilisation, "cost_per_hour": self.cost_per_hour, "meets": self.meets}
        values |= {"target_ttft_s": _finite(self.target.value_s)}
        values |= {"target_low_s": self.target.low_s, "target_high_s": self.target.high_s}
        after = ("in_time", "goodput_per_s", "retried", "lost_gpu_s", "unserved")
        return values | {name: getattr(self, name) for name in after}

    def describe(self) -> str:
        """Groups in words: "3 x 2 GPUs up to 4096, 1 x 8 GPUs from 4097"."""
        parts = []
        for group in self.groups:
            low, high = group.context_range
            sent = "" if len(self.groups) == 1 else f" for {low} to {high} tokens"
            parts.append(f"{group.replicas} × {group.gpus_per_group} GPU{'s' * (group.gpus_per_group > 1)}{sent}")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One fleet of the Pareto front: none is cheaper and as fast."""

    num_gpus: int
    cost_per_hour: float | None
    ttft_s: float  # at the percentile asked for
    fleet: str  # in words


@dataclass(frozen=True, kw_only=True, slots=True)
class Infeasible:
    """Groups that cannot do it, and why."""

    gpus_per_group: int | None  # None: mixed fleets
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """The answer to `kvrsim capacity`."""

    model: str
    profile: str
    cluster: str  # of the largest group, in words
    slo_ttft_s: float
    percentile: float
    objective: str  # "gpus" or "cost"
    answer: FleetAnswer | None  # None: nothing fits
    nearest_miss: FleetAnswer | None  # where nothing fits
    alternatives: tuple[FleetAnswer, ...]  # best first; they meet the target too
    infeasible: tuple[Infeasible, ...]
    pareto: tuple[Point, ...]  # cheapest first
    workload: Mapping[str, Any]  # what was read: summary and histogram
    decoding: str  # what it does to the groups, in words
    dispatch: str  # the rule, in words
    interval_meaning: str
    simulated_requests: int  # in the whole search
    seconds: float  # that it took
    rests_on: str
    warnings: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Whether some fleet meets the target."""
        return self.answer is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = ("model", "profile", "cluster", "slo_ttft_s", "percentile", "objective")
        after = ("decoding", "dispatch", "interval_meaning", "simulated_requests", "seconds", "rests_on")
        return {
            "answer": None if self.answer is None else self.answer.to_dict(),
            "alternatives": [one.to_dict() for one in self.alternatives],
            "infeasible": [asdict(one) for one in self.infeasible],
            "nearest_miss": None if self.nearest_miss is None else self.nearest_miss.to_dict(),
            "pareto": [asdict(point) for point in self.pareto],
            **{name: getattr(self, name) for name in names},
            "workload": dict(self.workload),
            **{name: getattr(self, name) for name in after},
            "warnings": list(self.warnings),
        }

    def to_frame(self) -> pandas.DataFrame:
        """One row a fleet, the answer first."""
        import pandas

        fleets = [*([] if self.answer is None else [self.answer]), *self.alternatives]
        return pandas.DataFrame([one.to_dict() | {"fleet": one.describe()} for one in fleets])


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None
