"""Parallel descents from many seeds: the search for programs that take long to simulate and have no tight bound.

On a bus, fewer bytes cross it if later ranks have more of the context. In the best partition, nearly all of it may be
on the last rank, or some ranks may be idle with a single token each. Ranks that exchange tokens for their experts, or
send to all later ranks, have many local optima. So the seeds are spread widely. Elsewhere than on a bus, a round
simulates a random part of its moves: many moves gain about as much as the best one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvrsim.execution import Execution
from kvrsim.once import once
from kvrsim.program import Array
from kvrsim.strategies import chain_like
from planner.search.balance import ChainWork, balanced_chunks
from planner.search.minimise import (
    Boundaries,
    Evaluate,
    Evaluator,
    Row,
    apart,
    chunks_between,
    first_step,
    groups,
    minimise,
    rounded,
    unique_rows,
    valid,
)

_WORK = 8_000_000  # largest number of messages in all simulated partitions of a search
_LEAST = 400  # number of partitions that every search may simulate
# largest number of descents
_DESCENTS = 5
_DESCENTS_ON_A_BUS = 3
_BEHIND = ((5, 1.01), (3, 1.1))  # (round, factor): from this round on, a descent ends if slower than factor x best
# largest number of rounds, and of rounds times ranks
_ROUNDS = 60
_ROUNDS_TIMES_RANKS = 1920
_IDLE_ROUNDS = 2  # rounds without a gain at the smallest steps, after which a descent ends
# steps (powers of two) per round: of all descents on a bus, of each descent elsewhere
_STEPS = 12
_FEW_STEPS = 4
_MOVES = 400  # largest number of moves per round and descent, elsewhere than on a bus
_LONGER = 2  # the first step of the next round is the last move, doubled this many times
_HELPED = 8  # number of improving moves of a round whose sums the next round tries
_RATIOS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)  # ratios of each chunk to the previous one
_SPLITS = (0.1, 0.25, 0.5, 0.75, 0.9)  # shares of the context on the first of two ranks
_SCATTERED = 40  # number of random seeds of each kind
_TOGETHER = 32  # moves of all boundaries together, per round
_PLACES = 8  # largest number of ranks on which seeds concentrate the context, alone or in pairs
_ENDLESS = 1e30  # bytes/s of links that take no time
# strides per even chunk, and rounds, of the search for the least TTFT on a bus
_STRIDES = 64
_FEW_ROUNDS = 12
# least gain of a move, as a share of TTFT: on a bus; elsewhere
_BETTER = 1e-5
_BETTER_BY_PART = 3e-5


def most_on_a_bus(execution: Execution) -> int:
    """The largest number of partitions that a search on a bus simulates, smaller if partitions have more messages.

    On up to 8 GPUs and with up to 32 layers, the search ends before this limit.
    """
    num_ranks = execution.cluster.num_gpus
    pairs = num_ranks - 1 if execution.strategy.chains else num_ranks * (num_ranks - 1) // 2
    return max(_LEAST, _WORK // max(1, pairs * execution.placed.share.num_hidden_layers))


@once
def plan_on_a_bus(execution: Execution) -> tuple[Row, float]:
    """A partition for a shared bus, and about the least TTFT of all partitions, in seconds.

    No partition is faster than on links that take no time, nor faster than the bus carries its messages: each rank's
    keys and values pass once to every later rank, or to the next rank with those of all earlier ranks. The partition
    with the least maximum of both is searched from balanced chunks of the last ranks.
    """
    tokens = execution.request.new_tokens
    num_ranks = execution.cluster.num_gpus
    chain = execution.by(chain_like(execution.strategy))
    quiet = Evaluator(execution.on(execution.placed.with_own_links(_ENDLESS, latency_s=0.0)))
    messages = ChainWork(chain)

    def least_s(boundaries: Boundaries, enough_s: float = math.inf) -> Array:
        chunks = chunks_between(boundaries, tokens).astype(float)
        starts = execution.request.cached_prefix + np.cumsum(chunks, axis=1) - chunks
        sent_s = messages.work(range(num_ranks), chunks.T, starts.T).sends_s.sum(axis=0)
        return np.asarray(np.maximum(sent_s, quiet.ttft_s(chunks, enough_s)))

    stride = max(1, tokens // num_ranks // _STRIDES)
    plans = last_ranks_balanced(chain, range(1, num_ranks + 1))
    seeds = unique_rows([rounded(plan, stride, tokens) for plan in plans])
    best = seeds[int(least_s(seeds).argmin())]
    return minimise(best, tokens, stride, least_s, rounds=_FEW_ROUNDS)


def last_ranks_balanced(chain: Execution, counts: Sequence[int]) -> Iterator[Array]:
    """Yield, for each count, balanced chunks of as many last ranks; the other ranks are idle, with 0 tokens."""
    request = chain.request
    num_ranks = chain.cluster.num_gpus
    for used in counts:
        fewer = replace(request, context_len=request.context_len - (num_ranks - used))
        balanced = balanced_chunks(chain.on(replace(chain.placed.on_gpus(used), request=fewer)))
        yield np.append(np.zeros(num_ranks - used), balanced)


@dataclass(slots=True)
class _Descent:
    """State of a descent."""

    best: Row  # best boundaries so far
    best_s: float
    step: int  # largest step of the next round
    also: Boundaries  # candidates from the moves that improved TTFT in the last round
    idle: int = 0  # number of rounds without a gain at the smallest steps
    is_part: bool = False  # whether the last round simulated a part of its moves
    needs_all: bool = False  # whether the next round simulates all moves, because a part of them gained nothing


class Descents:
    """A search over boundaries that are multiples of the stride; `most`: largest number of simulated partitions.

    chain: execution of KVR's chain, whose balanced chunks are seeds. plans: chunks of more seeds.
    wide: whether to add many other seeds.
    """

    def __init__(
        self, chain: Execution, stride: int, evaluate: Evaluate, most: int, plans: Sequence[Array], *, wide: bool
    ) -> None:
        self.chain = chain
        self.stride = stride
        self.evaluate = evaluate
        self.tokens = chain.request.new_tokens
        self.num_ranks = chain.cluster.num_gpus
        self.left = most
        self.plans = plans
        self.wide = wide
        self.is_bus = chain.cluster.shares_bandwidth
        self.groups = groups(self.num_ranks - 1)
        self.better = _BETTER if self.is_bus else _BETTER_BY_PART
        self.was_limited = False  # whether the limit left some partitions untried
        self.rng = np.random.default_rng(0)
        self.first_step = first_step(self.tokens, 8, stride)

    def run(self) -> tuple[Row, float]:
        """The best boundaries and their TTFT."""
        even = rounded(np.full(self.num_ranks, self.tokens / self.num_ranks), self.stride, self.tokens)
        seeds = unique_rows([rounded(plan, self.stride, self.tokens) for plan in self._plans()])
        seeds = np.concatenate([even[None], self._within(seeds, self.left // 2 - 1)])
        seeds_s = self._evaluated(seeds)
        number = 1 if not self.wide else _DESCENTS_ON_A_BUS if self.is_bus else _DESCENTS
        descents = [
            _Descent(seeds[index], float(seeds_s[index]), self.first_step, seeds[:0])
            for index in apart(seeds, seeds_s, self.tokens, number)
        ]
        best = self._descended(descents)
        return best.best, best.best_s

    def _descended(self, descents: list[_Descent]) -> _Descent:
        """Run the descents to their ends; return the best."""
        alive = descents
        for number in range(max(4, min(_ROUNDS, _ROUNDS_TIMES_RANKS // self.num_ranks))):
            best_s = min(one.best_s for one in descents)
            behind = next((factor for first, factor in _BEHIND if number >= first), np.inf)
            alive = [one for one in alive if one.idle < _IDLE_ROUNDS and one.best_s <= behind * best_s]
            if not alive or not self._round(alive):
                break
        return min(descents, key=lambda one: one.best_s)

    def _round(self, descents: list[_Descent]) -> bool:
        """Run one round of each descent; return False if no more partitions may be simulated."""
        most = _FEW_STEPS if not self.is_bus else _STEPS // len(descents) if self.wide else _STEPS // 2
        steps = [[one.step >> power for power in range(most) if one.step >> power >= self.stride] for one in descents]
        candidates = [self._around(one, own) for one, own in zip(descents, steps, strict=True)]
        room = self.left // len(descents)
        if room < 1:
            self.was_limited = True
            return False
        candidates = [self._within(rows, room) for rows in candidates]
        times_s = self._evaluated(np.concatenate(candidates))
        first = 0
        for one, own, rows in zip(descents, steps, candidates, strict=True):
            self._take(one, own, rows, times_s[first : first + len(rows)])
            first += len(rows)
        return True

    def _take(self, one: _Descent, steps: list[int], rows: Boundaries, times_s: Array) -> None:
        """Move to the best candidate, and keep other good moves for the next round; without gain, reduce the steps."""
        order = np.argsort(times_s, kind="stable")[:_HELPED]
        order = order[times_s[order] < one.best_s * (1.0 - self.better)]
        one.also, one.needs_all = rows[:0], one.is_part and not len(order)
        if one.needs_all:
            return
        if not len(order):
            is_smallest = steps[-1] == self.stride
            one.step, one.idle = (steps[0], one.idle + 1) if is_smallest else (steps[-1] // 2, one.idle)
            return
        moves = rows[order] - one.best
        one.also = one.best + np.concatenate([np.cumsum(moves, axis=0)[1:], moves[:1] * np.array([[2], [3], [5]])])
        one.also = one.also[valid(one.also, self.tokens)]
        strides = max(1, int(np.abs(moves[0]).max()) // self.stride)
        one.step = min(self.first_step, self.stride << max(_LONGER, strides.bit_length() - 1 + _LONGER))
        one.best = rows[order[0]]
        one.best_s = float(times_s[order[0]])
        one.idle = 0

    def _around(self, one: _Descent, steps: list[int]) -> Boundaries:
        """Candidates: groups moved by the steps, random moves of all boundaries, sums of the last moves, idle ranks."""
        count = len(one.best)
        moves = np.concatenate([step * self.groups for step in steps])
        lengths = steps[0] * 4.0 ** self.rng.uniform(-len(steps) / 2, 0.5, size=(_TOGETHER, 1))
        together = self.rng.normal(size=(_TOGETHER, count)) * lengths / self.stride
        rows = one.best + np.concatenate([moves, -moves, np.round(together).astype(np.int64) * self.stride])
        rows = np.concatenate([rows[valid(rows, self.tokens)], self._with_idle_ranks(one.best)])
        one.is_part = len(rows) > _MOVES and not one.needs_all and not self.is_bus
        if one.is_part:
            rows = rows[self.rng.choice(len(rows), _MOVES, replace=False)]
        return np.concatenate([one.also, rows])

    def _with_idle_ranks(self, boundaries: Row) -> Boundaries:
        """Partitions where one rank has the smallest chunk, and its other tokens go to a neighbour or the last rank."""
        chunks = chunks_between(boundaries, self.tokens)
        last = self.num_ranks - 1
        rows = []
        for rank in range(self.num_ranks):
            for other in {max(0, rank - 1), min(last, rank + 1), last} - {rank}:
                row = chunks.copy()
                row[rank], row[other] = self.stride, row[other] + row[rank] - self.stride
                rows.append(np.cumsum(row)[:-1])
        moved = np.array(rows, dtype=np.int64).reshape(-1, len(boundaries))
        return moved[valid(moved, self.tokens)]

    def _plans(self) -> Iterator[Array]:
        """Chunks of the seeds. Idle ranks have 0 tokens here; rounding gives them one."""
        yield from self.plans
        ranks = np.arange(self.num_ranks)
        counts = _spread(1, self.num_ranks)
        if self.is_bus:
            yield from last_ranks_balanced(self.chain, counts)
        if not self.wide:
            return
        for used in counts:
            idle = np.zeros(self.num_ranks - used)
            for ratio in _RATIOS:
                yield self._scaled(np.append(idle, ratio ** (ranks[:used] - used)))
        places = _spread(0, self.num_ranks - 1)
        for first, second in itertools.combinations_with_replacement(places, 2):
            for share in _SPLITS if second > first else (1.0,):
                row = np.zeros(self.num_ranks)
                row[first] += share
                row[second] += 1.0 - share
                yield self._scaled(row)
        for evenness in (0.3, 1.0):
            for row in self.rng.dirichlet(np.full(self.num_ranks, evenness), size=_SCATTERED):
                yield self._scaled(row)

    def _scaled(self, shares: Array) -> Array:
        return np.asarray(shares * (self.tokens / shares.sum()))

    def _within(self, rows: Boundaries, room: int) -> Boundaries:
        """Return at most `room` of the rows, evenly spaced."""
        if len(rows) <= room:
            return rows
        self.was_limited = True
        return np.asarray(rows[np.unique(np.linspace(0, len(rows) - 1, max(0, room)).astype(np.intp))])

    def _evaluated(self, rows: Boundaries) -> Array:
        self.left -= len(rows)
        return self.evaluate(rows) if len(rows) else np.zeros(0)


def _spread(first: int, last: int) -> list[int]:
    """Whole numbers from `first` to `last`: all or, if there are many, some of them, closer together near `last`."""
    if last - first < _PLACES:
        return list(range(first, last + 1))
    return sorted({last + 1 - round(float(back)) for back in np.geomspace(1, last - first + 1, _PLACES)})
