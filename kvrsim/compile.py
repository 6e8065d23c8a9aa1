"""Build the program that both executors run from an execution and a batch of partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from kvrsim.errors import InputError, KvrsimError
from kvrsim.execution import Execution
from kvrsim.kernels.cost import CostModel
from kvrsim.once import once
from kvrsim.placement import PlacedScenario
from kvrsim.program import (
    AllGather,
    Array,
    Op,
    Program,
    Recv,
    Send,
    run_order,
    slowed_by_pending_recv,
    slower,
    with_arrays,
    work_s,
)
from kvrsim.scenario import Partition
from kvrsim.strategies import STRATEGIES, Step, Strategy
from kvrsim.strategies.layers import before_step, embedding, has_prefill, last, layer_ops, prefix_load, request
from kvrsim.strategies.pipeline import context_ranks, shares


def build_program(
    execution: Execution, chunks: Sequence[Array], cost: CostModel | None = None, *, times_only: bool = False
) -> Program:
    """Return the strategy's program for a batch of partitions.

    chunks: per rank, or per piece of a pipeline, its tokens in each partition, a float array of shape (B,).
    cost: used instead of the scenario's cost model.
    times_only: see Step.
    """
    cost = cost or execution.placed.cost
    if execution.strategy.is_pipeline:
        return _pipeline_program(execution, chunks, cost)
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


# Pipelines


class PieceOps(NamedTuple):
    """Operations of a stage's context ranks for all pieces at once, with arrays of shape (M, B)."""

    lengths: Array  # tokens of each piece, shape (M, B)
    starts: Array  # tokens before each piece, shape (M, B)
    embedding: list[tuple[Op, ...]]  # operations per context rank of the first stage
    preparation: list[tuple[Op, ...]]  # operations per context rank of any stage, before its layers
    layers: list[list[tuple[Op, ...]]]  # operations per kind of layer and per context rank
    loads: list[list[tuple[Op, ...]]]  # per kind and context rank: loads of the cached prefix before the first piece
    sent_bytes: list[Array]  # bytes of activations of each context rank, shape (M, B)

    @classmethod
    def of(cls, execution: Execution, pieces: Sequence[Array], cost: CostModel) -> PieceOps:
        """Operations of all pieces; pieces: tokens of each piece, float arrays of shape (B,)."""
        placed = execution.placed
        strategy = execution.strategy
        lengths = np.stack([np.asarray(piece) for piece in pieces])
        ends = placed.request.cached_prefix + np.cumsum(lengths, axis=0)
        context = range(context_ranks(strategy))
        chunks = shares(lengths, len(context))
        starts = list(accumulate(chunks[:-1], initial=ends - lengths))
        steps = [Step(costs, chunks, starts) for costs in placed.layer_costs(cost)]
        return cls(
            lengths=lengths,
            starts=ends - lengths,
            embedding=[embedding(placed, chunk, cost) for chunk in chunks],
            preparation=[before_step(placed, chunk, ends, cost) for chunk in chunks],
            layers=[[tuple(layer_ops(strategy, step, rank)) for rank in context] for step in steps],
            loads=[[tuple(filter(None, [prefix_load(strategy, step, rank)])) for rank in context] for step in steps],
            sent_bytes=[steps[0].costs.activation_bytes(chunk) for chunk in chunks],
        )

    def ends(self, placed: PlacedScenario, cost: CostModel) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """Operations of every rank before the first piece, and of the last rank after the last piece."""
        last_share = shares(self.lengths[-1], len(self.embedding))[-1]
        epilogue = last(placed, last_share, self.starts[-1] + self.lengths[-1], cost)
        return request(placed, self.lengths[0]), epilogue


def _pipeline_program(execution: Execution, pieces: Sequence[Array], cost: CostModel) -> Program:
    """Program with one block per piece: receive activations, run the stage's layers on the piece, send it on.

    pieces: tokens of each piece, float arrays of shape (B,). All operations of a block have the number of the stage's
    first layer.
    """
    placed = execution.placed
    ops = PieceOps.of(execution, pieces, cost)
    kinds = placed.share.layer_kind_index
    layers = execution.stages
    context = len(ops.embedding)
    ranks = [(stage, rank) for stage in range(len(layers)) for rank in range(context)]
    message: dict[str, Any] = {
        "host_s": placed.host.message_s,
        "rendezvous": not placed.sends_overlap,
        "payload": "activations",
    }
    prologue, epilogue = ops.ends(placed, cost)

    @cache
    def of_layer(piece: int, kind: int, rank: int) -> tuple[Op, ...]:
        layer = _of_piece(ops.layers[kind][rank], piece, context)
        if piece == 0:
            return *ops.loads[kind][rank], *layer
        return layer

    def of_rank(piece: int, stage: int, rank: int) -> Iterator[Op]:
        if stage:
            yield Recv(src=(stage - 1) * context + rank, **message)
        else:
            yield from _of_piece(ops.embedding[rank], piece, context)
        yield from _of_piece(ops.preparation[rank], piece, context)
        for layer in layers[stage]:
            yield from of_layer(piece, kinds[layer], rank)
        if stage < len(layers) - 1:
            yield Send(dst=(stage + 1) * context + rank, nbytes=ops.sent_bytes[rank][piece], **message)

    numbers = range(len(pieces))
    even = Program(
        strategy=execution.strategy.name,
        prologue=(prologue,) * len(ranks),
        layers=tuple(tuple(tuple(of_rank(piece, *rank)) for rank in ranks) for piece in numbers),
        layer_kind_index=tuple(numbers),
        epilogue=(*((),) * (len(ranks) - 1), epilogue),
        layer_numbers=tuple((layers[stage].start,) * len(numbers) for stage, _ in ranks),
    )
    return even.on_slower_gpus([execution.cluster.slowness(rank) for rank in range(len(ranks))])


def pipeline_computes_s(execution: Execution, pieces: Sequence[Array]) -> list[float]:
    """Device time of each rank's own operations, as `computes_s` of the program, which has far more operations."""
    placed = execution.placed
    ops = PieceOps.of(execution, pieces, placed.cost)
    kinds = placed.share.layer_kind_index
    prologue, epilogue = ops.ends(placed, placed.cost)

    def total_s(part: Sequence[Op], rank: int) -> float:
        return sum(float(work_s(op).sum()) for op in slower(part, execution.cluster.slowness(rank)))

    seconds: list[float] = []
    for stage, layers in enumerate(execution.stages):
        for context_rank, preparation in enumerate(ops.preparation):
            rank = len(seconds)
            before = [*prologue, *preparation]
            if stage == 0:
                before += ops.embedding[context_rank]
            rank_s = total_s(before, rank)
            for kind, count in Counter(kinds[layer] for layer in layers).items():
                rank_s += count * total_s(ops.layers[kind][context_rank], rank)
            seconds.append(rank_s)
    seconds[-1] += total_s(epilogue, len(seconds) - 1)
    return seconds


def _of_piece(ops: Sequence[Op], number: int, context: int) -> tuple[Op, ...]:
    """Operations of one piece, taken from those of all pieces; context: number of ranks per stage."""
    ops_of_piece: list[Op] = []
    for op in ops:
        op_of_piece = with_arrays(op, lambda values: values[number])
        if isinstance(op_of_piece, AllGather):
            op_of_piece = op_of_piece._replace(among=context)
        ops_of_piece.append(op_of_piece)
    return tuple(ops_of_piece)
