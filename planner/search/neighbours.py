"""Chunk boundaries: as chunks, on a grid of multiples, and candidates around a centre."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrsim.program import Array

Boundaries = npt.NDArray[np.int64]  # shape (B, num_ranks - 1): where chunks 1, 2, ... start

_SHIFTS = np.array([-2, -1, 0, 1, 2])  # in strides, as in the paper
_MOST_AT_ONCE = 4  # boundaries whose shifts are all combined; with more, one at a time and all together
_APART = 0.1  # of the tokens
_MOST_GROUPS = 160  # groups of boundaries tried at a step, for up to that many boundaries


def chunks_between(boundaries: npt.NDArray[np.int64], num_tokens: int) -> npt.NDArray[np.int64]:
    """Chunk lengths, shape (..., num_ranks), between boundaries of shape (..., num_ranks - 1)."""
    first = np.zeros((*boundaries.shape[:-1], 1), dtype=np.int64)
    ends = np.concatenate([first, boundaries, first + num_tokens], axis=-1)
    return np.diff(ends, axis=-1)


def chunk_lens(boundaries: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Chunk lengths between the boundaries of one partition."""
    ends = (0, *boundaries, num_tokens)
    return tuple(int(end - start) for start, end in itertools.pairwise(ends))


def valid(boundaries: npt.NDArray[np.int64], num_tokens: int) -> npt.NDArray[np.bool_]:
    """Whether every chunk of each row has a token."""
    return np.asarray((chunks_between(boundaries, num_tokens) >= 1).all(axis=-1))


def rounded(chunks: Array, stride: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """Boundaries at multiples of the stride, nearest to those of real-valued chunks."""
    return to_grid(np.cumsum(chunks)[:-1], stride, num_tokens)


def to_grid(ends: Array, stride: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """Boundaries at multiples of the stride, nearest to real-valued ones of shape (..., num_ranks - 1)."""
    return distinct((np.round(ends / stride) * stride).astype(np.int64), stride, num_tokens)


def distinct(boundaries: npt.NDArray[np.int64], stride: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """The same boundaries, multiples of the stride, moved only as far as needed to be distinct and inside.

    Shape (..., num_ranks - 1).
    """
    count = boundaries.shape[-1]
    ranks = np.arange(1, count + 1)
    least = np.maximum.accumulate(np.maximum(boundaries // stride, ranks) - ranks, axis=-1) + ranks
    return np.asarray(np.minimum(least, (num_tokens - 1) // stride - count + ranks) * stride)


def unique_rows(rows: Sequence[npt.NDArray[Any]] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows (B, ...) in ascending order, each once: np.unique without its import of masked arrays at every start."""
    ordered = np.asarray(rows)
    ordered = ordered[np.lexsort(ordered.reshape(len(ordered), -1).T[::-1])]
    changes = (ordered[1:] != ordered[:-1]).any(axis=tuple(range(1, ordered.ndim)))
    return np.asarray(ordered[np.concatenate([[True], changes])])


def apart(boundaries: Boundaries, times_s: Array, num_tokens: int, most: int) -> list[int]:
    """The fastest rows, at most so many, of which each has a tenth of the tokens elsewhere than the others."""
    chunks, found = chunks_between(boundaries, num_tokens), list[int]()
    for index in np.argsort(times_s, kind="stable"):
        moved = [np.abs(chunks[index] - chunks[other]).sum() / 2 for other in found]
        if all(one > _APART * num_tokens for one in moved):
            found.append(int(index))
        if len(found) == most:
            break
    return found


def combinations(count: int) -> int:
    """How many rows `shifts` has in all."""
    return int(len(_SHIFTS) ** count)


def shifts(count: int, first: int = 0, end: int | None = None) -> npt.NDArray[np.int64]:
    """All combinations of -2 to 2 strides for so many boundaries, in order; or those from `first` to before `end`."""
    index = np.arange(first, combinations(count) if end is None else min(end, combinations(count)))
    return np.asarray(_SHIFTS[index[:, None] // len(_SHIFTS) ** np.arange(count)[::-1] % len(_SHIFTS)])


def around(center: npt.NDArray[np.int64], stride: int, num_tokens: int) -> Boundaries:
    """Boundaries shifted by up to two strides that leave every chunk at least one token."""
    count = len(center)
    if count <= _MOST_AT_ONCE:
        moves = shifts(count)
    else:
        alone = [np.eye(count, dtype=np.int64) * shift for shift in _SHIFTS if shift]
        moves = np.concatenate([*alone, *(np.full((1, count), shift) for shift in _SHIFTS)])
    rows = center + stride * moves
    return np.asarray(rows[valid(rows, num_tokens)])


def groups(count: int) -> npt.NDArray[np.int64]:
    """Rows of zeros and ones, one a group of neighbouring boundaries: moving a group resizes two chunks.

    All of them where they are few; else blocks of lengths 1, 2, 4, ... spread over the chain.
    """
    spans = [(first, last) for first in range(count) for last in range(first, count)]
    if len(spans) > _MOST_GROUPS:
        lengths = [2**power for power in range(count.bit_length())]
        places = max(2, min(_MOST_GROUPS, _MOST_GROUPS**2 // (2 * count)) // len(lengths))
        spans = sorted(
            {
                (int(first), min(count - 1, int(first) + length - 1))
                for length in lengths
                for first in np.linspace(0, count - 1, places)
            }
        )
    rows = np.zeros((len(spans), count), dtype=np.int64)
    for row, (first, last) in zip(rows, spans, strict=True):
        row[first : last + 1] = 1
    return rows
