"""Attention that skips the masked half gives the same result as full attention with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvrsim.runtime import attention
from kvrsim.runtime.model import load_model
from tests.kvrsim.runtime.runtime_models import CONFIGS


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None = None
) -> torch.Tensor:
    """Attention by its definition: all scores, masked to the right of the diagonal and to the left of the window."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    if window is not None:
        seen = seen.triu(key.shape[2] - query.shape[2] - window + 1)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def tensors(chunk: int, prefix: int, groups: int, times: int, seed: int, spread: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, groups * times, chunk, 16), (2, groups, prefix + chunk, 16), (2, groups, prefix + chunk, 16)]
    return [torch.randn(shape, generator=generator) * spread for shape in shapes]


SHAPES = dict(
    chunk=st.integers(1, 40), prefix=st.integers(0, 40), groups=st.integers(1, 3), times=st.integers(1, 3),
    seed=st.integers(0, 99), spread=st.sampled_from([0.1, 1.0, 10.0]), scale=st.sampled_from([None, 0.1, 0.5]),
)  # fmt: skip


@settings(deadline=None)
@given(**SHAPES)
def test_prefix_and_chunk_joined_are_the_whole(
    chunk: int, prefix: int, groups: int, times: int, seed: int, spread: float, scale: float | None
) -> None:
    query, key, value = tensors(chunk, prefix, groups, times, seed, spread)
    result = attention.chunk_attention(query, key, value, scale)
    torch.testing.assert_close(result, masked(query, key, value, scale), atol=1e-5 * spread**2, rtol=1e-4)


@settings(deadline=None)
@given(window=st.integers(1, 90), **SHAPES)
def test_attention_in_a_window_in_blocks_is_masked_attention(
    window: int, chunk: int, prefix: int, groups: int, times: int, seed: int, spread: float, scale: float | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_LEAST_BLOCK", 7)  # so that a short chunk has several blocks
        query, key, value = tensors(chunk, prefix, groups, times, seed, spread)
        result = attention.chunk_attention(query, key, value, scale, window)
    torch.testing.assert_close(result, masked(query, key, value, scale, window), atol=1e-5 * spread**2, rtol=1e-4)


@settings(deadline=None)
@given(
    window=st.none() | st.integers(1, 90),
    kernel=st.sampled_from(["eager", "sdpa", "flash"]),
    blocks=st.integers(1, 9),
    **SHAPES,
)
def test_attention_in_query_blocks_is_masked_attention(
    window: int | None, kernel: Any, blocks: int, chunk: int, prefix: int, groups: int, times: int, seed: int,
    spread: float, scale: float | None,
) -> None:  # fmt: skip
    query, key, value = tensors(chunk, prefix, groups, times, seed, spread)
    out = attention.in_query_blocks(kernel, query, key, value, scale, window, min(blocks, chunk))
    torch.testing.assert_close(out, masked(query, key, value, scale, window), atol=1e-5 * spread**2, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("prefix", [0, 9])
def test_values_may_be_narrower_than_keys(prefix: int, window: int | None) -> None:
    query, key, value = tensors(7, prefix, 2, 2, 1)
    result = attention.chunk_attention(query, key, value[..., :10], None, window)
    torch.testing.assert_close(result, masked(query, key, value[..., :10], None, window), atol=1e-5, rtol=1e-4)


FLASH = "aten::_scaled_dot_product_flash_attention"


class CudaKernels(TorchDispatchMode):
    """A simulated FlashAttention kernel of CUDA that follows its documentation; its calls are counted."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name != FLASH:
            return func(*args, **kwargs)
        self.calls += 1
        given = {one.name: one.default_value for one in func._schema.arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        assert given["is_causal"]
        out = masked(*args[:3], given["scale"])  # FlashAttention 2.1 aligns its causal mask to the lower right corner
        return (out, *func(*(part.to("meta") for part in args[:3]), *args[3:], **kwargs)[1:])  # unused sums and seeds


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("chunk", "prefix"), [(7, 5), (7, 0), (1, 9)])
@pytest.mark.parametrize("flash", [True, False])
def test_what_runs_on_cuda_is_the_same(
    flash: bool, chunk: int, prefix: int, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_takes_flash", lambda *_: flash)
    query, key, value = tensors(chunk, prefix, 2, 2, 1)
    with CudaKernels() as kernels:
        result = attention._on_cuda(query, key, value, scale)
    torch.testing.assert_close(result, masked(query, key, value, scale), atol=1e-5, rtol=1e-5)
    assert kernels.calls == flash


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "falcon-mqa", "falcon-grouped"])
def test_every_layer_of_a_flash_model_runs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    real = attention.chunk_attention

    def counted(query: Any, *rest: Any) -> Any:
        calls.append(tuple(query.shape))
        return real(query, *rest)

    monkeypatch.setattr(attention, "chunk_attention", counted)
    ids = torch.zeros(1, 9, dtype=torch.long)
    load_model(CONFIGS[name], attention="flash")(input_ids=ids)
    assert [shape[2] for shape in calls] == [9, 9, 9]
    calls.clear()
    load_model(CONFIGS[name], attention="sdpa")(input_ids=ids)
    assert calls == []
