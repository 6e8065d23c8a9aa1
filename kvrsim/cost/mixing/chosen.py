"""sparse_call: what attention to chosen keys covers, for mixers that have an indexer or compress their keys."""

from __future__ import annotations

from kvrsim.model.mixers import Attention, CompressedAttention, LatentAttention
from kvrsim.profile.rates.sparse import SparseCall
from kvrsim.program import Array

SparseMixer = Attention | LatentAttention | CompressedAttention


def sparse_call(mixer: SparseMixer, chunk: Array, prefix: Array) -> SparseCall:
    """The call between a mixer's products; heads attend to the latents themselves, where there are latents.

    A layer that takes an earlier layer's choice scores nothing.
    """
    indexer = mixer.indexer
    if isinstance(mixer, LatentAttention):
        head_dim, v_head_dim = mixer.kv_lora_rank + mixer.qk_rope_head_dim, mixer.kv_lora_rank
    else:
        head_dim, v_head_dim = mixer.head_dim, mixer.v_head_dim
    ratio = mixer.compress_ratio if isinstance(mixer, CompressedAttention) else 1
    top_k = None if indexer is None else indexer.top_k
    scores = indexer if indexer is not None and not indexer.shared else None
    return SparseCall(
        chunk=chunk,
        prefix=prefix,
        num_attention_heads=mixer.num_attention_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        top_k=top_k if ratio else 0,  # nothing but the window
        window=mixer.sliding_window if isinstance(mixer, CompressedAttention) else 0,
        compress_ratio=ratio or 1,
        block=1 if indexer is None else indexer.block,
        index_heads=0 if scores is None else scores.num_heads,
        index_head_dim=0 if scores is None else scores.head_dim,
    )
