"""Pipeline parallelism in chunks: stages of layers, through which the context goes piece by piece.

A stage is one rank, or several context ranks that split each piece. Each context rank has an early and a late part of
every piece, as in `zigzag`; together they gather the piece's K and V. Each rank keeps all K and V of its stage, because
later pieces attend to them: engines hold a whole copy of the cache on every context rank (SGLang #18233, vLLM #46358).
Activations go to the same context rank of the next stage. Ranks are numbered stage by stage, so that ranks that gather
are neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from kvrsim.kernels.cost import CostModel
from kvrsim.layout import Degrees
from kvrsim.model.spec import ModelSpec
from kvrsim.placement import PlacedScenario
from kvrsim.program import AllGather, Array, Op, Program, Recv, Send, slower, with_arrays, work_s
from kvrsim.strategies.base import RealRun, Step, Strategy, StrategyWords
from kvrsim.strategies.layers import SINGLE, before_step, embedding, last, layer_ops, prefix_load, request


def even_layers(num_layers: int, num_ranks: int) -> tuple[int, ...]:
    """Number of layers of each rank; if they do not divide, the first ranks have one more."""
    share, rest = divmod(num_layers, num_ranks)
    return tuple(share + (rank < rest) for rank in range(num_ranks))


def stages(strategy: Strategy, num_layers: int, num_ranks: int) -> tuple[range, ...]:
    """Layer numbers of each stage of a pipeline."""
    num_stages = num_ranks // context_ranks(strategy)
    counts = strategy.stage_layers or even_layers(num_layers, num_stages)
    ends = tuple(accumulate(counts, initial=0))
    assert (len(counts), ends[-1]) == (num_stages, num_layers), "stages of another model or number of ranks"
    return tuple(range(first, end) for first, end in pairwise(ends))


def context_ranks(strategy: Strategy) -> int:
    """Number of ranks per stage of a pipeline; 1 without a pipeline."""
    if strategy.pipeline is None:
        return 1
    return strategy.degrees.context or 1


def tokens_of(strategy: Strategy, partition: Sequence[int], rank: int) -> int:
    """Tokens of a rank: its chunk or, in a pipeline, its share of all pieces."""
    if strategy.pipeline is None:
        return partition[rank]
    context = context_ranks(strategy)
    return int(shares(np.array(partition, dtype=float), context)[rank % context].sum())


def shares(pieces: Array, ranks: int) -> list[Array]:
    """Tokens of each context rank of a stage, one array like `pieces` per rank; the first ranks have the remainder."""
    share = np.floor(pieces / ranks)
    return [share + (rank < pieces - ranks * share) for rank in range(ranks)]


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
    def of(cls, scenario: PlacedScenario, strategy: Strategy, pieces: Sequence[Array], cost: CostModel) -> PieceOps:
        """Operations of all pieces; pieces: tokens of each piece, float arrays of shape (B,)."""
        lengths = np.stack([np.asarray(piece) for piece in pieces])
        ends = scenario.request.cached_prefix + np.cumsum(lengths, axis=0)
        context = range(context_ranks(strategy))
        chunks = shares(lengths, len(context))
        starts = list(accumulate(chunks[:-1], initial=ends - lengths))
        steps = [Step(costs, chunks, starts) for costs in scenario.layer_costs(cost)]
        return cls(
            lengths=lengths,
            starts=ends - lengths,
            embedding=[embedding(scenario, chunk, cost) for chunk in chunks],
            preparation=[before_step(scenario, chunk, ends, cost) for chunk in chunks],
            layers=[[tuple(layer_ops(strategy, step, rank)) for rank in context] for step in steps],
            loads=[[tuple(filter(None, [prefix_load(strategy, step, rank)])) for rank in context] for step in steps],
            sent_bytes=[steps[0].costs.activation_bytes(chunk) for chunk in chunks],
        )

    def ends(self, scenario: PlacedScenario, cost: CostModel) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """Operations of every rank before the first piece, and of the last rank after the last piece."""
        last_share = shares(self.lengths[-1], len(self.embedding))[-1]
        epilogue = last(scenario, last_share, self.starts[-1] + self.lengths[-1], cost)
        return request(scenario, self.lengths[0]), epilogue


def program(scenario: PlacedScenario, strategy: Strategy, pieces: Sequence[Array], cost: CostModel) -> Program:
    """Program with one block per piece: receive activations, run the stage's layers on the piece, send it on.

    pieces: tokens of each piece, float arrays of shape (B,). All operations of a block have the number of the stage's
    first layer.
    """
    ops = PieceOps.of(scenario, strategy, pieces, cost)
    kinds = scenario.share.layer_kind_index
    layers = stages(strategy, len(kinds), scenario.cluster.num_gpus)
    context = len(ops.embedding)
    ranks = [(stage, rank) for stage in range(len(layers)) for rank in range(context)]
    message: dict[str, Any] = {
        "host_s": scenario.host.message_s,
        "rendezvous": not scenario.sends_overlap,
        "payload": "activations",
    }
    prologue, epilogue = ops.ends(scenario, cost)

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
        strategy=strategy.name,
        prologue=(prologue,) * len(ranks),
        layers=tuple(tuple(tuple(of_rank(piece, *rank)) for rank in ranks) for piece in numbers),
        layer_kind_index=tuple(numbers),
        epilogue=(*((),) * (len(ranks) - 1), epilogue),
        layer_numbers=tuple((layers[stage].start,) * len(numbers) for stage, _ in ranks),
    )
    return even.on_slower_gpus([scenario.cluster.slowness(rank) for rank in range(len(ranks))])


def pipeline_computes_s(
    scenario: PlacedScenario, strategy: Strategy, pieces: Sequence[Array], cost: CostModel
) -> list[float]:
    """Device time of each rank's own operations, as `computes_s` of the program, which has far more operations."""
    ops = PieceOps.of(scenario, strategy, pieces, cost)
    kinds = scenario.share.layer_kind_index
    prologue, epilogue = ops.ends(scenario, cost)

    def total_s(part: Sequence[Op], rank: int) -> float:
        return sum(float(work_s(op).sum()) for op in slower(part, scenario.cluster.slowness(rank)))

    seconds: list[float] = []
    for stage, layers in enumerate(stages(strategy, len(kinds), scenario.cluster.num_gpus)):
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


def refuses(model: ModelSpec, stages: int) -> str | None:
    """Refuse more stages than layers."""
    if stages <= model.num_hidden_layers:
        return None
    return f"at most {model.num_hidden_layers} stages, one per layer"


PIPELINE = Strategy(
    name="pp",
    title="pipeline of layers, even pieces",
    source="Qin et al., Mooncake, 2024 (arXiv:2407.00079), section 5.1, with chunks as in Sarathi (arXiv:2308.16369)",
    partition_rule="pieces",
    layer=SINGLE.layer,
    degrees=Degrees(pipeline=None, pieces="even"),
    pipeline=program,
    refuses=refuses,
    words=StrategyWords(
        each_rank="1 / p of the layers; the context in even pieces, one after another",
        communication="activations of a piece to the next stage",
        holds="K and V of all tokens and the weights, of its layers",
    ),
    family="pipelines",
    colour=("#86ab72", "#a5e9a3"),
    usual_in=frozenset({"hybrids", "fleets", "maps"}),
    real_run=RealRun(
        "pp",
        "pipeline.Pipeline",
        payload="activations",
        cache="each rank holds the K and V of its own layers",
        decodes=False,
    ),
)
PIPELINE_SEARCHED = replace(
    PIPELINE,
    name="pp-s",
    title="pipeline of layers, searched pieces",
    source=f"{PIPELINE.source}; pieces of equal time as in SGLang (dynamic chunking, 2025)",
    partition_rule="searched-pieces",
    degrees=Degrees(pipeline=None, pieces="searched"),
    words=StrategyWords(
        each_rank="layers and pieces that are searched; the pieces one after another",
        communication="activations of a piece to the next stage",
        holds="K and V of all tokens and the weights, of its layers",
        docs="docs/explanation/search.md#pipelines",
    ),
    colour=("#679e6f", "#bde66e"),
    usual_in=frozenset({"hybrids"}),
)
