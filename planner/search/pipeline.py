"""The best pipeline: pieces of equal time for each number of pieces, layers of equal time on the stages, then moves.

With stages alike, TTFT is the work of all pieces on one stage and that of the longest piece on each other stage. So
pieces of equal time are the best for their number; later ones are shorter, since they see more keys. What is
left to find is their number, and what tiles of matrices, the embedding, the head and uneven stages change.

Seconds of pieces of the context in layers, and of a whole pipeline with any stages: what seeds and layouts rest on.

The flow here leaves the host's clock out but for a layer's own launches; the executors have the last word.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Literal

import numpy as np

from kvrsim.arguments import OnProgress
from kvrsim.ends import embedding, step
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
    chunk_lens,
    chunks_between,
    first_step,
    groups,
    minimise,
    rounded,
    valid,
)
from planner.search.search import SearchResult

_STEP_TOKENS = 8192  # of chunked prefill: max_num_batched_tokens of vLLM, chunked_prefill_size of SGLang
_GAIN = 0.002  # of TTFT, which twice the pieces must gain at least
_OF_EACH_PIECE = ("step_s", "launch_s", "collective_s")  # seconds of an engine that every piece pays, however short
_ONE_STAGE = 0  # layers of a pipeline are the same on every rank


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


class Flow:
    """TTFT of given pieces with any layers on the stages, many layouts at once."""

    def __init__(self, work: PieceWork, lengths: Array) -> None:
        scenario, starts = work.scenario, work.starts(lengths)
        layers_s = work.kinds_s(lengths, starts)[work.kinds]
        self._before_s = np.concatenate([np.zeros((1, len(lengths))), np.cumsum(layers_s, axis=0)])
        self._step_s = work.step_s(lengths, starts)
        self._embedding_s = _held_s(embedding(scenario, lengths, scenario.cost), lengths)
        nbytes = work.costs[0].activation_bytes(lengths)
        paths = [scenario.cluster.path(rank, rank + 1) for rank in range(work.num_stages - 1)]
        self._sent_s = np.array([path.busy_s(nbytes) + path.latency_s for path in paths])

    @property
    def layers_s(self) -> Array:
        """Seconds of all pieces in the layers before each layer, and in all; shape (layers + 1,)."""
        return np.asarray(self._before_s.sum(axis=1))

    def seconds(self, boundaries: Row) -> Array:
        """When the last stage has finished the last piece; boundaries: first layers of stages 1, 2, ..., (B, S - 1)."""
        rows, last = len(boundaries), len(self._before_s) - 1
        edges = np.concatenate([np.zeros((rows, 1), dtype=np.int64), boundaries, np.full((rows, 1), last)], axis=1)
        stages_s = np.diff(self._before_s[edges], axis=1) + self._step_s  # (B, stages, pieces)
        stages_s[:, 0] += self._embedding_s
        done = np.zeros(stages_s.shape[:1] + stages_s.shape[2:])
        for stage in range(stages_s.shape[1]):
            there = done if stage == 0 else done + self._sent_s[stage - 1]
            alone = np.cumsum(stages_s[:, stage], axis=1)  # the latest piece that the stage waited for, and all since
            done = alone + np.maximum.accumulate(there - (alone - stages_s[:, stage]), axis=1)
        return np.asarray(done[:, -1])


def _held_s(ops: tuple[Op, ...], like: Array) -> Array:
    """Device seconds of operations one after another."""
    parts = (
        op.device_s if isinstance(op, Compute) else op.seconds for op in ops if isinstance(op, Compute | Collective)
    )
    return sum(parts, np.zeros_like(like))


PAGE = 64  # tokens; pieces are multiples of it, as engines' pages divide it
MOST_A_STAGE = 64  # pieces per stage; filling and emptying the stages then takes less than 1.6 % of TTFT
_EVERY, _RATIO = 8, 1.19  # numbers of pieces that are all tried; and the next over the last of those beyond
_TRIED, _REFINED = 8, 3  # numbers of pieces that are simulated; and that are refined
_TIMES, _ROUNDS = 4, 24  # of refinement with other layers or one piece more or less; and rounds of each
_MOST_MOVES, _LEAST_MOVES, _MOST_CELLS = 192, 48, 4096  # of a round; and moves times pieces
_BALANCING, _LAYOUT_ROUNDS = 24, 40
_MOST_GAIN = 0.03  # of TTFT, that moves are taken to gain over the best pieces of equal time; 0.015 was the most seen
_WORTH = 1e-4  # of TTFT, that other layers on the stages must gain


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
    """Search the best pieces and stages; of given `pieces`, the best stages.

    scenario: as the strategy sees it. stride: tokens that pieces are multiples of, but for what the last one has more;
    least_piece: the fewest tokens per piece, if the context has as many. None: a page, and the GPUs of a group.
    """
    begin_s = time.perf_counter()
    tokens = scenario.request.new_tokens
    step = math.lcm(PAGE, scenario.gpus_per_rank) if stride is None else stride
    if not step >= 1:
        raise InputError("stride", step, "a whole number of at least 1")
    least = max(step, least_piece or step)
    run = _Search(scenario, strategy, min(step, tokens), min(least, tokens), on_progress, allowance)
    ends, ttft_s = run.run(None if pieces is None else np.array(pieces.boundaries[1:-1], dtype=np.int64))
    report = SearchReport(method=run.method, evaluations=run.evaluations, seconds=time.perf_counter() - begin_s)
    partition = Partition(chunk_lens=chunk_lens(tuple(ends), tokens))
    return SearchResult(strategy=run.strategy, partition=partition, ttft_s=ttft_s, report=report)


def search_even_pieces(scenario: Scenario, strategy: Strategy, on_progress: OnProgress | None = None) -> SearchResult:
    """Even pieces that fit in memory: 1, 2, 4, ... of them, as long as TTFT falls.

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
    def __init__(
        self,
        scenario: Scenario,
        strategy: Strategy,
        stride: int,
        least: int,
        on_progress: OnProgress | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        self.scenario, self.stride, self.least = scenario, stride, least
        self.on_progress, self.allowance = on_progress, allowance
        self.tokens, self.num_stages = scenario.request.new_tokens, scenario.cluster.num_gpus
        self.work = PieceWork(scenario, strategy)
        self.strategy = replace(strategy, stage_layers=even_layers(len(self.work.kinds), self.num_stages))
        self.evaluations, self.method = 0, "pipeline"

    def run(self, given: Row | None) -> tuple[Row, float]:
        """Ends of all pieces but the last, and TTFT."""
        if given is not None:
            return given, self._with_layers(given, float(self._evaluate(given[None])[0]))
        if self.scenario.cluster.shares_bandwidth:
            return self._on_a_bus()
        seeds = self._seeds()[:_REFINED]
        best_s, best, best_strategy = seeds[0]
        if self.allowance is not None and best_s * (1 - _MOST_GAIN) > self.allowance.to_beat_s:
            self.method, seeds = "rough", []
        for ttft_s, seed, strategy in seeds:
            self.strategy = strategy
            ends, ends_s = seed, ttft_s
            for _ in range(_TIMES):
                before_s = ends_s
                ends, ends_s = self._refined(ends, ends_s)
                ends_s = self._with_layers(ends, ends_s)
                ends, ends_s = self._one_more_or_less(ends, ends_s)
                if ends_s >= before_s * (1 - _WORTH):
                    break
            if ends_s < best_s:
                best, best_s, best_strategy = ends, ends_s, self.strategy
        self.strategy = best_strategy
        return best, best_s

    def _on_a_bus(self) -> tuple[Row, float]:
        """The best for links of all of the bus and of a flow's least share, which takes little time; then refined."""
        bandwidth_bytes_per_s = self.scenario.cluster.link.bandwidth_bytes_per_s
        runs: list[tuple[float, int, Row, Strategy]] = []
        for flows in sorted({1, self.num_stages - 1}):
            own = self.scenario.with_own_links(bandwidth_bytes_per_s / flows)
            run = _Search(own, self.strategy, self.stride, self.least)
            ends, _ = run.run(None)
            self.strategy, self.evaluations = run.strategy, self.evaluations + run.evaluations
            runs.append((float(self._evaluate(ends[None])[0]), len(runs), ends, run.strategy))
        ttft_s, _, best, self.strategy = min(runs, key=lambda one: one[:2])
        before_s = math.inf
        while ttft_s < before_s * (1 - _WORTH):
            before_s = ttft_s
            best, ttft_s = self._refined(best, ttft_s)
            best, ttft_s = self._one_more_or_less(best, self._with_layers(best, ttft_s))
        return best, ttft_s

    # -- pieces
    def _seeds(self) -> list[tuple[float, Row, Strategy]]:
        """Pieces of equal time, and even ones, of the numbers that their flow finds best; each on its best stages."""
        scored: list[tuple[float, int, Row]] = []
        numbers = self._numbers()
        rows = [row for equal in self._equal_times(numbers) for row in (equal, self._even(len(equal)))]
        for row in rows:
            seed = rounded(row, self.stride, self.tokens)
            lengths = chunks_between(seed, self.tokens).astype(float)
            if len(seed) and lengths.min() < self.least:
                continue
            flow = Flow(self.work, lengths)
            scored.append((float(flow.seconds(self._equal_stages(flow)).min()), len(scored), seed))
        simulated = []
        even = self.strategy
        for _, number, seed in sorted(scored)[:_TRIED]:
            self.strategy = even
            ttft_s = self._with_layers(seed, float(self._evaluate(seed[None])[0]))
            simulated.append((ttft_s, number, seed, self.strategy))
        return [(ttft_s, seed, strategy) for ttft_s, _, seed, strategy in sorted(simulated, key=lambda one: one[:2])]

    def _even(self, number: int) -> Array:
        return np.full(number, self.tokens / number)

    def _numbers(self) -> list[int]:
        """Numbers of pieces: all small ones, then ever fewer of the large ones."""
        most = max(1, min(self.tokens // self.least, MOST_A_STAGE * self.num_stages))
        numbers = list(range(1, min(_EVERY, most) + 1))
        while numbers[-1] < most:
            numbers.append(min(most, math.ceil(numbers[-1] * _RATIO)))
        return numbers

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

    def _refined(self, seed: Row, ttft_s: float) -> tuple[Row, float]:
        """Ends of pieces moved, alone and in groups, as long as TTFT falls."""
        if not len(seed):
            return seed, ttft_s
        step = first_step(self.tokens, 8 * (len(seed) + 1), self.stride)
        return minimise(seed, self.tokens, self.stride, self._evaluate, rounds=_ROUNDS, halve_from=step, thin=_thinned)

    def _one_more_or_less(self, ends: Row, ttft_s: float) -> tuple[Row, float]:
        """Two neighbours as one piece, or a piece as two, where that is faster."""
        edges = np.concatenate([[0], ends, [self.tokens]])
        middles = (edges[:-1] + edges[1:]) // 2 // self.stride * self.stride
        more = [np.sort(np.append(ends, middle)) for middle in middles if middle not in edges]
        for rows in (np.array([np.delete(ends, index) for index in range(len(ends))]), np.array(more)):
            if len(rows):
                rows = _thinned(rows)
                seconds = self._evaluate(rows)
                if seconds.min() < ttft_s:
                    ends, ttft_s = rows[int(seconds.argmin())], float(seconds.min())
        return ends, ttft_s

    def _evaluate(self, boundaries: Boundaries, enough_s: float = math.inf) -> Array:
        """TTFT of each row; infinite where a piece is shorter than the least."""
        chunks = chunks_between(boundaries, self.tokens)
        allowed = (chunks >= min(self.least, self.tokens // chunks.shape[1])).all(axis=1)
        ttft_s = np.full(len(chunks), np.inf)
        if allowed.any():
            evaluator = Evaluator(self.scenario, self.strategy, self.on_progress, evaluations=self.evaluations)
            evaluator.allowance = self.allowance
            ttft_s[allowed] = evaluator.ttft_s(chunks[allowed].astype(float), enough_s)
            self.evaluations = evaluator.evaluations
        return ttft_s

    # -- layers
    def _with_layers(self, pieces: Row, ttft_s: float) -> float:
        """The layers that suit these pieces best, if they gain enough; TTFT with them."""
        if self.num_stages == 1:
            return ttft_s
        before = self.strategy
        self.strategy = replace(before, stage_layers=self._layout(pieces))
        if self.strategy != before and (found_s := float(self._evaluate(pieces[None])[0])) < ttft_s * (1 - _WORTH):
            return found_s
        self.strategy = before
        return ttft_s

    def _equal_stages(self, flow: Flow) -> Boundaries:
        """First layers of stages 1, 2, ...: those now, and those that make the stages about equally long."""
        assert self.strategy.stage_layers is not None
        shares = flow.layers_s / flow.layers_s[-1]
        equal = [np.abs(shares - stage / self.num_stages).argmin() for stage in range(1, self.num_stages)]
        rows = np.array([np.cumsum(self.strategy.stage_layers)[:-1], equal], dtype=np.int64)
        return np.asarray(rows[valid(rows, len(self.work.kinds))])

    def _layout(self, pieces: Row) -> tuple[int, ...]:
        """Layers of each stage: those now or those of equal time, then ends of stages moved alone and in groups."""
        num_layers = len(self.work.kinds)
        flow = Flow(self.work, chunks_between(pieces, self.tokens).astype(float))
        rows = self._equal_stages(flow)
        best, best_s = rows[0], float("inf")
        moves = groups(self.num_stages - 1)
        moves = np.concatenate([moves, -moves])
        for _ in range(_LAYOUT_ROUNDS):
            seconds = flow.seconds(rows)
            if seconds.min() >= best_s:
                break
            best, best_s = rows[int(seconds.argmin())], float(seconds.min())
            rows = best + moves
            rows = rows[valid(rows, num_layers)]
            if not len(rows):
                break
        return chunk_lens(tuple(best), num_layers)


def _thinned(rows: Boundaries) -> Boundaries:
    """So many moves that a round takes about as long as with few pieces."""
    most = int(np.clip(_MOST_CELLS // max(1, rows.shape[1]), _LEAST_MOVES, _MOST_MOVES))
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]
