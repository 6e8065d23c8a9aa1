"""Ring attention: K and V go round the ranks while each rank attends to those it holds; plain, striped, zigzag."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvrsim.kernels.elementwise import UPCAST_KERNELS
from kvrsim.model.mixers import Attention, LatentAttention
from kvrsim.program import AllToAll, Array, Compute, Flags, Op, RingPass
from kvrsim.strategies.base import OWN_TOKENS, RealRun, Step, Strategy, StrategyWords

Ranks = npt.NDArray[np.intp]
_LOG_SUM_ELEMENTS = 2  # elements of half precision that take the bytes of a number in fp32
SecondsTo = Callable[[int, Ranks], Array]  # seconds of attention of a rank to the blocks of other ranks


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
    merged at once. With the access pass-q, the queries of each chunk go round the ring instead, and results return in
    an all-to-all. Each round takes as long as with K and V: strategies with this access have rounds of equal work.
    """
    costs = step.costs
    mixer = costs.block_mixer
    chunk = step.chunks[rank]
    cast_s = _of_chunk(step, "cast", lambda: mixer.upcast_s(chunk))
    own_s = _of_chunk(step, "own", lambda: mixer.attention_s(chunk, step.held_prefix)) + cast_s
    num_calls = calls.astype(float)
    if costs.setting.prefix.share:
        to_share_s = mixer.share_s(chunk, step.starts[rank])
        merged_s = np.where((to_share_s > 0) & ~calls[:, None], mixer.merge_s(chunk), 0.0)
        blocks_s = blocks_s + to_share_s + merged_s
        num_calls = num_calls + 1.0
    merges = (num_calls > 0).astype(float)
    kernels = num_calls * mixer.block_kernels + merges * mixer.merge_kernels
    work_s = np.concatenate([np.broadcast_to(own_s, blocks_s[:1].shape), blocks_s])
    most_keys = None if step.times_only else np.maximum(step.lengths.max(axis=0), step.held_prefix + chunk)
    queries_pass = costs.setting.prefix.access == "pass-q"
    yield RingPass(
        name="attention",
        device_s=work_s,
        nbytes=_query_bytes(step, rank) if queries_pass else _sent_bytes(step, rank),
        host_s=(costs.host_attention_s, *(merges * costs.host_attention_s).tolist()),
        kernels=(costs.kernels.mixer + UPCAST_KERNELS, *kernels.tolist()),
        overlaps=costs.setting.sends_overlap,
        message_share=costs.setting.message_share,
        score_elements=None if most_keys is None else costs.mixer.score_elements(chunk, most_keys),
        payload="heads" if queries_pass else "KV",
    )
    if queries_pass:
        yield _return_results(step, rank)
    yield Compute(name="cast", device_s=cast_s, kernels=UPCAST_KERNELS, kind="merge")


def owners(step: Step, rank: int) -> npt.NDArray[np.intp]:
    """Owner of the K and V that a rank holds in each round: the rank itself, then the previous rank, and so on."""
    return (rank - np.arange(step.num_ranks)) % step.num_ranks


def _of_chunk(step: Step, name: str, seconds_of: Callable[[], Array]) -> Array:
    """Seconds that depend only on the length of a rank's chunk; computed once if all chunks are equal."""
    return step.of_any_rank(name, seconds_of) if step.has_equal_chunks else seconds_of()


def _sent_bytes(step: Step, rank: int) -> Array:
    """Bytes of the piece that a rank holds in each round but the last, shape (p - 1, B)."""
    if step.has_equal_chunks:
        return np.broadcast_to(step.piece_bytes[:1], (step.num_ranks - 1, *step.piece_bytes.shape[1:]))
    return step.piece_bytes[owners(step, rank)[:-1]]


def _query_bytes(step: Step, rank: int) -> Array:
    """Bytes of the queries that a rank holds in each round but the last, shape (p - 1, B)."""
    mixer = step.costs.mixer.mixer
    assert isinstance(mixer, Attention | LatentAttention)  # others pass K and V, see supported_prefix_access
    return step.costs.feature_bytes(step.lengths[owners(step, rank)[:-1]], mixer.num_attention_heads * mixer.head_dim)


def _return_results(step: Step, rank: int) -> AllToAll:
    """Return the results of the other ranks' queries, each with the logarithm of its sum of exponentials in fp32."""
    mixer = step.costs.mixer.mixer
    assert isinstance(mixer, Attention | LatentAttention)  # others pass K and V, see supported_prefix_access
    others = step.lengths_twice[rank + 1 : rank + step.num_ranks]
    features = mixer.num_attention_heads * (mixer.v_head_dim + _LOG_SUM_ELEMENTS)
    return AllToAll(nbytes=step.costs.feature_bytes(others, features))


def _blocks_s(step: Step, rank: int) -> Array:
    """Seconds of attention of the chunk to each other rank's block in turn; later ranks' blocks take no time."""

    def earlier_s(rank: int, others: Ranks) -> Array:
        keys = step.lengths[others]
        return step.costs.block_mixer.block_s(step.chunks[rank], step.starts[rank], keys, step.begins[others] + keys)

    return _in_turn(step, rank, earlier_s, lambda _, others: np.zeros_like(step.lengths[others]))


def _in_turn(step: Step, rank: int, earlier_s: SecondsTo, later_s: SecondsTo) -> Array:
    """Seconds of attention to the other ranks' blocks in turn: earlier ranks', then later ranks', shape (p - 1, B).

    With equal chunks, the seconds depend only on the distance of the ranks: they are computed once, for the last rank,
    which has only earlier ranks, and for the first, which has only later ones.
    """
    others = owners(step, rank)[1:]
    if not step.has_equal_chunks:
        return np.concatenate([earlier_s(rank, others[:rank]), later_s(rank, others[rank:])])
    first = 0
    last = step.num_ranks - 1
    of_earlier_s = step.of_any_rank("earlier", lambda: earlier_s(last, owners(step, last)[1:]))
    of_later_s = step.of_any_rank("later", lambda: later_s(first, owners(step, first)[1:]))
    return np.concatenate([of_earlier_s[:rank], of_later_s[rank:]])


def striped_layer(step: Step, rank: int) -> Iterator[Op]:
    """A ring layer with every p-th token on one rank: each round is a causal half, equal for all ranks.

    In the stripe of a later rank, a query sees one key less; the first query sees none and is left out.
    """
    chunk = step.chunks[rank]
    yield step.qkv(rank)
    yield step.append_kv(rank, prefix=step.held_prefix)
    mixer = step.costs.block_mixer
    half_s = _of_chunk(step, "half", lambda: step.costs.mixer.attention_s(chunk, np.zeros_like(chunk)))
    later = (owners(step, rank)[1:] > rank)[:, None]
    part_s = _of_chunk(step, "merge of a part", lambda: mixer.merge_s(chunk, part=True))
    merges_s = np.where(later, part_s, _of_chunk(step, "merge", lambda: mixer.merge_s(chunk)))
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
    block_s = step.costs.block_mixer.block_s

    def earlier_s(rank: int, others: Ranks) -> Array:
        return block_s(late[rank], late_start[rank], step.lengths[others], late_end[others], part=True)

    def later_s(rank: int, others: Ranks) -> Array:
        return block_s(step.chunks[rank], early_start[rank], early[others], early_end[others])

    return _in_turn(step, rank, earlier_s, later_s)


RING = Strategy(
    name="ring",
    title="ring attention over even chunks",
    source="Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023 (arXiv:2310.01889)",
    partition_rule="even",
    layer=layer,
    passes_state=True,
    carries_prefix=True,
    merges_blocks=True,
    words=StrategyWords(
        each_rank="an even chunk; attends to one block of K and V after another",
        communication="a block of K and V to the next rank in each of p - 1 rounds, in each layer",
        holds="K and V of its chunk, all weights",
    ),
    family="rings",
    colour=("#bd7dfe", "#e5bafc"),
    usual_in=frozenset({"fleets", "maps"}),
    real_run=RealRun("ring", "own_attention.RingAttention", cache=OWN_TOKENS, decodes=False),
)
STRIPED = replace(
    RING,
    name="striped",
    title="ring attention, every N-th token",
    source="Brandon et al., Striped Attention, 2023 (arXiv:2311.09431)",
    layer=striped_layer,
    passes_state=False,
    passes_queries=True,
    words=StrategyWords(
        each_rank="every p-th token; attends to one block of K and V after another",
        communication="a block of K and V to the next rank in each of p - 1 rounds, in each layer",
        holds="K and V of its tokens, all weights",
    ),
    colour=("#a67dd7", "#c9adfe"),
    usual_in=frozenset({"fleets"}),
    real_run=RealRun("striped", "own_attention.StripedRing", cache=OWN_TOKENS, decodes=False),
)
ZIGZAG_RING = replace(
    STRIPED,
    name="zigzag-ring",
    title="ring attention, early and late pieces",
    source="Zhu, ring-flash-attention, 2024 (github.com/zhuzilin/ring-flash-attention), zigzag_ring_flash_attn",
    layer=zigzag_layer,
    words=StrategyWords(
        each_rank="an early and a late piece; attends to one block of K and V after another",
        communication="a block of K and V to the next rank in each of p - 1 rounds, in each layer",
        holds="K and V of its pieces, all weights",
    ),
    colour=("#d083e9", "#fecbf8"),
    usual_in=frozenset({"hybrids", "fleets"}),
    real_run=RealRun("zigzag_ring", "own_attention.ZigzagRing", cache=OWN_TOKENS, decodes=False),
)
