"""A cheap estimate of TTFT: the work of a few ranks with even chunks, as if no rank waited for another.

It decides which strategies a plan simulates. A simulation of hundreds of ranks takes a second; an estimate takes a few
milliseconds, whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from kvrsim.execution import Execution
from kvrsim.hardware import Path
from kvrsim.kernels.cost import CostModel, column_of
from kvrsim.program import AllGather, AllToAll, Array, Collective, Compute, Load, Op, RingPass
from kvrsim.scenario import Partition
from kvrsim.strategies import Step
from kvrsim.strategies.layers import before_step, embedding, has_prefill, last, layer_ops, request
from kvrsim.strategies.pipeline import context_ranks, shares

_PIECES_A_STAGE = (0.25, 1.0, 4.0)  # pieces per stage of an estimated pipeline; the fastest number counts

Edges = Mapping[Path, int]  # the paths between neighbours on a ring of ranks, and how many there are of each


def estimate_s(execution: Execution) -> float:
    """About the TTFT of even chunks or pieces, seconds: the work of the ranks, without the time that they wait.

    Chunks that are searched are taken to balance the work of all ranks. Ranks on a bus have a fair share of it. Of a
    chain's waits, the longest is counted: a message of keys and values that passes along all ranks. A chain on a bus is
    taken to use the number of last ranks for which the work and the bus end earliest.
    """
    even_s = float(estimates_s(execution, execution.placed.cost)[0])
    strategy = execution.strategy
    num_ranks = execution.cluster.num_gpus
    if execution.cluster.shares_bandwidth and (strategy.chains or strategy.near_chain):
        hop_s = sum(_message_bytes(execution)) / execution.cluster.link.bandwidth_bytes_per_s
        return min(max(even_s * num_ranks / used, (used - 1) * hop_s) for used in range(1, num_ranks + 1))
    if strategy.chains and num_ranks > 1:
        nbytes = np.array([max(_message_bytes(execution), default=0.0)])
        edges = _edges(execution, num_ranks)
        even_s += sum(count * (float(path.busy_s(nbytes)[0]) + path.latency_s) for path, count in edges.items())
    return even_s


def _message_bytes(execution: Execution) -> list[float]:
    """Bytes of a mean message of keys and values in each layer of a chain; none if nothing is prefilled."""
    placed = execution.placed
    if not has_prefill(placed):
        return []
    middle = np.array([placed.request.cached_prefix + placed.request.new_tokens / 2])
    by_kind = [float(costs.forwarded_kv_bytes(middle)[0]) for costs in placed.layer_costs()]
    return [by_kind[kind] for kind in placed.share.layer_kind_index]


def estimates_s(execution: Execution, cost: CostModel, num_columns: int = 1) -> Array:
    """The estimate under a cost model with weights, shape (num_columns,), seconds; see estimate_s."""
    cluster = execution.cluster
    if cluster.shares_bandwidth:
        share = cluster.link.bandwidth_bytes_per_s / max(1, cluster.num_gpus - 1)
        execution = execution.on(execution.placed.with_own_links(share))
    if execution.strategy.is_pipeline:
        return np.array([_pipeline_s(execution, column_of(cost, column)) for column in range(num_columns)])
    num_ranks = execution.cluster.num_gpus
    even = Partition.even(execution.request.new_tokens, num_ranks)
    chunks = [np.full(num_columns, float(tokens)) for tokens in even.chunk_lens]
    first = np.full(num_columns, float(execution.request.cached_prefix))
    starts = list(accumulate(chunks[:-1], initial=first))
    by_rank = _layer_seconds(execution, cost, chunks, starts)
    counts = Counter(execution.placed.share.layer_kind_index if has_prefill(execution.placed) else ())
    ranks_s = np.zeros((len(by_rank), num_columns))
    for rank_s, kinds_s in zip(ranks_s, by_rank, strict=True):
        for kind, count in counts.items():
            rank_s += count * kinds_s[kind]
    is_balanced = execution.strategy.partition_rule == "search"
    layers_s = ranks_s.mean(axis=0) if is_balanced else ranks_s.max(axis=0)
    return np.asarray(layers_s + _ends_s(execution, cost, chunks[-1], starts[-1]))


def _pipeline_s(execution: Execution, cost: CostModel) -> float:
    """The least estimate of a few numbers of even pieces.

    The stage with the most work takes all pieces, and each other stage takes the longest piece.
    """
    strategy = execution.strategy
    tokens = execution.request.new_tokens
    context = context_ranks(strategy)
    kinds = execution.placed.share.layer_kind_index
    layers = execution.stages
    most = max(1, tokens // context)
    least_s = math.inf
    for number in sorted({min(most, max(1, round(share * len(layers)))) for share in _PIECES_A_STAGE}):
        lengths = np.array(Partition.even(tokens, number).chunk_lens, dtype=float)
        ends = execution.request.cached_prefix + np.cumsum(lengths)
        chunks = shares(lengths, context)
        starts = list(accumulate(chunks[:-1], initial=ends - lengths))
        by_rank = _layer_seconds(execution, cost, chunks, starts)
        piece_s = np.zeros((len(layers), number))
        for kinds_s in by_rank:
            by_stage = [np.sum([kinds_s[kinds[layer]] for layer in stage], axis=0) for stage in layers]
            piece_s = np.maximum(piece_s, np.array(by_stage))
        before_s = _seconds_of(before_step(execution.placed, chunks[0], ends, cost), execution, 0, {})
        piece_s += before_s + _message_s(execution, chunks[0])
        whole_s = piece_s.sum(axis=1).max() + piece_s.max(axis=1).sum() - piece_s.max()
        ends_s = _ends_s(execution, cost, chunks[-1][-1:], starts[-1][-1:])
        least_s = min(least_s, float(whole_s + ends_s[0]))
    return least_s


def _message_s(execution: Execution, chunk: Array) -> Array:
    """Seconds that a stage is held by sending a piece on; 0 if messages overlap computation."""
    context = context_ranks(execution.strategy)
    if execution.placed.sends_overlap or execution.cluster.num_gpus == context:
        return np.zeros_like(chunk)
    nbytes = execution.placed.layer_costs()[0].activation_bytes(chunk)
    return np.asarray(execution.cluster.path(0, context).busy_s(nbytes))


def _ends_s(execution: Execution, cost: CostModel, chunk: Array, start: Array) -> Array:
    """Seconds of the operations before and after the layers, on the last rank, with the shape of the chunk."""
    placed = execution.placed
    end = start + chunk
    first = (*request(placed, chunk), *embedding(placed, chunk, cost), *before_step(placed, chunk, end, cost))
    ops = (*first, *last(placed, chunk, end, cost))
    return _seconds_of(ops, execution, execution.cluster.num_gpus - 1, {}) + np.zeros_like(chunk)


def _layer_seconds(
    execution: Execution, cost: CostModel, chunks: Sequence[Array], starts: Sequence[Array]
) -> list[list[Array]]:
    """Seconds of a layer, by rank and kind of layer, shape (B,): on the first, the middle and the last rank.

    chunks, starts: tokens of each rank that shares a layer, and tokens before them, shape (B,).
    """
    strategy = execution.strategy
    num_ranks = len(chunks)
    steps = [
        Step(costs, chunks, starts, query_blocks=strategy.query_blocks, times_only=True)
        for costs in execution.placed.layer_costs(cost)
    ]
    edges = _edges(execution, num_ranks) if num_ranks > 1 else {}
    return [
        [_seconds_of(list(layer_ops(strategy, step, rank)), execution, rank, edges) for step in steps]
        for rank in sorted({0, num_ranks // 2, num_ranks - 1})
    ]


def _seconds_of(ops: Sequence[Op], execution: Execution, rank: int, edges: Edges) -> Array:
    """Seconds of a rank's operations one after another, on its device or on its host, whichever is longer.

    edges: those of the ring of ranks that take part in collectives.
    """
    device_s = np.zeros(1)
    host_s = 0.0
    for op in ops:
        if not isinstance(op, Load):
            host_s += float(np.sum(op.host_s))
        match op:
            case Compute():
                device_s = device_s + op.device_s
            case Collective() | Load():
                device_s = device_s + op.seconds
            case AllGather():
                device_s = device_s + _gather_s(op, edges)
            case AllToAll():
                device_s = device_s + _exchange_s(op, execution, rank, sum(edges.values()))
            case RingPass():
                device_s = device_s + _rounds_s(op, edges)
    return np.maximum(device_s, host_s)


def _edges(execution: Execution, num_ranks: int) -> Edges:
    """The paths between neighbours on the ring of the first ranks, and how many there are of each."""
    ranks = range(num_ranks)
    return Counter(execution.cluster.path(rank, (rank + 1) % num_ranks) for rank in ranks)


def _gather_s(op: AllGather, edges: Edges) -> Array:
    """Seconds of a gather: of all pieces on the slowest path, or of a piece all the way round the ring."""
    num_ranks = sum(edges.values())
    step_s = {path: path.gather_step_s(op.nbytes, num_ranks) for path in edges}
    slowest_s = (num_ranks - 1) * np.max(list(step_s.values()), axis=0)
    round_s = sum(count * (step_s[path] + path.gather_latency_s) for path, count in edges.items())
    launch_s = max(path.gather_launch_s for path in edges)
    return np.asarray(launch_s + np.maximum(slowest_s, round_s * (num_ranks - 1) / num_ranks))


def _exchange_s(op: AllToAll, execution: Execution, rank: int, num_ranks: int) -> Array:
    """Seconds of messages of mean size to all other ranks, one after another."""
    others = [(rank + shift) % num_ranks for shift in range(1, num_ranks)]
    paths = Counter(execution.cluster.path(rank, other) for other in others)
    mean_bytes = np.mean(op.nbytes, axis=0)
    return np.asarray(sum(count * path.busy_s(mean_bytes) for path, count in paths.items()))


def _rounds_s(op: RingPass, edges: Edges) -> Array:
    """Seconds of rounds of work, in each of which a piece goes to the next rank."""
    sent_s = np.max([path.busy_s(op.nbytes) + path.latency_s for path in edges], axis=0)
    work_s = op.device_s[:-1]
    both_s = np.maximum(work_s, sent_s) if op.overlaps else work_s + sent_s
    return np.asarray(both_s.sum(axis=0) + op.device_s[-1])
