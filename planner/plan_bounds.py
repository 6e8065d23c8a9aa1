"""How fast a prefill could be at all: proven for chains of KV-Runahead, by the paper's formulas for the rest."""

from __future__ import annotations

from kvrsim.executors.run import run_partition
from kvrsim.partition import Partition
from kvrsim.results.results import Bounds, ChainBound, PipelineBound, StrategyResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S, STRATEGIES, Strategy
from planner.access import placed_for
from planner.partitions import with_mean_steps
from planner.search.bound import lower_bound_s
from planner.search.search import Found, search


def bounds_of(scenario: Scenario, found: Found, strategy: Strategy, best: StrategyResult, *, searched: bool) -> Bounds:
    """The bound of KV-Runahead chains over single GPUs, and that of the best strategy where it is a chain as well.

    Ranks that exchange tokens for their experts are no such chains: nothing is proven of them.
    found: a partition of KVR-S; searched: whether it was asked for, so that there is a gap to tell.
    strategy: the best one.
    """
    scenario = placed_for(scenario, KVR_S)
    num_ranks = scenario.cluster.num_gpus
    whole = Partition(chunk_lens=(scenario.request.new_tokens,))
    single_s = run_partition(scenario.on_gpus(1), STRATEGIES["single"], whole).ttft_s
    # Without communication the balanced plan is the best but for the first layer's fill.
    quiet = scenario.without_communication()
    free_s = search(quiet, KVR_S, method="analytical").ttft_s
    same_s = run_partition(quiet, KVR_S, found.partition).ttft_s
    proven = scenario.chain_is_proven
    lower_s = (found.lower_bound_s or lower_bound_s(scenario, KVR_S, found.ttft_s)) if proven else None
    return Bounds(
        ttft_star_s=single_s / 2 * (1 / num_ranks + 1 / num_ranks**2),
        ttft_no_comm_s=min(free_s, same_s),
        lower_bound_s=lower_s,
        gap=found.ttft_s / lower_s - 1 if searched and lower_s is not None else None,
        best=_of_best(scenario, strategy, best, lower_s),
    )


def bound_of_pipeline(scenario: Scenario, strategy: Strategy, cut: Partition, ttft_s: float) -> PipelineBound | None:
    """The bound of all pipelines over these ranks, where pieces were searched; scenario: as the strategy sees it."""
    if strategy.partition_rule != "searched-pieces":
        return None
    from planner.pipelines.bound import pipeline_bound_s  # only where pieces were searched

    lower_s, mean = pipeline_bound_s(scenario), with_mean_steps(scenario)
    gap = chosen_gap = ttft_s / lower_s - 1
    if mean is not scenario:
        chosen_gap = run_partition(mean, strategy, cut).ttft_s / pipeline_bound_s(mean) - 1
    return PipelineBound(lower_bound_s=lower_s, gap=gap, gap_as_chosen=chosen_gap)


def _of_best(
    scenario: Scenario, strategy: Strategy, best: StrategyResult, kvr_lower_s: float | None
) -> ChainBound | None:
    """The bound that holds for the best strategy's partitions; None where none is known."""
    placed = placed_for(scenario, strategy)
    if not strategy.chains or not placed.chain_is_proven:
        return None
    own = strategy.group_size, strategy.layer, strategy.query_blocks
    alike = own == (1, KVR_S.layer, KVR_S.query_blocks)  # whatever its chunks
    lower_s = kvr_lower_s if alike and kvr_lower_s is not None else lower_bound_s(placed, strategy, best.ttft_s)
    return ChainBound(strategy=best.strategy, lower_bound_s=lower_s, gap=best.ttft_s / lower_s - 1)
