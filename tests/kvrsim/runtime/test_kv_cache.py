"""Caches of chunks: layers keep and send exactly what later tokens need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvrsim.io.schema import JsonObject
from kvrsim.model.load import read_config
from kvrsim.runtime.geometry import Geometry, KvLayout
from kvrsim.runtime.kv_cache import Chunk, PrefixCache, make_buffers
from kvrsim.runtime.model import ModelForward
from tests.kvrsim.runtime.runtime_models import KINDS
from tests.kvrsim.runtime.runtime_workers import model_of

BATCH, ELEMENT_BYTES = 2, 4


@pytest.mark.parametrize("name", ["llama-gqa", "falcon-mqa"])
def test_the_first_rank_of_dense_tsp_computes_the_masked_half_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, masks = torch.nn.functional.scaled_dot_product_attention, []

    def attend(*tensors: Any, attn_mask: Any = None, **keys: Any) -> Any:
        masks.append(attn_mask)
        return real(*tensors, attn_mask=attn_mask, **keys)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    model = model_of(name)
    geometry = Geometry.of(model)
    buffers = make_buffers(geometry, Chunk(start=0, length=5, batch=2, total_len=12))
    ModelForward(model)(torch.zeros(2, 5, dtype=torch.long), 0, PrefixCache(buffers), is_last=False)
    assert len(masks) == geometry.num_hidden_layers
    assert all(tuple(mask.shape[-2:]) == (5, 12) and not mask[..., 5:].any() for mask in masks)


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_hands_on_what_the_model_says_that_later_tokens_need(name: str) -> None:
    geometry = Geometry.of(model_of(name, "eager"))
    spec = read_config(JsonObject(fields=KINDS[name], where="model"), "model")
    assert len(spec.layers) == geometry.num_hidden_layers
    for prefix_len, chunk_len in ((0, 3), (4, 3), (11, 2), (9, 16)):
        buffers = make_buffers(geometry, Chunk(start=prefix_len, length=chunk_len, batch=BATCH))
        for buffer, layer, layout in zip(buffers, spec.layers, geometry.layouts, strict=True):
            if layer.mixer is None:
                assert buffer is None
                continue
            assert buffer is not None
            end = prefix_len + chunk_len
            if isinstance(layout, KvLayout) and layout.sliding_window is not None:
                assert layout.sliding_window == layer.mixer.reach
                end = min(end, layout.sliding_window - 1)  # a window includes the query's own token
            needed = BATCH * float(layer.mixer.needed_bytes(end, ELEMENT_BYTES))
            assert buffer.outgoing().nbytes == needed
