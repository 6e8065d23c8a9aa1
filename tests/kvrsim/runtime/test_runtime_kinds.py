"""Layers that keep windows, latents, states or nothing hand on enough, and no more than the model prices."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures import read_config
from kvrsim.runtime.exchange import exchange_of
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.kept.buffers import KvBuffer, StateBuffer, buffers_of, kv_room
from kvrsim.runtime.kept.layers import KeptState, KeptTokens
from kvrsim.runtime.model import load_model
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.prefill import shared_room
from kvrsim.scenario import Partition
from tests.kvrsim.runtime.chunked import forward, in_chunks, prompt
from tests.kvrsim.runtime.runtime_models import KINDS, kinds
from tests.kvrsim.runtime.runtime_workers import model_of

BATCH, ELEMENT_BYTES = 2, 4


@pytest.mark.parametrize(("name", "kernel"), kinds("eager", "sdpa", "flash"))
def test_chunks_behind_what_a_layer_keeps_equal_one_go(name: str, kernel: str) -> None:
    model, ids = model_of(name, kernel), prompt()
    expected = forward(model_of(name, "eager"), ids, DynamicCache(config=model.config), 0)[:, -1]
    least = Geometry.of(model).least_chunk
    for chunks in ((7, least, 11, 7 - least), (1, least, 24 - least)):
        logits, _ = in_chunks(model, ids, chunks=chunks)
        torch.testing.assert_close(logits, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    spoilt, _ = in_chunks(model, ids, "prefix", chunks=(14, 11))
    assert (spoilt - expected).abs().max() > 0.05


@pytest.mark.parametrize("name", KINDS)
def test_decoding_goes_on_from_what_a_layer_keeps(name: str) -> None:
    model, ids = model_of(name, "eager"), prompt()
    whole = DynamicCache(config=model.config)
    after = forward(model, ids, whole, 0)[:, -1].argmax(-1, keepdim=True)
    expected = forward(model, after, whole, ids.shape[1])
    _, cache = in_chunks(model, ids, chunks=(14, 11))
    found = forward(model, after, cache.to_dynamic_cache(), ids.shape[1])
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_hands_on_what_the_model_says_that_later_tokens_need(name: str) -> None:
    geometry = Geometry.of(model_of(name, "eager"))
    spec = read_config(JsonObject(fields=KINDS[name], where="model"), "model")
    assert len(spec.layers) == geometry.num_hidden_layers
    for prefix_len, chunk_len in ((0, 3), (4, 3), (11, 2), (9, 16)):
        buffers = buffers_of(geometry, prefix_len=prefix_len, chunk_len=chunk_len, batch=BATCH)
        for buffer, layer, kept in zip(buffers, spec.layers, geometry.kept, strict=True):
            if layer.mixer is None:
                assert buffer is None
                continue
            assert buffer is not None
            end = prefix_len + chunk_len
            if isinstance(kept, KeptTokens) and kept.sliding_window is not None:
                assert kept.sliding_window == layer.mixer.reach
                end = min(end, kept.sliding_window - 1)  # the token that sees the window is one of it
            needed = BATCH * float(layer.mixer.needed_bytes(end, ELEMENT_BYTES))
            assert buffer.outgoing().nbytes == needed


def test_a_layer_with_a_window_holds_its_chunk_and_the_windows_tail() -> None:
    geometry = Geometry.of(model_of("gemma3", "eager"))
    window, full, _ = buffers_of(geometry, prefix_len=20, chunk_len=4)
    assert isinstance(window, KvBuffer)
    assert isinstance(full, KvBuffer)
    assert (len(window.data), len(full.data)) == (5 + 4, 24)
    assert (len(window.incoming()), len(window.outgoing())) == (5, 5)
    assert window.incoming().is_contiguous()
    assert window.outgoing().is_contiguous()
    keys, _ = window.keys_values()
    assert tuple(keys.shape) == (1, 2, 9, 16)


@pytest.mark.parametrize(("window", "seen"), [(39, (0, 10)), (40, (0, 40)), (4096, (0, 40)), (6, (0, 10))])
def test_under_dense_tsp_only_a_window_of_the_whole_context_looks_behind_the_chunk(
    window: int, seen: tuple[int, int]
) -> None:
    geometry = Geometry.of(load_model(KINDS["mistral-window"] | {"sliding_window": window}))
    buffer = buffers_of(geometry, prefix_len=0, chunk_len=10, total_len=40, visible_len=40)[0]
    assert isinstance(buffer, KvBuffer)
    assert (buffer.first_seen, buffer.visible_len) == seen


def test_chunks_shorter_than_the_window_pass_on_what_they_have_received() -> None:
    geometry = Geometry.of(model_of("mistral-window", "eager"))
    for start, end in [(0, 2), (2, 3), (3, 7), (7, 8)]:
        buffer = buffers_of(geometry, prefix_len=start, chunk_len=end - start)[0]
        assert isinstance(buffer, KvBuffer)
        assert (len(buffer.incoming()), len(buffer.outgoing())) == (min(start, 5), min(end, 5))


def test_memory_that_plans_share_has_the_rows_that_each_layer_needs() -> None:
    class LastOfTwo:
        rank, size = 1, 2

    geometry = Geometry.of(model_of("gemma3", "eager"))
    halves = Partition(chunk_lens=(30, 10))
    kvr = [RunPlan(strategy="kvr", partition=halves)]
    room = shared_room(geometry, LastOfTwo(), kvr)[1]  # type: ignore[arg-type]
    assert [len(data) for data in room] == [10 + 5, 40, 10 + 5]
    room = shared_room(geometry, LastOfTwo(), [*kvr, RunPlan(strategy="tsp", partition=halves)])[1]  # type: ignore[arg-type]
    assert [len(data) for data in room] == [40, 40, 40]


def test_a_state_is_one_message_of_its_own_size_and_mlp_layers_have_none() -> None:
    geometry = Geometry.of(model_of("nemotron_h"))
    assert [type(kept) for kept in geometry.kept] == [KeptState, KeptTokens, type(None), KeptState, type(None)]
    assert geometry.linked_layers == (0, 1, 3)
    room = kv_room(geometry, 9, BATCH)
    state, _, nothing, *_ = buffers_of(geometry, prefix_len=3, chunk_len=6, batch=BATCH, room=room)
    assert nothing is None
    assert isinstance(state, StateBuffer)
    assert state.data.data_ptr() == state.incoming().data_ptr() == state.outgoing().data_ptr() == room[0].data_ptr()
    assert state.recurrent.dtype == torch.float32
    assert state.data.nbytes == state.recurrent.nbytes + state.conv.nbytes == BATCH * (4 * 8 * 16 + 96 * 3) * 4
    assert geometry.title == "1 layer: K and V of all tokens; 2 layers: a state"


def test_a_latent_is_kept_as_it_is_and_not_expanded() -> None:
    geometry = Geometry.of(model_of("deepseek_v3"))
    assert [geometry.token_bytes(layer) for layer in range(3)] == [(32 + 8) * ELEMENT_BYTES] * 3
    assert geometry.title == "3 layers: latents of all tokens"


def test_modules_are_found_in_every_kind_of_layer() -> None:
    for name in KINDS:
        model = model_of(name, "eager")
        geometry = Geometry.of(model)
        for layer, kept in zip(geometry.layers(model), geometry.kept, strict=True):
            output = geometry.output_projection_of(layer)
            assert (output is None) == (geometry.attention_of(layer) is None) == (kept is None)
            assert output is None or output.weight.shape[0] == model.config.hidden_size


def test_a_single_token_behind_a_state_of_mamba_2_is_refused() -> None:
    geometry = Geometry.of(model_of("nemotron_h"))
    exchange_of("kvr").check(RunPlan(strategy="kvr", partition=Partition(chunk_lens=(1, 2))), geometry)
    for strategy in ("kvr", "tsp"):
        plan = RunPlan(strategy=strategy, partition=Partition(chunk_lens=(5, 1, 4)))
        with pytest.raises(InputError, match="chunks of at least 2 tokens after the first, for nemotron_h"):
            exchange_of(plan.strategy).check(plan, geometry)
        exchange_of(plan.strategy).check(plan, Geometry.of(model_of("qwen3_next")))


def test_a_layer_whose_cache_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvrsim.runtime.geometry as module

    model = model_of("qwen3_next")
    monkeypatch.setitem(module.FAMILIES, "qwen3_next", module.FAMILIES["llama"])
    with pytest.raises(InputError, match="LinearAttentionLayer"):
        Geometry.of(model)


def test_of_a_file_with_several_models_the_text_model_is_run() -> None:
    outer: dict[str, Any] = {"model_type": "qwen3_5", "text_config": KINDS["qwen3_5"], "vision_config": {"depth": 2}}
    model = load_model(outer)
    assert model.config.model_type == "qwen3_5_text"
    assert [type(kept) for kept in Geometry.of(model).kept] == [KeptState, KeptTokens, KeptState]


def test_rotations_that_depend_on_the_context_are_refused_in_any_kind_of_layer() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    keys = {
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": rope}
    }
    with pytest.raises(InputError, match="dynamic"):
        load_model(KINDS["gemma3"] | keys)


def test_starts_of_chunks_add_up() -> None:
    """A window's tail at each boundary is the same for the rank that sends it and the one that receives it."""
    geometry = Geometry.of(model_of("gemma3", "eager"))
    chunks = (4, 1, 2, 9, 3)
    ends = list(accumulate(chunks))
    made = [
        buffers_of(geometry, prefix_len=end - chunk, chunk_len=chunk) for end, chunk in zip(ends, chunks, strict=True)
    ]
    for before, after in zip(made, made[1:], strict=False):
        for sent, received in zip(before, after, strict=True):
            assert sent is not None
            assert received is not None
            assert sent.outgoing().shape == received.incoming().shape
