"""The paper's hierarchical grid search (Fig. 6).

With two ranks, it is a binary search. With more, each level tries all combinations of five values per boundary around
the best partition so far: 5^(p-1) candidates for p ranks. A level is repeated around its best partition until that is
the centre, so that a boundary can move as far as it has to. Then the stride is halved. The paper does not say how far
the grid of a level reaches; a single pass per level could not reach the best partition of 8 GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.search.minimise import Boundaries, Evaluate, shifts, valid

_WINDOW = 4  # boundaries that move together if there are too many for all combinations
_FEW_RANKS = 4  # most ranks whose first stride is the paper's
_MOST_WHOLE = 7  # most boundaries for which all combinations are tried


@dataclass(slots=True)
class Grid:
    """A context of `num_tokens`, divided at multiples of the stride of each level."""

    num_tokens: int
    num_ranks: int
    evaluate: Evaluate

    def search(self, min_stride: int) -> tuple[tuple[int, ...], float]:
        """The best boundaries and their TTFT."""
        if self.num_ranks == 1:
            none = np.zeros((1, 0), dtype=np.int64)
            return (), float(self.evaluate(none)[0])
        if self.num_ranks == 2:
            return self._binary(min_stride)
        return self._hierarchical(min_stride)

    def strides(self, min_stride: int) -> Iterator[int]:
        """Yield strides: a quarter of the even share (paper: 8 for 96 tokens on 3 ranks), halved to the minimum.

        Many ranks begin with the even share. From a quarter, the search of 8 GPUs may end where all ranks but the first
        decide the TTFT: then all of them would have to shrink by different lengths at once.
        """
        stride = self.num_tokens // self.num_ranks
        if self.num_ranks <= _FEW_RANKS:
            stride //= 4
        stride = max(min_stride, stride)
        while stride > min_stride:
            yield stride
            stride = max(min_stride, stride // 2)
        yield min_stride

    def _binary(self, stride: int) -> tuple[tuple[int, ...], float]:
        """Find the minimum of TTFT, which falls and then rises with the first chunk, by bisection."""
        low = 1
        high = max(1, (self.num_tokens - 1) // stride)
        while low < high:
            middle = (low + high) // 2
            here, beyond = self.evaluate(np.array([[middle], [middle + 1]]) * stride)
            low, high = (low, middle) if here <= beyond else (middle + 1, high)
        best = min(low * stride, self.num_tokens - 1)
        return (best,), float(self.evaluate(np.array([[best]]))[0])

    def _hierarchical(self, min_stride: int) -> tuple[tuple[int, ...], float]:
        share = self.num_tokens / self.num_ranks
        center = np.array([round(share * rank) for rank in range(1, self.num_ranks)], dtype=np.int64)
        center = np.maximum(center, np.arange(1, self.num_ranks))
        best_s = float(self.evaluate(center[None])[0])
        for stride in self.strides(min_stride):
            for window in self._windows():
                center, best_s = self._level(center, best_s, stride, window)
        return tuple(int(boundary) for boundary in center), best_s

    def _windows(self) -> Iterator[slice]:
        """Yield a window of all boundaries or, if there are many, overlapping windows from left to right."""
        count = self.num_ranks - 1
        if count <= _MOST_WHOLE:
            yield slice(0, count)
            return
        for first in range(0, count - _WINDOW + 1, _WINDOW // 2):
            yield slice(first, first + _WINDOW)
        yield slice(count - _WINDOW, count)

    def _level(
        self, center: npt.NDArray[np.int64], best_s: float, stride: int, window: slice
    ) -> tuple[npt.NDArray[np.int64], float]:
        """Move the window's boundaries to the best combination around them, until the best is the centre."""
        while True:
            candidates = _shifted(center, stride, window, self.num_tokens)
            ttft_s = self.evaluate(candidates, best_s)
            least_s = float(ttft_s.min())
            if least_s >= best_s:
                return center, best_s
            center = _nearest(candidates[ttft_s == least_s], center)
            best_s = least_s


def _shifted(center: npt.NDArray[np.int64], stride: int, window: slice, num_tokens: int) -> Boundaries:
    """All shifts of the window's boundaries that leave every chunk at least one token; no shift is among them."""
    moves = stride * shifts(len(center[window]))
    rows = np.repeat(center[None], len(moves), axis=0)
    rows[:, window] += moves
    return np.asarray(rows[valid(rows, num_tokens)])


def _nearest(candidates: Boundaries, center: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the candidate with the least sum of moves from the centre: equal TTFTs must not starve a rank."""
    moves = np.abs(candidates - center).sum(axis=1)
    nearest: npt.NDArray[np.int64] = candidates[int(moves.argmin())]
    return nearest
