"""Balanced context parallelism: each rank has an early and a late piece, K and V are gathered."""

from __future__ import annotations

from collections.abc import Iterator

from kvrsim.program import Op
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.single import layer as alone


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project both pieces, gather all K and V, attend from each piece to all before its end, MLP."""
    if step.num_ranks == 1:
        yield from alone(step, rank)
        return
    yield step.qkv(rank)
    yield step.all_gather_kv(rank)
    yield step.assemble_kv(rank)
    early, late = step.zigzag(rank)
    yield step.attention_to("early attention", *early)
    yield step.attention_to("late attention", *late)
    yield step.output_mlp(rank)


ZIGZAG = Strategy(
    name="zigzag",
    title="all-gather of K and V, an early and a late piece a rank",
    source="The Llama 3 Herd of Models, 2024 (arXiv:2407.21783), section 3.3.2; as SGLang and vLLM balance prefills",
    partition_rule="even",
    layer=layer,
    gathers_kv=True,
    keeps_gathered=False,
)
