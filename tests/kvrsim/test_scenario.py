"""Requests and partitions: sizes add up, and errors name the argument."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrsim.choices import DTYPES
from kvrsim.errors import InputError
from kvrsim.scenario import Partition, Request, dtype_bytes


def test_dtypes() -> None:
    assert {dtype: dtype_bytes(dtype) for dtype in DTYPES} == {"fp16": 2, "bf16": 2, "fp8": 1, "fp32": 4}
    assert [Request(context_len=1, dtype=dtype).dtype_bytes for dtype in ("fp8", "fp32")] == [2, 4]
    with pytest.raises(InputError, match=r"^dtype: got 'int8', accepted: fp16, bf16, fp8, fp32$"):
        dtype_bytes("int8")


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"context_len": 0}, "ctx"),
        ({"context_len": 1.5}, "ctx"),
        ({"context_len": float("nan")}, "ctx"),
        ({"context_len": 2**40 + 1}, "ctx"),
        ({"context_len": 8, "batch": 2**21}, "batch"),
        ({"context_len": 8, "cached_prefix": 8}, "cached_prefix"),
        ({"context_len": 8, "dtype": "fp64"}, "dtype"),
    ],
)
def test_refused(fields: dict[str, Any], argument: str) -> None:
    with pytest.raises(InputError) as caught:
        Request(**fields)
    assert caught.value.parameter == argument
    assert "\n" not in str(caught.value)


lens = st.lists(st.integers(1, 10_000), min_size=1, max_size=40).map(tuple)


@given(st.integers(1, 100_000), st.integers(1, 64))
def test_even_chunks(tokens: int, ranks: int) -> None:
    assume(ranks <= tokens)
    chunks = Partition.even(tokens, ranks).chunk_lens
    assert (sum(chunks), len(chunks)) == (tokens, ranks)
    assert max(chunks) - min(chunks) <= 1
    assert list(chunks) == sorted(chunks, reverse=True)  # the first ranks get the remainder


@given(lens)
def test_boundaries_and_fractions(chunks: tuple[int, ...]) -> None:
    partition = Partition(chunk_lens=chunks)
    boundaries = partition.boundaries
    assert boundaries[0] == 0
    assert boundaries[-1] == partition.num_tokens == sum(chunks)
    assert tuple(end - start for start, end in zip(boundaries, boundaries[1:], strict=False)) == chunks
    assert sum(partition.fractions) == pytest.approx(1.0)
    assert partition.fractions == tuple(chunk / sum(chunks) for chunk in chunks)


@pytest.mark.parametrize("chunks", [(), (0,), (3, 0), (4, -1, 3)])
def test_every_rank_needs_a_token(chunks: tuple[int, ...]) -> None:
    with pytest.raises(InputError) as caught:
        Partition(chunk_lens=chunks)
    assert caught.value.parameter == "partition"


@pytest.mark.parametrize(
    ("chunks", "accepted"),
    [((3, 3), "3 chunk lengths"), ((3, 3, 3, 3), "3 chunk lengths"), ((3, 3, 3), "10 tokens, not 9")],
)
def test_a_partition_fits_the_request(chunks: tuple[int, ...], accepted: str) -> None:
    with pytest.raises(InputError) as caught:
        Partition.of(chunks, num_tokens=10, num_ranks=3)
    assert caught.value.parameter == "partition"
    assert accepted in caught.value.accepted
