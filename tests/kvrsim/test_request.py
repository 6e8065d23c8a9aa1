from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.choices import DTYPES
from kvrsim.errors import InputError
from kvrsim.scenario import Request, dtype_bytes


def test_defaults() -> None:
    request = Request(context_len=16384)
    assert (request.batch, request.cached_prefix, request.dtype) == (1, 0, "fp16")
    assert request.new_tokens == 16384


def test_dtypes() -> None:
    assert {dtype: dtype_bytes(dtype) for dtype in DTYPES} == {"fp16": 2, "bf16": 2, "fp8": 1, "fp32": 4}
    assert [Request(context_len=1, dtype=dtype).dtype_bytes for dtype in ("fp8", "fp32")] == [2, 4]
    with pytest.raises(InputError, match=r"^dtype: got 'int8', accepted: fp16, bf16, fp8, fp32$"):
        dtype_bytes("int8")


@given(st.integers(1, 2**40), st.data())
def test_new_tokens(context_len: int, data: st.DataObject) -> None:
    cached_prefix = data.draw(st.integers(0, context_len - 1))
    request = Request(context_len=context_len, cached_prefix=cached_prefix)
    assert 1 <= request.new_tokens == context_len - cached_prefix


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"context_len": 0}, "ctx"),
        ({"context_len": -5}, "ctx"),
        ({"context_len": 1.5}, "ctx"),
        ({"context_len": float("nan")}, "ctx"),
        ({"context_len": True}, "ctx"),
        ({"context_len": "16k"}, "ctx"),
        ({"context_len": 2**40 + 1}, "ctx"),
        ({"context_len": 8, "batch": 0}, "batch"),
        ({"context_len": 8, "batch": 2**21}, "batch"),
        ({"context_len": 8, "cached_prefix": 8}, "cached_prefix"),
        ({"context_len": 8, "cached_prefix": -1}, "cached_prefix"),
        ({"context_len": 8, "dtype": "fp64"}, "dtype"),
    ],
)
def test_refused(fields: dict[str, Any], argument: str) -> None:
    with pytest.raises(InputError) as caught:
        Request(**fields)
    assert caught.value.parameter == argument
    assert "\n" not in str(caught.value)


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Request(context_len=8).batch = 2  # type: ignore[misc]
