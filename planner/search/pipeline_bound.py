"""A proven lower bound on the TTFT of every pipeline over the given GPUs: any pieces, any layers on the stages.

Proof. Stage s takes d(s, m) for piece m of M. It begins a piece after its previous piece, and after the previous stage
has done the same piece. So TTFT is at least the sum of d along every path from (1, 1) to (S, M) that advances by one
stage or one piece at a time; such a path contains S + M - 1 steps of the engine.

Layouts. Let d(s, m) >= f(s) D(m) with f > 0, D >= 0 and sum D = 1. Let V(s, n) be the least possible length of the
longest path through the stages from s on with n pieces that have all of D; so V(S, n) = f(S). With x = f(s), let the
longest path through all of them be T, and y(k) = D(k + 1) + ... + D(n). Paths that leave stage s at piece k take
x (1 - y(k)) there and, by induction, at least V(s + 1, n - k + 1) y(k - 1) after it. So y(0) = 1, y(n) = 0 and
    y(k) >= 1 - T / x + V(s + 1, n - k + 1) / x y(k - 1).
For k = 1 ... n this gives T >= x (1 + P(n) / (P(0) + ... + P(n - 1))), where P(j) is the product of V(s + 1, i) / x
over i = 1 ... j. This is the recursion
    V(s, n) = x + V(s + 1, n) (1 - x / V(s, n - 1)),  V(s, 1) = x + V(s + 1, 1).
It rises with every V on its right side, so the least V over all layers of the later stages may take their place. The
least V over all layouts is computed stage by stage, for each first layer of the stage. f(s) is the slowness of stage s
times the weight of its layers, which depends on their kinds. The host of a stage issues the launches of its layers for
each piece, one after another; a layout takes at least the longest of these times. If messages overlap with computation,
a link is one more stage, without layers; else a stage also takes the time to send.

Pieces. D(m) is the least time of a layer of weight 1 for piece m: the rise of a convex function V over the piece, plus
a price per piece (or 0, if that is negative). The price is the least difference of time and rise. It is computed per
cell of a grid of lengths and starts: the time of mixing increases with both, so the shortest, first piece bounds it in
the cell; V rises most over the longest, last piece. Rates of V are the least times per token after a price is
subtracted; each of several prices proves a bound, and the largest one counts. A chunk of local attention may begin
within a piece, so the mixing of such layers counts as 0.
If the times of the kinds grow differently, D omits part of the work. Then the mean over the stages may be a better
bound: TTFT contains the work of a stage on all pieces, and that of each other stage on at least the first or the last
piece, of one token. With slow GPUs, the mean is the work over the sum of their speeds. The bound is the least one over
all numbers of pieces.

Links. Each link carries all pieces one after another. Before that, the first piece passes the stages before the link;
after that, the last piece passes the stages behind it. Every layer takes at least its time for one token. If messages
occupy both stages, a stage also has the messages of both its links. Then the bound is the mean over the stages, or the
largest time of a stage with one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrsim.hardware import Path
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.tensor_parallel import all_reduce
from kvrsim.program import Array, Collective, Compute, Op
from kvrsim.scenario import Scenario
from kvrsim.strategies import Step
from kvrsim.strategies.layers import before_step, last, layer_ops, request
from kvrsim.strategies.pipeline import PIPELINE_SEARCHED
from planner.search.minimise import unique_rows

_NUMBERS = 400  # intervals of numbers of pieces
_EXACT, _WORK = 256, 4_000_000  # most numbers of pieces that are exact; first layers x numbers x stages
_RATIO = 1.02  # ratio of a cell's longest to its shortest piece
_TILE = 128  # tokens: cells of shorter pieces end at its multiples
_PIECES = 2.0 ** np.arange(9)  # numbers of even pieces for which prices are tried


@dataclass(frozen=True, slots=True)
class _Kind:
    """The least times of one kind of layer."""

    count: int
    host_s: float  # host time to issue one layer for one piece
    pieces_s: Array  # least seconds of a piece by cell of the grid, also beyond the context, shape (lengths, starts)


@dataclass(frozen=True, slots=True)
class _Potentials:
    """For each price: all pieces together take at least `total_s + number * price_s`."""

    total_s: Array  # rise of V over the whole context, shape (prices,)
    price_s: Array  # proven price per piece, shape (prices,)
    rate_s: Array  # largest rise per token, shape (prices,)

    def least_s(self, fewest: Array, most: Array) -> Array:
        """Least seconds for each interval of the number of pieces, shape (prices, intervals)."""
        total_s, price_s = self.total_s[:, None], self.price_s[:, None]
        return total_s + price_s * np.where(price_s > 0, fewest, most)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Cells of pieces with these lengths and starts, in tokens."""

    lengths: Array  # shortest piece of each row
    longest: Array  # longest piece of each row
    starts: Array  # first start of each column
    latest: Array  # last start of each column
    tokens: int

    @classmethod
    def of(cls, tokens: int) -> _Grid:
        count = 2 + int(np.log(tokens) / np.log(_RATIO))
        edges = unique_rows(np.geomspace(1, tokens, count).astype(np.int64))
        tiles = np.arange(_TILE, min(tokens, int(_TILE / (_RATIO - 1))), _TILE) + 1
        rows = unique_rows(np.concatenate([edges, tiles]))
        first = np.append(0, edges)
        return cls(
            rows.astype(float),
            np.append(rows[1:] - 1.0, tokens),
            first.astype(float),
            np.append(first[1:] - 1.0, tokens),
            tokens,
        )

    def potentials(self, pieces_s: Array) -> _Potentials:
        """Potentials of pieces that take at least these seconds by cell."""
        middle = int(np.searchsorted(self.starts, self.tokens / 2))
        prices = unique_rows(np.concatenate([self._prices(pieces_s[:, column]) for column in (1, middle)]))
        ends = np.minimum(self.latest + self.longest[:, None], self.tokens)
        edges = [self._places(ends), self._places(np.maximum(0.0, ends - self.longest[:, None]))]
        possible_s = np.where(self.lengths[:, None] + self.starts <= self.tokens, pieces_s, np.inf)
        each = [one for price in prices for one in self._potential(pieces_s, float(price), possible_s, edges)]
        return _Potentials(*np.array(each).T)

    def _places(self, at: Array) -> tuple[npt.NDArray[np.intp], Array]:
        """Index of the column before each place, and the distance from its start."""
        index = np.searchsorted(self.starts, at, side="right") - 1
        return index, at - self.starts[index]

    def _prices(self, column_s: Array) -> Array:
        """Prices at which some lengths are the cheapest, from the lower convex hull of times by length."""
        x, y = self.longest, column_s
        while len(x) > 2:
            slopes = np.diff(y) / np.diff(x)
            is_corner = np.concatenate([[True], slopes[1:] > slopes[:-1], [True]])
            if is_corner.all():
                break
            x, y = x[is_corner], y[is_corner]
        edges = np.clip(np.searchsorted(x, self.tokens / _PIECES), 1, len(x) - 1)
        return np.append(0.0, y[edges] - (np.diff(y) / np.diff(x))[edges - 1] * x[edges]) if len(x) > 1 else np.zeros(1)

    def _potential(
        self, pieces_s: Array, price_s: float, possible_s: Array, edges: Sequence[tuple[npt.NDArray[np.intp], Array]]
    ) -> list[tuple[float, ...]]:
        """Rise of V over the context, proven price, and largest rate, for a wanted price.

        The second result is that of a smaller V, which proves the price itself, or 0 if the price is negative.
        possible_s: `pieces_s`, infinite where no piece is possible. edges: ends and starts of the latest pieces.
        """
        rates = (pieces_s - price_s) / self.longest[:, None]
        best = rates.argmin(axis=0)
        rate_s = np.maximum(0.0, rates[best, np.arange(len(best))])
        at = np.maximum.accumulate(self.starts + 0.5 * self.longest[best])
        rate_s = np.interp(self.starts, at, np.flip(np.minimum.accumulate(np.flip(rate_s))))
        values = np.cumsum(np.append(0.0, rate_s[:-1] * np.diff(self.starts)))
        until, since = (values[index] + rate_s[index] * beyond for index, beyond in edges)
        rises, least_s = until - since, max(0.0, price_s)
        proven_s = (possible_s - rises).min()
        share = ((possible_s - least_s) / np.maximum(rises, 1e-300)).min()
        whole = (values[-1], proven_s, rate_s.max())
        return [whole, (share * values[-1], least_s, share * rate_s.max())] if 0 < share < np.inf else [whole]


def pipeline_bound_s(scenario: Scenario, least_piece: int = 1) -> float:
    """A lower bound on the TTFT of all pipelines whose pieces have at least `least_piece` tokens.

    scenario: per rank of the strategy; ranks are stages.
    """
    num_stages, tokens = scenario.cluster.num_gpus, scenario.request.new_tokens
    least_piece = min(least_piece, tokens)
    grid = _Grid.of(tokens)
    kinds = _kinds(scenario, grid)
    one, whole = np.ones(1), np.full(1, float(scenario.request.context_len))
    ends_s = _seconds_of((*request(scenario, one), *last(scenario, one, whole, scenario.cost)))
    nbytes = scenario.layer_costs()[0].activation_bytes(one)
    paths = [scenario.cluster.path(rank, rank + 1) for rank in range(num_stages - 1)]
    latency_s = sum(path.latency_s for path in paths)
    step_s = _seconds_of(tuple(op for op in before_step(scenario, one, one, scenario.cost) if op.host_s))
    layouts = _Layouts.of(scenario, kinds, grid, tokens // least_piece)
    fewest, most = _intervals(layouts.exact, tokens // least_piece)
    # The messages of one piece, which has one token or, if there are no others, all tokens.
    each_s = [path.busy_s(nbytes * np.where(most == 1, tokens, 1)) for path in paths]
    first_s = sum(each_s, np.zeros(len(most)))
    passed_s = latency_s + (num_stages + fewest - 1) * step_s  # latencies of links and steps of the engine
    common_s = np.min([kind.pieces_s / weight for kind, weight in zip(kinds, layouts.weights, strict=True)], axis=0)
    potentials = grid.potentials(common_s)
    pieces_s = potentials.least_s(fewest, most)
    device_s = first_s + passed_s + layouts.least_s(pieces_s.max(axis=0), fewest, first_s + passed_s)
    if paths:
        shares = _link_shares(paths, nbytes, grid, potentials)
        means = layouts.total / num_stages * (num_stages + fewest - 1) + shares.sum(axis=1)[:, None]
        best = int((pieces_s * means / fewest).min(axis=1).argmax())
        through_s = passed_s + layouts.least_s(pieces_s[best], fewest, passed_s, shares[best])
        device_s = np.maximum(device_s, through_s)
    least_s = sum(kind.count * float(kind.pieces_s.min()) for kind in kinds)
    slowness = np.array([scenario.cluster.slowness(stage) for stage in range(num_stages)])
    speed = (1 / slowness).sum()  # total speed of the stages, relative to a GPU that is not slowed
    each = [pieces_s.max(axis=0) * layouts.weights[0]]
    if len(kinds) > 1:
        each = [grid.potentials(kind.pieces_s).least_s(fewest, most).max(axis=0) for kind in kinds]
    work_s = np.asarray(sum(kind.count * own_s for kind, own_s in zip(kinds, each, strict=True)))
    mean_s = (work_s + (speed - 1) * least_s) / speed
    sent_s = [_sent_s(path, tokens * nbytes, most) for path in paths]
    later_s = np.max([own_s - one_s for own_s, one_s in zip(sent_s, each_s, strict=True)], axis=0, initial=0.0)
    links_s = least_s + num_stages * step_s + later_s
    device_s = np.maximum(device_s, first_s + np.maximum(passed_s + mean_s, latency_s + links_s))
    if not scenario.sends_overlap and paths:
        busy_s = _busy_stages_s(np.array(sent_s), work_s, np.min(each, axis=0), slowness)
        device_s = np.maximum(device_s, fewest * step_s + busy_s)
    issued_s = fewest * sum(kind.count * kind.host_s for kind in kinds) / num_stages
    return ends_s + float(np.maximum(device_s, issued_s).min())


def _intervals(exact: int, most: int) -> tuple[Array, Array]:
    """Fewest and most pieces in each interval: single numbers up to `exact`, then longer intervals up to `most`."""
    edges = np.geomspace(exact + 1, most + 1, _NUMBERS).astype(np.int64)
    edges = unique_rows(np.append(np.arange(1, exact + 1), edges))
    return edges[:-1].astype(np.float64), edges[1:].astype(np.float64) - 1.0


def _busy_stages_s(sent_s: Array, work_s: Array, layer_s: Array, slowness: Array) -> Array:
    """Least seconds for which stages are busy if messages occupy both stages of their link, by interval of numbers.

    sent_s: seconds of all messages, shape (links, intervals). work_s: of all layers. layer_s: of one layer.
    """
    none = np.zeros((1, sent_s.shape[1]))
    messages_s = (np.concatenate([sent_s, none]) + np.concatenate([none, sent_s])) / slowness[:, None]
    mean_s = (work_s + messages_s.sum(axis=0)) / (1 / slowness).sum()
    return np.asarray(np.maximum(mean_s, ((messages_s + layer_s) * slowness[:, None]).max(axis=0)))


@dataclass(frozen=True, slots=True)
class _Layouts:
    """All layouts of the layers on the stages."""

    weights: Array  # weight of a layer of each kind
    until: Array  # weight of all layers before each layer, and of all
    hosts_s: float  # least host time per piece and weight
    slowness: tuple[float, ...]  # of each stage
    overlaps: bool  # whether messages overlap with computation
    exact: int  # numbers of pieces from 1 to this one are exact

    @classmethod
    def of(cls, scenario: Scenario, kinds: list[_Kind], grid: _Grid, most: int) -> _Layouts:
        """most: largest number of pieces."""
        stages, layers = scenario.cluster.num_gpus, scenario.share.layer_kind_index
        row, column = (
            int(np.searchsorted(at, grid.tokens / part)) for at, part in ((grid.lengths, 8), (grid.starts, 2))
        )
        weights = np.array([kind.pieces_s[row, column] for kind in kinds])
        each = max(1, (len(layers) - stages) ** 2 // 2 * stages)
        return cls(
            weights,
            np.append(0.0, np.cumsum(weights[list(layers)])),
            min(kind.host_s / weight for kind, weight in zip(kinds, weights, strict=True)),
            tuple(scenario.cluster.slowness(stage) for stage in range(stages)),
            scenario.sends_overlap,
            min(most, max(8, min(_EXACT, _WORK // each))),
        )

    @property
    def total(self) -> float:
        """Weight of all layers."""
        return float(self.until[-1])

    def least_s(self, pieces_s: Array, numbers: Array, before_s: Array, shares: Array | None = None) -> Array:
        """Least seconds of the longest path for each number of pieces, or of the longest host less `before_s`.

        pieces_s: least seconds of all pieces in a layer of weight 1. shares: seconds of each link's messages, as a
        share of those of pieces; None: no messages.
        """
        few = slice(self.exact)
        host = self.hosts_s / pieces_s[few], before_s[few] / pieces_s[few]
        lengths = self._lengths(host, np.zeros(len(self.slowness)) if shares is None else np.append(shares, 0.0))
        return np.asarray(pieces_s * np.append(lengths[:-1], np.full(len(numbers) - self.exact, lengths[-1])))

    def _lengths(self, host: tuple[Array, Array], shares: Array) -> Array:
        """V(1, n) for exact n, then its limit for many pieces, or the longest host's time if this is longer."""
        stages, layers = len(self.slowness), len(self.until) - 1
        host_s, before_s = (np.append(one, 0.0)[:, None] for one in host)
        number = np.arange(1.0, self.exact + 2)[:, None]
        later, longest = (np.full((self.exact + 1, layers + 1), np.inf) for _ in range(2))
        later[:, -1] = longest[:, -1] = 0.0
        for stage in range(stages - 1, -1, -1):
            if self.overlaps and shares[stage] > 0:
                later = _with_stage(np.full(layers + 1, shares[stage]), later)
            last = layers - (stages - 1 - stage)  # largest end of this stage's layers
            begin, end = np.triu_indices(layers + 1, 1)
            usable = (
                (begin >= stage)
                & (end <= last)
                & ((begin == 0) | (stage > 0))
                & ((end == layers) | (stage < stages - 1))
            )
            begin, end = begin[usable], end[usable]
            weight = self.until[end] - self.until[begin]
            own = self.slowness[stage] * weight + (0.0 if self.overlaps else shares[stage])
            paths = _with_stage(own, later[:, end])
            hosts = np.maximum(np.maximum(paths, longest[:, end]), number * host_s * weight - before_s)
            np.maximum(hosts, host_s * weight + later[:, end] - before_s, out=hosts)
            at, place = np.unique(begin, return_index=True)
            later, longest = (np.full((self.exact + 1, layers + 1), np.inf) for _ in range(2))
            later[:, at] = np.minimum.reduceat(paths, place, axis=1)
            longest[:, at] = np.minimum.reduceat(hosts, place, axis=1)
        return longest[:, 0]


def _with_stage(own: Array, later: Array) -> Array:
    """V(s, n) from the stage's f(s) and V(s + 1, n); the last row is the limit for many pieces."""
    lengths = own + later
    for number in range(1, len(later) - 1):
        lengths[number] = own + later[number] * (1.0 - own / lengths[number - 1])
    lengths[-1] = np.maximum(own, later[-1])
    return lengths


def _link_shares(paths: Sequence[Path], nbytes: Array, grid: _Grid, potentials: _Potentials) -> Array:
    """Least time of a piece's message over its time in a layer of weight 1, shape (prices, links)."""
    pieces_s = potentials.rate_s[:, None] * grid.longest + np.maximum(0.0, potentials.price_s)[:, None]
    sent_s = np.array([path.busy_s(grid.lengths * nbytes) for path in paths])
    return np.asarray((sent_s / np.maximum(pieces_s, 1e-300)[:, None]).min(axis=-1))


def _sent_s(path: Path, nbytes: Array, numbers: npt.NDArray[np.floating]) -> Array:
    """The least seconds of messages with these bytes in total, if there are at most these numbers of messages."""
    if path.short_bytes_per_s is None:
        return path.busy_s(nbytes) + np.zeros_like(numbers)
    long_s = nbytes / path.bandwidth_bytes_per_s - numbers * path.latency_s
    return np.asarray(np.maximum(nbytes / path.short_bytes_per_s, long_s))


def _kinds(scenario: Scenario, grid: _Grid) -> list[_Kind]:
    counts, lengths = np.bincount(scenario.share.layer_kind_index), np.arange(1.0, grid.tokens + 1)
    one, rows = np.ones(1), grid.lengths.astype(np.int64) - 1
    slowest = max(map(scenario.cluster.slowness, range(scenario.cluster.num_gpus)))
    kinds = []
    for count, costs in zip(counts, scenario.layer_costs(), strict=True):
        ops = layer_ops(PIPELINE_SEARCHED, Step(costs, (one,), (one,)), 0)
        host_s = sum(op.host_s for op in ops if isinstance(op, Compute | Collective))
        rows_s = np.minimum.reduceat(_layer_rows_s(costs, lengths, slowest), rows)
        mixed_s = _mix_s(costs, grid.lengths[:, None], grid.starts + scenario.request.cached_prefix)
        kinds.append(_Kind(int(count), host_s, rows_s[:, None] + mixed_s))
    return kinds


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


def _seconds_of(ops: tuple[Op, ...]) -> float:
    parts = (
        op.device_s if isinstance(op, Compute) else op.seconds for op in ops if isinstance(op, Compute | Collective)
    )
    return float(sum(float(np.ravel(part)[0]) for part in parts))
