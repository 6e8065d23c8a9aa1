"""Levels: the search itself, which asks for measured TTFTs and decides by nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Protocol

import numpy as np

from kvrsim.partition import Partition
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from planner.confirm.hardware import Hardware
from planner.confirm.journal import Sample, SearchJournal
from planner.evaluate import Evaluator

_OFFSETS = (-2, -1, 0, 1, 2)  # strides, as in the paper
_FIRST, _LAST = 1 / 8, 1 / 64  # strides, of the even share; finer, no stopwatch tells partitions apart
_MOST = 12  # partitions of a level: those that the simulator holds for the fastest
_MOST_AT_ONCE = 4  # boundaries whose offsets are all combined; of more, one at a time and all together
_HOPELESS = 1.15  # times the centre's predicted TTFT, beyond which a partition is not measured
_DUEL = -1  # the level of the last rounds, the plan's partition against the best
_DUEL_SHARE = 0.85  # of the time, after which no other level is begun

Chunks = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What the ranks search."""

    scenario: Scenario
    hardware: Hardware
    seed: Partition
    budget_s: float
    known: tuple[Sample, ...]  # measured by a search that was killed
    journal: SearchJournal  # the first rank writes it

    def facts(self) -> dict[str, str]:
        """What decides which prefills the ranks run: it must be the same on all of them."""
        return {
            "repeats": str(self.hardware.repeats),
            "minutes": f"{self.budget_s / 60:g}",
            "partition to begin with": ",".join(map(str, self.seed.chunk_lens)),
            "seed": str(self.hardware.seed),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A partition and its TTFTs in the last rounds."""

    partition: Chunks
    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle one."""
        return median(self.samples_s)


class Stopwatch(Protocol):
    """Measures."""

    def sample(self, level: int, chunks: Chunks) -> Sample:
        """One prefill, measured now."""

    def conditions(self) -> dict[str, str]:
        """What measured times depend on."""


@dataclass(kw_only=True, slots=True)
class Levels:
    """A centre, and ever smaller strides around it."""

    samples: list[Sample] = field(default_factory=list)
    ended: str = ""
    conditions: dict[str, str] = field(default_factory=dict)
    _center: Chunks = ()
    _seed: Chunks = ()

    @property
    def best(self) -> Measured:
        """The faster one of the last rounds."""
        return min((self._of(self._center), self.seed), key=lambda one: one.median_s)

    @property
    def seed(self) -> Measured:
        """The plan's partition in the last rounds."""
        return self._of(self._seed)

    def run(self, task: Task, stopwatch: Stopwatch) -> None:
        """Search until the finest stride is done or the time is up; then the plan's partition against the best."""
        self._center = self._seed = task.seed.chunk_lens
        known = list(task.known)
        self.ended = "the finest stride is done"
        for level, stride in enumerate(_strides(task.seed)):
            candidates = _around(task.scenario, self._center, stride)
            if not self._measured(task, stopwatch, known, level, candidates, _DUEL_SHARE * task.budget_s):
                self.ended = f"the time is up, at a stride of {stride} tokens"
                break
            self._center = min(candidates, key=lambda chunks: self._median_s(level, chunks))
        last = list(dict.fromkeys([self._seed, self._center]))
        self._measured(task, stopwatch, known, _DUEL, last, float("inf"))
        self.conditions = stopwatch.conditions()

    def _measured(
        self,
        task: Task,
        stopwatch: Stopwatch,
        known: list[Sample],
        level: int,
        candidates: Sequence[Chunks],
        limit_s: float,
    ) -> bool:
        """Every candidate as often as asked for, in turn, so that drift meets all alike; False: the time is up."""
        for repetition in range(task.hardware.repeats):
            for index in range(len(candidates)):
                chunks = candidates[(index + repetition) % len(candidates)]
                sample = _taken(known, level, chunks)
                if sample is None:
                    if sum(one.spent_s for one in self.samples) >= limit_s:
                        return False
                    sample = stopwatch.sample(level, chunks)
                self.samples.append(sample)
        return True

    def _median_s(self, level: int, chunks: Chunks) -> float:
        return median(one.ttft_s for one in self.samples if (one.level, one.chunks) == (level, chunks))

    def _of(self, chunks: Chunks) -> Measured:
        found = (one.ttft_s for one in self.samples if (one.level, one.chunks) == (_DUEL, chunks))
        return Measured(partition=chunks, samples_s=tuple(found))


def _taken(known: list[Sample], level: int, chunks: Chunks) -> Sample | None:
    """One of the samples that were there already, each once."""
    for index, sample in enumerate(known):
        if (sample.level, sample.chunks) == (level, chunks):
            return known.pop(index)
    return None


def _strides(seed: Partition) -> Iterator[int]:
    """From an eighth of the even share down, halved."""
    share = seed.num_tokens / len(seed.chunk_lens)
    stride = max(1, round(share * _FIRST))
    while True:
        yield stride
        if stride <= max(1.0, share * _LAST):
            return
        stride = max(1, stride // 2)


def _around(scenario: Scenario, center: Chunks, stride: int) -> list[Chunks]:
    """The centre, and those around it that the simulator does not hold for hopeless, the most promising first."""
    tokens, count = sum(center), len(center) - 1
    if count <= _MOST_AT_ONCE:
        offsets = np.array(list(product(_OFFSETS, repeat=count)))
    else:
        alone = [np.eye(count, dtype=int) * offset for offset in _OFFSETS if offset]
        offsets = np.concatenate([*alone, *(np.full((1, count), offset) for offset in _OFFSETS)])
    ends = np.cumsum(center)[:-1] + stride * offsets
    rows: Array = np.diff(np.pad(ends, ((0, 0), (1, 1)), constant_values=((0, 0), (0, tokens))), axis=1)
    rows = rows[(rows >= 1).all(axis=1)]
    evaluator = Evaluator(scenario, STRATEGIES["kvr-s"])
    ttft_s, center_s = evaluator.ttft_s(rows.astype(float)), evaluator.one(center)
    order = [index for index in np.argsort(ttft_s, kind="stable") if ttft_s[index] <= _HOPELESS * center_s]
    found = [tuple(int(chunk) for chunk in rows[index]) for index in order[:_MOST]]
    return list(dict.fromkeys([center, *found]))
