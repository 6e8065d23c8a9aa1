"""Build a predictor: choose strategies and grid points, simulate all of them, and find what fits in memory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, TypeVar

import numpy as np

from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.executors.access import execution_of
from kvrsim.program import Array
from kvrsim.progress import OnProgress
from kvrsim.results.question import Question
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy, get_strategy
from kvrsim.version import __version__
from planner.candidates import Candidate, strategies_to_compare
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
_PREFIX_SHARES = (64, 16, 4, 2, 1)  # grid points of the prefix: 0, and the longest prefix over these numbers
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
        question=Question.of(scenario, strategy=_name_of(strategy)).to_dict(),
    )


def _name_of(strategy: str | Strategy) -> str:
    if isinstance(strategy, str):
        return strategy
    return strategy.name


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
        powers = [1 << power for power in range(most.bit_length())]
        self.batches = tuple(sorted({*powers, most}))
        self.prefixes = tuple(sorted({0, *(self.longest // share for share in _PREFIX_SHARES)}))
        doublings = math.log2(self.longest / self.fewest)
        even = np.geomspace(self.fewest, self.longest, math.ceil(doublings * _PER_DOUBLING) + 1)
        self.start = tuple(sorted({int(length) for length in np.rint(even)}))
        self.done = 0.0  # simulated prefills

    def strategies(self, strategy: str | Strategy) -> tuple[Strategy, ...]:
        """The named strategy, or all deployable strategies that are nearly the fastest in some sample."""
        scenario = self.scenario
        if strategy != BEST:
            chosen = get_strategy(strategy)
            if chosen.partition_rule == "table":
                raise InputError("strategy", chosen.name, "a strategy that needs no table")
            execution_of(scenario, chosen)  # raises InputError for a strategy that machine or model do not allow
            return (chosen,)
        compared = strategies_to_compare(scenario, None).executions
        contending = [execution.strategy for execution in compared if engines_with(execution)]
        if not contending:
            raise InputError("strategy", BEST, "a strategy by name: no engine has any on these GPUs")
        lengths = sorted({int(length) for length in np.geomspace(self.fewest, self.longest, 5)})
        work = []
        for new_tokens, prefix, batch in product(lengths, (0, self.longest // 2), (self.batches[0], self.batches[-1])):
            request = replace(scenario.request, batch=batch, context_len=new_tokens + prefix, cached_prefix=prefix)
            work.append((replace(scenario, request=request), contending))
        random.Random(0).shuffle(work)  # the first samples then show how many strategies are nearly the fastest

        def later(results: Sequence[Sequence[str]]) -> float:
            number = len(set().union(*results))
            if len(results) < len(work):
                number += 1
            return self._refinements(number) + self._rows(number)

        results = self._results(_near_the_best, work, _SEARCH * len(contending), later)
        fast = set().union(*results)
        if not fast:
            accepted = f"a model that fits in the memory of {scenario.num_gpus} GPUs"
            raise InputError("model", scenario.model.name, accepted)
        return tuple(strategy for strategy in contending if strategy.name in fast)

    def points(self, strategies: Sequence[Strategy]) -> tuple[int, ...]:
        """Grid points of new tokens up to the longest context, so dense that TTFT is nearly linear between them."""
        work = []
        for strategy, batch in product(strategies, {1, self.batches[-1]}):
            work.append((self._prompts(strategy, 0, batch), self.start))
        results = self._results(_refine, work, self._refinements(1) / 2, lambda _: self._rows(len(strategies)))
        return tuple(sorted(set().union(*results)))

    def _prompts(self, strategy: Strategy, cached_prefix: int, batch: int) -> _Prompts:
        return _Prompts(scenario=self.scenario, strategy=strategy, cached_prefix=cached_prefix, batch=batch)

    def times(self, strategies: Sequence[Strategy], points: Sequence[int]) -> tuple[StrategyTimes, ...]:
        """TTFTs and intervals of each strategy at all grid points; intervals are simulated at the corners."""
        shape = (len(self.batches), len(self.prefixes))
        corners = set(product({0, shape[0] - 1}, {0, shape[1] - 1}))
        work = []
        for row, column in np.ndindex(shape):
            for strategy in strategies:
                prompts = self._prompts(strategy, self.prefixes[column], self.batches[row])
                work.append((prompts, points, (row, column) in corners))
        rows = self._results(_row, work, len(points))
        complete = len(rows) - len(rows) % (len(strategies) * shape[1])  # rows of complete batches
        times = []
        for index, strategy in enumerate(strategies):
            times.append(self._times(strategy, rows[index : complete : len(strategies)], points))
        return tuple(times)

    def _times(self, strategy: Strategy, rows: Sequence[_Row], points: Sequence[int]) -> StrategyTimes:
        """TTFTs and intervals from a strategy's rows, by batch and prefix; intervals are interpolated."""
        from scipy.interpolate import RegularGridInterpolator

        shape = (len(rows) // len(self.prefixes), len(self.prefixes), len(points))
        ttft_s = np.array([row.ttft_s for row in rows]).reshape(shape)
        batches = self.batches[: shape[0]]
        smallest = rows[: shape[1]]
        largest = rows[-shape[1] :]
        if not largest[0].ends:  # the time budget has ended before the largest batch
            largest = smallest
        corners = [(row[0].ends, row[-1].ends) for row in (smallest, largest)]
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
        least = len(work)
        if call is _row:  # the smallest batch suffices
            least = len(work) // len(self.batches)
        if len(results) < least:
            raise InputError("time_budget", f"{self.pool.time_budget_s:g}s", "a longer time: no batch is complete")
        return results


def _round(seconds: Array) -> list[float]:
    return [float(f"{value:.6g}") for value in seconds.ravel()]


def _nest(values: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """The values as nested tuples of the given shape."""
    if len(shape) == 1:
        return tuple(values)
    step = len(values) // shape[0]
    return tuple(_nest(values[step * index :][:step], shape[1:]) for index in range(shape[0]))


# -- functions that run in a worker process


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A strategy's TTFTs for one batch and cached prefix."""

    ttft_s: tuple[float, ...]  # TTFT at each grid point
    most_new_tokens: int  # most new tokens that fit in memory
    ends: tuple[tuple[float, float], ...]  # ends of the interval over TTFT, at the sampled points; empty: not simulated


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompts:
    """A strategy's prompts of one batch size after one cached prefix."""

    scenario: Scenario  # GPUs and model; the lengths of its request are not used
    strategy: Strategy
    cached_prefix: int  # tokens
    batch: int

    def at(self, new_tokens: int) -> Execution:
        """The execution of a prompt."""
        context_len = new_tokens + self.cached_prefix
        request = replace(
            self.scenario.request, batch=self.batch, context_len=context_len, cached_prefix=self.cached_prefix
        )
        return execution_of(replace(self.scenario, request=request), self.strategy)

    def candidate(self, new_tokens: int) -> Candidate:
        """The candidate of a prompt, quickly found."""
        return quick_candidate(self.at(new_tokens))

    def candidates(self, points: Sequence[int]) -> list[Candidate]:
        """The candidate at each number of new tokens.

        Chunks and pieces are searched at the sampled points, and interpolated between them.
        """
        executions = [self.at(point) for point in points]
        if self.strategy.partition_rule not in _SEARCHED:
            return list(map(quick_candidate, executions))
        sampled = _sample(len(points))
        log_points = np.log(points)
        searched = {index: quick_candidate(executions[index]) for index in sampled}
        # A quick search of pieces is rough: pieces between those of the neighbours may be faster.
        for first, middle, last in zip(sampled, sampled[1:], sampled[2:], strict=False):
            weight = float(np.interp(log_points[middle], log_points[[first, last]], [0, 1]))
            between = _between(searched[first], searched[last], executions[middle], weight)
            searched[middle] = min(searched[middle], between, key=_fitting_first)
        candidates = [searched[0]]
        for first, last in pairwise(sampled):
            weights = np.interp(log_points[first + 1 : last], log_points[[first, last]], [0, 1])
            for execution, weight in zip(executions[first + 1 : last], weights, strict=True):
                candidates.append(_between(searched[first], searched[last], execution, weight))
            candidates.append(searched[last])
        return candidates

    def fits(self, new_tokens: int, near: Candidate) -> bool:
        """Whether a prompt fits in memory, with the partition of a prompt of nearly the same length."""
        ends = np.rint(np.array(near.partition.boundaries) / near.partition.num_tokens * new_tokens)
        chunks = [int(chunk) for chunk in np.diff(ends)]
        return Candidate.of(self.at(new_tokens).by(near.strategy), chunks).fits


def _fitting_first(candidate: Candidate) -> tuple[bool, float]:
    """Sort key: candidates that fit before others, and the faster ones first."""
    return not candidate.fits, candidate.ttft_s


def _sample(count: int) -> list[int]:
    """Indices of the grid points whose chunks are searched and whose intervals are simulated."""
    return sorted({*range(0, count, _EVERY), count - 1})


def _near_the_best(scenario: Scenario, contending: Sequence[Strategy]) -> list[str]:
    """Names of the strategies that fit and are nearly as fast as the fastest one; empty if none fits."""
    ttft_s: dict[str, float] = {}
    for strategy in contending:
        candidate = quick_candidate(execution_of(scenario, strategy))
        if candidate.fits:
            ttft_s[strategy.name] = candidate.ttft_s
    least_s = min(ttft_s.values(), default=math.inf)
    return [name for name in ttft_s if ttft_s[name] <= _CONTENDS * least_s]


def _refine(prompts: _Prompts, start: Sequence[int]) -> tuple[int, ...]:
    """Grid points, refined: intervals are halved while linear interpolation is inaccurate in their middle.

    Searched chunks avoid the jumps of kernel times, so their TTFT needs no additional points.
    """
    rule = prompts.strategy.partition_rule
    if rule == "search":
        return tuple(start)
    candidates = dict(zip(start, prompts.candidates(start), strict=True))
    points = set(start)
    intervals = list(pairwise(start))
    while intervals:
        low, high = intervals.pop()
        middle = round((low * high) ** 0.5)
        if not low < middle < high or high < _NEAREST * low:
            continue
        if rule in _SEARCHED:
            candidate = _between(candidates[low], candidates[high], prompts.at(middle), 0.5)
        else:
            candidate = prompts.candidate(middle)
        candidates[middle] = candidate
        line_s = float(np.interp(middle, (low, high), (candidates[low].ttft_s, candidates[high].ttft_s)))
        if abs(line_s / candidate.ttft_s - 1) > _ERROR:
            points.add(middle)
            intervals += [(low, middle), (middle, high)]
    return tuple(sorted(points))


def _row(prompts: _Prompts, points: Sequence[int], with_intervals: bool) -> _Row:
    candidates = prompts.candidates(points)
    ends: list[tuple[float, float]] = []
    if with_intervals:
        for index in _sample(len(points)):
            candidate = candidates[index]
            interval = candidate.interval
            ends.append((interval.low_s / candidate.ttft_s, interval.high_s / candidate.ttft_s))
    return _Row(
        ttft_s=tuple(candidate.ttft_s for candidate in candidates),
        most_new_tokens=_most_that_fit(prompts, candidates),
        ends=tuple(ends),
    )


def _between(low: Candidate, high: Candidate, execution: Execution, weight: float) -> Candidate:
    """Interpolate chunks or pieces between a shorter and a longer prompt; return the fastest candidate.

    execution: that of the prompt between them; weight: 0 at the shorter one, 1 at the longer one.
    """
    nearer = high
    if weight < 0.5:
        nearer = low
    tokens = execution.request.new_tokens
    shares = []
    for candidate in (low, high):
        shares.append(np.array(candidate.partition.boundaries) / candidate.partition.num_tokens)
    if low.strategy.partition_rule == "search":
        stride = 1
        partitions = [search(execution.by(low.strategy), method="analytical").partition.chunk_lens]
    else:
        stride = math.lcm(PAGE, execution.placed.gpus_per_rank)
        steps = range(low.partition.chunk_lens[0], tokens, low.partition.chunk_lens[0])
        ends = [end for end in high.partition.boundaries[1:-1] if end < tokens]
        partitions = [chunk_lens(list(steps), tokens), chunk_lens(ends, tokens)]
    numbers = [len(ends) - 1 for ends in shares]
    for number in {*numbers, round(numbers[0] ** (1 - weight) * numbers[1] ** weight)}:
        parts = min(number, 1 + (tokens - 1) // stride)
        at = np.linspace(0, 1, parts + 1)
        inner = [np.interp(at, np.linspace(0, 1, len(ends)), ends)[1:-1] for ends in shares]
        near = to_grid(((1 - weight) * inner[0] + weight * inner[1]) * tokens, stride, tokens)
        partitions.append(chunk_lens(near.tolist(), tokens))
    candidates = [Candidate.of(execution.by(nearer.strategy), partition) for partition in partitions]
    return min(candidates, key=lambda candidate: candidate.ttft_s)


def _most_that_fit(prompts: _Prompts, candidates: Sequence[Candidate]) -> int:
    """The most new tokens up to the last point that fit, by bisection; 0: the first point does not fit."""
    points = [candidate.partition.num_tokens for candidate in candidates]

    def fits(new_tokens: int) -> bool:
        near = candidates[int(np.searchsorted(points, new_tokens, side="right")) - 1]
        return prompts.fits(new_tokens, near)

    if fits(points[-1]):
        return points[-1]
    if not fits(points[0]):
        return 0
    low = points[0]
    high = points[-1]
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
