"""Small configurations of each architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrsim.model.load import load_model
from kvrsim.model.spec import ModelSpec

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 101,
}
GQA = {**SMALL, "num_key_value_heads": 2}
MOE = {**GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OF_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
FALCON = {key: SMALL[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")}
FALCON |= {"model_type": "falcon", "num_hidden_layers": 3}
LLAMA = {"model_type": "llama", **SMALL}
GPTJ = {"model_type": "gptj", "n_embd": 64, "n_head": 4, "n_layer": 8, "vocab_size": 101, "n_positions": 128}
BLOOM = {"model_type": "bloom", "vocab_size": 101}
OPT = {"model_type": "opt", **SMALL, "ffn_dim": 96, "max_position_embeddings": 128, "word_embed_proj_dim": 64}

DELTA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 8,
    "vocab_size": 101,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
NEXT = {"model_type": "qwen3_next", **DELTA, **EXPERTS}
HYBRID: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "hybrid_override_pattern": "MEM*-E",
    "ssm_state_size": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 3,
    "conv_kernel": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 101,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "pad_token_id": 0,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "head_dim": 8,
        "num_heads": 6,
        "short_conv_kernel_size": 3,
    },
}
K3 = {
    **KIMI,
    "linear_attn_config": {**KIMI["linear_attn_config"], "use_full_rank_gate": True},
    "q_lora_rank": 28,
    "mla_use_output_gate": True,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "attn_res_block_size": 2,
}


LATENT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
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
ROUTED = {**GQA, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
LLAMA4 = {
    **GQA,
    "model_type": "llama4_text",
    "head_dim": 16,
    "intermediate_size_mlp": 160,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 4,
    "attention_chunk_size": 32,
}
GEMMA4 = {
    **GQA,
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 8,
}
GEMMA4_MOE = {**GEMMA4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}
MIMO = {**ROUTED, "model_type": "mimo_v2_flash", "head_dim": 24, "v_head_dim": 16, "sliding_window": 8}
STEP = {**ROUTED, "model_type": "step3p7", "sliding_window": 8, "share_expert_dim": 40}
STEP |= {"layer_types": ["full_attention", *["sliding_attention"] * 3] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {**GQA, "model_type": "cohere", "use_qk_norm": True},
    "cohere2": {**GQA, "model_type": "cohere2", "sliding_window": 8},
    "gemma4": GEMMA4,
    "gemma4 with experts": GEMMA4_MOE,
    "gemma4 with values": {**GEMMA4, "attention_k_eq_v": False},
    "glm": {**GQA, "model_type": "glm", "head_dim": 16, "pad_token_id": 0},
    "glm4": {**GQA, "model_type": "glm4", "head_dim": 16, "pad_token_id": 0},
    "glm4_moe": {**ROUTED, "model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": True},
    "llama4": LLAMA4,
    "mimo": MIMO,
    "mimo of 2025": {**GQA, "model_type": "mimo"},
    "minimax_m2": {**GQA, "model_type": "minimax_m2", "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "olmo2": {**GQA, "model_type": "olmo2", "attention_bias": True},
    "olmo3": {**GQA, "model_type": "olmo3"},
    "qwen3_vl": {**GQA, "model_type": "qwen3_vl_text", "head_dim": 16},
    "step3p7": STEP,
    "step3p7 with more heads": {**STEP, "num_sliding_attention_heads": 6},
}


def load(folder: Path, config: object) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder)
