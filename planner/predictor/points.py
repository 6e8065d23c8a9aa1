"""Points of a predictor: simulated prefills, where a straight line between them misses, and what fits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvrsim.compile import for_strategy
from kvrsim.memory import fits, memory_of
from kvrsim.partition import Partition
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.grid import quick_candidate
from planner.search.minimise import Evaluator, chunks_between, to_grid
from planner.search.search import search
from planner.uncertainty.intervals import interval_of
from planner.uncertainty.sensitivities import sensitivities

_MISS, _NEAREST = 0.01, 1.03  # of TTFT; knots are not set nearer than by this factor
_EVERY = 6  # knots between which an interval's relative ends, and searched shares, are interpolated


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A strategy's TTFTs for one batch and cached prefix."""

    ttft_s: tuple[float, ...]  # at each knot
    most_new_tokens: int
    ends: tuple[tuple[float, float], ...]  # of the interval over TTFT, at every so manyth knot; empty: not asked for


def at(scenario: Scenario, new_tokens: int, cached_prefix: int, batch: int) -> Scenario:
    request = replace(
        scenario.request, context_len=new_tokens + cached_prefix, cached_prefix=cached_prefix, batch=batch
    )
    return replace(scenario, request=request)


def simulated(scenario: Scenario, strategy: Strategy) -> tuple[float, Partition, Scenario]:
    """TTFT as the simulator has it, with its partition and the scenario as the strategy sees it."""
    one = quick_candidate(scenario, strategy)
    return one.ttft_s, one.partition, one.per_rank


def refined(strategy: Strategy, scenario: Scenario, start: Sequence[int], batch: int) -> tuple[int, ...]:
    """Halve the intervals in whose middle a straight line misses, again and again.

    Searched chunks avoid the jumps of a kernel's time, so that their TTFT needs no more knots.
    """
    if strategy.partition_rule == "search":
        return tuple(start)
    known = {knot: simulated(at(scenario, knot, 0, batch), strategy)[0] for knot in start}
    wanted, open_ones = set(start), list(pairwise(start))
    while open_ones:
        low, high = open_ones.pop()
        middle = round((low * high) ** 0.5)
        if not low < middle < high or high < _NEAREST * low:
            continue
        known[middle] = simulated(at(scenario, middle, 0, batch), strategy)[0]
        line_s = float(np.interp(middle, (low, high), (known[low], known[high])))
        if abs(line_s / known[middle] - 1) > _MISS:
            wanted.add(middle)
            open_ones += [(low, middle), (middle, high)]
    return tuple(sorted(wanted))


def row_at(
    key: tuple[int, int, int],
    strategy: Strategy,
    scenario: Scenario,
    knots: Sequence[int],
    cached_prefix: int,
    batch: int,
    with_intervals: bool,
) -> tuple[tuple[int, int, int], Row]:
    """TTFTs, what fits, and intervals at some knots."""
    ends, chosen = [], set(marked(len(knots)))
    found = _searched(scenario, strategy, knots, cached_prefix, batch)
    for index, (ttft_s, partition, placed) in enumerate(found):
        if with_intervals and index in chosen:
            sure = interval_of(sensitivities(placed, strategy, partition), ttft_s)
            ends.append((sure.low_s / ttft_s, sure.high_s / ttft_s))
    seconds, cuts = [one[0] for one in found], [one[1] for one in found]
    most = _most_that_fit(scenario, strategy, knots, cuts, cached_prefix, batch)
    return key, Row(ttft_s=tuple(seconds), most_new_tokens=most, ends=tuple(ends))


def _searched(
    scenario: Scenario, strategy: Strategy, knots: Sequence[int], cached_prefix: int, batch: int
) -> list[tuple[float, Partition, Scenario]]:
    """Each knot's TTFT and partition; of a searched one, shares between those of the knots that are searched."""
    places = [at(scenario, knot, cached_prefix, batch) for knot in knots]
    if strategy.partition_rule != "search":
        return [simulated(place, strategy) for place in places]
    searched = {index: simulated(places[index], strategy) for index in marked(len(knots))}
    known = np.log([knots[index] for index in searched])
    shares = np.array([one[1].fractions for one in searched.values()])
    found = []
    for index, (knot, place) in enumerate(zip(knots, places, strict=True)):
        if index in searched:
            found.append(searched[index])
            continue
        placed = for_strategy(place, strategy)
        mixed = [float(np.interp(np.log(knot), known, share)) for share in shares.T]
        near = chunks_between(to_grid(np.cumsum(mixed)[:-1] * knot, 1, knot), knot)
        cuts = [near.tolist(), list(search(placed, strategy, method="analytical").partition.chunk_lens)]
        ttft_s = Evaluator(placed, strategy).ttft_s(np.array(cuts, dtype=float))
        best = int(ttft_s.argmin())
        cut = Partition(chunk_lens=tuple(map(int, cuts[best])))
        found.append((float(ttft_s[best]), cut, placed))
    return found


def _most_that_fit(
    scenario: Scenario,
    strategy: Strategy,
    knots: Sequence[int],
    cuts: Sequence[Partition],
    cached_prefix: int,
    batch: int,
) -> int:
    """The most new tokens up to the last knot that fit, by bisection; 0: not even the first knot's."""

    def is_within(new_tokens: int) -> bool:
        near = int(np.searchsorted(knots, new_tokens, side="right")) - 1
        chunks = np.diff(np.rint(np.array(cuts[near].boundaries) / knots[near] * new_tokens)).astype(int)
        placed = for_strategy(at(scenario, new_tokens, cached_prefix, batch), strategy)
        return fits(placed, memory_of(placed, strategy, Partition(chunk_lens=tuple(map(int, chunks)))))

    if is_within(knots[-1]):
        return knots[-1]
    if not is_within(knots[0]):
        return 0
    low, high = knots[0], knots[-1]
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low


def marked(count: int) -> list[int]:
    """Indices of the knots whose chunks are searched and whose intervals are found."""
    return sorted({*range(0, count, _EVERY), count - 1})
