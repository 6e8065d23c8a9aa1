"""One strategy with one partition, simulated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrsim.errors import InputError
from kvrsim.executors.batch import run_batch
from kvrsim.memory import fits, memory_of
from kvrsim.partition import Partition
from kvrsim.program import AllGather, Compute, Program, Send
from kvrsim.results import RankReport, SimResult
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy
from kvrsim.timeline import Timeline
from planner.breakdown import breakdown
from planner.interval import interval
from planner.search import search

EXECUTORS = ("batch", "event")


def run_simulation(
    scenario: Scenario,
    *,
    strategy: str,
    partition: Sequence[int] | None = None,
    executor: str | None = None,
    timeline: bool = False,
    with_breakdown: bool = False,
    warnings: Sequence[str] = (),
) -> SimResult:
    """Simulate; without a partition, take the strategy's own (kvr-s searches first).

    executor: "batch" or "event"; None takes the event executor where flows share a bus, or a timeline or
    breakdown is wanted. Raises InputError for an unknown strategy or executor, or a partition that does not fit.
    """
    chosen = get_strategy(strategy)
    placed = scenario.on_gpus(1) if chosen.partition_rule == "whole" else scenario
    records = timeline or with_breakdown
    kind = _executor_of(placed, executor, timeline=records)
    cut = partition_of(placed, chosen, partition)
    program, finish_s, spans = execute(placed, chosen, cut, executor=kind, timeline=records)
    sure = interval(placed, chosen, cut, finish_s[-1])
    memory = memory_of(placed, chosen, cut)
    return SimResult(
        strategy=chosen.name,
        model=scenario.model.name,
        profile=scenario.profile_name,
        context_len=scenario.request.context_len,
        partition=cut.chunk_lens,
        executor=kind,
        ttft_s=finish_s[-1],
        ttft_low_s=sure.low_s,
        ttft_high_s=sure.high_s,
        per_rank=tuple(
            RankReport(
                rank=rank,
                chunk_len=cut.chunk_lens[rank],
                compute_s=compute_s(program, rank),
                wait_s=waited_s(program, rank, finish_s[rank]),
                sent_bytes=sent_bytes(program, rank),
                memory=memory[rank],
            )
            for rank in range(len(finish_s))
        ),
        fits=fits(placed, memory),
        warnings=tuple(warnings),
        timeline=spans if timeline else None,
        breakdown=breakdown(placed, chosen, cut, finish_s, spans) if with_breakdown and spans else None,
    )


def partition_of(scenario: Scenario, strategy: Strategy, partition: Sequence[int] | None) -> Partition:
    """The partition given, checked, or the strategy's own."""
    tokens, num_ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
    if partition is not None:
        return Partition.of(partition, num_tokens=tokens, num_ranks=num_ranks)
    if strategy.partition_rule == "search":
        return search(scenario, strategy).partition
    if strategy.partition_rule == "table":
        raise InputError("--strategy", strategy.name, "with --partition, or another strategy: it looks its chunks up")
    return Partition.even(tokens, num_ranks)


def execute(
    scenario: Scenario, strategy: Strategy, partition: Partition, *, executor: str, timeline: bool = False
) -> tuple[Program, tuple[float, ...], Timeline | None]:
    """The program, when each rank has finished (seconds), and the timeline if it was asked for."""
    program = scenario.program(strategy, [np.array([float(chunk)]) for chunk in partition.chunk_lens])
    if executor == "batch":
        return program, tuple(float(finish) for finish in run_batch(program, scenario.cluster)[:, 0]), None
    from kvrsim.executors.event import Replay  # SimPy, only where it is needed

    replay = Replay(program, scenario.cluster, record=timeline)
    return program, replay.finish_s, replay.timeline if timeline else None


def _executor_of(scenario: Scenario, executor: str | None, *, timeline: bool) -> str:
    if executor is None:
        return "event" if timeline or scenario.cluster.shares_bandwidth else "batch"
    if executor not in EXECUTORS:
        raise InputError("--executor", executor, " or ".join(EXECUTORS))
    if executor == "batch" and scenario.cluster.shares_bandwidth:
        raise InputError("--executor", executor, "event, because flows share a bus")
    if executor == "batch" and timeline:
        raise InputError("--executor", executor, "event, because a timeline is asked for")
    return executor


def compute_s(program: Program, rank: int) -> float:
    """Device time of a rank's own operations."""
    counts = np.bincount(program.layer_kind_index)
    ops = [(count, op) for count, kind in zip(counts, program.layers, strict=True) for op in kind[rank]]
    ops += [(1, op) for op in (*program.prologue[rank], *program.epilogue[rank])]
    return float(sum(count * op.device_s.item() for count, op in ops if isinstance(op, Compute)))


def waited_s(program: Program, rank: int, finish_s: float) -> float:
    """Time that a rank was not computing until it finished; rounding alone counts as none."""
    wait_s = finish_s - compute_s(program, rank)
    return wait_s if wait_s > 1e-12 * finish_s else 0.0


def sent_bytes(program: Program, rank: int) -> float:
    """Bytes that a rank puts on its links; of a ring, its own piece and those it passes on."""
    num_ranks = program.num_ranks
    sent = 0.0
    for count, kind in zip(np.bincount(program.layer_kind_index), program.layers, strict=True):
        sent += count * sum(op.nbytes.item() for op in kind[rank] if isinstance(op, Send))
        pieces = [sum(op.nbytes.item() for op in ops if isinstance(op, AllGather)) for ops in kind]
        sent += count * (sum(pieces) - pieces[(rank + 1) % num_ranks])
    return float(sent)
