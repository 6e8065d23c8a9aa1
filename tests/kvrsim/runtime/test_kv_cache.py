"""Caches of chunks: layers keep and send exactly what later tokens need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvrsim.io.schema import JsonObject
from kvrsim.model.load import read_config
from kvrsim.runtime.geometry import Geometry, KvLayout, StateLayout
from kvrsim.runtime.kv_cache import (
    CacheListener,
    Chunk,
    PrefixCache,
    StateBuffer,
    UpdateEvent,
    allocate,
    make_buffers,
)
from kvrsim.runtime.model import ModelForward
from tests.kvrsim.runtime.runtime_models import KINDS
from tests.kvrsim.runtime.runtime_workers import model_of

BATCH, ELEMENT_BYTES = 2, 4


def chunk_of(start: int, length: int, batch: int = 1, **sizes: int) -> Chunk:
    return Chunk(start=start, length=length, batch=batch, **sizes)


def prompt(batch: int = 2, length: int = 25) -> torch.Tensor:
    return torch.randint(0, 101, (batch, length), generator=torch.Generator().manual_seed(3))


def forward(model: Any, ids: torch.Tensor, cache: Any, start: int) -> torch.Tensor:
    positions = torch.arange(start, start + ids.shape[1]).unsqueeze(0)
    with torch.inference_mode():
        return model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("name", ["llama-gqa", "falcon-mqa"])
def test_the_first_rank_of_dense_tsp_computes_the_masked_half_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, masks = torch.nn.functional.scaled_dot_product_attention, []

    def attend(*tensors: Any, attn_mask: Any = None, **keys: Any) -> Any:
        masks.append(attn_mask)
        return real(*tensors, attn_mask=attn_mask, **keys)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    model, ids = model_of(name), prompt(length=12)
    geometry = Geometry.of(model)
    buffers = make_buffers(geometry, chunk_of(0, 5, batch=2, total_len=12))
    ModelForward(model)(ids[:, :5], 0, PrefixCache(buffers), is_last=False)
    assert len(masks) == geometry.num_hidden_layers
    assert all(tuple(mask.shape[-2:]) == (5, 12) and not mask[..., 5:].any() for mask in masks)


def test_a_stub_does_not_grow_and_reports_every_update() -> None:
    events: list[tuple[int, str]] = []

    class Listener(CacheListener):
        def on_update(self, event: UpdateEvent, layer: int) -> None:
            events.append((layer, event))

    model, listener = model_of("llama-gqa"), Listener()
    stub = PrefixCache.stub(Geometry.of(model), chunk_of(9, 4, batch=2), listener)
    before = stub.buffers[0].incoming().clone()
    first = forward(model, prompt(length=4), stub, 9)
    second = forward(model, prompt(length=4), stub, 9)
    assert torch.equal(first, second)
    assert events == [(layer, event) for layer in range(3) for event in ("update", "updated")] * 2
    assert torch.equal(stub.buffers[0].incoming(), before)
    assert before.std() > 0.5
    assert stub.get_seq_length() == 9


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_hands_on_what_the_model_says_that_later_tokens_need(name: str) -> None:
    geometry = Geometry.of(model_of(name, "eager"))
    spec = read_config(JsonObject(fields=KINDS[name], where="model"), "model")
    assert len(spec.layers) == geometry.num_hidden_layers
    for prefix_len, chunk_len in ((0, 3), (4, 3), (11, 2), (9, 16)):
        buffers = make_buffers(geometry, chunk_of(prefix_len, chunk_len, batch=BATCH))
        for buffer, layer, kept in zip(buffers, spec.layers, geometry.layouts, strict=True):
            if layer.mixer is None:
                assert buffer is None
                continue
            assert buffer is not None
            end = prefix_len + chunk_len
            if isinstance(kept, KvLayout) and kept.sliding_window is not None:
                assert kept.sliding_window == layer.mixer.reach
                end = min(end, kept.sliding_window - 1)  # a window includes the query's own token
            needed = BATCH * float(layer.mixer.needed_bytes(end, ELEMENT_BYTES))
            assert buffer.outgoing().nbytes == needed


def test_a_state_is_one_message_of_its_own_size_and_mlp_layers_have_none() -> None:
    geometry = Geometry.of(model_of("nemotron_h"))
    assert [type(kept) for kept in geometry.layouts] == [StateLayout, KvLayout, type(None), StateLayout, type(None)]
    assert geometry.linked_layers == (0, 1, 3)
    chunk = chunk_of(3, 6, batch=BATCH)
    room = allocate(geometry, chunk)
    state, _, nothing, *_ = make_buffers(geometry, chunk, room)
    assert nothing is None
    assert isinstance(state, StateBuffer)
    assert state.data.data_ptr() == state.incoming().data_ptr() == state.outgoing().data_ptr() == room[0].data_ptr()
    assert state.recurrent.dtype == torch.float32
    assert state.data.nbytes == state.recurrent.nbytes + state.conv.nbytes == BATCH * (4 * 8 * 16 + 96 * 3) * 4
