"""The search for the best partition: the analytical plan, the paper's grid, or seeds refined by pattern search."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from kvrsim.choices import METHODS
from kvrsim.compile import build_program
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.program import Array, Compute
from kvrsim.progress import OnProgress
from kvrsim.results.results import SearchReport
from kvrsim.scenario import Partition
from kvrsim.strategies import Strategy, chain_like
from planner.search.balance import balanced_chunks
from planner.search.bound import lower_bound_and_plans
from planner.search.grid import Grid
from planner.search.minimise import (
    Allowance,
    Boundaries,
    Evaluator,
    Row,
    chunk_lens,
    chunks_between,
    default_stride,
    minimise,
    rounded,
    to_grid,
    unique_rows,
)

_ROUNDS_TIMES_RANKS = 600  # of a pattern search; with 256, kvr-b on 41 ranks lost 3.7 % of TTFT (question 61, seed 7)
_SLOW_ROUNDS = 8  # rounds where each simulates a program; 20 random questions on a bus then lose 0.6 % at most
_PROVEN = 1.005  # within this factor of the bound, no other starts are tried
_SCATTERED = 200  # random starts, for chains with few layers, whose best partition may be far from the balanced one
_MOST_SCATTERED_RANKS = 32  # with more, a round takes so long that only the best start is refined
_FINE_GAIN = 5e-4  # least gain from steps below the stride, so that chunks are multiples of it where that costs nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """A partition, and the effort of the search that found it."""

    execution: Execution = field(repr=False)  # execution of ttft_s; of a pipeline, with the layers of its stages
    partition: Partition
    ttft_s: float
    report: SearchReport
    lower_bound_s: float | None = None  # proven lower bound; None: not computed
    finish_s: tuple[float, ...] | None = None  # finish time of each rank; None: not computed
    balanced: Array | None = None  # chunks of the analytical plan, tokens; None: not computed

    @property
    def strategy(self) -> Strategy:
        """The strategy; for a pipeline, with the layers of its stages."""
        return self.execution.strategy


def search(
    execution: Execution,
    *,
    method: str = "auto",
    stride: int | None = None,
    warm_start: Partition | None = None,
    on_progress: OnProgress | None = None,
    allowance: Allowance | None = None,
) -> SearchResult:
    """Search the best partition.

    auto: the analytical plan and other seeds, refined by pattern search; analytical: only the analytical plan;
    grid: the paper's hierarchical grid search. `stride`: boundaries are multiples of the stride, in tokens.
    warm_start: the best partition of KVR's chain, for strategies near the chain; None: the chain is searched first.
    Raises InputError for an unknown method or a stride that is too large.
    """
    if method not in METHODS:
        raise InputError("method", method, ", ".join(METHODS))
    tokens = execution.request.new_tokens
    num_ranks = execution.cluster.num_gpus
    if num_ranks > tokens:
        raise InputError("gpus", num_ranks, f"at most one GPU a token, here {tokens}")
    step = default_stride(tokens, num_ranks) if stride is None else stride
    most = max(1, (tokens - 1) // max(1, num_ranks - 1))
    if not 1 <= step <= most:
        raise InputError("stride", step, f"a whole number from 1 to {most}")
    begin_s = time.perf_counter()
    evaluator = Evaluator(execution, on_progress, allowance=allowance)
    run = _ChunkSearch(execution, evaluator, step)
    if execution.strategy.near_chain and method == "auto" and num_ranks > 1:
        if warm_start is None:
            chain = execution.by(chain_like(execution.strategy))
            warm_start = search(chain, stride=stride, allowance=allowance).partition
        run.warm_start = np.array(warm_start.boundaries[1:-1], dtype=np.int64)
    boundaries, ttft_s, name = run.run(method)
    if method == "auto" and stride is None:
        boundaries, ttft_s = run.by_single_tokens(boundaries, ttft_s)
    partition = Partition(chunk_lens=chunk_lens(tuple(boundaries), tokens))
    seconds = time.perf_counter() - begin_s
    report = SearchReport(method=name, evaluations=evaluator.evaluations, seconds=seconds)
    return SearchResult(
        execution=execution,
        partition=partition,
        ttft_s=ttft_s,
        report=report,
        lower_bound_s=run.lower_bound_s,
        balanced=run.balanced,
    )


class _ChunkSearch:
    def __init__(self, execution: Execution, evaluator: Evaluator, stride: int) -> None:
        self.execution = execution
        self.evaluator = evaluator
        self.stride = stride
        self.lower_bound_s: float | None = None
        self.is_the_chains = False  # whether the best partition is the chain's, the warm start
        self.balanced: Array | None = None
        self.warm_start: Row | None = None  # boundaries near which the best ones are expected
        # Balanced chunks and bounds are those of KVR's chain; other strategies start from its chunks and have no bound.
        self.chain = execution if execution.strategy.chains else execution.by(chain_like(execution.strategy))
        self.tokens = execution.request.new_tokens
        self.num_ranks = execution.cluster.num_gpus

    def run(self, method: str) -> tuple[Row, float, str]:
        """The best boundaries, their TTFT and the name of the method."""
        if self.num_ranks == 1:
            none = np.zeros(0, dtype=np.int64)
            return none, float(self._evaluate(none[None])[0]), "analytical"
        if method == "grid":
            boundaries, ttft_s = Grid(self.tokens, self.num_ranks, self._evaluate).search(self.stride)
            return np.array(boundaries, dtype=np.int64), ttft_s, "grid"
        if method == "analytical":
            seed = self._analytical()
            return seed, float(self._evaluate(seed[None])[0]), "analytical"
        if self.evaluator.is_fast:
            return (*self._refined_from(self._seeds()), "auto")
        return (*self._refined_slowly(), "auto")

    def _analytical(self) -> Row:
        """Boundaries of balanced chunks; on a bus, also limited by the bytes of all messages."""
        if not self.execution.cluster.shares_bandwidth:
            return rounded(balanced_chunks(self.chain), self.stride, self.tokens)
        from planner.search.bus import plan_on_a_bus  # not imported at every start

        return to_grid(plan_on_a_bus(self.execution)[0].astype(float), self.stride, self.tokens)

    def _refined_slowly(self) -> tuple[Row, float]:
        """Refine the fastest of many seeds that differ from each other, where a program runs and nothing is proven."""
        if (
            self.warm_start is not None
            and self.execution.strategy.chains
            and not self._uses_query_blocks(self._scattered())
        ):
            self.is_the_chains = True
            return self.warm_start, float(self._evaluate(self.warm_start[None])[0])
        seeds = [*self._seeds(), self._analytical()]
        if self.warm_start is None:
            seeds += [*self._scattered()]
        if self.execution.cluster.shares_bandwidth:
            from planner.search.bus import last_ranks_balanced

            plans = last_ranks_balanced(self.chain, range(1, self.num_ranks + 1))
            seeds += [rounded(plan, self.stride, self.tokens) for plan in plans]
        return self._refined(unique_rows(seeds))

    def _uses_query_blocks(self, boundaries: Boundaries) -> bool:
        """Whether any rank issues attention in several calls; if none does, the best partition is the chain's."""
        chunks = chunks_between(boundaries, self.tokens).astype(float)
        layers = build_program(self.execution, list(chunks.T)).layers
        ops = [op for kind in layers for own in kind for op in own if isinstance(op, Compute)]
        return any(op.query_blocks is not None and op.query_blocks.max() > 1 for op in ops)

    def _refined_from(self, seeds: Boundaries) -> tuple[Row, float]:
        """Refine the best seed, then the best of scattered partitions and of those between walls of the bound.

        With few layers, the best partition may be far from the balanced one.
        """
        if self.warm_start is not None:
            return self._refined(seeds)
        if self.num_ranks > _MOST_SCATTERED_RANKS:
            return self._refined_with_walls(seeds)
        best, best_s = self._refined(seeds)
        walls = self._walls(best, best_s)
        if self._is_proven(best_s):
            return best, best_s
        other, other_s = self._refined(unique_rows([*walls, *self._scattered()]))
        if other_s < best_s:
            return other, other_s
        return best, best_s

    def _is_proven(self, ttft_s: float) -> bool:
        """Whether the bound proves that no partition is much faster."""
        return self.lower_bound_s is not None and ttft_s <= _PROVEN * self.lower_bound_s

    @property
    def _rounds(self) -> int:
        return max(4, _ROUNDS_TIMES_RANKS // self.num_ranks) if self.evaluator.is_fast else _SLOW_ROUNDS

    def _refined(self, seeds: Boundaries) -> tuple[Row, float]:
        """Improve the best of the seeds."""
        seed = seeds[int(self._evaluate(seeds).argmin())]
        return minimise(seed, self.tokens, self.stride, self._evaluate, rounds=self._rounds)

    def _refined_with_walls(self, seeds: Boundaries) -> tuple[Row, float]:
        """Refine, with many ranks, the faster of the best seed and the partitions between walls of the bound."""
        seeds_s = self._evaluate(seeds)
        best = seeds[int(seeds_s.argmin())]
        best_s = float(seeds_s.min())
        return self._refined(np.array([best, *self._walls(best, best_s)]))

    def _walls(self, best: Row, best_s: float) -> list[Row]:
        """Compute the bound, and return the boundaries at the walls of its weakest intervals."""
        near = np.array(chunk_lens(tuple(best), self.tokens), dtype=float)
        self.lower_bound_s, plans = lower_bound_and_plans(self.execution, best_s, near)
        scaled = plans * (self.tokens / plans.sum(axis=1, keepdims=True))
        return [rounded(plan, self.stride, self.tokens) for plan in scaled]

    def _scattered(self) -> Boundaries:
        """Chunks that shrink or grow from rank to rank, with various last chunks or idle first ranks; random chunks."""
        rng = np.random.default_rng(0)
        ranks = np.arange(self.num_ranks)
        shrinking = [ratio**ranks for ratio in (0.6, 0.75, 0.9, 1.0, 1.1)]
        plans = [np.append(chunks[:-1], chunks[-1] * last) for chunks in shrinking for last in (0.001, 0.05, 0.3, 1, 3)]
        plans += [np.append(0.0 * chunks[:idle], chunks[idle:]) for chunks in shrinking for idle in ranks[1:]]
        shares = np.array([*plans, *rng.dirichlet(np.ones(self.num_ranks), size=_SCATTERED)])
        shares *= self.tokens / shares.sum(axis=1, keepdims=True)
        return unique_rows([rounded(chunks, self.stride, self.tokens) for chunks in shares])

    def by_single_tokens(self, boundaries: Row, ttft_s: float) -> tuple[Row, float]:
        """Refine by steps below the stride.

        On slow links, a chunk of one token may be the best: if nothing proves the result, the search begins again from
        the same boundaries or from the same with some idle ranks. Elsewhere, one token more may need another row of
        tiles, but small gains are not taken.
        """
        is_final = self.stride == 1 or self.evaluator.is_spent or self.is_the_chains
        if is_final or not 2 <= self.num_ranks <= _MOST_SCATTERED_RANKS:
            return boundaries, ttft_s
        start = boundaries
        least_gain = _FINE_GAIN
        first_step: int | None = max(1, self.stride // 2)
        if not self._is_proven(ttft_s):
            seeds = self._with_idle_ranks(boundaries)
            start = seeds[int(self._evaluate(seeds).argmin())]
            least_gain = 0.0
            if self.evaluator.is_fast:
                first_step = None  # all steps in each round
        fine, fine_s = minimise(start, self.tokens, 1, self._evaluate, rounds=self._rounds, halve_from=first_step)
        if fine_s < ttft_s * (1 - least_gain):
            return fine, fine_s
        return boundaries, ttft_s

    def _with_idle_ranks(self, boundaries: Row) -> Boundaries:
        """These boundaries, and others where one rank, or the first few ranks, have a single token each."""
        chunks = np.array(chunk_lens(tuple(boundaries), self.tokens))
        rows = [chunks]
        for rank in range(self.num_ranks):
            for neighbour in {max(0, rank - 1), min(self.num_ranks - 1, rank + 1)} - {rank}:
                row = chunks.copy()
                row[rank], row[neighbour] = 1, row[neighbour] + row[rank] - 1
                rows.append(row)
            row = chunks.copy()
            row[:rank], row[rank] = 1, row[: rank + 1].sum() - rank
            rows.append(row)
        return unique_rows([np.cumsum(row)[:-1] for row in rows])

    def _seeds(self) -> Boundaries:
        """Blends of the balanced and the even plan, and the warm start."""
        even = np.full(self.num_ranks, self.tokens / self.num_ranks)
        plan = self.balanced = balanced_chunks(self.chain)
        blends = [plan + share * (even - plan) for share in (0.0, 0.25, 0.5, 0.75)] + [even]
        nearest = [] if self.warm_start is None else [to_grid(self.warm_start.astype(float), self.stride, self.tokens)]
        return unique_rows([*nearest, *(rounded(blend, self.stride, self.tokens) for blend in blends)])

    def _evaluate(self, boundaries: Boundaries, enough_s: float = math.inf) -> Array:
        return self.evaluator.ttft_s(chunks_between(boundaries, self.tokens).astype(float), enough_s)
