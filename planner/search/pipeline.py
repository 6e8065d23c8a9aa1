"""The best pipeline: pieces and layers per stage, by beam searches over coarse nodes, then over nodes near the best.

With equal stages, TTFT is the work of all pieces on one stage, plus that of the longest piece on each other stage.
Early pieces are longer, because later ones attend to more keys. A beam search finds pieces of any number between given
nodes, and the executor simulates the best of them. The distances of coarse nodes are parts of lengths that fill the
tiles of matrix products.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvrsim.engine import DEVIATES_OF_80_PERCENT
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.memory import bytes_of_layers, fits, memory_of
from kvrsim.program import Array
from kvrsim.progress import OnProgress
from kvrsim.results.results import SearchReport
from kvrsim.scenario import Partition
from kvrsim.strategies.pipeline import context_ranks, even_layers
from planner.search.beam import Beam, Layers, Pieces, layers_s
from planner.search.minimise import (
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
    rounded,
    unique_rows,
    valid,
)
from planner.search.search import SearchResult

_STEP_TOKENS = 8192  # step of chunked prefill: vLLM's max_num_batched_tokens, SGLang's chunked_prefill_size
_GAIN = 0.002  # least relative gain in TTFT from doubling the pieces
_OF_EACH_PIECE = ("step_s", "launch_s", "collective_s")  # an engine's seconds per piece of any length


PAGE = 64  # tokens; pieces end at multiples of this number, which engines' page sizes divide
MOST_A_STAGE = 64  # pieces per stage; with 64, filling and emptying the stages takes less than 1.6 % of TTFT
_NODES = 96  # maximum number of nodes of a coarse search
# number of tried piece lengths; most nodes per length
_LENGTHS = 96
_PARTS = 4
# factor on _NODES if pieces are short; longest piece in node distances
_LONG = 4
_LONGEST = 12
# More partitions are refined, and refined ones shaken, if their TTFTs are within these factors of the best. With the
# first distance between nodes divided by _BEHIND_AT, a refinement ends if TTFT is above _BEHIND times that of another.
_CLOSE = 1.03
_CLOSE_REFINED = 1.0003
_BEHIND = 1.007
_BEHIND_AT = 3
# nodes on each side of an end if there are few ends; number from which there are many
_AROUND = 3
_FEW = 24
_MOST_REFINED = 512  # most ends of pieces for refinement
_LONGER = 2.2  # longest refined piece, relative to the unrefined piece there
_ALL_LAYOUTS = 8  # all layouts are tried if there are at most this many
# layouts per round; largest TTFT with the same pieces, relative to the best
_NEIGHBOURS = 5
_NEAR = 1.03
_SIMULATED = 6  # partitions of a beam search that are simulated
_ROUNDS = 48  # maximum number of rounds of a descent
# most and fewest candidates per round; candidates x ends x stages
_MOST_MOVES = 256
_LEAST_MOVES = 24
_CELLS = 2**16
_CELLS_OF_LAYERS = 2**19  # the same if pieces are given: with all moves of layers, the given pieces decide the layers
_MOST_GAIN = 0.04  # share of TTFT that a search is assumed to gain over its first coarse search
_LAYERS_MOVED = np.array([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32])  # layers that a neighbour of a result moves
_FAR = 1.1  # largest TTFT of a neighbour of a result, relative to it, if there are many pieces
# first rounds of descents from neighbours; the best one goes on if its TTFT is this close
_FIRST = 8
_HOPE = 1.0005
# Pieces that take equally long: relative changes of their number; corrections of their lengths, and the damping of
# these; distances between nodes per piece, at the first refinement.
_MORE_PIECES = (0.15, -0.15, 0.05, -0.05)
_BALANCES = 5
_DAMPING = 0.7
_SPACINGS = 6
_WORTH = 1e-4  # least relative gain in TTFT of a round

RowTime = tuple[Row, float]  # a row of _PipelineSearch, and its TTFT
_Plan = tuple[Row, float, int]  # a row, its TTFT, and the first distance between nodes of its refinement


class _Effort(NamedTuple):
    """The amount of work of a search."""

    spacings: int  # number of node distances in coarse searches
    refinements: int  # number of partitions of coarse searches that are refined
    again: int  # number of additional rounds with the same distance
    shakes: int  # most descents from neighbours of the result


_ROUGH = _Effort(2, 1, 0, 0)
_QUICK = _Effort(3, 1, 1, 0)
_THOROUGH = _Effort(4, 2, 5, 10)
_LITTLE_S = 0.1  # seconds of allowance below which a search is rough; without an allowance, it is thorough


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
    if allowance is not None:
        run.effort = _QUICK if allowance.left_s > _LITTLE_S else _ROUGH
    row, ttft_s = run.run(given)
    lengths, layers = (tuple(map(int, one[0])) for one in run.partitions(row[None]))
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
    for layers in {
        even_layers(num_layers, num_stages),
        layers_of_equal_bytes(bytes_of_layers(execution.placed), num_stages),
    }:
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
    if cluster.shares_bandwidth and context > 1:
        # All ranks gather at the same time, so links with a rank's share of the bus find the number quickly.
        share = cluster.link.bandwidth_bytes_per_s / cluster.num_gpus
        linked = execution.on(execution.placed.with_own_links(share))
        number = len(_best_even_pieces(Evaluator(linked))[0].chunk_lens)
        numbers = [one for one in numbers if one in (number // 2, number)]
    if cluster.num_gpus == context:
        numbers = [one for one in numbers if tokens <= one * _STEP_TOKENS] or numbers[-1:]
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
        self._kinds = np.array(execution.placed.share.layer_kind_index)
        self.num_layers = execution.placed.share.num_hidden_layers
        self.end = -(-self.tokens // stride)
        self.evaluator = Evaluator(execution)
        self.method = "pipeline"
        self.slowness = np.array([execution.cluster.slowness(stage) for stage in range(self.num_stages)])
        # With the pieces of a row: seconds of all layers before each layer, and the shortest piece's share of a layer.
        self.until_s = np.zeros(self.num_layers + 1)
        self.shortest = 0.0
        self.effort = _THOROUGH
        self.cells = _CELLS

    def run(self, given: Row | None) -> RowTime:
        """Return the best row and its TTFT; if `given` fixes the ends of pieces, only the layers are searched."""
        if given is not None:
            self.cells = _CELLS_OF_LAYERS
            return min((self._descend(self._row(given, one)) for one in self._layouts(given)), key=itemgetter(1))
        if self.execution.cluster.shares_bandwidth:
            return self._descend(self._on_own_links(), moves_pieces=True)
        plans = list[_Plan]()
        for spacing in self._spacings():
            nodes = np.append(np.arange(0, self.end, spacing), self.end)
            beam = self._beam(nodes, self._longest(nodes, spacing))
            plans += [(*self._fastest(nodes, beam.best([one])), spacing) for one in self._layouts(nodes[1:-1])]
            plans.sort(key=itemgetter(1))
            if self._is_hopeless(plans[0][1]):
                return plans[0][:2]
        plans = sorted([*plans[: self.effort.refinements], self._balanced(plans[0][0])], key=itemgetter(1))
        plans = [one for one in plans[: self.effort.refinements + 1] if one[1] <= _CLOSE * plans[0][1]]
        best_s = math.inf
        refined = list[RowTime]()
        for plan in plans:
            refined.append(self._refine(*plan, best_s))
            best_s = min(best_s, refined[-1][1])
        close = {row.tobytes(): row for row, ttft_s in refined if ttft_s <= _CLOSE_REFINED * best_s}
        return min(map(self._shaken, close.values()), key=itemgetter(1))

    def _shaken(self, row: Row) -> RowTime:
        """The result of a descent, and of descents from neighbours of the result as long as they improve it."""
        best = self._descend(row, moves_pieces=True)
        for _ in range(self.effort.shakes):
            near = self._neighbours_of_result(*best)
            begun = min(
                (self._descend(one, _FIRST, moves_pieces=True) for one in near), key=itemgetter(1), default=best
            )
            if begun[1] > _HOPE * best[1]:
                break
            after = self._descend(begun[0], moves_pieces=True)
            if after[1] >= best[1] * (1 - _WORTH):
                return min(best, after, key=itemgetter(1))
            best = after
        return best

    def _balanced(self, row: Row) -> _Plan:
        """The fastest row with pieces that take equally long and with the layers of the given row.

        The number of pieces grows or shrinks from that of the given row as long as TTFT falls.
        """
        number = len(self._ends(row)) + 1
        plan = self._balanced_with(number, row)
        for share in _MORE_PIECES:
            while 1 <= (number := number + int(np.copysign(np.ceil(abs(share) * number), share))) <= self.end:
                other = self._balanced_with(number, plan[0])
                if other[1] >= plan[1]:
                    break
                plan = other
            number = len(self._ends(plan[0])) + 1
        return plan

    def _balanced_with(self, number: int, row: Row) -> _Plan:
        """This number of pieces that take equally long, by corrections of the row's pieces, stretched to the number."""
        lengths = self._stretched(row, number)
        for _ in range(_BALANCES):
            each_s = self._layer_s(lengths * self.tokens / lengths.sum()).sum(axis=0)
            lengths *= (each_s.mean() / each_s) ** _DAMPING
        balanced = self._row(rounded(lengths * self.end / lengths.sum(), 1, self.end), self._layers(row))
        return balanced, float(self.evaluate(balanced[None])[0]), max(1, self.end // number // _SPACINGS)

    def _stretched(self, row: Row, number: int) -> Array:
        """Lengths of this number of pieces, in strides, that grow and shrink along the context as those of the row."""
        ends = np.concatenate([[0], self._ends(row), [self.end]])
        return np.diff(np.interp(np.linspace(0, len(ends) - 1, number + 1), np.arange(len(ends)), ends))

    def _layer_s(self, lengths: Array) -> Array:
        """Seconds of every layer and piece, shape (layers, pieces); lengths: tokens of the pieces."""
        starts = self.execution.request.cached_prefix + np.cumsum(lengths) - lengths
        return np.asarray(layers_s(self.execution, lengths, starts)[self._kinds])

    def _neighbours_of_result(self, row: Row, ttft_s: float) -> list[Row]:
        """The fastest rows with one piece more or fewer, and with layers moved from one stage to any other."""
        ends = self._ends(row)
        last = self.num_stages - 1
        at = np.concatenate([[0], ends, [self.end]])
        more = [np.sort(np.append(row, one)) for one in unique_rows((at[1:] + at[:-1]) // 2) if one not in at]
        fewer = [np.delete(row, one) for one in range(len(ends))]
        spans = np.pad(groups(last), ((0, 0), (len(ends) + 1, 0)))
        moves = (_LAYERS_MOVED[:, None, None] * spans).reshape(-1, len(row))
        moves = np.concatenate([moves, -moves])
        moved = row + self._thinned(moves[valid(row + moves, self.end + self.num_layers)])
        most = 2 if row.size < _FEW else 1
        near_s = (
            _FAR * ttft_s if len(ends) >= _FEW else math.inf
        )  # few pieces may change much after a neighbour's descent
        each = (more, most), (fewer, 1), (moved, 2 * most)
        return [one for rows, number in each for one in self._fastest_of(rows, number, near_s)]

    def _fastest_of(self, rows: Sequence[Row] | Boundaries, most: int, near_s: float) -> list[Row]:
        """At most this number of valid rows with a TTFT near the given one, fastest first."""
        if not len(rows):
            return []
        each = np.array(rows)
        each = each[valid(each, self.end + self.num_layers)]
        times_s = self.evaluate(each, near_s) if len(each) else np.zeros(0)
        order = np.argsort(times_s, kind="stable")[:most]
        return [each[one] for one in order if times_s[one] < math.inf and times_s[one] <= _NEAR * near_s]

    def _spacings(self) -> list[int]:
        """Distances between nodes, in strides: parts of the lengths of even pieces with the least TTFT.

        Multiples of such lengths fill the tiles of matrix products.
        """
        lengths = np.geomspace(1, self.end, _LENGTHS).astype(np.int64)
        lengths = unique_rows(np.append(lengths, np.arange(1, min(self.end, _LENGTHS) + 1)))
        tokens = np.minimum(self.stride * lengths, self.tokens).astype(float)
        middle = np.full_like(tokens, self.execution.request.cached_prefix + self.tokens / 2)
        pieces_s = layers_s(self.execution, tokens, middle)[self._kinds].sum(axis=0) / self.num_stages
        ttft_s = pieces_s * (self.tokens / tokens + self.num_stages - 1)
        parts = [1] * (self.end <= _NODES)
        parts += [self._part(int(length)) for length in lengths[np.argsort(ttft_s, kind="stable")]]
        return list(dict.fromkeys(parts))[: self.effort.spacings]

    def _longest(self, nodes: Row, spacing: int) -> Array | None:
        """The longest piece from each node of a coarse search, tokens; None: no limit."""
        longest = max(_LONGEST * self.stride * spacing, _LONGER * self.least)
        return None if len(nodes) <= _NODES else np.full(len(nodes), float(longest))

    def _part(self, length: int) -> int:
        """The smallest part of a length that does not give too many nodes."""
        most = [_NODES * _LONG, *[_NODES] * (_PARTS - 1)]
        parts = [
            length // number
            for number in range(1, _PARTS + 1)
            if length % number == 0 and self.end * number <= most[number - 1] * length
        ]
        return min(parts, default=-(-self.end // most[0]))

    def _refine(self, row: Row, ttft_s: float, spacing: int, to_beat_s: float) -> RowTime:
        """Move the ends of pieces and stages in smaller and smaller steps, also with more or fewer pieces.

        to_beat_s: TTFT of another refined row; a refinement that stays far above it ends early.
        """
        again = 0
        first = spacing
        self._measure(self._ends(row))
        while (ends := np.concatenate([[0], self._ends(row), [self.end]])).size <= _MOST_REFINED:
            around = spacing * np.arange(-_AROUND, _AROUND + 1) if len(ends) < _FEW else spacing * np.arange(-1, 2)
            near = np.append(ends[:, None] + around, (ends[1:] + ends[:-1]) // 2)
            nodes = unique_rows(np.append(near[(near > 0) & (near < self.end)], [0, self.end])[:, None])[:, 0]
            longest = self.stride * _LONGER * np.interp(nodes, ends[:-1], np.diff(ends))
            layouts = [self._layers(row), *self._neighbours(row, ttft_s)]
            pieces = self._beam(nodes, longest).best(layouts, [np.searchsorted(nodes, ends[1:-1])])
            before_s = ttft_s
            row, ttft_s = min((row, ttft_s), self._fastest(nodes, pieces), key=itemgetter(1))
            again = again + 1 if ttft_s < before_s * (1 - _WORTH) and again < self.effort.again else 0
            if (not again and spacing == 1) or (spacing * _BEHIND_AT <= first and ttft_s > _BEHIND * to_beat_s):
                break
            spacing = spacing if again else max(1, spacing // 2)
        return row, ttft_s

    def _neighbours(self, row: Row, ttft_s: float) -> list[Layers]:
        """Layouts of layers near the row's that are the fastest with the row's pieces."""
        moves = self._layer_moves(len(self._ends(row)))
        most = min(_NEIGHBOURS, 1 + 2 * _NEIGHBOURS * _FEW // row.size)
        return [self._layers(one) for one in self._fastest_of(row + moves, most, ttft_s)]

    def _layer_moves(self, number: int) -> Boundaries:
        """Moves of the ends of stages, alone and in groups; number: how many ends of pieces a row has."""
        ends = [step * np.eye(self.num_stages - 1, dtype=np.int64) for step in (2, 4, 8, 16)]
        moves = np.pad(np.concatenate([groups(self.num_stages - 1), *ends]), ((0, 0), (number + 1, 0)))
        return np.concatenate([moves, -moves])

    def _beam(self, nodes: Row, longest: Array | None = None) -> Beam:
        tokens = np.minimum(self.stride * nodes, self.tokens).astype(float)
        return Beam(self.execution, tokens, self.least, longest)

    def _fastest(self, nodes: Row, plans: Sequence[Pieces]) -> RowTime:
        """The row with the least simulated TTFT among the first of the given pieces, and this TTFT."""
        rows: dict[int, list[Row]] = {}
        for pieces in plans[:_SIMULATED]:
            rows.setdefault(len(pieces.inner), []).append(self._row(nodes[pieces.inner], pieces.layers))
        each = []
        for alike in rows.values():
            ttft_s = self.evaluate(np.array(alike))
            each.append((alike[int(ttft_s.argmin())], float(ttft_s.min())))
        return min(each, key=itemgetter(1))

    def _is_hopeless(self, ttft_s: float) -> bool:
        """Whether no row near a row of this TTFT is expected to beat the TTFT in the search's allowance."""
        allowance = self.evaluator.allowance
        if allowance is None or ttft_s * (1 - _MOST_GAIN) <= allowance.to_beat_s:
            return False
        self.method = "rough"
        return True

    def _on_own_links(self) -> Row:
        """The best row for separate links, with the whole bus or a fair share each; this search takes little time."""
        rows = []
        for flows in sorted({1, self.num_stages - 1}):
            linked = self.execution.placed.with_own_links(self.execution.cluster.link.bandwidth_bytes_per_s / flows)
            run = _PipelineSearch(self.execution.on(linked), self.stride, self.least)
            run.effort = self.effort
            rows.append(run.run(None)[0])
            self.evaluator.evaluations += run.evaluator.evaluations
        return min(rows, key=lambda row: float(self.evaluate(row[None])[0]))

    def _layouts(self, ends: Row) -> list[Layers]:
        """Layouts of layers: all, if there are few; else even, by speed, and fewer layers where messages take time."""
        self._measure(ends)
        if math.comb(self.num_layers - 1, self.num_stages - 1) <= _ALL_LAYOUTS:
            ends = np.array(list(combinations(range(1, self.num_layers), self.num_stages - 1)), dtype=np.int64)
            return [tuple(map(int, one)) for one in chunks_between(ends, self.num_layers)]
        each_s = np.diff(self.until_s)
        slowness = self.slowness
        shares = np.cumsum(1 / slowness)[:-1] / (1 / slowness).sum()
        equal = 1 + np.abs((np.cumsum(each_s) / each_s.sum())[:, None] - shares).argmin(axis=0)
        messages_s = np.zeros(self.num_stages)
        if not self.execution.placed.sends_overlap:
            nbytes = self.execution.placed.layer_costs()[0].activation_bytes(self._lengths(ends))
            for stage in range(self.num_stages - 1):
                messages_s[stage : stage + 2] += self.execution.cluster.path(stage, stage + 1).busy_s(nbytes).sum()
        fewer = np.ones(self.num_stages, dtype=np.int64)
        for _ in range(self.num_layers - self.num_stages):
            fewer[((fewer + 1) * each_s.mean() * slowness + messages_s).argmin()] += 1
        layouts = (
            even_layers(self.num_layers, self.num_stages),
            chunk_lens(tuple(distinct(equal, 1, self.num_layers)), self.num_layers),
            tuple(map(int, fewer)),
        )
        return list(dict.fromkeys(layouts))

    def _lengths(self, ends: Row) -> Array:
        return chunks_between(self.stride * ends, self.tokens).astype(float)

    def _measure(self, ends: Row) -> None:
        """Take the seconds of layers with these pieces, for `_least_s`."""
        layer_s = self._layer_s(self._lengths(ends))
        self.until_s = np.append(0.0, np.cumsum(layer_s.sum(axis=1)))
        self.shortest = float(layer_s.sum(axis=0).min() / layer_s.sum())

    def _descend(self, row: Row, rounds: int = _ROUNDS, *, moves_pieces: bool = False) -> RowTime:
        """Move the ends of stages (and of pieces, if `moves_pieces`), alone and in groups, as long as TTFT falls."""
        number = len(self._ends(row))
        self._measure(self._ends(row))
        pieces = np.pad(groups(number if moves_pieces else 0), ((0, 0), (0, len(row) - number * moves_pieces)))
        return minimise(
            row,
            self.end + self.num_layers,
            1,
            self.evaluate,
            rounds=rounds,
            halve_from=first_step(self.end, 8 * (number + 1), 1) if moves_pieces else 1,
            directions=self._thinned(np.concatenate([pieces, -pieces])),
            also=self._thinned(self._layer_moves(number)),
        )

    def _row(self, ends: Row, layers: Sequence[int]) -> Row:
        return np.concatenate([ends, [self.end], self.end + np.cumsum(layers)[:-1]]).astype(np.int64)

    def _ends(self, row: Row) -> Row:
        return row[: len(row) - self.num_stages]

    def _layers(self, row: Row) -> Layers:
        """Layers per stage."""
        return tuple(map(int, self.partitions(row[None])[1][0]))

    def partitions(self, rows: Boundaries) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens of the pieces and layers of the stages, shapes (B, pieces) and (B, stages)."""
        number = rows.shape[1] - self.num_stages
        pieces = chunks_between(self.stride * rows[:, :number], self.tokens)
        return pieces, chunks_between(rows[:, number + 1 :] - self.end, self.num_layers)

    def evaluate(self, rows: Boundaries, enough_s: float = math.inf) -> Array:
        """TTFT of each row; infinite if a piece is too short, or a stage has too many layers for `enough_s`."""
        pieces, layers = self.partitions(rows)
        allowed = (pieces >= self.least).all(axis=1)
        if pieces.shape[1] >= _FEW and math.isfinite(enough_s):
            allowed &= self._least_s(layers) <= _NEAR * enough_s
        ttft_s = np.full(len(rows), np.inf)
        if allowed.any():
            ttft_s[allowed] = self.evaluator.ttft_s(pieces[allowed].astype(float), enough_s, layers[allowed].T)
        return ttft_s

    def _least_s(self, layers: npt.NDArray[np.int64]) -> Array:
        """About the least TTFT with these layers: the work of a stage, and one piece on each of the others."""
        ends = np.cumsum(np.pad(layers, ((0, 0), (1, 0))), axis=1)
        busy_s = np.diff(self.until_s[ends], axis=1) * self.slowness
        return np.asarray((1 - self.shortest) * busy_s.max(axis=1) + self.shortest * busy_s.sum(axis=1))

    def _thinned(self, rows: Boundaries) -> Boundaries:
        """Some of the candidates, so that a round with many pieces and stages takes no longer than one with few."""
        most = int(np.clip(self.cells // (max(1, rows.shape[1]) * self.num_stages), _LEAST_MOVES, _MOST_MOVES))
        return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]
