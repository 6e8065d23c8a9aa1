"""Pattern search from a seed: move groups of neighbouring boundaries together, in ever smaller steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrsim.program import Array
from planner.search.grid import Evaluate
from planner.search.neighbours import Boundaries, distinct, groups, valid

_MOVES_TOGETHER, _IDLE_ROUNDS = 120, 2
_BETTER = 1e-7  # a move must gain this share of TTFT


class EvaluateUpTo(Protocol):
    """TTFT of each row; of rows above `enough_s` a lower bound that is above it, too."""

    def __call__(self, boundaries: Boundaries, enough_s: float = ...) -> Array: ...


def refine(
    seed: npt.NDArray[np.int64], num_tokens: int, stride: int, evaluate: EvaluateUpTo, *, rounds: int
) -> tuple[npt.NDArray[np.int64], float]:
    """Improve boundaries of shape (num_ranks - 1,) by steps that are multiples of the stride.

    Each round tries every group both ways by every step, the stride times 1, 2, 4, ... up to half the even
    share, and the sum of the moves that helped; and moves of all boundaries together, since TTFT is a maximum
    and has edges that no group follows. Ends where nothing has helped for a few rounds.
    """
    best, best_s = seed, float(evaluate(seed[None])[0])
    directions = np.concatenate([groups(len(seed)), -groups(len(seed))])
    most = max(stride, num_tokens // (len(seed) + 1) // 2)
    steps = [stride << power for power in range(64) if stride << power <= most]
    moves = np.concatenate([step * directions for step in steps])
    idle = 0
    for round_ in range(rounds):
        spread = _spread(_MOVES_TOGETHER, len(seed) + 1, round_ * _MOVES_TOGETHER)
        lengths = stride * 2.0 ** (len(steps) * spread[:, :1])
        together = np.round(2.0 * lengths * (2.0 * spread[:, 1:] - 1.0) / stride).astype(np.int64) * stride
        candidates = distinct(best + together, stride, num_tokens)
        if idle == 0:
            grouped = best + moves
            candidates = np.concatenate([grouped[valid(grouped, num_tokens)], candidates])
        moved, moved_s = _best_of(candidates, best, best_s, num_tokens, partial(evaluate, enough_s=best_s))
        idle = 0 if moved_s < best_s * (1.0 - _BETTER) else idle + 1
        best, best_s = (moved, moved_s) if idle == 0 else (best, best_s)
        if idle > _IDLE_ROUNDS:
            break
    return best, best_s


def refine_frugally(
    seed: npt.NDArray[np.int64],
    num_tokens: int,
    stride: int,
    evaluate: Evaluate,
    *,
    rounds: int,
    first_step: int | None = None,
    thin: Callable[[Boundaries], Boundaries] = lambda rows: rows,
) -> tuple[npt.NDArray[np.int64], float]:
    """The same where an evaluation takes long: one step a round, which halves when it no longer helps.

    thin: which of a round's candidates are tried.
    """
    best, best_s = seed, float(evaluate(seed[None])[0])
    directions = np.concatenate([groups(len(seed)), -groups(len(seed))])
    step = first_step or _first_step(num_tokens, len(seed) + 1, stride)
    for _ in range(rounds):
        candidates = best + step * directions
        candidates = thin(candidates[valid(candidates, num_tokens)])
        moved, moved_s = _best_of(candidates, best, best_s, num_tokens, evaluate)
        if moved_s < best_s * (1.0 - _BETTER):
            best, best_s = moved, moved_s
        elif step <= stride:
            break
        else:
            step = max(stride, step // 2)
    return best, best_s


def _spread(count: int, dimensions: int, first: int) -> Array:
    """Points that fill the unit cube evenly: the R sequence (Roberts, 2018), from its `first` element on."""
    root = 2.0
    for _ in range(32):
        root = (1.0 + root) ** (1.0 / (dimensions + 1))
    steps = root ** -np.arange(1.0, dimensions + 1)
    return np.asarray((0.5 + np.arange(first + 1, first + count + 1)[:, None] * steps) % 1.0)


def _first_step(num_tokens: int, num_ranks: int, stride: int) -> int:
    """An eighth of the even share, as stride times a power of two."""
    step = stride
    while 2 * step <= num_tokens // num_ranks // 8:
        step *= 2
    return step


def _best_of(
    candidates: Boundaries, center: npt.NDArray[np.int64], center_s: float, num_tokens: int, evaluate: Evaluate
) -> tuple[npt.NDArray[np.int64], float]:
    """The best candidate, or the best sum of the moves that gained on their own."""
    if not len(candidates):
        return center, center_s
    ttft_s = evaluate(candidates)
    order = np.argsort(ttft_s, kind="stable")
    helped = order[ttft_s[order] < center_s][:8]
    best, best_s = candidates[order[0]], float(ttft_s[order[0]])
    if len(helped) > 1:
        sums = center + np.cumsum(candidates[helped] - center, axis=0)[1:]
        sums = sums[valid(sums, num_tokens)]
        if len(sums):
            sums_s = evaluate(sums)
            if sums_s.min() < best_s:
                best, best_s = sums[sums_s.argmin()], float(sums_s.min())
    return best, best_s
