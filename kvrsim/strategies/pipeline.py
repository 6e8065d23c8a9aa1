"""Pipeline parallelism in chunks: stages of layers, through which the context goes piece by piece.

A stage is one rank, or several that split each piece. These context ranks have an early and a late part of every piece,
as in `zigzag`, and gather its K and V. Each keeps all of them, since later pieces attend to them: engines hold a whole
copy of the cache on every context rank (SGLang #18233, vLLM #46358). Activations go to the same context rank of the
next stage. Ranks are numbered stage by stage, so that those that gather are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from kvrsim.ends import embedding, last, request
from kvrsim.ends import step as before_step
from kvrsim.kernels.calibrated import CostModel
from kvrsim.model.spec import ModelSpec
from kvrsim.program import AllGather, Array, Collective, Compute, Op, Program, Recv, Send
from kvrsim.scenario import Scenario
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.layers import layer_ops, prefix_load
from kvrsim.strategies.single import SINGLE
from kvrsim.strategies.zigzag import ZIGZAG


def even_layers(num_layers: int, num_ranks: int) -> tuple[int, ...]:
    """How many layers each rank has; the first ranks have the one more that there may be."""
    share, rest = divmod(num_layers, num_ranks)
    return tuple(share + (rank < rest) for rank in range(num_ranks))


def layers_of(scenario: Scenario, strategy: Strategy) -> tuple[int, ...] | None:
    """Layers of each stage; None: the strategy is no pipeline. scenario: as the strategy sees it."""
    if strategy.pipeline is None:
        return None
    return tuple(map(len, stages(strategy, scenario.share.num_hidden_layers, scenario.cluster.num_gpus)))


def stages(strategy: Strategy, num_layers: int, num_ranks: int) -> tuple[range, ...]:
    """The layers of each stage of a pipeline."""
    num_stages = num_ranks // context_ranks(strategy)
    counts = strategy.stage_layers or even_layers(num_layers, num_stages)
    ends = tuple(accumulate(counts, initial=0))
    assert (len(counts), ends[-1]) == (num_stages, num_layers), "stages of another model or number of ranks"
    return tuple(range(first, end) for first, end in pairwise(ends))


def context_ranks(strategy: Strategy) -> int:
    """Ranks of each stage of a pipeline; 1 elsewhere."""
    return 1 if strategy.pipeline is None else strategy.context_size or 1


def tokens_of(strategy: Strategy, partition: Sequence[int], rank: int) -> int:
    """Tokens of a rank: its chunk or, in a pipeline, of all pieces or its share of them."""
    if strategy.pipeline is None:
        return partition[rank]
    context = context_ranks(strategy)
    return int(shares(np.array(partition, dtype=float), context)[rank % context].sum())


def shares(pieces: Array, ranks: int) -> list[Array]:
    """Tokens of each context rank of a stage, an array like `pieces` a rank; the first ones have the rest."""
    share = np.floor(pieces / ranks)
    return [share + (rank < pieces - ranks * share) for rank in range(ranks)]


def program(scenario: Scenario, strategy: Strategy, pieces: Sequence[Array], cost: CostModel) -> Program:
    """Every stage takes one piece after another: receive its activations, run the own layers, send them on.

    pieces: float arrays of shape (B,), tokens of each. Blocks are steps of all stages: for each piece the way in,
    all layers of every stage (under the number of the first), the way out.
    """
    kinds = scenario.share.layer_kind_index
    held, context = stages(strategy, len(kinds), scenario.cluster.num_gpus), range(context_ranks(strategy))
    patterns = [(tuple(kinds[index] for index in rows), rank) for rows in held for rank in context]
    num_ranks, firsts = len(patterns), tuple(rows[0] for rows in held for _ in context)
    nowhere = (None,) * num_ranks
    lengths = np.stack([np.asarray(piece) for piece in pieces])
    before = scenario.request.cached_prefix + np.cumsum(lengths, axis=0) - lengths
    chunks = shares(lengths, len(context))
    starts = list(accumulate(chunks[:-1], initial=before))
    steps = [Step(costs, chunks, starts) for costs in scenario.layer_costs(cost)]
    layers = [[tuple(layer_ops(strategy, step, rank)) for step in steps] for rank in context]  # of all pieces at once
    loads = [[tuple(filter(None, [prefix_load(strategy, step, rank)])) for step in steps] for rank in context]
    blocks, ways = _Blocks(), _Ways(scenario, cost, len(held), len(context))
    for number, piece in enumerate(lengths):
        parts = [chunk[number] for chunk in chunks]
        blocks.add(ways.into(parts, before[number] + piece), nowhere)
        of_kind = [[tuple(_of_piece(op, number, len(context)) for op in ops) for ops in kinds] for kinds in layers]
        if number == 0:  # the cached prefix has come before the first piece's attention
            of_kind = [
                [load + ops for load, ops in zip(*both, strict=True)] for both in zip(loads, of_kind, strict=True)
            ]
        of_rank = {
            (pattern, rank): tuple(op for kind in pattern for op in of_kind[rank][kind])
            for pattern, rank in set(patterns)
        }
        blocks.add(tuple(of_rank[pattern] for pattern in patterns), firsts)
        blocks.add(ways.out(parts, steps[0]), nowhere)
    return Program(
        strategy=strategy.name,
        prologue=(request(scenario, lengths[0]),) * num_ranks,
        layers=tuple(blocks.kinds),
        layer_kind_index=tuple(blocks.order),
        epilogue=(*((),) * (num_ranks - 1), last(scenario, chunks[-1][-1], before[-1] + lengths[-1], cost)),
        layer_numbers=tuple(zip(*blocks.numbers, strict=True)),
    )


def _of_piece(op: Op, number: int, context: int) -> Op:
    """One piece's share of an operation of all pieces; context: ranks of a stage."""
    if isinstance(op, Compute):
        return Compute(name=op.name, device_s=op.device_s[number], host_s=op.host_s, kind=op.kind)
    if isinstance(op, AllGather):
        return replace(op, nbytes=op.nbytes[number], among=context)
    assert isinstance(op, Collective)
    return replace(op, seconds=op.seconds[number], nbytes=op.nbytes[number])


def _send_activations(step: Step, tokens: Array, dst: int) -> Send:
    """The residual stream of so many tokens to a rank of the next stage."""
    return Send(
        dst=dst,
        nbytes=step.costs.activation_bytes(tokens),
        host_s=step.costs.host.message_s,
        rendezvous=not step.costs.sends_overlap,
        payload="activations",
    )


class _Blocks:
    """Blocks in the order in which they run; those whose operations are the very same are one kind."""

    def __init__(self) -> None:
        self.kinds: list[tuple[tuple[Op, ...], ...]] = []
        self.order: list[int] = []
        self.numbers: list[tuple[int | None, ...]] = []
        self.known: dict[tuple[int, ...], int] = {}

    def add(self, ops: tuple[tuple[Op, ...], ...], layers: tuple[int | None, ...]) -> None:
        """Another block, and which layer it is on each rank."""
        key = tuple(map(id, ops))
        if key not in self.known:
            self.known[key] = len(self.kinds)
            self.kinds.append(ops)
        self.order.append(self.known[key])
        self.numbers.append(layers)


class _Ways:
    """The ways into and out of all stages; pieces of the same length have the same."""

    def __init__(self, scenario: Scenario, cost: CostModel, num_stages: int, context: int) -> None:
        self.scenario, self.cost, self.num_stages, self.context = scenario, cost, num_stages, context
        self.known: dict[tuple[str, bytes], tuple[tuple[Op, ...], ...]] = {}

    def into(self, parts: Sequence[Array], keys: Array) -> tuple[tuple[Op, ...], ...]:
        """The first stage embeds, the others receive; all make their masks and rotary tables.

        parts: tokens of each context rank.
        """
        if (key := ("in", _bytes(parts))) not in self.known:
            held = not self.scenario.sends_overlap
            sources = range(self.context * (self.num_stages - 1))
            recvs = ((Recv(src=rank, rendezvous=held, payload="activations"),) for rank in sources)
            self.known[key] = (*(embedding(self.scenario, part, self.cost) for part in parts), *recvs)
        ways = self.known[key]
        prepared = [before_step(self.scenario, part, keys, self.cost) for part in parts]
        if not any(prepared):
            return ways
        return tuple((*way, *prepared[rank % self.context]) for rank, way in enumerate(ways))

    def out(self, parts: Sequence[Array], step: Step) -> tuple[tuple[Op, ...], ...]:
        """All but the last stage send, each rank to the same context rank of the next stage."""
        if (key := ("out", _bytes(parts))) not in self.known:
            targets = range(self.context, self.context * self.num_stages)
            sends = ((_send_activations(step, parts[dst % self.context], dst),) for dst in targets)
            self.known[key] = (*sends, *((),) * self.context)
        return self.known[key]


def _bytes(parts: Sequence[Array]) -> bytes:
    return b"".join(part.tobytes() for part in parts)


def refuses(model: ModelSpec, stages: int) -> str | None:
    """A stage needs a layer."""
    return f"at most {model.num_hidden_layers} stages, one a layer" if stages > model.num_hidden_layers else None


PIPELINE = Strategy(
    name="pp",
    title="pipeline of layers, context in pieces",
    source="Qin et al., Mooncake, 2024 (arXiv:2407.00079), section 5.1, with chunks as in Sarathi (arXiv:2308.16369)",
    partition_rule="pieces",
    layer=SINGLE.layer,
    gathers_kv=False,
    pipeline=program,
    refuses=refuses,
)
PIPELINE_SEARCHED = replace(
    PIPELINE,
    name="pp-s",
    title="pipeline of layers, pieces and stages searched",
    source=f"{PIPELINE.source}; pieces of equal time as in SGLang (dynamic chunking, 2025)",
    partition_rule="searched-pieces",
)


def with_stages(num_stages: int | None, context: int | None, *, searched: bool = False) -> Strategy:
    """The pipeline with so many stages (None: all other GPUs), each of so many context ranks (None: one rank)."""
    base = PIPELINE_SEARCHED if searched else PIPELINE
    number = "" if num_stages is None else str(num_stages)
    if context is None:
        return replace(base, name=base.name.replace("pp", f"pp{number}"), num_stages=num_stages)
    return replace(
        base,
        name=f"{base.name}{number}+cp{context}",
        title=f"pipeline of layers, {context} context ranks a stage",
        source=f"{base.source}; inside a stage: {ZIGZAG.source}",
        layer=ZIGZAG.layer,
        num_stages=num_stages,
        context_size=context,
    )
