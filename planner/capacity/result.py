"""CapacityPlan: the result of `kvrsim capacity`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvrsim.hardware import Cluster
from kvrsim.io.schema import fields_to_json, to_frame
from kvrsim.program import Array
from kvrsim.results.question import Question
from kvrsim.results.results import Viewable
from kvrsim.scenario import Scenario
from kvrsim.units import format_count
from planner.capacity.decode import DecodeFleet
from planner.capacity.fleet import WHOLE, Fleet, FleetRun
from planner.capacity.hits import CacheHits, TurnTimes
from planner.capacity.request import CapacityRequest, Serving
from planner.capacity.transfer import KvTransfer
from planner.percentile import percentile_of
from planner.uncertainty.intervals import provenance

if TYPE_CHECKING:
    import pandas

Cause = Literal["memory", "alone", "queue", "interval", "mixed", "decode"]  # reason why groups miss the target
LEVEL = 0.8  # coverage of intervals
_MEANING = "80 % interval: the error of the prefill times, by simulation at both ends of theirs, and of sampling, by "
MEANING_OF_TRACE = _MEANING + "block bootstrap over segments of this trace; it covers no other days"
MEANING_OF_DRAWN = _MEANING + "Student's t over the percentiles of independent replications"
_GAIN = 0.01  # least relative gain in TTFT of each more expensive fleet on the Pareto front
_BLOCKS = 40
_LEAST_IN_BLOCK = 25
_DRAWS = 400
_THRESHOLDS = 2000

Ends = tuple[float, float] | None  # ends of an interval; None: unknown, or requests are never served


def trace_interval(ttft_s: Array, percentile: float, seed: int) -> Ends:
    """The sampling interval of a percentile of requests in order of arrival, by block bootstrap.

    The interval is the variation of the percentile between segments of this trace. It does not cover the variation
    between days. Queues at the ends of a segment remain as simulated.
    """
    value_s = percentile_of(ttft_s, percentile)
    blocks = min(_BLOCKS, len(ttft_s) // _LEAST_IN_BLOCK)
    if blocks < 8 or not math.isfinite(value_s):
        return None
    ordered = np.sort(ttft_s)
    spaced = np.linspace(0, len(ordered) - 1, _THRESHOLDS).astype(np.int64)
    thresholds = np.unique(np.concatenate([ordered[spaced], ordered[-_THRESHOLDS:]]))
    parts = np.array_split(ttft_s, blocks)
    counts = [np.searchsorted(np.sort(part), thresholds, side="right") for part in parts]
    draws = np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), size=_DRAWS)
    within = draws @ np.array(counts, dtype=float)
    sizes = draws @ np.array([len(part) for part in parts], dtype=float)
    reached = (within >= np.ceil(percentile / 100 * sizes - 1e-9)[:, None]).argmax(axis=1)
    low, high = np.quantile(thresholds[reached], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return min(float(low), value_s), max(float(high), value_s)


def replications_interval(ttft_s: Sequence[Array], percentile: float) -> Ends:
    """Student's t interval over independent replications, one array each, widened to the percentile of all requests."""
    values = np.array([percentile_of(replication_s, percentile) for replication_s in ttft_s])
    value_s = percentile_of(np.concatenate(ttft_s), percentile)
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    from scipy.special import stdtrit

    half_s = float(stdtrit(len(values) - 1, (1 + LEVEL) / 2) * values.std(ddof=1) / math.sqrt(len(values)))
    mean_s = float(values.mean())
    return max(0.0, min(mean_s - half_s, value_s)), max(mean_s + half_s, value_s)


_NOT_WRITTEN = ("ttft_s", "fleet", "runs", "is_safe")  # fields of FleetAnswer that its JSON leaves out


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAnswer:
    """Groups of a fleet that have the same size and serve the same lengths."""

    gpus_per_group: int
    replicas: int
    weights: str  # placement of the weights on a group: whole, or an engine's name such as tp4 or tp2+pp4
    strategy: str  # the strategy that runs for most of the groups' time
    strategies: Mapping[str, float]  # share of the groups' time, by strategy
    context_range: tuple[int, int]  # range of new tokens (context minus cached prefix), both ends included
    requests: int  # number of requests that the groups serve

    def groups(self) -> str:
        """Describe the groups: "3 × 8 GPUs (tp4+kvr-s)"."""
        groups = f"{self.replicas} × {format_count(self.gpus_per_group, 'GPU')}"
        if self.weights == WHOLE:
            return groups
        return f"{groups} ({self.strategy})"


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetInterval:
    """The 80 % prediction interval of the requested percentile: errors of the prefill times and of sampling."""

    low_s: float
    high_s: float | None  # None: with the longest prefill times, the percentile is never served
    safe: bool  # whether the upper end meets the target


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeInterval:
    """The sizes of the answer's design at both ends of the model's error: all times shorter, and all times longer."""

    low_gpus: int | None  # GPUs that are rented; None: no fleet within the limits meets the target
    high_gpus: int | None
    low_cost_per_hour: float | None  # None: no price was given, or no fleet
    high_cost_per_hour: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The answer to the same question with more requests in the same time (`rate_scale`)."""

    times: float  # multiple of the requests
    num_gpus: int | None  # GPUs that are rented; None: no fleet within the limits meets the target
    decode_gpus: int  # those of them that decode
    cost_per_hour: float | None  # price of all GPUs; None: no price was given, or no fleet


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetAnswer:
    """One simulated fleet."""

    num_gpus: int  # GPUs that prefill; colocated: all GPUs
    serving: Serving  # split: other GPUs decode; colocated: the same ones
    groups: tuple[GroupAnswer, ...]
    meets: bool  # whether the fleet meets the TTFT target
    p50_ttft_s: float  # TTFT percentiles; inf: never served
    p95_ttft_s: float
    p99_ttft_s: float
    max_ttft_s: float
    target_ttft_s: float  # requested percentile of TTFT
    p50_tpot_s: float | None  # percentiles of TPOT over the requests that decode; None: decoding is not simulated
    p99_tpot_s: float | None
    target_tpot_s: float | None  # requested percentile of TPOT
    in_time: float  # share of all requests that meet the target
    utilisation: float  # busy share of all GPUs, from the first arrival to the last first token
    goodput_per_s: float  # requests per second that meet the target
    cost_per_hour: float | None  # price of the GPUs that prefill; None: no price was given
    requests: int  # requests in all replications
    unserved: int  # requests that fit in no group's memory; these count as late
    idle_gpus: int  # GPUs that are rented and do not work: the rest of the last node, and spare ones
    idle_cost_per_hour: float | None  # None: no price was given
    longest_served: int | None  # longest context that the fleet serves, tokens; None: it serves no request
    p50_kv_transfer_s: float | None  # time from the first token until the cache has left the group; None: not requested
    p99_kv_transfer_s: float | None
    engine: str | None = None  # engines that have the strategies of all groups, separated by commas; None: none
    prefix_cache: CacheHits | None = None  # None: no sessions, or their caches are not simulated
    by_turn: tuple[TurnTimes, ...] = ()  # empty: no session has a second turn
    decode: DecodeFleet | None = None  # fleet that decodes; None: not requested, or there is none
    no_decode: str | None = None  # why no fleet decodes for this one; None: a fleet does, or is not requested
    interval: FleetInterval | None = None  # None: not simulated; only the answer has an interval
    is_safe: bool | None = None  # whether it meets the targets, with the upper end of its interval; None: unknown
    size_interval: SizeInterval | None = None  # None: not simulated; only the answer has one
    withstands: float | None = None  # multiple of the requests that the same fleet serves in time; None: not simulated
    ttft_s: Mapping[float, float] = field(default_factory=dict, repr=False, compare=False)  # TTFT by percentile
    fleet: Fleet = field(default=(), repr=False, compare=False)
    runs: tuple[FleetRun, ...] = field(default=(), repr=False, compare=False)  # simulation results, one per workload

    @property
    def served_share(self) -> float:
        """Share of the requests that the fleet ever serves."""
        return 1 - self.unserved / self.requests

    @property
    def working_gpus(self) -> int:
        """Number of GPUs that prefill or decode."""
        if self.decode is None:
            return self.num_gpus
        return self.num_gpus + self.decode.num_gpus

    @property
    def total_gpus(self) -> int:
        """Number of GPUs that are rented."""
        return self.working_gpus + self.idle_gpus

    @property
    def total_cost_per_hour(self) -> float | None:
        """Price of all GPUs that are rented; None if no price was given."""
        if self.cost_per_hour is None or self.idle_cost_per_hour is None:
            return None
        decode = 0.0 if self.decode is None else self.decode.cost_per_hour or 0.0
        return self.cost_per_hour + decode + self.idle_cost_per_hour

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; null for requests that are never served."""
        names = [field.name for field in fields(self) if field.name not in _NOT_WRITTEN]
        content = fields_to_json(self, *names)
        content |= fields_to_json(self, "served_share", "total_gpus", "total_cost_per_hour")
        for name, value in content.items():
            if value == math.inf:
                content[name] = None
        return content

    def point(self) -> dict[str, Any]:
        """Plain JSON values of the fleet as a point on the Pareto front."""
        totals = fields_to_json(self, "num_gpus", "total_gpus", "total_cost_per_hour")
        return totals | {"fleet": self.describe(), "ttft_s": self.target_ttft_s, "safe": self.is_safe}

    def describe(self) -> str:
        """Groups in words: "3 × 2 GPUs for 1 to 4096 tokens, 1 × 8 GPUs for 4097 to 9000 tokens"."""
        if len(self.groups) == 1:
            return self.groups[0].groups()
        texts = []
        for group in self.groups:
            low, high = group.context_range
            texts.append(f"{group.groups()} for {low} to {high} tokens")
        return ", ".join(texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterAnswer:
    """The answer on one of several clusters."""

    cluster: str  # as the user named it
    answer: FleetAnswer | None  # None: no fleet meets the target
    growth: tuple[Growth, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return fields_to_json(self)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Groups that miss the target, and the reason."""

    gpus_per_group: int | None  # None: mixed fleets, or the fleet that decodes
    code: Cause
    reason: str  # reason, without the name of the groups

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        why = self.reason
        if self.gpus_per_group is not None:
            why = f"{groups_of([self.gpus_per_group])}: {why}"
        return {"gpus_per_group": self.gpus_per_group, "code": self.code, "why": why}


def format_share(share: float) -> str:
    """A share as a percentage that is 0 or 100 % only if the share is: "97.2 %", "99.99 %"."""
    for digits in range(1, 6):
        percent = f"{100 * share:.{digits}f}"
        if float(percent) not in (0.0, 100.0):
            break
    return f"{float(percent):g} %"


def groups_of(sizes: Sequence[int]) -> str:
    """Describe the sizes: "groups of 1, 2 and 4 GPUs"."""
    *first, last = sizes
    text = format_count(last, "GPU")
    if first:
        text = f"{', '.join(map(str, first))} and {last} GPUs"
    return f"groups of {text}"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CapacityPlan(Viewable):
    """The answer to `kvrsim capacity`."""

    question: Question
    scenario: Scenario  # scenario with the longest context on the largest group
    request: CapacityRequest
    answer: FleetAnswer | None  # None: no fleet meets the target
    nearest_miss: FleetAnswer | None  # None if some fleet meets the target
    alternatives: tuple[FleetAnswer, ...]  # other fleets that meet the target, best first
    infeasible: tuple[Infeasible, ...]
    workload: Mapping[str, Any]  # summary of the requests
    kv_transfer: KvTransfer | None  # None: not counted
    simulated_requests: int  # requests in all simulations of the search
    seconds: float  # duration of the search, seconds
    warnings: tuple[str, ...]
    longest_sequence: int  # tokens of the longest prompt and output together
    would_meet: tuple[str, ...]  # changed targets that the nearest miss meets, in words
    by_cluster: tuple[ClusterAnswer, ...]  # the answers for all clusters, if several were asked for; else empty
    growth: tuple[Growth, ...]  # answers for more requests, in ascending order; empty: not simulated
    tried: tuple[FleetAnswer, ...] = field(repr=False, compare=False)  # the best designs, with fewer and more groups

    @property
    def cluster(self) -> Cluster:
        """The cluster with the GPUs of the largest group."""
        return self.scenario.cluster

    @property
    def slo_ttft_s(self) -> float:
        """The targeted TTFT, seconds."""
        return self.request.target.slo_s

    @property
    def percentile(self) -> float:
        """Percentage of the requests that must meet the target."""
        return self.request.target.percentile

    @property
    def decode_fleet(self) -> DecodeFleet | None:
        """The fleet that decodes; None if not requested, or if no fleet decodes within the TPOT."""
        if self.answer is None:
            return None
        return self.answer.decode

    @property
    def first(self) -> FleetAnswer:
        """The answer or, if no fleet meets the target, the nearest miss."""
        fleet = self.answer or self.nearest_miss
        assert fleet is not None
        return fleet

    def best_of(self, serving: str) -> FleetAnswer | None:
        """The first fleet of the answers that decodes on other GPUs ("split") or on the same ("colocated")."""
        fleets = list(self.alternatives)
        if self.answer is not None:
            fleets.insert(0, self.answer)
        return next((fleet for fleet in fleets if fleet.serving == serving), None)

    @property
    def feasible(self) -> bool:
        """Whether some fleet meets the target and, if a TPOT is given, some fleet decodes within the TPOT."""
        return self.answer is not None

    @property
    def serves_more(self) -> FleetAnswer | None:
        """The cheapest alternative that serves more requests than the answer; None: the search found none."""
        if self.answer is None:
            return None
        for fleet in self.alternatives:
            if fleet.unserved < self.answer.unserved:
                return fleet
        return None

    def assumptions(self) -> dict[str, str]:
        """Assumptions of the answer, in sentences."""
        meaning = MEANING_OF_TRACE
        if self.request.source.is_random:
            meaning = MEANING_OF_DRAWN
        return {
            "decoding": self.request.decoding(colocated=self.first.serving == "colocated"),
            "dispatch": self.request.dispatch(colocated=self.first.serving == "colocated"),
            "interval_meaning": meaning,
            "provenance": provenance(self.scenario),
        }

    def pareto(self) -> list[FleetAnswer]:
        """Fleets of `tried` that are at least _GAIN faster than all cheaper ones, cheapest first.

        If the upper end of the interval must meet the target, the front has only fleets whose upper end does.
        """
        cost = attrgetter("total_gpus", "target_ttft_s")
        if self.request.limits.by_cost:
            cost = attrgetter("total_cost_per_hour", "target_ttft_s")
        fleets: Sequence[FleetAnswer] = self.tried
        if self.request.sure:
            fleets = [fleet for fleet in self.tried if fleet.is_safe] or self.tried
        front: list[FleetAnswer] = []
        below_s = math.inf
        for fleet in sorted(fleets, key=cost):
            if fleet.target_ttft_s < below_s:
                front.append(fleet)
                below_s = fleet.target_ttft_s * (1 - _GAIN)
        return front

    def reasons(self) -> Iterator[str]:
        """Reasons why no fleet meets the target, or why groups miss it; one line per reason."""
        for (_, reason), alike in groupby(self.infeasible, key=attrgetter("code", "reason")):
            sizes = [groups.gpus_per_group for groups in alike if groups.gpus_per_group is not None]
            if sizes:
                yield f"{groups_of(sizes)}: {reason}"
            else:
                yield reason

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        answer = None
        if self.answer is not None:
            answer = self.answer.to_dict() | fields_to_json(self, "growth")
        return (
            self.question.header()
            | {"answer": answer}
            | fields_to_json(self, "alternatives", "infeasible", "nearest_miss", "cluster", "by_cluster")
            | {"pareto": [fleet.point() for fleet in self.pareto()]}
            | {"model": self.scenario.model.name, "profile": self.scenario.profile_name}
            | fields_to_json(self, "slo_ttft_s", "percentile")
            | {"objective": self.request.objective, "served_share": self.first.served_share}
            | fields_to_json(self.first, "prefix_cache", "by_turn")
            | self.scenario.memory_limit.to_dict()
            | fields_to_json(self, "workload", "kv_transfer", "decode_fleet", "simulated_requests", "seconds")
            | fields_to_json(self, "would_meet", "growth")
            | self.assumptions()
            | fields_to_json(self, "warnings")
        )

    def rows(self) -> list[dict[str, Any]]:
        """Plain JSON values of each fleet that meets the target, the answer first."""
        fleets = list(self.alternatives)
        if self.answer is not None:
            fleets.insert(0, self.answer)
        return [{"fleet": fleet.describe()} | fleet.to_dict() for fleet in fleets]

    def to_frame(self) -> pandas.DataFrame:
        """One row per fleet, the answer first."""
        return to_frame(self.rows())
