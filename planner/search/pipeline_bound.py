"""A proven lower bound on the TTFT of pipelines: any layers on stages, any pieces that end at multiples of a stride.

Proof. Stage s takes d(s, m) for piece m of M. It begins a piece after its previous piece, and after the previous stage
has done the same piece. So TTFT is at least the sum of d along every path from (1, 1) to (S, M) that advances by one
stage or one piece at a time; such a path contains S + M - 1 steps of the engine. The TTFT of a known pipeline limits
the pieces of faster ones: one piece takes all stages and links at least its time. So a faster pipeline has at least so
many pieces, and none of them is shorter than the context less the longest possible other ones.

Layouts. Let d(s, m) >= f(s) D(m) with f > 0, D >= 0 and sum D = 1. Let V(s, n) be the least possible length of the
longest path through the stages from s on with n pieces that have all of D; so V(S, n) = f(S). With x = f(s), let the
longest path through all of them be T, and y(k) = D(k + 1) + ... + D(n). Paths that leave stage s at piece k take
x (1 - y(k)) there and, by induction, at least V(s + 1, n - k + 1) y(k - 1) after it. So y(0) = 1, y(n) = 0 and
    y(k) >= 1 - T / x + V(s + 1, n - k + 1) / x y(k - 1).
For k = 1 ... n this gives T >= x (1 + P(n) / (P(0) + ... + P(n - 1))), where P(j) is the product of V(s + 1, i) / x
over i = 1 ... j. This is the recursion
    V(s, n) = x + V(s + 1, n) (1 - x / V(s, n - 1)),  V(s, 1) = x + V(s + 1, 1).
It rises with every V on its right side, so the least V over all layers of the later stages may take their place. The
least V over all layouts is computed stage by stage, for each first layer of the stage. The host of a stage issues the
launches of its layers for each piece, one after another, and then the later stages compute the last piece; a layout
takes at least the longest of these times.

Links. If messages overlap with computation, a link is one more stage, without layers. Else a message occupies both
stages: a stage has f(s) = x for all pieces that it receives, computes and sends, and x - r for the first piece of a
path there, because the path already contains its message. With T' = T + r D(1), the recursion holds for T'. For k = 1
it gives x D(1) <= T' - V(s + 1, n). So T = T' - r D(1) >= (1 - r / x) T' + r / x V(s + 1, n), with the least T'.

Shares. D(m) is the time of all layers for piece m, or this time plus that of the messages. A part of it, such as a
layer of one kind, has between `low` and `high` of D(m), whatever the piece. If the parts with the numbers N sum up to
D(m), then a stage with the numbers a of the parts takes at least, for any c,
    c + sum over the parts of min((a - c N) low, (a - c N) high)
of D(m). So layers whose times grow differently with the context cost little, if all stages have similar layers.

Pieces. All pieces take at least the least sum of D(m) - price, plus the number of pieces times the price. Each of
several prices proves a bound, and the largest one counts. If there are few places where pieces may end, the least sum
is a shortest path over these places. Otherwise it is the rise of a convex function over the context, if it rises over
no piece by more than D(m) - price. This is tested per cell of a grid of lengths and starts: the time of mixing
increases with both, so the shortest, first piece bounds it in the cell; the function rises most over the longest, last
piece. A chunk of local attention may begin within a piece, so the mixing of such layers counts as 0.
The bound is the least one over all numbers of pieces.

Each link carries all pieces one after another. Before that, the first piece passes the stages before the link; after
that, the last piece passes the stages behind it. If messages occupy both stages, the stages together take the work of
all pieces and twice the messages. The busiest stage takes at least this over the sum of the GPUs' speeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvrsim.hardware import Path
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.tensor_parallel import all_reduce
from kvrsim.program import Array, Collective, Compute, Flags, Op
from kvrsim.scenario import Scenario
from kvrsim.strategies import Step
from kvrsim.strategies.layers import before_step, last, layer_ops, request
from kvrsim.strategies.pipeline import PIPELINE_SEARCHED
from planner.search.minimise import unique_rows
from planner.search.pipeline import PAGE

# largest number of pieces that is an interval of its own; ratio of larger numbers
_EXACT = 64
_NUMBERS = 1.04
_ENDS = 256  # most ends of pieces for shortest paths
_RATIO = 1.02  # ratio of a cell's longest to its shortest piece, and of its latest to its first start
_TILE = 128  # tokens: cells of shorter pieces end at its multiples
_PIECES = 2 ** np.arange(0, 8.5, 0.5)  # numbers of even pieces for which prices are tried
_PRICES = np.array([[0.1], [0.25], [0.4], [0.55], [0.7], [0.85], [1.0]])  # prices as shares of an even piece's time
# least share of a stage; share of stages without layers
_LEAST = 1e-12
_NEVER = 1e30
_TINY = 1e-290  # divisor in place of 0
_FEW = 0.003  # share of messages in a piece below which paths do not contain them
_NEAR = 1e-6  # a geometric series of a ratio so near to 1 is not divided by the distance


@dataclass(frozen=True, slots=True)
class _Sums:
    """For each price: all pieces together take at least `total_s + number * price_s`."""

    total_s: Array  # shape (prices,)
    price_s: Array  # shape (prices,)

    def least_s(self, fewest: Array, most: Array) -> Array:
        """Least seconds for each interval of the number of pieces."""
        total_s = self.total_s[:, None]
        price_s = self.price_s[:, None]
        return np.asarray((total_s + price_s * np.where(price_s > 0, fewest, most)).max(axis=0))


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Cells of possible pieces; cells are alike in length and start, or single pieces if there are few ends."""

    tokens: int  # new tokens of the context
    stride: int  # pieces end at multiples of these tokens, except the last one, which also has the remainder
    is_exact: bool  # whether a cell is one piece
    rows: npt.NDArray[np.int64]  # shortest lengths of the rows of cells, strides; if `is_exact`, the ends
    columns: npt.NDArray[np.int64]  # first starts of the columns of cells, strides
    row: npt.NDArray[np.intp]  # row and column of each cell, shape (cells,)
    column: npt.NDArray[np.intp]
    shortest: Array  # fewest tokens in each cell
    longest: Array  # most tokens in each cell

    @classmethod
    def of(cls, tokens: int, stride: int, least: int) -> _Pieces:
        """The cells of all pieces of at least `least` tokens."""
        count, rest = divmod(tokens, stride)
        if count <= _ENDS:
            rows = np.arange(1, count + 1)
            columns = np.arange(count)
            row, column = np.tril_indices(count)
            shortest = longest = stride * (rows[row] - columns[column]) + rest * (row == count - 1.0)
        else:
            edges = unique_rows(np.geomspace(1, count, 2 + int(np.log(count) / np.log(_RATIO))).astype(np.int64))
            tiles = np.arange(_TILE, min(tokens, int(_TILE / (_RATIO - 1))), _TILE) // stride + 1
            rows = unique_rows(np.concatenate([edges, tiles[tiles <= count]]))
            columns = np.append(0, edges)
            row, column = np.nonzero(rows[:, None] + columns <= count)
            shortest = stride * rows[row].astype(float)
            longest = stride * np.append(rows[1:] - 1.0, count)[row] + rest
        pieces = cls(tokens, stride, count <= _ENDS, rows, columns, row, column, shortest, longest)
        return pieces.where(longest >= least)

    def where(self, flags: Flags) -> _Pieces:
        """The cells with this flag."""
        cells = {name: getattr(self, name)[flags] for name in ("row", "column", "shortest", "longest")}
        return replace(self, **cells)

    def layer_s(self, costs: LayerCosts, cached: int, slowest: float) -> Array:
        """Least seconds of a layer in each cell; cached: tokens of the cached prefix."""
        count, rest = divmod(self.tokens, self.stride)
        lengths = self.stride * np.arange(1.0, count + 1)
        rows_s, last_s = _layer_rows_s(costs, np.array([lengths, lengths + rest]), slowest)
        if self.is_exact:
            strides = self.rows[self.row] - self.columns[self.column] - 1
            each_s = np.where(self.row == count - 1, last_s[strides], rows_s[strides])
        else:
            each_s = np.minimum.reduceat(np.minimum(rows_s, last_s), self.rows - 1)[self.row]
        starts = self.stride * self.columns[self.column].astype(np.float64)
        return np.asarray(each_s + _mix_s(costs, self.shortest, starts + cached))

    def least_from(self, seconds: Array, tokens: Array) -> Array:
        """The least of the cells' seconds, for pieces of at least these tokens; infinite without such pieces."""
        order = np.argsort(self.longest, kind="stable")
        least_s = np.minimum.accumulate(seconds[order][::-1])[::-1]
        return np.append(least_s, np.inf)[np.searchsorted(self.longest[order], tokens)]

    def sums(self, seconds: Array) -> _Sums:
        """Sums over pieces that take at least these seconds by cell."""
        count = self.tokens // self.stride
        table_s = np.full((len(self.rows), len(self.columns)), np.inf)
        table_s[self.row, self.column] = seconds
        first = self.column == 0
        at = np.searchsorted(self.longest[first], self.tokens / _PIECES)
        even_s = seconds[first][at[at < first.sum()]]
        if self.is_exact:
            prices = np.append(0.0, unique_rows((_PRICES * even_s).ravel()))
            return _Sums(_shortest_paths(table_s, prices), prices)
        columns = table_s[:, [0, int(np.searchsorted(self.columns, count / 2))]]
        prices = unique_rows(np.concatenate([self._prices(column) for column in columns.T]))
        return _Sums(*np.array([one for price in prices for one in self._potentials(table_s, float(price))]).T)

    def _prices(self, column_s: Array) -> Array:
        """Prices at which some lengths are the cheapest, from the lower convex hull of times by length."""
        usable = np.isfinite(column_s)
        x = np.append(self.rows[1:] - 1.0, self.tokens // self.stride)[usable]
        y = column_s[usable]
        while len(x) > 2:
            slopes = np.diff(y) / np.diff(x)
            is_corner = np.concatenate([[True], slopes[1:] > slopes[:-1], [True]])
            if is_corner.all():
                break
            x = x[is_corner]
            y = y[is_corner]
        if len(x) < 2:
            return np.zeros(1)
        edges = np.clip(np.searchsorted(x, self.tokens // self.stride / _PIECES), 1, len(x) - 1)
        return np.append(0.0, y[edges] - (np.diff(y) / np.diff(x))[edges - 1] * x[edges])

    def _potentials(self, table_s: Array, price_s: float) -> list[tuple[float, float]]:
        """Rises of two convex functions over the context, and the prices that they prove, for a wanted price.

        The second one is smaller and proves the price itself, or 0 if the price is negative.
        """
        count = self.tokens // self.stride
        longest = np.append(self.rows[1:] - 1.0, count)[:, None]
        rates = (table_s - price_s) / longest
        best = rates.argmin(axis=0)
        rate_s = rates[best, np.arange(len(best))]
        rate_s = np.maximum(0.0, np.where(np.isfinite(rate_s), rate_s, rate_s[np.isfinite(rate_s)][-1]))
        at = np.maximum.accumulate(self.columns + 0.5 * longest[best, 0])
        rate_s = np.interp(self.columns, at, np.flip(np.minimum.accumulate(np.flip(rate_s))))
        values = np.append(0.0, np.cumsum(rate_s * np.diff(np.append(self.columns, count))))
        ends = np.append(self.columns, count).astype(float)
        until = np.minimum(np.append(self.columns[1:] - 1.0, count) + longest, count)
        rises = np.interp(until, ends, values) - np.interp(np.maximum(0.0, until - longest), ends, values)
        least_s = max(0.0, price_s)
        share = min(1.0, float(((table_s - least_s) / np.maximum(rises, _TINY)).min()))
        return [(values[-1], float((table_s - rises).min())), (max(0.0, share) * values[-1], least_s * (share > 0))]


def _shortest_paths(table_s: Array, prices: Array) -> Array:
    """Least sum of the seconds less the price over all pieces, for each price; table_s: by end and start."""
    sums_s = np.zeros((len(prices), len(table_s) + 1))
    for end, starts_s in enumerate(table_s, start=1):
        sums_s[:, end] = (sums_s[:, :end] + starts_s[:end]).min(axis=1) - prices
    return sums_s[:, -1]


def pipeline_bound_s(scenario: Scenario, ttft_s: float, *, stride: int = PAGE, least_piece: int = PAGE) -> float:
    """A lower bound on the TTFT of pipelines whose pieces end at multiples of the stride and have `least_piece` tokens.

    scenario: per rank of the strategy; ranks are stages. ttft_s: TTFT of such a pipeline.
    """
    tokens = scenario.request.new_tokens
    least = min(max(stride, least_piece), tokens)
    return _PipelineStageBound(scenario, ttft_s, _Pieces.of(tokens, min(stride, tokens), least), least).value_s()


class _PipelineStageBound:
    """Times of the parts of a pipeline: a layer of each kind, and a message on the slowest link."""

    def __init__(self, scenario: Scenario, ttft_s: float, pieces: _Pieces, least: int) -> None:
        """pieces: those of at least `least` tokens."""
        self.scenario = scenario
        self.ttft_s = ttft_s
        self.tokens = scenario.request.new_tokens
        cluster = scenario.cluster
        costs = scenario.layer_costs()
        one = np.ones(1)
        self.slowness = np.array([cluster.slowness(stage) for stage in range(cluster.num_gpus)])
        self.speed = float((1 / self.slowness).sum())  # of all stages, relative to a GPU that is not slowed
        self.paths = [cluster.path(rank, rank + 1) for rank in range(cluster.num_gpus - 1)]
        self.latency_s = sum(path.latency_s for path in self.paths)
        self.hosts_s = np.array([_host_s(own) for own in costs])
        self.counts = np.bincount(scenario.share.layer_kind_index)
        self.nbytes = costs[0].activation_bytes(one)
        steps = (op for op in before_step(scenario, one, one, scenario.cost) if op.host_s)
        self.step_s = float(_seconds_of(steps)[0])  # of the engine
        kinds_s = [pieces.layer_s(own, scenario.request.cached_prefix, self.slowness.max()) for own in costs]
        sent_s = self._sent_s(pieces.shortest)
        works_s = self.counts @ np.array(kinds_s)
        ends_s = _ends_s(scenario, np.array([float(least)]), pieces.stride)
        alone_s = works_s + sent_s.sum(axis=0) + ends_s + self.latency_s + len(self.slowness) * self.step_s
        possible = alone_s <= ttft_s
        self.pieces = pieces.where(possible)
        self.works_s = works_s[possible]
        slowest_s = sent_s.max(axis=0, initial=0.0)
        self.parts_s = np.array([*kinds_s, slowest_s])[:, possible]
        self.links = (sent_s / np.maximum(slowest_s, _LEAST)).min(axis=1)  # message times, relative to the slowest link
        self.fewest, self.most = _intervals(self.tokens // least)
        longest = float(self.pieces.longest.max(initial=1.0))
        shortest = np.clip(self.tokens - (self.most - 1.0) * longest, least, longest)
        self.shortest = shortest  # tokens of the shortest piece at least, by interval
        self.is_possible = self.most * longest >= self.tokens

    def value_s(self) -> float:
        """The least bound of all numbers of pieces."""
        if not self.is_possible.any():
            return self.ttft_s
        issued_s = self.fewest * (self.counts @ self.hosts_s) / len(self.slowness)
        messages = self.links.sum() * (1 if self.scenario.sends_overlap else 2)
        first_s = self._sent_s(self.shortest).sum(axis=0)
        passed_s = self.latency_s + (len(self.slowness) + self.fewest - 1) * self.step_s  # links, steps of the engine
        work_s = self._sums_s(self.works_s)
        if not np.isfinite(work_s).all():  # the possible pieces do not add up to the context
            return self.ttft_s
        bounds = [issued_s, self._paths_s(np.append(self.counts, 0.0), work_s, 0.0 * self.links, first_s + passed_s)]
        both = messages * self.parts_s[-1]
        if (both > _FEW * self.works_s).any():
            both_s = self._sums_s(self.works_s + both)
            bounds.append(self._paths_s(np.append(self.counts, messages), both_s, self.links, passed_s))
        if self.paths:
            bounds.append(self._links_s(first_s))
            if not self.scenario.sends_overlap:
                bounds.append(self.fewest * self.step_s + self._busy_s(work_s))
        if len(self.counts) > 1:
            slowest = int(self.parts_s[:-1].max(axis=1).argmax())
            weights = (np.arange(len(self.parts_s)) == slowest).astype(float)
            sums_s = self._sums_s(self.parts_s[slowest])
            bounds.append(self._paths_s(weights, sums_s, self.links, passed_s))
        each_s = _ends_s(self.scenario, self.shortest, self.pieces.stride) + np.max(bounds, axis=0)
        return min(self.ttft_s, float(each_s[self.is_possible].min()))

    def _sent_s(self, tokens: Array) -> Array:
        """Seconds of messages of these tokens on each link, shape (links, ...)."""
        each_s = [path.busy_s(self.nbytes * tokens) for path in self.paths]
        return np.array(each_s).reshape(len(self.paths), *tokens.shape)

    def _all_sent_s(self) -> Array:
        """Least seconds of the messages of all pieces on each link, shape (links, intervals)."""
        return np.array([_sent_s(path, self.tokens * self.nbytes, self.most) for path in self.paths])

    def _sums_s(self, seconds: Array) -> Array:
        """Least sum over all pieces of these seconds by cell, for each interval of the number of pieces."""
        return self.pieces.sums(seconds).least_s(self.fewest, self.most)

    def _paths_s(self, weights: Array, sums_s: Array, links: Array, before_s: Array) -> Array:
        """The longest path; weights: how often D contains each part; links: times of messages that paths contain.

        sums_s: least sums of D over all pieces.
        """
        layouts = _Layouts(self.scenario, self.hosts_s, self.parts_s / (weights @ self.parts_s), weights, links)
        most_share = self.ttft_s / sums_s[self.is_possible].min()  # a longer stage takes more than the known TTFT
        return layouts.least_s(sums_s, self.fewest, self.most, before_s, most_share)

    def _links_s(self, first_s: Array) -> Array:
        """One piece passes all stages, and all pieces pass one link."""
        later_s = (self._all_sent_s() - self._sent_s(self.shortest)).max(axis=0)
        passed_s = self.latency_s + len(self.slowness) * self.step_s
        return np.asarray(first_s + passed_s + self._least_s() + later_s)

    def _least_s(self) -> Array:
        """Least time of all layers on one piece, which may be another one for each layer."""
        kinds_s = [self.pieces.least_from(kind_s, self.shortest) for kind_s in self.parts_s[:-1]]
        return np.asarray(self.counts @ np.array(kinds_s))

    def _busy_s(self, work_s: Array) -> Array:
        """Time of the layers and messages of a stage, if messages occupy both stages: the mean or the largest one."""
        sent_s = self._all_sent_s()
        none = np.zeros((1, len(self.most)))
        latencies_s = np.array([[path.latency_s] for path in self.paths])
        awaited_s = self.fewest * latencies_s  # by the receivers
        messages_s = np.concatenate([sent_s, none]) + np.concatenate([none, sent_s + awaited_s])
        mean_s = (work_s + (messages_s / self.slowness[:, None]).sum(axis=0)) / self.speed
        layer_s = (self.parts_s[:-1] / self.works_s).min() * work_s
        return np.asarray(np.maximum(mean_s, (messages_s + self.slowness[:, None] * layer_s).max(axis=0)))


def _intervals(most: int) -> tuple[Array, Array]:
    """Fewest and most pieces in each interval: single numbers, then longer intervals."""
    numbers = np.arange(1, min(most, _EXACT) + 2)
    if most > _EXACT:
        count = 2 + int(np.log(most / _EXACT) / np.log(_NUMBERS))
        numbers = unique_rows(np.append(numbers, np.geomspace(_EXACT + 1, most + 1, count).astype(np.int64)))
    return numbers[:-1].astype(np.float64), numbers[1:].astype(np.float64) - 1.0


class _Layouts:
    """All layouts of the layers on the stages."""

    def __init__(self, scenario: Scenario, hosts_s: Array, shares: Array, weights: Array, links: Array) -> None:
        """shares: of each kind of layer and of a message in D, shape (parts, cells). weights: of the parts in D.

        hosts_s: host seconds per piece of a layer of each kind. links: time of a message on each link, relative to the
        last part.
        """
        of_kind = np.array(scenario.share.layer_kind_index) == np.arange(len(hosts_s))[:, None]
        self.until = np.pad(np.cumsum(of_kind, axis=1), ((0, 1), (1, 0)))  # parts before each layer
        self.hosts_s = np.append(hosts_s, 0.0)
        self.weights = weights
        self.low = shares.min(axis=1)[:, None]
        self.high = shares.max(axis=1)[:, None]
        self.slowness = [scenario.cluster.slowness(stage) for stage in range(scenario.cluster.num_gpus)]
        self.links = np.concatenate([[0.0], links, [0.0]])
        self.overlaps = scenario.sends_overlap

    def share(self, numbers: Array) -> Array:
        """Least share of these numbers of parts in D, whatever the piece; shape (parts, B) to (B,)."""
        least = (numbers * self.low).sum(axis=0)
        for weight, one in zip(self.weights, numbers, strict=True):
            if weight > 0:
                more = numbers - one / weight * self.weights[:, None]
                np.maximum(least, one / weight + np.minimum(more * self.low, more * self.high).sum(axis=0), out=least)
        return np.asarray(least + _LEAST)

    def least_s(self, sums_s: Array, fewest: Array, most: Array, before_s: Array, most_share: float) -> Array:
        """Least seconds of the longest path for each interval of the number of pieces, or of the longest host.

        sums_s: least sum of D over all pieces. before_s: seconds that are added to those of paths. most_share: largest
        share of a stage.
        """
        stages = len(self.slowness)
        layers = self.until.shape[1] - 1
        widths = most - fewest + 1
        message = np.append(np.zeros(len(self.weights) - 1), 1.0)[:, None]
        later, longest = (np.full((len(most), layers + 1), _NEVER) for _ in range(2))
        later[:, -1] = longest[:, -1] = 1 / _NEVER
        for stage in range(stages - 1, -1, -1):
            received, sent = self.links[stage : stage + 2]
            if self.overlaps and sent > 0:
                later = _with_stage(self.share(sent * message), later, widths)
            begin, end = np.triu_indices(layers + 1, 1)
            usable = (begin >= stage) & ((begin == 0) | (stage > 0)) & (later[0, end] < 1.0 / _LEAST)
            begin = begin[usable]
            end = end[usable]
            own = self.until[:, end] - self.until[:, begin]
            first = self.slowness[stage] * own + (0.0 if self.overlaps else sent) * message
            first_s = self.share(first)
            own_s = first_s if self.overlaps else np.maximum(first_s, self.share(first + received * message))
            usable = own_s <= most_share
            begin = begin[usable]
            end = end[usable]
            own = own[:, usable]
            own_s = own_s[usable]
            first_s = first_s[usable]
            paths = _with_stage(own_s, later[:, end], widths, own_s - first_s)
            hosts = np.maximum(paths, longest[:, end])
            if self.hosts_s.any():
                host_s = self.hosts_s @ own
                added_s = before_s[:, None]
                alone_s = np.maximum(fewest[:, None] * host_s, host_s + later[:, end] * sums_s[:, None])
                hosts = np.maximum(hosts, (alone_s - added_s) / sums_s[:, None])
            at = np.flatnonzero(np.diff(begin, prepend=-1))
            later, longest = (np.full((len(most), layers + 1), _NEVER) for _ in range(2))
            if len(begin):
                later[:, begin[at]] = np.minimum.reduceat(paths, at, axis=1)
                longest[:, begin[at]] = np.minimum.reduceat(hosts, at, axis=1)
        return np.asarray(before_s + sums_s * longest[:, 0])


def _with_stage(own: Array, later: Array, widths: Array, received: Array | float = 0.0) -> Array:
    """V(s, n) from the stage's x and V(s + 1, n), for the largest n of each interval of this width.

    received: share r of the received message, which the first piece of a path does not have.
    """
    ratios = own / later
    lengths = np.empty_like(later)
    rest = np.zeros(later.shape[1])
    with np.errstate(over="ignore"):
        for place, (ratio, width) in enumerate(zip(ratios, widths, strict=True)):
            if width == 1:
                rest = (rest + 1.0) * ratio
            else:
                power = ratio**width
                is_near = np.abs(ratio - 1.0) < _NEAR
                most = width * np.maximum(1.0, power)  # of the geometric series
                series = np.where(is_near, most, (1.0 - power) / np.where(is_near, 1.0, 1.0 - ratio))
                rest = rest * power + ratio * series
            lengths[place] = own * (1.0 + 1.0 / rest)
    return lengths + received / own * (later - lengths)


def _sent_s(path: Path, nbytes: Array, numbers: npt.NDArray[np.floating]) -> Array:
    """The least seconds of messages with these bytes in total, if there are at most these numbers of messages."""
    if path.short_bytes_per_s is None:
        return path.busy_s(nbytes) + np.zeros_like(numbers)
    long_s = nbytes / path.bandwidth_bytes_per_s - numbers * path.latency_s
    return np.asarray(np.maximum(nbytes / path.short_bytes_per_s, long_s))


def _layer_rows_s(costs: LayerCosts, lengths: Array, slowest: float) -> Array:
    """Seconds of a layer that depend only on the number of tokens in a piece.

    All-reduces take as long on slow GPUs, so they count as a part that the slowest GPU's factor restores.
    """
    seconds = costs.output_mlp_s(lengths)
    if costs.has_mixer:
        seconds = seconds + costs.qkv_s(lengths)
    if costs.setting.group is not None:
        summed = all_reduce(costs.setting.group, costs.activation_bytes(lengths), costs.setting.host.collective_s)
        seconds = seconds + costs.num_sums / slowest * summed.seconds
    return np.asarray(seconds)


def _mix_s(costs: LayerCosts, chunk: Array, prefix: Array) -> Array:
    chunk, prefix = np.broadcast_arrays(chunk, prefix)
    if not costs.has_mixer or getattr(costs.mixer.mixer, "attention_chunk", None) is not None:
        return np.zeros(chunk.shape)
    append_s = 0.0 if costs.has_state else costs.mixer.append_s(chunk, prefix)
    return np.asarray(append_s + costs.mixer.attention_s(chunk, prefix))


def _ends_s(scenario: Scenario, tokens: Array, stride: int) -> Array:
    """Seconds before the first piece and after the last one, which has at least these tokens."""
    lengths = np.arange(scenario.request.new_tokens, 0, -stride)[::-1].astype(np.float64)
    whole = np.full_like(lengths, float(scenario.request.context_len))
    ops = (*request(scenario, np.ones_like(lengths)), *last(scenario, lengths, whole, scenario.cost))
    least_s = np.minimum.accumulate((_seconds_of(ops) + np.zeros_like(lengths))[::-1])[::-1]
    return np.asarray(least_s[np.searchsorted(lengths, tokens)])


def _host_s(costs: LayerCosts) -> float:
    """Host seconds to issue a layer for one piece."""
    one = np.ones(1)
    ops = layer_ops(PIPELINE_SEARCHED, Step(costs, (one,), (one,)), 0)
    return sum(op.host_s for op in ops if isinstance(op, Compute | Collective))


def _seconds_of(ops: Iterable[Op]) -> Array:
    parts = (
        op.device_s if isinstance(op, Compute) else op.seconds for op in ops if isinstance(op, Compute | Collective)
    )
    return np.asarray(sum(parts, np.zeros(1)))
