"""Build the program that both executors run from an execution and a batch of partitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kvrsim.errors import InputError, KvrsimError
from kvrsim.execution import Execution
from kvrsim.kernels.cost import CostModel
from kvrsim.once import once
from kvrsim.program import Array, Op, Program, Recv, Send, run_order, slowed_by_pending_recv
from kvrsim.scenario import Partition
from kvrsim.strategies import STRATEGIES, Step, Strategy
from kvrsim.strategies.layers import before_step, embedding, has_prefill, last, layer_ops, request


def build_program(
    execution: Execution, chunks: Sequence[Array], cost: CostModel | None = None, *, times_only: bool = False
) -> Program:
    """Return the strategy's program for a batch of partitions.

    chunks: per rank, the tokens of its chunk in each partition, a float array of shape (B,).
    cost: used instead of the scenario's cost model.
    times_only: see Step.
    """
    cost = cost or execution.placed.cost
    if execution.strategy.pipeline is not None:
        return execution.strategy.pipeline(execution.placed, execution.strategy, chunks, cost)
    ranks = range(len(chunks))
    steps = steps_of(execution, chunks, cost, times_only=times_only)
    starts = steps[0].starts
    assert execution.strategy.degrees.tensor in (None, execution.placed.gpus_per_rank), "see kvrsim.execution.place"
    total = starts[-1] + chunks[-1]
    ends = (
        [total] * len(chunks) if execution.strategy.gathers_kv else [s + c for s, c in zip(starts, chunks, strict=True)]
    )
    before = request(execution.placed, chunks[0])
    even = Program(
        strategy=execution.strategy.name,
        prologue=tuple(
            (*before, *embedding(execution.placed, chunk, cost), *before_step(execution.placed, chunk, end, cost))
            for chunk, end in zip(chunks, ends, strict=True)
        ),
        layers=tuple(
            tuple(
                slowed_by_pending_recv(_layer(execution.strategy, step, rank), execution.placed.pending_share)
                for rank in ranks
            )
            for step in steps
        ),
        layer_kind_index=execution.placed.share.layer_kind_index if has_prefill(execution.placed) else (),
        epilogue=tuple(
            last(execution.placed, chunks[rank], total, cost) if rank == len(chunks) - 1 else () for rank in ranks
        ),
    )
    if not _is_own(execution.strategy):
        _check_ends(execution.strategy, even)
    # With fewer chunks than GPUs, the GPUs that run the chunks are not known: slow GPUs are ignored.
    everyone = len(chunks) == execution.cluster.num_gpus
    return even.on_slower_gpus([execution.cluster.slowness(rank) for rank in ranks]) if everyone else even


def steps_of(execution: Execution, chunks: Sequence[Array], cost: CostModel, *, times_only: bool = False) -> list[Step]:
    """Return the step of all ranks in each kind of layer; parameters as for build_program."""
    starts = accumulate(chunks[:-1], initial=np.full_like(chunks[0], execution.request.cached_prefix))
    of_ranks = tuple(chunks), tuple(starts)
    blocks = execution.strategy.query_blocks
    return [
        Step(costs, *of_ranks, query_blocks=blocks, times_only=times_only)
        for costs in execution.placed.layer_costs(cost)
    ]


def program_of(execution: Execution, partition: Partition) -> Program:
    """Return the program of one partition; the execution keeps it."""
    programs = programs_so_far(execution)
    if partition not in programs:
        programs[partition] = build_program(execution, columns(partition.chunk_lens))
    return programs[partition]


@once
def programs_so_far(execution: Execution) -> dict[Partition, Program]:
    """The programs of an execution that `program_of` has built."""
    return {}


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
