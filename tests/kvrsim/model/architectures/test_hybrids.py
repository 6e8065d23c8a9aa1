"""Linear attention and state-space models: parameters as transformers has them, layers, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibrate.reference import counted_parameters
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.load import read_config
from kvrsim.model.architectures.hybrids.kimi_linear import BLOCK_RESIDUALS
from kvrsim.model.architectures.routed import FURTHER_TOKENS
from kvrsim.model.mixers import Attention, LatentAttention, Recurrence
from tests.kvrsim.model.architectures.shapes import shapes, transformers_shapes
from tests.kvrsim.model.model_configs import load

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
CASES: list[dict[str, Any]] = [
    NEXT,
    {**NEXT, "mlp_only_layers": [0], "decoder_sparse_step": 2, "attention_bias": True, "tie_word_embeddings": True},
    {key: value for key, value in NEXT.items() if not key.startswith(("linear_", "shared_expert", "head_dim"))},
    {"model_type": "qwen3_5_text", **DELTA},
    {"model_type": "qwen3_5_text", **DELTA, "full_attention_interval": 2},
    {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **DELTA}, "tie_word_embeddings": True},
    {"model_type": "qwen3_5_moe_text", **{key: DELTA[key] for key in DELTA if key != "intermediate_size"}, **EXPERTS},
    {"model_type": "qwen3_5_moe_text", **{key: DELTA[key] for key in DELTA if "linear" not in key}, "num_experts": 16},
    HYBRID,
    {**HYBRID, "moe_latent_size": 20, "use_bias": True, "mlp_bias": True, "use_conv_bias": False},
    {**HYBRID, "hybrid_override_pattern": "M-*", "mlp_bias": True},
    {
        **{key: value for key, value in HYBRID.items() if key != "hybrid_override_pattern"},
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "num_nextn_predict_layers": 1,
    },
    KIMI,
    {**KIMI, "q_lora_rank": 28, "first_k_dense_replace": 2},
    {**KIMI, "linear_attn_config": {"head_dim": 8, "num_heads": 6, "short_conv_kernel_size": 4}},
    {**KIMI, "layer_types": ["full_attention", "linear_attention"] * 2, "mlp_layer_types": ["sparse", "dense"] * 2},
]
K3 = {
    **KIMI,
    "linear_attn_config": {**KIMI["linear_attn_config"], "use_full_rank_gate": True},
    "q_lora_rank": 28,
    "mla_use_output_gate": True,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "attn_res_block_size": 2,
}


@pytest.mark.parametrize("config", CASES, ids=[f"{case['model_type']}-{index}" for index, case in enumerate(CASES)])
def test_matrices_and_parameters_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    model = load(tmp_path, config)
    assert shapes(model) == transformers_shapes(config)
    assert model.num_parameters == counted_parameters(config)


def test_tokens_must_see_each_other() -> None:
    """A model of MLPs alone is no language model that a prompt could be prefilled with."""
    fields = {"model_type": "nemotron_h", "num_hidden_layers": 2, "hybrid_override_pattern": "--"}
    with pytest.raises(InputError, match="no layer with attention or a state"):
        read_config(JsonObject(fields=fields, where="test"), "test")


def test_what_kimi_k3_adds_to_kimi_linear(tmp_path: Path) -> None:
    """A full gate for a gate of rank head_dim, one on latent attention, experts in a latent, scored residuals."""
    before, after = load(tmp_path, {**KIMI, "q_lora_rank": 28}), load(tmp_path, K3)
    hidden, width, rank = 64, 48, 8
    gates = 3 * (hidden * width - (hidden * rank + rank * width)) + hidden * 40
    experts = 3 * (2 * hidden * 32 + 32 - 8 * 3 * (hidden - 32) * 24)
    residuals = (4 * 2 + 1) * 2 * hidden
    assert after.num_parameters - before.num_parameters == gates + experts + residuals
    assert after.approximations == (BLOCK_RESIDUALS,)
    assert before.approximations == ()
    latent = after.layers[-1].mixer
    assert isinstance(latent, LatentAttention)
    assert latent.gate
    assert not latent.rotary
    assert [gemm.in_features for gemm in after.layers[-1].mlp] == [32, 32, 24]


def test_layers_of_qwen3_next(tmp_path: Path) -> None:
    model = load(tmp_path, {**NEXT, "mtp_num_hidden_layers": 1})
    recurrent = [isinstance(layer.mixer, Recurrence) for layer in model.layers]
    assert recurrent == [True, True, True, False] * 2
    attention, delta = model.layers[3].mixer, model.layers[0].mixer
    assert isinstance(attention, Attention)
    assert attention.gate
    assert attention.projections[0].out_features == 2 * 4 * 16
    assert isinstance(delta, Recurrence)
    assert (delta.kind, delta.conv_channels, delta.conv_kernel) == ("gated_delta", 2 * 24 + 120, 3)
    assert delta.state_bytes(2) == 6 * 12 * 20 * 4 + 2 * 168 * 2
    assert [gemm.name for gemm in delta.projections] == ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"]
    names = [gemm.name for gemm in model.layers[0].shared_mlp]
    assert names[0] == "mlp.shared_expert.gate_proj"
    assert names[-1] == "shared_expert_gate"
    assert model.approximations == (FURTHER_TOKENS,)


def test_layers_of_nemotron_h(tmp_path: Path) -> None:
    """Each layer is a mixer or an MLP, with one norm; experts have no gate."""
    model = load(tmp_path, {**HYBRID, "moe_latent_size": 20})
    assert [type(layer.mixer).__name__ for layer in model.layers] == [
        *("Recurrence", "NoneType", "Recurrence", "Attention", "NoneType", "NoneType")
    ]
    assert [layer.num_blocks for layer in model.layers] == [1] * 6
    assert {layer.norms_before_mixer + layer.norms_after_mixer for layer in model.layers} == {1}
    experts = model.layers[1]
    assert (experts.num_experts, experts.num_experts_per_tok, experts.gated_mlp) == (8, 2, False)
    assert [(gemm.in_features, gemm.out_features) for gemm in experts.mlp] == [(20, 24), (24, 20)]
    assert [(gemm.in_features, gemm.out_features) for gemm in experts.shared_mlp] == [
        *((64, 20), (20, 64), (64, 40), (40, 64))
    ]
    mamba = model.layers[0].mixer
    assert isinstance(mamba, Recurrence)
    assert (mamba.kind, mamba.num_key_heads, mamba.num_value_heads, mamba.key_head_dim) == ("mamba2", 3, 6, 12)
    assert model.num_hidden_layers == 6


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**NEXT, "layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ({**NEXT, "attn_output_gate": False}, "attn_output_gate"),
        ({**NEXT, "linear_num_key_heads": 4}, "linear_num_key_heads"),
        ({**NEXT, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({**HYBRID, "hybrid_override_pattern": "MEX"}, "hybrid_override_pattern"),
        ({**HYBRID, "num_hidden_layers": 5}, "num_hidden_layers"),
        ({**HYBRID, "layers_block_type": ["mamba", "window"]}, "layers_block_type"),
        ({**HYBRID, "n_groups": 4}, "n_groups"),
        ({key: HYBRID[key] for key in HYBRID if key != "hybrid_override_pattern"}, "layers_block_type"),
        ({**KIMI, "moe_layer_freq": 2}, "moe_layer_freq"),
        (
            {**KIMI, "linear_attn_config": {**KIMI["linear_attn_config"], "kda_layers": [1, 2]}},
            "linear_attn_config.full_attn_layers",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_key(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, config)
    assert f"config.json: {key}: got" in str(caught.value)
    assert "\n" not in str(caught.value)
