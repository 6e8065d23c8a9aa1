"""A balanced ring: each rank has an early and a late piece, whose K and V go round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvrsim.program.operations import Array, Op
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.ring import held, pass_kv
from kvrsim.strategies.single import layer as alone
from kvrsim.strategies.zigzag import all_pieces


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project both pieces; attend to the own K, V while they go to the next rank, and so on round the ring; MLP.

    Every round is half a block: all queries against an early piece, or those of the late piece against both.
    """
    if step.num_ranks == 1:
        yield from alone(step, rank)
        return
    yield step.qkv(rank)
    yield step.append_kv(rank, prefix=step.held_prefix)
    yield from pass_kv(step, rank, _blocks_s(step, rank), np.ones(step.num_ranks - 1, dtype=bool))
    yield step.output_mlp(rank)


def _blocks_s(step: Step, rank: int) -> Array:
    """Attention to the other ranks' pieces in turn: early ones follow each other from the last rank, late ones onwards.

    Under a window, the late piece takes as long as if it began where the early one does.
    """
    (early, early_start), (late, late_start) = all_pieces(step)
    costs, others = step.costs, held(step, rank)[1:]
    ends = early_start[others] + early[others], late_start[others] + late[others]
    to_early_s = costs.block_attention_s(step.chunks[rank], early_start[rank], early[others], ends[0])
    of_late_s = costs.block_attention_s(late[rank], late_start[rank], step.lengths[others], ends[1], part=True)
    return np.where((others > rank)[:, None], to_early_s, of_late_s)


ZIGZAG_RING = Strategy(
    name="zigzag-ring",
    title="ring attention, an early and a late piece a rank",
    source="Zhu, ring-flash-attention, 2024 (github.com/zhuzilin/ring-flash-attention), zigzag_ring_flash_attn",
    partition_rule="even",
    layer=layer,
    gathers_kv=False,
    carries_prefix=True,
    merges_blocks=True,
)
