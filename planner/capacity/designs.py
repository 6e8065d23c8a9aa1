"""The cheapest fleet: uniform ones of every group size, then mixed ones by ranges of length.

Whether a percentile is met is a count: how many requests are late. Buckets of lengths have queues of their own, so
their counts add up, and each bucket's count for a number of groups is simulated once, whatever it is combined with.
A bucket gets as many groups as the others' counts leave it no way around, at least; from there on every number of
groups that lowers its count is an option, and the cheapest sum of options within the count is taken.

Ranges are cut where they matter: at quantiles of the requests and of the work. The best two-bucket designs are cut
finer, and cut once more into three buckets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.capacity.evaluations import Design, Evaluations, LengthBucket
from planner.capacity.fleet.fleet import GroupPlan

_REQUEST_QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
_WORK_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
MANY = 250_000  # requests of all workloads, beyond which less is tried
_OPTIONS, _OPTIONS_OF_MANY = 10, 3  # numbers of groups of a bucket, beyond the least possible
_SURE_LOAD = 0.9  # groups that are busy on average, times this, are needed at least: a trace may end with a backlog
_REFINED = 3  # two-bucket designs that are cut finer and once more


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a fleet may have, and what it costs."""

    sizes: tuple[int, ...] = (1, 2, 4, 8)  # GPUs a group
    max_gpus: int = 512
    prices: Mapping[int, float] = field(default_factory=dict)  # of a GPU for an hour, by size of its group; or none
    by_cost: bool = False  # the cheapest rather than the fewest GPUs

    def cost(self, gpus_per_group: int) -> float:
        """What one group adds to what is to be least."""
        return gpus_per_group * (self.prices[gpus_per_group] if self.by_cost else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A design with the replicas that meet the target."""

    design: Design
    replicas: tuple[int, ...]
    cost: float  # GPUs, or cost an hour: to be least
    misses: int

    @property
    def plans(self) -> tuple[GroupPlan, ...]:
        """Its groups; buckets that nobody needs have none."""
        pairs = zip(self.design, self.replicas, strict=True)
        return tuple(bucket.with_replicas(replicas) for bucket, replicas in pairs if replicas)

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs a group, bucket by bucket."""
        return tuple(bucket.gpus_per_group for bucket in self.design)


class DesignSearch:
    """One search: evaluations, and what the fleet may have."""

    def __init__(self, evaluations: Evaluations, limits: Limits) -> None:
        self.evaluations, self.limits = evaluations, limits
        self.longest = max(int(workload.new_tokens.max()) for workload in evaluations.workloads)

    def uniform(self) -> list[Design]:
        """One bucket of each size."""
        return [(LengthBucket(gpus_per_group=size, least_new=1, most_new=self.longest),) for size in self.limits.sizes]

    def fits(self, designs: Iterable[Design], fits: Sequence[Fit] = ()) -> list[Fit]:
        """Those of the designs that meet the target at no more than the best known costs, and those known."""
        found = list(fits)
        for design in designs:
            best = min((fit.cost for fit in found), default=math.inf)
            if (fit := self.fit(design, at_most=best if len(design) > 1 else math.inf)) is not None:
                found.append(fit)
        return sorted(found, key=lambda fit: (fit.cost, fit.misses, len(fit.design), fit.sizes))

    def mixed(self, fits: Sequence[Fit]) -> list[Fit]:
        """All fits: given ones, two buckets at every cut, the best of them cut finer, then three buckets."""
        pairs = list(itertools.combinations_with_replacement(self.limits.sizes, 2))
        found = self.fits((self._cut(pair, (cut,)) for cut in self._cuts() for pair in pairs), fits)
        best = [fit for fit in found if len(fit.design) == 2][:_REFINED]
        found = self.fits((design for fit in best for design in self._finer(fit.design)), found)
        best = [fit for fit in found if len(fit.design) == 2][:_REFINED]
        return self.fits((design for fit in best for design in self._in_three(fit.design)), found)

    def fit(self, design: Design, at_most: float = math.inf) -> Fit | None:
        """Replicas for a design that meet the target, for the least; None where there are none."""
        buckets = range(len(design))
        never = self.evaluations.never_served(design)
        floors = [self.evaluations.late_alone(design, bucket) for bucket in buckets]
        room = self.evaluations.allowed - never - sum(floors)
        cost = [self.limits.cost(bucket.gpus_per_group) for bucket in design]
        least = [self._sure(design, bucket) for bucket in buckets]
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
        """The fewest groups of a bucket that leave no more late; None where not even `most` do."""
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
        """Numbers of groups worth considering, each with its misses, which fall."""
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
        if best is None:
            return None
        return Fit(design=design, replicas=best[2], cost=best[0], misses=best[1])

    def _sure(self, design: Design, index: int) -> int:
        """Groups that a bucket needs at least, to work off what comes."""
        load = self.evaluations.load(design, index)
        return math.ceil(_SURE_LOAD * load) if load else 0

    def _cut(self, sizes: Sequence[int], cuts: Sequence[int]) -> Design:
        """Buckets of these sizes, up to these lengths."""
        ends = (0, *cuts, self.longest)
        return tuple(
            LengthBucket(gpus_per_group=size, least_new=ends[bucket] + 1, most_new=ends[bucket + 1], number=bucket)
            for bucket, size in enumerate(sizes)
        )

    def _cuts(self) -> list[int]:
        """Lengths at quantiles of the requests and of the work."""
        new = np.sort(np.concatenate([workload.new_tokens for workload in self.evaluations.workloads]))
        work = np.cumsum(new.astype(float))
        by_work = [new[np.searchsorted(work, share * work[-1])] for share in _WORK_QUANTILES]
        by_count = [new[int(share * (len(new) - 1))] for share in _REQUEST_QUANTILES]
        return self._usable({_rounded(int(cut)) for cut in (*by_work, *by_count)})

    def _usable(self, cuts: Iterable[int]) -> list[int]:
        return sorted({cut for cut in cuts if 1 <= cut < self.longest})

    def _finer(self, design: Design) -> Iterator[Design]:
        """The same sizes, cut a little shorter or longer."""
        cut = design[0].most_new
        sizes = tuple(bucket.gpus_per_group for bucket in design)
        for near in self._usable(_rounded(int(cut * 2.0**step)) for step in (-0.5, -0.25, -0.125, 0.125, 0.25, 0.5)):
            yield self._cut(sizes, (near,))

    def _in_three(self, design: Design) -> Iterator[Design]:
        """Either bucket in two, of any sizes between."""
        cut = design[0].most_new
        short, long = (bucket.gpus_per_group for bucket in design)
        for other in self._cuts():
            for size in self.limits.sizes:
                if other < cut and size <= short:
                    yield self._cut((size, short, long), (other, cut))
                if other > cut and short <= size <= long:
                    yield self._cut((short, size, long), (cut, other))


def _product(a: float, b: float) -> float:
    return a * b


def _rounded(tokens: int) -> int:
    """To a sixteenth of the power of two below: lengths that people can keep in mind."""
    step = max(1, 1 << max(0, tokens.bit_length() - 5))
    return max(1, round(tokens / step) * step)
