"""Ring attention: K and V go round the ranks while each rank attends to those it holds; plain, striped, zigzag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvrsim.program import Array, Compute, Flags, Op, RingPass
from kvrsim.strategies.base import Step, Strategy


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project the chunk; attend to its K, V while they go to the next rank, and so on round the ring; compute the MLP.

    Blocks after the chunk are fully masked and skipped: the first rank works in one round, the last rank in all rounds.
    """
    yield step.qkv(rank)
    yield step.append_kv(rank, prefix=step.held_prefix)
    yield from pass_kv(step, rank, _blocks_s(step, rank), owners(step, rank)[1:] < rank)
    yield step.output_mlp(rank)


def pass_kv(step: Step, rank: int, blocks_s: Array, calls: Flags) -> Iterator[Op]:
    """Attend to the K, V of one rank after another, while they go round the ring, and merge the results in fp32.

    blocks_s: seconds of attention to the other ranks' K, V in the order of `owners`, with merging, shape (p - 1, B).
    calls: whether the host issues each call, shape (p - 1,).
    A rank's share of the cached prefix is sent with its K, V. All queries attend to it in one call; both results are
    merged at once.
    """
    costs, chunk = step.costs, step.chunks[rank]
    own_s = costs.mixer.attention_s(chunk, step.held_prefix) + costs.block_mixer.upcast_s(chunk)
    if costs.setting.prefix.share:
        to_share_s = costs.block_mixer.share_s(chunk, step.starts[rank])
        merged_s = np.where((to_share_s > 0) & ~calls[:, None], costs.block_mixer.merge_s(chunk), 0.0)
        blocks_s = blocks_s + to_share_s + merged_s
        calls = np.ones_like(calls)
    work_s = np.concatenate([np.broadcast_to(own_s, blocks_s[:1].shape), blocks_s])
    most_keys = None if step.times_only else np.maximum(step.lengths.max(axis=0), step.held_prefix + chunk)
    block_host_s = costs.host_attention_s + costs.setting.host.kernel_s * costs.block_mixer.merge_kernels
    yield RingPass(
        name="attention",
        device_s=work_s,
        nbytes=step.piece_bytes[owners(step, rank)[:-1]],
        host_s=(costs.host_attention_s, *(calls * block_host_s).tolist()),
        overlaps=costs.setting.sends_overlap,
        message_share=costs.setting.message_share,
        score_elements=None if most_keys is None else costs.mixer.score_elements(chunk, most_keys),
    )
    yield Compute(name="cast", device_s=costs.block_mixer.upcast_s(chunk), kind="merge")


def owners(step: Step, rank: int) -> npt.NDArray[np.intp]:
    """Owner of the K and V that a rank holds in each round: the rank itself, then the previous rank, and so on."""
    return (rank - np.arange(step.num_ranks)) % step.num_ranks


def _blocks_s(step: Step, rank: int) -> Array:
    """Seconds of attention of the chunk to each other rank's block in turn."""
    chunk, start, others = step.chunks[rank], step.starts[rank], owners(step, rank)[1:]
    before = (others < rank)[:, None]
    keys = step.lengths[others] * before
    ends = step.begins[others] + keys
    return step.costs.block_mixer.block_s(chunk, start, keys, np.where(before, ends, start))


def striped_layer(step: Step, rank: int) -> Iterator[Op]:
    """A ring layer with every p-th token on one rank: each round is a causal half, equal for all ranks.

    In the stripe of a later rank, a query sees one key less; the first query sees none and is left out.
    """
    chunk = step.chunks[rank]
    yield step.qkv(rank)
    yield step.append_kv(rank, prefix=step.held_prefix)
    half_s = step.costs.mixer.attention_s(chunk, np.zeros_like(chunk))
    later = (owners(step, rank)[1:] > rank)[:, None]
    merges_s = np.where(later, step.costs.block_mixer.merge_s(chunk, part=True), step.costs.block_mixer.merge_s(chunk))
    yield from pass_kv(step, rank, half_s + merges_s, np.ones(step.num_ranks - 1, dtype=bool))
    yield step.output_mlp(rank)


def zigzag_layer(step: Step, rank: int) -> Iterator[Op]:
    """Project both pieces; attend to their K, V while they go to the next rank, and so on round the ring; MLP.

    Every round is half a block: all queries with an early piece, or the late piece's queries with both pieces.
    """
    yield step.qkv(rank)
    yield step.append_kv(rank, prefix=step.held_prefix)
    yield from pass_kv(step, rank, _zigzag_blocks_s(step, rank), np.ones(step.num_ranks - 1, dtype=bool))
    yield step.output_mlp(rank)


def _zigzag_blocks_s(step: Step, rank: int) -> Array:
    """Seconds of attention to the other ranks' pieces in turn.

    All queries see a later rank's early piece. Only the late piece's queries see an earlier rank's two pieces; with a
    window, these are priced as one block that ends with the late piece.
    """
    (early, early_start), (late, late_start) = step.halves
    early_end, late_end = step.half_ends
    earlier, later = np.split(owners(step, rank)[1:], [rank])
    block_s = step.costs.block_mixer.block_s
    of_late_s = block_s(late[rank], late_start[rank], step.lengths[earlier], late_end[earlier], part=True)
    to_early_s = block_s(step.chunks[rank], early_start[rank], early[later], early_end[later])
    return np.concatenate([of_late_s, to_early_s])


RING = Strategy(
    name="ring",
    title="ring attention, K and V passed on",
    source="Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023 (arXiv:2310.01889)",
    partition_rule="even",
    layer=layer,
    passes_state=True,
    carries_prefix=True,
    merges_blocks=True,
)
STRIPED = replace(
    RING,
    name="striped",
    title="ring attention, every p-th token on a rank",
    source="Brandon et al., Striped Attention, 2023 (arXiv:2311.09431)",
    layer=striped_layer,
    passes_state=False,
)
ZIGZAG_RING = replace(
    STRIPED,
    name="zigzag-ring",
    title="ring attention, an early and a late piece per rank",
    source="Zhu, ring-flash-attention, 2024 (github.com/zhuzilin/ring-flash-attention), zigzag_ring_flash_attn",
    layer=zigzag_layer,
)
