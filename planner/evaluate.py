"""TTFT of many partitions of one scenario, with their count and progress, for the searches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvrsim.executors.run import rows_at_once, ttft_s
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy

# Evaluations done, the most that there will be (None: unknown), and the best TTFT so far in seconds.
Progress = Callable[[int, int | None, float], None]


@dataclass(slots=True)
class Evaluator:
    """Evaluates partitions of one scenario, counts them and reports progress."""

    scenario: Scenario
    strategy: Strategy
    on_progress: Progress | None = None
    evaluations: int = 0
    most: int | None = None  # evaluations that the search will not go beyond; None: unknown
    best_s: float = math.inf

    def ttft_s(self, chunks: Array, enough_s: float = math.inf) -> Array:
        """TTFT of each row of chunks (B, num_ranks), tokens; shape (B,).

        enough_s: rows above it may get a lower bound that is above it, too.
        """
        block = rows_at_once(self.scenario, self.strategy)
        parts = []
        for first in range(0, len(chunks), block):
            rows = chunks[first : first + block]
            parts.append(ttft_s(self.scenario, self.strategy, rows, enough_s=enough_s))
            self.evaluations += len(parts[-1])
            self.best_s = min(self.best_s, float(parts[-1].min()))
            self.report()
        return np.concatenate(parts)

    def report(self) -> None:
        """Report how many evaluations are done."""
        if self.on_progress is not None:
            self.on_progress(self.evaluations, self.most, self.best_s)

    def one(self, chunks: tuple[int, ...]) -> float:
        """TTFT of one partition."""
        return float(self.ttft_s(np.array([chunks], dtype=float))[0])
