"""Tensor parallelism: every matrix is split over GPUs, which sum their parts twice a layer; alone or inside ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvrsim.cost.tensor_parallel import all_reduce
from kvrsim.program.operations import Collective, Op
from kvrsim.strategies.base import LayerProgram, Step, Strategy
from kvrsim.strategies.single import SINGLE


def split(layer: LayerProgram) -> LayerProgram:
    """The layer of another strategy, with groups of GPUs for ranks.

    Costs are those of one GPU's share of the matrices and heads. Norms, residuals and the communication with
    other ranks are each GPU's own. Nothing runs beside an all-reduce, so both stand at the end of the layer.
    """

    def split_layer(step: Step, rank: int) -> Iterator[Op]:
        yield from layer(step, rank)
        yield from _all_reduces(step, rank)

    return split_layer


def _all_reduces(step: Step, rank: int) -> Iterator[Collective]:
    """Sum what the GPUs of the rank's group have of the output and of the MLP; in one where they are parallel."""
    group = step.costs.group
    if group is not None:
        for _ in range(1 if step.costs.model.parallel_attn else 2):
            nbytes = step.costs.activation_bytes(step.chunks[rank])
            yield all_reduce(group, nbytes, step.costs.host.collective_s)


TENSOR_PARALLEL = Strategy(
    name="tp",
    title="tensor parallelism, all-reduce twice a layer",
    source="Shoeybi et al., Megatron-LM, 2019 (arXiv:1909.08053)",
    partition_rule="even",
    layer=split(SINGLE.layer),
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
        layer=split(strategy.layer),
        group_size=size,
    )
