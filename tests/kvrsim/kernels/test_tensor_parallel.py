"""Weights that one GPU of a tensor-parallel group holds, for each kind of mixer."""

from __future__ import annotations

import pytest

import kvrsim
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.tensor_parallel import share_of
from kvrsim.model.load import read_config
from kvrsim.model.mixers import Attention, Recurrence

M3 = {
    "model_type": "minimax_m3_vl_text",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 128,
    "num_local_experts": 4,
    "vocab_size": 100,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_n_heads": 4,
    "index_head_dim": 32,
}
BUILT_IN = ("llama-3-8b", "deepseek-v3", "deepseek-v3.2", "qwen3.5-27b", "gpt-oss-120b", "nemotron-h-56b", "glm-5")


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("size", [2, 8])
def test_shares_add_up(name: str, size: int) -> None:
    """All GPUs together hold the whole layer; weights that are replicated on every GPU count several times."""
    model = kvrsim.load_model(name)
    for layer, share in zip(model.layers, share_of(model, size).layers, strict=True):
        pairs = zip(layer.matrices, share.matrices, strict=True)
        for whole, part in pairs:
            copies = size * part.num_weights / whole.num_weights
            kv_heads = 1 if layer.mixer is None else layer.mixer.num_key_value_heads
            expected = {"whole": size, "kv_heads": max(1, size / kv_heads)}.get(whole.split, 1)
            assert copies == pytest.approx(expected, rel=0.02), whole.name


def test_index_heads_lie_with_their_kv_heads() -> None:
    """In MiniMax M3 each index head belongs to one KV head and is replicated with it."""
    model = read_config(JsonObject(fields=M3, where="test"), "m3")
    for size, heads in ((2, 2), (4, 1), (8, 1)):
        mixer = share_of(model, size).layers[1].mixer
        assert isinstance(mixer, Attention)
        assert mixer.indexer is not None
        assert (mixer.indexer.num_heads, mixer.num_key_value_heads) == (heads, heads)
        assert mixer.indexer.projections[0].out_features == heads * 32


def test_a_state_is_split_by_heads() -> None:
    model = kvrsim.load_model("qwen3.5-27b")
    whole, part = (one.layers[0].mixer for one in (model, share_of(model, 8)))
    assert isinstance(whole, Recurrence)
    assert isinstance(part, Recurrence)
    assert part.state_bytes(2) == whole.state_bytes(2) / 8
    assert (part.conv_channels, part.num_value_heads) == (whole.conv_channels / 8, whole.num_value_heads / 8)
