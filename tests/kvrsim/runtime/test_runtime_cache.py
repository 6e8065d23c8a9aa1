"""A context in chunks through PrefixCache is the same as in one go, for every model and kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrsim.errors import InputError
from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.kept.buffers import KvBuffer, buffers_of
from kvrsim.runtime.kept.layers import KeptTokens
from kvrsim.runtime.model import ModelForward, load_model
from tests.kvrsim.runtime.chunked import forward, in_chunks, prompt
from tests.kvrsim.runtime.runtime_models import CONFIGS, KINDS, variants

TOLERANCE = 1e-5


def model_of(name: str, kernel: str = "sdpa", **keys: Any) -> Any:
    return load_model(CONFIGS[name] | keys, "fp32", "cpu", kernel, seed=1, init_std=0.2)  # type: ignore[arg-type]


def plain(name: str, kernel: str) -> Any:
    """The model to compare with. (The eager kernel counts ALiBi twice in transformers: it compares with itself.)"""
    return model_of(name, kernel if "alibi" in name else "eager")


@pytest.mark.parametrize(("name", "kernel"), variants())
def test_chunks_behind_a_prefix_equal_one_go(name: str, kernel: str) -> None:
    from transformers import DynamicCache

    ids, whole = prompt(), DynamicCache()
    expected = forward(plain(name, kernel), ids, whole, 0)[:, -1]
    model = model_of(name, kernel)
    logits, cache = in_chunks(model, ids)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    for ours, theirs in zip(cache.to_dynamic_cache().layers, whole.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(ours.values, theirs.values, atol=TOLERANCE, rtol=TOLERANCE)
    spoilt, _ = in_chunks(model, ids, "prefix")
    assert (spoilt - expected).abs().max() > 0.05
    if "alibi" not in name:  # which knows no positions but those of the keys
        spoilt, _ = in_chunks(model, ids, "positions")
        assert (spoilt - expected).abs().max() > 0.05


@pytest.mark.parametrize(("name", "kernel"), variants())
def test_decoding_goes_on_from_the_cache(name: str, kernel: str) -> None:
    model, ids = model_of(name, kernel), prompt()
    settings = dict(max_new_tokens=6, do_sample=False)
    mask = torch.ones_like(ids)
    expected = plain(name, kernel).generate(ids, attention_mask=mask, **settings)
    _, cache = in_chunks(model, ids)
    grown = cache.to_dynamic_cache()
    grown.crop(-1)  # generate wants at least one token that is not in the cache
    found = model.generate(ids, attention_mask=mask, past_key_values=grown, **settings)
    assert found.tolist() == expected.tolist()


def test_prefix_and_whole_are_one_stretch_of_memory() -> None:
    geometry = Geometry.of(model_of("llama-gqa"))
    (buffer, *_) = buffers_of(geometry, prefix_len=5, chunk_len=3, batch=2)
    assert isinstance(buffer, KvBuffer)
    assert buffer.incoming().is_contiguous()
    assert buffer.outgoing().is_contiguous()
    assert buffer.incoming().nbytes == 5 * 2 * geometry.token_bytes(0)
    assert buffer.incoming().data_ptr() == buffer.outgoing().data_ptr() == buffer.data.data_ptr()
    assert buffer.keys_values()[0].data_ptr() == buffer.data.data_ptr()


@pytest.mark.parametrize("name", ["llama-gqa", "falcon-mqa"])
def test_the_first_rank_of_dense_tsp_computes_the_masked_half_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, masks = torch.nn.functional.scaled_dot_product_attention, []

    def attend(*tensors: Any, attn_mask: Any = None, **keys: Any) -> Any:
        masks.append(attn_mask)
        return real(*tensors, attn_mask=attn_mask, **keys)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    model, ids = model_of(name), prompt(length=12)
    geometry = Geometry.of(model)
    sizes = dict(prefix_len=0, chunk_len=5, batch=2, total_len=12)
    buffers = buffers_of(geometry, **sizes)
    for buffer in buffers:
        buffer.data.zero_()
    ModelForward(model)(ids[:, :5], 0, PrefixCache(buffers), is_last=False)
    assert len(masks) == geometry.num_hidden_layers
    assert all(tuple(mask.shape[-2:]) == (5, 12) and not mask[..., 5:].any() for mask in masks)


def test_falcon_40b_stores_and_sends_each_kv_head_once() -> None:
    for name, heads in (("falcon-grouped", 2), ("falcon-mqa", 1)):
        kept = Geometry.of(model_of(name)).kept
        assert [one.num_key_value_heads for one in kept if isinstance(one, KeptTokens)] == [heads] * 3


def test_a_stub_does_not_grow_and_tells_of_every_update() -> None:
    told: list[tuple[int, str]] = []
    model = model_of("llama-gqa")
    sizes = dict(prefix_len=9, chunk_len=4, batch=2)
    stub = PrefixCache.stub(Geometry.of(model), **sizes, on_update=lambda event, layer: told.append((layer, event)))
    before = stub.buffers[0].incoming().clone()
    first = forward(model, prompt(length=4), stub, 9)
    second = forward(model, prompt(length=4), stub, 9)
    assert torch.equal(first, second)
    assert told == [(layer, event) for layer in range(3) for event in ("update", "updated")] * 2
    assert torch.equal(stub.buffers[0].incoming(), before)
    assert before.std() > 0.5
    assert stub.get_seq_length() == 9


def test_half_precision_keeps_its_dtype() -> None:
    for kernel in ("sdpa", "flash"):
        model = load_model(CONFIGS["llama-gqa"], "bf16", "cpu", kernel, seed=1)  # type: ignore[arg-type]
        logits, cache = in_chunks(model, prompt())
        assert logits.dtype == cache.buffers[0].data.dtype == torch.bfloat16
        assert torch.isfinite(logits).all()


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = model_of("qwen3"), model_of("qwen3")
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_model_is_built_from_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["falcon-grouped"] | {"_source": "a comment"}))
    for path in (tmp_path, tmp_path / "config.json"):
        geometry = Geometry.of(load_model(path, "bf16", attention="eager"))
        heads = dict(model_heads_per_kv_head=2, returned_heads_per_kv_head=2)
        assert geometry.kept == (KeptTokens(num_key_value_heads=2, head_dim=16, v_head_dim=16, **heads),) * 3
        assert (geometry.dtype, geometry.attention) == (torch.bfloat16, "eager")


def test_modules_are_found_where_the_architecture_keeps_them() -> None:
    for name in CONFIGS:
        model = model_of(name)
        geometry = Geometry.of(model)
        layers = geometry.layers(model)
        assert len(layers) == geometry.num_hidden_layers
        assert geometry.output_projection_of(layers[0]).weight.shape[0] == model.config.hidden_size


@pytest.mark.parametrize(
    ("keys", "kernel", "named"),
    [
        ({"model_type": "gpt2"}, "sdpa", "gpt2"),
        ({"model_type": "deepseek_v4"}, "sdpa", "deepseek_v4 is not one of them: its layers keep compressed entries"),
        (KINDS["gpt_oss"], "sdpa", "eager for gpt_oss: each head's softmax has a sink"),
        (KINDS["gemma2"], "flash", "eager for gemma2: it caps the scores"),
        (CONFIGS["llama-mha"] | {"hidden_size": "wide"}, "sdpa", "hidden_size"),
        (CONFIGS["falcon-alibi"], "flash", "flash"),
        (CONFIGS["llama-mha"] | {"quantization_config": {"quant_method": "fp8"}}, "sdpa", "not quantised"),
        (CONFIGS["llama-mha"], "flash_attention_2", "flash_attention_2"),
        (CONFIGS["llama-mha"] | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
         "sdpa", "dynamic"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_by_name(keys: dict[str, Any], kernel: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        load_model(keys, "fp32", "cpu", kernel)  # type: ignore[arg-type]


def test_padding_is_refused_where_the_kernel_takes_no_mask() -> None:
    for name in ("llama-mha", "falcon-mqa"):
        mask = torch.ones(2, 6, dtype=torch.long)
        mask[0, 0] = 0
        with pytest.raises(InputError, match="padding"):
            model_of(name, "flash")(input_ids=prompt(length=6), attention_mask=mask)
