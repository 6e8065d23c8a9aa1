"""Families: where the architectures of Hugging Face models keep their parts, and what their layers keep of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvrsim.errors import InputError
from kvrsim.runtime.kept.layers import KeptState


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Where an architecture keeps its parts."""

    layers: str = "layers"  # the decoder layers, an attribute of the base model
    norm: str = "norm"  # after the last layer, another
    # A layer's mixers, attributes of the layer, each with the attribute that projects its output. A layer has one.
    mixers: tuple[tuple[str, str], ...] = (("self_attn", "o_proj"),)
    is_latent: bool = False  # whether attention keeps a latent (kv_lora_rank, qk_rope_head_dim) in place of K and V
    state: Callable[[Any], KeptState] | None = None  # of recurrent layers, from the config; None: it has none
    query_blocks: bool = True  # whether its attention may be called for some queries at a time
    eager_only: str | None = None  # why transformers computes its attention with "eager" alone


def _gated_delta_state(config: Any) -> KeptState:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return KeptState(
        recurrent=(config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim),
        conv_channels=2 * keys + values,
        conv_tokens=config.linear_conv_kernel_dim - 1,
    )


def _kimi_delta_state(config: Any) -> KeptState:
    heads, dim = config.linear_num_heads, config.linear_head_dim
    return KeptState(
        recurrent=(heads, dim, dim), conv_channels=3 * heads * dim, conv_tokens=config.linear_conv_kernel_dim - 1
    )


def _mamba2_state(config: Any) -> KeptState:
    heads, dim, states = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
    return KeptState(
        recurrent=(heads, dim, states),
        conv_channels=heads * dim + 2 * config.n_groups * states,
        conv_tokens=config.conv_kernel - 1,
        least_chunk=2,  # transformers computes a single token behind a state without time_step_min
    )


_LLAMA_LIKE = Family()
_LATENT = Family(is_latent=True, query_blocks=False)
_GATED_DELTA = Family(mixers=(("self_attn", "o_proj"), ("linear_attn", "out_proj")), state=_gated_delta_state)
FAMILIES = {
    "falcon": Family(layers="h", norm="ln_f", mixers=(("self_attention", "dense"),)),
    **dict.fromkeys(("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"), _LLAMA_LIKE),
    "gemma2": Family(eager_only="it caps the scores of its attention"),
    # Mixtures of experts.
    **dict.fromkeys(("glm4_moe", "minimax_m2", "mixtral", "qwen2_moe", "qwen3_moe"), _LLAMA_LIKE),
    "gpt_oss": Family(query_blocks=False, eager_only="each head's softmax has a sink"),
    # Multi-head latent attention.
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    # Recurrent layers beside attention.
    "kimi_linear": Family(is_latent=True, query_blocks=False, state=_kimi_delta_state),
    "nemotron_h": Family(norm="norm_f", mixers=(("mixer", "o_proj"), ("mixer", "out_proj")), state=_mamba2_state),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _GATED_DELTA),
}
# Why the runtime does not run what looks close to what it runs.
_REFUSED = {
    "deepseek_v32": "its layers also keep keys of an indexer",
    "deepseek_v4": "its layers keep compressed entries in place of tokens",
    "glm_moe_dsa": "its layers also keep keys of an indexer",
    "llama4_text": "its attention begins anew with each chunk of tokens",
}


def family_of(model_type: str, argument: str = "model") -> Family:
    """Where the architecture keeps its parts; raises InputError where the runtime does not know it."""
    if model_type not in FAMILIES:
        accepted = f"an architecture that the runtime supports: {', '.join(sorted(FAMILIES))}"
        if model_type in _REFUSED:
            accepted += f". {model_type} is not one of them: {_REFUSED[model_type]}"
        raise InputError(f"{argument}: model_type", model_type, accepted)
    return FAMILIES[model_type]


def check_kernel(model_type: str, attention: str) -> None:
    """Raise InputError where the runtime does not run the architecture, or not with this attention kernel."""
    reason = family_of(model_type).eager_only
    if reason is not None and attention != "eager":
        raise InputError("attention", attention, f"eager for {model_type}: {reason}, which other kernels leave out")
