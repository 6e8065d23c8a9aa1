"""Files of models: what a user may get wrong is refused by file and key, and a model has the name of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrsim.errors import InputError
from kvrsim.model.load import load_model
from tests.kvrsim.model.model_configs import LLAMA, SMALL, load

# What a user may get wrong


def refusal(folder: Path, config: object) -> str:
    with pytest.raises(InputError) as caught:
        load(folder, config)
    message = str(caught.value)
    assert message.startswith("model ")
    assert "\n" not in message
    return message


_REQUIRED = ("model_type", *(key for key in SMALL if key != "intermediate_size"))


@pytest.mark.parametrize("key", _REQUIRED)
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, float("nan"), float("inf"), "32", True, [], {}, 10**30], ids=repr)
def test_bad_value_is_refused_by_file_and_key(tmp_path: Path, key: str, value: object) -> None:
    assert f"config.json: {key}: got" in refusal(tmp_path, {**LLAMA, key: value})


@pytest.mark.parametrize("key", _REQUIRED)
def test_missing_key_is_refused(tmp_path: Path, key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key}
    assert f"config.json: {key}: got 'nothing'" in refusal(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gemma2", "layer_types": "full"}, "layer_types"),
        ({"model_type": "mixtral", "num_key_value_heads": 4, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 1}, "num_experts_per_tok"),
    ],
)
def test_nonsense_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    assert f"config.json: {key}: got" in refusal(tmp_path, {**LLAMA, **changes})


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("mamba", "MambaMixer"), ("rwkv", "RwkvSelfAttention"), ("Llama", "a model_type of transformers")],
)
def test_what_cannot_be_described_is_refused_by_its_part(tmp_path: Path, model_type: str, reason: str) -> None:
    message = refusal(tmp_path, {**LLAMA, "model_type": model_type})
    assert f"model_type: got '{model_type}" in message
    assert reason in message


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "t5", "is_encoder_decoder": True}
    assert "got 't5, an encoder-decoder'" in refusal(tmp_path, config)


def test_not_an_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds a JSON object"):
        load(tmp_path, [1, 2])


def test_truncated_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA)[:-5])
    with pytest.raises(InputError, match=r"^model: got '.*', accepted: a file of valid JSON"):
        load_model(path)


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"accepted: a folder that holds a config\.json$"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["llama-8b", "", " ", "no/such/config.json", "x" * 5000, "a\0b"])
def test_unknown_name_says_where_the_known_ones_are(name: str) -> None:
    with pytest.raises(InputError, match=r"^-m: got '.*accepted: .*kvrsim models list"):
        load_model(name, argument="-m")


def test_an_unknown_name_is_answered_by_its_likes() -> None:
    with pytest.raises(InputError, match=r"such as .*llama-3-8b") as caught:
        load_model("llama3-8b")
    assert "bloom" not in str(caught.value)


def test_name_of_a_users_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    assert load(folder, LLAMA).name == "my-llama"
    (tmp_path / "tiny.json").write_text(json.dumps(LLAMA))
    assert load_model(tmp_path / "tiny.json").name == "tiny"


def test_without_a_trained_length(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA).max_position_embeddings is None
