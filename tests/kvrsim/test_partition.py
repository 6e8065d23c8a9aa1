"""Partition: chunks sum to the context, every rank has a token, and mistakes name the argument."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.scenario import Partition

lens = st.lists(st.integers(1, 10_000), min_size=1, max_size=40).map(tuple)


@given(st.integers(1, 100_000), st.integers(1, 64))
def test_even_chunks(tokens: int, ranks: int) -> None:
    assume(ranks <= tokens)
    chunks = Partition.even(tokens, ranks).chunk_lens
    assert (sum(chunks), len(chunks)) == (tokens, ranks)
    assert max(chunks) - min(chunks) <= 1
    assert list(chunks) == sorted(chunks, reverse=True)  # the first ranks take the remainder


def test_the_papers_even_chunks() -> None:
    assert Partition.even(11, 4).chunk_lens == (3, 3, 3, 2)


@given(lens)
def test_boundaries_and_fractions(chunks: tuple[int, ...]) -> None:
    partition = Partition(chunk_lens=chunks)
    boundaries = partition.boundaries
    assert boundaries[0] == 0
    assert boundaries[-1] == partition.num_tokens == sum(chunks)
    assert tuple(end - start for start, end in zip(boundaries, boundaries[1:], strict=False)) == chunks
    assert sum(partition.fractions) == pytest.approx(1.0)
    assert partition.fractions == tuple(chunk / sum(chunks) for chunk in chunks)


@given(lens)
def test_equal_chunks_are_equal_partitions(chunks: tuple[int, ...]) -> None:
    partition = Partition(chunk_lens=chunks)
    again = Partition.of(list(chunks), num_tokens=sum(chunks), num_ranks=len(chunks))
    assert partition == again
    assert hash(partition) == hash(again)


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


def test_no_more_ranks_than_tokens() -> None:
    with pytest.raises(InputError) as caught:
        Partition.even(3, 4)
    assert caught.value.parameter == "gpus"
    assert Partition.even(4, 4).chunk_lens == (1, 1, 1, 1)
