"""Pipeline parallelism in chunks: stages of layers, through which the context goes piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from kvrsim.cost.kernels import CostModel
from kvrsim.ends import embedding, last, request
from kvrsim.ends import step as before_step
from kvrsim.model.spec import ModelSpec
from kvrsim.program.operations import Array, Collective, Compute, Op, Program, Recv, Send
from kvrsim.scenario import Scenario
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.layers import layer_ops


def layer(step: Step, piece: int) -> Iterator[Op]:
    """Project a piece, append its K, V to those of all before, attend, MLP: nothing leaves the stage."""
    yield step.qkv(piece)
    yield step.append_kv(piece, prefix=step.starts[piece])
    yield step.attention(piece, prefix=step.starts[piece])
    yield step.output_mlp(piece)


def even_layers(num_layers: int, num_ranks: int) -> tuple[int, ...]:
    """How many layers each rank has; the first ranks have the one more that there may be."""
    share, rest = divmod(num_layers, num_ranks)
    return tuple(share + (rank < rest) for rank in range(num_ranks))


def layers_of(scenario: Scenario, strategy: Strategy) -> tuple[int, ...] | None:
    """Layers of each stage; None: the strategy is no pipeline. scenario: as the strategy sees it."""
    if strategy.pipeline is None:
        return None
    return strategy.stage_layers or even_layers(scenario.share.num_hidden_layers, scenario.cluster.num_gpus)


def stages(strategy: Strategy, num_layers: int, num_ranks: int) -> tuple[range, ...]:
    """The layers of each rank of a pipeline."""
    counts = strategy.stage_layers or even_layers(num_layers, num_ranks)
    ends = tuple(accumulate(counts, initial=0))
    assert (len(counts), ends[-1]) == (num_ranks, num_layers), "stages of another model or number of ranks"
    return tuple(range(first, end) for first, end in pairwise(ends))


def program(scenario: Scenario, strategy: Strategy, pieces: Sequence[Array], cost: CostModel) -> Program:
    """Every stage takes one piece after another: receive its activations, run the own layers, send them on.

    pieces: float arrays of shape (B,), tokens of each. Blocks are steps of all stages: for each piece the way in,
    all layers of every stage (under the number of the first), the way out.
    """
    kinds = scenario.share.layer_kind_index
    held = stages(strategy, len(kinds), scenario.cluster.num_gpus)
    patterns = [tuple(kinds[index] for index in rows) for rows in held]
    nowhere, firsts = (None,) * len(held), tuple(rows[0] for rows in held)
    lengths = np.stack([np.asarray(piece) for piece in pieces])
    starts = scenario.request.cached_prefix + np.cumsum(lengths, axis=0) - lengths
    steps = [Step(costs, (lengths,), (starts,)) for costs in scenario.layer_costs(cost)]
    layers = [tuple(layer_ops(strategy, step, 0)) for step in steps]  # of all pieces at once
    blocks, ways = _Blocks(), _Ways(scenario, cost, len(held))
    for number, piece in enumerate(lengths):
        blocks.add(ways.into(piece, starts[number] + piece), nowhere)
        of_kind = [tuple(_of_piece(op, number) for op in ops) for ops in layers]
        of_stage = {pattern: tuple(op for kind in pattern for op in of_kind[kind]) for pattern in set(patterns)}
        blocks.add(tuple(of_stage[pattern] for pattern in patterns), firsts)
        blocks.add(ways.out(piece, steps[0]), nowhere)
    return Program(
        strategy=strategy.name,
        prologue=(request(scenario, lengths[0]),) * len(held),
        layers=tuple(blocks.kinds),
        layer_kind_index=tuple(blocks.order),
        epilogue=(*((),) * (len(held) - 1), last(scenario, lengths[-1], starts[-1] + lengths[-1], cost)),
        layer_numbers=tuple(zip(*blocks.numbers, strict=True)),
    )


def _of_piece(op: Op, number: int) -> Op:
    """One piece's share of an operation of all pieces."""
    if isinstance(op, Compute):
        return Compute(name=op.name, device_s=op.device_s[number], host_s=op.host_s, kind=op.kind)
    assert isinstance(op, Collective)
    return replace(op, seconds=op.seconds[number], nbytes=op.nbytes[number])


def _send_activations(step: Step, tokens: Array, rank: int) -> Send:
    """The residual stream of so many tokens to the next stage."""
    return Send(
        dst=rank + 1,
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

    def __init__(self, scenario: Scenario, cost: CostModel, num_stages: int) -> None:
        self.scenario, self.cost, self.num_stages = scenario, cost, num_stages
        self.known: dict[tuple[str, bytes], tuple[tuple[Op, ...], ...]] = {}

    def into(self, piece: Array, keys: Array) -> tuple[tuple[Op, ...], ...]:
        """The first stage embeds, the others receive; all make their masks and rotary tables."""
        if ("in", piece.tobytes()) not in self.known:
            held = not self.scenario.sends_overlap
            sources = range(self.num_stages - 1)
            recvs = ((Recv(src=rank, rendezvous=held, payload="activations"),) for rank in sources)
            self.known["in", piece.tobytes()] = (embedding(self.scenario, piece, self.cost), *recvs)
        ways = self.known["in", piece.tobytes()]
        prepared = before_step(self.scenario, piece, keys, self.cost)
        return tuple((*way, *prepared) for way in ways) if prepared else ways

    def out(self, piece: Array, step: Step) -> tuple[tuple[Op, ...], ...]:
        """All but the last stage send."""
        if ("out", piece.tobytes()) not in self.known:
            sends = ((_send_activations(step, piece, rank),) for rank in range(self.num_stages - 1))
            self.known["out", piece.tobytes()] = (*sends, ())
        return self.known["out", piece.tobytes()]


def refuses(model: ModelSpec, ranks: int) -> str | None:
    """A stage needs a layer."""
    return f"at most {model.num_hidden_layers} stages, one a layer" if ranks > model.num_hidden_layers else None


PIPELINE = Strategy(
    name="pp",
    title="pipeline of layers, context in pieces",
    source="Qin et al., Mooncake, 2024 (arXiv:2407.00079), section 5.1, with chunks as in Sarathi (arXiv:2308.16369)",
    partition_rule="pieces",
    layer=layer,
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
