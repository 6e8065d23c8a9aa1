"""Prefill times of one group size at knots of prompt length, with partitions searched at a few lengths.

Partitions are planned at doublings of the new tokens (analytically: within 0.1 to 1 % of a full search). In
between, the shares of both neighbours, shares between theirs, and even ones are tried, as they are and with chunks
of whole tiles, all in one batch, and the best is kept. TSP and a single GPU of the group compete with the searched
strategy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvrsim.compile import build_program, columns, for_strategy
from kvrsim.executors import run
from kvrsim.memory import fits, memory_of
from kvrsim.partition import Partition
from kvrsim.program.operations import Array, Compute, Program
from kvrsim.request import Request
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S, STRATEGIES, Strategy
from planner.capacity.workloads.workload import Lengths
from planner.search.neighbours import chunks_between, to_grid
from planner.search.search import search
from planner.table.lookup import partition_from
from planner.table.table import PartitionTable

KNOTS_PER_DOUBLING = 8  # lengths that are simulated; times between them are interpolated
_TILE = 128  # tokens, rows of an attention kernel's tile
_BLENDS = (0.0, 0.5, 1.0)  # weights between the searched shares below and above
_FAR = 8.0  # one rank is delayed by so many times the longest prefill to find its slack


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceTimeGrid:
    """Times for one group size and one cached prefix; arrays of shape (knots,) or (knots, num_gpus)."""

    cached_prefix: int
    new_tokens: Lengths  # the knots, ascending
    ttft_s: Array
    strategy: tuple[str, ...]  # the fastest at each knot
    finish: Array  # finish time of each rank over ttft_s
    slack_s: Array  # how much later each rank could begin without delaying any rank
    most_new_tokens: int  # the most that fit in memory; 0: none


def knot_lengths(least: int, most: int) -> Lengths:
    """Both ends, powers of two, and seven lengths between any two of these."""
    powers = np.arange(np.floor(np.log2(least)) * KNOTS_PER_DOUBLING, np.ceil(np.log2(most)) * KNOTS_PER_DOUBLING + 1)
    inner = np.rint(2.0 ** (powers / KNOTS_PER_DOUBLING)).astype(np.int64)
    return np.unique(np.concatenate([[least, most], inner[(inner > least) & (inner < most)]]))


class ServiceTimeGrids:
    """Simulates grids for one group size of a scenario; searched: the strategy that groups run, such as kvr-s."""

    def __init__(
        self, scenario: Scenario, num_gpus: int, table: PartitionTable | None = None, searched: Strategy = KVR_S
    ) -> None:
        self.scenario, self.num_gpus, self.table = scenario.on_gpus(num_gpus), num_gpus, table
        self.searched = searched if num_gpus > 1 else STRATEGIES["single"]
        for_strategy(self.scenario, self.searched)  # refuses what the model does not allow
        # KVR-S with chunks from a table is KVR-P.
        self.label = "kvr-p" if searched is KVR_S and table is not None else searched.name
        self.shared = self.scenario.cluster.shares_bandwidth

    def grid(self, cached_prefix: int, knots: Lengths) -> ServiceTimeGrid:
        """Times at all knots for one cached prefix."""
        alone = self._prefill(STRATEGIES["single"], knots[:, None].astype(float), cached_prefix, num_gpus=1)
        ttft_s, strategy = alone[:, -1].copy(), np.full(len(knots), "single", dtype=object)
        finish, slack_s = np.ones((len(knots), self.num_gpus)), np.zeros((len(knots), self.num_gpus))
        chains = np.flatnonzero(knots >= self.num_gpus) if self.num_gpus > 1 else np.zeros(0, dtype=np.int64)
        if len(chains):
            even = _even(knots[chains], self.num_gpus)
            gathered = self._prefill(STRATEGIES["tsp"], even, cached_prefix)[:, -1]
            chunks, finish_s = self._chains(knots[chains], cached_prefix)
            waits_s = self._slack(chunks, finish_s, cached_prefix)
            for row, knot in enumerate(chains):
                if gathered[row] < ttft_s[knot]:
                    ttft_s[knot], strategy[knot] = gathered[row], "tsp"
                if finish_s[row, -1] < ttft_s[knot]:
                    ttft_s[knot], strategy[knot] = finish_s[row, -1], self.label
                    finish[knot], slack_s[knot] = finish_s[row] / finish_s[row, -1], waits_s[row]
        return ServiceTimeGrid(
            cached_prefix=cached_prefix,
            new_tokens=knots,
            ttft_s=ttft_s,
            strategy=tuple(strategy),
            finish=finish,
            slack_s=slack_s,
            most_new_tokens=self._most_that_fit(cached_prefix, int(knots[-1])),
        )

    def _at(self, cached_prefix: int, new_tokens: int, num_gpus: int | None = None) -> Scenario:
        request = Request(
            context_len=cached_prefix + new_tokens, cached_prefix=cached_prefix, dtype=self.scenario.request.dtype
        )
        placed = self.scenario if num_gpus is None else self.scenario.on_gpus(num_gpus)
        return replace(placed, request=request)

    def _chains(self, knots: Lengths, cached_prefix: int) -> tuple[Array, Array]:
        """The best candidate chunks of each knot, and when each rank finishes; both (knots, num_gpus)."""
        candidates = self._candidates(knots, cached_prefix)
        finish_s = self._prefill(self.searched, np.concatenate(candidates), cached_prefix)
        bests, first = [], 0
        for rows in candidates:
            bests.append(first + int(finish_s[first : first + len(rows), -1].argmin()))
            first += len(rows)
        return np.concatenate(candidates)[bests], finish_s[bests]

    def _candidates(self, knots: Lengths, cached_prefix: int) -> list[Array]:
        """Candidate chunks of each knot, each of shape (B, num_gpus); a table's partition is the only candidate."""
        if self.table is not None:
            cuts = [partition_from(self.table, self._at(cached_prefix, int(knot))).chunk_lens for knot in knots]
            return [np.array([cut], dtype=float) for cut in cuts]
        step = 2 if cached_prefix else 1  # with a long prefix, shares change less with length
        planned = {length: self._planned(cached_prefix, length) for length in _powers(knots, step)}
        return [_candidates(int(knot), planned, self.num_gpus, few=self.shared) for knot in knots]

    def _planned(self, cached_prefix: int, new_tokens: int) -> Array:
        """Share of the new tokens of each rank."""
        if self.table is not None:
            return np.array(partition_from(self.table, self._at(cached_prefix, new_tokens)).fractions)
        found = search(self._at(cached_prefix, new_tokens), self.searched, method="analytical")
        return np.array(found.partition.fractions)

    def _prefill(self, strategy: Strategy, chunks: Array, cached_prefix: int, num_gpus: int | None = None) -> Array:
        """Finish time of each rank for chunks of shape (B, ranks); the same shape."""
        scenario = self._at(cached_prefix, int(chunks[0].sum()), num_gpus)
        return run.finish_s(scenario, strategy, chunks)

    def _slack(self, chunks: Array, finish_s: Array, cached_prefix: int) -> Array:
        """How much later each rank alone could begin; 0 on a shared bus, where it is unknown."""
        slack_s = np.zeros_like(finish_s)
        if self.shared:
            return slack_s
        scenario = self._at(cached_prefix, int(chunks[0].sum()))
        program = build_program(scenario, self.searched, columns(chunks))
        delay_s = _FAR * float(finish_s.max())
        for rank in range(1, self.num_gpus):
            ends_s = run.run_program(_delayed(program, rank, delay_s), scenario.cluster).T
            slack_s[:, rank] = (delay_s - (ends_s - finish_s)).min(axis=1)
        return np.maximum(0.0, slack_s - 1e-9 * delay_s)

    def _most_that_fit(self, cached_prefix: int, most: int) -> int:
        """The most new tokens for which every rank's peak fits in memory, by bisection; chunks as searched."""
        shares: dict[int, Array] = {}

        def is_within(new_tokens: int) -> bool:
            near = 1 << max(int(new_tokens).bit_length() - 1, (self.num_gpus - 1).bit_length())
            if near not in shares:
                shares[near] = self._planned(cached_prefix, near) if self.num_gpus > 1 else np.ones(1)
            cut = Partition(chunk_lens=tuple(map(int, _whole(shares[near], max(new_tokens, self.num_gpus), 1))))
            scenario = self._at(cached_prefix, cut.num_tokens)
            return fits(scenario, memory_of(scenario, self.searched, cut))

        if is_within(most):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_within(middle) else (low, middle)
        return low


def _powers(knots: Lengths, step: int) -> list[int]:
    """The first and last knot, and every `step`-th power of two between them."""
    least, most = int(knots[0]), int(knots[-1])
    return sorted({least, most, *(1 << power for power in range(least.bit_length(), most.bit_length(), step))})


def _even(knots: Lengths, num_gpus: int) -> Array:
    return np.array([Partition.even(int(knot), num_gpus).chunk_lens for knot in knots], dtype=float)


def _candidates(knot: int, planned: dict[int, Array], num_gpus: int, *, few: bool) -> Array:
    """Candidate chunks for a length, shape (B, num_gpus), in whole tokens."""
    lengths = np.array(list(planned))
    low = int(lengths[lengths <= knot].max())
    high = int(lengths[lengths >= knot].min())
    weight = 0.0 if low == high else float(np.log(knot / low) / np.log(high / low))
    if few:
        return _whole(planned[low] + weight * (planned[high] - planned[low]), knot, 1)[None]
    blends = [planned[low] + share * (planned[high] - planned[low]) for share in (*_BLENDS, weight)]
    even = np.full(num_gpus, 1 / num_gpus)
    blends += [(blends[-1] + even) / 2, even]
    steps = (1, _TILE) if knot >= 2 * num_gpus * _TILE else (1,)
    return np.unique([_whole(shares, knot, step) for shares in blends for step in steps], axis=0)


def _whole(shares: Array, tokens: int, step: int) -> Array:
    """Chunks with boundaries at multiples of a step; all but the last have at least one step."""
    return chunks_between(to_grid(np.cumsum(shares)[:-1] * tokens, step, tokens), tokens).astype(float)


def _delayed(program: Program, rank: int, delay_s: float) -> Program:
    """The same program with one rank that begins later, on host and device."""
    wait = Compute(name="before", device_s=np.array([delay_s]), host_s=delay_s)
    prologue = [((wait, *ops) if index == rank else ops) for index, ops in enumerate(program.prologue)]
    return replace(program, prologue=tuple(prologue))
