"""HardwareSearch: a coarse-to-fine search for the fastest partition, decided by measured TTFTs alone.

Each stage measures the partitions around the best one so far, with half the stride of the stage before. The last
stage compares the plan's partition with the best one in alternating rounds (A/B).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np

from kvrsim.io.journal import Journal
from kvrsim.io.schema import JsonObject, NonNegative, Range, read
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S
from kvrsim.units import MAX_TOKENS
from planner.confirm.hardware import Hardware, run_plan
from planner.search.minimise import Evaluator, around, chunks_between

if TYPE_CHECKING:
    from kvrsim.runtime.transport import Transport

_FIRST, _LAST = 1 / 8, 1 / 64  # strides, as shares of the even chunk; smaller ones do not change TTFT measurably
_MOST = 12  # partitions of a stage: those that are predicted to be the fastest
_HOPELESS = 1.15  # times the centre's predicted TTFT, above which a partition is not measured
_FINAL = -1  # number of the last stage, the plan's partition against the best
_FINAL_SHARE = 0.85  # of the time budget, after which no other stage is begun
_FORMAT = "kvrsim search 2"

Chunks = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured prefill."""

    stage: Annotated[int, Range(least=_FINAL, most=MAX_TOKENS)]  # of the search
    chunks: Chunks  # tokens a rank
    ttft_s: float
    spent_s: NonNegative  # of the search's time, warm-up included


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchTask:
    """What the ranks search."""

    scenario: Scenario
    hardware: Hardware
    seed: Partition  # the plan's
    budget_s: float
    known: tuple[Sample, ...]  # measured by an interrupted search
    journal: Journal  # of samples; the first rank writes it

    def facts(self) -> dict[str, str]:
        """What decides which prefills the ranks run: it must be the same on all of them."""
        return {
            "repeats": str(self.hardware.repeats),
            "minutes": f"{self.budget_s / 60:g}",
            "partition to begin with": ",".join(map(str, self.seed.chunk_lens)),
            "seed": str(self.hardware.seed),
        }


def search_journal(path: Path, about: Mapping[str, Any]) -> Journal:
    """The file that keeps samples; `about` says which model, machine and setting they are of."""
    return Journal(path=path, form=_FORMAT, about=about, work="search", argument="output")


def read_sample(line: JsonObject) -> Sample:
    """Check one line of a search's journal; raises InputError naming the key."""
    return read(Sample, line)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPartition:
    """A partition and its TTFTs in the last stage."""

    partition: Chunks
    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median TTFT."""
        return median(self.samples_s)


class Stopwatch(Protocol):
    """Measures prefills."""

    def sample(self, stage: int, chunks: Chunks) -> Sample:
        """One prefill, measured now."""

    def conditions(self) -> dict[str, str]:
        """What measured times depend on."""


@dataclass(kw_only=True, slots=True)
class HardwareSearch:
    """The state and the result of a search."""

    samples: list[Sample] = field(default_factory=list)
    ended: str = ""
    conditions: dict[str, str] = field(default_factory=dict)
    _center: Chunks = ()
    _seed: Chunks = ()

    @property
    def best(self) -> MeasuredPartition:
        """The faster one of the last stage."""
        return min((self._final(self._center), self.seed), key=lambda one: one.median_s)

    @property
    def seed(self) -> MeasuredPartition:
        """The plan's partition in the last stage."""
        return self._final(self._seed)

    def run(self, task: SearchTask, stopwatch: Stopwatch) -> None:
        """Search until the finest stride is done or the time is up; then compare the plan's partition with the best."""
        self._center = self._seed = task.seed.chunk_lens
        known = list(task.known)
        self.ended = "the finest stride is done"
        for stage, stride in enumerate(_strides(task.seed)):
            candidates = _around(task.scenario, self._center, stride)
            if not self._measured(task, stopwatch, known, stage, candidates, _FINAL_SHARE * task.budget_s):
                self.ended = f"the time is up, at a stride of {stride} tokens"
                break
            self._center = min(candidates, key=lambda chunks: median(self._times_s(stage, chunks)))
        finalists = list(dict.fromkeys([self._seed, self._center]))
        self._measured(task, stopwatch, known, _FINAL, finalists, float("inf"))
        self.conditions = stopwatch.conditions()

    def _measured(
        self,
        task: SearchTask,
        stopwatch: Stopwatch,
        known: list[Sample],
        stage: int,
        candidates: Sequence[Chunks],
        limit_s: float,
    ) -> bool:
        """Every candidate `repeats` times, round-robin, so that drift affects all equally; False: the time is up."""
        for repetition in range(task.hardware.repeats):
            for index in range(len(candidates)):
                chunks = candidates[(index + repetition) % len(candidates)]
                sample = _taken(known, stage, chunks)
                if sample is None:
                    if sum(one.spent_s for one in self.samples) >= limit_s:
                        return False
                    sample = stopwatch.sample(stage, chunks)
                self.samples.append(sample)
        return True

    def _times_s(self, stage: int, chunks: Chunks) -> tuple[float, ...]:
        return tuple(one.ttft_s for one in self.samples if (one.stage, one.chunks) == (stage, chunks))

    def _final(self, chunks: Chunks) -> MeasuredPartition:
        return MeasuredPartition(partition=chunks, samples_s=self._times_s(_FINAL, chunks))


class RankStopwatch:
    """One rank's part in the prefills of a search: all ranks learn the same times; the first one keeps the journal."""

    def __init__(self, transport: Transport, task: SearchTask) -> None:
        from kvrsim.runtime.measure import Stopwatch as PrefillStopwatch
        from kvrsim.runtime.transport import EmulatedTransport

        hardware, scenario = task.hardware, task.scenario
        self.task, self.transport = task, transport
        link = hardware.link(scenario)
        linked = transport if link is None else EmulatedTransport(transport, link)
        self.prefills = PrefillStopwatch(linked, hardware.choice(scenario))
        self.warm: set[Chunks] = set()
        self._since_s = time.monotonic()
        self._spent_s = sum(sample.spent_s for sample in task.known)  # the interrupted search's time included

    def sample(self, stage: int, chunks: Chunks) -> Sample:
        """One prefill, after a warm-up where the partition is new."""
        plan = run_plan(self.task.scenario, KVR_S.name, Partition(chunk_lens=chunks), "ring")
        if chunks not in self.warm:
            self.warm.add(chunks)
            self.prefills.ttft_s(plan)
        ttft_s = self.prefills.ttft_s(plan)
        now_s = time.monotonic()
        spent_s = self.transport.exchange(now_s - self._since_s)[0]
        self._since_s = now_s
        self._spent_s += spent_s
        self.transport.report(round(self._spent_s), round(self.task.budget_s), "seconds of the search")
        found = Sample(stage=stage, chunks=chunks, ttft_s=ttft_s, spent_s=spent_s)
        if self.transport.rank == 0:
            self.task.journal.append(asdict(found))
        return found

    def conditions(self) -> dict[str, str]:
        """Of the machine and its libraries."""
        return self.prefills.conditions()


def _taken(known: list[Sample], stage: int, chunks: Chunks) -> Sample | None:
    """One of the samples that were there already, each once."""
    for index, sample in enumerate(known):
        if (sample.stage, sample.chunks) == (stage, chunks):
            return known.pop(index)
    return None


def _strides(seed: Partition) -> Iterator[int]:
    """From an eighth of the even chunk down, halved."""
    share = seed.num_tokens / len(seed.chunk_lens)
    stride = max(1, round(share * _FIRST))
    while True:
        yield stride
        if stride <= max(1.0, share * _LAST):
            return
        stride = max(1, stride // 2)


def _around(scenario: Scenario, center: Chunks, stride: int) -> list[Chunks]:
    """The centre, then those around it that are not predicted to be hopeless, the most promising first."""
    tokens = sum(center)
    rows = chunks_between(around(np.cumsum(center)[:-1], stride, tokens), tokens)
    evaluator = Evaluator(scenario, KVR_S)
    ttft_s, center_s = evaluator.ttft_s(rows.astype(float)), evaluator.one(center)
    order = [index for index in np.argsort(ttft_s, kind="stable") if ttft_s[index] <= _HOPELESS * center_s]
    found = [tuple(int(chunk) for chunk in rows[index]) for index in order[:_MOST]]
    return list(dict.fromkeys([center, *found]))
