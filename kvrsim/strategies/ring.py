"""Ring attention: the ranks' K and V go round while each attends to those that it holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvrsim.program.operations import Array, Op, RingPass
from kvrsim.strategies.base import Step, Strategy
from kvrsim.strategies.single import layer as alone


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project the chunk; attend to its own K, V while they go to the next rank, and so on round the ring; MLP.

    Blocks after the chunk are masked whole and skipped: the first rank works in one round, the last in all.
    """
    if step.num_ranks == 1:
        yield from alone(step, rank)
        return
    yield step.qkv(rank)
    yield step.append_kv(rank, prefix=step.cached)
    yield _pass_kv(step, rank, _blocks_s(step, rank))
    yield step.output_mlp(rank)


def _pass_kv(step: Step, rank: int, work_s: Array) -> RingPass:
    """Work on every rank's K, V, one after another, the own first, while they go round; work_s of shape (p, B)."""
    blocks = _blocks(step, rank)
    host_s, chunk = step.costs.host_attention_s, step.chunks[rank]
    most_keys = np.maximum(step.lengths.max(axis=0), step.cached + chunk)
    return RingPass(
        name="attention",
        device_s=work_s,
        nbytes=step.costs.kv_bytes(step.lengths[blocks[:-1]]),
        host_s=tuple(host_s if (one > 0).any() else 0.0 for one in work_s),
        overlaps=step.costs.sends_overlap,
        score_elements=step.costs.score_elements(chunk, most_keys),
    )


def _blocks(step: Step, rank: int) -> npt.NDArray[np.intp]:
    """Whose K, V a rank holds in each round of a ring: its own, then that of the rank before, and so on."""
    return (rank - np.arange(step.num_ranks)) % step.num_ranks


def _blocks_s(step: Step, rank: int) -> Array:
    """Attention of the chunk to each block in turn, shape (p, B)."""
    chunk, start, blocks = step.chunks[rank], step.starts[rank], _blocks(step, rank)
    before = (blocks < rank)[:, None]
    keys = step.lengths[blocks] * before
    ends = np.stack(list(step.starts))[blocks] + keys
    seconds = step.costs.block_attention_s(chunk, start, keys, np.where(before, ends, start))
    seconds[0] = step.costs.attention_s(chunk, step.cached)
    return seconds


def striped_layer(step: Step, rank: int) -> Iterator[Op]:
    """The same with every p-th token on a rank: each round is a causal half, for all ranks alike."""
    if step.num_ranks == 1:
        yield from alone(step, rank)
        return
    chunk = step.chunks[rank]
    yield step.qkv(rank)
    yield step.append_kv(rank, prefix=step.cached)
    half_s = step.costs.attention_s(chunk, np.zeros_like(chunk)) + step.costs.join_s(chunk)
    blocks_s = np.stack([step.costs.attention_s(chunk, step.cached), *[half_s] * (step.num_ranks - 1)])
    yield _pass_kv(step, rank, blocks_s)
    yield step.output_mlp(rank)


RING = Strategy(
    name="ring",
    title="ring attention, K and V passed on",
    source="Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023 (arXiv:2310.01889)",
    partition_rule="even",
    layer=layer,
    gathers_kv=False,
)
STRIPED = Strategy(
    name="striped",
    title="ring attention, every p-th token on a rank",
    source="Brandon et al., Striped Attention, 2023 (arXiv:2311.09431)",
    partition_rule="even",
    layer=striped_layer,
    gathers_kv=False,
)
