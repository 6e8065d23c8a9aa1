"""Rounds: one rank's part in the prefills that a search asks for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvrsim.partition import Partition
from planner.confirm.hardware import run_plan
from planner.confirm.journal import Sample
from planner.confirm.levels import Chunks, Task

if TYPE_CHECKING:
    from kvrsim.runtime.ranks.transport import Transport


class Rounds:
    """Measures with all other ranks, which are told the same time; the first one keeps the journal."""

    def __init__(self, transport: Transport, task: Task) -> None:
        from kvrsim.runtime.job import Prefills, linked_by

        hardware, scenario = task.hardware, task.scenario
        traffic = hardware.traffic(scenario.cluster.num_gpus)
        self.task, self.transport = task, transport
        self.prefills = Prefills(linked_by(transport, hardware.link(scenario), traffic), hardware.choice(scenario))
        self.warm: set[Chunks] = set()
        self._since_s = time.monotonic()
        self._spent_s = sum(sample.spent_s for sample in task.known)  # by this search before it was interrupted, too

    def sample(self, level: int, chunks: Chunks) -> Sample:
        """One prefill, after one that does not count where the partition is new."""
        plan = run_plan(self.task.scenario, "kvr-s", Partition(chunk_lens=chunks), "ring")
        if chunks not in self.warm:
            self.warm.add(chunks)
            self.prefills.ttft_s(plan)
        ttft_s = self.prefills.ttft_s(plan)
        now_s = time.monotonic()
        spent_s = self.transport.exchange(now_s - self._since_s)[0]
        self._since_s = now_s
        self._spent_s += spent_s
        self.transport.report(round(self._spent_s), round(self.task.budget_s), "seconds of the search")
        found = Sample(level=level, chunks=chunks, ttft_s=ttft_s, spent_s=spent_s)
        if self.transport.rank == 0:
            self.task.journal.add(found)
        return found

    def conditions(self) -> dict[str, str]:
        """Of the machine and its libraries."""
        return self.prefills.conditions()
