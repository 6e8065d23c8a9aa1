"""Service times of every request of a workload on groups of every size, interpolated between knots.

Log time is interpolated linearly in log new tokens, and time linearly in the cached prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrsim.interp import cell, log_interp
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.capacity.fleet.decoding import Decoding
from planner.capacity.fleet.knots import ServiceTimeGrid, ServiceTimeGrids, knot_lengths
from planner.capacity.fleet.layouts import WHOLE, Choice, Kind
from planner.capacity.fleet.service import Overlap, Service
from planner.capacity.workloads.workload import Lengths, Workload
from planner.processes import Pool
from planner.table.table import PartitionTable

OF_SINGLE_GPUS = Choice(asked=("single", "tsp", "kvr-s"))
_FIRST_PREFIX, _PREFIX_STEP = 512, 4  # cached prefixes that are simulated: 0, 512, 2k, 8k, ...


class ServiceTimes:
    """Times of one scenario's groups, for lengths up to those of a workload; computed on first use."""

    def __init__(
        self, scenario: Scenario, longest_new: int, longest_prefix: int, choice: Choice = OF_SINGLE_GPUS
    ) -> None:
        self.scenario, self.choice = scenario, choice
        self.knots = knot_lengths(1, max(2, longest_new))
        self.prefixes = _prefixes(longest_prefix)
        self._grids: dict[Kind, tuple[ServiceTimeGrid, ...]] = {}

    @property
    def num_kinds(self) -> int:
        """Kinds of groups whose times have been computed."""
        return len(self._grids)

    @classmethod
    def for_workloads(
        cls, scenario: Scenario, workloads: Sequence[Workload], *, at_least: int = 1, choice: Choice = OF_SINGLE_GPUS
    ) -> ServiceTimes:
        """Times that cover all workloads and at least `at_least` new tokens; choice: what groups may run."""
        longest_new = max(at_least, *(int(workload.new_tokens.max()) for workload in workloads))
        longest_prefix = max(int(workload.cached_prefix.max()) for workload in workloads)
        return cls(scenario, longest_new, longest_prefix, choice)

    def kinds(self, num_gpus: int) -> tuple[Kind, ...]:
        """Groups of that size in whose memory some prompt fits or, where none does in any, the last kind; () without
        a strategy that runs on so many GPUs.
        """
        kinds = [Kind(num_gpus, weights) for weights in self.choice.layouts(self.scenario.on_gpus(num_gpus))]
        return tuple(kind for kind in kinds if self.grids(*kind)[0].most_new_tokens) or tuple(kinds[-1:])

    def fill(self, sizes: Sequence[int], pool: Pool) -> None:
        """Compute the grids of all kinds of groups of these sizes at once, by the pool's workers."""
        work = {}
        for num_gpus in sizes:
            placed = self.scenario.on_gpus(num_gpus)
            for weights, strategies in self.choice.layouts(placed).items():
                for prefix in self.prefixes:
                    work[Kind(num_gpus, weights), prefix] = placed, strategies, self.choice.table, prefix, self.knots
        found = dict(zip(work, pool.ordered(_grid, list(work.values())), strict=True))
        for kind in dict.fromkeys(kind for kind, _ in work):
            self._grids[kind] = tuple(found[kind, prefix] for prefix in self.prefixes)

    def grids(self, num_gpus: int, weights: str = WHOLE) -> tuple[ServiceTimeGrid, ...]:
        """Grids of a kind of group, one a cached prefix."""
        kind = Kind(num_gpus, weights)
        if kind not in self._grids:
            placed = self.scenario.on_gpus(num_gpus)
            about = placed, self.choice.layouts(placed)[weights], self.choice.table
            self._grids[kind] = tuple(_grid(*about, prefix, self.knots) for prefix in self.prefixes)
        return self._grids[kind]

    def seconds(self, num_gpus: int, new_tokens: Lengths, cached_prefix: Lengths, weights: str = WHOLE) -> Array:
        """TTFT alone on a group; inf where the context does not fit in its memory."""
        grids = self.grids(num_gpus, weights)
        low, weight = cell(cached_prefix, self.prefixes)
        seconds, most = np.zeros(len(new_tokens)), np.zeros(len(new_tokens))
        for index, grid in enumerate(grids):
            share = np.where(low == index, 1 - weight, np.where(low == index - 1, weight, 0.0))
            here = share > 0
            if here.any():
                seconds[here] += share[here] * log_interp(new_tokens[here], self.knots, grid.ttft_s)
                most[here] += share[here] * grid.most_new_tokens
        return np.where(new_tokens <= most, seconds, np.inf)

    def least_s(self, num_gpus: int, new_tokens: Lengths, cached_prefix: Lengths) -> Array:
        """The least of these over the layouts of the weights."""
        kinds = self.kinds(num_gpus)
        each = [self.seconds(num_gpus, new_tokens, cached_prefix, kind.weights) for kind in kinds]
        return np.asarray(np.min(each, axis=0))

    def service(
        self,
        num_gpus: int,
        workload: Workload,
        decoding: Decoding | None = None,
        weights: str = WHOLE,
    ) -> Service:
        """Service times of a workload on such groups."""
        grids, decoding = self.grids(num_gpus, weights), decoding or Decoding()
        new, prefix = workload.new_tokens, workload.cached_prefix
        ttft_s, length_class = self.seconds(num_gpus, new, prefix, weights), self._classes(new, prefix)
        strategies = self._strategies(grids)
        hold_s = decoding.hold_s(workload.output_tokens)
        if decoding.transfer is not None:
            gpus = np.array([1 if name == "single" else num_gpus for name in strategies])[length_class]
            hold_s = decoding.transfer.after_s(workload.context_len, ttft_s, gpus)
        return Service(
            num_gpus=num_gpus,
            ttft_s=ttft_s,
            hold_s=hold_s,
            hold_gpus=0 if decoding.seconds_per_token is None else 1,
            length_class=length_class,
            strategies=strategies,
            overlap=self._overlap(grids),
            new_tokens=new,
            cached_prefix=prefix,
        )

    def _classes(self, new_tokens: Lengths, cached_prefix: Lengths) -> npt.NDArray[np.int64]:
        """Class of each request: between two knots of new tokens and two simulated prefixes."""
        below = np.searchsorted(self.knots, new_tokens, side="right") - 1
        return np.asarray(cell(cached_prefix, self.prefixes)[0] * len(self.knots) + below)

    def _of_class(self, grids: Sequence[ServiceTimeGrid]) -> list[tuple[list[ServiceTimeGrid], list[int]]]:
        """Grids and knot indices around each class."""
        last = len(self.knots) - 1
        return [
            (list(grids[low : low + 2]), [below, min(below + 1, last)])
            for low in range(max(1, len(grids) - 1))
            for below in range(last + 1)
        ]

    def _strategies(self, grids: Sequence[ServiceTimeGrid]) -> tuple[str, ...]:
        return tuple(near[0].strategy[knots[-1]] for near, knots in self._of_class(grids))

    def _overlap(self, grids: Sequence[ServiceTimeGrid]) -> Overlap:
        surroundings = self._of_class(grids)
        finish = np.array([np.max([grid.finish[knots].max(0) for grid in near], 0) for near, knots in surroundings])

        def least_slack(grid: ServiceTimeGrid, knots: list[int]) -> Array:
            return np.asarray((grid.slack_s[knots] / grid.ttft_s[knots, None]).min(0))

        slack = np.array([np.min([least_slack(grid, knots) for grid in near], 0) for near, knots in surroundings])
        return Overlap(
            finish=tuple(map(tuple, finish.tolist())),
            slack=tuple(map(tuple, slack.tolist())),
            holds=not self.scenario.sends_overlap,
        )


def _grid(
    placed: Scenario, strategies: Sequence[Strategy], table: PartitionTable | None, prefix: int, knots: Lengths
) -> ServiceTimeGrid:
    return ServiceTimeGrids(placed, strategies, table).grid(prefix, knots)


def _prefixes(longest: int) -> tuple[int, ...]:
    known = [0]
    while known[-1] < longest:
        known.append(min(_FIRST_PREFIX if known == [0] else known[-1] * _PREFIX_STEP, max(longest, 1)))
    return tuple(known)
