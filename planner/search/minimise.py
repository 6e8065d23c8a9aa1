"""Pattern search over chunk boundaries, evaluation of partitions, and boundaries at multiples of a stride."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvrsim.execution import Execution
from kvrsim.executors.run import Runner
from kvrsim.program import Array
from kvrsim.progress import OnProgress
from kvrsim.units import format_seconds
from planner.work import work_of

MOST_GAIN = 0.15  # largest share of TTFT that a search is assumed to gain over its start, if its budget is limited


@dataclass(slots=True)
class Allowance:
    """The modelled work that a search may do (planner.work), so that all machines stop at the same partition."""

    left_s: float
    to_beat_s: float = math.inf  # TTFT to beat: the search may end when it cannot find a shorter one


@dataclass(slots=True)
class Evaluator:
    """Evaluates partitions of one execution, counts them and reports progress."""

    execution: Execution
    on_progress: OnProgress | None = None
    evaluations: int = 0
    best_s: float = math.inf
    allowance: Allowance | None = None  # work limit; then TTFTs of batches are infinite; None: no limit
    runner: Runner = field(init=False, repr=False)
    finish_s: dict[tuple[int, ...], tuple[float, ...]] = field(
        default_factory=dict
    )  # finish times of ranks, from `one`

    def __post_init__(self) -> None:
        self.runner = Runner(self.execution)

    @property
    def is_fast(self) -> bool:
        """Whether a recurrence computes thousands of partitions in a few milliseconds."""
        return self.runner.chain is not None

    @property
    def is_spent(self) -> bool:
        """Whether the allowance is used up."""
        return self.allowance is not None and self.allowance.left_s <= 0

    def ttft_s(
        self, chunks: Array, enough_s: float = math.inf, stage_layers: npt.NDArray[np.int64] | None = None
    ) -> Array:
        """TTFT of each row of chunks (B, num_ranks), tokens; shape (B,).

        enough_s: a row with a longer TTFT may get a lower bound that also exceeds `enough_s`. stage_layers: see
        Runner.finish_s.
        """
        if self.is_spent and len(chunks) > 1:
            return np.full(len(chunks), np.inf)
        runner = self.runner
        parts = list[Array]()
        first = 0
        for block in runner.blocks(chunks):
            layers = None if stage_layers is None else stage_layers[:, first : first + block.shape[1]]
            first += block.shape[1]
            if parts and self.is_spent:
                parts.append(np.full(block.shape[1], np.inf))
                continue
            parts.append(runner.finish_s(block, last_only=True, enough_s=enough_s, stage_layers=layers)[-1])
            self._count(len(parts[-1]), len(block), float(parts[-1].min()))
        return np.concatenate(parts)

    def report(self) -> None:
        """Report the number of evaluations and the best TTFT."""
        if self.on_progress is not None:
            best = f", best TTFT {format_seconds(self.best_s)}" if math.isfinite(self.best_s) else ""
            text = f"{self.execution.strategy.name}: {self.evaluations} partitions simulated{best}"
            self.on_progress(self.evaluations, None, text)

    def one(self, chunks: tuple[int, ...]) -> float:
        """TTFT of one partition; its ranks' finish times stay in `finish_s`."""
        finish_s = self.runner.finish_s(np.array([chunks], dtype=float).T)[:, 0]
        self.finish_s[chunks] = tuple(map(float, finish_s))
        self._count(1, len(chunks), self.finish_s[chunks][-1])
        return self.finish_s[chunks][-1]

    def _count(self, number: int, pieces: int, least_s: float) -> None:
        """Count and report partitions of a number of chunks or pieces; least_s: the least of their TTFTs."""
        if self.allowance is not None:
            work = work_of(self.execution, pieces)
            self.allowance.left_s -= work.program_s + work.partition_s * number
        self.evaluations += number
        self.best_s = min(self.best_s, least_s)
        self.report()


# -- chunk boundaries

Boundaries = npt.NDArray[np.int64]  # shape (B, num_ranks - 1): where chunks 1, 2, ... start
Row = npt.NDArray[np.int64]  # boundaries of one partition, shape (num_ranks - 1,)


class Evaluate(Protocol):
    """TTFT of each row of boundaries; a row above `enough_s` may get a lower bound that exceeds `enough_s`."""

    def __call__(self, boundaries: Boundaries, enough_s: float = ..., /) -> Array: ...


_SHIFTS = np.array([-2, -1, 0, 1, 2])  # shifts of a boundary in strides, as in the paper
_MOST_AT_ONCE = 4  # most boundaries for all combinations of shifts; with more, each is shifted alone and all together
_MOST_GROUPS = 160  # most groups of boundaries per step; fewer if there are more boundaries than this


def default_stride(num_tokens: int, num_ranks: int) -> int:
    """The even share over 512, rounded down to a power of two, from 1 to 128 tokens.

    On fast links, a finer stride changes TTFT by less than 0.1 %; on slow links, the search refines by single tokens.
    """
    return 1 << min(7, max(0, (num_tokens // num_ranks // 512).bit_length() - 1))


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
    """Boundaries at multiples of the stride, nearest to the ends of real-valued chunks."""
    return to_grid(np.cumsum(chunks)[:-1], stride, num_tokens)


def to_grid(ends: Array, stride: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """Boundaries at multiples of the stride, nearest to real-valued ones of shape (..., num_ranks - 1)."""
    return distinct((np.round(ends / stride) * stride).astype(np.int64), stride, num_tokens)


def distinct(boundaries: npt.NDArray[np.int64], stride: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """Boundaries rounded down to multiples of the stride, moved only as needed to be distinct and inside the context.

    The shape is (..., num_ranks - 1).
    """
    count = boundaries.shape[-1]
    ranks = np.arange(1, count + 1)
    least = np.maximum.accumulate(np.maximum(boundaries // stride, ranks) - ranks, axis=-1) + ranks
    return np.asarray(np.minimum(least, (num_tokens - 1) // stride - count + ranks) * stride)


def unique_rows(rows: Sequence[npt.NDArray[Any]] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Distinct rows (B, ...) in ascending order, like np.unique, which would import masked arrays at every start."""
    ordered = np.asarray(rows)
    ordered = ordered[np.lexsort(ordered.reshape(len(ordered), -1).T[::-1])]
    changes = (ordered[1:] != ordered[:-1]).any(axis=tuple(range(1, ordered.ndim)))
    return np.asarray(ordered[np.concatenate([[True], changes])])


def shifts(count: int) -> npt.NDArray[np.int64]:
    """All combinations of -2 to 2 strides for `count` boundaries, in order."""
    index = np.arange(len(_SHIFTS) ** count)
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
    """Groups of neighbouring boundaries, as rows of zeros and ones. A moved group resizes two chunks.

    These are all groups or, if there are many, groups of 1, 2, 4, ... boundaries, spread over the chain.
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


# -- the pattern search

_MOVES_TOGETHER = 120  # moves of all boundaries together, per round
_IDLE_ROUNDS = 2  # rounds without a gain after which a search with all steps ends
_BETTER = 1e-6  # a move must gain this share of TTFT


def minimise(
    start: Row,
    num_tokens: int,
    stride: int,
    evaluate: Evaluate,
    *,
    rounds: int,
    halve_from: int | None = None,
    directions: Boundaries | None = None,
    also: Boundaries | None = None,
) -> tuple[Row, float]:
    """Improve boundaries of shape (num_ranks - 1,) by moves of multiples of the stride; return them and their TTFT.

    Each round moves every group of neighbouring boundaries in both directions by every step: the stride times 1, 2, 4,
    ... up to half the even share. It also tries sums of improving moves, and moves of all boundaries together, because
    TTFT is a maximum with edges that no group follows. The search ends after a few rounds without improvement.

    halve_from: for slow evaluations, the first step; each round then tries one step, which is halved down to the stride
    when it brings no improvement. directions: moves per step, instead of the groups. also: additional moves of every
    round.
    """
    best = start
    best_s = float(evaluate(start[None])[0])
    if directions is None:
        directions = np.concatenate([groups(len(start)), -groups(len(start))])
    always = np.zeros((0, len(start)), dtype=np.int64) if also is None else also
    most = max(stride, num_tokens // (len(start) + 1) // 2)
    steps = [stride << power for power in range(64) if stride << power <= most]
    step = halve_from
    idle = 0
    for round_ in range(rounds):
        moves = [] if idle and step is None else [length * directions for length in ([step] if step else steps)]
        candidates = best + np.concatenate([always, *moves])
        candidates = candidates[valid(candidates, num_tokens)]
        if step is None:
            together = best + _moves_together(len(start), len(steps), stride, round_)
            candidates = np.concatenate([candidates, distinct(together, stride, num_tokens)])
        moved, moved_s = best_of(candidates, best, best_s, num_tokens, evaluate)
        if moved_s < best_s * (1.0 - _BETTER):
            best = moved
            best_s = moved_s
            idle = 0
        elif step is not None and step > stride:
            step = max(stride, step // 2)
        else:
            idle += 1
            if step is not None or idle > _IDLE_ROUNDS:
                break
    return best, best_s


def _moves_together(count: int, num_steps: int, stride: int, round_: int) -> Boundaries:
    """Moves of all boundaries together, of many lengths, from the R sequence (Roberts, 2018)."""
    root = 2.0
    for _ in range(32):
        root = (1.0 + root) ** (1.0 / (count + 2))
    numbers = np.arange(round_ * _MOVES_TOGETHER + 1, (round_ + 1) * _MOVES_TOGETHER + 1)[:, None]
    spread = (0.5 + numbers * root ** -np.arange(1.0, count + 2)) % 1.0  # points that fill the unit cube evenly
    lengths = stride * 2.0 ** (num_steps * spread[:, :1])
    return np.round(2.0 * lengths * (2.0 * spread[:, 1:] - 1.0) / stride).astype(np.int64) * stride


def first_step(num_tokens: int, share: int, stride: int) -> int:
    """The largest stride times a power of two that is at most the tokens over `share`; at least the stride."""
    step = stride
    while 2 * step <= num_tokens // share:
        step *= 2
    return step


def best_of(
    candidates: Boundaries, center: Row, center_s: float, num_tokens: int, evaluate: Evaluate
) -> tuple[Row, float]:
    """The best of the candidates and of the sums of improving moves, and its TTFT."""
    if not len(candidates):
        return center, center_s
    ttft_s = evaluate(candidates, center_s)
    order = np.argsort(ttft_s, kind="stable")
    helped = order[ttft_s[order] < center_s][:8]
    best = candidates[order[0]]
    best_s = float(ttft_s[order[0]])
    if len(helped) > 1:
        sums = center + np.cumsum(candidates[helped] - center, axis=0)[1:]
        sums = sums[valid(sums, num_tokens)]
        if len(sums):
            sums_s = evaluate(sums, center_s)
            if sums_s.min() < best_s:
                best = sums[sums_s.argmin()]
                best_s = float(sums_s.min())
    return best, best_s
