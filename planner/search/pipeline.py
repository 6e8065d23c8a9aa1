"""The best pipeline: pieces that take equal time, stages of equal time, then a descent over the ends of both.

With equal stages, TTFT is the work of all pieces on one stage, plus that of the longest piece on each other stage. So
the best pieces take about equally long, and early pieces are longer, because later ones attend to more keys. Their
number is that with the least TTFT. A pattern search then moves the ends of pieces and of stages in smaller and smaller
steps; with them, pieces fill whole tiles of the matrix products.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvrsim.engine import DEVIATES_OF_80_PERCENT
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.executors.batch import segment_of
from kvrsim.memory import bytes_of_layers, fits, memory_of
from kvrsim.program import Array
from kvrsim.progress import OnProgress
from kvrsim.results.results import SearchReport
from kvrsim.scenario import Partition
from kvrsim.strategies import Step as PipelineStep
from kvrsim.strategies.layers import layer_ops
from kvrsim.strategies.pipeline import context_ranks, even_layers
from planner.search.minimise import (
    MOST_GAIN,
    Allowance,
    Boundaries,
    Evaluator,
    Row,
    chunk_lens,
    chunks_between,
    distinct,
    first_step,
    groups,
    minimise,
)
from planner.search.search import SearchResult

PAGE = 64  # tokens; pieces end at multiples of this number, which engines' page sizes divide
MOST_A_STAGE = 64  # pieces per stage; with 64, filling and emptying the stages takes less than 1.6 % of TTFT
_GAIN = 0.002  # least relative gain in TTFT from doubling even pieces
_STARTS = 3  # full descents; with 2, a small question loses 2.6 % of TTFT, with 3 none loses 2 % (tests of this module)
_ROUNDS = 48  # most rounds of a descent, which ends when its smallest step gains nothing
_MOST_MOVES = 256  # candidates of a round, so that one with many pieces and stages takes no longer than one with few

_CHUNKED_TOKENS = 8192  # longest step of chunked prefill: vLLM's max_num_batched_tokens, SGLang's chunked_prefill_size
_OF_EACH_PIECE = ("step_s", "launch_s", "collective_s")  # an engine's seconds per piece of any length

Layers = tuple[int, ...]  # layers of each stage
RowTime = tuple[Row, float]  # a row of _PipelineSearch, and its TTFT


def search_pipeline(
    execution: Execution,
    *,
    pieces: Partition | None = None,
    stride: int | None = None,
    least_piece: int | None = None,
    on_progress: OnProgress | None = None,
    allowance: Allowance | None = None,
) -> SearchResult:
    """Search the best pieces and the best layers per stage; with given `pieces`, only the layers.

    stride: pieces except the last are multiples of it, in tokens; None: a page, as
    a multiple of the GPUs of a rank. least_piece: fewest tokens per piece, if the context is that long; None: the
    stride.
    """
    begin_s = time.perf_counter()
    tokens = execution.request.new_tokens
    step = math.lcm(PAGE, execution.placed.gpus_per_rank) if stride is None else stride
    if not step >= 1:
        raise InputError("stride", step, "a whole number of at least 1")
    least = max(step, least_piece or step)
    even = even_layers(execution.placed.share.num_hidden_layers, execution.cluster.num_gpus)
    execution = execution.by(replace(execution.strategy, stage_layers=even))
    if pieces is None:
        run = _PipelineSearch(execution, min(step, tokens), min(least, tokens))
        given = None
    else:
        run = _PipelineSearch(execution, 1, 1)
        given = np.array(pieces.boundaries[1:-1], dtype=np.int64)
    run.evaluator.on_progress = on_progress
    run.evaluator.allowance = allowance
    row, ttft_s = run.run(given)
    pieces_found, layers_found = run.partitions(row[None])
    lengths = tuple(pieces_found[0].tolist())
    layers = tuple(layers_found[0].tolist())
    evaluations = run.evaluator.evaluations
    execution = execution.by(replace(execution.strategy, stage_layers=layers))
    partition = Partition(chunk_lens=lengths)
    if not fits(execution.placed, memory_of(execution, partition)):
        execution, partition, ttft_s = _that_fits(execution, pieces) or (execution, partition, ttft_s)
    report = SearchReport(method=run.method, evaluations=evaluations, seconds=time.perf_counter() - begin_s)
    return SearchResult(execution=execution, partition=partition, ttft_s=ttft_s, report=report)


def _that_fits(execution: Execution, pieces: Partition | None) -> tuple[Execution, Partition, float] | None:
    """The fastest of even layers and layers of equal bytes that fit in memory; None: neither fits.

    pieces: the given pieces; None: the fastest even ones that fit.
    """
    num_stages = execution.cluster.num_gpus
    num_layers = execution.placed.share.num_hidden_layers
    found = []
    for layers in {even_layers(num_layers, num_stages), layers_of_equal_bytes(bytes_of_layers(execution), num_stages)}:
        changed = execution.by(replace(execution.strategy, stage_layers=layers))
        evaluator = Evaluator(changed)
        if pieces is None:
            partition, ttft_s = _best_even_pieces(evaluator)
        else:
            partition = pieces
            ttft_s = evaluator.one(pieces.chunk_lens)
        if fits(changed.placed, memory_of(changed, partition)):
            found.append((changed, partition, ttft_s))
    return min(found, key=itemgetter(2), default=None)


def layers_of_equal_bytes(layer_bytes: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Layers per stage, at least one, such that the stage with the most bytes has as few as possible."""
    num_layers = len(layer_bytes)
    until = np.concatenate([[0.0], np.cumsum(layer_bytes)])
    most = until[1:]  # by number of layers: bytes of the fullest stage, with the stages so far
    ends = []  # by stage and number of layers: the layers before the stage
    for stage in range(1, num_stages):
        # least[end] over the layers `first` before this stage, of which each earlier stage has at least one
        choices = [
            min(
                ((max(most[first - 1], until[end] - until[first]), first) for first in range(stage, end)),
                default=(math.inf, 0),
            )
            for end in range(1, num_layers + 1)
        ]
        most = np.array([choice[0] for choice in choices])
        ends.append([choice[1] for choice in choices])
    bounds = [num_layers]
    for firsts in reversed(ends):
        bounds.insert(0, firsts[bounds[0] - 1])
    return tuple(np.diff([0, *bounds]).tolist())


def search_even_pieces(execution: Execution, on_progress: OnProgress | None = None) -> SearchResult:
    """Search even pieces that fit in memory: 1, 2, 4, ... pieces, as long as TTFT falls.

    A single stage need not be filled: its pieces are the steps of chunked prefill, of at most 8192 tokens as in
    engines.

    More pieces fill the stages sooner; fewer pieces have less fixed cost. TTFT has one minimum: with M pieces, S stages
    take (S + M - 1) x (work / M + fixed cost of a piece). The engine's steps take the upper end of their 80 % interval
    here: pieces that are too long lose little if steps are shorter, but pieces that are too short lose much if steps
    are long.
    """
    begin_s = time.perf_counter()
    evaluator = Evaluator(with_step_time(execution, "p90"), on_progress)
    partition, ttft_s = _best_even_pieces(evaluator)
    seconds = time.perf_counter() - begin_s
    return SearchResult(
        execution=evaluator.execution,
        partition=partition,
        ttft_s=ttft_s,
        report=SearchReport(method="pieces", evaluations=evaluator.evaluations, seconds=seconds),
        finish_s=evaluator.finish_s[partition.chunk_lens],
    )


def with_step_time(execution: Execution, statistic: Literal["mean", "p90"]) -> Execution:
    """The execution with this statistic of the cost of each piece: the engine's step, its launches and collectives.

    The costs vary log-normally if the engine has a spread. TTFT is linear in them if the host is ahead of the device,
    so the best pieces for the mean have the least expected TTFT.
    """
    placed = execution.placed
    if placed.engine is None:
        return execution
    seconds = {}
    for name in _OF_EACH_PIECE:
        if log_sd := placed.engine.spread.get(name):
            factor = math.exp(0.5 * log_sd * log_sd if statistic == "mean" else DEVIATES_OF_80_PERCENT * log_sd)
            seconds[name] = getattr(placed.host, name) * factor
    if not seconds:
        return execution
    return execution.on(placed.with_host(replace(placed.host, **seconds)))


def piece_numbers(execution: Execution) -> list[int]:
    """The numbers of even pieces that a search tries: powers of two, at least one token per context rank and piece."""
    context = context_ranks(execution.strategy)
    most = min(execution.request.new_tokens // context, MOST_A_STAGE * (execution.cluster.num_gpus // context))
    return [2**power for power in range(most.bit_length())]


def _best_even_pieces(evaluator: Evaluator) -> tuple[Partition, float]:
    execution = evaluator.execution
    cluster = execution.cluster
    tokens = execution.request.new_tokens
    context = context_ranks(execution.strategy)
    if context > tokens:
        raise InputError("strategies", execution.strategy.name, f"at most one context rank per token, here {tokens}")
    numbers = piece_numbers(execution)
    if cluster.shares_bandwidth and cluster.num_gpus > 1:
        # All ranks send at the same time, so links with a rank's share of the bus find the number quickly.
        share = cluster.link.bandwidth_bytes_per_s / cluster.num_gpus
        linked = execution.on(execution.placed.with_own_links(share))
        number = len(_best_even_pieces(Evaluator(linked))[0].chunk_lens)
        numbers = [one for one in numbers if one in (number // 2, number)]
    if cluster.num_gpus == context:
        numbers = [one for one in numbers if tokens <= one * _CHUNKED_TOKENS] or numbers[-1:]
    each = [Partition.even(tokens, number) for number in numbers]
    fitting = (one for one in each if fits(execution.placed, memory_of(execution, one)))
    first = next(fitting, None)
    best = each[0]
    best_s = float("inf")
    for partition in each if first is None else chain([first], fitting):
        ttft_s = evaluator.one(partition.chunk_lens)
        if ttft_s > best_s * (1 - _GAIN):
            break
        best = partition
        best_s = ttft_s
    return best, best_s


class _PipelineSearch:
    """A search over the ends of pieces and of stages together, in ascending rows.

    A row has the ends of all pieces but the last, in strides; the end of the context; and, counted from there, the ends
    of all stages but the last, in layers.
    """

    def __init__(self, execution: Execution, stride: int, least: int) -> None:
        self.execution = execution
        self.stride = stride
        self.least = least
        self.tokens = execution.request.new_tokens
        self.num_stages = execution.cluster.num_gpus
        self.num_layers = execution.placed.share.num_hidden_layers
        self.end = -(-self.tokens // stride)
        self.evaluator = Evaluator(execution)
        self.method = "pipeline"  # or "rough", if no result can beat the TTFT to beat

    def run(self, given: Row | None) -> RowTime:
        """Return the best row and its TTFT; if `given` fixes the ends of pieces, only the layers are searched."""
        if self.execution.cluster.shares_bandwidth:
            row = self._on_own_links(given)
            if given is None:
                return self._descend(row, moves_pieces=True)
            start, start_s = self._fastest(given[None])
            row_s = float(self.evaluate(row[None])[0])
            return min((start, start_s), (row, row_s), key=itemgetter(1))
        if given is not None:
            start, _ = self._fastest(given[None])
            return self._descend(start, moves_pieces=False)
        starts = self._starts()
        best, best_s = starts[0]
        if best_s * (1 - MOST_GAIN) > self._to_beat_s:
            self.method = "rough"
            return best, best_s
        found = [self._descend(start, moves_pieces=True) for start, _ in starts]
        return min(found, key=itemgetter(1))

    @property
    def _to_beat_s(self) -> float:
        """TTFT that a search has to beat; infinite without an allowance."""
        allowance = self.evaluator.allowance
        return math.inf if allowance is None else allowance.to_beat_s

    def _starts(self) -> list[RowTime]:
        """The fastest rows of equally long pieces and of pieces of equal time, each with another number of pieces.

        Pieces end at multiples of a distance, a power of two, with which they fill tiles of the matrix products.
        """
        alike = defaultdict[int, list[Row]](list)  # by their number: ends of pieces
        for number in self._numbers():
            equal = self._equal_time(number)
            length = max(1, self.end // number)
            for power in range(length.bit_length()):
                spacing = 1 << power
                tiles = -(-length // spacing) * spacing
                equally_long = np.arange(tiles, self.end, tiles)
                for ends in (_at_multiples(equal[1:-1], spacing, self.end), equally_long, equally_long[:-1]):
                    alike[len(ends)].append(ends)
        found = sorted((self._fastest(np.array(rows)) for rows in alike.values()), key=itemgetter(1))
        return found[:_STARTS]

    def _numbers(self) -> list[int]:
        """Tried numbers of pieces, in a geometric sequence from half to twice the fastest number of even ones."""
        most = max(1, min(self.tokens // self.least, MOST_A_STAGE * self.num_stages))
        best = 1
        best_s = math.inf
        for number in (min(most, 1 << power) for power in range((most - 1).bit_length() + 1)):
            even = np.linspace(0.0, self.end, number + 1)
            _, ttft_s = self._fastest(_at_multiples(even[None, 1:-1], 1, self.end))
            if ttft_s >= best_s:
                break
            best = number
            best_s = ttft_s
        near = best * 2.0 ** np.linspace(-1, 1, 9)
        return sorted({min(most, max(1, round(float(number)))) for number in near})

    def _equal_time(self, number: int) -> Array:
        """The ends of this number of pieces that take equally long, with 0 and the last end, in strides."""
        share = self.tokens / number
        ends = np.linspace(0.0, self.tokens, 4 * number + 1)
        starts = self.execution.request.cached_prefix + np.maximum(0.0, ends - 0.5 * share)
        piece_s = self._layer_s(np.full_like(ends, share), starts).sum(axis=0)  # around each end
        until_s = np.concatenate([[0.0], np.cumsum(0.5 * (piece_s[1:] + piece_s[:-1]))])
        return np.interp(np.linspace(0.0, until_s[-1], number + 1), until_s, ends) / self.stride

    def _layouts(self, ends: Row) -> list[Layers]:
        """Layers per stage: even numbers, and equal time for these pieces on GPUs of different speed."""
        lengths = chunks_between(self.stride * ends, self.tokens).astype(float)
        starts = self.execution.request.cached_prefix + np.cumsum(lengths) - lengths
        until_s = np.cumsum(self._layer_s(lengths, starts).sum(axis=1))
        speed = 1 / np.array([self.execution.cluster.slowness(stage) for stage in range(self.num_stages)])
        shares = np.cumsum(speed)[:-1] / speed.sum()
        equal = 1 + np.abs(until_s[:, None] / until_s[-1] - shares).argmin(axis=0)
        layouts = (
            even_layers(self.num_layers, self.num_stages),
            chunk_lens(tuple(distinct(equal, 1, self.num_layers)), self.num_layers),
        )
        return list(dict.fromkeys(layouts))

    def _layer_s(self, lengths: Array, starts: Array) -> Array:
        """Seconds of every layer and piece, shape (layers, pieces); the maximum of device and host."""
        seconds = []
        for costs in self.execution.placed.layer_costs():
            step = PipelineStep(costs, (lengths,), (starts,))
            segment = segment_of(tuple(layer_ops(self.execution.strategy, step, 0)))
            seconds.append(np.maximum(segment.device_s, segment.host_s))
        return np.asarray(np.stack(seconds)[np.array(self.execution.placed.share.layer_kind_index)])

    def _on_own_links(self, given: Row | None) -> Row:
        """The best row for separate links, each with a fair share of the bus: its simulations take little time."""
        flows = max(1, self.num_stages - 1)
        linked = self.execution.placed.with_own_links(self.execution.cluster.link.bandwidth_bytes_per_s / flows)
        run = _PipelineSearch(self.execution.on(linked), self.stride, self.least)
        allowance = self.evaluator.allowance
        if allowance is not None:
            half_s = allowance.left_s / 2
            run.evaluator.allowance = replace(allowance, left_s=half_s)
            allowance.left_s = half_s
        row, _ = run.run(given)
        self.evaluator.evaluations += run.evaluator.evaluations
        return row

    def _fastest(self, ends: Boundaries) -> RowTime:
        """The fastest row with one of these ends of equally many pieces, and its TTFT."""
        layouts = self._layouts(ends[0])
        rows = np.array([self._row(row, layers) for row in ends for layers in layouts])
        ttft_s = self.evaluate(rows)
        best = int(ttft_s.argmin())
        return rows[best], float(ttft_s[best])

    def _descend(self, row: Row, *, moves_pieces: bool) -> RowTime:
        """Move the ends of stages (and of pieces, if `moves_pieces`), alone and in groups, as long as TTFT falls."""
        number = len(row) - self.num_stages
        layers = np.pad(groups(self.num_stages - 1), ((0, 0), (number + 1, 0)))
        pieces = np.pad(groups(number if moves_pieces else 0), ((0, 0), (0, len(row) - number * moves_pieces)))
        return minimise(
            row,
            self.end + self.num_layers,
            1,
            self.evaluate,
            rounds=_ROUNDS,
            halve_from=first_step(self.end, 2 * (number + 1), 1) if moves_pieces else 1,
            directions=_thinned(np.concatenate([pieces, -pieces])),
            also=_thinned(np.concatenate([step * layers for step in (1, -1, 2, -2, 4, -4)])),
        )

    def _row(self, ends: Row, layers: Sequence[int]) -> Row:
        return np.concatenate([ends, [self.end], self.end + np.cumsum(layers)[:-1]]).astype(np.int64)

    def partitions(self, rows: Boundaries) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens of the pieces and layers of the stages, shapes (B, pieces) and (B, stages)."""
        number = rows.shape[1] - self.num_stages
        pieces = chunks_between(self.stride * rows[:, :number], self.tokens)
        return pieces, chunks_between(rows[:, number + 1 :] - self.end, self.num_layers)

    def evaluate(self, rows: Boundaries, enough_s: float = math.inf) -> Array:
        """TTFT of each row; infinite if a piece is too short."""
        pieces, layers = self.partitions(rows)
        allowed = (pieces >= self.least).all(axis=1)
        ttft_s = np.full(len(rows), np.inf)
        if allowed.any():
            ttft_s[allowed] = self.evaluator.ttft_s(pieces[allowed].astype(float), enough_s, layers[allowed].T)
        return ttft_s


def _at_multiples(ends: Array, spacing: int, end: int) -> Row:
    """Ends of pieces at multiples of a spacing; distinct ones, where there are too few multiples."""
    return distinct((np.round(ends / spacing) * spacing).astype(np.int64), 1, end)


def _thinned(rows: Boundaries) -> Boundaries:
    """Some of the candidates, so that a round with many pieces and stages takes no longer than one with few."""
    if len(rows) <= _MOST_MOVES:
        return rows
    return np.asarray(rows[np.linspace(0, len(rows) - 1, _MOST_MOVES).astype(int)])
