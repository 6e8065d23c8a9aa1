"""KV-Runahead: the KV-cache is handed down a chain of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvrsim.program.operations import Op
from kvrsim.strategies.base import Step, Strategy


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project the chunk, wait for the cache, append, hand it on, attend, MLP (Figs. 5 and 7)."""
    prefix = step.starts[rank]
    yield step.qkv(rank)
    if rank > 0:
        yield step.recv_kv(rank)
    yield step.append_kv(rank, prefix)
    if rank < step.num_ranks - 1:
        yield step.send_kv(rank)
    yield step.attention(rank, prefix)
    yield step.output_mlp(rank)


KVR_S = Strategy(
    name="kvr-s",
    title="KV-Runahead, searched chunks",
    source="KV-Runahead, Fig. 5",
    partition_rule="search",
    layer=layer,
    passes_state=True,
    gathers_kv=False,
    chains=True,
)
KVR_E = replace(KVR_S, name="kvr-e", title="KV-Runahead, even chunks", partition_rule="even")
KVR_P = replace(KVR_S, name="kvr-p", title="KV-Runahead, chunks from a table", partition_rule="table")
