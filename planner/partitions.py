"""The partition that a strategy runs with: given, even, searched, looked up, or a pipeline's pieces."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvrsim.errors import InputError
from kvrsim.kernels.profile import DEVIATES_OF_80_PERCENT
from kvrsim.partition import Partition
from kvrsim.results.results import SearchReport
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S, Strategy, chain_like
from kvrsim.strategies.pipeline import context_ranks
from planner.access import placed_for
from planner.evaluate import Evaluator, Progress
from planner.search.search import Found, search

if TYPE_CHECKING:
    from planner.table.table import PartitionTable

_GAIN = 0.002  # of TTFT; twice the pieces must gain more


def settled(
    scenario: Scenario,
    strategy: Strategy,
    partition: Sequence[int] | None = None,
    table: PartitionTable | None = None,
    on_progress: Progress | None = None,
) -> tuple[Strategy, Partition]:
    """The strategy, of a pipeline with the layers of its stages, and its partition: the one given, checked, or its own.

    Raises InputError for a strategy without its table, and for a partition that does not fit.
    """
    tokens, num_ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    given = None
    if partition is not None:
        pieces = len(partition) if strategy.pipeline is not None else num_ranks
        given = Partition.of(partition, num_tokens=tokens, num_ranks=pieces)
        if strategy.pipeline is not None and min(partition) < (context := context_ranks(strategy)):
            shown = ",".join(map(str, partition))
            raise InputError("partition", shown, f"pieces of at least {context} tokens, one a context rank")
    if strategy.partition_rule == "searched-pieces":
        from planner.pipelines.search import search_pipeline  # only where pieces are searched

        found = search_pipeline(with_mean_steps(scenario), strategy, pieces=given, on_progress=on_progress)
        return found.strategy, found.partition
    return strategy, given or _own(scenario, strategy, table, on_progress)


def partition_of(
    scenario: Scenario, strategy: Strategy, partition: Sequence[int] | None = None, table: PartitionTable | None = None
) -> Partition:
    """The partition of `settled` alone."""
    return settled(scenario, strategy, partition, table)[1]


def _own(
    scenario: Scenario, strategy: Strategy, table: PartitionTable | None, on_progress: Progress | None
) -> Partition:
    match strategy.partition_rule:
        case "pieces":
            return best_pieces(Evaluator(with_dear_steps(scenario), strategy, on_progress))
        case "search":
            return search(scenario, strategy, on_progress=on_progress).partition
        case "table":
            return _looked_up(scenario, strategy, table)
    return Partition.even(scenario.request.new_tokens, scenario.cluster.num_gpus)


def _looked_up(scenario: Scenario, strategy: Strategy, table: PartitionTable | None) -> Partition:
    if table is None:
        accepted = f"a file of kvrsim table build, where {strategy.name} looks its chunks up"
        raise InputError("table", "nothing", accepted)
    from planner.table.lookup import partition_from  # only where there is a table

    return partition_from(table, scenario)


def with_dear_steps(scenario: Scenario) -> Scenario:
    """The scenario with steps as long as the upper end of their 80 % interval says.

    Pieces are chosen for it: longer ones lose little where steps are shorter, and shorter ones much where they are not.
    """
    return _with_steps(scenario, lambda spread: DEVIATES_OF_80_PERCENT * spread)


def with_mean_steps(scenario: Scenario) -> Scenario:
    """The scenario with steps as long as their distribution says in the mean.

    TTFT grows with a step's seconds in a straight line, so the best pieces for it are those of the least expected TTFT.
    """
    return _with_steps(scenario, lambda spread: 0.5 * spread * spread)


def _with_steps(scenario: Scenario, log_factor: Callable[[float], float]) -> Scenario:
    """Steps longer by a factor of the spread of their logarithm, where the engine says one."""
    if scenario.engine is None or not scenario.engine.spread.get("step_s"):
        return scenario
    factor = math.exp(log_factor(scenario.engine.spread["step_s"]))
    return scenario.with_host(replace(scenario.host, step_s=scenario.host.step_s * factor))


def best_pieces(evaluator: Evaluator) -> Partition:
    """Even pieces for a pipeline: 1, 2, 4, ... of them, as long as TTFT falls.

    More pieces fill the stages sooner, fewer waste less on each. TTFT has one minimum: S stages take
    (S + M - 1) x (work / M + the fixed cost of a piece) for M pieces.
    """
    from planner.pipelines.search import MOST_A_STAGE  # only where there are pieces

    scenario = evaluator.scenario
    tokens = scenario.request.new_tokens
    context = context_ranks(evaluator.strategy)
    if context > tokens:
        raise InputError("strategies", evaluator.strategy.name, f"at most one context rank a token, here {tokens}")
    most = min(tokens // context, MOST_A_STAGE * (scenario.cluster.num_gpus // context))
    numbers = [2**power for power in range(most.bit_length())]
    if scenario.cluster.shares_bandwidth and context > 1:
        # All ranks gather at the same time: with links of their share of the bus, the number is found in little time.
        share = scenario.cluster.link.bandwidth_bytes_per_s / scenario.cluster.num_gpus
        quick = Evaluator(scenario.with_own_links(share), evaluator.strategy)
        found = len(best_pieces(quick).chunk_lens)
        numbers = [number for number in numbers if number in (found // 2, found)]
    best, best_s = Partition.even(tokens, 1), float("inf")
    for number in numbers:
        partition = Partition.even(tokens, number)
        ttft_s = float(evaluator.ttft_s(np.array([partition.chunk_lens], dtype=float))[0])
        if ttft_s > best_s * (1 - _GAIN):
            break
        best, best_s = partition, ttft_s
    return best


@dataclass(slots=True)
class PlanPartitions:
    """The partitions of a plan's strategies, and what all searches together took."""

    scenario: Scenario
    chosen: Sequence[Strategy]
    method: str  # of every search of a strategy over single GPUs
    stride: int | None
    table: PartitionTable | None
    on_progress: Progress | None
    found: dict[str, Found] = field(default_factory=dict)  # by strategy, of those that were searched over ranks
    evaluations: int = 0
    seconds: float = 0.0
    _analytical: Found | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for strategy in self.chosen:  # what is missing is missed before the first search
            if strategy.partition_rule == "table":
                partition_of(self.scenario, strategy, None, self.table)

    def settled(self, strategy: Strategy) -> tuple[Strategy, Partition]:
        """The strategy, of a pipeline with its stages, and its best partition: searched, looked up, or its only one."""
        begin_s = time.perf_counter()
        placed = placed_for(self.scenario, strategy)
        if strategy.partition_rule == "search":
            found = self._searched(placed, strategy)
            cut, evaluations = found.partition, found.report.evaluations
        elif strategy.partition_rule == "pieces":
            evaluator = Evaluator(with_dear_steps(placed), strategy, self.on_progress)
            cut, evaluations = best_pieces(evaluator), evaluator.evaluations
        elif strategy.partition_rule == "searched-pieces":
            from planner.pipelines.search import search_pipeline

            mean = with_mean_steps(placed)
            pipeline = search_pipeline(mean, strategy, stride=self.stride, on_progress=self.on_progress)
            strategy, cut, evaluations = pipeline.strategy, pipeline.partition, pipeline.evaluations
        else:
            return strategy, partition_of(placed, strategy, None, self.table)
        self.evaluations += evaluations
        self.seconds += time.perf_counter() - begin_s
        return strategy, cut

    def _searched(self, placed: Scenario, strategy: Strategy) -> Found:
        chain = self.found.get(chain_like(strategy).name)
        near = None if chain is None else chain.partition
        if strategy.group_size == 1:
            found = search(
                placed, strategy, method=self.method, stride=self.stride, near=near, on_progress=self.on_progress
            )
        else:
            found = search(placed, strategy, near=near, on_progress=self.on_progress)
        self.found[strategy.name] = found
        return found

    @property
    def kvr(self) -> Found:
        """KVR-S's partition; where it was not asked for, the analytical plan, which one evaluation gives."""
        if KVR_S.name in self.found:
            return self.found[KVR_S.name]
        if self._analytical is None:
            self._analytical = search(placed_for(self.scenario, KVR_S), KVR_S, method="analytical")
        return self._analytical

    def report(self) -> SearchReport:
        """How partitions were searched (KVR-S's, or the first strategy's), and what all searches took."""
        first = self.found.get(KVR_S.name) or next(iter(self.found.values()), self.kvr)
        limits = [found.report.limit for found in self.found.values() if found.report.limit is not None]
        return SearchReport(
            method=first.report.method,
            evaluations=self.evaluations,
            seconds=self.seconds,
            limit=max(limits, default=None),
        )

    def notes(self) -> list[str]:
        """Which searches were cut short."""
        return [
            f"{name}: its search on a bus ended at {found.report.limit} partitions, the most for so many GPUs and"
            " layers; a better one may exist"
            for name, found in self.found.items()
            if found.report.limit is not None
        ]
