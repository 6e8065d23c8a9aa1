"""Fleets around the best designs, with fewer and with more groups: the Pareto front, other rates.

At other rates the same requests are replayed faster or slower, and the designs keep their lengths: they are scaled,
not searched again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.interp import percentile_of
from kvrsim.program import Array
from planner.capacity.answer import Point, TriedFleet
from planner.capacity.designs import MANY, Fit, Limits
from planner.capacity.evaluations import Evaluations
from planner.capacity.fleet.fleet import GroupPlan
from planner.capacity.fleet.layouts import WHOLE

RATES = (0.5, 0.7, 1.4, 2.0, 2.8, 4.0)  # times the arrivals that were asked for
PERCENTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 92.5, 95, 96, 97, 98, 98.5, 99, 99.5, 99.9, 100)
_FINALISTS = 6  # designs that the front is made of
_FINALISTS_OF_MANY = 2  # the same for long workloads
_SCALES = (0.8, 0.9, 1.0, 1.15, 1.3, 1.6, 2.0, 3.0, 4.0)  # factors on the replicas that meet the target
_SCALES_AT_RATES = (0.8, 1.0, 1.15, 1.3, 1.6, 2.0, 3.0)  # the same at another rate
_BELOW = tuple(2.0**-step for step in range(10))  # factors on the most replicas, where no fleet meets it
_GAP = 0.01  # relative; a more expensive fleet of the front is at least this much faster
_SIMULATED = 1_000_000  # requests, over all fleets at other rates, or half of those that the search has simulated
_LEAST = 1000  # requests of a stretch of the workload

Plans = tuple[GroupPlan, ...]


@dataclass(slots=True)
class Fleets:
    """The best designs on given requests."""

    evaluations: Evaluations
    limits: Limits
    designs: Sequence[Plans]  # the fleets that meet the target at the rate asked for; else the largest
    meet: bool  # whether they meet it

    @classmethod
    def of(cls, evaluations: Evaluations, limits: Limits, fits: Sequence[Fit], largest: Sequence[Plans]) -> Fleets:
        """Of the best fits; where there are none, of the largest fleets."""
        count = _FINALISTS if evaluations.requests <= MANY else _FINALISTS_OF_MANY
        designs = [fit.plans for fit in fits[:count]]
        return cls(evaluations, limits, designs or largest, bool(designs))

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Those of a TriedFleet, rising."""
        return tuple(sorted({*map(float, PERCENTILES), self.evaluations.target.percentile}))

    def tried(self, rate: float = 1.0, evaluations: Evaluations | None = None) -> list[TriedFleet]:
        """The designs scaled down and up.

        evaluations: at that rate; None: those of the rate asked for.
        """
        scales = (_SCALES if rate == 1 else tuple(rate * one for one in _SCALES_AT_RATES)) if self.meet else _BELOW
        found: dict[Plans, TriedFleet] = {}
        for design in self.designs:
            for scale in scales:
                plans = tuple(replace(one, replicas=max(1, math.ceil(one.replicas * scale))) for one in design)
                if plans not in found and sum(one.num_gpus for one in plans) <= self.limits.max_gpus:
                    found[plans] = self._fleet(plans, rate, evaluations or self.evaluations)
        return list(found.values())

    def front(self, tried: Iterable[TriedFleet]) -> tuple[TriedFleet, ...]:
        """No cheaper fleet is as fast, at the percentile of the target."""
        index = self.percentiles.index(self.evaluations.target.percentile)
        found = {(self.cost(one), one.ttft_s[index]): one for one in tried if math.isfinite(one.ttft_s[index])}
        front: list[TriedFleet] = []
        for key in sorted(found):
            if not front or key[1] < front[-1].ttft_s[index] * (1 - _GAP):
                front.append(found[key])
        return tuple(front)

    def points(self, front: Iterable[TriedFleet]) -> tuple[Point, ...]:
        """The front at the percentile of the target."""
        index = self.percentiles.index(self.evaluations.target.percentile)
        return tuple(
            Point(num_gpus=one.num_gpus, cost_per_hour=one.cost_per_hour, ttft_s=one.ttft_s[index], fleet=one.fleet)
            for one in front
        )

    def cost(self, fleet: TriedFleet) -> float:
        """The objective: GPUs, or cost an hour."""
        if not self.limits.by_cost:
            return float(fleet.num_gpus)
        assert fleet.cost_per_hour is not None
        return fleet.cost_per_hour

    def explored(self, tried: Sequence[TriedFleet]) -> tuple[TriedFleet, ...]:
        """The same, and the fleets at other rates."""
        return (*tried, *self.at_rates())

    def at_rates(self) -> Iterator[TriedFleet]:
        """Fleets at other rates: the same requests replayed faster or slower."""
        part = self._part()
        for rate in RATES:
            evaluations = part.compressed(rate)
            yield from self.tried(rate, evaluations)

    def _part(self) -> Evaluations:
        """As many of the workloads, or as long a stretch of the first, as there is time for."""
        each = len(RATES) * len(self.designs) * len(_SCALES_AT_RATES)
        most = max(_SIMULATED, self.evaluations.simulated // 2) // each
        first = self.evaluations.workloads[0]
        if len(first) > max(most, _LEAST):
            return self.evaluations.on([first.busiest(max(most, _LEAST))])
        return self.evaluations.on(self.evaluations.workloads[: max(1, most // len(first))])

    def _fleet(self, plans: Plans, rate: float, evaluations: Evaluations) -> TriedFleet:
        runs = evaluations.runs(plans)
        horizon_s = sum(run.horizon_s for run in runs)
        prices = self.limits.prices
        return TriedFleet(
            rate=rate,
            num_gpus=sum(one.num_gpus for one in plans),
            cost_per_hour=sum(prices[one.gpus_per_group] * one.num_gpus for one in plans) if prices else None,
            fleet=_words(plans),
            ttft_s=self._quantiles([run.ttft_s for run in runs]),
            utilisation=sum(run.utilisation * run.horizon_s for run in runs) / horizon_s if horizon_s else 0.0,
            requests=evaluations.requests,
        )

    def _quantiles(self, ttft_s: Sequence[Array]) -> tuple[float, ...]:
        values = np.concatenate(ttft_s)
        return tuple(percentile_of(values, percent) for percent in self.percentiles)


def _words(plans: Plans) -> str:
    words = []
    for plan in plans:
        sent = "" if len(plans) == 1 else f" for {plan.least_new} to {plan.most_new} tokens"
        layout = "" if plan.weights == WHOLE else f" ({plan.weights})"
        words.append(f"{plan.replicas} × {plan.gpus_per_group}{layout}{sent}")
    return ", ".join(words)
