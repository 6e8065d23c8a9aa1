"""Balanced context parallelism: each rank has an early and a late piece, K and V are gathered."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvrsim.program import Array, Compute, Op
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.ring import held, pass_kv
from kvrsim.strategies.single import layer as alone


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project both pieces, gather all K and V, attend from each piece to all before its end, MLP.

    Gathered pieces are joined in the order of the context, where such copies are counted.
    """
    if step.num_ranks == 1:
        yield from alone(step, rank)
        return
    yield step.qkv(rank)
    yield step.all_gather_kv(rank)
    yield step.assemble_kv(rank)
    mixer = step.costs.layer.mixer
    if step.costs.packs and mixer is not None:
        joined_s = step.costs.all_to_all_pack_s(step.lengths.sum(axis=0), round(mixer.token_bytes(1)))
        yield Compute(name="join", device_s=joined_s, kind="append")
    early, late = pieces(step, rank)
    yield step.attention_to("early attention", *early)
    yield step.attention_to("late attention", *late)
    yield step.output_mlp(rank)


def pieces(step: Step, rank: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """(tokens, start) of a rank's early and late piece."""
    (early, early_start), (late, late_start) = all_pieces(step)
    return (early[rank], early_start[rank]), (late[rank], late_start[rank])


def all_pieces(step: Step) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """(tokens, start) of all ranks' early and late pieces, shape (p, B): the ranks take turns forwards, then backwards.

    Counted from the last rank, so that it has the first piece and the last one.
    """
    early = np.floor(step.lengths / 2)
    late = step.lengths - early
    first_late = step.cached + early.sum(axis=0)
    return (early, first_late - np.cumsum(early, axis=0)), (late, first_late + np.cumsum(late, axis=0) - late)


ZIGZAG = Strategy(
    name="zigzag",
    title="all-gather of K and V, an early and a late piece a rank",
    source="The Llama 3 Herd of Models, 2024 (arXiv:2407.21783), section 3.3.2; as SGLang and vLLM balance prefills",
    partition_rule="even",
    layer=layer,
    gathers_kv=True,
    carries_prefix=True,
    keeps_gathered=False,
)


# -- A balanced ring: each rank has an early and a late piece, whose K and V go round.


def ring_layer(step: Step, rank: int) -> Iterator[Op]:
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
    to_early_s = costs.merging.block_s(step.chunks[rank], early_start[rank], early[others], ends[0])
    of_late_s = costs.merging.block_s(late[rank], late_start[rank], step.lengths[others], ends[1], part=True)
    return np.where((others > rank)[:, None], to_early_s, of_late_s)


ZIGZAG_RING = Strategy(
    name="zigzag-ring",
    title="ring attention, an early and a late piece a rank",
    source="Zhu, ring-flash-attention, 2024 (github.com/zhuzilin/ring-flash-attention), zigzag_ring_flash_attn",
    partition_rule="even",
    layer=ring_layer,
    gathers_kv=False,
    carries_prefix=True,
    merges_blocks=True,
)
