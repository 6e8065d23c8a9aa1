"""Request: the prefill whose TTFT is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from kvrsim.choices import DTYPE_BYTES, DTYPES
from kvrsim.errors import InputError
from kvrsim.units import MAX_TOKENS

MAX_BATCH = 2**20


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; InputError where the dtype is not one of DTYPES."""
    if dtype not in DTYPE_BYTES:
        raise InputError("dtype", dtype, ", ".join(DTYPES))
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prefill, checked when it is made: InputError names the parameter."""

    context_len: int  # tokens of the whole context, the cached prefix included
    batch: int = 1  # sequences prefilled together, each of context_len tokens
    cached_prefix: int = 0  # leading tokens of the context whose KV every rank already holds
    dtype: str = "fp16"  # one of DTYPES; fp8: the products of the layers, all else in half precision

    def __post_init__(self) -> None:
        _check_whole("ctx", self.context_len, 1, MAX_TOKENS)
        _check_whole("batch", self.batch, 1, MAX_BATCH)
        _check_whole("cached_prefix", self.cached_prefix, 0, self.context_len - 1)
        dtype_bytes(self.dtype)

    @property
    def new_tokens(self) -> int:
        """Tokens of one sequence that are to be computed."""
        return self.context_len - self.cached_prefix

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of activations and KV cache; under fp8, where products alone are, half precision's."""
        return dtype_bytes("fp16" if self.dtype == "fp8" else self.dtype)


def _check_whole(argument: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        unit = " (less than the context)" if argument == "cached_prefix" else ""
        raise InputError(argument, value, f"a whole number from {least} to {most}{unit}")
