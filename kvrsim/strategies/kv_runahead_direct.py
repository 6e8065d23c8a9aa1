"""KV-Runahead without forwarding: every rank sends its own K and V to all later ranks."""

from __future__ import annotations

from collections.abc import Iterator

from kvrsim.program.operations import Op
from kvrsim.strategies.base import Step, Strategy


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project the chunk, send its K, V to each later rank, wait for those of each earlier one, attend, MLP.

    As many bytes arrive as down the chain, but none waits for a rank on the way; the first rank sends them
    all, one message after another. Messages that hold the streams are received first, as their senders wait.
    """
    yield step.qkv(rank)
    if not step.costs.sends_overlap:
        yield from (step.recv_kv(rank, peer=src) for src in range(rank))
    for dst in range(rank + 1, step.num_ranks):
        yield step.send_kv(rank, peer=dst, tokens=step.chunks[rank], in_turn=True)
    if step.costs.sends_overlap:
        yield from (step.recv_kv(rank, peer=src) for src in range(rank))
    yield step.append_kv(rank, prefix=step.starts[rank])
    yield step.attention(rank, prefix=step.starts[rank])
    yield step.output_mlp(rank)


KVR_DIRECT = Strategy(
    name="kvr-direct",
    title="KV-Runahead, K and V sent to all later ranks",
    source="KV-Runahead, Fig. 5, with point-to-point sends instead of the chain; chunks searched",
    partition_rule="search",
    layer=layer,
    passes_state=True,
    sends_in_turn=True,
    gathers_kv=False,
    near_chain=True,
)
