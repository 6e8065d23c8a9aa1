"""Tiny models of every kind that the runtime supports, as the keys of their config.json."""

from __future__ import annotations

from typing import Any

_TINY = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=101, max_position_embeddings=512)
_GATED = dict(**_TINY, intermediate_size=96, pad_token_id=None, bos_token_id=None, eos_token_id=None)
_FALCON = dict(**_TINY, model_type="falcon", bias=False, bos_token_id=None, eos_token_id=None)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-mha": dict(**_GATED, model_type="llama", num_key_value_heads=4),
    "llama-gqa": dict(**_GATED, model_type="llama", num_key_value_heads=2),
    "llama-mqa": dict(**_GATED, model_type="llama", num_key_value_heads=1),
    "qwen2": dict(**_GATED, model_type="qwen2", num_key_value_heads=2),
    "qwen3": dict(**_GATED, model_type="qwen3", num_key_value_heads=2, head_dim=24),
    "mistral": dict(**_GATED, model_type="mistral", num_key_value_heads=2, sliding_window=None),
    "falcon-mqa": dict(**_FALCON, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
    "falcon-grouped": dict(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-mha": dict(**_FALCON, multi_query=False, parallel_attn=False, new_decoder_architecture=False),
    "falcon-alibi": dict(**_FALCON, multi_query=False, parallel_attn=False, new_decoder_architecture=False, alibi=True),
    "falcon-mqa-alibi": dict(
        **_FALCON, multi_query=True, parallel_attn=True, new_decoder_architecture=False, alibi=True
    ),
}


def variants() -> list[tuple[str, str]]:
    """Every model with every kernel that it can run."""
    found = [(name, kernel) for name in CONFIGS for kernel in ("eager", "sdpa", "flash")]
    return [(name, kernel) for name, kernel in found if kernel != "flash" or "alibi" not in name]
