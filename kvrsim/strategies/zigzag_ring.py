"""A balanced ring: each rank has an early and a late piece, whose K and V go round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvrsim.program.operations import Array, Op
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.ring import held, pass_kv
from kvrsim.strategies.single import layer as alone
from kvrsim.strategies.zigzag import pieces


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project both pieces; attend to the own K, V while they go to the next rank, and so on round the ring; MLP.

    Every round is half a block: all queries against an early piece, or those of the late piece against both.
    """
    if step.num_ranks == 1:
        yield from alone(step, rank)
        return
    yield step.qkv(rank)
    yield step.append_kv(rank, prefix=step.cached)
    blocks_s = [_block_s(step, rank, other) for other in held(step, rank)[1:]]
    yield from pass_kv(step, rank, np.stack(blocks_s), np.ones(step.num_ranks - 1, dtype=bool))
    yield step.output_mlp(rank)


def _block_s(step: Step, rank: int, other: int) -> Array:
    """Attention to another rank's pieces; early pieces follow each other from the last rank, late ones from the first.

    Under a window, the late piece takes as long as if it began where the early one does.
    """
    (_, early_start), (late, late_start) = pieces(step, rank)
    (early_keys, before), (late_keys, later) = pieces(step, other)
    if other > rank:
        return step.costs.block_attention_s(step.chunks[rank], early_start, early_keys, before + early_keys)
    keys = early_keys + late_keys
    return step.costs.block_attention_s(late, late_start, keys, later + late_keys, part=True)


ZIGZAG_RING = Strategy(
    name="zigzag-ring",
    title="ring attention, an early and a late piece a rank",
    source="Zhu, ring-flash-attention, 2024 (github.com/zhuzilin/ring-flash-attention), zigzag_ring_flash_attn",
    partition_rule="even",
    layer=layer,
    gathers_kv=False,
)
