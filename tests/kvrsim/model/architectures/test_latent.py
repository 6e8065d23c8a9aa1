"""Latent, compressed and sparse attention: parameters as transformers has them, layers, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibrate.reference import counted_parameters
from kvrsim.errors import InputError
from kvrsim.model.architectures.latent.deepseek_v4 import HYPER
from kvrsim.model.architectures.latent.deepseek_v32 import SHARED_INDEXERS
from kvrsim.model.architectures.routed import FURTHER_TOKENS
from kvrsim.model.mixers import Attention, CompressedAttention, LatentAttention
from tests.kvrsim.model.architectures.shapes import shapes, transformers_shapes
from tests.kvrsim.model.model_configs import load

LATENT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 101,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
V3 = {"model_type": "deepseek_v3", **LATENT, "n_group": 2, "topk_group": 1}
INDEXED = {**LATENT, "index_n_heads": 3, "index_head_dim": 16, "index_topk": 32, "n_group": 1, "topk_group": 1}
GLM = {"model_type": "glm_moe_dsa", **INDEXED}
V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "vocab_size": 101,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "hc_mult": 3,
    "index_n_heads": 3,
    "index_head_dim": 16,
    "index_topk": 32,
    "compress_ratios": [0, 4, 128, 4, 0, 4],
}
M3: dict[str, Any] = {
    "model_type": "minimax_m3",
    "hidden_size": 64,
    "intermediate_size": 24,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_hidden_layers": 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 101,
    "moe_layer_freq": [0, 1, 1],
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_attention_freq": [0, 0, 1],
        "sparse_index_dim": 12,
        "sparse_num_index_heads": 2,
        "sparse_block_size": 8,
        "sparse_topk_blocks": 3,
    },
}
CASES: list[dict[str, Any]] = [
    {**V3, "attention_bias": True, "n_shared_experts": 3, "num_nextn_predict_layers": 1},
    {**V3, "q_lora_rank": None, "tie_word_embeddings": True},
    {**V3, "model_type": "kimi_k2", "first_k_dense_replace": 0},
    {**LATENT, "model_type": "deepseek_v2", "n_shared_experts": 1},
    {key: value for key, value in V3.items() if key not in ("q_lora_rank", "n_routed_experts", "v_head_dim")},
    {**INDEXED, "model_type": "deepseek_v32"},
    {**INDEXED, "model_type": "deepseek_v32", "mlp_layer_types": ["dense", "sparse"] * 3, "attention_bias": True},
    GLM,
    {**GLM, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    {**GLM, "index_topk_pattern": "FSSFSF"},
    {**GLM, "indexer_types": ["full", "shared", "shared", "shared", "full", "shared"], "index_topk_freq": 1},
    V4,
    {**V4, "num_hash_layers": 1, "hc_mult": 1, "tie_word_embeddings": True},
    {key: value for key, value in V4.items() if key not in ("compress_ratios", "moe_intermediate_size", "hc_mult")},
    {**V4, "layer_types": ["sliding_attention"] * 2 + ["heavily_compressed_attention"] * 3},
    M3,
    {**M3, "tie_word_embeddings": True, "moe_layer_freq": [1, 0, 1]},
    {"model_type": "minimax_m3_vl", "text_config": {key: M3[key] for key in M3 if key != "model_type"}},
]


@pytest.mark.parametrize("config", CASES, ids=[f"{case['model_type']}-{index}" for index, case in enumerate(CASES)])
def test_matrices_and_parameters_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    model = load(tmp_path, config)
    assert shapes(model) == transformers_shapes(config)
    assert model.num_parameters == counted_parameters(config)


def test_active_parameters_leave_out_the_other_experts(tmp_path: Path) -> None:
    model = load(tmp_path, V3)
    expert = 3 * 64 * 24
    assert model.num_parameters - model.active_parameters == 4 * (8 - 2) * expert


def test_layers_of_deepseek_v3(tmp_path: Path) -> None:
    model = load(tmp_path, V3)
    assert [layer.num_experts for layer in model.layers] == [0, 0, 8, 8, 8, 8]
    mixer = model.main_mixer
    assert isinstance(mixer, LatentAttention)
    assert (mixer.head_dim, mixer.v_head_dim, mixer.num_attention_heads, mixer.token_bytes(2)) == (20, 10, 4, 56)
    assert [gemm.name for gemm in mixer.projections] == ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]
    sparse = model.layers[-1]
    assert [gemm.name for gemm in sparse.shared_mlp][:1] == ["mlp.shared_experts.gate_proj"]
    assert sparse.gated_mlp
    assert model.approximations == ()
    assert load(tmp_path, {**V3, "num_nextn_predict_layers": 1}).approximations == (FURTHER_TOKENS,)


def test_shared_indexers(tmp_path: Path) -> None:
    """A shared indexer has neither matrices nor keys; FP8 keys have a scale for up to 128 elements."""
    model = load(tmp_path, {**GLM, "index_topk_pattern": "FSSFSF"})
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, LatentAttention)]
    indexers = [mixer.indexer for mixer in mixers]
    assert [indexer is not None and indexer.shared for indexer in indexers] == [False, True, True, False, True, False]
    own, shared = indexers[0], indexers[1]
    assert own is not None
    assert shared is not None
    assert (own.key_bytes, own.cached_bytes, shared.cached_bytes, shared.projections) == (20, 20, 0, ())
    assert SHARED_INDEXERS in model.approximations
    whole = load(tmp_path, {**GLM, "index_head_dim": 128})
    assert isinstance(whole.main_mixer, LatentAttention)
    assert whole.main_mixer.indexer is not None
    assert whole.main_mixer.indexer.key_bytes == 132
    assert whole.approximations == ()


def test_layers_of_deepseek_v4(tmp_path: Path) -> None:
    model = load(tmp_path, V4)
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, CompressedAttention)]
    assert [mixer.compress_ratio for mixer in mixers] == [0, 4, 128, 4, 0]
    assert [mixer.indexer is not None for mixer in mixers] == [False, True, False, True, False]
    grouped, back = mixers[0].output
    assert (grouped.groups, grouped.in_features, grouped.out_features, back.in_features) == (2, 128, 24, 24)
    assert model.approximations == (HYPER,)
    plain, streams = load(tmp_path, {**V4, "hc_mult": 1}).layers[0], model.layers[0]
    assert plain.norms_before_mixer < streams.norms_before_mixer


def test_layers_of_minimax_m3(tmp_path: Path) -> None:
    model = load(tmp_path, M3)
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
    indexer = mixers[2].indexer
    assert [mixer.indexer is not None for mixer in mixers] == [False, False, True]
    assert indexer is not None
    assert (indexer.top_k, indexer.block, indexer.num_heads, indexer.key_bytes) == (24, 8, 2, 24)
    assert [layer.num_experts for layer in model.layers] == [0, 8, 8]
    off = {**M3["sparse_attention_config"], "use_sparse_attention": False}
    assert all(
        isinstance(layer.mixer, Attention) and layer.mixer.indexer is None
        for layer in load(tmp_path, {**M3, "sparse_attention_config": off}).layers
    )


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**V3, "moe_layer_freq": 2}, "moe_layer_freq"),
        ({**V3, "kv_lora_rank": 0}, "kv_lora_rank"),
        ({**V3, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({**LATENT, "model_type": "deepseek_v2", "num_experts_per_tok": None}, "num_experts_per_tok"),
        ({**V3, "mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({**V3, "mlp_layer_types": ["dense"] * 5 + [3]}, "mlp_layer_types"),
        ({**GLM, "q_lora_rank": None}, "q_lora_rank"),
        ({**GLM, "indexer_types": ["shared"] * 6}, "indexer_types"),
        ({**GLM, "indexer_types": ["none"] * 6}, "indexer_types"),
        ({**GLM, "index_topk_pattern": "FSX"}, "index_topk_pattern"),
        ({**V4, "o_groups": 3}, "o_groups"),
        ({**V4, "num_key_value_heads": 2}, "num_key_value_heads"),
        ({**V4, "compress_ratios": [0, 4, 8, 4, 0]}, "compress_ratios"),
        ({**V4, "compress_ratios": [0, 4]}, "compress_ratios"),
        ({**V4, "n_shared_experts": 2}, "n_shared_experts"),
        ({**M3, "moe_layer_freq": [1, 1]}, "moe_layer_freq"),
        ({**M3, "moe_layer_freq": [1, 1, 2]}, "moe_layer_freq"),
        ({**M3, "attention_output_gate": True}, "attention_output_gate"),
        ({**M3, "use_qk_norm": False}, "use_qk_norm"),
        ({**M3, "qk_norm_type": "per_layer"}, "qk_norm_type"),
        ({**M3, "layer_types": ["linear_attention"] * 3}, "layer_types"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_key(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, config)
    assert f"config.json: {key}: got" in str(caught.value)
    assert "\n" not in str(caught.value)
