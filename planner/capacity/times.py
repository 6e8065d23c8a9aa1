"""Service times of every request of a workload on groups of every type.

StrategyPolicy selects the strategies that groups may run. Prefills simulates one strategy at some lengths. TimeGrid
holds the fastest strategy at each length. ServiceTimes interpolates: log time is linear in log new tokens, and time is
linear in the cached prefix. If the requests have few distinct lengths, these lengths themselves are simulated, so that
no time is interpolated.

A group loads its weights once. Strategies that need the same weights on every GPU share a layout, and a group uses the
fastest of them for each prompt; strategies of different layouts need different groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np

from kvrsim.compile import build_program, columns
from kvrsim.errors import InputError
from kvrsim.execution import Execution, place
from kvrsim.executors import run
from kvrsim.hardware import Cluster
from kvrsim.interp import cell, log_interp
from kvrsim.memory import fits, memory_of
from kvrsim.program import Array, Compute, Program
from kvrsim.scenario import Partition, Request, Scenario
from kvrsim.strategies import STRATEGIES, Strategy, get_strategy, hybrid_names, usual_names
from kvrsim.strategies.pipeline import context_ranks
from planner.candidates import all_for, distinct
from planner.capacity.fleet import WHOLE, GroupType, Overlap, Service
from planner.capacity.steps import ACCEPTED, BUDGET, StepTimes, takes_steps, usual_cache
from planner.capacity.transfer import Transfer, cache_bytes
from planner.capacity.work import Work
from planner.capacity.workload import Lengths, Workload
from planner.deploy_engines import DeployEngine, engines_with
from planner.grid import largest
from planner.search.minimise import chunks_between, to_grid
from planner.search.pipeline import with_step_time
from planner.search.search import search

_LENGTHS_PER_DOUBLING = 8  # simulated lengths between two powers of two; times between them are interpolated
_FIRST_PREFIX = 512  # tokens of the first cached prefix that is simulated after 0
_PREFIX_STEP = 4  # each simulated prefix over the one before: 512, 2k, 8k, ... tokens
_TILE = 128  # rows of a kernel's tile, tokens: a prompt's time steps up after each
_MOST_SHARING = 8  # most ranks that share a prompt evenly: each reaches its next tile at another length
_TILES_PER_DOUBLING = 16  # most steps of tiles that are simulated between two powers of two
_BLENDS = (0.0, 0.5, 1.0)  # interpolation weights between the searched shares of the shorter and the longer length
_FAR = 8.0  # the slack of a rank is measured with a delay of this number of longest prefills
_TIE = 1e-9  # relative; the first strategy is chosen if TTFTs differ by less
_GAIN = 0.002  # least relative gain in TTFT from doubling the pieces of a pipeline
_PIECES_PER_STAGE = 16  # most pieces per stage; with 16, filling the stages takes less than 7 % of the time
_TIMES_SHARE = 0.7  # share of a time budget for the simulation of prefills; the search of fleets follows
_SHORT = 256  # new tokens up to which the clock of a GPU does not decrease
# Most points (new tokens, cached prefix) of the requests themselves that are simulated. A point takes about 5 ms per
# strategy; 32 points of all strategies take about as long as the lengths between which times are interpolated.
_FEW_POINTS = 32
# The same for strategies whose prompts overlap, which take 60 to 120 ms per point on 8 GPUs.
_FEW_OVERLAPPING = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyPolicy:
    """The strategies that groups may run.

    engines: all of them must have the strategies. A server of an engine runs one strategy, so each strategy needs
    separate groups.
    """

    names: tuple[str | Strategy, ...] | None = None  # None: the default strategies
    engines: tuple[DeployEngine, ...] = ()
    deployable: bool = False  # whether each strategy must be in some engine
    packs: bool = False  # whether groups pack prompts into steps, which only some strategies support

    def __post_init__(self) -> None:
        if self.names is not None and not self.names:
            raise InputError("strategies", "", "at least one of " + ", ".join(STRATEGIES))
        for name in self.names or ():
            if name == "all":
                continue
            strategy = get_strategy(name, "strategies")
            if self.packs and not takes_steps(strategy):
                raise InputError("strategies", strategy.name, f"with sessions or `max_num_batched_tokens`, {ACCEPTED}")
            if strategy.partition_rule == "table":
                raise InputError("strategies", strategy.name, "strategies that need no table")

    def layouts(self, scenario: Scenario) -> dict[str, tuple[Strategy, ...]]:
        """Strategies that the scenario's GPUs and model allow, by placement of the weights."""
        by_name = (self.engines or self.deployable) and scenario.num_gpus > 1
        layouts: dict[str, tuple[Strategy, ...]] = {}
        for strategy in self._candidates(scenario):
            weights = strategy.name if by_name else weights_of(strategy, scenario.num_gpus)
            layouts[weights] = (*layouts.get(weights, ()), strategy)
        return layouts

    def left_out(self, scenario: Scenario) -> tuple[str, ...]:
        """Strategies for these GPUs that run only if the user names them or `all`.

        Strategies with searched pieces are omitted, because all pipelines have even pieces here.
        """
        if self.names is not None or scenario.num_gpus == 1:
            return ()
        usual = {strategy.name for strategy in self._candidates(scenario)}
        usual.add("kvr-e")  # KVR-S also tries even chunks
        names: list[str] = []
        strategies = [execution.strategy for execution in all_for(scenario)[0]]
        for strategy in self._allowed(strategies, scenario):
            if strategy.name not in usual and strategy.degrees.pieces != "searched":
                names.append(strategy.name)
        return tuple(names)

    def _allowed(self, strategies: Sequence[Strategy], scenario: Scenario) -> Iterator[Strategy]:
        """The strategies that run here on all GPUs and on all engines, and support packed steps if needed."""
        is_launched = self.packs or self.deployable or bool(self.engines)
        for strategy in strategies:
            if self.packs and not takes_steps(strategy):
                continue
            if is_launched and strategy.name == "single" and scenario.num_gpus > 1:
                continue  # other GPUs of the group would be idle
            try:
                execution = place(scenario, strategy)
            except InputError:  # refused for this model or these GPUs
                continue
            if self.deployable and not engines_with(execution):
                continue
            if all(engine.has(execution) for engine in self.engines):
                yield strategy

    def _candidates(self, scenario: Scenario) -> tuple[Strategy, ...]:
        names = [name for name in self.names or () if name != "all"]
        is_all = "all" in (self.names or ())
        chosen: Sequence[str | Strategy]
        if scenario.num_gpus == 1:  # on one GPU, all strategies of single GPUs are `single`
            chosen = ()
            if not names or is_all or any(get_strategy(name).group_size in (1, None) for name in names):
                chosen = ("single",)
        elif is_all:
            chosen = (*(execution.strategy for execution in all_for(scenario)[0]), *names)
        elif names:
            chosen = names
        else:
            chosen = _usual(scenario)
        return tuple(self._allowed(distinct(chosen), scenario))


def weights_of(strategy: Strategy, num_gpus: int) -> str:
    """Placement of the weights under a strategy."""
    sizes = strategy.degrees
    if strategy.partition_rule != "whole":
        sizes = strategy.degrees.on(num_gpus)
    weights = replace(sizes, context=1, scheme=None, pieces="none" if sizes.pipeline == 1 else "even")
    return WHOLE if weights.name == "single" else weights.name


def _usual(scenario: Scenario) -> Sequence[str]:
    if scenario.cluster.shares_bandwidth:
        return usual_names("fleets on a bus")  # simulating more takes four times as long
    hybrids = hybrid_names(scenario.num_gpus, scenario.cluster.gpus_per_node)
    even_hybrids = [name for name in hybrids if get_strategy(name).degrees.pieces != "searched"]
    return (*usual_names("fleets"), *even_hybrids)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeGrid:
    """Prefill times of one type of group after one cached prefix; arrays of shape (lengths,) or (lengths, ranks).

    `ranks` is 1 if prompts do not overlap.
    """

    strategy: tuple[str, ...]  # the fastest strategy at each length
    ttft_s: Array
    finish: Array  # finish time of each rank over TTFT
    slack_s: Array  # seconds by which each rank could begin later without delaying any rank
    most_new_tokens: int  # the most new tokens that fit in memory, up to the longest context; 0: none
    longest_context: int = 0  # the longest context that fits, with as many new tokens as simulated; 0: not computed

    @classmethod
    def fastest(cls, grids: Sequence[TimeGrid], lengths: Lengths, num_ranks: int) -> TimeGrid:
        """The fastest of the grids at each length; all have the same placement of weights and 1 or `num_ranks` ranks.

        Prompts that are too long for all strategies have the times of the strategies with the longest prompts that fit.
        Without grids, no prompt fits.
        """
        shape = (len(lengths), num_ranks)
        if not grids:
            return cls(
                strategy=("none",) * len(lengths),
                ttft_s=np.ones(len(lengths)),
                finish=np.ones(shape),
                slack_s=np.zeros(shape),
                most_new_tokens=0,
            )
        ttft_s = np.full(len(lengths), np.inf)
        strategy = np.full(len(lengths), "none", dtype=object)
        finish = np.ones(shape)
        slack_s = np.zeros(shape)
        most = max(grid.most_new_tokens for grid in grids)
        longest = max(grid.longest_context for grid in grids)
        for grid in grids:
            fitting = (lengths <= grid.most_new_tokens) | (grid.most_new_tokens == most)
            better = fitting & (grid.ttft_s < ttft_s * (1 - _TIE))
            ttft_s[better] = grid.ttft_s[better]
            strategy[better] = grid.strategy[0]
            finish[better] = grid.finish[better]
            slack_s[better] = grid.slack_s[better]
        return cls(
            strategy=tuple(strategy),
            ttft_s=ttft_s,
            finish=finish,
            slack_s=slack_s,
            most_new_tokens=most,
            longest_context=longest,
        )

    def on(self, lengths: Lengths, finer: Lengths) -> TimeGrid:
        """This grid of one strategy at finer lengths: times are interpolated.

        Ranks finish as late, and have as little slack, as at the lengths around each finer one.
        """
        low = np.searchsorted(lengths, finer, side="right") - 1
        high = np.searchsorted(lengths, finer)
        ttft_s = log_interp(finer, lengths, self.ttft_s)
        slack = self.slack_s / self.ttft_s[:, None]
        return replace(
            self,
            strategy=self.strategy[:1] * len(finer),
            ttft_s=ttft_s,
            finish=np.maximum(self.finish[low], self.finish[high]),
            slack_s=np.minimum(slack[low], slack[high]) * ttft_s[:, None],
        )


class Prefills:
    """Simulates one strategy on the GPUs of an execution.

    Searched partitions are planned at doublings of the new tokens (analytically: within 0.1 to 1 % of a full search).
    Between these lengths, the best of some candidates is taken: the shares of both neighbours, interpolated shares and
    even shares, each also with chunks of whole tiles. A pipeline takes 1, 2, 4, ... even pieces.

    exact: whether each length is simulated at its own clock frequency, as in a plan; otherwise, lengths between two
    powers of two share one, and times of overlapping prompts are simulated at fewer lengths and interpolated.
    """

    def __init__(self, execution: Execution, *, exact: bool = False) -> None:
        self.execution = execution
        self.strategy = execution.strategy
        self.exact = exact
        self.num_ranks = execution.cluster.num_gpus
        self.searches = execution.strategy.partition_rule == "search"
        self.shared = execution.cluster.shares_bandwidth

    def times(self, cached_prefix: int, lengths: Lengths, shorter_prefix: int, longest: int) -> TimeGrid | None:
        """Prefill times at all lengths after one cached prefix; None if no token fits in memory after a shorter one.

        Times after the shortest prefix that does not fit are needed to interpolate between it and the shorter one.
        longest: tokens of the longest context.
        """
        if not self._fits(shorter_prefix, Partition.even(self.num_ranks, self.num_ranks)):
            return None
        # Chains and pipelines cost most to simulate, and tiles of kernels change their times least.
        simulated = lengths
        if overlaps(self.strategy) and not self.exact:
            simulated = simulated_lengths(int(lengths[0]), int(lengths[-1]))
        padded = np.maximum(simulated, self.num_ranks)  # each rank needs at least one token
        partition_at: Callable[[int], Partition]
        if self.strategy.is_pipeline:
            pieces = self.pieces(padded, cached_prefix)
            finish_s, slack_s = self._of_pieces(padded, pieces, cached_prefix)
            partition_at = partial(_even_pieces, padded, pieces)
        elif self.searches:
            chunks, finish_s = self.chains(padded, cached_prefix)
            slack_s = self.slack_s(chunks, finish_s, cached_prefix)
            partition_at = partial(self._search, {}, cached_prefix)
        else:
            finish_s = self._prefill(_even(padded, self.num_ranks), cached_prefix)[:, -1:]
            slack_s = np.zeros_like(finish_s)
            partition_at = partial(Partition.even, num_ranks=self.num_ranks)
        ttft_s = finish_s[:, -1]

        def is_within(new_tokens: int) -> bool:
            return self._fits(cached_prefix, partition_at(max(new_tokens, self.num_ranks)))

        most_new_tokens = largest(is_within, longest)
        longest_context = 0
        if not most_new_tokens:  # a longer prefix than the shorter one may fit: pieces of few new tokens need less room
            last = int(padded[-1])
            partition = partition_at(last)
            longest_context = last + largest(lambda prefix: self._fits(prefix, partition), cached_prefix)
        grid = TimeGrid(
            strategy=(self.strategy.name,) * len(simulated),
            ttft_s=ttft_s,
            finish=finish_s / ttft_s[:, None],
            slack_s=slack_s,
            most_new_tokens=most_new_tokens,
            longest_context=longest_context,
        )
        if simulated is lengths:
            return grid
        return grid.on(simulated, lengths)

    def at(self, cached_prefix: int, new_tokens: int) -> Execution:
        """The execution of one prompt."""
        lengths = {"context_len": cached_prefix + new_tokens, "cached_prefix": cached_prefix}
        return self.execution.with_request(Request(dtype=self.execution.request.dtype, **lengths))

    def chains(self, lengths: Lengths, cached_prefix: int) -> tuple[Array, Array]:
        """The best candidate chunks of each length, and each rank's finish time; both (lengths, ranks)."""
        if self.exact:
            planned_lengths = lengths.tolist()
        elif cached_prefix:
            planned_lengths = _powers(lengths, 2)  # with a long prefix, shares depend less on the length
        else:
            planned_lengths = _powers(lengths, 1)
        planned = {length: self._shares(cached_prefix, length) for length in planned_lengths}
        candidates = [_candidates(int(length), planned, self.num_ranks, few=self.shared) for length in lengths]
        chunks = np.concatenate(candidates)
        finish_s = self._prefill(chunks, cached_prefix)
        best: list[int] = []
        begin = 0
        for rows in candidates:
            end = begin + len(rows)
            best.append(begin + int(finish_s[begin:end, -1].argmin()))
            begin = end
        return chunks[best], finish_s[best]

    def slack_s(self, chunks: Array, finish_s: Array, cached_prefix: int) -> Array:
        """Seconds by which each rank alone could begin later; 0 on a shared bus, where the slack is unknown.

        The slack over the TTFT is simulated at the clock frequency of the longest prompt unless each has its own.
        """
        slack_s = np.zeros_like(finish_s)
        if self.shared:  # no program needs to be simulated
            return slack_s
        tokens = chunks.sum(axis=1)
        classes: Iterable[Lengths] = [np.argsort(tokens, kind="stable")]
        if self.exact:
            classes = self._same_clock(tokens)
        for rows in classes:
            execution = self.at(cached_prefix, int(tokens[rows[-1]]))
            program = build_program(execution, columns(chunks[rows]))
            ends_s = run.run_program(program, execution.cluster).T
            share = slack_of(program, execution.cluster, ends_s) / ends_s[:, -1:]
            slack_s[rows] = share * finish_s[rows, -1:]
        return slack_s

    def pieces(self, lengths: Lengths, cached_prefix: int) -> Lengths:
        """Number of pieces of a pipeline at each length: doubled while TTFT falls by at least _GAIN, as in a plan."""
        pieces = np.zeros(len(lengths), dtype=np.int64)
        best_s = np.full(len(lengths), np.inf)
        growing = np.ones(len(lengths), dtype=bool)
        number = 1
        context = context_ranks(self.strategy)
        while growing.any() and number <= _PIECES_PER_STAGE * self.num_ranks:
            growing &= lengths >= number * context
            rows = np.flatnonzero(growing)
            if len(rows):
                ttft_s = self._prefill(_even(lengths[rows], number), cached_prefix, long_steps=True)[:, -1]
                better = ttft_s <= best_s[rows] * (1 - _GAIN)
                growing[rows[~better]] = False
                pieces[rows[better]] = number
                best_s[rows[better]] = ttft_s[better]
            number *= 2
        return pieces

    def _prefill(self, chunks: Array, cached_prefix: int, *, long_steps: bool = False) -> Array:
        """Finish time of each rank for chunks of shape (B, ranks or pieces); shape (B, ranks).

        long_steps: whether the engine's step time is its 90th percentile.
        """
        finish_s = np.empty((len(chunks), self.num_ranks))
        for rows in self._same_clock(chunks.sum(axis=1)):
            execution = self.at(cached_prefix, int(chunks[rows[-1]].sum()))
            host_s = self._host_s(chunks[rows], execution.placed)
            if long_steps:
                execution = with_step_time(execution, "p90")
            finish_s[rows] = run.finish_s(execution, chunks[rows]) + host_s
        return finish_s

    def _same_clock(self, tokens: Array) -> Iterable[Lengths]:
        """Indices of prompts with one clock frequency, that of the longest of them, in ascending order of length.

        They are prompts between two powers of two; with `exact`, prompts of equal length.
        """
        classes = tokens if self.exact else np.ceil(np.log2(np.maximum(tokens, _SHORT)))
        for value in np.unique(classes):
            rows = np.flatnonzero(classes == value)
            yield rows[np.argsort(tokens[rows], kind="stable")]

    def _host_s(self, chunks: Array, scenario: Scenario) -> Array:
        """The engine's seconds for these prompts' tokens minus those for the scenario's tokens; shape (B, 1)."""
        return np.asarray(scenario.host.token_s * (chunks.sum(axis=1, keepdims=True) - scenario.request.new_tokens))

    def _shares(self, cached_prefix: int, new_tokens: int) -> Array:
        """Best share of the new tokens for each rank."""
        best = search(self.at(cached_prefix, new_tokens), method="analytical")
        return np.array(best.partition.fractions)

    def _of_pieces(self, lengths: Lengths, pieces: Lengths, cached_prefix: int) -> tuple[Array, Array]:
        """Finish time and slack of each stage; both of shape (lengths, ranks)."""
        finish_s = np.empty((len(lengths), self.num_ranks))
        slack_s = np.empty((len(lengths), self.num_ranks))
        for number in np.unique(pieces):
            rows = np.flatnonzero(pieces == number)
            chunks = _even(lengths[rows], int(number))
            finish_s[rows] = self._prefill(chunks, cached_prefix)
            slack_s[rows] = self.slack_s(chunks, finish_s[rows], cached_prefix)
        return finish_s, slack_s

    def _search(self, shares: dict[int, Array], cached_prefix: int, new_tokens: int) -> Partition:
        """Chunks with the shares that a search finds at the next lower power of two. `shares` caches them."""
        near = 1 << max(int(new_tokens).bit_length() - 1, (self.num_ranks - 1).bit_length())
        if near not in shares and self.num_ranks == 1:
            shares[near] = np.ones(1)
        elif near not in shares:
            shares[near] = self._shares(cached_prefix, near)
        return Partition(chunk_lens=tuple(map(int, _whole(shares[near], new_tokens, 1))))

    def _fits(self, cached_prefix: int, partition: Partition) -> bool:
        execution = self.at(cached_prefix, partition.num_tokens)
        return fits(execution.placed, memory_of(execution, partition))


def overlaps(strategy: Strategy) -> bool:
    """Whether ranks of a strategy work on several prompts at a time: the stages of a pipeline, and chains."""
    return strategy.is_pipeline or strategy.partition_rule == "search"


def slack_of(program: Program, cluster: Cluster, finish_s: Array) -> Array:
    """Seconds by which each rank alone could begin later without delaying any rank; 0 on a bus, where it is unknown.

    finish_s: finish time of each rank in the program, shape (B, ranks), which is also the result's.
    """
    slack_s = np.zeros_like(finish_s)
    if cluster.shares_bandwidth:
        return slack_s
    delay_s = _FAR * float(finish_s.max())
    for rank in range(1, finish_s.shape[1]):
        ends_s = run.run_program(_delay(program, rank, delay_s), cluster).T
        slack_s[:, rank] = (delay_s - (ends_s - finish_s)).min(axis=1) - 1e-9 * delay_s
    return np.maximum(0.0, slack_s)


def _even_pieces(lengths: Lengths, pieces: Lengths, new_tokens: int) -> Partition:
    """Equal pieces, as many as at the next longer simulated length."""
    near = min(int(np.searchsorted(lengths, new_tokens)), len(lengths) - 1)
    return Partition.even(new_tokens, min(new_tokens, int(pieces[near])))


def _powers(lengths: Lengths, step: int) -> list[int]:
    """The first and last length, and every `step`-th power of two between them."""
    least = int(lengths[0])
    most = int(lengths[-1])
    between = [1 << power for power in range(least.bit_length(), most.bit_length(), step)]
    return sorted({least, most, *between})


def _even(lengths: Lengths, parts: int) -> Array:
    return np.array([Partition.even(int(length), parts).chunk_lens for length in lengths], dtype=float)


def _candidates(tokens: int, planned: dict[int, Array], num_ranks: int, *, few: bool) -> Array:
    """Candidate chunks for a length, shape (B, ranks), in whole tokens."""
    lengths = np.array(list(planned))
    low = int(lengths[lengths <= tokens].max())
    high = int(lengths[lengths >= tokens].min())
    weight = 0.0
    if low < high:
        weight = float(np.log(tokens / low) / np.log(high / low))
    change = planned[high] - planned[low]
    interpolated = planned[low] + weight * change
    if few:
        return _whole(interpolated, tokens, 1)[None]
    even = np.full(num_ranks, 1 / num_ranks)
    blends = [planned[low] + share * change for share in _BLENDS]
    blends += [interpolated, (interpolated + even) / 2, even]
    candidates = [_whole(shares, tokens, 1) for shares in blends]
    if tokens >= 2 * num_ranks * _TILE:
        candidates += [_whole(shares, tokens, _TILE) for shares in blends]
    return np.unique(candidates, axis=0)


def _whole(shares: Array, tokens: int, step: int) -> Array:
    """Chunks with boundaries at multiples of a step; all but the last are at least one step long."""
    return chunks_between(to_grid(np.cumsum(shares)[:-1] * tokens, step, tokens), tokens).astype(float)


def _delay(program: Program, rank: int, delay_s: float) -> Program:
    """The program where one rank begins later by `delay_s`, on host and device."""
    wait = Compute(name="before", device_s=np.array([delay_s]), host_s=delay_s)
    prologue = list(program.prologue)
    prologue[rank] = (wait, *prologue[rank])
    return replace(program, prologue=tuple(prologue))


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPoints:
    """The lengths and cached prefixes whose prefills are simulated, all with all, tokens, ascending."""

    longest_new: int  # the most new tokens of a request
    longest_prefix: int  # the longest cached prefix of a request
    lengths: tuple[int, ...]  # new tokens
    prefixes: tuple[int, ...]
    exact: bool  # whether each request is at a point; otherwise, its time is interpolated between points

    @classmethod
    def up_to(cls, longest_new: int, longest_prefix: int) -> GridPoints:
        """Points for requests of any length up to the longest ones."""
        return cls(
            longest_new=longest_new,
            longest_prefix=longest_prefix,
            lengths=tuple(with_tiles(simulated_lengths(1, _power_above(longest_new))).tolist()),
            prefixes=_simulated_prefixes(longest_prefix),
            exact=False,
        )

    @classmethod
    def of(cls, workloads: Sequence[Workload]) -> GridPoints:
        """Points for the requests of these workloads: their own lengths if these are few."""
        lengths = np.unique(np.concatenate([workload.new_tokens for workload in workloads]))
        prefixes = np.unique(np.concatenate([workload.cached_prefix for workload in workloads]))
        longest_new = int(lengths[-1])
        longest_prefix = int(prefixes[-1])
        if len(lengths) * len(prefixes) > _FEW_POINTS:
            return cls.up_to(longest_new, longest_prefix)
        return cls(
            longest_new=longest_new,
            longest_prefix=longest_prefix,
            lengths=tuple(lengths.tolist()),
            prefixes=tuple(prefixes.tolist()),
            exact=True,
        )


class ServiceTimes:
    """Times of one scenario's groups, for the lengths of a workload; computed on first use."""

    def __init__(
        self,
        scenario: Scenario,
        points: GridPoints,
        policy: StrategyPolicy,
        budget: int = BUDGET,
        longest: int = 2**17,
        cached: int | None = None,
    ) -> None:
        self.scenario = scenario
        self.points = points
        self.policy = policy
        self.budget = budget  # most tokens of a step that requests share
        self.longest = longest  # tokens of the longest sequence in steps that requests share
        self.cached = cached  # tokens in the cache of a usual sequence that decodes; None: see StepTimes.of
        self._steps: dict[int, StepTimes | None] = {}  # by GPUs of a group
        self.lengths = np.array(points.lengths, dtype=np.int64)
        self.prefixes = points.prefixes
        self._grids: dict[GroupType, tuple[TimeGrid, ...]] = {}
        self._of_strategies: dict[tuple[int, str, int], TimeGrid | None] = {}  # key: GPUs, name and cached prefix
        self.left_out: dict[int, list[str]] = {}  # names of strategies without times, by group size

    def layouts(self, num_gpus: int) -> dict[str, tuple[Strategy, ...]]:
        """The strategies of groups of this size by placement of the weights, without those left out."""
        left_out = self.left_out.get(num_gpus, ())
        layouts: dict[str, tuple[Strategy, ...]] = {}
        for weights, strategies in self.policy.layouts(self.scenario.on_gpus(num_gpus)).items():
            kept = tuple(strategy for strategy in strategies if strategy.name not in left_out)
            if kept:
                layouts[weights] = kept
        return layouts

    def types(self, num_gpus: int) -> tuple[GroupType, ...]:
        """Types of groups of this size that fit some prompt; if no type fits any prompt, the last type.

        Empty if no strategy runs on this number of GPUs.
        """
        types = [GroupType(num_gpus, weights) for weights in self.layouts(num_gpus)]
        fitting = tuple(group for group in types if self.most_tokens(group))
        return fitting or tuple(types[-1:])

    def colocated(self, num_gpus: int) -> GroupType | None:
        """The type of groups of this size that also decode; None: no strategy takes steps, or no cache fits."""
        times = self.steps(num_gpus)
        if times is None or times.room_bytes <= 0:
            return None
        return GroupType(num_gpus, WHOLE if num_gpus == 1 else f"tp{num_gpus}", colocated=True)

    def steps(self, num_gpus: int) -> StepTimes | None:
        """Durations of the steps that requests share on one GPU or with tensor parallelism; None: it cannot run."""
        if num_gpus not in self._steps:
            self._steps[num_gpus] = None
            strategy = get_strategy("single" if num_gpus == 1 else "tp")
            with suppress(InputError):  # the heads are not divisible by the size, or the group would span nodes
                execution = place(self._for_steps(num_gpus), strategy)
                self._steps[num_gpus] = StepTimes.of(execution, self.budget, self.longest, self.cached)
        return self._steps[num_gpus]

    def _for_steps(self, num_gpus: int) -> Scenario:
        """The scenario of steps, at the clock frequency of the longest prompt."""
        request = Request(context_len=self.points.longest_new, dtype=self.scenario.request.dtype)
        return replace(self.scenario.on_gpus(num_gpus), request=request)

    def cache_bytes(self, num_gpus: int, tokens: Lengths) -> Array:
        """Bytes of a GPU for the caches of these numbers of tokens, in a group that takes steps."""
        strategy = get_strategy("single" if num_gpus == 1 else "tp")
        share = place(self._for_steps(num_gpus), strategy).placed.share
        return cache_bytes(share, tokens, self.scenario.request.dtype_bytes)

    def step_seconds(self, group: GroupType, new_tokens: Lengths, cached_prefix: Lengths, nbytes: Array) -> Array:
        """TTFT of each prompt alone in the steps of a group, seconds; inf where its cache exceeds the memory."""
        times = self.steps(group.gpus)
        assert times is not None
        return np.where(nbytes <= times.room_bytes, times.alone_s(new_tokens, cached_prefix), np.inf)

    def step_service(self, group: GroupType, workload: Workload, transfer: Transfer | None) -> Service:
        """Service times of a workload on groups that take steps."""
        times = self.steps(group.gpus)
        assert times is not None
        decode_steps = np.zeros_like(workload.output_tokens)
        tokens = workload.context_len
        if group.colocated:
            decode_steps = np.maximum(0, workload.output_tokens - 1)
            tokens = workload.context_len + workload.output_tokens
            transfer = None
        nbytes = self.cache_bytes(group.gpus, tokens)
        ttft_s = self.step_seconds(group, workload.new_tokens, workload.cached_prefix, nbytes)
        return replace(
            Service.plain(ttft_s, _hold_s(transfer, workload, ttft_s, np.full(len(workload), group.gpus))),
            busy_s=times.least_s(workload.new_tokens, workload.cached_prefix, decode_steps),
            strategies=(times.strategy,),
            new_tokens=workload.new_tokens,
            cached_prefix=workload.cached_prefix,
            decode_steps=decode_steps,
            cache_bytes=nbytes,
            steps=times,
        )

    def most_tokens(self, group: GroupType) -> float:
        """The most new tokens that fit in the memory of this type of group without a cached prefix; 0: none."""
        return self.grids(group)[0].most_new_tokens

    def is_for(self, points: GridPoints) -> bool:
        """Whether these service times equal those for other requests, which need these points."""
        simulated = (self.points.lengths, self.points.prefixes, self.points.exact)
        return simulated == (points.lengths, points.prefixes, points.exact)

    def under(self, policy: StrategyPolicy) -> Self:
        """The service times under another policy; both objects share the simulation results."""
        other = copy(self)
        other.policy = policy
        other._grids = {}
        return other

    def fill(self, sizes: Sequence[int], work: Work) -> None:
        """Simulate all strategies on groups of these sizes; if the time budget ends, leave out the others."""
        calls: dict[tuple[int, str, int], tuple[Prefills, int, Lengths, int, int]] = {}
        for size in sizes:
            for strategy in itertools.chain.from_iterable(self.layouts(size).values()):
                for prefix in self.prefixes:
                    key = (size, strategy.name, prefix)
                    if key not in self._of_strategies:
                        calls[key] = self._call(size, strategy, prefix)
        work.prefill(0, len(calls))
        results = work.pool.run(Prefills.times, list(calls.values()), share=_TIMES_SHARE)
        for done, (key, grid) in enumerate(zip(calls, results, strict=False), start=1):
            self._of_strategies[key] = grid
            work.prefill(done, len(calls))
        for size, name in dict.fromkeys(key[:2] for key in calls if key not in self._of_strategies):
            self.left_out.setdefault(size, []).append(name)

    def grids(self, group: GroupType) -> tuple[TimeGrid, ...]:
        """Time grids of a type of group, one per cached prefix."""
        if group not in self._grids:
            fitting = [self._fitting(group, prefix) for prefix in self.prefixes]
            num_ranks = max((grid.finish.shape[1] for grids in fitting for grid in grids), default=1)
            self._grids[group] = tuple(TimeGrid.fastest(grids, self.lengths, num_ranks) for grids in fitting)
        return self._grids[group]

    def _fitting(self, group: GroupType, prefix: int) -> list[TimeGrid]:
        """Time grids of the strategies of a type of group that have times after a prefix."""
        grids = [self._of_strategy(group.gpus, strategy, prefix) for strategy in self._strategies(group)]
        return [grid for grid in grids if grid is not None]

    def _of_strategy(self, num_gpus: int, strategy: Strategy, prefix: int) -> TimeGrid | None:
        key = num_gpus, strategy.name, prefix
        if key not in self._of_strategies:
            self._of_strategies[key] = Prefills.times(*self._call(num_gpus, strategy, prefix))
        return self._of_strategies[key]

    def _call(self, num_gpus: int, strategy: Strategy, prefix: int) -> tuple[Prefills, int, Lengths, int, int]:
        """Arguments of `Prefills.times` for one prefix of the grid."""
        shorter_prefix = self.prefixes[max(0, self.prefixes.index(prefix) - 1)]
        is_quick = not overlaps(strategy) or len(self.lengths) * len(self.prefixes) <= _FEW_OVERLAPPING
        execution = place(self.scenario.on_gpus(num_gpus), strategy)
        prefills = Prefills(execution, exact=self.points.exact and is_quick)
        return prefills, prefix, self.lengths, shorter_prefix, int(self.lengths[-1]) + self.prefixes[-1]

    def _strategies(self, group: GroupType) -> Sequence[Strategy]:
        return self.layouts(group.gpus)[group.weights]

    def seconds(self, group: GroupType, new_tokens: Lengths, cached_prefix: Lengths) -> Array:
        """TTFT of each prompt alone on a group, seconds; inf where the context does not fit in its memory."""
        low, weight = cell(cached_prefix, self.prefixes)
        seconds = np.zeros(len(new_tokens))
        for index, grid in enumerate(self.grids(group)):
            share = np.where(low == index, 1 - weight, np.where(low == index - 1, weight, 0.0))
            here = share > 0
            if here.any():
                seconds[here] += share[here] * log_interp(new_tokens[here], self.lengths, grid.ttft_s)
        return np.where(new_tokens + cached_prefix <= self._longest_contexts(group, cached_prefix), seconds, np.inf)

    def _longest_contexts(self, group: GroupType, cached_prefix: Lengths) -> Array:
        """The longest context that fits in the memory of a group after each prefix, tokens.

        Between two prefixes of the grid that fit, it is interpolated. After the last one that fits, it is that after
        this prefix or, if longer, that with the most new tokens that are simulated.
        """
        contexts: list[int] = []
        beyond: list[int] = []  # prefixes of the grid that do not fit
        for index, (prefix, grid) in enumerate(zip(self.prefixes, self.grids(group), strict=True)):
            before = contexts[-1] if contexts else 0
            if grid.most_new_tokens:
                contexts.append(prefix + grid.most_new_tokens)
            else:
                contexts.append(max(before, grid.longest_context))
                beyond.append(index)
        room = np.interp(cached_prefix, self.prefixes, contexts)
        if beyond:
            last = max(0, beyond[0] - 1)
            room = np.where(cached_prefix > self.prefixes[last], contexts[beyond[0]], room)
        return np.asarray(room)

    def least_s(self, num_gpus: int, new_tokens: Lengths, cached_prefix: Lengths) -> Array:
        """The least TTFT of each prompt alone on a group, over all placements of the weights."""
        ttft_s = [self.seconds(group, new_tokens, cached_prefix) for group in self.types(num_gpus)]
        return np.asarray(np.min(ttft_s, axis=0))

    def service(self, group: GroupType, workload: Workload, transfer: Transfer | None = None) -> Service:
        """Service times of a workload on groups of this type; `transfer` moves the KV caches away.

        A class is one simulated length and prefix if all requests are at such points. Otherwise it is a range between
        two simulated lengths and two simulated prefixes; its finish is the latest, and its slack the least, of the
        points around it.
        """
        if group.colocated:
            return self.step_service(group, workload, transfer)
        new = workload.new_tokens
        prefix = workload.cached_prefix
        grids = self.grids(group)
        ttft_s = self.seconds(group, new, prefix)
        finish = np.stack([grid.finish for grid in grids])
        slack = np.stack([grid.slack_s / grid.ttft_s[:, None] for grid in grids])
        if self.points.exact:
            row = np.searchsorted(self.prefixes, prefix)
            column = np.searchsorted(self.lengths, new)
            names = [grid.strategy for grid in grids]
        else:
            finish = _around(finish, np.maximum)
            slack = _around(slack, np.minimum)
            row = cell(prefix, self.prefixes)[0]
            column = np.searchsorted(self.lengths, new, side="right") - 1
            # The strategy of a range is that of its upper length.
            names = [(*grid.strategy[1:], grid.strategy[-1]) for grid in grids[: len(finish)]]
        length_class = np.asarray(row * len(self.lengths) + column)
        strategies = tuple(itertools.chain.from_iterable(names))
        overlap = Overlap(finish=_by_class(finish), slack=_by_class(slack), holds=not self.scenario.sends_overlap)
        gpus = np.array([1 if name == "single" else group.gpus for name in strategies])[length_class]
        return Service(
            ttft_s=ttft_s,
            busy_s=np.asarray(ttft_s * np.array(overlap.busy)[length_class]),
            hold_s=_hold_s(transfer, workload, ttft_s, gpus),
            length_class=length_class,
            strategies=strategies,
            overlap=overlap,
            new_tokens=new,
            cached_prefix=prefix,
            decode_steps=np.zeros_like(new),
            cache_bytes=np.zeros(len(new)),
        )


def _around(values: Array, extreme: np.ufunc) -> Array:
    """The extreme value of the points around each range; arrays of shape (prefixes, lengths, ranks).

    The last length has a range of its own, and the last prefix only if it is the only one.
    """
    values = extreme(values, np.concatenate([values[:, 1:], values[:, -1:]], axis=1))
    if len(values) == 1:
        return values
    return np.asarray(extreme(values[:-1], values[1:]))


def _by_class(values: Array) -> tuple[tuple[float, ...], ...]:
    """The values of each class and rank, from an array of shape (prefixes, lengths, ranks)."""
    return tuple(tuple(row) for row in values.reshape(-1, values.shape[-1]).tolist())


class StepServiceTimes(ServiceTimes):
    """Times where groups that only prefill share steps, too; they run one strategy."""

    def is_for(self, points: GridPoints) -> bool:
        """Whether these service times equal those for other requests, which need these points."""
        return (self.points.longest_new, self.points.longest_prefix) == (points.longest_new, points.longest_prefix)

    def most_tokens(self, group: GroupType) -> float:
        """Tokens of the longest sequence if caches fit in memory; 0: none."""
        times = self.steps(group.gpus)
        return 0 if times is None or times.room_bytes <= 0 else self.longest

    def fill(self, sizes: Sequence[int], work: Work) -> None:
        """Simulate nothing: the durations of steps are tabulated on first use."""

    def seconds(self, group: GroupType, new_tokens: Lengths, cached_prefix: Lengths) -> Array:
        """TTFT of each prompt alone on a group, seconds; inf where the context does not fit in its memory."""
        nbytes = self.cache_bytes(group.gpus, new_tokens + cached_prefix)
        return self.step_seconds(group, new_tokens, cached_prefix, nbytes)

    def service(self, group: GroupType, workload: Workload, transfer: Transfer | None = None) -> Service:
        """Service times of a workload on groups of this type; `transfer` moves the KV caches away."""
        return self.step_service(group, workload, transfer)


def service_times(
    scenario: Scenario,
    workloads: Sequence[Workload],
    policy: StrategyPolicy,
    budget: int = BUDGET,
    earlier: ServiceTimes | None = None,
) -> ServiceTimes:
    """Service times for all workloads; budget: most tokens of a step that requests share.

    earlier: service times of the same scenario for other workloads, whose simulations are used where the grid is equal.
    """
    points = GridPoints.of(workloads)
    longest = max(int((workload.context_len + workload.output_tokens).max()) for workload in workloads)
    longest = _power_above(longest)  # so that growing traffic, with a few longer requests, has the same tables
    contexts = np.concatenate([workload.context_len for workload in workloads])
    cached = usual_cache(contexts, np.concatenate([workload.output_tokens for workload in workloads]))
    if earlier is not None and earlier.is_for(points):
        same = earlier.under(policy)
        if (same.longest, same.cached) != (longest, cached):
            same.longest = longest
            same.cached = cached
            same._steps = {}
        return same
    if policy.packs:
        return StepServiceTimes(scenario, points, policy, budget, longest, cached)
    return ServiceTimes(scenario, points, policy, budget, longest, cached)


def simulated_lengths(least: int, most: int) -> Lengths:
    """Lengths to simulate: `least`, `most`, the powers of two between them, and seven lengths between each pair."""
    first = np.floor(np.log2(least)) * _LENGTHS_PER_DOUBLING
    last = np.ceil(np.log2(most)) * _LENGTHS_PER_DOUBLING
    inner = np.rint(2.0 ** (np.arange(first, last + 1) / _LENGTHS_PER_DOUBLING)).astype(np.int64)
    return np.unique(np.concatenate([[least, most], inner[(inner > least) & (inner < most)]]))


def with_tiles(lengths: Lengths) -> Lengths:
    """The lengths, and both sides of the steps that whole tiles of a kernel make in the times, up to the last length.

    A step is at each multiple of a tile or, where there would be more than _TILES_PER_DOUBLING, of that share of a
    power of two.
    """
    step = _TILE
    most = int(lengths[-1])
    end = step
    ends = [end]
    while end < most:
        if end >= 2 * _TILES_PER_DOUBLING * step:
            step *= 2
        end += step
        ends.append(end)
    tiles = np.array(ends, dtype=np.int64)
    inner = np.concatenate([tiles, tiles + 1, tiles + _MOST_SHARING])
    return np.unique(np.concatenate([lengths, inner[(inner > lengths[0]) & (inner < most)]]))


def _simulated_prefixes(longest: int) -> tuple[int, ...]:
    prefixes = [0]
    prefix = _FIRST_PREFIX
    while prefixes[-1] < longest:
        prefixes.append(prefix)
        prefix *= _PREFIX_STEP
    return tuple(prefixes)


def _power_above(tokens: int) -> int:
    """The least power of two that is at least `tokens` and 2; grids that end there depend less on the requests."""
    return 1 << max(1, (tokens - 1).bit_length())


def _hold_s(transfer: Transfer | None, workload: Workload, ttft_s: Array, gpus: Lengths) -> Array:
    """Seconds that each cache keeps its group busy after the first token."""
    if transfer is None:
        return np.zeros(len(workload))
    return transfer.after_s(workload.context_len, ttft_s, gpus)
