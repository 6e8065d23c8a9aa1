"""How fast a prefill could be at all: proven for chains of KV-Runahead, by the paper's formulas for the rest."""

from __future__ import annotations

from kvrsim.compile import for_strategy
from kvrsim.executors.run import run_partition
from kvrsim.partition import Partition
from kvrsim.results import Bounds, ChainBound, StrategyResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy
from planner.search.bound import lower_bound_s
from planner.search.search import Found, search


def bounds_of(scenario: Scenario, kvr: Strategy, found: Found, best: StrategyResult, *, searched: bool) -> Bounds:
    """The bound of KV-Runahead chains over single GPUs, and that of the best strategy where it is a chain as well.

    found: a partition of `kvr`; searched: whether it was asked for, so that there is a gap to tell.
    """
    num_ranks = scenario.cluster.num_gpus
    whole = Partition(chunk_lens=(scenario.request.new_tokens,))
    single_s = run_partition(scenario.on_gpus(1), STRATEGIES["single"], whole).ttft_s
    # Without communication the balanced plan is the best but for the first layer's fill.
    quiet = scenario.without_communication()
    free_s = search(quiet, kvr, method="analytical").ttft_s
    same_s = run_partition(quiet, kvr, found.partition).ttft_s
    lower_s = found.lower_bound_s or lower_bound_s(scenario, kvr, found.ttft_s)
    return Bounds(
        ttft_star_s=single_s / 2 * (1 / num_ranks + 1 / num_ranks**2),
        ttft_no_comm_s=min(free_s, same_s),
        lower_bound_s=lower_s,
        gap=found.ttft_s / lower_s - 1 if searched else None,
        best=_of_best(scenario, best, lower_s),
    )


def _of_best(scenario: Scenario, best: StrategyResult, kvr_lower_s: float) -> ChainBound | None:
    """The bound that holds for the best strategy's partitions; None where none is known."""
    strategy = get_strategy(best.strategy)
    if not strategy.chains:
        return None
    placed = for_strategy(scenario, strategy)
    alike = strategy.group_size == 1  # all chains over single GPUs have one bound
    lower_s = kvr_lower_s if alike else lower_bound_s(placed, strategy, best.ttft_s)
    return ChainBound(strategy=best.strategy, lower_bound_s=lower_s, gap=best.ttft_s / lower_s - 1)
