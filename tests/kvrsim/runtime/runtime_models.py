"""Tiny models of every kind that the runtime supports; each has the keys of its config.json."""

from __future__ import annotations

from typing import Any

# With large weights, the first token depends on the whole context.
_TINY = dict(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=101, max_position_embeddings=512,
    initializer_range=0.2,
)  # fmt: skip
_GATED = dict(**_TINY, intermediate_size=96, pad_token_id=None, bos_token_id=None, eos_token_id=None)
_GROUPED = dict(**_GATED, num_key_value_heads=2, head_dim=16)
_WINDOWS = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1)
_LATENT = dict(
    **_GATED, **_EXPERTS, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, v_head_dim=12,
    qk_rope_head_dim=8, n_routed_experts=4, first_k_dense_replace=1, n_shared_experts=1,
)  # fmt: skip
_STATES = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
_FALCON = dict(**_TINY, model_type="falcon", bias=False, bos_token_id=None, eos_token_id=None)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-mha": dict(**_GATED, model_type="llama", num_key_value_heads=4),
    "llama-gqa": dict(**_GATED, model_type="llama", num_key_value_heads=2),
    "llama-mqa": dict(**_GATED, model_type="llama", num_key_value_heads=1),
    "qwen3": dict(**_GATED, model_type="qwen3", num_key_value_heads=2, head_dim=24),
    "falcon-mqa": dict(**_FALCON, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
    "falcon-grouped": dict(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-alibi": dict(**_FALCON, multi_query=False, parallel_attn=False, new_decoder_architecture=False, alibi=True),
}


# Models with experts, or with layers that keep something other than K and V of all tokens.
KINDS: dict[str, dict[str, Any]] = {
    "mistral-window": dict(**_GATED, model_type="mistral", num_key_value_heads=2, sliding_window=6),
    "mistral-wide": dict(**_GATED, model_type="mistral", num_key_value_heads=2, sliding_window=4096),
    "qwen2-window": dict(
        **_GATED, model_type="qwen2", num_key_value_heads=2, use_sliding_window=True, sliding_window=6,
        max_window_layers=1,
    ),
    "gemma2": dict(**_GROUPED, model_type="gemma2", **_WINDOWS),
    "gemma3": dict(**_GROUPED, model_type="gemma3_text", **_WINDOWS),
    "gpt_oss": dict(
        **_GROUPED, model_type="gpt_oss", **_WINDOWS, num_local_experts=4, num_experts_per_tok=2,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    "mixtral": dict(**_GATED, model_type="mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(
        **_GATED, **_EXPERTS, model_type="qwen2_moe", num_key_value_heads=2, num_experts=4,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_moe": dict(**_GROUPED, **_EXPERTS, model_type="qwen3_moe", num_experts=4),
    "glm4_moe": dict(
        **_GROUPED, **_EXPERTS, model_type="glm4_moe", n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1
    ),
    "minimax_m2": dict(**_GROUPED, model_type="minimax_m2", num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": dict(**_LATENT, model_type="deepseek_v2"),
    "deepseek_v3": dict(**_LATENT, model_type="deepseek_v3"),
    "kimi_linear": dict(
        **_GATED, model_type="kimi_linear", num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None,
        qk_nope_head_dim=16, v_head_dim=12, qk_rope_head_dim=8, num_experts=4, num_experts_per_token=2,
        moe_intermediate_size=32, num_shared_experts=1, num_expert_group=1, topk_group=1, linear_num_heads=4,
        linear_head_dim=16, layer_types=_STATES["layer_types"],
    ),
    "qwen3_next": dict(
        **_GROUPED, **_EXPERTS, **_STATES, model_type="qwen3_next", num_experts=4, shared_expert_intermediate_size=32
    ),
    "qwen3_5": dict(**_GROUPED, **_STATES, model_type="qwen3_5_text"),
    "qwen3_5_moe": dict(
        **_GROUPED, **_EXPERTS, **_STATES, model_type="qwen3_5_moe_text", num_experts=4,
        shared_expert_intermediate_size=32,
    ),
    "nemotron_h": dict(
        **_GROUPED | dict(num_hidden_layers=5), **_EXPERTS, model_type="nemotron_h", hybrid_override_pattern="M*-ME",
        mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=16, n_groups=2, n_routed_experts=4,
        moe_shared_expert_intermediate_size=32,
    ),
}  # fmt: skip
EAGER_ONLY = ("gemma2", "gpt_oss")


def kernels_of(name: str) -> list[str]:
    """The attention kernels that can run a model."""
    if name in EAGER_ONLY:
        return ["eager"]
    if "alibi" in name:
        return ["eager", "sdpa"]
    return ["eager", "sdpa", "flash"]
