"""Tensor/sequence parallel inference: even chunks, K and V gathered everywhere."""

from __future__ import annotations

from collections.abc import Iterator

from kvrsim.program import Array, Op
from kvrsim.strategies.base import Step, Strategy


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project the chunk, gather all K and V, attend to the whole context (masked), MLP."""
    yield step.qkv(rank)
    if step.num_ranks > 1:
        yield step.all_gather_kv(rank)
        yield step.assemble_kv(rank)
    else:
        yield step.append_kv(rank, prefix=step.starts[rank])
    yield step.attention(rank, prefix=others(step, rank))
    yield step.output_mlp(rank)


def others(step: Step, rank: int) -> Array:
    """What attention over the gathered context sees besides the chunk: all other tokens, masked or not."""
    return step.costs.mixer.gathered_prefix(step.chunks[rank], step.starts[rank], step.chunks[-1] + step.starts[-1])


TSP = Strategy(
    name="tsp",
    title="all-gather of K and V, even chunks",
    source="KV-Runahead, Fig. 4 (its baseline)",
    partition_rule="even",
    layer=layer,
    passes_state=True,
    gathers_kv=True,
    carries_prefix=True,
)
