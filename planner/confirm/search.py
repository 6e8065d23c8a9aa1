"""`kvrsim confirm --search`: partitions near the plan's, measured in stages of finer strides, with a time limit.

Each stage measures the neighbours of the best partition so far that the simulator selects. Its stride is half that of
the previous stage. The last stage compares the plan's partition with the best one in alternating rounds (A/B). A
journal next to the output keeps each measured prefill, so that an interrupted search resumes.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.execution import Execution, place
from kvrsim.io.files import is_first_rank
from kvrsim.io.journal import Journal, append, read_results
from kvrsim.io.schema import fields_to_json, to_json, write_json
from kvrsim.results.question import Question
from kvrsim.runtime.host import versions
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.ranks import launch
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S
from kvrsim.version import __version__
from planner.candidates import Candidate
from planner.confirm.confirm import partitions_around
from planner.confirm.hardware import Hardware, MemoryBudget, Reporter
from planner.search.minimise import Evaluator
from planner.search.search import search
from planner.table.build import draft_of, entry_of
from planner.table.table import PartitionTable, TableSetting, quantization_steps

if TYPE_CHECKING:
    from kvrsim.runtime.transport import Transport

# shares of the even chunk; smaller strides do not change TTFT measurably
_FIRST_STRIDE = 1 / 8
_LAST_STRIDE = 1 / 64
_MOST_PARTITIONS = 12  # largest number of partitions per stage, those with the least predicted TTFT
_SLOWER_LIMIT = 1.15  # partitions are not measured if their prediction exceeds the centre's by this factor
_SEARCH_SHARE = 0.85  # share of the time budget after which no new stage begins

Chunks = tuple[int, ...]  # tokens per rank
Measure = Callable[[Chunks], tuple[float, float]]  # returns the TTFT of one prefill, and seconds since the search began


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchTask:
    """The search that the ranks run."""

    scenario: Scenario
    hardware: Hardware
    seed: Chunks  # the plan's partition
    budget_s: float
    journal: Path
    known: Sequence[tuple[float, float]] = ()  # earlier results of `measure`, if an interrupted search is resumed

    def facts(self) -> dict[str, str]:
        """Return the facts that determine the ranks' prefills; these must be equal on all ranks."""
        facts = {name: str(getattr(self.hardware, name)) for name in ("repeats", "seed")}
        chunks = ",".join(map(str, self.seed))
        facts |= {"minutes": f"{self.budget_s / 60:g}", "partition to begin with": chunks}
        return facts | {"prefills measured before": str(len(self.known))}


@dataclasses.dataclass(kw_only=True, slots=True)
class HardwareSearch:
    """The state and the result of a search."""

    seed: Chunks  # the plan's partition
    center: Chunks  # the best partition so far
    stages: list[dict[Chunks, list[float]]] = field(default_factory=list)  # by stage: measured TTFTs by partition
    ended: str = "the finest stride is done"  # reason why the search ended
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
        """Search to the finest stride or the time limit; then measure the plan's partition against the best one."""
        for stride in _strides(sum(self.seed) / len(self.seed)):
            candidates = _around(place(task.scenario, KVR_S), self.center, stride)
            if not self._measure(task, measure, candidates, _SEARCH_SHARE * task.budget_s):
                self.ended = f"the time is up, at a stride of {stride} tokens"
                break
            self.center = min(candidates, key=self.median_s)
        self._measure(task, measure, list(dict.fromkeys([self.seed, self.center])), float("inf"))

    def _measure(self, task: SearchTask, measure: Measure, candidates: Sequence[Chunks], limit_s: float) -> bool:
        """Measure all candidates `repeats` times in turn, so that drift affects all alike; False if the time is up."""
        self.stages.append({chunks: [] for chunks in candidates})
        for repetition in range(task.hardware.repeats):
            for index in range(len(candidates)):
                if self.seconds >= limit_s:
                    return False
                chunks = candidates[(index + repetition) % len(candidates)]
                ttft_s, self.seconds = measure(chunks)
                self.stages[-1][chunks].append(ttft_s)
        return True


def _strides(even: float) -> Iterator[int]:
    """Yield strides: an eighth of the even chunk, then half of the previous one."""
    stride = max(1, round(even * _FIRST_STRIDE))
    yield stride
    while stride > max(1.0, even * _LAST_STRIDE):
        stride //= 2
        yield stride


def _around(execution: Execution, center: Chunks, stride: int) -> list[Chunks]:
    """Return the centre, and the partitions around it that may be faster, in order of predicted TTFT."""
    limit_s = _SLOWER_LIMIT * Evaluator(execution).one(center)
    promising = [chunks for chunks, ttft_s in partitions_around(execution, center, stride) if ttft_s <= limit_s]
    return list(dict.fromkeys([center, *promising[:_MOST_PARTITIONS]]))


def search_on_ranks(transport: Transport, task: SearchTask) -> HardwareSearch:
    """Run the same search on every rank in lock step, with TTFTs that all ranks share."""
    from kvrsim.runtime.measure import Stopwatch, agree, conditions_of, forward_of

    forward = forward_of(task.hardware.choice(task.scenario), transport)
    agree(transport, forward, task.facts())
    whole = replace(_plan(task, task.seed), strategy="tsp")  # with tsp, every rank holds all tokens
    watch = Stopwatch(transport, forward, [whole], task.hardware.seed)
    queue = deque(task.known)
    warm = set[Chunks]()
    since_s = time.monotonic()
    if queue:  # the time of an interrupted search counts
        since_s -= queue[-1][1]

    def measure(chunks: Chunks) -> tuple[float, float]:
        """Measure one prefill, after a warm-up if the partition is new; results of an interrupted search are reused."""
        if queue:
            return queue.popleft()
        plan = _plan(task, chunks)
        if chunks not in warm:
            warm.add(chunks)
            watch.ttft_s(plan)
        ttft_s = watch.ttft_s(plan)
        seconds = transport.exchange(time.monotonic() - since_s)[0]
        if transport.rank == 0:
            append(task.journal, [ttft_s, seconds])
        transport.slot.report(round(seconds), round(task.budget_s), "seconds of the search")
        return ttft_s, seconds

    result = HardwareSearch(seed=task.seed, center=task.seed)
    result.run(task, measure)
    result.conditions = conditions_of(transport, forward)
    return result


def _plan(task: SearchTask, chunks: Chunks) -> RunPlan:
    return task.hardware.run_plan(Candidate.of(place(task.scenario, KVR_S), chunks))


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedPartition:
    """The result of a search on the machine."""

    question: Question
    search: HardwareSearch
    output: str  # file of the table

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
        """Share of the TTFT of the plan's partition that the best partition saves."""
        return 1 - self.search.median_s(self.search.best) / self.search.median_s(self.search.seed)

    def _measure(self, chunks: Chunks) -> dict[str, Any]:
        samples_s = self.search.stages[-1][chunks]
        return {"partition": list(chunks), "measured_ttft_s": median(samples_s), "samples_s": samples_s}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            **self.question.measured_header(predicted=True),
            **self._measure(self.search.best),
            "plan": self._measure(self.search.seed),
            **fields_to_json(self, "gain", "partitions", "prefills", "output"),
            **fields_to_json(self.search, "ended", "seconds", "conditions"),
        }


def search_here(
    scenario: Scenario, hardware: Hardware, *, minutes: float, output: Path, reporter: Reporter | None = None
) -> SearchedPartition:
    """Search on as many ranks as the scenario has GPUs, and write a table of one entry.

    Raises InputError if the machine cannot run the scenario, and RankError if a rank fails.
    """
    reporter = reporter or Reporter()
    scenario = hardware.runnable(scenario)
    if scenario.cluster.num_gpus < 2:
        raise InputError("gpus", scenario.cluster.num_gpus, "at least 2 for `search`: one GPU has no partition")
    execution = place(scenario, KVR_S)
    seed = search(execution).partition.chunk_lens
    budget_s = 60 * minutes
    path = Path(f"{output}.search")
    task = SearchTask(scenario=scenario, hardware=hardware, seed=seed, budget_s=budget_s, journal=path)
    reporter.note(f"searching from {','.join(map(str, seed))}, for at most {minutes:g} minutes")
    candidate = Candidate.of(execution, seed)
    MemoryBudget.of(scenario, hardware, "ranks").check({KVR_S.name: candidate})
    longest_s = hardware.longest_s([candidate])
    how = hardware.launch(scenario, scenario.cluster.num_gpus, longest_s, budget_s / longest_s + 4 * hardware.repeats)
    question = Question.of(scenario, seed=hardware.seed)
    with ExitStack() as stack:
        if is_first_rank():
            journal = stack.enter_context(Journal(path, task.facts() | versions() | {"question": to_json(question)}))
            if journal.results:
                reporter.note(f"resumed from {len(journal.results)} prefills of an interrupted search")
        task = replace(task, known=tuple(map(tuple, read_results(path))))
        done: HardwareSearch = launch(search_on_ranks, task, how=how, on_progress=reporter.progress)[0]
        result = SearchedPartition(question=question, search=done, output=str(output))
        if is_first_rank():
            _write_table(scenario, result, output)
            journal.remove()
    return result


def _write_table(scenario: Scenario, result: SearchedPartition, output: Path) -> None:
    """Write a table of one entry with predicted times, as in every table; measured times have the key "_measured"."""
    chunks = result.search.best
    execution = place(scenario, KVR_S)
    steps = quantization_steps(execution.placed)
    predicted_s = Evaluator(execution).one(chunks)
    draft = replace(draft_of(execution), partition=chunks, ttft_s=predicted_s)
    entry = entry_of(execution, draft, None, steps)
    table = PartitionTable(setting=TableSetting.of(scenario), kvrsim_version=__version__, steps=steps, entries=(entry,))
    write_json(output, {"_measured": result.to_dict()} | table.to_dict(), argument="output")
