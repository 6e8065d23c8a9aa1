"""The paper's hierarchical grid search with measured TTFT: seeded by the plan, bounded in minutes, resumable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.io.files import write_atomically
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from kvrsim.version import __version__
from planner.confirm.confirm import check
from planner.confirm.hardware import Hardware
from planner.confirm.journal import SUFFIX, Sample, SearchJournal
from planner.confirm.levels import Levels, Measured, Task
from planner.evaluate import Evaluator
from planner.search.search import search
from planner.table.entry import draft_of, entry_of
from planner.table.setting import TableSetting
from planner.table.steps import chunk_steps
from planner.table.table import PartitionTable

if TYPE_CHECKING:
    from kvrsim.runtime.ranks.transport import OnProgress, Transport

KVR_S = STRATEGIES["kvr-s"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What the search on the machine has found."""

    best: Measured
    seed: Measured  # the plan's partition, measured beside the best in the last rounds
    ended: str  # why: the finest stride is done, or the time is up
    num_partitions: int  # that were measured
    num_prefills: int
    resumed: int  # of these, taken by a search that was killed
    seconds: float  # of the search's time
    conditions: dict[str, str]
    output: str  # file of the table

    @property
    def gain(self) -> float:
        """Of the best over the plan's partition, as a share of the latter's TTFT."""
        return 1 - self.best.median_s / self.seed.median_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
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

    What was measured waits in FILE.search; minutes count what a killed search has used. Raises InputError where the
    machine cannot run the scenario, RankError where a rank fails.
    """
    scenario = hardware.placed(scenario)
    check(scenario, hardware)
    if scenario.cluster.num_gpus < 2:
        raise InputError("gpus", scenario.cluster.num_gpus, "at least 2 for `search`: one GPU has no partition")
    from kvrsim.runtime.ranks.launch import launch

    path, about = output.with_name(output.name + SUFFIX), _about(scenario, hardware)
    journal = SearchJournal.open(path, about) if _is_first() else SearchJournal(path=path, about=about)
    seed = search(scenario, KVR_S).partition
    task = Task(
        scenario=scenario,
        hardware=hardware,
        seed=seed,
        budget_s=60 * minutes,
        known=tuple(journal.samples),
        journal=journal,
    )
    if on_note is not None:
        on_note(f"searching from {','.join(map(str, seed.chunk_lens))}, for at most {minutes:g} minutes")
        if journal.samples:
            on_note(f"{journal.path}: going on from {len(journal.samples)} prefills")
    resumed = len(journal.samples)
    longest_s = Evaluator(scenario, KVR_S).one(seed.chunk_lens)
    left_s = max(0.0, task.budget_s - journal.spent_s)
    how = hardware.launch(scenario.cluster.num_gpus, longest_s, left_s + 4 * hardware.repeats * longest_s)
    levels: Levels = launch(search_on_ranks, task, how=how, on_progress=on_progress)[0]
    found = _searched(levels, resumed, str(output))
    if _is_first():
        _write_table(scenario, found, output)
        journal.remove()
    return found


def search_on_ranks(transport: Transport, task: Task) -> Levels:
    """What every rank does: the same search in step, on TTFTs that all of them are told."""
    from kvrsim.runtime.agreement import agree, versions
    from planner.confirm.rounds import Rounds

    levels = Levels()
    agree(transport, task.facts() | versions())
    known = transport.exchange(task.known, tuple[Sample, ...])[
        0
    ]  # under torchrun, only the first process has read the journal
    levels.run(replace(task, known=known), Rounds(transport, task))
    return levels


def _about(scenario: Scenario, hardware: Hardware) -> dict[str, Any]:
    """What makes samples of one search those of another."""
    cluster, request = scenario.cluster, scenario.request
    run = {"device": hardware.device, "backend": hardware.backend, "threads": hardware.threads, "seed": hardware.seed}
    return {
        "setting": TableSetting.of(scenario).to_dict(),
        "gpus": cluster.num_gpus,
        "context": request.context_len,
        "repeats": hardware.repeats,
        "ranks": run,
        "links": "emulated" if hardware.emulated else "the machine's",
        "side traffic": hardware.traffic_share,
        "kvrsim": __version__,
    }


def _searched(levels: Levels, resumed: int, output: str) -> Searched:
    return Searched(
        best=levels.best,
        seed=levels.seed,
        ended=levels.ended,
        num_partitions=len({sample.chunks for sample in levels.samples}),
        num_prefills=len(levels.samples),
        resumed=resumed,
        seconds=sum(sample.spent_s for sample in levels.samples),
        conditions=levels.conditions,
        output=output,
    )


def _write_table(scenario: Scenario, found: Searched, output: Path) -> None:
    """A table of one entry: what it says of time is predicted, as in every table; what was measured stands beside."""
    cut = Partition(chunk_lens=found.best.partition)
    draft = draft_of(scenario)
    predicted_s = Evaluator(scenario, KVR_S).one(cut.chunk_lens)
    draft = replace(draft, partition=cut.chunk_lens, ttft_s=predicted_s)
    steps = chunk_steps(scenario)
    entry = entry_of(scenario, draft, None, steps)
    setting = TableSetting.of(scenario)
    table = PartitionTable(setting=setting, kvrsim_version=__version__, steps=steps, entries=(entry,))
    content = {"_measured": found.to_dict()} | table.to_dict()
    write_atomically(output, (json.dumps(content, indent=2) + "\n").encode(), argument="output")


def _is_first() -> bool:
    """Whether this process keeps the files: the first of torchrun's, or the only one."""
    return os.environ.get("RANK", "0") == "0"
