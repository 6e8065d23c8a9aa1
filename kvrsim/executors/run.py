"""`Runner` computes seconds of a scenario, a strategy and chunks; it chooses the executor.

| executor | what it runs |
|---|---|
| chain | KVR's chain with equal layers: thousands of partitions by a recurrence |
| pipeline | pipelines: many partitions and layouts of the stages at once |
| batch | any program without shared bandwidth, partitions and samples of noise at once |
| bus | any program whose flows share one bandwidth, partitions or samples of jitter at once |
| event | any program, one partition at a time, with its timeline; the reference. SimPy is imported only there |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvrsim.choices import EXECUTORS, Executor
from kvrsim.compile import build_program
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.executors.batch import Links, run_batch
from kvrsim.executors.chain import Chain
from kvrsim.hardware import Cluster
from kvrsim.kernels.cost import CostModel
from kvrsim.program import Array, Program
from kvrsim.scenario import Partition

if TYPE_CHECKING:  # importing noise slows the start of a plan without noise
    from kvrsim.noise import NoiseDraw
    from kvrsim.results.timeline import Timeline

_KEPT = 3 * 2**20  # length of an array of 24 MiB, whose pages are never touched
# What is evaluated together, so that arrays stay in the caches of a core:
_CELLS = 2**13  # partitions times samples
_CHAIN_CELLS = 2**15  # of chains: partitions times ranks
_SHARED_CELLS = 2**20  # on a bus: partitions times messages


class Runner:
    """Runs partitions of one scenario with one strategy. This is the only place that chooses an executor."""

    def __init__(self, execution: Execution, *, cost: CostModel | None = None, cluster: Cluster | None = None) -> None:
        """cost, cluster: replace those of the scenario."""
        self.execution = execution
        self.cost = cost
        self.cluster = cluster or execution.cluster
        self.links: Links | None = None
        if not self.cluster.shares_bandwidth:
            self.links = Links(self.cluster.path)
        self.chain: Chain | None = None
        if Chain.suits(execution, self.cluster):
            self.chain = Chain(execution, self.cluster, cost)

    def finish_s(
        self,
        chunks: Array,
        *,
        draw: NoiseDraw | None = None,
        last_only: bool = False,
        enough_s: float = math.inf,
        program: Callable[[], Program] | None = None,
        stage_layers: npt.NDArray[np.int64] | None = None,
    ) -> Array:
        """Finish time of each rank, seconds, shape (ranks, B), or (ranks, B, samples) under a draw of noise.

        chunks: tokens, shape (ranks or pieces, B). last_only: the result may have only the last rank, whose time is
        TTFT.
        enough_s: if TTFT of a partition exceeds this value, the result may be a lower bound that also exceeds it.
        program: returns the program of the chunks if it is already built.
        stage_layers: for a pipeline without context ranks, layers per stage of each partition, shape (stages, B); None:
        those of the strategy.
        """
        _keep_freed_memory()
        if draw is None and self.chain is not None:
            return self._chain_finish_s(self.chain, chunks, last_only, enough_s)
        if draw is None and self.execution.strategy.is_pipeline:
            from kvrsim.executors.pipeline import run_pipeline  # imported only for pipelines

            cost = self.cost or self.execution.placed.cost
            finish_s = run_pipeline(self.execution, list(chunks), self.cluster, cost, stage_layers)
            if finish_s is not None:
                return finish_s
            if stage_layers is not None:
                return self._by_layout(chunks, stage_layers)
        if program is None:
            built = build_program(self.execution, list(chunks), self.cost, times_only=True)
        else:
            built = program()
        return run_program(built, self.links or self.cluster, draw)

    def _by_layout(self, chunks: Array, stage_layers: npt.NDArray[np.int64]) -> Array:
        """Finish times, computed with one program per layout of the stages."""
        finish_s = np.empty((self.cluster.num_gpus, chunks.shape[1]))
        for layout in set(zip(*stage_layers.tolist(), strict=True)):
            rows = (stage_layers == np.array(layout)[:, None]).all(axis=0)
            execution = self.execution.by(replace(self.execution.strategy, stage_layers=layout))
            runner = Runner(execution, cost=self.cost, cluster=self.cluster)
            finish_s[:, rows] = runner.finish_s(chunks[:, rows])
        return finish_s

    def _chain_finish_s(self, chain: Chain, chunks: Array, last_only: bool, enough_s: float) -> Array:
        """Finish times by the recurrence of chains; if a host delays its device, by the program."""
        finish_s, holds = chain.finish_s(chunks, last_only=last_only)
        holds = holds | (finish_s[-1] > enough_s)
        if not holds.all():
            from kvrsim.kernels.cost import WeightedCost  # rarely needed

            cost = chain.costs.cost
            rows = ~holds
            if isinstance(cost, WeightedCost):  # weights apply to all rows
                rows = np.ones_like(holds)
            program = build_program(self.execution, list(chunks[:, rows]), cost, times_only=True)
            finish_s[:, ~holds] = run_program(program, self.links or self.cluster)[-len(finish_s) :, ~holds[rows]]
        return finish_s

    def blocks(self, chunks: Array, num_samples: int = 1) -> Iterator[Array]:
        """Split partitions of shape (B, ranks) into blocks of shape (ranks, B) that are evaluated together."""
        step = self.rows_at_once(num_samples)
        for first in range(0, len(chunks), step):
            yield np.array(chunks[first : first + step].T, dtype=float, order="C")

    def rows_at_once(self, num_samples: int = 1) -> int:
        """Number of partitions that are evaluated together, each with `num_samples` samples of noise."""
        ranks = self.cluster.num_gpus
        if num_samples == 1 and self.chain is not None:
            return max(1, _CHAIN_CELLS // ranks)
        if not self.cluster.shares_bandwidth:
            return max(1, _CELLS // num_samples)
        destinations = ranks
        if self.execution.strategy.chains:
            destinations = 1
        messages = self.execution.placed.share.num_hidden_layers * ranks * destinations
        return max(1, _SHARED_CELLS // messages)


def ttft_s(execution: Execution, chunks: Array, *, draw: NoiseDraw | None = None, enough_s: float = math.inf) -> Array:
    """TTFT of each row of chunks.

    chunks: tokens, shape (B, ranks). Returns shape (B,), or (B, samples) under a draw of noise.
    enough_s: see Runner.finish_s.
    """
    runner = Runner(execution)
    num_samples = 1
    if draw is not None:
        num_samples = draw.num_samples
    parts_s = []
    for block in runner.blocks(chunks, num_samples):
        parts_s.append(runner.finish_s(block, draw=draw, last_only=True, enough_s=enough_s)[-1])
    return np.concatenate(parts_s)


def finish_s(execution: Execution, chunks: Array) -> Array:
    """Finish time of each rank for each row of chunks, shape (B, ranks); chunks: tokens, shape (B, ranks)."""
    runner = Runner(execution)
    return np.concatenate([runner.finish_s(block).T for block in runner.blocks(chunks)])


def run_program(program: Program, cluster: Cluster | Links, draw: NoiseDraw | None = None) -> Array:
    """Finish time of each rank, seconds, shape (ranks, B), or (ranks, B, samples) under a draw of noise."""
    if isinstance(cluster, Links) or not cluster.shares_bandwidth:
        return run_batch(program, cluster, draw)
    from kvrsim.executors.bus import run_shared  # imported only when needed

    if draw is None:
        return run_shared(program, cluster)
    size = max(1, _SHARED_CELLS // (len(program.layer_kind_index) * program.num_ranks**2))
    samples = range(draw.num_samples)
    parts = [draw.only(samples[first : first + size]) for first in range(0, draw.num_samples, size)]
    rows_s = []
    for index in range(program.num_rows):
        row = program.row(index)
        rows_s.append(np.concatenate([run_shared(row, cluster, part) for part in parts], axis=1))
    return np.stack(rows_s, axis=1)


class Run(NamedTuple):
    """Result of one partition."""

    finish_s: tuple[float, ...]  # end of each rank
    timeline: Timeline | None = None  # None: not recorded

    @property
    def ttft_s(self) -> float:
        """Time at which the last rank ends."""
        return self.finish_s[-1]


def run_partition(
    execution: Execution,
    partition: Partition,
    *,
    executor: Executor | None = None,
    timeline: bool = False,
    draw: NoiseDraw | None = None,
) -> Run:
    """Run one partition.

    executor: None chooses the fastest suitable executor, and the event executor for a timeline or under noise.
    draw: one sample of noise, for the event executor.
    """
    chunks = np.array([partition.chunk_lens], dtype=float).T
    if draw is None and not timeline and executor != "event":
        return Run(finish_s=tuple(map(float, Runner(execution).finish_s(chunks)[:, 0])))
    from kvrsim.executors.event import EventSimulation

    program = build_program(execution, list(chunks))
    simulation = EventSimulation(program, execution.cluster, record=timeline, noise=draw)
    if not timeline:
        return Run(finish_s=simulation.finish_s)
    spans = replace(simulation.timeline, gpus_per_rank=execution.placed.gpus_per_rank)
    return Run(finish_s=simulation.finish_s, timeline=spans)


def check_executor(executor: str | None, *, records: bool) -> Executor:
    """The executor that a user requested, or the default; InputError if it cannot run.

    records: whether a timeline, a breakdown or one sample of noise is requested.
    """
    if executor is None:
        return "event" if records else "batch"
    if executor not in EXECUTORS:
        raise InputError("executor", executor, " or ".join(EXECUTORS))
    if executor == "batch" and records:
        raise InputError("executor", executor, "event, because a timeline or noise is asked for")
    return executor


@cache
def _keep_freed_memory() -> None:
    """Free one large array, after which glibc keeps this much freed memory for later arrays."""
    np.empty(_KEPT)
