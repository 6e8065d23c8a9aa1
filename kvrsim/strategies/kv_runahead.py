"""KV-Runahead: the KV-cache is sent along a chain of ranks, or (kvr-direct) from each rank to all later ranks.

KVR-B is not in the paper. Eager kernels and kernels with a mask also compute masked scores: the whole square of chunk x
chunk. If attention is issued as n calls, each with an equal block of the queries and the keys up to the block's end, it
leaves out (1 - 1/n) / 2 of this square. Each rank uses the number of calls that is fastest for its chunk and prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvrsim.model.mixers import Attention, Recurrence
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Op
from kvrsim.strategies.base import RealRun, Step, Strategy, StrategyWords


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project the chunk, wait for the cache, append, send it on, attend, compute the MLP (Figs. 5 and 7)."""
    prefix = step.starts[rank]
    yield step.qkv(rank)
    if rank > 0:
        yield step.recv_kv(rank)
    yield step.append_kv(rank, prefix)
    if rank < step.num_ranks - 1:
        yield step.send_kv(rank)
        yield from step.send_copies(rank)
    yield step.attention(rank, prefix)
    yield step.output_mlp(rank)


def direct_layer(step: Step, rank: int) -> Iterator[Op]:
    """Project the chunk, send its K, V to all later ranks, wait for those of earlier ranks, attend, compute the MLP.

    A rank receives as many bytes as in the chain, but no message waits for a rank in between; the first rank sends its
    messages one after another. Messages that hold the streams are received first, because their senders wait.
    """
    yield step.qkv(rank)
    if not step.costs.setting.sends_overlap:
        yield from (step.recv_kv(rank, peer=src) for src in range(rank))
    for dst in range(rank + 1, step.num_ranks):
        yield step.send_kv(rank, peer=dst, tokens=step.chunks[rank], in_turn=True)
    if step.costs.setting.sends_overlap:
        yield from (step.recv_kv(rank, peer=src) for src in range(rank))
    if rank < step.num_ranks - 1:
        yield from step.send_copies(rank, (step.num_ranks - 1 - rank) * step.chunks[rank])
    yield step.append_kv(rank, prefix=step.starts[rank])
    yield step.attention(rank, prefix=step.starts[rank])
    yield step.output_mlp(rank)


def whole_queries(model: ModelSpec, ranks: int) -> str | None:
    """The requirement of query blocks that a model does not meet; None if it meets all."""
    for layer in model.layer_kinds:
        mixer = layer.mixer
        if mixer is not None and (mixer.is_sparse or not isinstance(mixer, Attention | Recurrence)):
            return f"attention to K and V of heads; {model.name} has {mixer.title}"
    return None


KVR_S = Strategy(
    name="kvr-s",
    title="KV-Runahead with searched chunks",
    source="KV-Runahead, Fig. 5",
    partition_rule="search",
    layer=layer,
    passes_state=True,
    chains=True,
    words=StrategyWords(
        each_rank="a chunk whose length is searched; attends to its own chunk and all before it",
        communication="K and V of all tokens so far to the next rank, in each layer",
        holds="K and V up to the end of its chunk, all weights",
    ),
    family="chains",
    colour=("#2e70e9", "#3a7de0"),
    usual_in=frozenset({"hybrids", "fleets", "fleets on a bus", "maps", "paper"}),
    is_replayable=True,
    real_run=RealRun("kvr", "chain.ChainExchange"),
)
KVR_E = replace(
    KVR_S,
    name="kvr-e",
    title="KV-Runahead with even chunks",
    partition_rule="even",
    words=StrategyWords(
        each_rank="an even chunk; attends to its own chunk and all before it",
        communication="K and V of all tokens so far to the next rank, in each layer",
        holds="K and V up to the end of its chunk, all weights",
    ),
    colour=("#5075ac", "#829dcf"),
    baseline_rank=2,
    usual_in=frozenset({"paper"}),
)
KVR_P = replace(
    KVR_S,
    name="kvr-p",
    title="KV-Runahead with chunks from a table",
    partition_rule="table",
    words=StrategyWords(
        each_rank="a chunk from a partition table (--table); else as kvr-s",
        communication="K and V of all tokens so far to the next rank, in each layer",
        holds="K and V up to the end of its chunk, all weights",
        docs="docs/how-to/partition-table.md",
    ),
    colour=("#3f619c", "#6f94b1"),
    usual_in=frozenset(),
)
KVR_B = replace(
    KVR_S,
    name="kvr-b",
    title="KV-Runahead in blocks of queries",
    source="kvrsim (docs/explanation/query-blocks.md), after KV-Runahead, Fig. 5",
    query_blocks=(1, 2, 4, 8, 16, 32),
    near_chain=True,
    refuses=whole_queries,
    words=StrategyWords(
        each_rank="as kvr-s; attention in one call for each block of queries",
        communication="K and V of all tokens so far to the next rank, in each layer",
        holds="K and V up to the end of its chunk, all weights",
        docs="docs/explanation/query-blocks.md",
    ),
    colour=("#3050df", "#1476bc"),
    usual_in=frozenset(),
)
KVR_DIRECT = Strategy(
    name="kvr-direct",
    title="KV-Runahead, sent to all later GPUs",
    source="KV-Runahead, Fig. 5, with point-to-point sends instead of the chain; chunks searched",
    partition_rule="search",
    layer=direct_layer,
    passes_state=True,
    sends_in_turn=True,
    near_chain=True,
    words=StrategyWords(
        each_rank="a chunk whose length is searched; attends to its own chunk and all before it",
        communication="K and V of its chunk to every later rank, in each layer",
        holds="K and V up to the end of its chunk, all weights",
    ),
    family="chains",
    colour=("#4d5d80", "#0a97dc"),
    real_run=RealRun("kvr_direct", "chain.DirectChain"),
)
