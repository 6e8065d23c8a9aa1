"""A context in chunks through PrefixCache is the same as in one go, and layers keep and send enough, and no more."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from transformers import DynamicCache

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
from tests.kvrsim.runtime.chunked import forward, in_chunks, prompt
from tests.kvrsim.runtime.runtime_models import KINDS, variants
from tests.kvrsim.runtime.runtime_workers import model_of

BATCH, ELEMENT_BYTES = 2, 4
QUICK = [("llama-gqa", "flash"), ("falcon-grouped", "sdpa"), ("gemma3", "eager"), ("qwen3_next", "sdpa")]


def chunk_of(start: int, length: int, batch: int = 1, **sizes: int) -> Chunk:
    return Chunk(start=start, length=length, batch=batch, **sizes)


def all_models() -> list[Any]:
    """Every model and kernel; but for a few, only in the slow tests."""
    cases = variants()
    return [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in cases]


def plain(name: str, kernel: str) -> Any:
    """The model to compare with. (The eager kernel counts ALiBi twice in transformers: it compares with itself.)"""
    return model_of(name, kernel if "alibi" in name else "eager")


@pytest.mark.parametrize(("name", "kernel"), all_models())
def test_chunks_behind_a_prefix_equal_one_go(name: str, kernel: str) -> None:
    model, ids = model_of(name, kernel), prompt()
    expected = forward(plain(name, kernel), ids, DynamicCache(config=model.config), 0)[:, -1]
    least = Geometry.of(model).least_chunk
    for chunks in ((7, least, 12, 6 - least), (1, least, 24 - least)):
        logits, _ = in_chunks(model, ids, chunks=chunks)
        torch.testing.assert_close(logits, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    spoilt, _ = in_chunks(model, ids, "prefix", chunks=(14, 11))
    assert (spoilt - expected).abs().max() > 0.05


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
                end = min(end, kept.sliding_window - 1)  # the token that sees the window is one of it
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
    assert geometry.title == "1 layer: K and V of all tokens; 2 layers: a state"


def test_a_windows_tail_is_the_same_for_its_sender_and_its_receiver() -> None:
    geometry = Geometry.of(model_of("gemma3", "eager"))
    bounds = pairwise(accumulate((4, 1, 2, 9, 3), initial=0))
    ranks = [make_buffers(geometry, chunk_of(start, end - start)) for start, end in bounds]
    for before, after in pairwise(ranks):
        for sender, receiver in zip(before, after, strict=True):
            assert sender is not None
            assert receiver is not None
            assert sender.outgoing().shape == receiver.incoming().shape
