"""The best pipeline: pieces of equal time for each number of pieces, layers of equal time on the stages, then moves.

With stages alike, TTFT is the work of all pieces on one stage and that of the longest piece on each other stage. So
pieces of equal time are the best for their number; later ones are shorter, since they see more keys. What is
left to find is their number, and what tiles of matrices, the embedding, the head and uneven stages change.

`PieceWork` leaves the host's clock out but for a layer's own launches: seeds rest on it, the executors judge.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvrsim.arguments import OnProgress
from kvrsim.ends import step
from kvrsim.engine import DEVIATES_OF_80_PERCENT
from kvrsim.errors import InputError
from kvrsim.memory import fits, memory_of
from kvrsim.program import Array, Collective, Compute, Op
from kvrsim.results.results import SearchReport
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Step, Strategy
from kvrsim.strategies.layers import layer_ops
from kvrsim.strategies.pipeline import context_ranks, even_layers
from planner.search.minimise import (
    Allowance,
    Boundaries,
    Evaluator,
    Row,
    best_of,
    chunks_between,
    distinct,
    first_step,
    groups,
    minimise,
    rounded,
    to_grid,
    unique_rows,
)
from planner.search.search import SearchResult

_STEP_TOKENS = 8192  # of chunked prefill: max_num_batched_tokens of vLLM, chunked_prefill_size of SGLang
_GAIN = 0.002  # of TTFT, which twice the pieces must gain at least
_OF_EACH_PIECE = ("step_s", "launch_s", "collective_s")  # an engine's seconds per piece of any length
_ONE_STAGE = 0  # index of a layout with the same layers on every rank


class PieceWork:
    """What pieces take in the layers of a scenario; `strategy`: a pipeline."""

    def __init__(self, scenario: Scenario, strategy: Strategy) -> None:
        self.scenario, self.strategy = scenario, strategy
        self.num_stages = scenario.cluster.num_gpus
        self.costs = scenario.layer_costs()
        self.kinds = np.array(scenario.share.layer_kind_index)
        self.counts = np.bincount(self.kinds, minlength=len(self.costs))

    def kinds_s(self, lengths: Array, starts: Array) -> Array:
        """Seconds of a layer of each kind, shape (kinds, pieces); tokens of each piece, and before it."""
        return np.stack([self._layer_s(Step(costs, (lengths,), (starts,))) for costs in self.costs])

    def all_s(self, lengths: Array, starts: Array) -> Array:
        """Seconds of each piece in all layers, and of its step on every stage; shape (pieces,)."""
        return np.asarray(self.counts @ self.kinds_s(lengths, starts) + self.num_stages * self.step_s(lengths, starts))

    def step_s(self, lengths: Array, starts: Array) -> Array:
        """What each piece costs on each stage before its first layer."""
        return _held_s(step(self.scenario, lengths, starts + lengths, self.scenario.cost), lengths)

    def _layer_s(self, one: Step) -> Array:
        ops = tuple(layer_ops(self.strategy, one, _ONE_STAGE))
        return np.maximum(_held_s(ops, one.chunks[0]), sum(op.host_s for op in ops if isinstance(op, Compute)))

    def starts(self, lengths: Array) -> Array:
        """Tokens before each piece, the cached prefix included."""
        return np.asarray(self.scenario.request.cached_prefix + np.cumsum(lengths) - lengths)


def _held_s(ops: tuple[Op, ...], like: Array) -> Array:
    """Device seconds of operations one after another."""
    parts = (
        op.device_s if isinstance(op, Compute) else op.seconds for op in ops if isinstance(op, Compute | Collective)
    )
    return sum(parts, np.zeros_like(like))


PAGE = 64  # tokens; ends of pieces are multiples, and engines' page sizes divide it
MOST_A_STAGE = 64  # pieces per stage; filling and emptying the stages then takes less than 1.6 % of TTFT
_EVERY, _RATIO = 8, 1.19  # numbers of pieces that are all tried; and the next over the last of those beyond
_REFINED, _POLISHED = 6, 3  # seeds that are refined; and polished
_SLOW = 1.3  # a number of pieces whose best is this much slower than the best of all ends the seeds
_TIMES, _ROUNDS = 96, 48  # descents with a piece more or less, over the ends, at most 4; and rounds of each
_MOST_MOVES, _LEAST_MOVES, _CELLS = 256, 24, 2**16  # candidates per round; cells: x pieces x stages
_BALANCING = 24
_RANDOM, _IDLE = 0.25, 8  # of a round's candidates; and rounds without a gain, at most
_BETTER, _NEAR = 1e-5, 1.01  # of TTFT, that they must gain; of the best, within which another number is improved
_MOST_GAIN = 0.025  # of TTFT, that moves are taken to gain over the best seed; 0.019 was the most seen on even GPUs
_WORTH = 1e-4  # of TTFT, that another descent must gain


def search_pipeline(
    scenario: Scenario,
    strategy: Strategy,
    *,
    pieces: Partition | None = None,
    stride: int | None = None,
    least_piece: int | None = None,
    on_progress: OnProgress | None = None,
    allowance: Allowance | None = None,
) -> SearchResult:
    """Search the best pieces and stages; with `pieces` given, only the best stages.

    scenario: as the strategy sees it. stride: tokens that pieces are multiples of, but for what the last one has more;
    least_piece: the fewest tokens per piece, if the context has as many. None: a page, and the GPUs of a group.
    """
    begin_s = time.perf_counter()
    tokens = scenario.request.new_tokens
    step = math.lcm(PAGE, scenario.gpus_per_rank) if stride is None else stride
    if not step >= 1:
        raise InputError("stride", step, "a whole number of at least 1")
    least = max(step, least_piece or step)
    strategy = replace(strategy, stage_layers=even_layers(scenario.share.num_hidden_layers, scenario.cluster.num_gpus))
    if pieces is None:
        run, given = _Search(scenario, strategy, min(step, tokens), min(least, tokens)), None
    else:
        run, given = _Search(scenario, strategy, 1, 1), np.array(pieces.boundaries[1:-1], dtype=np.int64)
    run.evaluator.on_progress, run.evaluator.allowance = on_progress, allowance
    row, ttft_s = run.run(given)
    lengths, layers = (tuple(map(int, one[0])) for one in run.partitions(row[None]))
    evaluations = run.evaluator.evaluations
    report = SearchReport(method=run.method, evaluations=evaluations, seconds=time.perf_counter() - begin_s)
    strategy, partition = replace(strategy, stage_layers=layers), Partition(chunk_lens=lengths)
    return SearchResult(strategy=strategy, partition=partition, ttft_s=ttft_s, report=report)


def search_even_pieces(scenario: Scenario, strategy: Strategy, on_progress: OnProgress | None = None) -> SearchResult:
    """Search even pieces that fit in memory: 1, 2, 4, ... pieces, as long as TTFT falls.

    One stage has nothing to fill: its pieces are the steps of chunked prefill, of at most 8192 tokens as engines do.

    More pieces fill the stages sooner, fewer waste less on each. TTFT has one minimum: S stages take
    (S + M - 1) x (work / M + the fixed cost of a piece) for M pieces. The steps of the engine are taken as long as the
    upper end of their 80 % interval: longer pieces lose little where steps are shorter, and shorter ones much where
    they are not.
    """
    begin_s = time.perf_counter()
    evaluator = Evaluator(with_step_time(scenario, "p90"), strategy, on_progress)
    partition, ttft_s = _best_even_pieces(evaluator)
    seconds = time.perf_counter() - begin_s
    report = SearchReport(method="pieces", evaluations=evaluator.evaluations, seconds=seconds)
    return SearchResult(strategy=strategy, partition=partition, ttft_s=ttft_s, report=report)


def with_step_time(scenario: Scenario, statistic: Literal["mean", "p90"]) -> Scenario:
    """The scenario with this statistic of what each piece costs anew: the engine's step, its launches and collectives.

    Their spread is log-normal, if the engine has one. TTFT is linear in their seconds where the host is not behind, so
    the best pieces for the mean are those of the least expected TTFT.
    """
    if scenario.engine is None:
        return scenario
    seconds = {}
    for name in _OF_EACH_PIECE:
        if log_sd := scenario.engine.spread.get(name):
            factor = math.exp(0.5 * log_sd * log_sd if statistic == "mean" else DEVIATES_OF_80_PERCENT * log_sd)
            seconds[name] = getattr(scenario.host, name) * factor
    return scenario.with_host(replace(scenario.host, **seconds)) if seconds else scenario


def _best_even_pieces(evaluator: Evaluator) -> tuple[Partition, float]:
    scenario, strategy = evaluator.scenario, evaluator.strategy
    tokens, context = scenario.request.new_tokens, context_ranks(strategy)
    if context > tokens:
        raise InputError("strategies", strategy.name, f"at most one context rank per token, here {tokens}")
    most = min(tokens // context, MOST_A_STAGE * (scenario.cluster.num_gpus // context))
    numbers = [2**power for power in range(most.bit_length())]
    if scenario.cluster.shares_bandwidth and context > 1:
        # All ranks gather at the same time: links of their share of the bus give the number in little time.
        share = scenario.cluster.link.bandwidth_bytes_per_s / scenario.cluster.num_gpus
        number = len(_best_even_pieces(Evaluator(scenario.with_own_links(share), strategy))[0].chunk_lens)
        numbers = [one for one in numbers if one in (number // 2, number)]
    if scenario.cluster.num_gpus == context:
        numbers = [one for one in numbers if tokens <= one * _STEP_TOKENS] or numbers[-1:]
    each = [Partition.even(tokens, number) for number in numbers]
    fitting = [one for one in each if fits(scenario, memory_of(scenario, strategy, one))]
    best, best_s = each[0], float("inf")
    for partition in fitting or each:
        ttft_s = evaluator.one(partition.chunk_lens)
        if ttft_s > best_s * (1 - _GAIN):
            break
        best, best_s = partition, ttft_s
    return best, best_s


class _Search:
    """A search over ends of pieces and of stages together, as rows that rise.

    A row has the ends of all pieces but the last, in strides; the end of the context; and behind it the ends of all
    stages but the last, in layers.
    """

    def __init__(self, scenario: Scenario, strategy: Strategy, stride: int, least: int) -> None:
        self.scenario, self.strategy, self.stride, self.least = scenario, strategy, stride, least
        self.tokens, self.num_stages = scenario.request.new_tokens, scenario.cluster.num_gpus
        self.work = PieceWork(scenario, strategy)
        self.num_layers, self.end = len(self.work.kinds), -(-self.tokens // stride)
        self.evaluator, self.rng, self.method = Evaluator(scenario, strategy), np.random.default_rng(0), "pipeline"

    def run(self, given: Row | None) -> tuple[Row, float]:
        """Return the best row and its TTFT; where `given` fixes the pieces' ends, only their layers are searched."""
        if given is not None:
            rows = self._on_stages(given)
            best = rows[int(self.evaluate(rows).argmin())]
            return self._refined(best, moves_pieces=False)
        if self.scenario.cluster.shares_bandwidth:
            return self._descended(*self._polished(*self._refined(self._on_own_links())))
        seeds = self._seeds()
        if self._is_hopeless(seeds[0][1]):
            return seeds[0]
        few = self._most(len(seeds[0][0])) < _MOST_MOVES // 2  # a candidate takes long
        refined = sorted((self._refined(row) for row, _ in seeds[: _REFINED // (1 + few)]), key=lambda one: one[1])
        if self._is_hopeless(refined[0][1]):
            return refined[0]
        polished = (self._polished(*one) for one in refined[: 1 if few else _POLISHED])
        return self._descended(*min(polished, key=lambda one: one[1]))

    def _is_hopeless(self, ttft_s: float) -> bool:
        """Whether nothing near a row of this TTFT is taken to beat what the search's allowance says."""
        allowance = self.evaluator.allowance
        if allowance is None or ttft_s * (1 - _MOST_GAIN) <= allowance.to_beat_s:
            return False
        self.method = "rough"
        return True

    def _descended(self, row: Row, ttft_s: float) -> tuple[Row, float]:
        """Add or remove a piece as long as TTFT falls; with many pieces, one matters little."""
        for _ in range(min(4, _TIMES // len(row)) if len(row) else 0):
            others = [self._refined(one) for one in self._one_more_or_less(row)]
            best, best_s = min(others, key=lambda one: one[1], default=(row, ttft_s))
            if best_s < _NEAR * ttft_s:
                best, best_s = self._polished(best, best_s)
            if best_s >= ttft_s * (1 - _WORTH):
                break
            row, ttft_s = best, best_s
        return row, ttft_s

    def _on_own_links(self) -> Row:
        """The best for links of all of a bus or of a flow's least share, which takes little time."""
        rows = []
        for flows in sorted({1, self.num_stages - 1}):
            own = self.scenario.with_own_links(self.scenario.cluster.link.bandwidth_bytes_per_s / flows)
            run = _Search(own, self.strategy, self.stride, self.least)
            rows.append(run.run(None)[0])
            self.evaluator.evaluations += run.evaluator.evaluations
        return min(rows, key=lambda row: float(self.evaluate(row[None])[0]))

    def _seeds(self) -> list[tuple[Row, float]]:
        """Pieces of equal time, and even ones, on even stages and on stages of equal time: the fastest."""
        numbers, scored = self._numbers(), list[tuple[Row, float]]()
        for number, equal in zip(numbers, self._equal_times(numbers), strict=True):
            ends = [rounded(one, self.stride, self.tokens) for one in (equal, np.full(number, self.tokens / number))]
            rows = np.concatenate([self._on_stages(one // self.stride) for one in ends])
            times_s = self.evaluate(rows)
            scored.append((rows[int(times_s.argmin())], float(times_s.min())))
            if scored[-1][1] > _SLOW * min(ttft_s for _, ttft_s in scored):
                break  # more pieces take longer still
        return sorted(scored, key=lambda one: one[1])[:_REFINED]

    def _on_stages(self, ends: Row) -> Boundaries:
        """Rows with these ends of pieces, on even stages and on stages of equal time."""
        lengths = chunks_between(self.stride * ends, self.tokens).astype(float)
        layers_s = self.work.kinds_s(lengths, self.work.starts(lengths)).sum(axis=1)[self.work.kinds]
        speeds = np.cumsum([1 / self.scenario.cluster.slowness(stage) for stage in range(self.num_stages)])
        shares = (np.cumsum(layers_s) / layers_s.sum())[:, None]
        equal = 1 + np.abs(shares - (speeds / speeds[-1])[:-1]).argmin(axis=0)
        even = np.cumsum(even_layers(self.num_layers, self.num_stages))[:-1]
        layouts = [even, distinct(equal, 1, self.num_layers)]
        rows = [np.concatenate([ends, [self.end], self.end + layout]) for layout in layouts]
        return unique_rows(np.array(rows, dtype=np.int64))

    def _numbers(self) -> list[int]:
        """Numbers of pieces: all small ones, then ever fewer of the large ones, and powers of two, which fill tiles."""
        most = max(1, min(self.tokens // self.least, MOST_A_STAGE * self.num_stages))
        numbers = list(range(1, min(_EVERY, most) + 1))
        while numbers[-1] < most:
            numbers.append(min(most, math.ceil(numbers[-1] * _RATIO)))
        return sorted({*numbers, *(1 << power for power in range(most.bit_length()))})

    def _equal_times(self, numbers: list[int]) -> list[Array]:
        """So many lengths each, real-valued, that take all layers equally long, but for those at the least length."""
        counts = np.array(numbers)
        firsts = np.cumsum(counts) - counts
        number = np.repeat(counts, counts).astype(float)
        lengths, floor = self.tokens / number, np.minimum(self.least, self.tokens / number)

        def of_all(values: Array) -> Array:
            """Sums over the pieces of each number, at each piece."""
            return np.repeat(np.add.reduceat(values, firsts), counts)

        for _ in range(_BALANCING):
            ends = np.cumsum(lengths)
            begins = ends - lengths
            begins -= np.repeat(begins[firsts], counts)
            pieces_s = self.work.all_s(lengths, self.scenario.request.cached_prefix + begins)
            lengths = np.maximum(lengths * (of_all(pieces_s) / number / pieces_s) ** 0.7, floor)
            above = lengths - floor
            lengths = floor + above * ((self.tokens - number * floor) / np.maximum(of_all(above), 1e-9))
        return np.split(lengths, firsts[1:])

    def _refined(self, row: Row, *, moves_pieces: bool = True) -> tuple[Row, float]:
        """Ends of pieces and of stages moved, alone and in groups, as long as TTFT falls."""
        number = len(row) - self.num_stages  # of ends of pieces
        pieces = np.pad(groups(number if moves_pieces else 0), ((0, 0), (0, len(row) - number * moves_pieces)))
        ends = [step * np.eye(self.num_stages - 1, dtype=np.int64) for step in (2, 4, 8, 16)]
        stages = np.pad(np.concatenate([groups(self.num_stages - 1), *ends]), ((0, 0), (number + 1, 0)))
        return minimise(
            row,
            self.end + self.num_layers,
            1,
            self.evaluate,
            rounds=_ROUNDS,
            halve_from=first_step(self.end, 8 * (number + 1), 1),
            directions=self._thinned(np.concatenate([pieces, -pieces])),
            also=self._thinned(np.concatenate([stages, -stages])),
        )

    def _polished(self, row: Row, ttft_s: float) -> tuple[Row, float]:
        """A stride moved from any piece to any other, and random exchanges, as long as that helps now and then."""
        number, idle = len(row) - self.num_stages + 1, 0
        pairs = np.stack(np.nonzero(~np.eye(number, dtype=bool)), axis=1)
        most = self._most(len(row))
        while idle < min(_IDLE, 2 + len(pairs) // most) and len(row) > 1:
            lengths = np.diff(row, prepend=0, append=self.end + self.num_layers)
            pieces, layers = lengths[:number], lengths[number:]
            src, dst = pairs[self.rng.permutation(len(pairs))[:most]].T
            moved = np.repeat(lengths[None], len(src), axis=0)
            moved[np.arange(len(src)), src] -= 1
            moved[np.arange(len(src)), dst] += 1
            rows = np.cumsum(moved[moved.min(axis=1) > 0], axis=1)[:, :-1]
            best, best_s = best_of(rows, row, ttft_s, self.end + self.num_layers, self.evaluate)
            exchanged = np.concatenate([self._exchanged(one, int(_RANDOM * most)) for one in (pieces, layers)], axis=1)
            rows = np.cumsum(exchanged, axis=1)[:, :-1]
            seconds = self.evaluate(rows, best_s)
            if seconds.min() < best_s:
                best, best_s = rows[int(seconds.argmin())], float(seconds.min())
            idle = 0 if best_s < ttft_s * (1 - _BETTER) else idle + 1
            if best_s <= ttft_s:
                row, ttft_s = best, best_s
        return row, ttft_s

    def _exchanged(self, lengths: Row, count: int) -> Boundaries:
        """The lengths with some of one moved to another, twice, or less often; shape (count, lengths)."""
        rows, index = np.repeat(lengths[None], count, axis=0), np.arange(count)
        for _ in range(2):
            src, dst = self.rng.integers(len(lengths), size=(2, count))
            moved = np.minimum(rows[index, src] - 1, rows[index, src] ** self.rng.random(count)).astype(np.int64)
            moved[self.rng.random(count) < 0.5] = 0
            rows[index, src] -= moved
            rows[index, dst] += moved
        return rows

    def _one_more_or_less(self, row: Row) -> list[Row]:
        """The best row with a piece less or more: pieces joined or divided, or the others longer or shorter."""
        ends, others = np.split(row, [-self.num_stages])
        edges = np.concatenate([[0], ends, [self.end]])
        pieces, middles = np.diff(edges), (edges[:-1] + edges[1:]) // 2
        index = range(len(pieces))
        fewer = [np.delete(ends, at) for at in range(len(ends))]
        fewer += [self._scaled(np.delete(pieces, at)) for at in index if len(ends)]
        more = [np.sort(np.append(ends, middle)) for middle in middles if middle not in edges]
        more += [self._scaled(np.insert(pieces, at, pieces[at])) for at in index if len(pieces) < self.end]
        best = []
        for changed in filter(None, (fewer, more)):
            rows = self._thinned(np.array([np.concatenate([one, others]) for one in changed]))
            seconds = self.evaluate(rows)
            if math.isfinite(seconds.min()):
                best.append(rows[int(seconds.argmin())])
        return best

    def _scaled(self, lengths: Row) -> Row:
        """Ends of pieces in these proportions."""
        return to_grid(np.cumsum(lengths)[:-1] * (self.end / lengths.sum()), 1, self.end)

    def partitions(self, rows: Boundaries) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens of the pieces and layers of the stages, shapes (B, pieces) and (B, stages)."""
        number = rows.shape[1] - self.num_stages
        pieces = chunks_between(self.stride * rows[:, :number], self.tokens)
        return pieces, chunks_between(rows[:, number + 1 :] - self.end, self.num_layers)

    def evaluate(self, rows: Boundaries, enough_s: float = math.inf) -> Array:
        """TTFT of each row; infinite where a piece is shorter than the least."""
        pieces, layers = self.partitions(rows)
        allowed = (pieces >= min(self.least, self.tokens // pieces.shape[1])).all(axis=1)
        ttft_s = np.full(len(rows), np.inf)
        if allowed.any():
            ttft_s[allowed] = self.evaluator.ttft_s(pieces[allowed].astype(float), enough_s, layers[allowed].T)
        return ttft_s

    def _thinned(self, rows: Boundaries) -> Boundaries:
        """Candidates, thinned until a round takes about as long as with few pieces and stages."""
        most = self._most(rows.shape[1])
        return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]

    def _most(self, length: int) -> int:
        """Return the most candidates to evaluate in one round; `length` is the number of columns of a row."""
        return int(np.clip(_CELLS // (length * self.num_stages), _LEAST_MOVES, _MOST_MOVES))
