"""`kvrsim models` shows what a model has, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrsim.cli import main as cli
from kvrsim.model.load import builtin_models, load_model
from tests.kvrsim.model.model_configs import GQA

# What `models show --json` had before layers had mixers.
LEGACY = (
    *("name", "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "gated_mlp"),
    *("alibi", "learned_positions", "parallel_attn", "qk_norm", "norms_before_attention", "norms_after_attention"),
    *("final_norm_parameters", "embedding_norm_parameters", "lm_head", "quantization", "layer_kinds"),
    *("layer_kind_index", "num_parameters", "active_parameters", "weight_bytes", "kv_bytes_per_token"),
)
LEGACY_OF_A_LAYER = (
    *("num_layers", "qkv", "output", "mlp", "num_experts", "num_experts_per_tok", "router", "shared_mlp"),
    *("sliding_window", "norm_parameters"),
)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["models", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(shown(capsys, *arguments, "--json"))


def test_fields_of_softmax_attention_stay(capsys: pytest.CaptureFixture[str]) -> None:
    model = as_json(capsys, "show", "qwen3-8b")
    assert set(LEGACY) <= set(model)
    (kind,) = model["layer_kinds"]
    assert set(LEGACY_OF_A_LAYER) <= set(kind)
    assert (model["qk_norm"], model["gated_mlp"], model["head_dim"], kind["num_layers"]) == (True, True, 128, 36)
    assert [gemm["name"] for gemm in kind["qkv"]] == ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    assert kind["output"]["name"] == "self_attn.o_proj"
    assert kind["mixer"]["kind"] == "Attention"
    assert kind["norm_parameters"] == kind["other_parameters"] == 2 * 4096 + 2 * 128


def test_kinds_of_layers_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model = as_json(capsys, "show", "gpt-oss-20b")
    assert model["mixers"] == [
        {"mixer": "window of 128", "num_layers": 12},
        {"mixer": "full attention", "num_layers": 12},
    ]
    assert [kind["sliding_window"] for kind in model["layer_kinds"]] == [128, None]
    text = " ".join(shown(capsys, "show", "gpt-oss-20b").split())
    assert "24: 12 × window of 128; 12 × full attention" in text
    assert "20.9 B (20,914,757,184), of which a token passes through 4.2 B" in text
    assert "12.8 GiB (mxfp4, 4 bits)" in text
    assert "approximated nothing" in text


def test_the_list_has_a_row_for_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    listed = as_json(capsys, "list")["models"]
    assert [model["name"] for model in listed] == list(builtin_models())
    lines = shown(capsys, "list").splitlines()
    assert lines[0].split() == ["model", "family", "parameters", "active", "context", "layers"]
    row = next(line for line in lines if line.startswith("mixtral-8x7b "))
    assert row.split() == ["mixtral-8x7b", "mixtral", "46.7", "B", "12.9", "B", "32k", "32", "×", "full", "attention"]


def test_what_is_approximated_is_told(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """By the model's page, by JSON and by every plan."""
    path = tmp_path / "seeing.json"
    text = {"model_type": "qwen3_vl_text", **GQA}
    path.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 2}}))
    assert load_model(path).model_type == "qwen3_vl_text"
    assert as_json(capsys, "show", str(path))["approximations"] == ["the vision tower is left out"]
    assert "the vision tower is left out" in shown(capsys, "show", str(path))
    assert (
        cli.main(["plan", "--gpus", "2", "--ctx", "512", "--strategies", "kvr-e", "--model", str(path), "--json"]) == 0
    )
    assert "seeing: the vision tower is left out" in json.loads(capsys.readouterr().out)["warnings"]
