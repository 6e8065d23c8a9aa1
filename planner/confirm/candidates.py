"""What a plan is confirmed against: the baselines, and partitions far enough from its own to be worth measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from kvrsim.partition import Partition
from kvrsim.program import Array
from kvrsim.results import Plan
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from planner.evaluate import Evaluator

_SEARCHED = "kvr-s"  # the strategy whose partition is searched, and whose other partitions are candidates
_APART = 1 / 16  # of the even share: by less, two partitions are one to a stopwatch
_SHIFTS = (-2, -1, 0, 1, 2)  # times that distance
_MOST_AT_ONCE = 4  # boundaries whose shifts are all combined; of more, one at a time and all together


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """One candidate: its own name, the registered strategy that runs it, and its partition."""

    strategy: str  # the candidate's name, distinct: the strategy's, or "kvr-s #2" for the second best partition
    run_as: str  # the registered strategy
    partition: Partition


def candidates_of(scenario: Scenario, plan: Plan, top: int) -> list[Named]:
    """The plan's strategies, then the top - 1 best partitions that differ from them and from each other."""
    named = [
        Named(strategy=result.strategy, run_as=result.strategy, partition=Partition(chunk_lens=result.partition))
        for result in plan.strategies
    ]
    searched = next((one.partition for one in named if one.run_as == _SEARCHED), None)
    if searched is None or top < 2 or scenario.cluster.num_gpus < 2:
        return named
    taken = [one.partition.boundaries for one in named if one.run_as.startswith("kvr")]
    further = _further(scenario, searched, taken, top - 1)
    return named + [
        Named(strategy=f"{_SEARCHED} #{number}", run_as=_SEARCHED, partition=partition)
        for number, partition in enumerate(further, start=2)
    ]


def _further(scenario: Scenario, center: Partition, taken: Sequence[tuple[int, ...]], count: int) -> list[Partition]:
    """The fastest by the simulator, each at least _APART from all before it."""
    tokens, ranks = center.num_tokens, len(center.chunk_lens)
    apart = max(1, round(tokens / ranks * _APART))
    rows = _shifted(np.array(center.boundaries[1:-1]), apart, tokens)
    if not len(rows):
        return []
    ends = np.pad(rows.astype(float), ((0, 0), (1, 1)), constant_values=((0, 0), (0, tokens)))
    ttft_s = Evaluator(scenario, STRATEGIES[_SEARCHED]).ttft_s(np.diff(ends, axis=1))
    known = [np.array(one[1:-1]) for one in taken]
    found: list[Partition] = []
    for index in np.argsort(ttft_s, kind="stable"):
        row = rows[index]
        if len(found) < count and all(np.abs(row - other).max() >= apart for other in known):
            known.append(row)
            found.append(Partition(chunk_lens=tuple(int(chunk) for chunk in np.diff([0, *row, tokens]))))
    return found


def _shifted(center: Array, apart: int, tokens: int) -> Array:
    """Boundaries around the centre, shape (B, ranks - 1), that leave every chunk a token."""
    count = len(center)
    if count <= _MOST_AT_ONCE:
        shifts = np.array(list(product(_SHIFTS, repeat=count)))
    else:
        alone = [np.eye(count, dtype=int) * shift for shift in _SHIFTS if shift]
        shifts = np.concatenate([*alone, *(np.full((1, count), shift) for shift in _SHIFTS if shift)])
    rows = center + apart * shifts
    ends = np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (0, tokens)))
    return np.asarray(rows[(np.diff(ends, axis=1) >= 1).all(axis=1)])
