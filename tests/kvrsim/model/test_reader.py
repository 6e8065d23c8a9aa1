"""Model types: layers from the tables of types equal the layers of transformers' classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.load import load_model, read_text_part
from kvrsim.model.mixers import Attention, CompressedAttention, LatentAttention
from kvrsim.model.reader import HYPER, SHARED_INDEXERS, RefusedError, read_class
from kvrsim.model.spec import LayerSpec
from kvrsim.model.template import translate
from tests.kvrsim.model.model_configs import (
    DELTA,
    EXPERTS,
    FAMILIES,
    GEMMA4,
    GEMMA4_MOE,
    GLM,
    HYBRID,
    INDEXED,
    K3,
    KIMI,
    LATENT,
    LLAMA4,
    M3,
    MIMO,
    NEXT,
    SMALL,
    STEP,
    V3,
    V4,
    load,
)

CASES: list[dict[str, Any]] = [
    NEXT,
    {**NEXT, "mlp_only_layers": [0], "decoder_sparse_step": 2, "attention_bias": True, "tie_word_embeddings": True},
    {**SMALL, **EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [0]},
    {"model_type": "gemma3_text", **SMALL, "head_dim": 16, "num_hidden_layers": 30},  # every sixth layer has no window
    {"model_type": "qwen3_5_text", **DELTA},
    {"model_type": "qwen3_5_moe_text", **{key: DELTA[key] for key in DELTA if key != "intermediate_size"}, **EXPERTS},
    HYBRID,
    {**HYBRID, "moe_latent_size": 20, "use_bias": True, "mlp_bias": True, "use_conv_bias": False},
    {
        **{key: value for key, value in HYBRID.items() if key != "hybrid_override_pattern"},
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "num_nextn_predict_layers": 1,
    },
    KIMI,
    {**KIMI, "q_lora_rank": 28, "first_k_dense_replace": 2},
    {**KIMI, "layer_types": ["full_attention", "linear_attention"] * 2, "mlp_layer_types": ["sparse", "dense"] * 2},
    {**V3, "attention_bias": True, "n_shared_experts": 3, "num_nextn_predict_layers": 1},
    {**V3, "model_type": "kimi_k2", "first_k_dense_replace": 0},
    {**LATENT, "model_type": "deepseek_v2", "n_shared_experts": 1},
    {key: value for key, value in V3.items() if key not in ("q_lora_rank", "n_routed_experts", "v_head_dim")},
    {**INDEXED, "model_type": "deepseek_v32"},
    {**INDEXED, "model_type": "deepseek_v32", "mlp_layer_types": ["dense", "sparse"] * 3, "attention_bias": True},
    GLM,
    {**GLM, "index_topk_pattern": "FSSFSF"},
    {**GLM, "indexer_types": ["full", "shared", "shared", "shared", "full", "shared"], "index_topk_freq": 1},
    V4,
    {**V4, "num_hash_layers": 1, "hc_mult": 1, "tie_word_embeddings": True},
    M3,
    {**M3, "tie_word_embeddings": True, "moe_layer_freq": [1, 0, 1]},
    *FAMILIES.values(),
]


@pytest.mark.parametrize("config", CASES, ids=[f"{case['model_type']}-{index}" for index, case in enumerate(CASES)])
def test_the_description_is_that_of_the_class(tmp_path: Path, config: dict[str, Any]) -> None:
    """The model read with the table of types equals the model read from the class of transformers."""
    model = load(tmp_path, config)
    text, _ = read_text_part(JsonObject(fields=config, where="test"))
    plain = translate(text).fields
    whole = read_class(plain, model.name)
    assert replace(model, model_type="", approximations=(), max_position_embeddings=None) == replace(
        whole, model_type="", approximations=(), max_position_embeddings=None
    )


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_bigcode", "kimi_linear", "minicpm3"])
def test_files_with_all_keys_of_a_class_need_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """Files saved by transformers also have widths that the class derives from others, such as qk_head_dim."""
    monkeypatch.setattr("kvrsim.model.load.find_spec", lambda name: None)
    few = {"num_hidden_layers": 6}
    fields = json.loads(CONFIG_MAPPING[model_type](**few).to_json_string(use_diff=False))
    assert load(tmp_path, fields).num_parameters == read_class({"model_type": model_type, **few}, "").num_parameters


STRAY = {"model_type": "llama", **SMALL, "num_local_experts": 8, "index_topk": 64}


def test_sizes_that_a_class_does_not_have_are_named(tmp_path: Path) -> None:
    """The model is that of the file without them, and says which keys are not used."""
    model = load(tmp_path, {**STRAY, "architectures": ["LlamaForCausalLM"]})
    assert model.layers == load(tmp_path, {"model_type": "llama", **SMALL}).layers
    assert any("num_local_experts, index_topk" in sentence for sentence in model.approximations)
    assert model.from_class


def test_sizes_that_a_class_does_not_have_are_refused_in_a_file_of_another_class(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"num_local_experts: got '8'.*LlamaMoEForCausalLM"):
        load(tmp_path, {**STRAY, "architectures": ["LlamaMoEForCausalLM"]})


def test_tens_of_seconds_are_announced(tmp_path: Path) -> None:
    texts: list[str] = []
    load(tmp_path, {"model_type": "llama", **SMALL})
    load_model(tmp_path / "config.json", on_progress=lambda done, total, text: texts.append(text))
    assert texts == []
    load(tmp_path, STRAY)
    load_model(tmp_path / "config.json", on_progress=lambda done, total, text: texts.append(text))
    assert len(texts) == 1
    assert "llama" in texts[0]


def test_a_table_of_sines_is_no_learned_position() -> None:
    """RoFormer's table has the width of a head; its rows are not parameters of hidden_size each."""
    model = read_class({"model_type": "roformer", "num_hidden_layers": 2}, "")
    assert (model.learned_positions, model.embedding_norm_parameters - 2 * 768 - 2 * 768) == (0, 1536 * 64)


def test_what_kimi_k3_adds_to_kimi_linear(tmp_path: Path) -> None:
    """Kimi K3 adds full gates, a gate on latent attention, experts in a latent space, and scored residuals."""
    before, after = load(tmp_path, {**KIMI, "q_lora_rank": 28}), load(tmp_path, K3)
    hidden, width, rank = 64, 48, 8
    gates = 3 * (hidden * width - (hidden * rank + rank * width)) + hidden * 40
    experts = 3 * (2 * hidden * 32 + 32 - 8 * 3 * (hidden - 32) * 24)
    residuals = (4 * 2 + 1) * 2 * hidden
    assert after.num_parameters - before.num_parameters == gates + experts + residuals
    assert after.approximations == ("attention over earlier blocks' residuals is counted by its parameters alone",)
    assert before.approximations == ()
    latent = after.layers[-1].mixer
    assert isinstance(latent, LatentAttention)
    assert latent.gate
    assert not latent.rotary
    assert [gemm.in_features for gemm in after.layers[-1].mlp] == [32, 32, 24]


OF_STATES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 101}
SCAN = {**OF_STATES, "state_size": 8, "conv_kernel": 4, "intermediate_size": 64, "expand": 2, "time_step_rank": 4}
HEADS = {**OF_STATES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
MIXED = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4}


@pytest.mark.parametrize(
    ("config", "state", "token"),  # bytes of the first layer's state; bytes per token of K and V in all layers
    [
        ({**SCAN, "model_type": "mamba"}, 64 * 8 * 4 + 3 * 64 * 2, 0),
        ({**SCAN, "model_type": "falcon_mamba"}, 64 * 8 * 4 + 3 * 64 * 2, 0),
        (
            {**SCAN, "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "n_groups": 2},
            4 * 16 * 8 * 4 + 3 * (64 + 2 * 2 * 8) * 2,
            0,
        ),
        ({**OF_STATES, "model_type": "rwkv", "attention_hidden_size": 32, "intermediate_size": 64}, 5 * 32 * 4, 0),
        ({**HEADS, "model_type": "minimax", **MIXED}, 4 * 8 * 8 * 4, 2 * 2 * 8 * 2),
        (
            {**HEADS, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            32 * 4 + 2 * 32 * 2,
            2 * 2 * 8 * 2,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_bytes_of_states(config: dict[str, Any], state: int, token: int) -> None:
    """A state consists of fp32 elements and the last inputs of the convolution."""
    model = read_class(config, "small")
    first = model.layers[0].mixer
    assert first is not None
    assert (first.state_bytes(2), first.token_bytes(2), model.kv_bytes_per_token(2)) == (state, 0, token)


def test_a_state_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the state is compared with the state in the cache of transformers' class."""
    cache = SimpleNamespace(recurrent_states=[torch.empty((1, 4, 16, 9), device="meta")])
    monkeypatch.setattr("kvrsim.model.reader._Reader._cache_of", lambda *_: cache)
    with pytest.raises(RefusedError, match="512 elements of the state of mixer, of 576 of the class"):
        read_class({**SCAN, "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "n_groups": 2}, "small")


def test_shared_indexers(tmp_path: Path) -> None:
    """A shared indexer has neither matrices nor keys; FP8 keys have a scale for up to 128 elements."""
    model = load(tmp_path, {**GLM, "index_topk_pattern": "FSSFSF"})
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, LatentAttention)]
    indexers = [mixer.indexer for mixer in mixers]
    assert [indexer is not None and indexer.shared for indexer in indexers] == [False, True, True, False, True, False]
    own, shared = indexers[0], indexers[1]
    assert own is not None
    assert shared is not None
    assert (own.key_bytes, shared.projections) == (20, ())
    assert [mixer.index_key_bytes for mixer in mixers] == [20, 0, 0, 20, 0, 20]
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


def test_gpt2_has_learned_positions(tmp_path: Path) -> None:
    """In transformers, the matrices of GPT-2 are transposed."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 101, "n_positions": 32}
    model = load(tmp_path, config)
    assert (model.learned_positions, model.tie_word_embeddings, model.rotary) == (32, True, False)
    with pytest.raises(InputError, match="add_cross_attention"):
        load(tmp_path, {**config, "add_cross_attention": True})


def attentions(layers: tuple[LayerSpec, ...]) -> list[Attention]:
    return [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]


def test_llama_4_sees_chunks_and_every_fourth_layer_all(tmp_path: Path) -> None:
    model = load(tmp_path, LLAMA4)
    result = [(mixer.attention_chunk, mixer.rotary, mixer.qk_norm) for mixer in attentions(model.layers)]
    assert result == [*[(32, True, True)] * 3, (None, False, False)] * 2
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
    """An MLP is 2/3 of ffn_mult hidden sizes wide, rounded up to a multiple of 256; a layer may lack a block."""
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
