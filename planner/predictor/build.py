"""Build a predictor: choose strategies and grid points, simulate all of them, and find what fits in memory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, TypeVar

import numpy as np

from kvrsim.arguments import OnProgress
from kvrsim.errors import InputError
from kvrsim.program import Array
from kvrsim.results.question import Question
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy, get_strategy
from kvrsim.version import __version__
from planner.candidates import Candidate, execution_of, strategies_to_compare
from planner.deploy_engines import engines_with
from planner.grid import quick_candidate
from planner.predictor.predictor import StrategyTimes, TtftPredictor
from planner.processes import Pool
from planner.search.minimise import chunk_lens, to_grid
from planner.search.pipeline import PAGE
from planner.search.search import search

BEST = "best"
_Result = TypeVar("_Result")
_PER_DOUBLING = 4  # grid points of new tokens per factor of 2; more are added if linear interpolation is inaccurate
_CONTENDS = 1.01  # strategies are simulated if they are within this factor of the fastest in some sample
_PREFIX_SHARES = (0, 64, 16, 4, 2, 1)  # grid points of the prefix: 0, and the longest prefix over these numbers
# relative interpolation error above which a point is added; least ratio of neighbours
_ERROR = 0.01
_NEAREST = 1.03
_EVERY = 6  # every sixth grid point has searched chunks and intervals; both are interpolated between these points
_SEARCH = 2  # a search in a sample takes about as long as this number of grid points
_REFINED = 1.5  # expected ratio of the numbers of grid points after and before refinement
_SEARCHED = ("search", "searched-pieces")  # partition rules with a search per prefill


def make_predictor(
    scenario: Scenario,
    *,
    strategy: str | Strategy = BEST,
    pool: Pool | None = None,
    on_progress: OnProgress | None = None,
) -> TtftPredictor:
    """Make the predictor of a scenario, whose context and batch are the largest of the grid.

    strategy: a name, or "best" for the fastest strategy that fits and that some engine has.
    pool: processes that simulate; None: this process. If the pool's time budget ends, the predictor has the complete
    batches. Raises InputError if there are none, or if no strategy fits in memory.
    """
    build = _Build(scenario, pool or Pool(), on_progress)
    strategies = build.strategies(strategy)
    points = build.points(strategies)
    times = build.times(strategies, points)
    return TtftPredictor(
        kvrsim_version=__version__,
        longest_context=scenario.request.context_len,
        new_tokens=points,
        cached_prefix=build.prefixes,
        batch=build.batches[: len(times[0].ttft_s)],
        strategies=times,
        question=Question.of(scenario, strategy=strategy if isinstance(strategy, str) else strategy.name).to_dict(),
    )


class _Build:
    def __init__(self, scenario: Scenario, pool: Pool, on_progress: OnProgress | None) -> None:
        self.scenario = scenario
        self.pool = pool
        self.on_progress = on_progress
        self.longest = scenario.request.context_len
        most = scenario.request.batch
        self.fewest = 2 * scenario.num_gpus  # least number of new tokens
        if self.longest < 2 * self.fewest:
            raise InputError("ctx", self.longest, f"at least {2 * self.fewest} tokens, four per GPU")
        self.batches = tuple(sorted({*(1 << power for power in range(most.bit_length())), most}))
        self.prefixes = tuple(sorted({self.longest // share if share else 0 for share in _PREFIX_SHARES}))
        doublings = math.log2(self.longest / self.fewest)
        even = np.geomspace(self.fewest, self.longest, math.ceil(doublings * _PER_DOUBLING) + 1)
        self.start = tuple(sorted({int(length) for length in np.rint(even)}))
        self.done = 0.0  # simulated prefills

    def strategies(self, strategy: str | Strategy) -> tuple[Strategy, ...]:
        """The named strategy, or all deployable strategies that are nearly the fastest in some sample."""
        scenario = self.scenario
        if strategy != BEST:
            one = get_strategy(strategy)
            if one.partition_rule == "table":
                raise InputError("strategy", one.name, "a strategy that needs no table")
            execution_of(scenario, one)  # raises InputError for a strategy that machine or model do not allow
            return (one,)
        compared = strategies_to_compare(scenario, None).strategies
        contending = tuple(one for one in compared if engines_with(one, scenario))
        if not contending:
            raise InputError("strategy", BEST, "a strategy by name: no engine has any on these GPUs")
        lengths = sorted({int(length) for length in np.geomspace(self.fewest, self.longest, 5)})
        samples = product(lengths, (0, self.longest // 2), (self.batches[0], self.batches[-1]))
        work = [(_at(scenario, *sample), contending) for sample in samples]
        random.Random(0).shuffle(work)  # the first samples then show how many strategies are nearly the fastest

        def later(results: Sequence[Sequence[str]]) -> float:
            number = len({name for names in results for name in names}) + (len(results) < len(work))
            return self._refinements(number) + self._rows(number)

        results = self._results(_near_the_best, work, _SEARCH * len(contending), later)
        fast = {name for names in results for name in names}
        if not fast:
            accepted = f"a model that fits in the memory of {scenario.num_gpus} GPUs"
            raise InputError("model", scenario.model.name, accepted)
        return tuple(one for one in contending if one.name in fast)

    def points(self, strategies: Sequence[Strategy]) -> tuple[int, ...]:
        """Grid points of new tokens up to the longest context, so dense that TTFT is nearly linear between them."""
        work = [(one, self.scenario, self.start, batch) for one in strategies for batch in {1, self.batches[-1]}]
        results = self._results(_refine, work, self._refinements(1) / 2, lambda _: self._rows(len(strategies)))
        return tuple(sorted({point for points in results for point in points}))

    def times(self, strategies: Sequence[Strategy], points: Sequence[int]) -> tuple[StrategyTimes, ...]:
        """TTFTs and intervals of each strategy at all grid points; intervals are simulated at the corners."""
        shape = (len(self.batches), len(self.prefixes))
        corners = set(product({0, shape[0] - 1}, {0, shape[1] - 1}))
        work = [
            (one, self.scenario, points, self.prefixes[column], self.batches[row], (row, column) in corners)
            for row, column in np.ndindex(shape)
            for one in strategies
        ]
        rows = self._results(_row, work, len(points))
        complete = len(rows) - len(rows) % (len(strategies) * shape[1])  # rows of complete batches
        return tuple(
            self._times(one, rows[index : complete : len(strategies)], points) for index, one in enumerate(strategies)
        )

    def _times(self, strategy: Strategy, rows: Sequence[_Row], points: Sequence[int]) -> StrategyTimes:
        """TTFTs and intervals from a strategy's rows, by batch and prefix; intervals are interpolated."""
        from scipy.interpolate import RegularGridInterpolator

        shape = (len(rows) // len(self.prefixes), len(self.prefixes), len(points))
        ttft_s = np.array([row.ttft_s for row in rows]).reshape(shape)
        batches = self.batches[: shape[0]]
        edges = [rows[: shape[1]], rows[-shape[1] :]]  # the rows of the smallest and of the largest batch
        corners = [[(row if row[0].ends else edges[0])[column].ends for column in (0, -1)] for row in edges]
        sampled = np.log([points[index] for index in _sample(len(points))])
        ends = RegularGridInterpolator(((0, 1), (0, 1), sampled), np.log(corners))
        across = np.log(batches) / (np.log(batches[-1]) or 1.0)
        along = np.array(self.prefixes) / self.prefixes[-1]
        places = np.stack(np.meshgrid(across, along, np.log(points), indexing="ij"), axis=-1)
        low, high = np.moveaxis(np.exp(ends(places)), -1, 0)
        return StrategyTimes(
            strategy=strategy.name,
            most_new_tokens=_nest([row.most_new_tokens for row in rows], shape[:2]),
            ttft_s=_nest(_round(ttft_s), shape),
            ttft_low_s=_nest(_round(ttft_s * low), shape),
            ttft_high_s=_nest(_round(ttft_s * high), shape),
        )

    def _refinements(self, strategies: int) -> float:
        """Expected number of prefills for the refinement of the grid points, by number of strategies."""
        return strategies * 2 * _REFINED * len(self.start)

    def _rows(self, strategies: int) -> float:
        """Expected number of prefills at all grid points, by number of strategies."""
        return strategies * _REFINED * len(self.start) * len(self.batches) * len(self.prefixes)

    def _results(
        self,
        call: Callable[..., _Result],
        work: Sequence[tuple[Any, ...]],
        prefills: float,
        later: Callable[[list[_Result]], float] = lambda results: 0.0,
    ) -> list[_Result]:
        """The results of the calls; fewer if the time budget ends.

        prefills: prefills per call; later(results): expected number of prefills after all calls.
        """
        results = list[_Result]()
        total = self.done + prefills * len(work)
        for result in self.pool.run(call, work, share=1.0):
            results.append(result)
            self.done += prefills
            if self.on_progress is not None:
                self.on_progress(round(self.done), round(total + later(results)), "prefills")
        least = len(work) // len(self.batches) if call is _row else len(work)
        if len(results) < least:
            raise InputError("time_budget", f"{self.pool.time_budget_s:g}s", "a longer time: no batch is complete")
        return results


def _round(seconds: Array) -> list[float]:
    return [float(f"{value:.6g}") for value in seconds.ravel()]


def _nest(values: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """The values as nested tuples of the given shape."""
    if len(shape) == 1:
        return tuple(values)
    each = len(values) // shape[0]
    return tuple(_nest(values[each * index :][:each], shape[1:]) for index in range(shape[0]))


# -- functions that run in a worker process


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A strategy's TTFTs for one batch and cached prefix."""

    ttft_s: tuple[float, ...]  # TTFT at each grid point
    most_new_tokens: int  # most new tokens that fit in memory
    ends: tuple[tuple[float, float], ...]  # ends of the interval over TTFT, at the sampled points; empty: not simulated


def _at(scenario: Scenario, new_tokens: int, cached_prefix: int, batch: int) -> Scenario:
    context_len = new_tokens + cached_prefix
    request = replace(scenario.request, batch=batch, context_len=context_len, cached_prefix=cached_prefix)
    return replace(scenario, request=request)


def _sample(count: int) -> list[int]:
    """Indices of the grid points whose chunks are searched and whose intervals are simulated."""
    return sorted({*range(0, count, _EVERY), count - 1})


def _near_the_best(scenario: Scenario, contending: Sequence[Strategy]) -> list[str]:
    """Names of the strategies that fit and are nearly as fast as the fastest one; empty if none fits."""
    feasible = [one for one in (quick_candidate(scenario, strategy) for strategy in contending) if one.fits]
    return [one.strategy.name for one in feasible if one.ttft_s <= _CONTENDS * min(other.ttft_s for other in feasible)]


def _refine(strategy: Strategy, scenario: Scenario, start: Sequence[int], batch: int) -> tuple[int, ...]:
    """Grid points, refined: intervals are halved while linear interpolation is inaccurate in their middle.

    Searched chunks avoid the jumps of kernel times, so their TTFT needs no additional points.
    """
    if strategy.partition_rule == "search":
        return tuple(start)
    places = [_at(scenario, one, 0, batch) for one in start]
    candidates = dict(zip(start, _candidates(strategy, places, start), strict=True))
    todo = set(start)
    intervals = list(pairwise(start))
    while intervals:
        low, high = intervals.pop()
        middle = round((low * high) ** 0.5)
        if not low < middle < high or high < _NEAREST * low:
            continue
        place = _at(scenario, middle, 0, batch)
        ends = (candidates[low], candidates[high])
        searched = strategy.partition_rule in _SEARCHED
        candidates[middle] = _between(*ends, place, 0.5) if searched else quick_candidate(place, strategy)
        line_s = float(np.interp(middle, (low, high), [one.ttft_s for one in ends]))
        if abs(line_s / candidates[middle].ttft_s - 1) > _ERROR:
            todo.add(middle)
            intervals += [(low, middle), (middle, high)]
    return tuple(sorted(todo))


def _row(
    strategy: Strategy, scenario: Scenario, points: Sequence[int], cached_prefix: int, batch: int, with_intervals: bool
) -> _Row:
    places = [_at(scenario, point, cached_prefix, batch) for point in points]
    candidates = _candidates(strategy, places, points)
    sampled = _sample(len(points)) if with_intervals else []
    return _Row(
        ttft_s=tuple(one.ttft_s for one in candidates),
        most_new_tokens=_most_that_fit(scenario, candidates, cached_prefix, batch),
        ends=tuple(
            (one.interval.low_s / one.ttft_s, one.interval.high_s / one.ttft_s)
            for one in (candidates[index] for index in sampled)
        ),
    )


def _candidates(strategy: Strategy, places: Sequence[Scenario], points: Sequence[int]) -> list[Candidate]:
    """The candidate at each point; chunks and pieces are searched at the sampled points, and interpolated between."""
    if strategy.partition_rule not in _SEARCHED:
        return [quick_candidate(place, strategy) for place in places]
    sampled = _sample(len(points))
    searched = {index: quick_candidate(places[index], strategy) for index in sampled}
    candidates = [searched[0]]
    # A quick search of pieces is rough: pieces between those of the neighbours may be faster.
    for first, middle, last in zip(sampled, sampled[1:], sampled[2:], strict=False):
        weight = float(np.interp(np.log(points[middle]), np.log([points[first], points[last]]), [0, 1]))
        between = _between(searched[first], searched[last], places[middle], weight)
        searched[middle] = min(searched[middle], between, key=lambda one: (not one.fits, one.ttft_s))
    for first, last in pairwise(sampled):
        low = searched[first]
        high = searched[last]
        weights = np.interp(np.log(points[first + 1 : last]), np.log([points[first], points[last]]), [0, 1])
        candidates += [_between(low, high, *pair) for pair in zip(places[first + 1 : last], weights, strict=True)]
        candidates.append(high)
    return candidates


def _between(low: Candidate, high: Candidate, place: Scenario, weight: float) -> Candidate:
    """Interpolate chunks or pieces between a shorter and a longer prompt; return the fastest candidate."""
    execution = execution_of(place, low.strategy)
    partitions = list[Partition]()
    tokens = execution.request.new_tokens
    if low.strategy.partition_rule == "search":
        partitions.append(search(execution, method="analytical").partition)
    else:
        step = low.partition.chunk_lens[0]
        for starts in ((*range(step, tokens, step),), high.partition.boundaries[1:-1]):
            partitions.append(Partition(chunk_lens=chunk_lens([one for one in starts if one < tokens], tokens)))
    stride = 1 if low.strategy.partition_rule == "search" else math.lcm(PAGE, execution.placed.gpus_per_rank)
    ends = [np.array(one.partition.boundaries) / one.partition.num_tokens for one in (low, high)]
    numbers = [len(one) - 1 for one in ends]
    for number in {*numbers, round(numbers[0] ** (1 - weight) * numbers[1] ** weight)}:
        parts = min(number, 1 + (tokens - 1) // stride)
        inner = [np.interp(np.linspace(0, 1, parts + 1), np.linspace(0, 1, len(one)), one)[1:-1] for one in ends]
        near = to_grid(((1 - weight) * inner[0] + weight * inner[1]) * tokens, stride, tokens)
        partitions.append(Partition(chunk_lens=chunk_lens(near.tolist(), tokens)))
    strategy = (low if weight < 0.5 else high).strategy  # with the stages of the nearer of the two prompts
    nearer = execution_of(place, strategy)
    each = (Candidate(scenario=place, execution=nearer, partition=one) for one in partitions)
    return min(each, key=lambda one: one.ttft_s)


def _most_that_fit(scenario: Scenario, candidates: Sequence[Candidate], cached_prefix: int, batch: int) -> int:
    """The most new tokens up to the last point that fit, by bisection; 0: the first point does not fit."""
    points = [one.partition.num_tokens for one in candidates]

    def fit(new_tokens: int) -> bool:
        near = candidates[int(np.searchsorted(points, new_tokens, side="right")) - 1]
        ends = np.rint(np.array(near.partition.boundaries) / near.partition.num_tokens * new_tokens)
        partition = Partition(chunk_lens=tuple(map(int, np.diff(ends))))
        place = _at(scenario, new_tokens, cached_prefix, batch)
        return Candidate(scenario=place, execution=execution_of(place, near.strategy), partition=partition).fits

    if fit(points[-1]):
        return points[-1]
    if not fit(points[0]):
        return 0
    low = points[0]
    high = points[-1]
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low
