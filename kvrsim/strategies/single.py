"""One GPU does it all."""

from __future__ import annotations

from collections.abc import Iterator

from kvrsim.program import Op
from kvrsim.strategies.base import Step, Strategy


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project, attend, MLP; a cached prefix is there already."""
    yield step.qkv(rank)
    yield step.append_kv(rank, prefix=step.starts[rank])
    yield step.attention(rank, prefix=step.starts[rank])
    yield step.output_mlp(rank)


SINGLE = Strategy(
    name="single",
    title="one GPU",
    source="KV-Runahead, Fig. 1",
    partition_rule="whole",
    layer=layer,
    gathers_kv=False,
)
