"""How a TTFT moves when something that it rests on is off, cause by cause.

The strategy is simulated again with each cause at the low and at the high end of its 80 % interval, which is
DEVIATES_OF_80_PERCENT standard deviations away from its central value. A cause that the strategies of a plan share
(a table, a link, the host) is the same error for all of them, so the moves of two strategies may be subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.executors.run import finish_of
from kvrsim.kernels.calibrated import CostModel
from kvrsim.kernels.profile import DEVIATES_OF_80_PERCENT
from kvrsim.kernels.sensitivity import Part, WeightedCost, listing
from kvrsim.partition import Partition
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.uncertainty import causes
from planner.uncertainty.causes import RUN_TO_RUN, Cause, Change, Delay

_ROOFLINE_FACTOR = 3.0  # how far above the datasheet's limits a real TTFT may lie
_SD_OF_MEAN_ERROR = math.sqrt(math.pi / 2)  # standard deviation over mean absolute error, of a normal distribution
_NOTHING = 1e-9  # of log TTFT


class Move(NamedTuple):
    """What is added to log TTFT when a cause is at the low, and at the high end of its 80 % interval."""

    low: float
    high: float

    @classmethod
    def even(cls, log_sd: float) -> Move:
        """Of a cause that all of TTFT is proportional to; its log standard deviation."""
        half_width = DEVIATES_OF_80_PERCENT * log_sd
        return cls(-half_width, half_width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """How one strategy's TTFT moves, and what keeps two strategies' TTFTs apart that share every cause."""

    of: Mapping[Cause, Move]
    between: Mapping[Cause, Move] = field(default_factory=dict)  # in a difference only: errors of whole TTFTs hold them
    apart_log_sd: float  # of the ratio of two TTFTs, besides the causes


UNKNOWN = Moves(of={}, apart_log_sd=RUN_TO_RUN)  # where nothing but the variation between runs is known
_ROOFLINE = Moves(of={"datasheet": Move(0.0, math.log(_ROOFLINE_FACTOR))}, apart_log_sd=RUN_TO_RUN)


def moves(scenario: Scenario, strategy: Strategy, partition: Partition) -> Moves:
    """The moves of log TTFT by cause.

    scenario: as the strategy sees it (see for_strategy).
    """
    profile = scenario.profile
    if profile is None:
        return _ROOFLINE
    found: dict[Cause, Move] = {}
    between: dict[Cause, Move] = {}
    runs = _Runs(scenario, strategy, partition)
    residual, whole = causes.compared_whole(scenario), causes.engine_sides(scenario.engine)
    if residual is not None:
        half_width = math.log1p(residual.p80_ape)
        found["published TTFTs"] = Move(-half_width, half_width)
        apart = residual.cross_validated_speedup_mape * _SD_OF_MEAN_ERROR
    else:
        apart = causes.run_to_run_log_sd(profile)
        alone, together = runs.device()
        found |= together
        if whole is None:
            found |= {**alone, "run to run": Move.even(apart)}
        else:
            new = {part for part in alone if isinstance(part, Part) and part.kind in causes.UNCOMPARED_KINDS}
            found |= {part: alone[part] for part in new}
            between |= {cause: move for cause, move in alone.items() if cause not in new}
            found["model"] = Move(-whole[0], whole[1])
        found |= {one.name: runs.moved(one) for one in causes.software(scenario, strategy)}
    links, measured = causes.links(scenario), scenario.links_are_measured
    if links.log_sd and not (measured and residual is not None):
        (between if measured and whole is not None else found)["links"] = runs.moved(links)
    source = causes.prefix_source(scenario)
    if source.log_sd:
        found[source.name] = runs.moved(source)
    if beyond := causes.beyond_log_sd(scenario, profile.valid):
        found["extrapolation"] = Move.even(beyond)
    return Moves(of=found, between=between, apart_log_sd=apart)


class _Runs:
    """Simulations of one strategy with one partition under changed causes."""

    def __init__(self, scenario: Scenario, strategy: Strategy, partition: Partition) -> None:
        self.scenario, self.strategy = scenario, strategy
        self.chunks = columns(partition.chunk_lens)
        self._log_s: float | None = None  # of the scenario as it is

    def device(self) -> tuple[dict[Cause, Move], dict[Cause, Move]]:
        """Moves with each part of the device's time alone, and with all together: two columns a cause, in one run."""
        scenario = self.scenario
        assert scenario.profile is not None, "a roofline has no measured parts"
        cost, parts = listing(scenario.cost)
        # One piece of a pipeline asks for the same parts as all.
        build_program(scenario, self.strategy, self.chunks[: 1 if self.strategy.pipeline else None], cost)
        alone = causes.parts_alone(scenario.profile, parts)
        together = causes.parts_together(scenario, parts)
        every = {**alone, **together}
        weights = {part: np.ones(2 * len(every) + 1) for part in parts}
        for index, log_sds in enumerate(every.values()):
            for part, log_sd in log_sds.items():
                weights[part][2 * index + 1 : 2 * index + 3] = _end(-log_sd), _end(log_sd)
        wide = [np.repeat(chunk, 2 * len(every) + 1) for chunk in self.chunks]
        log_s = np.log(self._ttft_s(scenario, wide, WeightedCost(cost=scenario.cost, weights=weights)))
        self._log_s = float(log_s[0])
        pairs = (log_s[1:] - log_s[0]).reshape(-1, 2)
        found = {cause: Move(*map(float, pair)) for cause, pair in zip(every, pairs, strict=True)}
        return {cause: found[cause] for cause in alone}, {cause: found[cause] for cause in together}

    def moved(self, cause: Delay | Change) -> Move:
        """What nothing waits for when it takes longer is not waited for when it takes less."""
        if isinstance(cause, Delay):
            added_s = (cause.seconds * (_end(sign * cause.log_sd) - 1) for sign in (-1, 1))
            ttft_s = math.exp(self.log_s)
            return Move(*(math.log1p(one / ttft_s) for one in added_s))
        high = self._log_ttft(cause.by(_end(cause.log_sd))) - self.log_s
        low = self._log_ttft(cause.by(_end(-cause.log_sd))) - self.log_s if abs(high) > _NOTHING else 0.0
        return Move(low, high)

    @property
    def log_s(self) -> float:
        """Log TTFT of the scenario as it is."""
        if self._log_s is None:
            self._log_s = self._log_ttft(self.scenario)
        return self._log_s

    def _log_ttft(self, scenario: Scenario) -> float:
        return math.log(self._ttft_s(scenario, self.chunks)[0])

    def _ttft_s(self, scenario: Scenario, chunks: list[Array], cost: CostModel | None = None) -> Array:
        """TTFT of each column. Flows that share a bus are taken to have a fair share each: only ratios count here."""
        cluster = scenario.cluster
        if cluster.shares_bandwidth:
            flows = max(1, cluster.num_gpus - 1)
            cluster = scenario.with_own_links(cluster.link.bandwidth_bytes_per_s / flows).cluster
        return np.asarray(finish_of(scenario, self.strategy, chunks, cost=cost, cluster=cluster)[-1])


def _end(log_sd: float) -> float:
    """At the end of its 80 % interval, over its central value."""
    return math.exp(DEVIATES_OF_80_PERCENT * log_sd)
