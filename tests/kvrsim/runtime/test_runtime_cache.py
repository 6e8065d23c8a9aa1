"""A context in chunks through PrefixCache is the same as in one go, for every model and kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrsim.errors import InputError
from kvrsim.runtime.cache import KvBuffer, PrefixCache
from kvrsim.runtime.geometry import Geometry
from kvrsim.runtime.model import ModelForward, load_model
from tests.kvrsim.runtime.runtime_models import CONFIGS, variants

TOLERANCE = 1e-5
CHUNKS = (7, 1, 12, 5)


def model_of(name: str, kernel: str = "sdpa", **keys: Any) -> Any:
    return load_model(CONFIGS[name] | keys, "fp32", "cpu", kernel, seed=1, init_std=0.2)  # type: ignore[arg-type]


def plain(name: str, kernel: str) -> Any:
    """The model to compare with. (The eager kernel counts ALiBi twice in transformers: it compares with itself.)"""
    return model_of(name, kernel if "alibi" in name else "eager")


def prompt(batch: int = 2, length: int = sum(CHUNKS)) -> torch.Tensor:
    return torch.randint(0, 101, (batch, length), generator=torch.Generator().manual_seed(3))


def forward(model: Any, ids: torch.Tensor, cache: Any, start: int) -> torch.Tensor:
    positions = torch.arange(start, start + ids.shape[1]).unsqueeze(0)
    with torch.inference_mode():
        return model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits


def in_chunks(model: Any, ids: torch.Tensor, spoil: str = "") -> tuple[torch.Tensor, PrefixCache]:
    """Last logits and last cache of a prefill in chunks, each behind the one before; `spoil` breaks the last."""
    geometry, start, logits, cache = Geometry.of(model), 0, None, None
    for chunk in CHUNKS:
        buffers = [
            KvBuffer(geometry, prefix_len=start, chunk_len=chunk, batch=ids.shape[0])
            for _ in range(geometry.num_hidden_layers)
        ]
        for index, buffer in enumerate(buffers):
            if cache is not None:
                buffer.prefix().copy_(cache.buffers[index].whole())
            if spoil == "prefix":
                buffer.prefix().zero_()
        cache = PrefixCache(buffers)
        shift = 3 if spoil == "positions" and start else 0
        logits = forward(model, ids[:, start : start + chunk], cache, start + shift)
        start += chunk
    assert cache is not None
    assert logits is not None
    return logits[:, -1], cache


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
    buffer = KvBuffer(geometry, prefix_len=5, chunk_len=3, batch=2)
    assert buffer.prefix().is_contiguous()
    assert buffer.whole().is_contiguous()
    assert buffer.prefix().nbytes == 5 * 2 * geometry.kv_bytes_per_token_layer
    assert buffer.prefix().data_ptr() == buffer.whole().data_ptr() == buffer.data.data_ptr()
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
    buffers = [KvBuffer(geometry, **sizes) for _ in range(geometry.num_hidden_layers)]
    for buffer in buffers:
        buffer.data.zero_()
    ModelForward(model)(ids[:, :5], 0, PrefixCache(buffers), is_last=False)
    assert len(masks) == geometry.num_hidden_layers
    assert all(tuple(mask.shape[-2:]) == (5, 12) and not mask[..., 5:].any() for mask in masks)


def test_falcon_40b_stores_and_sends_each_kv_head_once() -> None:
    assert Geometry.of(model_of("falcon-grouped")).num_key_value_heads == 2
    assert Geometry.of(model_of("falcon-mqa")).num_key_value_heads == 1


def test_a_stub_does_not_grow_and_tells_of_every_update() -> None:
    told: list[tuple[int, str]] = []
    model = model_of("llama-gqa")
    sizes = dict(prefix_len=9, chunk_len=4, batch=2)
    stub = PrefixCache.stub(Geometry.of(model), **sizes, on_update=lambda event, layer: told.append((layer, event)))
    before = stub.buffers[0].prefix().clone()
    first = forward(model, prompt(length=4), stub, 9)
    second = forward(model, prompt(length=4), stub, 9)
    assert torch.equal(first, second)
    assert told == [(layer, event) for layer in range(3) for event in ("update", "updated")] * 2
    assert torch.equal(stub.buffers[0].prefix(), before)
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
        assert (geometry.num_hidden_layers, geometry.num_key_value_heads, geometry.head_dim) == (3, 2, 16)
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
        ({"model_type": "mixtral"}, "sdpa", "mixtral"),
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


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_a_window_shorter_than_the_context_is_refused(name: str) -> None:
    keys = {"sliding_window": 16} | ({"use_sliding_window": True, "max_window_layers": 1} if name == "qwen2" else {})
    geometry = Geometry.of(model_of(name, **keys))
    geometry.check_context(16)
    with pytest.raises(InputError, match="16 tokens"):
        geometry.check_context(17)
    Geometry.of(model_of(name)).check_context(10**6)


def test_padding_is_refused_where_the_kernel_takes_no_mask() -> None:
    for name in ("llama-mha", "falcon-mqa"):
        mask = torch.ones(2, 6, dtype=torch.long)
        mask[0, 0] = 0
        with pytest.raises(InputError, match="padding"):
            model_of(name, "flash")(input_ids=prompt(length=6), attention_mask=mask)
