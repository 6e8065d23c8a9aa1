"""DesignSearch: the cheapest fleet, uniform ones of every kind of group, then mixed ones by prompt length.

A percentile target is met if at most a certain number of requests is late. Length buckets have separate queues, so
their numbers of late requests add up, and each bucket is simulated once for each number of groups, whatever it is
combined with. Every bucket gets at least the groups it needs if no request of the others were late. From there on,
every number of groups that lowers its late requests is an option, and the cheapest combination within the limit wins.

There are one or two buckets, cut at quantiles of the requests and of the work. The best designs of two are refined with
finer cuts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvrsim.interp import percentile_of
from planner.capacity.evaluations import Design, Evaluations, LengthBucket
from planner.capacity.fleet.fleet import GroupPlan
from planner.capacity.fleet.layouts import Kind

_REQUEST_QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
_WORK_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
MANY = 250_000  # requests of all workloads, above which fewer designs are tried
_OPTIONS, _OPTIONS_OF_MANY = 10, 3  # numbers of groups that are tried above the least one of a bucket
_SAFE_LOAD = 0.9  # the average number of busy groups, times this, is a lower bound: a trace may end with a backlog
_REFINED = 3  # two-bucket designs that are refined


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The fleets that are allowed, and what they cost."""

    sizes: tuple[int, ...] = (1, 2, 4, 8)  # GPUs a group
    max_gpus: int = 512
    prices: Mapping[int, float] = field(default_factory=dict)  # of a GPU an hour, by group size; empty: unknown
    by_cost: bool = False  # minimise cost rather than the number of GPUs

    def cost(self, gpus_per_group: int) -> float:
        """What one group adds to the objective."""
        return gpus_per_group * (self.prices[gpus_per_group] if self.by_cost else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A design with the fewest replicas that meet the target."""

    design: Design
    replicas: tuple[int, ...]
    cost: float  # the objective: GPUs, or cost an hour
    misses: int  # late requests

    @property
    def plans(self) -> tuple[GroupPlan, ...]:
        """Its groups; empty buckets have none."""
        pairs = zip(self.design, self.replicas, strict=True)
        return tuple(bucket.with_replicas(replicas) for bucket, replicas in pairs if replicas)

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs a group, one a bucket."""
        return tuple(bucket.gpus_per_group for bucket in self.design)


class DesignSearch:
    """A search over designs within limits."""

    def __init__(self, evaluations: Evaluations, limits: Limits) -> None:
        self.evaluations, self.limits = evaluations, limits
        self.longest = max(int(workload.new_tokens.max()) for workload in evaluations.workloads)
        self.kinds = [kind for size in limits.sizes for kind in evaluations.times.kinds(size)]

    def uniform(self) -> list[Design]:
        """Designs of a single bucket, one a kind of group."""
        return [self._cut((kind,), ()) for kind in self.kinds]

    def best_kinds(self) -> list[Kind]:
        """Of each group size, the kind with the least load and the one with the fastest prompts."""
        designs = {kind: self._cut((kind,), ()) for kind in self.kinds}

        def load(kind: Kind) -> tuple[float, float]:
            return -self._served(kind), self.evaluations.load(designs[kind], 0)

        def slowest_s(kind: Kind) -> tuple[float, float]:
            alone_s = self.evaluations.ttft_alone_s(kind)
            return -self._served(kind), percentile_of(alone_s, self.evaluations.target.percentile)

        chosen = set()
        for size in self.limits.sizes:
            if alike := [kind for kind in self.kinds if kind.gpus == size and self._served(kind)]:
                chosen |= {min(alike, key=load), min(alike, key=slowest_s)}
        return [kind for kind in self.kinds if kind in chosen]

    def _served(self, kind: Kind) -> int:
        """Requests that fit in the memory of such groups."""
        return int(np.isfinite(self.evaluations.ttft_alone_s(kind)).sum())

    def fits(self, designs: Iterable[Design], fits: Sequence[Fit] = ()) -> list[Fit]:
        """Known fits and those of the designs that meet the target at no higher cost, best first."""
        found = list(fits)
        for design in designs:
            best = min((fit.cost for fit in found), default=math.inf)
            if (fit := self.fit(design, at_most=best if len(design) > 1 else math.inf)) is not None:
                found.append(fit)
        return sorted(found, key=lambda fit: (fit.cost, fit.misses, len(fit.design), fit.sizes))

    def mixed(self, fits: Sequence[Fit]) -> list[Fit]:
        """Known fits, two buckets at every cut, and the best of them with finer cuts."""
        kinds = self.best_kinds()
        pairs = [(short, long) for short, long in itertools.product(kinds, kinds) if short.gpus <= long.gpus]
        found = self.fits((self._cut(pair, (cut,)) for cut in self._cuts() for pair in pairs), fits)
        best = [fit for fit in found if len(fit.design) == 2][:_REFINED]
        return self.fits((design for fit in best for design in self._finer(fit.design)), found)

    def fit(self, design: Design, at_most: float = math.inf) -> Fit | None:
        """The cheapest replicas with which a design meets the target; None: there are none."""
        buckets = range(len(design))
        never = self.evaluations.never_served(design)
        floors = [self.evaluations.late_alone(design, bucket) for bucket in buckets]
        room = self.evaluations.allowed - never - sum(floors)
        cost = [self.limits.cost(bucket.gpus_per_group) for bucket in design]
        least = [self._lower_bound(design, bucket) for bucket in buckets]
        if room < 0 or sum(map(_product, cost, least)) > at_most:
            return None
        options: list[list[tuple[int, int]]] = []
        for bucket in buckets:
            rest = sum(cost[other] * (options[other][0][0] if other < bucket else least[other]) for other in buckets)
            rest -= cost[bucket] * least[bucket]
            spare = at_most - rest
            most = self.limits.max_gpus // design[bucket].gpus_per_group
            if math.isfinite(spare):
                most = min(most, int(spare / cost[bucket] + 1e-9))
            found = self._options(design, bucket, floors[bucket], room, most)
            if not found:
                return None
            options.append(found)
        return self._cheapest(design, options, cost, room + sum(floors))

    def least_replicas(self, design: Design, index: int, allowed: int, most: int) -> int | None:
        """The fewest groups of a bucket with at most `allowed` late requests; None: `most` groups are not enough."""
        if not any(len(mine) for mine in self.evaluations.members(design, index)):
            return 0
        if most < 1:
            return None
        first = min(most, max(1, math.ceil(self.evaluations.load(design, index))))
        low, high = 0, first
        while self.evaluations.misses(design, index, high) > allowed:
            if high == most:
                return None
            low, high = high, min(most, max(high + 1, math.ceil(high * 1.25)))
        while high - low > 1:
            middle = (low + high) // 2
            enough = self.evaluations.misses(design, index, middle) <= allowed
            low, high = (low, middle) if enough else (middle, high)
        return high

    def _options(self, design: Design, index: int, floor: int, room: int, most: int) -> list[tuple[int, int]]:
        """Numbers of groups to consider, each with its late requests, which fall."""
        first = self.least_replicas(design, index, floor + room, most)
        if first is None:
            return []
        if first == 0:
            return [(0, 0)]
        options = [(first, self.evaluations.misses(design, index, first))]
        if len(design) > 1:
            beyond = _OPTIONS if self.evaluations.requests <= MANY else _OPTIONS_OF_MANY
            for replicas in range(first + 1, min(most, first + beyond) + 1):
                if options[-1][1] <= floor:
                    break
                misses = self.evaluations.misses(design, index, replicas)
                if misses < options[-1][1]:
                    options.append((replicas, misses))
        return options

    def _cheapest(
        self, design: Design, options: list[list[tuple[int, int]]], cost: list[float], allowed: int
    ) -> Fit | None:
        best: tuple[float, int, tuple[int, ...]] | None = None
        for combination in itertools.product(*options):
            replicas = tuple(option[0] for option in combination)
            misses = sum(option[1] for option in combination)
            gpus = sum(bucket.gpus_per_group * count for bucket, count in zip(design, replicas, strict=True))
            if misses <= allowed and gpus <= self.limits.max_gpus:
                asked = sum(map(_product, cost, replicas)), misses, replicas
                best = asked if best is None else min(best, asked)
        if best is None or (len(design) > 1 and 0 in best[2]):  # the latter is a design of fewer buckets
            return None
        return Fit(design=design, replicas=best[2], cost=best[0], misses=best[1])

    def _lower_bound(self, design: Design, index: int) -> int:
        """A lower bound of the groups that a bucket needs, from its load."""
        load = self.evaluations.load(design, index)
        return math.ceil(_SAFE_LOAD * load) if load else 0

    def _cut(self, kinds: Sequence[Kind], cuts: Sequence[int]) -> Design:
        """Buckets of these kinds of groups, cut at these lengths."""
        ends = (0, *cuts, self.longest)
        return tuple(
            LengthBucket(
                gpus_per_group=kind.gpus,
                weights=kind.weights,
                least_new=ends[bucket] + 1,
                most_new=ends[bucket + 1],
            )
            for bucket, kind in enumerate(kinds)
        )

    def _cuts(self) -> list[int]:
        """Candidate cuts: lengths at quantiles of the requests and of the work."""
        new = np.sort(np.concatenate([workload.new_tokens for workload in self.evaluations.workloads]))
        work = np.cumsum(new.astype(float))
        by_work = [new[np.searchsorted(work, share * work[-1])] for share in _WORK_QUANTILES]
        by_count = [new[int(share * (len(new) - 1))] for share in _REQUEST_QUANTILES]
        return self._usable({_rounded(int(cut)) for cut in (*by_work, *by_count)})

    def _usable(self, cuts: Iterable[int]) -> list[int]:
        return sorted({cut for cut in cuts if 1 <= cut < self.longest})

    def _finer(self, design: Design) -> Iterator[Design]:
        """The same kinds of groups with nearby cuts."""
        cut = design[0].most_new
        kinds = tuple(bucket.kind for bucket in design)
        for near in self._usable(_rounded(int(cut * 2.0**step)) for step in (-0.5, -0.25, -0.125, 0.125, 0.25, 0.5)):
            yield self._cut(kinds, (near,))


def _product(a: float, b: float) -> float:
    return a * b


def _rounded(tokens: int) -> int:
    """Rounded to a sixteenth of the power of two below, so that lengths are easy to read."""
    step = max(1, 1 << max(0, tokens.bit_length() - 5))
    return max(1, round(tokens / step) * step)
