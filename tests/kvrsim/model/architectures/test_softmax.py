"""Families with softmax attention: parameters and matrices as transformers has them, layers, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibrate.reference import counted_parameters
from kvrsim.errors import InputError
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import LayerSpec
from tests.kvrsim.model.architectures.shapes import shapes, transformers_shapes
from tests.kvrsim.model.model_configs import GQA, SMALL, load

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
    "num_hidden_layers": 12,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 8,
}
GEMMA4_MOE = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
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


# Norms of queries and keys with a row for each head; gate and projection in one matrix; experts the other way round.
OTHER_SHAPES = ("cohere", "glm", "glm4", "llama4")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_that_transformers_counts(tmp_path: Path, family: str) -> None:
    config = FAMILIES[family]
    model = load(tmp_path, config)
    assert model.num_parameters == counted_parameters(config)
    if family not in OTHER_SHAPES:
        assert shapes(model) == transformers_shapes(config)


def test_gpt2_has_learned_positions(tmp_path: Path) -> None:
    """transformers has its matrices the other way round."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 101, "n_positions": 32}
    model = load(tmp_path, config)
    assert model.num_parameters == counted_parameters(config)
    assert (model.learned_positions, model.tie_word_embeddings, model.rotary) == (32, True, False)
    with pytest.raises(InputError, match="add_cross_attention"):
        load(tmp_path, {**config, "add_cross_attention": True})


def attentions(layers: tuple[LayerSpec, ...]) -> list[Attention]:
    return [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]


def test_llama_4_sees_chunks_and_every_fourth_layer_all(tmp_path: Path) -> None:
    model = load(tmp_path, LLAMA4)
    found = [(mixer.attention_chunk, mixer.rotary, mixer.qk_norm) for mixer in attentions(model.layers)]
    assert found == [*[(32, True, True)] * 3, (None, False, False)] * 2
    assert [layer.num_experts for layer in model.layers] == [0, 4] * 4
    assert [gemm.out_features for gemm in model.layers[0].mlp] == [160, 160, 64]
    assert [gemm.out_features for gemm in model.layers[1].shared_mlp] == [96, 96, 64]
    flags = load(tmp_path, {**LLAMA4, "no_rope_layers": [0] * 8, "moe_layers": [7]})
    assert {mixer.attention_chunk for mixer in attentions(flags.layers)} == {None}
    assert [layer.num_experts for layer in flags.layers] == [*[0] * 7, 4]


def test_gemma_4_has_wide_heads_and_shared_keys_in_every_sixth_layer(tmp_path: Path) -> None:
    near, far = attentions(load(tmp_path, GEMMA4).layer_kinds)
    assert (near.head_dim, near.num_key_value_heads, near.sliding_window, len(near.projections)) == (16, 2, 8, 3)
    assert (far.head_dim, far.num_key_value_heads, far.sliding_window, len(far.projections)) == (32, 1, None, 2)
    sparse = load(tmp_path, GEMMA4_MOE).layers[0]
    assert [gemm.name for gemm in sparse.shared_mlp] == ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert (sparse.num_experts, sparse.num_experts_per_tok, sparse.norms_after_mixer) == (8, 2, 6)


def test_mimo_has_narrow_values_and_sinks_in_its_windows(tmp_path: Path) -> None:
    config = {**MIMO, "hybrid_layer_pattern": [0, 1] * 4, "moe_layer_freq": [0, *[1] * 7], "sliding_window_size": 8}
    model = load(tmp_path, {**config, "swa_num_key_value_heads": 4})
    full, near = attentions(model.layers[1:3])[::-1]
    assert (full.head_dim, full.v_head_dim, full.num_key_value_heads, full.sliding_window) == (24, 16, 2, None)
    assert (near.head_dim, near.v_head_dim, near.num_key_value_heads, near.sliding_window) == (24, 16, 4, 9)
    assert model.layers[1].other_parameters - model.layers[2].other_parameters == 4
    assert [layer.num_experts for layer in model.layers] == [0, *[8] * 7]
    assert full.token_bytes(2) == 2 * 2 * (24 + 16)


def test_step_gates_each_head_and_takes_its_experts_from_a_list(tmp_path: Path) -> None:
    setting = {"attention_other_setting": {"num_attention_heads": 8}, "moe_layers_enum": "1, 7"}
    model = load(tmp_path, {**STEP, **setting})
    full, near = attentions(model.layers[:2])
    assert (full.num_attention_heads, near.num_attention_heads, full.gate) == (4, 8, True)
    assert [mixer.projections[-1].out_features for mixer in (full, near)] == [4, 8]
    assert [layer.num_experts > 0 for layer in model.layers] == [False, True, *[False] * 5, True]
    assert [layer.num_experts > 0 for layer in load(tmp_path, STEP).layers] == [False] * 3 + [True] * 5


def test_nemotron_of_architecture_search_has_layers_of_their_own(tmp_path: Path) -> None:
    """An MLP is 2/3 of ffn_mult hidden sizes wide, rounded up to a multiple of 256; a block may lack."""
    blocks = [
        {"attention": {"n_heads_in_group": 2, "no_op": False}, "ffn": {"ffn_mult": 10.5, "no_op": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 0.1, "no_op": False}},
        {"attention": {"n_heads_in_group": 4, "window_length": 16}, "ffn": {"no_op": True}},
    ]
    config = {**SMALL, "model_type": "nemotron-nas", "num_hidden_layers": 3, "block_configs": blocks}
    model = load(tmp_path, config)
    first, second, third = model.layers
    assert [gemm.out_features for gemm in (*first.mlp, *second.mlp)] == [512, 512, 64, 256, 256, 64]
    assert second.mixer is None
    assert third.mlp == ()
    assert [(mixer.num_key_value_heads, mixer.sliding_window) for mixer in attentions(model.layers)] == [
        (2, None),
        (1, 16),
    ]
    matrices = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 512 + 3 * 64 * 256 + 2 * 64 * 64 + 2 * 64 * 16
    assert model.num_parameters == matrices + 4 * 64 + 2 * 101 * 64 + 64


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**GEMMA4, "hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ({**GEMMA4, "num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({**GEMMA4, "num_global_key_value_heads": 3}, "num_global_key_value_heads"),
        ({**GEMMA4_MOE, "top_k_experts": 9}, "top_k_experts"),
        ({**LLAMA4, "no_rope_layers": [1, 2]}, "no_rope_layers"),
        ({**LLAMA4, "moe_layers": ["1"]}, "moe_layers"),
        ({**LLAMA4, "layer_types": ["sliding_attention"] * 8}, "layer_types[0]"),
        ({**MIMO, "hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern"),
        ({**MIMO, "moe_layer_freq": [2] * 8}, "moe_layer_freq[0]"),
        ({**MIMO, "swa_num_key_value_heads": 3}, "swa_num_key_value_heads"),
        ({**MIMO, "n_shared_experts": 1}, "n_shared_experts"),
        ({**STEP, "moe_layers_enum": "1,x"}, "moe_layers_enum"),
        ({**STEP, "moe_layers_enum": "9" * 6000}, "moe_layers_enum"),
        ({**STEP, "num_sliding_attention_heads": 5}, "num_sliding_attention_heads"),
        ({**FAMILIES["minimax_m2"], "attn_type_list": [0] * 8}, "attn_type_list"),
        ({**FAMILIES["minimax_m2"], "shared_intermediate_size": 8}, "shared_intermediate_size"),
        ({**SMALL, "model_type": "nemotron-nas", "block_configs": [{}]}, "block_configs"),
        (
            {
                **SMALL,
                "model_type": "nemotron-nas",
                "block_configs": [{"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}}] * 8,
            },
            "block_configs[0].attention.replace_with_linear",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_key(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, config)
    assert caught.value.parameter.endswith(f"config.json: {key}")
