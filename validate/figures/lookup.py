"""KVR-P: partitions interpolated between searched ones, as with the paper's lookup table (section 5, figure 10)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from validate.figures.predictions import Predictions


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpolated:
    """One context on some GPUs: looked up, searched, and even."""

    context_len: int  # tokens
    num_gpus: int
    neighbours: tuple[int, int]  # contexts whose searched partitions were interpolated
    shares: tuple[float, ...]  # of the context, before rounding to tokens
    chunk_lens: tuple[int, ...]  # KVR-P
    searched: tuple[int, ...]  # KVR-S
    ttft_s: float  # of KVR-P
    searched_s: float
    even_s: float
    tsp_s: float

    @property
    def above_searched(self) -> float:
        """KVR-P's TTFT over KVR-S's, less one."""
        return self.ttft_s / self.searched_s - 1


def interpolated(
    predictions: Predictions, model: str, context_len: int, num_gpus: int, knots: Sequence[int]
) -> Interpolated:
    """KVR-P at a context between two of the knots, ascending."""
    low, high = neighbours(context_len, knots)
    table = {tokens: _shares(predictions.of(model, tokens, num_gpus, "kvr-s").partition) for tokens in (low, high)}
    shares = between(context_len, (low, high), table)
    chunk_lens = whole_tokens(shares, context_len)
    searched = predictions.of(model, context_len, num_gpus, "kvr-s")
    return Interpolated(
        context_len=context_len,
        num_gpus=num_gpus,
        neighbours=(low, high),
        shares=shares,
        chunk_lens=chunk_lens,
        searched=searched.partition,
        ttft_s=predictions.with_partition(model, context_len, chunk_lens).ttft_s,
        searched_s=searched.ttft_s,
        even_s=predictions.of(model, context_len, num_gpus, "kvr-e").ttft_s,
        tsp_s=predictions.of(model, context_len, num_gpus, "tsp").ttft_s,
    )


def neighbours(context_len: int, knots: Sequence[int]) -> tuple[int, int]:
    """The two knots around a context; a knot is its own upper neighbour, save the first."""
    assert knots[0] <= context_len <= knots[-1], "no extrapolation"
    upper = max(1, bisect.bisect_left(knots, context_len))
    return knots[upper - 1], knots[upper]


def between(context_len: int, ends: tuple[int, int], table: Mapping[int, Sequence[float]]) -> tuple[float, ...]:
    """Each rank's share of the context, linear in the context's length."""
    low, high = ends
    weight = (context_len - low) / (high - low)
    return tuple((1 - weight) * first + weight * last for first, last in zip(table[low], table[high], strict=True))


def whole_tokens(shares: Sequence[float], num_tokens: int) -> tuple[int, ...]:
    """Chunks that sum to the context: largest remainders get the tokens that rounding down leaves.

    None is empty: shares below a token take theirs from the longest chunk. There are at least as many tokens as shares.
    """
    exact = [share * num_tokens for share in shares]
    chunks = [max(1, math.floor(tokens)) for tokens in exact]
    order = sorted(range(len(chunks)), key=lambda rank: chunks[rank] - exact[rank])
    for rank in order[: max(0, num_tokens - sum(chunks))]:
        chunks[rank] += 1
    while sum(chunks) > num_tokens:
        chunks[chunks.index(max(chunks))] -= 1
    return tuple(chunks)


def _shares(chunk_lens: Sequence[int]) -> tuple[float, ...]:
    return tuple(chunk / sum(chunk_lens) for chunk in chunk_lens)
