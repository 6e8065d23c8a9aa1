"""A file of several models: the text model is read, and the answer names the parts that are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrsim.errors import InputError
from tests.kvrsim.model.model_configs import GQA, LLAMA, load

TEXT = {"model_type": "qwen3_vl_text", **GQA}
FURTHER = "what is beside the text model, such as a vision tower, is left out"


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        ({"vision_config": {"depth": 2}}, ("the vision tower is left out",)),
        ({"vision_config": {}, "audio_config": {}}, ("the vision tower is left out", "the audio tower is left out")),
        ({"vision_config": None}, (FURTHER,)),
        ({}, (FURTHER,)),
    ],
)
def test_what_is_left_out_is_told(tmp_path: Path, outer: dict[str, Any], told: tuple[str, ...]) -> None:
    model = load(tmp_path, {"model_type": "qwen3_vl", "text_config": TEXT, **outer})
    assert model.approximations == told
    assert model.model_type == "qwen3_vl_text"
    assert model.num_parameters == load(tmp_path, TEXT).num_parameters


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_outer_file_ties_and_quantises(tmp_path: Path, key: str) -> None:
    outer = {"model_type": "some", "tie_word_embeddings": True, "quantization_config": {"quant_method": "fp8"}}
    model = load(tmp_path, {**outer, key: {**LLAMA, "tie_word_embeddings": False}})
    assert model.tie_word_embeddings
    assert model.quantization is not None
    assert model.quantization.method == "fp8"
    inside = {**LLAMA, "quantization_config": {"quant_method": "awq"}}
    assert load(tmp_path, {"model_type": "some", key: inside}).quantization is not None


def test_a_text_model_without_a_type_is_that_of_the_outer_file(tmp_path: Path) -> None:
    text = {key: value for key, value in TEXT.items() if key != "model_type"}
    assert load(tmp_path, {"model_type": "qwen3_vl", "text_config": text}).model_type == "qwen3_vl_text"
    with pytest.raises(InputError, match=r"text_config\.model_type: got 'nothing'"):
        load(tmp_path, {"model_type": "some", "text_config": text})


def test_keys_that_nested_files_leave_out_have_transformers_defaults(tmp_path: Path) -> None:
    """As the files of Gemma 3 do."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    model = load(tmp_path, {"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (8, 4, 256)
    assert (model.vocab_size, model.tie_word_embeddings) == (262208, True)
    assert model.num_parameters == 3_880_263_168  # of google/gemma-3-4b-pt without its vision tower


def test_a_mistake_is_told_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: text_config\.hidden_size: got '0'"):
        load(tmp_path, {"model_type": "some", "text_config": {**LLAMA, "hidden_size": 0}})
    with pytest.raises(InputError, match="is_encoder_decoder"):
        load(tmp_path, {"model_type": "some", "is_encoder_decoder": True, "text_config": LLAMA})
