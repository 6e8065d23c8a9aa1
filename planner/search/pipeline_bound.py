"""A proven lower bound on the TTFT of every pipeline over the given GPUs: any pieces, any layers on the stages.

Why it holds. Stage s takes d(s, m) for piece m of M. It begins a piece when it has done the one before, and when the
stage before has done that piece; so TTFT is at least the sum of d along every path that goes from (1, 1) to (S, M) by
one stage or one piece at a time, S + M - 1 steps of the engine among them.

Theorem. If d(s, m) = f(s) D(m) with f, D >= 0, some path is at least (S + M - 1) / (S M) of the sum of all d.
Proof, with sum f = sum D = 1, by induction on S; one stage is clear. Let x = f(1) and let the longest path be T. Paths
that leave stage 1 at piece k have x (D(1) + ... + D(k)) and, by induction, of what D(k) + ... + D(M) takes on the other
stages, (1 - x) of all, at least (S + M - k - 1) / ((S - 1)(M - k + 1)). With y(k) = D(k + 1) + ... + D(M), so that
y(0) = 1 and y(M) = 0, this reads, for r = (1 - x) / (x (S - 1)) and N = M - k + 1,
    y(k) >= 1 - T / x + r (N + S - 2) / N y(k - 1).
Unrolled, T >= x P(M) / P(M - 1), where P(M) is the sum of c(n) r^n, c(n) = binomial(n + S - 2, n), n = 0 ... M. Now
Q(r) = S M P(M) - (M + S - 1)(1 + (S - 1) r) P(M - 1) has a coefficient of r^n that is c(n) times a factor which falls
with n from (S - 1)(M - 1) to below 0 at n = M - 1, and a positive one at n = M: two changes of sign, so at most two
positive roots (Descartes). r = 1 is a double root, as Q(1) = Q'(1) = 0. So Q >= 0 for all r > 0, that is,
T >= (S + M - 1) / (S M), since x = 1 / (1 + (S - 1) r).

Layers. f(s) is what a stage has of the layers, each weighted by its kind, and D(m) what a layer of weight 1 takes at
least for the piece: an amount a piece, an amount a token (a line below the times of all lengths, for each slope), and
its share of the mixing of the whole context. Mixing of a piece from s to e takes at least a share, found on a grid, of
the difference of mixing all tokens up to e and up to s, with attention at a time that no call of its kernel beats.
Kinds that grow unlike each other leave part of their work out of D. Then the mean over the stages may be larger: each
stage does its work on all pieces, and the others at least the first or the last piece, a token long.
The number of pieces is the one for which the bound is least. Of slow GPUs, the mean is that of the work over the sum of
their speeds.

Links. Each link carries all pieces one after another, between what the first piece takes on the stages before it and
the last piece on those behind it, where every layer takes at least what it takes for a token.

Pieces with a least length have a further bound, whatever their number; the largest counts. For each stage s there is a
path of the first piece through the stages before s, all pieces through s, and the last piece through the stages after
s. No step of a path overlaps another one, so TTFT is at least the sum of each. A layer takes at least W for all pieces,
F for a first piece and L for a last piece of that least length: the last one attends to the whole context, however
short the others are. With x(s) layers on stage s, TTFT is at least
    x(s) W + F (x(1) + ... + x(s - 1)) + L (x(s + 1) + ... + x(S))    for every s, summed over kinds of layers,
and the whole numbers x(s) that add up to the layers of each kind and make the largest of these the least bound TTFT for
all layouts. The order of the kinds is left out, which only lowers the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrsim.ends import last, request, step
from kvrsim.hardware import Path
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.tensor_parallel import all_reduce
from kvrsim.program import Array, Collective, Compute, Op
from kvrsim.scenario import Scenario

_TOLERANCE = 1e-5  # of the solver, with room


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastTimes:
    """Least seconds of a kind of layer."""

    count: int
    all_s: float  # of all pieces
    first_s: float  # of the first piece
    last_s: float


def layers_s(kinds: list[LeastTimes], num_stages: int) -> float:
    """Least seconds of the layers along some path, for every division of layers into stages."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes a tenth of a second, and most plans need no bound

    width, scale_s = len(kinds), sum(kind.count * kind.all_s for kind in kinds) / num_stages
    paths = np.empty((num_stages, num_stages * width + 1))
    paths[:, -1] = -1.0  # times TTFT
    for stage in range(num_stages):
        rows = [_row(kinds, other - stage) / scale_s for other in range(num_stages)]
        paths[stage, :-1] = np.concatenate(rows)
    totals = np.hstack([np.tile(np.eye(width), num_stages), np.zeros((width, 1))])
    counts = [kind.count for kind in kinds]
    objective = np.zeros(num_stages * width + 1)
    objective[-1] = 1.0
    solution = milp(
        objective,
        constraints=[LinearConstraint(paths, -np.inf, 0.0), LinearConstraint(totals, counts, counts)],
        integrality=np.append(np.ones(num_stages * width), 0.0),
        bounds=Bounds(0.0, np.inf),
    )
    # The dual bound is proven even where the solver stopped before the least one.
    return max(0.0, float(solution.mip_dual_bound) - _TOLERANCE) * scale_s


def _row(kinds: list[LeastTimes], place: int) -> Array:
    """Seconds that a layer of each kind adds to a path; the path's stage of all pieces is `place` stages earlier."""
    if place == 0:
        return np.array([kind.all_s for kind in kinds])
    return np.array([kind.last_s if place > 0 else kind.first_s for kind in kinds])


_SLOPES, _GRID, _NUMBERS = 48, 48, 400


@dataclass(frozen=True, slots=True)
class _Kind:
    """The least times of a kind of layer."""

    count: int
    rows_s: Array  # of 1, 2, ... tokens: products, element-wise kernels, all-reduces
    grid: Array  # new tokens, rising from 0 to all
    mixed_s: Array  # of the context up to each point of the grid, at least what pieces up to there take together


def pipeline_bound_s(scenario: Scenario, least_piece: int = 1) -> float:
    """A TTFT that no pipeline beats whose pieces have at least `least_piece` tokens.

    scenario: as the strategy sees it, stages for ranks.
    """
    num_stages, tokens = scenario.cluster.num_gpus, scenario.request.new_tokens
    least_piece = min(least_piece, tokens)
    kinds = _kinds(scenario, least_piece)
    one, whole = np.ones(1), np.full(1, float(scenario.request.context_len))
    ends = (*request(scenario, one), *last(scenario, one, whole, scenario.cost))
    nbytes = scenario.layer_costs()[0].activation_bytes(one)
    paths = [scenario.cluster.path(rank, rank + 1) for rank in range(num_stages - 1)]
    fixed_s = _held_s(ends) + sum(float(path.busy_s(nbytes)[0]) + path.latency_s for path in paths)
    step_s = _held_s(tuple(op for op in step(scenario, one, one, scenario.cost) if op.host_s))
    edges = _rising(np.geomspace(1, tokens // least_piece + 1, _NUMBERS).astype(np.int64))
    fewest, most = edges[:-1].astype(float), edges[1:] - 1.0  # numbers of pieces, in intervals
    crossed_s = _crossed_s(kinds, tokens, fewest) * (num_stages + most - 1) / (num_stages * most)
    least_s = sum(kind.count * kind.rows_s.min() for kind in kinds)
    speed = sum(1 / scenario.cluster.slowness(stage) for stage in range(num_stages))  # in stages on unslowed GPUs
    mean_s = (_work_s(kinds, tokens, fewest) + (speed - 1) * least_s) / speed
    sent_s = [_sent_s(path, tokens * nbytes, most) - path.busy_s(nbytes) for path in paths]
    links_s = least_s + num_stages * step_s + np.max(sent_s, axis=0, initial=0.0)
    steps_s = (num_stages + fewest - 1) * step_s
    if least_piece > 1:
        mean_s = np.maximum(mean_s, layers_s([_with_floor(kind, least_piece) for kind in kinds], num_stages))
    return float(fixed_s + np.maximum(links_s, steps_s + np.maximum(crossed_s, mean_s)).min())


def _sent_s(path: Path, nbytes: Array, numbers: npt.NDArray[np.floating]) -> Array:
    """The least seconds of at most these numbers of messages that have these bytes together."""
    if path.short_bytes_per_s is None:
        return path.busy_s(nbytes) + np.zeros_like(numbers)
    long_s = nbytes / path.bandwidth_bytes_per_s - numbers * path.latency_s
    return np.asarray(np.maximum(nbytes / path.short_bytes_per_s, long_s))


def _with_floor(kind: _Kind, least_piece: int) -> LeastTimes:
    """The least seconds of a kind of layer for the first and the last piece, of at least `least_piece` tokens."""
    tokens = len(kind.rows_s)
    rows_s = float(kind.rows_s[least_piece - 1 :].min())
    first_s, before_last_s = np.interp([least_piece, tokens - least_piece], kind.grid, kind.mixed_s)  # both on the grid
    return LeastTimes(
        count=kind.count,
        all_s=float(_rows_s([(kind, 1.0)], tokens, np.ones(1))[0] + kind.mixed_s[-1]),
        first_s=rows_s + float(first_s),
        last_s=rows_s + float(kind.mixed_s[-1] - before_last_s),
    )


def _work_s(kinds: list[_Kind], tokens: int, numbers: Array) -> Array:
    """The least time of all layers for at least these numbers of pieces."""
    parts = [kind.count * (_rows_s([(kind, 1.0)], tokens, numbers) + kind.mixed_s[-1]) for kind in kinds]
    return np.asarray(sum(parts, np.zeros_like(numbers)))


def _crossed_s(kinds: list[_Kind], tokens: int, numbers: Array) -> Array:
    """Least seconds of all layers together: the sum of their weights, times a least time per weight that all share."""
    weights = [float(kind.rows_s[-1]) for kind in kinds]
    common = _rows_s(list(zip(kinds, weights, strict=True)), tokens, numbers) + _common_mixing_s(kinds, weights)
    return np.asarray(common * sum(kind.count * weight for kind, weight in zip(kinds, weights, strict=True)))


def _rows_s(kinds: list[tuple[_Kind, float]], tokens: int, numbers: Array) -> Array:
    """Least seconds of at least these numbers of pieces in any layer of weight 1: lines below all times."""
    lengths = np.arange(1.0, tokens + 1)
    scaled = [kind.rows_s / weight for kind, weight in kinds]
    slopes = np.linspace(0.0, 1.0, _SLOPES) * min(float(rows_s[-1]) for rows_s in scaled) / tokens
    best = np.zeros_like(numbers)
    for slope in slopes:
        offset = min(float((rows_s - slope * lengths).min()) for rows_s in scaled)
        if offset >= 0:  # so that more pieces never take less
            best = np.maximum(best, numbers * offset + slope * tokens)
    return best


def _common_mixing_s(kinds: list[_Kind], weights: list[float]) -> float:
    """The mixing that a layer of weight 1 has at least, whatever its kind: that of the kind with the least, scaled."""
    scaled = [kind.mixed_s / weight for kind, weight in zip(kinds, weights, strict=True)]
    least = min(scaled, key=lambda mixed_s: float(mixed_s[-1]))
    grows = np.diff(least)
    if not (grows > 0).all():
        return 0.0
    return float(least[-1]) * min(1.0, *(float((np.diff(mixed_s) / grows).min()) for mixed_s in scaled))


def _rising(values: Array) -> Array:
    """The values in ascending order, each once: np.unique without its import of masked arrays at every start."""
    ordered = np.sort(values)
    return np.asarray(ordered[np.append(True, np.diff(ordered) > 0)])


def _kinds(scenario: Scenario, least_piece: int) -> list[_Kind]:
    """All kinds of layers, with the ends of the least first piece and the least last piece on the grid."""
    tokens = scenario.request.new_tokens
    grid = _rising(np.round([0, *np.geomspace(1.0, tokens, _GRID), least_piece, tokens - least_piece]))
    counts = np.bincount(scenario.share.layer_kind_index)
    least = scenario.layer_costs(scenario.optimistic_cost)
    lengths = np.arange(1.0, tokens + 1)
    return [
        _Kind(int(count), _layer_rows_s(costs, lengths), grid, _mixed_s(costs, scenario.request.cached_prefix + grid))
        for count, costs in zip(counts, least, strict=True)
    ]


def _layer_rows_s(costs: LayerCosts, lengths: Array) -> Array:
    """What depends on the tokens of a piece alone."""
    seconds = costs.output_mlp_s(lengths)
    if costs.has_mixer:
        seconds = seconds + costs.qkv_s(lengths)
    if costs.setting.group is not None:
        summed = all_reduce(costs.setting.group, costs.activation_bytes(lengths), costs.setting.host.collective_s)
        seconds = seconds + costs.num_sums * summed.seconds
    return np.asarray(seconds)


def _mixed_s(costs: LayerCosts, points: Array) -> Array:
    """What pieces of any lengths up to each point of the context take at least; same shape as the points."""
    if not costs.has_mixer:
        return np.zeros_like(points)
    none = np.zeros_like(points)
    whole_s = np.where(points > 0, _mix_s(costs, np.maximum(points, 1.0), none), 0.0)
    first, until = (index.ravel() for index in np.triu_indices(len(points), 1))
    grown = whole_s[until] - whole_s[first]
    taken = _mix_s(costs, points[until] - points[first], points[first])
    share = np.min(taken / np.maximum(grown, 1e-30), initial=1.0)
    return np.asarray(share * (whole_s - whole_s[0]))


def _mix_s(costs: LayerCosts, chunk: Array, prefix: Array) -> Array:
    append_s = 0.0 if costs.has_state else costs.mixer.append_s(chunk, prefix)
    return np.asarray(append_s + costs.mixer.attention_s(chunk, prefix))


def _held_s(ops: tuple[Op, ...]) -> float:
    parts = (
        op.device_s if isinstance(op, Compute) else op.seconds for op in ops if isinstance(op, Compute | Collective)
    )
    return float(sum(float(np.ravel(part)[0]) for part in parts))
