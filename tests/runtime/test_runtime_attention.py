"""Attention that leaves out the masked half is attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import CONFIGS

from kvrsim.runtime import attention
from kvrsim.runtime.geometry import load_model


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """By the definition: all scores, those to the right of the diagonal hidden."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
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
    found = attention.chunk_attention(query, key, value, scale)
    torch.testing.assert_close(found, masked(query, key, value, scale), atol=1e-5 * spread**2, rtol=1e-4)


@pytest.mark.parametrize(("chunk", "prefix"), [(7, 5), (7, 0), (1, 9)])
def test_what_runs_on_cuda_is_the_same(chunk: int, prefix: int) -> None:
    query, key, value = tensors(chunk, prefix, 2, 2, 1)
    found = attention._on_cuda(query, key, value, None)  # here torch writes the mask out
    torch.testing.assert_close(found, masked(query, key, value, None), atol=1e-5, rtol=1e-5)


def test_tensors_on_cuda_take_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        is_cuda = True

    monkeypatch.setattr(attention, "_on_cuda", lambda *arguments: arguments)
    query = OnCuda()
    assert attention.chunk_attention(query, "key", "value", 0.5) == (query, "key", "value", 0.5)


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


def test_bfloat16_comes_back_as_bfloat16() -> None:
    query, key, value = (one.bfloat16() for one in tensors(6, 10, 2, 2, 1))
    found = attention.chunk_attention(query, key, value)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), masked(query.float(), key.float(), value.float(), None), atol=2e-2, rtol=2e-2
    )
