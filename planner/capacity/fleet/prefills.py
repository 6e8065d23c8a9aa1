"""Prefill times of one strategy on one group at knots of prompt length, with partitions searched at a few lengths.

Searched partitions are planned at doublings of the new tokens (analytically: within 0.1 to 1 % of a full search). In
between, the shares of both neighbours, shares between theirs, and even ones are tried, as they are and with chunks
of whole tiles, all in one batch, and the best is kept. A pipeline takes 1, 2, 4, ... even pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvrsim.compile import build_program, columns, for_strategy
from kvrsim.executors import run
from kvrsim.memory import fits, memory_of
from kvrsim.program import Array, Compute, Program
from kvrsim.scenario import Partition, Request, Scenario
from kvrsim.strategies import KVR_S, Strategy
from kvrsim.strategies.pipeline import context_ranks
from planner.capacity.workloads.workload import Lengths
from planner.grid import largest
from planner.search.minimise import chunks_between, to_grid
from planner.search.pipeline import with_step_time
from planner.search.search import search
from planner.table.table import PartitionTable

_TILE = 128  # tokens, rows of an attention kernel's tile
_BLENDS = (0.0, 0.5, 1.0)  # weights between the searched shares below and above
_FAR = 8.0  # one rank is delayed by so many times the longest prefill to find its slack
_GAIN = 0.002  # of TTFT; twice the pieces of a pipeline must gain more
_PIECES_A_STAGE = 16  # at most; filling the stages then takes less than 7 % of the time
_SHORT = 256  # new tokens, up to which the clock of a GPU does not fall


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyTimes:
    """One strategy's prefills; arrays of shape (knots,) or (knots, ranks), one rank where prompts do not overlap."""

    label: str
    ttft_s: Array
    finish: Array  # finish time of each rank over ttft_s
    slack_s: Array  # how much later each rank could begin without delaying any rank
    most_new_tokens: int  # the most that fit in memory


class Prefills:
    """Simulates one strategy on the GPUs of a scenario; raises InputError where they or the model do not allow it."""

    def __init__(self, scenario: Scenario, strategy: Strategy, table: PartitionTable | None = None) -> None:
        self.scenario, self.strategy = for_strategy(scenario, strategy), strategy
        self.num_ranks = self.scenario.cluster.num_gpus
        self.searches = strategy.partition_rule == "search"
        self.table = table if self.searches and strategy.group_size == 1 else None
        # KVR-S with chunks from a table is KVR-P.
        self.label = "kvr-p" if strategy is KVR_S and table is not None else strategy.name
        self.shared = self.scenario.cluster.shares_bandwidth

    def times(self, cached_prefix: int, knots: Lengths) -> StrategyTimes | None:
        """Times at all knots for one cached prefix; None: not even one token fits in memory."""
        if not self._fits(cached_prefix, Partition.even(self.num_ranks, self.num_ranks)):
            return None
        padded = np.maximum(knots, self.num_ranks)  # a rank has at least one token
        slack_s = np.zeros((len(knots), 1))
        if self.strategy.pipeline is not None:
            pieces = self._pieces(padded, cached_prefix)
            finish_s, slack_s = self._of_pieces(padded, pieces, cached_prefix)
            cut = partial(_even_pieces, padded, pieces)
        elif self.searches:
            chunks, finish_s = self.chains(padded, cached_prefix)
            slack_s = self.slack_s(chunks, finish_s, cached_prefix)
            cut = partial(self._cut, {}, cached_prefix)
        else:
            finish_s = self._prefill(self.strategy, _even(padded, self.num_ranks), cached_prefix)[:, -1:]
            cut = partial(Partition.even, num_ranks=self.num_ranks)
        ttft_s = finish_s[:, -1]
        return StrategyTimes(
            label=self.label,
            ttft_s=ttft_s,
            finish=finish_s / ttft_s[:, None],
            slack_s=slack_s,
            most_new_tokens=self._most_that_fit(cached_prefix, int(knots[-1]), cut),
        )

    def at(self, cached_prefix: int, new_tokens: int) -> Scenario:
        """The scenario of one prompt."""
        request = Request(
            context_len=cached_prefix + new_tokens, cached_prefix=cached_prefix, dtype=self.scenario.request.dtype
        )
        return replace(self.scenario, request=request)

    def chains(self, knots: Lengths, cached_prefix: int) -> tuple[Array, Array]:
        """The best candidate chunks of each knot, and when each rank finishes; both (knots, ranks)."""
        candidates = self._candidates(knots, cached_prefix)
        finish_s = self._prefill(self.strategy, np.concatenate(candidates), cached_prefix)
        bests, first = [], 0
        for rows in candidates:
            bests.append(first + int(finish_s[first : first + len(rows), -1].argmin()))
            first += len(rows)
        return np.concatenate(candidates)[bests], finish_s[bests]

    def slack_s(self, chunks: Array, finish_s: Array, cached_prefix: int) -> Array:
        """How much later each rank alone could begin; 0 on a shared bus, where it is unknown."""
        slack_s = np.zeros_like(finish_s)
        if self.shared:
            return slack_s
        for rows in _alike(chunks.sum(axis=1)):
            scenario = self.at(cached_prefix, int(chunks[rows[-1]].sum()))
            late_s = self._host_s(chunks[rows], scenario)
            program = build_program(scenario, self.strategy, columns(chunks[rows]))
            delay_s = _FAR * float(finish_s[rows].max())
            for rank in range(1, self.num_ranks):
                ends_s = run.run_program(_delayed(program, rank, delay_s), scenario.cluster).T + late_s
                slack_s[rows, rank] = (delay_s - (ends_s - finish_s[rows])).min(axis=1) - 1e-9 * delay_s
        return np.maximum(0.0, slack_s)

    def _prefill(self, strategy: Strategy, chunks: Array, cached_prefix: int, *, dear: bool = False) -> Array:
        """Finish time of each rank for chunks of shape (B, ranks or pieces); shape (B, ranks).

        Prompts of about the same length run at one clock, that of the longest. dear: with long steps of the engine.
        """
        finish_s = np.empty((len(chunks), self.num_ranks))
        for rows in _alike(chunks.sum(axis=1)):
            scenario = self.at(cached_prefix, int(chunks[rows[-1]].sum()))
            used = with_step_time(scenario, "p90") if dear else scenario
            finish_s[rows] = run.finish_s(used, strategy, chunks[rows]) + self._host_s(chunks[rows], scenario)
        return finish_s

    def _host_s(self, chunks: Array, scenario: Scenario) -> Array:
        """What the engine takes for these prompts' tokens, less what it takes for the scenario's; shape (B, 1)."""
        return np.asarray(scenario.host.token_s * (chunks.sum(axis=1, keepdims=True) - scenario.request.new_tokens))

    def _candidates(self, knots: Lengths, cached_prefix: int) -> list[Array]:
        """Candidate chunks of each knot, each of shape (B, ranks); a table's partition is the only candidate."""
        if self.table is not None:
            cuts = [self.table.partition_for(self.at(cached_prefix, int(knot))).chunk_lens for knot in knots]
            return [np.array([cut], dtype=float) for cut in cuts]
        step = 2 if cached_prefix else 1  # with a long prefix, shares change less with length
        planned = {length: self._planned(cached_prefix, length) for length in _powers(knots, step)}
        return [_candidates(int(knot), planned, self.num_ranks, few=self.shared) for knot in knots]

    def _planned(self, cached_prefix: int, new_tokens: int) -> Array:
        """Share of the new tokens of each rank."""
        if self.table is not None:
            return np.array(self.table.partition_for(self.at(cached_prefix, new_tokens)).fractions)
        found = search(self.at(cached_prefix, new_tokens), self.strategy, method="analytical")
        return np.array(found.partition.fractions)

    def _pieces(self, knots: Lengths, cached_prefix: int) -> Lengths:
        """Pieces of a pipeline at each knot: twice as many as long as that is worth it, as in a plan."""
        pieces, best_s = np.zeros(len(knots), dtype=np.int64), np.full(len(knots), np.inf)
        growing, number, context = np.ones(len(knots), dtype=bool), 1, context_ranks(self.strategy)
        while growing.any() and number <= _PIECES_A_STAGE * self.num_ranks:
            rows = np.flatnonzero(growing & (knots >= number * context))
            growing[knots < number * context] = False
            if len(rows):
                ttft_s = self._prefill(self.strategy, _even(knots[rows], number), cached_prefix, dear=True)[:, -1]
                better = ttft_s <= best_s[rows] * (1 - _GAIN)
                growing[rows[~better]] = False
                pieces[rows[better]], best_s[rows[better]] = number, ttft_s[better]
            number *= 2
        return pieces

    def _of_pieces(self, knots: Lengths, pieces: Lengths, cached_prefix: int) -> tuple[Array, Array]:
        """When each stage finishes, and its slack; both (knots, ranks)."""
        finish_s, slack_s = np.empty((len(knots), self.num_ranks)), np.empty((len(knots), self.num_ranks))
        for number in np.unique(pieces):
            rows = np.flatnonzero(pieces == number)
            chunks = _even(knots[rows], int(number))
            finish_s[rows] = self._prefill(self.strategy, chunks, cached_prefix)
            slack_s[rows] = self.slack_s(chunks, finish_s[rows], cached_prefix)
        return finish_s, slack_s

    def _cut(self, shares: dict[int, Array], cached_prefix: int, new_tokens: int) -> Partition:
        """Chunks as searched at the power of two below; `shares`: those that are known."""
        near = 1 << max(int(new_tokens).bit_length() - 1, (self.num_ranks - 1).bit_length())
        if near not in shares:
            shares[near] = self._planned(cached_prefix, near) if self.num_ranks > 1 else np.ones(1)
        return Partition(chunk_lens=tuple(map(int, _whole(shares[near], new_tokens, 1))))

    def _fits(self, cached_prefix: int, cut: Partition) -> bool:
        scenario = self.at(cached_prefix, cut.num_tokens)
        return fits(scenario, memory_of(scenario, self.strategy, cut))

    def _most_that_fit(self, cached_prefix: int, most: int, cut: partial[Partition]) -> int:
        """The most new tokens for which every rank's peak fits in memory, by bisection."""

        def is_within(new_tokens: int) -> bool:
            return self._fits(cached_prefix, cut(max(new_tokens, self.num_ranks)))

        return largest(is_within, most)


def _alike(tokens: Array) -> Iterable[Lengths]:
    """Indices of prompts of about the same length: between two powers of two, ascending in each."""
    octave = np.ceil(np.log2(np.maximum(tokens, _SHORT)))
    for one in np.unique(octave):
        rows = np.flatnonzero(octave == one)
        yield rows[np.argsort(tokens[rows], kind="stable")]


def _even_pieces(knots: Lengths, pieces: Lengths, new_tokens: int) -> Partition:
    """As many pieces as at the knot above."""
    near = min(int(np.searchsorted(knots, new_tokens)), len(knots) - 1)
    return Partition.even(new_tokens, min(new_tokens, int(pieces[near])))


def _powers(knots: Lengths, step: int) -> list[int]:
    """The first and last knot, and every `step`-th power of two between them."""
    least, most = int(knots[0]), int(knots[-1])
    return sorted({least, most, *(1 << power for power in range(least.bit_length(), most.bit_length(), step))})


def _even(knots: Lengths, parts: int) -> Array:
    return np.array([Partition.even(int(knot), parts).chunk_lens for knot in knots], dtype=float)


def _candidates(knot: int, planned: dict[int, Array], num_ranks: int, *, few: bool) -> Array:
    """Candidate chunks for a length, shape (B, ranks), in whole tokens."""
    lengths = np.array(list(planned))
    low = int(lengths[lengths <= knot].max())
    high = int(lengths[lengths >= knot].min())
    weight = 0.0 if low == high else float(np.log(knot / low) / np.log(high / low))
    if few:
        return _whole(planned[low] + weight * (planned[high] - planned[low]), knot, 1)[None]
    blends = [planned[low] + share * (planned[high] - planned[low]) for share in (*_BLENDS, weight)]
    even = np.full(num_ranks, 1 / num_ranks)
    blends += [(blends[-1] + even) / 2, even]
    steps = (1, _TILE) if knot >= 2 * num_ranks * _TILE else (1,)
    return np.unique([_whole(shares, knot, step) for shares in blends for step in steps], axis=0)


def _whole(shares: Array, tokens: int, step: int) -> Array:
    """Chunks with boundaries at multiples of a step; all but the last have at least one step."""
    return chunks_between(to_grid(np.cumsum(shares)[:-1] * tokens, step, tokens), tokens).astype(float)


def _delayed(program: Program, rank: int, delay_s: float) -> Program:
    """The same program with one rank that begins later, on host and device."""
    wait = Compute(name="before", device_s=np.array([delay_s]), host_s=delay_s)
    prologue = [((wait, *ops) if index == rank else ops) for index, ops in enumerate(program.prologue)]
    return replace(program, prologue=tuple(prologue))
