"""Timelines of a plan's strategies: each simulated anew by the event executor, which records every span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvrsim.executors.run import run_partition
from kvrsim.partition import Partition
from kvrsim.program import AllGather, AllToAll, Op, Program, RingPass
from kvrsim.results.results import StrategyResult
from kvrsim.results.timeline import Timeline
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.access import placed_for
from planner.uncertainty.bases import bases_of

MOST_SPANS = 200_000  # of all timelines together but the first, which a page holds and a browser moves
_AGREE = 1e-9  # relative; the executors agree to rounding


def replays(
    scenario: Scenario, chosen: Mapping[str, Strategy], results: Sequence[StrategyResult]
) -> tuple[dict[str, Timeline], list[str]]:
    """The timelines of results, in their order, by strategy; and a note on those that have too many spans.

    chosen: the strategies by name, as settled as the results are.
    """
    found: dict[str, Timeline] = {}
    left, room = [], MOST_SPANS
    for number, result in enumerate(results):
        placed = placed_for(scenario, chosen[result.strategy])
        run = run_partition(placed, chosen[result.strategy], Partition(chunk_lens=result.partition))
        needed = span_count(run.program)
        if number and needed > room:
            left.append(result.strategy)
            continue
        room -= needed
        found[result.strategy] = _replayed(placed, chosen[result.strategy], result)
    if not left:
        return found, []
    return found, [f"no timeline of {', '.join(left)}: all timelines together have at most {MOST_SPANS:,} operations"]


def span_count(program: Program) -> int:
    """At most so many spans are recorded of a program."""

    def block(ops: Sequence[Op]) -> int:
        return sum(_spans_of(op, program.num_ranks) for op in ops)

    counts = program.layer_counts
    return sum(
        block(program.prologue[rank])
        + sum(int(count) * block(kind[rank]) for count, kind in zip(counts, program.layers, strict=True))
        + block(program.epilogue[rank])
        for rank in range(program.num_ranks)
    )


def _spans_of(op: Op, num_ranks: int) -> int:
    """Of one operation on one rank: its work, its waiting and its messages."""
    if isinstance(op, AllGather):
        return 1 + (op.among or num_ranks) - 1
    if isinstance(op, RingPass):
        return 4 * len(op.host_s)
    if isinstance(op, AllToAll):
        return 1 + len(op.nbytes)
    return 2


def _replayed(placed: Scenario, strategy: Strategy, found: StrategyResult) -> Timeline:
    """Of one result; the event executor must agree with what was printed."""
    cut = Partition(chunk_lens=found.partition)
    run = run_partition(placed, strategy, cut, timeline=True)
    assert abs(run.ttft_s - found.ttft_s) <= _AGREE * found.ttft_s, "the executors disagree"
    assert run.timeline is not None, "a timeline was asked for"
    return replace(run.timeline, bases=bases_of(placed, strategy, cut, run.timeline))
