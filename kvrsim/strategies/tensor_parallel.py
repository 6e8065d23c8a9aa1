"""Tensor parallelism: every matrix is split over GPUs, which sum their parts twice a layer; alone or inside ranks."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.strategies.base import Strategy
from kvrsim.strategies.single import SINGLE

TENSOR_PARALLEL = Strategy(
    name="tp",
    title="tensor parallelism, all-reduce twice a layer",
    source="Shoeybi et al., Megatron-LM, 2019 (arXiv:1909.08053)",
    partition_rule="even",
    layer=SINGLE.layer,
    gathers_kv=False,
    group_size=None,
)


def in_groups(strategy: Strategy, size: int) -> Strategy:
    """A hybrid: another strategy between groups of so many GPUs, tensor parallelism inside each."""
    return replace(
        strategy,
        name=f"tp{size}+{strategy.name}",
        title=f"tensor parallelism in groups of {size}; between them {strategy.title}",
        source=f"{TENSOR_PARALLEL.source}; {strategy.source}",
        group_size=size,
    )
