"""`kvrsim confirm --search`: the paper's hierarchical grid search with measured TTFT; bounded in time.

Each stage measures the partitions around the best one so far, with half the stride of the stage before. The last
stage compares the plan's partition with the best one in alternating rounds (A/B). A journal next to the output keeps
each measured prefill, so that an interrupted search resumes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrsim.errors import InputError
from kvrsim.io.files import is_first_rank
from kvrsim.io.journal import Journal, append, read_results
from kvrsim.io.schema import fields_to_json, to_json, write_json
from kvrsim.results.question import Question
from kvrsim.runtime.host import versions
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.ranks import launch
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S
from kvrsim.version import __version__
from planner.candidates import Candidate
from planner.confirm.hardware import Hardware, MemoryBudget, Reporter
from planner.search.minimise import Evaluator, around, chunks_between
from planner.search.search import search
from planner.table.build import draft_of, entry_of
from planner.table.table import PartitionTable, TableSetting, quantization_steps

if TYPE_CHECKING:
    from kvrsim.runtime.transport import Transport

_FIRST, _LAST = 1 / 8, 1 / 64  # strides, as shares of the even chunk; smaller ones do not change TTFT measurably
_MOST = 12  # partitions of a stage: those that are predicted to be the fastest
_HOPELESS = 1.15  # a partition whose prediction exceeds the centre's by this factor is not measured
_FINAL_SHARE = 0.85  # share of the time budget after which no stage begins

Chunks = tuple[int, ...]  # tokens per rank
Measure = Callable[[Chunks], tuple[float, float]]  # -> TTFT of one prefill, and seconds since the search began


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchTask:
    """The search that the ranks run."""

    scenario: Scenario
    hardware: Hardware
    seed: Partition  # the plan's
    budget_s: float
    journal: Path
    known: Sequence[tuple[float, float]] = ()  # earlier results of `measure` in an interrupted search

    def facts(self) -> dict[str, str]:
        """Return the facts that determine the ranks' prefills, and so must be equal on all ranks."""
        facts = {name: str(getattr(self.hardware, name)) for name in ("repeats", "seed")}
        chunks = ",".join(map(str, self.seed.chunk_lens))
        facts |= {"minutes": f"{self.budget_s / 60:g}", "partition to begin with": chunks}
        return facts | {"prefills measured before": str(len(self.known))}


@dataclass(kw_only=True, slots=True)
class HardwareSearch:
    """The state and the result of a search."""

    seed: Chunks = ()  # the plan's partition
    center: Chunks = ()  # the best so far
    stages: list[dict[Chunks, list[float]]] = field(default_factory=list)  # measured TTFTs by partition
    ended: str = "the finest stride is done"  # why
    seconds: float = 0.0
    conditions: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Chunks:
        """The faster partition of the last stage."""
        return min((self.center, self.seed), key=self.median_s)

    def median_s(self, chunks: Chunks) -> float:
        """Return the median TTFT of a partition in the last stage."""
        return median(self.stages[-1][chunks])

    def run(self, task: SearchTask, measure: Measure) -> None:
        """Search until the finest stride is done or the time is up; then compare the plan's partition with the best."""
        self.center = self.seed = task.seed.chunk_lens
        for stride in _strides(task.seed):
            candidates = _around(task.scenario, self.center, stride)
            if not self._measured(task, measure, candidates, _FINAL_SHARE * task.budget_s):
                self.ended = f"the time is up, at a stride of {stride} tokens"
                break
            self.center = min(candidates, key=self.median_s)
        self._measured(task, measure, list(dict.fromkeys([self.seed, self.center])), float("inf"))

    def _measured(self, task: SearchTask, measure: Measure, candidates: Sequence[Chunks], limit_s: float) -> bool:
        """Measure all candidates `repeats` times, round-robin against drift; False if time runs out."""
        self.stages.append({chunks: [] for chunks in candidates})
        for repetition in range(task.hardware.repeats):
            for index in range(len(candidates)):
                if self.seconds >= limit_s:
                    return False
                chunks = candidates[(index + repetition) % len(candidates)]
                ttft_s, self.seconds = measure(chunks)
                self.stages[-1][chunks].append(ttft_s)
        return True


def _strides(seed: Partition) -> Iterator[int]:
    """Yield strides: an eighth of the even chunk, then halves."""
    share = seed.num_tokens / len(seed.chunk_lens)
    stride = max(1, round(share * _FIRST))
    while True:
        yield stride
        if stride <= max(1.0, share * _LAST):
            return
        stride = max(1, stride // 2)


def _around(scenario: Scenario, center: Chunks, stride: int) -> list[Chunks]:
    """Return the centre, then those around it that are not predicted to be hopeless, the most promising first."""
    tokens = sum(center)
    rows = chunks_between(around(np.cumsum(center)[:-1], stride, tokens), tokens)
    evaluator = Evaluator(scenario, KVR_S)
    ttft_s, center_s = evaluator.ttft_s(rows.astype(float)), evaluator.one(center)
    order = [index for index in np.argsort(ttft_s, kind="stable") if ttft_s[index] <= _HOPELESS * center_s]
    neighbours = [tuple(int(chunk) for chunk in rows[index]) for index in order[:_MOST]]
    return list(dict.fromkeys([center, *neighbours]))


class RankSampler:
    """One rank's part in the prefills of a search: all ranks get the same times."""

    def __init__(self, transport: Transport, task: SearchTask) -> None:
        from kvrsim.runtime.measure import Stopwatch, forward_of

        self.task, self.transport = task, transport
        forward, seed = forward_of(task.hardware.choice(task.scenario), transport), self._plan(task.seed.chunk_lens)
        self.stopwatch = Stopwatch(transport, forward, seed, task.hardware.seed, several=True)
        self.warm: set[Chunks] = set()
        self.known = deque(task.known)
        self._since_s = time.monotonic() - (task.known[-1][1] if task.known else 0.0)

    def _plan(self, chunks: Chunks) -> RunPlan:
        partition = Partition(chunk_lens=chunks)
        candidate = Candidate(scenario=self.task.scenario, strategy=KVR_S, partition=partition)
        return self.task.hardware.run_plan(candidate)

    def measure(self, chunks: Chunks) -> tuple[float, float]:
        """Measure one prefill, after a warm-up where the partition is new; known ones are not repeated."""
        if self.known:
            return self.known.popleft()
        plan = self._plan(chunks)
        if chunks not in self.warm:
            self.warm.add(chunks)
            self.stopwatch.ttft_s(plan)
        ttft_s = self.stopwatch.ttft_s(plan)
        seconds = self.transport.exchange(time.monotonic() - self._since_s)[0]
        if self.transport.rank == 0:
            append(self.task.journal, [ttft_s, seconds])
        self.transport.report(round(seconds), round(self.task.budget_s), "seconds of the search")
        return ttft_s, seconds


def search_on_ranks(transport: Transport, task: SearchTask) -> HardwareSearch:
    """Run by every rank: the same search in lock step, on TTFTs that all ranks share."""
    from kvrsim.runtime.measure import agree

    agree(transport, task.facts() | versions())
    sampler, result = RankSampler(transport, task), HardwareSearch()
    result.run(task, sampler.measure)
    result.conditions = sampler.stopwatch.conditions()
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedPartition:
    """The result of a search on the machine."""

    question: Question
    search: HardwareSearch
    output: str  # the table's file

    @property
    def partitions(self) -> int:
        """Number of measured partitions."""
        return len(set().union(*self.search.stages))

    @property
    def prefills(self) -> int:
        """Number of measured prefills."""
        return sum(len(times_s) for stage in self.search.stages for times_s in stage.values())

    @property
    def gain(self) -> float:
        """How much faster the best partition is than the plan's, as a share of the latter's TTFT."""
        return 1 - self.search.median_s(self.search.best) / self.search.median_s(self.search.seed)

    def _measured(self, chunks: Chunks) -> dict[str, Any]:
        samples_s = self.search.stages[-1][chunks]
        return {"partition": list(chunks), "measured_ttft_s": median(samples_s), "samples_s": samples_s}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            **self.question.measured_header(predicted=True),
            **self._measured(self.search.best),
            "plan": self._measured(self.search.seed),
            **fields_to_json(self, "gain", "partitions", "prefills", "output"),
            **fields_to_json(self.search, "ended", "seconds", "conditions"),
        }


def search_here(
    scenario: Scenario, hardware: Hardware, *, minutes: float, output: Path, reporter: Reporter | None = None
) -> SearchedPartition:
    """Search on as many ranks as the scenario has GPUs, and write a table of one entry.

    Raises InputError where the machine cannot run the scenario, RankError where a rank fails.
    """
    reporter = reporter or Reporter()
    scenario = hardware.runnable(scenario)
    if scenario.cluster.num_gpus < 2:
        raise InputError("gpus", scenario.cluster.num_gpus, "at least 2 for `search`: one GPU has no partition")
    seed, budget_s = search(scenario, KVR_S).partition, 60 * minutes
    path = Path(f"{output}.search")
    task = SearchTask(scenario=scenario, hardware=hardware, seed=seed, budget_s=budget_s, journal=path)
    reporter.note(f"searching from {','.join(map(str, seed.chunk_lens))}, for at most {minutes:g} minutes")
    candidate = Candidate(scenario=scenario, strategy=KVR_S, partition=seed)
    MemoryBudget.of(scenario, hardware, "ranks").check([candidate])
    longest_s = hardware.longest_s([candidate])
    how = hardware.launch(scenario, scenario.cluster.num_gpus, longest_s, budget_s / longest_s + 4 * hardware.repeats)
    question = Question.of(scenario, seed=hardware.seed)
    with ExitStack() as stack:
        if is_first_rank():
            journal = stack.enter_context(Journal(path, task.facts() | versions() | {"question": to_json(question)}))
            if journal.results:
                reporter.note(f"resumed from {len(journal.results)} prefills of an interrupted search")
        task = replace(task, known=[(ttft_s, elapsed_s) for ttft_s, elapsed_s in read_results(path)])
        done: HardwareSearch = launch(search_on_ranks, task, how=how, on_progress=reporter.progress)[0]
        result = SearchedPartition(question=question, search=done, output=str(output))
        if is_first_rank():
            _write_table(scenario, result, output)
            journal.remove()
    return result


def _write_table(scenario: Scenario, result: SearchedPartition, output: Path) -> None:
    """Write a table of one entry with predicted times, as in every table; measured times are under "_measured"."""
    chunks, steps = result.search.best, quantization_steps(scenario)
    predicted_s = Evaluator(scenario, KVR_S).one(chunks)
    draft = replace(draft_of(scenario, KVR_S), partition=chunks, ttft_s=predicted_s)
    entry = entry_of(scenario, KVR_S, draft, None, steps)
    table = PartitionTable(setting=TableSetting.of(scenario), kvrsim_version=__version__, steps=steps, entries=(entry,))
    write_json(output, {"_measured": result.to_dict()} | table.to_dict(), argument="output")
