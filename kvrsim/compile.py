"""Build the program that both executors run from a scenario, a strategy and a batch of partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from kvrsim.errors import InputError, KvrsimError
from kvrsim.kernels.cost import CostModel
from kvrsim.kernels.tensor_parallel import share_of
from kvrsim.layout import Degrees, Layout, layout_on
from kvrsim.program import Array, Op, Program, Recv, Send, run_order, slowed_by_pending_recv
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES, Step, Strategy
from kvrsim.strategies.layers import (
    before_step,
    embedding,
    has_prefill,
    last,
    layer_ops,
    placement_refusal,
    refusal,
    request,
)


def for_strategy(scenario: Scenario, strategy: Strategy) -> Scenario:
    """Return the scenario that the strategy's program runs in: one GPU, or ranks of one or more GPUs.

    Raises InputError where the strategy cannot use the prefix, or divide the GPUs or the model's heads into groups.
    """
    if strategy.partition_rule == "whole":
        return scenario.on_gpus(1)
    if scenario.request.cached_prefix and (why := placement_refusal(strategy, scenario.prefix_placement)):
        raise InputError("strategies", strategy.name, why)
    num_gpus = scenario.cluster.num_gpus
    per_rank = scenario.in_layout(layout_of(scenario, strategy.degrees))
    if why := refusal(strategy, per_rank.share, per_rank.cluster.num_gpus):
        raise InputError("strategies", strategy.name, f"with {num_gpus} GPUs, {why}")
    return per_rank


def layout_of(scenario: Scenario, degrees: Degrees) -> Layout:
    """Return the layout of a strategy's degrees on the scenario's GPUs.

    Experts are spread over GPUs if the scenario requires it, or if a rank cannot hold all experts.
    """
    is_mixture = any(layer.num_experts for layer in scenario.model.layer_kinds)
    if scenario.expert_parallel and degrees.experts == "default":
        degrees = replace(degrees, experts="ep")
    fits = True
    if is_mixture and not degrees.is_deployable and degrees.experts == "default":
        whole = share_of(scenario.model, degrees.on(scenario.cluster.num_gpus).tensor or 1)
        fits = whole.weight_bytes(scenario.request.dtype_bytes) <= scenario.memory_limit.nbytes
        fits = fits or scenario.cluster.num_gpus == 1
    return layout_on(degrees, scenario.cluster.num_gpus, is_mixture=is_mixture, whole_experts_fit=fits)


def build_program(
    scenario: Scenario,
    strategy: Strategy,
    chunks: Sequence[Array],
    cost: CostModel | None = None,
    *,
    times_only: bool = False,
) -> Program:
    """Return the strategy's program for a batch of partitions.

    chunks: per rank, the tokens of its chunk in each partition, a float array of shape (B,).
    cost: used instead of the scenario's cost model.
    times_only: see Step.
    """
    cost = cost or scenario.cost
    if strategy.pipeline is not None:
        return strategy.pipeline(scenario, strategy, chunks, cost)
    starts = list(accumulate(chunks[:-1], initial=np.full_like(chunks[0], scenario.request.cached_prefix)))
    ranks = range(len(chunks))
    steps = [
        Step(costs, tuple(chunks), tuple(starts), query_blocks=strategy.query_blocks, times_only=times_only)
        for costs in scenario.layer_costs(cost)
    ]
    assert strategy.degrees.tensor in (None, scenario.gpus_per_rank), "see for_strategy"
    total = starts[-1] + chunks[-1]
    ends = [total] * len(chunks) if strategy.gathers_kv else [s + c for s, c in zip(starts, chunks, strict=True)]
    before = request(scenario, chunks[0])
    even = Program(
        strategy=strategy.name,
        prologue=tuple(
            (*before, *embedding(scenario, chunk, cost), *before_step(scenario, chunk, end, cost))
            for chunk, end in zip(chunks, ends, strict=True)
        ),
        layers=tuple(
            tuple(slowed_by_pending_recv(_layer(strategy, step, rank), scenario.pending_share) for rank in ranks)
            for step in steps
        ),
        layer_kind_index=scenario.share.layer_kind_index if has_prefill(scenario) else (),
        epilogue=tuple(last(scenario, chunks[rank], total, cost) if rank == len(chunks) - 1 else () for rank in ranks),
    )
    if not _is_own(strategy):
        _check_ends(strategy, even)
    # With fewer chunks than GPUs, the GPUs that run the chunks are not known: slow GPUs are ignored.
    everyone = len(chunks) == scenario.cluster.num_gpus
    return even.on_slower_gpus([scenario.cluster.slowness(rank) for rank in ranks]) if everyone else even


def _is_own(strategy: Strategy) -> bool:
    """Whether kvrsim defines a strategy, alone or as the last part of a hybrid."""
    return strategy.name.rpartition("+")[2] in STRATEGIES


def _check_ends(strategy: Strategy, program: Program) -> None:
    """Raise InputError where a rank of a program would wait for ever: a mistake in the strategy's layer."""
    for kind, layer in enumerate(program.layers):
        if (stuck := waits_for_ever(layer)) is not None:
            rank, op = stuck
            what = f"for the other ranks' {type(op).__name__}"
            if isinstance(op, Recv):
                what = f"for a message from rank {op.src} (recv_kv)"
            elif isinstance(op, Send):
                what = f"for rank {op.dst} to receive (send_kv)"
            number = program.layer_kind_index.index(kind)
            accepted = f"a layer that ends: rank {rank} waits for ever in layer {number}, {what}"
            raise InputError("strategy", strategy.name, accepted)


def waits_for_ever(layer: Sequence[Sequence[Op]]) -> tuple[int, Op] | None:
    """Return the first rank that waits for ever in a layer, and the operation in which it waits; None: all ranks end.

    layer: the operations of each rank.
    """
    _, ends = run_order(layer)
    return next(
        ((rank, ops[end]) for rank, (ops, end) in enumerate(zip(layer, ends, strict=True)) if end < len(ops)), None
    )


def columns(chunks: Sequence[int] | Array) -> list[Array]:
    """Return one float array of shape (B,) per rank, as build_program requires.

    chunks: tokens, shape (ranks,), or (B, ranks) for a batch.
    """
    return list(np.ascontiguousarray(np.atleast_2d(np.asarray(chunks, dtype=float)).T))


def _layer(strategy: Strategy, step: Step, rank: int) -> tuple[Op, ...]:
    """Return a rank's operations in a layer. Raises InputError if the code of a user's strategy fails."""
    try:
        return tuple(layer_ops(strategy, step, rank))
    except KvrsimError:
        raise
    except Exception as error:
        if _is_own(strategy):
            raise
        from kvrsim.strategies.load import where  # imported only for errors

        raise InputError("strategy", strategy.name, f"a layer that runs ({where(error)})") from error
