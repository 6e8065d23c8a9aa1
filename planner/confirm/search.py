"""`kvrsim confirm --search`: the paper's hierarchical grid search with measured TTFT; bounded in time, resumable."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.io.files import is_first_rank, write_atomically
from kvrsim.io.schema import to_json
from kvrsim.results.question import Question
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import KVR_S
from kvrsim.version import __version__
from planner.confirm.confirm import check
from planner.confirm.hardware import Hardware
from planner.confirm.hardware_search import (
    HardwareSearch,
    MeasuredPartition,
    RankStopwatch,
    SearchTask,
    read_sample,
    search_journal,
)
from planner.search.minimise import Evaluator
from planner.search.search import search
from planner.table.build import draft_of, entry_of
from planner.table.table import PartitionTable, TableSetting, quantization_steps

if TYPE_CHECKING:
    from kvrsim.runtime.ranks import OnProgress
    from kvrsim.runtime.transport import Transport

SUFFIX = ".search"  # of the journal, after the table's name


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """The result of a search on the machine."""

    question: Question
    best: MeasuredPartition
    seed: MeasuredPartition  # the plan's, measured beside the best in the last stage
    ended: str  # why: the finest stride is done, or the time is up
    num_partitions: int  # measured ones
    num_prefills: int
    resumed: int  # of these, taken by an interrupted search
    seconds: float  # spent on the search
    conditions: dict[str, str]
    output: str  # the table's file

    @property
    def gain(self) -> float:
        """How much faster the best partition is than the plan's, as a share of the latter's TTFT."""
        return 1 - self.best.median_s / self.seed.median_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **self.question.measured_header(predicted=True),
            "partition": list(self.best.partition),
            "measured_ttft_s": self.best.median_s,
            "samples_s": list(self.best.samples_s),
            "plan": {
                "partition": list(self.seed.partition),
                "measured_ttft_s": self.seed.median_s,
                "samples_s": list(self.seed.samples_s),
            },
            "gain": self.gain,
            "ended": self.ended,
            "partitions": self.num_partitions,
            "prefills": self.num_prefills,
            "resumed": self.resumed,
            "seconds": self.seconds,
            "conditions": self.conditions,
            "output": self.output,
        }


def search_here(
    scenario: Scenario,
    hardware: Hardware,
    *,
    minutes: float,
    output: Path,
    on_note: Callable[[str], object] | None = None,
    on_progress: OnProgress | None = None,
) -> Searched:
    """Search on as many ranks as the scenario has GPUs, and write a table of one entry.

    Samples are kept in FILE.search until the table is written; an interrupted search's time counts towards `minutes`.
    Raises InputError where the machine cannot run the scenario, RankError where a rank fails.
    """
    scenario = hardware.placed(scenario)
    check(scenario, hardware)
    if scenario.cluster.num_gpus < 2:
        raise InputError("gpus", scenario.cluster.num_gpus, "at least 2 for `search`: one GPU has no partition")
    from kvrsim.runtime.ranks import launch

    journal = search_journal(output.with_name(output.name + SUFFIX), _about(scenario, hardware))
    known = tuple(journal.resume(read_sample)) if is_first_rank() else ()
    seed = search(scenario, KVR_S).partition
    task = SearchTask(
        scenario=scenario,
        hardware=hardware,
        seed=seed,
        budget_s=60 * minutes,
        known=known,
        journal=journal,
    )
    if on_note is not None:
        on_note(f"searching from {','.join(map(str, seed.chunk_lens))}, for at most {minutes:g} minutes")
        if known:
            on_note(f"{journal.path}: going on from {len(known)} prefills")
    longest_s = Evaluator(scenario, KVR_S).one(seed.chunk_lens)
    left_s = max(0.0, task.budget_s - sum(sample.spent_s for sample in known))
    how = hardware.launch(scenario.cluster.num_gpus, longest_s, left_s + 4 * hardware.repeats * longest_s)
    done: HardwareSearch = launch(search_on_ranks, task, how=how, on_progress=on_progress)[0]
    found = _searched(Question.of(scenario, seed=hardware.seed), done, len(known), str(output))
    if is_first_rank():
        _write_table(scenario, found, output)
        journal.remove()
    return found


def search_on_ranks(transport: Transport, task: SearchTask) -> HardwareSearch:
    """What every rank runs: the same search in lock step, on TTFTs that all ranks share."""
    from kvrsim.runtime.host import versions
    from kvrsim.runtime.measure import agree

    done = HardwareSearch()
    agree(transport, task.facts() | versions())
    # Under torchrun, only the first process has read the journal.
    known = transport.exchange(task.known)[0]
    done.run(replace(task, known=known), RankStopwatch(transport, task))
    return done


def _about(scenario: Scenario, hardware: Hardware) -> dict[str, Any]:
    """What samples depend on: a search with other values cannot use them."""
    cluster, request = scenario.cluster, scenario.request
    run = {"device": hardware.device, "backend": hardware.backend, "threads": hardware.threads, "seed": hardware.seed}
    return {
        "setting": to_json(TableSetting.of(scenario)),
        "gpus": cluster.num_gpus,
        "context": request.context_len,
        "repeats": hardware.repeats,
        "ranks": run,
        "links": "emulated" if hardware.emulated else "the machine's",
        "side traffic": hardware.traffic_share,
        "kvrsim": __version__,
    }


def _searched(question: Question, done: HardwareSearch, resumed: int, output: str) -> Searched:
    return Searched(
        question=question,
        best=done.best,
        seed=done.seed,
        ended=done.ended,
        num_partitions=len({sample.chunks for sample in done.samples}),
        num_prefills=len(done.samples),
        resumed=resumed,
        seconds=sum(sample.spent_s for sample in done.samples),
        conditions=done.conditions,
        output=output,
    )


def _write_table(scenario: Scenario, found: Searched, output: Path) -> None:
    """A table of one entry, its times predicted as in every table; the measured ones are under "_measured"."""
    cut = Partition(chunk_lens=found.best.partition)
    draft = draft_of(scenario, KVR_S)
    predicted_s = Evaluator(scenario, KVR_S).one(cut.chunk_lens)
    draft = replace(draft, partition=cut.chunk_lens, ttft_s=predicted_s)
    steps = quantization_steps(scenario)
    entry = entry_of(scenario, KVR_S, draft, None, steps)
    setting = TableSetting.of(scenario)
    table = PartitionTable(setting=setting, kvrsim_version=__version__, steps=steps, entries=(entry,))
    content = {"_measured": found.to_dict()} | table.to_dict()
    write_atomically(output, (json.dumps(content, indent=2) + "\n").encode(), argument="output")
