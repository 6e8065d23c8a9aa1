"""TTFT of many partitions of one scenario: the search proposes, this evaluates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvrsim.compile import build_program
from kvrsim.executors.batch import run_batch
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy

BLOCK = 8192  # partitions that share one walk: arrays of 64 KiB, which stay in a core's cache

# Evaluations done, the most that there will be (None: unknown), and the best TTFT so far in seconds.
Progress = Callable[[int, int | None, float], None]


@dataclass(slots=True)
class Evaluator:
    """Counts what it evaluates and reports progress; flows that share a bandwidth need the event executor."""

    scenario: Scenario
    strategy: Strategy
    on_progress: Progress | None = None
    evaluations: int = 0
    most: int | None = None  # evaluations that the search will not go beyond; None: unknown
    best_s: float = float("inf")

    def ttft_s(self, chunks: Array) -> Array:
        """TTFT of each row of chunks (B, num_ranks), tokens; shape (B,)."""
        shared = self.scenario.cluster.shares_bandwidth
        run, block = (self._replay, 1) if shared else (self._batch, BLOCK)
        parts = []
        for first in range(0, len(chunks), block):
            parts.append(run(chunks[first : first + block]))
            self.evaluations += len(parts[-1])
            self.best_s = min(self.best_s, float(parts[-1].min()))
            self.report()
        return np.concatenate(parts)

    def report(self) -> None:
        """Say how far it is."""
        if self.on_progress is not None:
            self.on_progress(self.evaluations, self.most, self.best_s)

    def one(self, chunks: tuple[int, ...]) -> float:
        """TTFT of one partition."""
        return float(self.ttft_s(np.array([chunks], dtype=float))[0])

    def _batch(self, chunks: Array) -> Array:
        program = build_program(self.scenario, self.strategy, list(np.ascontiguousarray(chunks.T)))
        return np.asarray(run_batch(program, self.scenario.cluster)[-1])

    def _replay(self, chunks: Array) -> Array:
        from kvrsim.executors.event import Replay  # SimPy, only where it is needed

        program = build_program(self.scenario, self.strategy, list(np.ascontiguousarray(chunks.T)))
        return np.array([Replay(program, self.scenario.cluster, record=False).finish_s[-1]])
