"""Ulysses: tokens are split outside attention, heads inside attention, with an all-to-all before and after it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvrsim.kernels.tensor_parallel import heads_divide
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import ModelSpec
from kvrsim.program import AllToAll, Array, Compute, Op
from kvrsim.strategies.base import RealRun, Step, Strategy, StrategyWords


def layer(step: Step, rank: int) -> Iterator[Op]:
    """Project the chunk; exchange its tokens of all heads for all tokens of the rank's heads; attend; exchange back.

    Then compute the MLP. Data for other ranks are packed, and received data are unpacked; K and V are appended as they
    arrive.
    """
    ranks = step.num_ranks
    heads = step.costs.on_heads(ranks)
    share = heads.layer.mixer
    assert isinstance(share, Attention)
    queries = share.num_attention_heads * share.head_dim
    outputs = share.num_attention_heads * share.v_head_dim
    keys_values = share.num_key_value_heads * (share.head_dim + share.v_head_dim)
    chunk = step.chunks[rank]
    lengths = step.lengths
    others = (rank + np.arange(1, ranks)) % ranks
    total = lengths.sum(axis=0)
    yield step.qkv(rank)
    yield from _pack(step, (chunk, ranks * (queries + keys_values)))
    there = _all_to_all(step, np.repeat(chunk[None], ranks - 1, axis=0), queries + keys_values)
    # Bytes of a rank's share of the cached prefix, for the receiver's heads.
    shares = heads.mixer.cache_bytes(step.cached) * step.costs.setting.prefix.share
    yield there._replace(nbytes=there.nbytes + shares)
    context = step.cached + total
    yield from _pack(step, (total, queries))
    yield Compute(
        name="append",
        device_s=heads.mixer.append_s(total, step.cached),
        kv_bytes=heads.mixer.cache_bytes(context),
        kind="append",
    )
    yield Compute(
        name="attention",
        kind="attention",
        device_s=heads.mixer.attention_s(total, step.cached),
        host_s=heads.host_attention_s,
        kernels=heads.kernels.mixer,
        score_elements=heads.mixer.score_elements(total, context),
    )
    yield from _pack(step, (total, outputs))
    yield _all_to_all(step, lengths[others], outputs)
    yield from _pack(step, (chunk, ranks * outputs))
    yield step.output_mlp(rank)


def _pack(step: Step, what: tuple[Array, int]) -> Iterator[Compute]:
    """Copy tokens into or out of messages, if the profile counts such copies; what: tokens, and features per token."""
    if step.costs.packs:
        yield Compute(name="pack", device_s=step.costs.all_to_all_pack_s(*what), kind="merge")


def _all_to_all(step: Step, tokens: Array, features: int) -> AllToAll:
    """Send features of tokens to each other rank, the next rank first; tokens: shape (p - 1, B)."""
    return AllToAll(nbytes=step.costs.feature_bytes(tokens, features))


def refuses(model: ModelSpec, ranks: int) -> str | None:
    """Refuse ranks that cannot have equal numbers of heads; a KV head may be on several ranks."""
    for layer in model.layer_kinds:
        mixer = layer.mixer
        if mixer is None:
            continue
        if not isinstance(mixer, Attention) or mixer.is_sparse:
            return f"attention over K and V of heads in all layers; {model.name} has {mixer.title}"
        if not heads_divide(mixer, ranks):
            heads = f"{mixer.num_attention_heads} heads and {mixer.num_key_value_heads} KV heads"
            return f"ranks that the {heads} of {model.name} divide into"
    return None


ULYSSES = Strategy(
    name="ulysses",
    title="tokens exchanged for attention heads",
    source="Jacobs et al., DeepSpeed Ulysses, 2023 (arXiv:2309.14509)",
    partition_rule="even",
    layer=layer,
    carries_prefix=True,
    splits_heads=True,
    refuses=refuses,
    words=StrategyWords(
        each_rank="an even chunk outside attention, 1 / p of the heads inside it",
        communication="two all-to-alls in each layer: Q, K, V, and the output",
        holds="K and V of 1 / p of the heads, all weights",
    ),
    family="all-to-all",
    colour=("#18b4ad", "#7dcbc1"),
    usual_in=frozenset({"fleets"}),
    real_run=RealRun(
        "ulysses", "own_attention.Ulysses", cache="each rank holds the K and V of its own heads", decodes=False
    ),
)
