"""Tensor/sequence parallel inference: even chunks, K and V gathered everywhere."""

from __future__ import annotations

from collections.abc import Iterator

from kvrsim.program import Op
from kvrsim.strategies.base import Step, Strategy


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project the chunk, gather all K and V, attend to the whole context (masked), MLP."""
    yield step.qkv(rank)
    if step.num_ranks > 1:
        yield step.all_gather_kv(rank)
        yield step.assemble_kv(rank)
    else:
        yield step.append_kv(rank, prefix=step.starts[rank])
    yield step.attention(rank, prefix=step.dense_prefix(rank))
    yield step.output_mlp(rank)


TSP = Strategy(
    name="tsp",
    title="all-gather of K and V, even chunks",
    source="KV-Runahead, Fig. 4 (its baseline)",
    partition_rule="even",
    layer=layer,
    gathers_kv=True,
)
