"""What attention to chosen keys covers, for each kind of mixer that has it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvrsim.kernels.sparse import sparse_call
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Attention, CompressedAttention, Indexer, LatentAttention

CHUNK, PREFIX = np.array([1000.0]), np.array([8000.0])
INDEXER = Indexer(num_heads=4, head_dim=128, top_k=2048)
ONE = (Gemm(name="q", in_features=8, out_features=8),)
LATENT = LatentAttention(
    projections=ONE,
    expand=ONE[0],
    output=ONE,
    num_attention_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    indexer=INDEXER,
)
COMPRESSED = CompressedAttention(
    projections=ONE,
    output=ONE,
    num_attention_heads=16,
    head_dim=512,
    rotary_dim=64,
    sliding_window=128,
    compress_ratio=4,
    indexer=INDEXER,
)


def test_latents_are_keys_and_values() -> None:
    call = sparse_call(LATENT, CHUNK, PREFIX)
    assert (call.head_dim, call.v_head_dim, call.num_attention_heads) == (576, 512, 16)
    assert (call.top_k, call.index_heads, call.index_head_dim, call.block) == (2048, 4, 128, 1)
    assert (call.attended, call.chooses) == (2048, 1)


def test_a_layer_that_takes_another_s_choice_scores_nothing() -> None:
    call = sparse_call(replace(LATENT, indexer=replace(INDEXER, shared=True)), CHUNK, PREFIX)
    assert (call.attended, call.chooses, call.score_flops) == (2048, 0, 0)


def test_entries_and_the_window() -> None:
    call = sparse_call(COMPRESSED, CHUNK, PREFIX)
    assert (call.keys, call.attended) == (2250, 128 + 2048)
    every = sparse_call(replace(COMPRESSED, compress_ratio=128, indexer=None), CHUNK, PREFIX)
    assert (every.attended, every.chooses) == (128 + 9000 / 128, 0)
    window = sparse_call(replace(COMPRESSED, compress_ratio=0, indexer=None), CHUNK, PREFIX)
    assert (window.attended, window.chooses) == (128, 0)


def test_blocks_are_chosen_of_keys_of_heads() -> None:
    mixer = Attention(
        projections=ONE,
        output=ONE,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        v_head_dim=128,
        indexer=replace(INDEXER, block=128),
    )
    call = sparse_call(mixer, CHUNK, PREFIX)
    assert (call.block, call.head_dim, call.v_head_dim, call.attended) == (128, 128, 128, 2048)
