"""Small configurations of each architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrsim.model.load import load_model
from kvrsim.model.spec import ModelSpec

FILE: dict[str, Any] = json.loads(Path(__file__).with_name("small_models.json").read_text("utf-8"))
DELTA, HYBRID, KIMI, LATENT, V4, M3 = (FILE[name] for name in ("delta", "hybrid", "kimi", "latent", "v4", "m3"))
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
LLAMA = {"model_type": "llama", **SMALL}
OPT = {"model_type": "opt", **SMALL, "ffn_dim": 96, "max_position_embeddings": 128, "word_embed_proj_dim": 64}

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
NEXT = {"model_type": "qwen3_next", **DELTA, **EXPERTS}
K3 = {
    **KIMI,
    "linear_attn_config": {**KIMI["linear_attn_config"], "use_full_rank_gate": True},
    "q_lora_rank": 28,
    "mla_use_output_gate": True,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "attn_res_block_size": 2,
}

V3 = {"model_type": "deepseek_v3", **LATENT, "n_group": 2, "topk_group": 1}
INDEXED = {**LATENT, "index_n_heads": 3, "index_head_dim": 16, "index_topk": 32, "n_group": 1, "topk_group": 1}
GLM = {"model_type": "glm_moe_dsa", **INDEXED}
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
