"""`kvrsim confirm --search`: the paper's hierarchical grid search with measured TTFT; bounded in time, resumable.

Each stage measures the partitions around the best one so far, with half the stride of the stage before. The last
stage compares the plan's partition with the best one in alternating rounds (A/B).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from kvrsim.errors import InputError
from kvrsim.io.files import is_first_rank
from kvrsim.io.journal import Journal
from kvrsim.io.schema import JsonObject, NonNegative, Range, read, to_json, write_json
from kvrsim.results.question import Question
from kvrsim.runtime.host import versions
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.ranks import launch
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S
from kvrsim.units import MAX_TOKENS
from kvrsim.version import __version__
from planner.candidates import Candidate
from planner.confirm.hardware import Hardware, MemoryBudget, Reporter
from planner.search.minimise import Evaluator, around, chunks_between
from planner.search.search import search
from planner.table.build import draft_of, entry_of
from planner.table.table import PartitionTable, TableSetting, quantization_steps

if TYPE_CHECKING:
    from kvrsim.runtime.transport import Transport

SUFFIX = ".search"  # of the journal, after the table's name
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
    chunks: Chunks  # tokens per rank
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
        """Return what determines which prefills the ranks run: it must be the same on all of them."""
        names = ("repeats", "seed")
        facts = {name: str(getattr(self.hardware, name)) for name in names}
        chunks = ",".join(map(str, self.seed.chunk_lens))
        return facts | {"minutes": f"{self.budget_s / 60:g}", "partition to begin with": chunks}


def search_journal(path: Path, about: Mapping[str, Any]) -> Journal:
    """Return the file that keeps samples; `about`: their model, machine and setting."""
    return Journal(path=path, form=_FORMAT, about=about, work="search", argument="output")


def read_sample(line: JsonObject) -> Sample:
    """Check one line of a search's journal; raise InputError naming the key."""
    return read(Sample, line)


@dataclass(kw_only=True, slots=True)
class HardwareSearch:
    """The state and the result of a search."""

    seed: Chunks = ()  # the plan's partition
    center: Chunks = ()  # the best so far
    samples: list[Sample] = field(default_factory=list)
    ended: str = ""  # why: the finest stride is done, or the time is up
    conditions: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Chunks:
        """The faster partition of the last stage."""
        return min((self.center, self.seed), key=lambda chunks: median(self.times_s(chunks)))

    def times_s(self, chunks: Chunks, stage: int = _FINAL) -> tuple[float, ...]:
        """Return the measured TTFTs of a partition in a stage."""
        return tuple(one.ttft_s for one in self.samples if (one.stage, one.chunks) == (stage, chunks))

    def run(self, task: SearchTask, sample: Callable[[int, Chunks], Sample]) -> None:
        """Search until the finest stride is done or the time is up; then compare the plan's partition with the best.

        sample(stage, chunks): measures one prefill.
        """
        self.center = self.seed = task.seed.chunk_lens
        known = list(task.known)
        self.ended = "the finest stride is done"
        for stage, stride in enumerate(_strides(task.seed)):
            candidates = _around(task.scenario, self.center, stride)
            if not self._measured(task, sample, known, stage, candidates):
                self.ended = f"the time is up, at a stride of {stride} tokens"
                break
            self.center = min(candidates, key=lambda chunks: median(self.times_s(chunks, stage)))
        self._measured(task, sample, known, _FINAL, list(dict.fromkeys([self.seed, self.center])))

    def _measured(
        self,
        task: SearchTask,
        sample: Callable[[int, Chunks], Sample],
        known: list[Sample],
        stage: int,
        candidates: Sequence[Chunks],
    ) -> bool:
        """Measure every candidate `repeats` times, round-robin, so that drift affects all equally; False: time is up.

        known: samples of an interrupted search, which are taken in place of new ones, each once.
        """
        limit_s = float("inf") if stage == _FINAL else _FINAL_SHARE * task.budget_s
        for repetition in range(task.hardware.repeats):
            for index in range(len(candidates)):
                chunks = candidates[(index + repetition) % len(candidates)]
                taken = next((one for one in known if (one.stage, one.chunks) == (stage, chunks)), None)
                if taken is not None:
                    known.remove(taken)
                elif sum(one.spent_s for one in self.samples) >= limit_s:
                    return False
                self.samples.append(taken or sample(stage, chunks))
        return True


def _strides(seed: Partition) -> Iterator[int]:
    """Yield strides from an eighth of the even chunk down, halved."""
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
    """One rank's part in the prefills of a search: all ranks get the same times; the first one keeps the journal."""

    def __init__(self, transport: Transport, task: SearchTask) -> None:
        from kvrsim.runtime.measure import Stopwatch, forward_of
        from kvrsim.runtime.transport import EmulatedTransport

        link = task.hardware.link(task.scenario)
        linked = transport if link is None else EmulatedTransport(transport, link)
        forward = forward_of(task.hardware.choice(task.scenario), transport)
        self.task, self.transport = task, transport
        whole = replace(self._plan(task.seed.chunk_lens), strategy="tsp")  # which holds every token on every rank
        self.stopwatch = Stopwatch(linked, forward, [whole], task.hardware.seed)
        self.warm: set[Chunks] = set()
        self._since_s = time.monotonic()
        self._spent_s = sum(sample.spent_s for sample in task.known)  # the interrupted search's time included

    def _plan(self, chunks: Chunks) -> RunPlan:
        partition = Partition(chunk_lens=chunks)
        candidate = Candidate(scenario=self.task.scenario, strategy=KVR_S, partition=partition)
        return self.task.hardware.run_plan(candidate)

    def sample(self, stage: int, chunks: Chunks) -> Sample:
        """Measure one prefill, after a warm-up where the partition is new."""
        plan = self._plan(chunks)
        if chunks not in self.warm:
            self.warm.add(chunks)
            self.stopwatch.ttft_s(plan)
        ttft_s = self.stopwatch.ttft_s(plan)
        now_s = time.monotonic()
        spent_s = self.transport.exchange(now_s - self._since_s)[0]
        self._since_s = now_s
        self._spent_s += spent_s
        self.transport.report(round(self._spent_s), round(self.task.budget_s), "seconds of the search")
        sample = Sample(stage=stage, chunks=chunks, ttft_s=ttft_s, spent_s=spent_s)
        if self.transport.rank == 0:
            self.task.journal.append(asdict(sample))
        return sample


def search_on_ranks(transport: Transport, task: SearchTask) -> HardwareSearch:
    """Run by every rank: the same search in lock step, on TTFTs that all ranks share."""
    from kvrsim.runtime.measure import agree

    agree(transport, task.facts() | versions())
    # Under torchrun, only the first process has read the journal.
    task = replace(task, known=transport.exchange(task.known)[0])
    sampler, result = RankSampler(transport, task), HardwareSearch()
    result.run(task, sampler.sample)
    result.conditions = sampler.stopwatch.conditions()
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedPartition:
    """The result of a search on the machine."""

    question: Question
    search: HardwareSearch
    resumed: int  # prefills taken from an interrupted search
    output: str  # the table's file

    @property
    def num_partitions(self) -> int:
        """Measured partitions."""
        return len({sample.chunks for sample in self.search.samples})

    def ttft_s(self, chunks: Chunks) -> float:
        """Return the median TTFT of the plan's partition or the best one, measured alternately in the last stage."""
        return median(self.search.times_s(chunks))

    @property
    def gain(self) -> float:
        """How much faster the best partition is than the plan's, as a share of the latter's TTFT."""
        return 1 - self.ttft_s(self.search.best) / self.ttft_s(self.search.seed)

    def _measured(self, chunks: Chunks) -> dict[str, Any]:
        samples_s = list(self.search.times_s(chunks))
        return {"partition": list(chunks), "measured_ttft_s": self.ttft_s(chunks), "samples_s": samples_s}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            **self.question.measured_header(predicted=True),
            **self._measured(self.search.best),
            "plan": self._measured(self.search.seed),
            "gain": self.gain,
            "ended": self.search.ended,
            "partitions": self.num_partitions,
            "prefills": len(self.search.samples),
            "resumed": self.resumed,
            "seconds": sum(sample.spent_s for sample in self.search.samples),
            "conditions": self.search.conditions,
            "output": self.output,
        }


def search_here(
    scenario: Scenario, hardware: Hardware, *, minutes: float, output: Path, reporter: Reporter | None = None
) -> SearchedPartition:
    """Search on as many ranks as the scenario has GPUs, and write a table of one entry.

    Samples are kept in FILE.search until the table is written; an interrupted search's time counts towards `minutes`.
    Raises InputError where the machine cannot run the scenario, RankError where a rank fails.
    """
    reporter = reporter or Reporter()
    scenario = hardware.runnable(scenario)
    if scenario.cluster.num_gpus < 2:
        raise InputError("gpus", scenario.cluster.num_gpus, "at least 2 for `search`: one GPU has no partition")
    journal = search_journal(output.with_name(output.name + SUFFIX), _about(scenario, hardware))
    known = tuple(journal.resume(read_sample)) if is_first_rank() else ()
    seed, budget_s = search(scenario, KVR_S).partition, 60 * minutes
    task = SearchTask(scenario=scenario, hardware=hardware, seed=seed, budget_s=budget_s, known=known, journal=journal)
    reporter.note(f"searching from {','.join(map(str, seed.chunk_lens))}, for at most {minutes:g} minutes")
    if known:
        reporter.note(f"{journal.path}: going on from {len(known)} prefills")
    candidate = Candidate(scenario=scenario, strategy=KVR_S, partition=seed)
    MemoryBudget.of(scenario, hardware, "ranks").check([candidate])
    longest_s = hardware.longest_s([candidate])
    left_s = max(0.0, budget_s - sum(sample.spent_s for sample in known))
    how = hardware.launch(scenario.cluster.num_gpus, longest_s, left_s / longest_s + 4 * hardware.repeats)
    done: HardwareSearch = launch(search_on_ranks, task, how=how, on_progress=reporter.progress)[0]
    question = Question.of(scenario, seed=hardware.seed)
    result = SearchedPartition(question=question, search=done, resumed=len(known), output=str(output))
    if is_first_rank():
        _write_table(scenario, result, output)
        journal.remove()
    return result


def _about(scenario: Scenario, hardware: Hardware) -> dict[str, Any]:
    """Return what samples depend on: a search with other values cannot use them."""
    run = {"device": hardware.device, "backend": hardware.backend, "threads": hardware.threads, "seed": hardware.seed}
    return {
        "setting": to_json(TableSetting.of(scenario)),
        "gpus": scenario.cluster.num_gpus,
        "context": scenario.request.context_len,
        "repeats": hardware.repeats,
        "ranks": run,
        "links": "emulated" if hardware.emulated else "the machine's",
        "kvrsim": __version__,
    }


def _write_table(scenario: Scenario, result: SearchedPartition, output: Path) -> None:
    """Write a table of one entry, its times predicted as in every table; the measured ones are under "_measured"."""
    chunks, steps = result.search.best, quantization_steps(scenario)
    predicted_s = Evaluator(scenario, KVR_S).one(chunks)
    draft = replace(draft_of(scenario, KVR_S), partition=chunks, ttft_s=predicted_s)
    entry = entry_of(scenario, KVR_S, draft, None, steps)
    table = PartitionTable(setting=TableSetting.of(scenario), kvrsim_version=__version__, steps=steps, entries=(entry,))
    write_json(output, {"_measured": result.to_dict()} | table.to_dict(), argument="output")
