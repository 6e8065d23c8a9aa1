"""CapacityPlan: the result of `kvrsim capacity`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvrsim.hardware import Cluster, MemoryLimit
from kvrsim.io.schema import fields_to_json
from kvrsim.program import Array
from kvrsim.results.question import Question
from kvrsim.results.results import Displayed
from planner.capacity.confidence import Interval
from planner.capacity.decode_fleet import DecodeFleet
from planner.capacity.fleet.layouts import WHOLE
from planner.capacity.workloads.workload import Lengths

if TYPE_CHECKING:
    import pandas


Cause = Literal["memory", "alone", "queue", "interval", "mixed", "decode"]  # why groups do not meet the target


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAnswer:
    """Groups of a fleet that have the same size and serve the same lengths."""

    gpus_per_group: int
    replicas: int
    weights: str  # how the weights lie on a group: whole, or as engines name it, such as tp4 or tp2+pp4
    strategy: str  # the one that takes most of their time
    strategies: Mapping[str, float]  # share of their time, by strategy
    context_range: tuple[int, int]  # new tokens (context less cached prefix), both ends included
    requests: int  # served by them

    def groups(self) -> str:
        """In words: "3 × 8 GPUs (tp4+kvr-s)"."""
        named = "" if self.weights == WHOLE else f" ({self.strategy})"
        return f"{self.replicas} × {self.gpus_per_group} GPU{'s' * (self.gpus_per_group > 1)}{named}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Data for plots; arrays of shape (N,), one entry a request."""

    arrival_s: Array
    begin_s: Array  # inf: never
    ttft_s: Array
    new_tokens: Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetAnswer:
    """One simulated fleet."""

    num_gpus: int
    groups: tuple[GroupAnswer, ...]
    meets: bool  # whether it meets the target
    p50_ttft_s: float  # inf: never served
    p95_ttft_s: float
    p99_ttft_s: float
    max_ttft_s: float
    target: Interval  # the requested percentile
    in_time: float  # share of all requests that meet the target
    utilisation: float  # of all GPUs, from the first arrival to the last first token
    goodput_per_s: float  # requests a second that meet the target
    cost_per_hour: float | None  # None: no price was given
    requests: int  # of all replications
    unserved: int  # requests that fit in no group's memory; they count as late
    p50_kv_transfer_s: float | None  # from the first token until the cache has left; None: not counted
    p99_kv_transfer_s: float | None
    curves: Curves | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; null for requests that are never served."""
        times = ("p50_ttft_s", "p95_ttft_s", "p99_ttft_s", "max_ttft_s")
        content = fields_to_json(self, "num_gpus", "groups") | {name: _finite(getattr(self, name)) for name in times}
        content |= fields_to_json(self, "utilisation", "cost_per_hour", "meets")
        content |= {"target_ttft_s": _finite(self.target.value_s)}
        content |= {"target_low_s": self.target.low_s, "target_high_s": self.target.high_s}
        return content | fields_to_json(
            self,
            *("in_time", "goodput_per_s", "requests", "unserved"),
            *("p50_kv_transfer_s", "p99_kv_transfer_s"),
        )

    def describe(self) -> str:
        """Groups in words: "3 x 2 GPUs up to 4096, 1 x 8 GPUs from 4097"."""
        parts = []
        for group in self.groups:
            low, high = group.context_range
            sent = "" if len(self.groups) == 1 else f" for {low} to {high} tokens"
            parts.append(f"{group.groups()}{sent}")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One fleet of the Pareto front: no cheaper fleet is as fast."""

    num_gpus: int
    cost_per_hour: float | None
    ttft_s: float  # at the requested percentile
    fleet: str  # in words


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedFleet:
    """One fleet that was simulated around the answer, for the page; TTFTs at the plan's `percentiles`, inf: never."""

    rate: float  # times the arrivals that were asked for: the same requests replayed faster or slower
    num_gpus: int
    cost_per_hour: float | None
    fleet: str  # in words
    ttft_s: tuple[float, ...]
    utilisation: float
    requests: int  # that were simulated


@dataclass(frozen=True, kw_only=True, slots=True)
class Infeasible:
    """Groups that do not meet the target, and why."""

    gpus_per_group: int | None  # None: mixed fleets, or the fleet that decodes
    code: Cause
    reason: str  # without naming the groups

    @property
    def why(self) -> str:
        """The reason with its groups."""
        return self.reason if self.gpus_per_group is None else f"{groups_of([self.gpus_per_group])}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"gpus_per_group": self.gpus_per_group, "code": self.code, "why": self.why}


def groups_of(sizes: Sequence[int]) -> str:
    """In words: "groups of 1, 2 and 4 GPUs"."""
    *first, last = map(str, sizes)
    listed = f"{', '.join(first)} and {last}" if first else last
    return f"groups of {listed} GPU{'' if listed == '1' else 's'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTransfer:
    """What goes from the fleet that prefills to the one that decodes."""

    bytes_per_s_a_gpu: float  # as given
    mean_bytes: float  # of a request's cache
    max_bytes: float
    mean_bytes_per_s: float | None  # of all requests together; None: they all arrive at once


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan(Displayed):
    """The answer to `kvrsim capacity`."""

    view: ClassVar[str] = "planner.capacity.view"
    question: Question  # of the longest context on the largest group
    model: str
    profile: str
    cluster: Cluster  # of the largest group
    memory_limit: MemoryLimit  # of one GPU
    slo_ttft_s: float
    percentile: float
    objective: str  # "gpus" or "cost"
    answer: FleetAnswer | None  # None: no fleet meets the target
    nearest_miss: FleetAnswer | None  # None: there is an answer
    alternatives: tuple[FleetAnswer, ...]  # other fleets that meet the target, best first
    infeasible: tuple[Infeasible, ...]
    pareto: tuple[Point, ...]  # cheapest first
    workload: Mapping[str, Any]  # summary and histogram of the requests
    kv_transfer: KvTransfer | None  # None: not counted
    decode_fleet: DecodeFleet | None  # None: not asked for, or none meets its target
    decoding: str  # how decoding occupies the groups, in words
    dispatch: str  # the dispatching rule, in words
    interval_meaning: str
    simulated_requests: int  # over the whole search
    seconds: float  # duration of the search
    rests_on: str
    warnings: tuple[str, ...]
    percentiles: tuple[float, ...] = field(default=(), repr=False, compare=False)  # of the fleets tried
    tried: tuple[TriedFleet, ...] = field(default=(), repr=False, compare=False)  # at the rate that was asked for
    explore: Callable[[], tuple[TriedFleet, ...]] | None = field(default=None, repr=False, compare=False)

    def explored(self) -> CapacityPlan:
        """The same with fleets at other rates, which the page needs, simulated now."""
        return self if self.explore is None else replace(self, tried=self.explore(), explore=None)

    @property
    def feasible(self) -> bool:
        """Whether some fleet meets the target and, where its TPOT was given, some fleet decodes."""
        return self.answer is not None and all(one.code != "decode" for one in self.infeasible)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fleets = ("answer", "alternatives", "infeasible", "nearest_miss", "pareto")
        about = ("model", "profile", "cluster", "slo_ttft_s", "percentile", "objective")
        rest = (
            "workload",
            "kv_transfer",
            "decode_fleet",
            "decoding",
            "dispatch",
            "interval_meaning",
            "simulated_requests",
            "seconds",
            "rests_on",
        )
        content = self.question.header() | fields_to_json(self, *fleets, *about) | self.memory_limit.to_dict()
        return content | fields_to_json(self, *rest, "warnings")

    @property
    def first(self) -> FleetAnswer:
        """The answer or, where nothing meets the target, the nearest miss."""
        found = self.answer or self.nearest_miss
        assert found is not None
        return found

    def reasons(self) -> Iterator[str]:
        """Why groups do not meet the target, one line a reason."""
        for (_, reason), alike in groupby(self.infeasible, key=lambda one: (one.code, one.reason)):
            sizes = [one.gpus_per_group for one in alike if one.gpus_per_group is not None]
            yield f"{groups_of(sizes)}: {reason}" if sizes else reason

    def rows(self) -> list[dict[str, Any]]:
        """Plain JSON values of each fleet that meets the target, the answer first."""
        fleets = [*([] if self.answer is None else [self.answer]), *self.alternatives]
        return [{"fleet": one.describe()} | one.to_dict() for one in fleets]

    def to_frame(self) -> pandas.DataFrame:
        """One row a fleet, the answer first."""
        import pandas

        return pandas.DataFrame(self.rows())


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None
