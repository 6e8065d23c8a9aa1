"""The defaults that kvrsim reads are transformers', and a file that says nothing is transformers' default model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures import read_config
from kvrsim.model.architectures.defaults import DEFAULTS, filled

pytest.importorskip("transformers")

from calibrate.reference import class_defaults, counted_parameters

TABLE: dict[str, Any] = {key: value for key, value in json.loads(Path(DEFAULTS).read_text()).items() if key[0] != "_"}
# Defaults that kvrsim refuses: no number of experts a token, embeddings for each layer, heads that do not divide the
# hidden size, no list of layers.
REFUSED = ("deepseek_v2", "gemma4_text", "glm4_moe", "nemotron_h")


@pytest.mark.parametrize("model_type", TABLE)
def test_the_table_is_transformers(model_type: str) -> None:
    """`python -m calibrate.reference` writes it."""
    assert json.loads(json.dumps(class_defaults(model_type))) == TABLE[model_type]


@pytest.mark.parametrize("model_type", [name for name in TABLE if name not in REFUSED])
def test_a_file_that_says_nothing_is_the_default_model(model_type: str) -> None:
    model = read_config(JsonObject(fields={"model_type": model_type}, where="model"), "default")
    assert model.num_parameters == counted_parameters({"model_type": model_type})


def test_either_name_of_a_key_counts() -> None:
    config = JsonObject(fields={"model_type": "gpt2", "hidden_size": 64}, where="model")
    assert filled(config, "gpt2").fields["n_embd"] == 64
    assert filled(config, "llama") is config
