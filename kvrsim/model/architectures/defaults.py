"""What transformers takes where a config.json leaves a key out, for model types with many such keys.

Widths that every model states (hidden_size, num_hidden_layers, num_attention_heads, vocab_size) have none: without
them there is no model. The values are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvrsim.io.json_text import JsonObject

_DEEPSEEK = {
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GATED_DELTA = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
_INDEXER = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}

DEFAULTS: Mapping[str, Mapping[str, int | None]] = {
    "deepseek_v2": {
        **_DEEPSEEK,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, **_INDEXER},
    "glm_moe_dsa": {
        **_DEEPSEEK,
        **_INDEXER,
        "intermediate_size": 12288,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_n_heads": 32,
    },
    "deepseek_v4": {
        "moe_intermediate_size": 2048,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "num_experts_per_tok": 6,
        "n_routed_experts": 256,
        "hc_mult": 4,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
    },
    "kimi_linear": {
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_shared_experts": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "qwen3_next": {**_GATED_DELTA, "intermediate_size": 5632},
    "qwen3_5_text": {
        **{key: value for key, value in _GATED_DELTA.items() if "expert" not in key and "moe" not in key},
        "intermediate_size": 12288,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": {**_GATED_DELTA, "num_experts": 256, "num_experts_per_tok": 8},
    "nemotron_h": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
    },
    "minimax_m3_vl_text": {
        "intermediate_size": 3072,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
    },
}


def filled(config: JsonObject, model_type: str) -> JsonObject:
    """The configuration with the defaults of a model type for keys that it leaves out; null stays null."""
    return replace(config, fields={**DEFAULTS[model_type], **config.fields})
