"""From a scenario, a strategy and chunks to seconds: picks the executor and runs it.

The batch executor runs thousands of partitions at once. The event executor runs one partition at a time; it is needed
where spans are recorded, and under noise where flows share a bandwidth. SimPy is imported only there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvrsim.choices import EXECUTORS, Executor
from kvrsim.compile import build_program, columns
from kvrsim.errors import InputError
from kvrsim.executors.batch import run_batch
from kvrsim.executors.chain.program import Chain
from kvrsim.executors.chain.walk import chain_finish_s
from kvrsim.hardware import Cluster
from kvrsim.kernels.calibrated import CostModel
from kvrsim.program import Array, Program
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies.base import Strategy

if TYPE_CHECKING:  # noise costs the start of a plan that has none
    from kvrsim.noise import NoiseDraw
    from kvrsim.results.timeline import Timeline

BLOCK = 8192  # partitions that are evaluated together: arrays of 64 KiB, which stay in a core's cache
_MANY = 1024  # partitions, from which on their arrays are large
_KEPT = 3 * 2**20  # numbers: 24 MiB, of which no page is touched
_CELLS = 2**14  # partitions times samples that are evaluated together
_CHAIN_CELLS, _LEAST_ROWS = 2**15, 128  # of a chain: partitions times ranks that are evaluated together
_SHARED_CELLS, _SHARED_BLOCK = 2**20, 1024  # on a bus: partitions times messages, and partitions at most


@dataclass(frozen=True, kw_only=True)
class Run:
    """One partition that was run."""

    scenario: Scenario
    strategy: Strategy
    partition: Partition
    finish_s: tuple[float, ...]  # when each rank has finished
    timeline: Timeline | None = None  # None: not recorded

    @cached_property
    def program(self) -> Program:
        """What the ranks did."""
        return build_program(self.scenario, self.strategy, columns(self.partition.chunk_lens))

    @property
    def ttft_s(self) -> float:
        """When the last rank has finished."""
        return self.finish_s[-1]


def run_partition(
    scenario: Scenario,
    strategy: Strategy,
    partition: Partition,
    *,
    executor: Executor | None = None,
    timeline: bool = False,
    draw: NoiseDraw | None = None,
) -> Run:
    """Run one partition.

    executor: None picks the batch executor, and the event executor for a timeline or under noise.
    draw: one sample of noise, which the event executor runs.
    """
    chunks = columns(partition.chunk_lens)
    if draw is None and not timeline and executor != "event":
        finish = tuple(map(float, finish_of(scenario, strategy, chunks)[:, 0]))
        return Run(scenario=scenario, strategy=strategy, partition=partition, finish_s=finish)
    from kvrsim.executors.event import EventSimulation

    program = build_program(scenario, strategy, chunks)
    simulated = EventSimulation(program, scenario.cluster, record=timeline, noise=draw)
    spans = replace(simulated.timeline, gpus_per_rank=scenario.gpus_per_rank) if timeline else None
    finish = simulated.finish_s
    return Run(scenario=scenario, strategy=strategy, partition=partition, finish_s=finish, timeline=spans)


def ttft_s(
    scenario: Scenario,
    strategy: Strategy,
    chunks: Array,
    *,
    draw: NoiseDraw | None = None,
    enough_s: float = math.inf,
) -> Array:
    """TTFT of each row of chunks.

    chunks: tokens, shape (B, ranks). Returns shape (B,), or (B, samples) under a draw of noise.
    enough_s: rows whose TTFT is above it may get a lower bound of it that is above it, too, which takes less time.
    """
    finishes = _finishes(scenario, strategy, chunks, draw, whole=False, enough_s=enough_s)
    return np.concatenate([finish[-1] for finish in finishes])


def finish_s(scenario: Scenario, strategy: Strategy, chunks: Array, *, draw: NoiseDraw | None = None) -> Array:
    """When each rank has finished each row of chunks.

    chunks: tokens, shape (B, ranks). Returns shape (B, ranks), or (B, ranks, samples) under a draw of noise.
    """
    return np.concatenate([finish.swapaxes(0, 1) for finish in _finishes(scenario, strategy, chunks, draw)])


def finish_of(
    scenario: Scenario,
    strategy: Strategy,
    chunks: Sequence[Array],
    *,
    cost: CostModel | None = None,
    cluster: Cluster | None = None,
    draw: NoiseDraw | None = None,
) -> Array:
    """When each rank has finished, seconds, shape (ranks, B), or (ranks, B, samples) under a draw of noise.

    chunks: one float array of shape (B,) a rank or piece, tokens. cost, cluster: instead of the scenario's own.
    """
    cluster = cluster or scenario.cluster
    if draw is None and Chain.suits(scenario, strategy, cluster):
        return _chain_finish_s(Chain(scenario, strategy, cluster, cost), np.asarray(chunks), whole=True)
    if strategy.pipeline is not None and draw is None:
        from kvrsim.executors.stages.waves import run_stages  # only where there are stages

        found = run_stages(scenario, strategy, chunks, cluster, cost or scenario.cost)
        if found is not None:
            return found
    return run_program(build_program(scenario, strategy, chunks, cost), cluster, draw)


def _chain_finish_s(chain: Chain, chunks: Array, *, whole: bool, enough_s: float = math.inf) -> Array:
    """By the recurrence of chains; by the program where a host delays its device for long, which only makes it later.

    chunks: (ranks, B). whole: False: of the last rank alone. enough_s: as of ttft_s.
    """
    if chunks.shape[1] >= _MANY:
        _keep_freed_memory()
    finish_s, known = chain_finish_s(chain.program(chunks), whole=whole)
    known = known | (finish_s[-1] > enough_s)
    if not known.all():
        from kvrsim.kernels.sensitivity import WeightedCost  # seldom

        cost = chain.costs.cost
        rows = np.ones_like(known) if isinstance(cost, WeightedCost) else ~known  # which has weights for all rows
        program = build_program(chain.scenario, chain.strategy, list(chunks[:, rows]), cost)
        finish_s[:, ~known] = run_program(program, chain.cluster)[-len(finish_s) :, ~known[rows]]
    return finish_s


def run_program(program: Program, cluster: Cluster, draw: NoiseDraw | None = None) -> Array:
    """When each rank has finished, seconds, shape (ranks, B), or (ranks, B, samples) under a draw of noise."""
    if program.num_rows >= _MANY:
        _keep_freed_memory()
    if not cluster.shares_bandwidth:
        return run_batch(program, cluster, draw)
    if draw is None:
        from kvrsim.executors.bus.run import run_shared  # not at every start

        return run_shared(program, cluster)
    from kvrsim.executors.event import EventSimulation

    rows = [program.row(index) for index in range(program.num_rows)]
    alone = [draw.only(sample) for sample in range(draw.num_samples)]
    runs = [[EventSimulation(row, cluster, record=False, noise=one).finish_s for one in alone] for row in rows]
    return np.moveaxis(np.array(runs), -1, 0)


def check_executor(executor: str | None, *, records: bool) -> Executor:
    """The executor asked for, or the one to pick; InputError where it cannot run.

    records: whether a timeline, a breakdown or one sample of noise is wanted.
    """
    if executor is None:
        return "event" if records else "batch"
    if executor not in EXECUTORS:
        raise InputError("executor", executor, " or ".join(EXECUTORS))
    if executor == "batch" and records:
        raise InputError("executor", executor, "event, because a timeline or noise is asked for")
    return executor


def rows_at_once(scenario: Scenario, strategy: Strategy, num_samples: int = 1) -> int:
    """Partitions that are evaluated together, each under that many samples of noise."""
    if num_samples == 1 and Chain.suits(scenario, strategy, scenario.cluster):
        return max(_LEAST_ROWS, _CHAIN_CELLS // scenario.cluster.num_gpus)
    if not scenario.cluster.shares_bandwidth:
        return min(BLOCK, max(1, _CELLS // num_samples))
    ranks = scenario.cluster.num_gpus
    messages = scenario.share.num_hidden_layers * ranks * (1 if strategy.chains else ranks)
    return min(_SHARED_BLOCK, max(1, _SHARED_CELLS // messages))


@cache
def _keep_freed_memory() -> None:
    """Once a large array was freed, glibc keeps as much for the next ones, which then need no new pages."""
    np.empty(_KEPT)


def _finishes(
    scenario: Scenario,
    strategy: Strategy,
    chunks: Array,
    draw: NoiseDraw | None,
    *,
    whole: bool = True,
    enough_s: float = math.inf,
) -> Iterator[Array]:
    """Of blocks of rows, as finish_of; whole: False: only the last rank's is asked for."""
    is_chain = draw is None and Chain.suits(scenario, strategy, scenario.cluster)
    chain = Chain(scenario, strategy, scenario.cluster) if is_chain else None
    step = rows_at_once(scenario, strategy, 1 if draw is None else draw.num_samples)
    for first in range(0, len(chunks), step):
        block = chunks[first : first + step]
        if chain is None:
            yield finish_of(scenario, strategy, columns(block), draw=draw)
        else:
            yield _chain_finish_s(chain, np.array(block.T, dtype=float, order="C"), whole=whole, enough_s=enough_s)
