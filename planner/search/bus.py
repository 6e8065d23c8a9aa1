"""The best partition where flows share one bandwidth: many seeds, and descents from the best of them side by side.

Fewer bytes cross the bus the later the context lies, down to nearly all of it on the last rank; the best partition may
leave ranks out with a single token each. No bound tells how far off a partition is, so that the seeds are wide apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvrsim.program.operations import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.search.balance import balanced_chunks
from planner.search.grid import Evaluate
from planner.search.neighbours import Boundaries, chunks_between, groups, rounded, unique_rows, valid

Row = npt.NDArray[np.int64]

_WORK, _LEAST = 4_000_000, 200  # messages of all partitions that a search simulates; partitions at least
_DESCENTS, _APART = 3, 0.1  # descents, and the share of the tokens that lies elsewhere in the seed of each
_BEHIND = ((6, 1.02), (3, 1.1))  # rounds from which on a descent ends that is so many times as slow as the best
_ROUNDS = 60
_RATIOS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)  # of each chunk to the one before
_SPLITS = (0.1, 0.25, 0.5, 0.75, 0.9)  # of the context between two ranks
_SCATTERED = 40  # of each kind
_TOGETHER = 32  # moves of all boundaries in a round
_PLACES = 8  # ranks, or pairs of them squared, that seeds concentrate the context on
_BETTER = 1e-5  # a move must gain this share of TTFT


def most_on_a_bus(scenario: Scenario, strategy: Strategy) -> int:
    """Partitions that a search on a bus simulates at most: each takes as long as it has messages.

    The search is not cut short by it on up to 8 GPUs and 32 layers.
    """
    num_ranks = scenario.cluster.num_gpus
    pairs = num_ranks - 1 if strategy.chains else num_ranks * (num_ranks - 1) // 2
    return max(_LEAST, _WORK // max(1, pairs * scenario.share.num_hidden_layers))


@dataclass(slots=True)
class _Descent:
    """Where a descent stands."""

    best: Row  # boundaries
    best_s: float
    step: int
    moved: Row  # the last move that helped


class BusSearch:
    """A search over boundaries that are multiples of the stride; `most`: partitions to simulate.

    chain: the strategy whose balanced chunks are seeds; plans: chunks that are seeds, too.
    """

    def __init__(
        self,
        scenario: Scenario,
        chain: Strategy,
        stride: int,
        evaluate: Evaluate,
        most: int,
        plans: Sequence[Array],
    ) -> None:
        self.scenario, self.chain, self.stride, self.evaluate = scenario, chain, stride, evaluate
        self.tokens, self.num_ranks = scenario.request.new_tokens, scenario.cluster.num_gpus
        self.left, self.plans = most, plans
        self.was_limited = False  # fewer partitions were tried than there were
        self.rng = np.random.default_rng(0)

    def run(self) -> tuple[Row, float]:
        """The best boundaries and their TTFT."""
        even = rounded(np.full(self.num_ranks, self.tokens / self.num_ranks), self.stride, self.tokens)
        seeds = unique_rows([rounded(plan, self.stride, self.tokens) for plan in self._plans()])
        seeds = np.concatenate([even[None], self._within(seeds, self.left // 2 - 1)])
        seeds_s = self._evaluated(seeds)
        descents = [
            _Descent(seeds[index], float(seeds_s[index]), self._first_step(), np.zeros_like(even))
            for index in self._apart(seeds, seeds_s)
        ]
        best = self._descended(descents)
        # The steps in between: tiles of kernels make valleys, which steps of some lengths alone do not cross.
        again = _Descent(best.best, best.best_s, 2 * self._first_step(), np.zeros_like(even))
        best = self._descended([again])
        return best.best, best.best_s

    def _descended(self, descents: list[_Descent]) -> _Descent:
        """The best of these, taken as far as they get."""
        alive = descents
        for number in range(_ROUNDS):
            best_s = min(one.best_s for one in descents)
            behind = next((factor for first, factor in _BEHIND if number >= first), np.inf)
            alive = [one for one in alive if one.step and one.best_s <= behind * best_s]
            if not alive or not self._round(alive):
                break
        return min(descents, key=lambda one: one.best_s)

    def _round(self, descents: list[_Descent]) -> bool:
        """One step of each; False where no partition may be tried any more."""
        candidates = [self._around(one) for one in descents]
        room = self.left // len(descents)
        if room < 1:
            self.was_limited = True
            return False
        candidates = [self._within(rows, room) for rows in candidates]
        found_s = self._evaluated(np.concatenate(candidates))
        first = 0
        for one, rows in zip(descents, candidates, strict=True):
            self._take(one, rows, found_s[first : first + len(rows)])
            first += len(rows)
        return True

    def _take(self, one: _Descent, rows: Boundaries, found_s: Array) -> None:
        """Go to the best of the candidates, and by what else helped the next time; or take smaller steps."""
        index = int(found_s.argmin()) if len(rows) else -1
        if index < 0 or not found_s[index] < one.best_s * (1.0 - _BETTER):
            one.step = 0 if one.step == self.stride else max(self.stride, one.step // 4)
            one.moved = np.zeros_like(one.best)
            return
        one.moved = rows[index] - one.best
        one.best, one.best_s = rows[index], float(found_s[index])

    def _around(self, one: _Descent) -> Boundaries:
        """Groups of boundaries moved by a step, all moved at random, the last move again, ranks left out."""
        count = len(one.best)
        moves = one.step * groups(count)
        lengths = one.step * 4.0 ** self.rng.uniform(-1.0, 0.5, size=(_TOGETHER, 1))
        together = self.rng.normal(size=(_TOGETHER, count)) * lengths / self.stride
        on = one.moved[None] * np.array([[1], [2], [4]]) if one.moved.any() else np.empty((0, count), dtype=np.int64)
        rows = one.best + np.concatenate([moves, -moves, np.round(together).astype(np.int64) * self.stride, on])
        rows = np.concatenate([rows[valid(rows, self.tokens)], self._with_idle_ranks(one.best)])
        return unique_rows(rows) if len(rows) else rows

    def _with_idle_ranks(self, boundaries: Row) -> Boundaries:
        """With one rank at the least chunk, its tokens at a neighbour's, or at the last rank's."""
        chunks = chunks_between(boundaries, self.tokens)
        last, rows = self.num_ranks - 1, []
        for rank in range(self.num_ranks):
            for other in {max(0, rank - 1), min(last, rank + 1), last} - {rank}:
                row = chunks.copy()
                row[rank], row[other] = self.stride, row[other] + row[rank] - self.stride
                rows.append(np.cumsum(row)[:-1])
        found = np.array(rows, dtype=np.int64).reshape(-1, len(boundaries))
        return found[valid(found, self.tokens)]

    def _plans(self) -> Iterator[Array]:
        """Chunks to begin from; the ranks that are left out have no token here, and get one."""
        yield from self.plans
        ranks = np.arange(self.num_ranks)
        for used in _spread(1, self.num_ranks):
            idle = np.zeros(self.num_ranks - used)
            yield np.append(idle, self._balanced(used))
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

    def _balanced(self, used: int) -> Array:
        """Chunks of the last so many ranks that make them equally long."""
        request = self.scenario.request
        fewer = replace(request, context_len=request.context_len - (self.num_ranks - used))
        return balanced_chunks(replace(self.scenario.on_gpus(used), request=fewer), self.chain)

    def _scaled(self, shares: Array) -> Array:
        return np.asarray(shares * (self.tokens / shares.sum()))

    def _apart(self, seeds: Boundaries, seeds_s: Array) -> list[int]:
        """The best seeds that differ from each other."""
        chunks, found = chunks_between(seeds, self.tokens), list[int]()
        for index in np.argsort(seeds_s, kind="stable"):
            moved = [np.abs(chunks[index] - chunks[other]).sum() / 2 for other in found]
            if all(one > _APART * self.tokens for one in moved):
                found.append(int(index))
            if len(found) == _DESCENTS:
                break
        return found

    def _first_step(self) -> int:
        """A quarter of the even share, as the stride times a power of 4."""
        step = self.stride
        while 4 * step <= self.tokens // self.num_ranks // 2:
            step *= 4
        return step

    def _within(self, rows: Boundaries, room: int) -> Boundaries:
        """At most so many of the rows, spread over them."""
        if len(rows) <= room:
            return rows
        self.was_limited = True
        return np.asarray(rows[np.unique(np.linspace(0, len(rows) - 1, max(0, room)).astype(np.intp))])

    def _evaluated(self, rows: Boundaries) -> Array:
        self.left -= len(rows)
        return self.evaluate(rows) if len(rows) else np.zeros(0)


def _spread(first: int, last: int) -> list[int]:
    """Whole numbers from first to last, or a few of them, closer near the last."""
    if last - first < _PLACES:
        return list(range(first, last + 1))
    return sorted({last + 1 - round(float(back)) for back in np.geomspace(1, last - first + 1, _PLACES)})
