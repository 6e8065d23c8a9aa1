"""From a scenario, a strategy and a batch of partitions to the program that both executors run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrsim.ends import embedding, has_prefill, last, request, step
from kvrsim.errors import InputError, KvrsimError
from kvrsim.kernels.cost import CostModel
from kvrsim.program import Array, Op, Program, slowed_by_pending_recv
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Step, Strategy
from kvrsim.strategies.layers import layer_ops, placement_refusal, refusal
from kvrsim.strategies.load import where


def for_strategy(scenario: Scenario, strategy: Strategy) -> Scenario:
    """As the strategy sees it: on one GPU, or with groups of GPUs as ranks.

    Raises InputError where the GPUs or the model's heads do not divide into its groups.
    """
    if strategy.partition_rule == "whole":
        return scenario.on_gpus(1)
    if scenario.request.cached_prefix and (why := placement_refusal(strategy, scenario.prefix_placement)):
        raise InputError("strategies", strategy.name, why)
    num_gpus = scenario.cluster.num_gpus
    _check_sizes(strategy, num_gpus)
    per_rank = scenario.in_groups(strategy.group_size or num_gpus)
    if scenario.expert_parallel and strategy.pipeline is not None:
        raise InputError("strategies", strategy.name, "no expert parallelism, as its ranks hold different layers")
    if why := refusal(strategy, per_rank.share, per_rank.cluster.num_gpus):
        raise InputError("strategies", strategy.name, f"with {num_gpus} GPUs, {why}")
    return per_rank


def _check_sizes(strategy: Strategy, num_gpus: int) -> None:
    """Where a strategy says its sizes, their product must be the GPUs."""
    if strategy.num_stages is None and strategy.context_size is None:
        return
    sizes = strategy.sizes(num_gpus)
    if (product := sizes.tensor * sizes.pipeline * sizes.context) != num_gpus:
        text = f"{sizes.tensor} x {sizes.pipeline} x {sizes.context} = {product}"
        accepted = f"tensor, pipeline and context sizes whose product is the number of GPUs, {num_gpus}, not {text}"
        raise InputError("strategies", strategy.name, accepted)


def build_program(
    scenario: Scenario, strategy: Strategy, chunks: Sequence[Array], cost: CostModel | None = None
) -> Program:
    """The strategy's program for a batch of partitions; `cost` instead of the scenario's own.

    chunks: one float array of shape (B,) per rank, tokens of that rank's chunk.
    """
    cost = cost or scenario.cost
    if strategy.pipeline is not None:
        return strategy.pipeline(scenario, strategy, chunks, cost)
    starts = [np.full_like(chunks[0], scenario.request.cached_prefix)]
    for chunk in chunks[:-1]:
        starts.append(starts[-1] + chunk)
    ranks = range(len(chunks))
    steps = [
        Step(costs, tuple(chunks), tuple(starts), query_blocks=strategy.query_blocks)
        for costs in scenario.layer_costs(cost)
    ]
    assert strategy.group_size in (None, scenario.gpus_per_rank), "see for_strategy"
    total = starts[-1] + chunks[-1]
    ends = [total] * len(chunks) if strategy.gathers_kv else [s + c for s, c in zip(starts, chunks, strict=True)]
    before = request(scenario, chunks[0])
    even = Program(
        strategy=strategy.name,
        prologue=tuple(
            (*before, *embedding(scenario, chunk, cost), *step(scenario, chunk, end, cost))
            for chunk, end in zip(chunks, ends, strict=True)
        ),
        layers=tuple(
            tuple(slowed_by_pending_recv(_layer(strategy, step, rank), scenario.pending_share) for rank in ranks)
            for step in steps
        ),
        layer_kind_index=scenario.share.layer_kind_index if has_prefill(scenario) else (),
        epilogue=tuple(last(scenario, chunks[rank], total, cost) if rank == len(chunks) - 1 else () for rank in ranks),
    )
    # A part of the ranks' chunks asks for a part of the program, of no rank in particular.
    everyone = len(chunks) == scenario.cluster.num_gpus
    return even.slowed([scenario.cluster.slowness(rank) for rank in ranks]) if everyone else even


def columns(chunks: Sequence[int] | Array) -> list[Array]:
    """One float array of shape (B,) per rank, as build_program takes them.

    chunks: tokens, shape (ranks,), or (B, ranks) for a batch.
    """
    return list(np.ascontiguousarray(np.atleast_2d(np.asarray(chunks, dtype=float)).T))


def _layer(strategy: Strategy, step: Step, rank: int) -> tuple[Op, ...]:
    """A rank's operations in a layer; InputError where the layer of a strategy that is not kvrsim's raises."""
    try:
        return tuple(layer_ops(strategy, step, rank))
    except KvrsimError:
        raise
    except Exception as error:
        if strategy.name.rpartition("+")[2] in STRATEGIES:
            raise
        raise InputError("strategy", strategy.name, f"a layer that runs ({where(error)})") from error
