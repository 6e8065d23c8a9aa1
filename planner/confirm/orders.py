"""The order of measured candidates beside the predicted one: what is an order, and what a tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

LEAST_SAMPLES = 3  # of each candidate, below which there is no spread to judge by


class Timed(Protocol):
    """A candidate, predicted and measured."""

    @property
    def strategy(self) -> str:
        """Its name."""

    @property
    def predicted_s(self) -> float:
        """Predicted TTFT."""

    @property
    def samples_s(self) -> tuple[float, ...]:
        """Measured TTFTs."""

    @property
    def median_s(self) -> float:
        """Their median."""

    @property
    def iqr_s(self) -> float:
        """Their interquartile range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """Pairs of candidates whose measured TTFTs differ significantly, and those predicted in that order.

    A difference is significant where the medians are further apart than both interquartile ranges together. All
    other pairs are ties, and so is every pair with fewer than LEAST_SAMPLES samples.
    """

    significant: tuple[tuple[str, str], ...]  # the faster one by measurement first
    wrong: tuple[tuple[str, str], ...]  # of these, predicted in the other order, or alike
    num_pairs: int

    @classmethod
    def of(cls, candidates: Sequence[Timed]) -> Orders:
        """Of all pairs."""
        significant, wrong = [], []
        pairs = list(combinations(sorted(candidates, key=lambda one: one.median_s), 2))
        for fast, slow in pairs:
            if is_order(fast, slow):
                significant.append((fast.strategy, slow.strategy))
                if fast.predicted_s >= slow.predicted_s:
                    wrong.append((fast.strategy, slow.strategy))
        return cls(significant=tuple(significant), wrong=tuple(wrong), num_pairs=len(pairs))

    @property
    def right(self) -> int:
        """Significant pairs that were predicted in the measured order."""
        return len(self.significant) - len(self.wrong)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "pairs": self.num_pairs,
            "significant": len(self.significant),
            "right": self.right,
            "wrong": [list(pair) for pair in self.wrong],
        }


def is_order(one: Timed, other: Timed) -> bool:
    """Whether two candidates were measured to differ significantly."""
    if min(len(one.samples_s), len(other.samples_s)) < LEAST_SAMPLES:
        return False
    return abs(one.median_s - other.median_s) > one.iqr_s + other.iqr_s


def ranks_of(seconds: Sequence[float]) -> list[int]:
    """The place of each, 1 for the least; equal ones share a place."""
    return [1 + sum(other < one for other in seconds) for one in seconds]
