"""Architectures: parameters, shapes and windows agree with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.model.load import builtin_models, load_model
from kvrsim.model.spec import ModelSpec
from tests.kvrsim.model.model_configs import FILE, GQA, LLAMA, MOE, OPT, load

_COUNTS = json.loads(Path(__file__).with_name("published_parameters.json").read_text("utf-8"))
PARAMETERS: dict[str, int] = {name: count for name, count in _COUNTS.items() if name != "_about"}


def windows(model: ModelSpec) -> list[int | None]:
    return [layer.mixer.reach if layer.mixer else None for layer in model.layers]


def test_all_builtin_models_are_counted() -> None:
    assert set(builtin_models()) == set(PARAMETERS)


@pytest.mark.parametrize(("name", "count"), sorted(PARAMETERS.items()))
def test_builtin_models_have_their_parameters(name: str, count: int) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.num_parameters == count
    if model.quantization is None:
        assert model.weight_bytes(2) == 2 * count
    assert len(model.layers) == model.num_hidden_layers


@pytest.mark.parametrize(("count", "config"), FILE["counted"], ids=lambda value: str(value)[:40])
def test_architectures_count_as_transformers_does(tmp_path: Path, count: int, config: dict[str, Any]) -> None:
    assert load(tmp_path, config).num_parameters == count


@pytest.mark.parametrize(
    ("name", "billions"),  # from the name of the model or its report
    [
        *(
            ("qwen3-235b-a22b", 22),
            ("deepseek-v3", 37),
            ("kimi-k2", 32.6),
            ("gpt-oss-120b", 5.13),
            ("gpt-oss-20b", 3.61),
        ),
        *(("llama-4-scout", 17), ("nemotron-3-super-120b-a12b", 12.7), ("qwen3.5-397b-a17b", 17)),
    ],
)
def test_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    """Reports leave out the embedding, the head, or both."""
    model = load_model(name)
    embedding = model.vocab_size * model.hidden_size / 1e9
    active = model.active_parameters / 1e9
    assert active - 2 * embedding <= billions * 1.01
    assert billions * 0.99 <= active


def test_active_parameters_of_a_mixture() -> None:
    assert load_model("mixtral-8x7b").active_parameters == 12_879_925_248
    assert load_model("qwen3-30b-a3b").active_parameters == 3_353_032_704
    dense = load_model("llama-7b")
    assert dense.active_parameters == dense.num_parameters


def test_kv_bytes() -> None:
    assert load_model("llama-7b").kv_bytes_per_token(2) == 32 * 2 * 4096 * 2
    assert load_model("llama-7b-gqa8").kv_bytes_per_token(2) == 32 * 2 * 8 * 128 * 2
    assert load_model("llama-7b-mqa").kv_bytes_per_token(2) == 32 * 2 * 128 * 2
    assert load_model("falcon-7b").kv_bytes_per_token(1) == 32 * 2 * 64


def test_positions_of_older_architectures(tmp_path: Path) -> None:
    """ALiBi and learned positions replace the rotary embedding; built-in models state their longest context."""
    assert (load_model("bloom-176b").rotary, load_model("gpt-j-6b").rotary) == (False, True)
    learned = load(tmp_path, OPT)
    assert (learned.rotary, learned.learned_positions) == (False, 130)
    assert [load_model(name).max_position_embeddings for name in ("bloom-176b", "gpt-j-6b")] == [2048, 2048]


def test_internlm_2_is_llama_with_one_matrix(tmp_path: Path) -> None:
    """In both versions one key controls all biases of attention; InternLM 2 has one matrix for Q, K and V."""
    counts = []
    for model_type in ("internlm", "internlm2"):
        for bias in (True, False):
            counts.append(load(tmp_path, {"model_type": model_type, **GQA, "bias": bias}).num_parameters)
    assert counts[0] == counts[2] == load(tmp_path, {**LLAMA, **GQA, "attention_bias": True}).num_parameters
    assert counts[1] == counts[3] == load(tmp_path, {**LLAMA, **GQA}).num_parameters
    models = [load(tmp_path, {"model_type": f"internlm{two}", **GQA}) for two in ("", "2")]
    assert [len(model.main_mixer.projections) for model in models] == [3, 1]


def test_layers_of_a_mixture(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", **MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = load(tmp_path, config)
    dense, sparse = model.layer_kinds
    assert model.layer_kind_index == (0, 1, 0, 0, 0, 1, 0, 1)
    assert (dense.num_experts, dense.num_experts_per_tok, dense.router) == (0, 0, None)
    assert (sparse.num_experts, sparse.num_experts_per_tok) == (8, 2)
    assert sparse.router is not None
    assert (sparse.router.in_features, sparse.router.out_features) == (64, 8)
    assert [gemm.out_features for gemm in sparse.mlp] == [24, 24, 64]
    assert sparse.num_parameters - sparse.active_parameters == 6 * 3 * 24 * 64


# Positions of layers with sliding windows agree with transformers 5.23


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mistral", **GQA, "sliding_window": None}, [None] * 8),
        ({"model_type": "phi3", "pad_token_id": 0, **GQA, "sliding_window": 16}, [16] * 8),
        (
            {"model_type": "qwen2", **GQA, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 5},
            [None] * 5 + [16] * 3,
        ),
        ({"model_type": "gemma2", **GQA, "sliding_window": 16}, [16, None] * 4),
        ({"model_type": "gpt_oss", **GQA}, [128, None] * 4),
        ({"model_type": "gemma3_text", **GQA, "sliding_window": 16}, [16] * 5 + [None] + [16] * 2),
        ({"model_type": "qwen3_moe", **MOE, "use_sliding_window": True, "sliding_window": 16}, [16] * 8),
    ],
)
def test_windows(tmp_path: Path, config: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(load(tmp_path, config)) == expected


# The oldest names of Falcon's keys


def test_old_falcon_7b(tmp_path: Path) -> None:
    config = {
        "model_type": "RefinedWebModel",
        "hidden_size": 4544,
        "n_head": 71,
        "n_layer": 32,
        "vocab_size": 65024,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
    }
    assert load(tmp_path, config).num_parameters == PARAMETERS["falcon-7b"]


@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 6),
    inner=st.integers(1, 200),
    vocab=st.integers(1, 500),
    tied=st.booleans(),
)
def test_parameters_are_the_sum_of_the_parts(
    tmp_path_factory: pytest.TempPathFactory, kv_heads: int, layers: int, inner: int, vocab: int, tied: bool
) -> None:
    config = {**LLAMA, "num_key_value_heads": kv_heads, "num_hidden_layers": layers}
    config |= {"intermediate_size": inner, "vocab_size": vocab, "tie_word_embeddings": tied}
    model = load(tmp_path_factory.mktemp("model"), config)
    a_layer = 64 * 64 * 2 + 2 * 64 * 16 * kv_heads + 3 * 64 * inner + 2 * 64
    assert model.num_parameters == layers * a_layer + 64 + (1 if tied else 2) * 64 * vocab
    assert model.active_parameters == model.num_parameters
    assert len(model.layer_kinds) == 1
