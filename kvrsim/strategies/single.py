"""One GPU, and tensor parallelism: every matrix is split over GPUs, which sum their parts twice per layer."""

from __future__ import annotations

from collections.abc import Iterator

from kvrsim.layout import Degrees
from kvrsim.program import Op
from kvrsim.strategies.base import Step, Strategy


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project, attend, compute the MLP; the cached prefix is on the GPU."""
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
    degrees=Degrees(),
)
TENSOR_PARALLEL = Strategy(
    name="tp",
    title="tensor parallelism, all-reduce twice a layer",
    source="Shoeybi et al., Megatron-LM, 2019 (arXiv:1909.08053)",
    partition_rule="even",
    layer=SINGLE.layer,
    gathers_kv=False,
    degrees=Degrees(tensor=None),
)
