"""What norms of queries and keys, and norms after attention and MLP, add to a layer of a serving engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvrsim
from kvrsim.model.spec import ModelSpec
from tests.building.models import with_layers, with_mixers


def layer_s(model: ModelSpec, tokens: int) -> float:
    scenario, _ = kvrsim.make_scenario(ctx=tokens, gpus=1, model=model, profile="h100-flash", cluster="h100-nvlink")
    chunk, none = np.array([float(tokens)]), np.zeros(1)
    costs = scenario.layer_costs()[-1]
    seconds = costs.qkv_s(chunk) + costs.mixer.append_s(chunk, none) + costs.mixer.attention_s(chunk, none)
    return float((seconds + costs.output_mlp_s(chunk)).item())


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_norms_of_queries_and_keys(tokens: int) -> None:
    """Of Qwen3 8B some percent of a layer."""
    model = kvrsim.load_model("qwen3-8b")
    assert 1.01 < layer_s(model, tokens) / layer_s(with_mixers(model, qk_norm=False), tokens) < 1.04


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_norms_of_gemma_2(tokens: int, config: Any) -> None:
    """Of a layer as wide as Gemma 2 9B's, two norms more than Llama's are some percent."""
    shape = {"hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 14336}
    model = config(model_type="gemma2", **shape)
    assert {(layer.norms_before_mixer, layer.norms_after_mixer) for layer in model.layers} == {(1, 3)}
    assert 1.01 < layer_s(model, tokens) / layer_s(with_layers(model, norms_after_mixer=1), tokens) < 1.05
