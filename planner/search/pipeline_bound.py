"""A proven lower bound on the TTFT of every pipeline over the given GPUs: any pieces, any layers on the stages.

Proof. Stage s takes d(s, m) for piece m of M. It begins a piece after its previous piece, and after the previous stage
has done the same piece. So TTFT is at least the sum of d along every path from (1, 1) to (S, M) that advances by one
stage or one piece at a time; such a path contains S + M - 1 steps of the engine.

Theorem. If d(s, m) = f(s) D(m) with f, D >= 0, some path is at least (S + M - 1) / (S M) of the sum of all d.
Proof, with sum f = sum D = 1, by induction on S; S = 1 is trivial. Let x = f(1), and let the longest path be T. Paths
that leave stage 1 at piece k take x (D(1) + ... + D(k)) there. On the other stages, by induction, the longest of them
takes at least (S + M - k - 1) / ((S - 1)(M - k + 1)) of (1 - x)(D(k) + ... + D(M)). With y(k) = D(k + 1) + ... + D(M),
r = (1 - x) / (x (S - 1)) and N = M - k + 1, it follows that y(0) = 1, y(M) = 0 and
    y(k) >= 1 - T / x + r (N + S - 2) / N y(k - 1).
For k = 1 ... M this gives T >= x P(M) / P(M - 1), where P(M) is the sum of c(n) r^n over n = 0 ... M, with
c(n) = binomial(n + S - 2, n). Let Q(r) = S M P(M) - (M + S - 1)(1 + (S - 1) r) P(M - 1). Its coefficient of r^n is c(n)
times a factor that decreases with n from (S - 1)(M - 1) to below 0 at n = M - 1; at n = M it is positive. With two
changes of sign, Q has at most two positive roots (Descartes). r = 1 is a double root, as Q(1) = Q'(1) = 0. So Q >= 0
for all r > 0, that is, T >= (S + M - 1) / (S M), since x = 1 / (1 + (S - 1) r).

Layers. f(s) is the weight of a stage's layers, which depends on their kinds. D(m) is the least time of a layer of
weight 1 for piece m: a time per piece, a time per token (for each slope, a line below the times of all lengths),
and a share of the mixing of the whole context. The share is the rise of a convex function V over the piece, times the
least ratio of mixing time to rise. This ratio is computed per cell of a grid of lengths and starts: time increases with
both, so the shortest, first piece bounds the times in the cell, and V rises most over the longest, last piece.
If the times of the kinds grow differently, D omits part of the work. Then the mean over the stages may be a better
bound: TTFT contains the work of a stage on all pieces, and that of each other stage on at least the first or the last
piece, of one token. With slow GPUs, the mean is the work over the sum of their speeds. The bound is the least one over
all numbers of pieces.

Hosts. The host of a stage issues the launches of its layers for each piece, one after another. The bound is the mean of
these times over the stages.

Links. Each link carries all pieces one after another. Before that, the first piece passes the stages before the link;
after that, the last piece passes the stages behind it. Every layer takes at least its time for one token. If messages
occupy both stages, a stage also has the messages of both its links. Then the bound is the mean over the stages, or the
largest time of a stage with one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from kvrsim.values import dataclass
from planner.search.minimise import unique_rows

_SLOPES, _NUMBERS = 48, 400  # lines below the times of all lengths; intervals of numbers of pieces
_RATIO = 1.02  # ratio of a cell's longest to its shortest piece
_PROBES = (4, 16, 128)  # context over length of the pieces whose time per token is the rise of a function V


@dataclass(frozen=True, slots=True)
class _Kind:
    """The least times of one kind of layer."""

    count: int
    lengths: Array  # tokens of the pieces in rows_s, ascending
    rows_s: Array  # matrix products, element-wise kernels, all-reduces; the corners of the lower convex hull
    host_s: float  # host time to issue one layer for one piece
    mixed_s: Array  # mixing time of all pieces together, from their shares of each V, shape (functions V,)


def pipeline_bound_s(scenario: Scenario, least_piece: int = 1) -> float:
    """A lower bound on the TTFT of all pipelines whose pieces have at least `least_piece` tokens.

    scenario: per rank of the strategy; ranks are stages.
    """
    num_stages, tokens = scenario.cluster.num_gpus, scenario.request.new_tokens
    least_piece = min(least_piece, tokens)
    kinds = _kinds(scenario)
    one, whole = np.ones(1), np.full(1, float(scenario.request.context_len))
    ends = (*request(scenario, one), *last(scenario, one, whole, scenario.cost))
    nbytes = scenario.layer_costs()[0].activation_bytes(one)
    paths = [scenario.cluster.path(rank, rank + 1) for rank in range(num_stages - 1)]
    ends_s = _held_s(ends)
    fixed_s = ends_s + sum(float(path.busy_s(nbytes)[0]) + path.latency_s for path in paths)
    step_s = _held_s(tuple(op for op in before_step(scenario, one, one, scenario.cost) if op.host_s))
    edges = unique_rows(np.geomspace(1, tokens // least_piece + 1, _NUMBERS).astype(np.int64))
    fewest, most = edges[:-1].astype(float), edges[1:] - 1.0  # ends of the intervals of the number of pieces
    crossed_s = _crossed_s(kinds, tokens, fewest) * (num_stages + most - 1) / (num_stages * most)
    least_s = sum(kind.count * kind.rows_s.min() for kind in kinds)
    slowness = np.array([scenario.cluster.slowness(stage) for stage in range(num_stages)])
    speed = (1 / slowness).sum()  # total speed of the stages, relative to a GPU that is not slowed
    work_s = _work_s(kinds, tokens, fewest)
    mean_s = (work_s + (speed - 1) * least_s) / speed
    sent_s = [_sent_s(path, tokens * nbytes, most) for path in paths]
    one_s = [own_s - path.busy_s(nbytes) for own_s, path in zip(sent_s, paths, strict=True)]
    links_s = least_s + num_stages * step_s + np.max(one_s, axis=0, initial=0.0)
    device_s = fixed_s + np.maximum(links_s, (num_stages + fewest - 1) * step_s + np.maximum(crossed_s, mean_s))
    if not scenario.sends_overlap and paths:
        none = np.zeros((1, len(most)))
        held_s = (np.concatenate([sent_s, none]) + np.concatenate([none, sent_s])) / slowness[:, None]
        layer_s = np.min([_work_s([replace(kind, count=1)], tokens, fewest) for kind in kinds], axis=0)
        stages_s = np.maximum(
            (work_s + held_s.sum(axis=0)) / speed, ((held_s + layer_s) * slowness[:, None]).max(axis=0)
        )
        device_s = np.maximum(device_s, ends_s + fewest * step_s + stages_s)
    issued_s = fewest * sum(kind.count * kind.host_s for kind in kinds) / num_stages
    return float(np.maximum(device_s, issued_s).min())


def _sent_s(path: Path, nbytes: Array, numbers: npt.NDArray[np.floating]) -> Array:
    """The least seconds of messages with these bytes in total, if there are at most these numbers of messages."""
    if path.short_bytes_per_s is None:
        return path.busy_s(nbytes) + np.zeros_like(numbers)
    long_s = nbytes / path.bandwidth_bytes_per_s - numbers * path.latency_s
    return np.asarray(np.maximum(nbytes / path.short_bytes_per_s, long_s))


def _work_s(kinds: list[_Kind], tokens: int, numbers: Array) -> Array:
    """The least time of all layers for at least these numbers of pieces."""
    parts = [kind.count * (_rows_s([(kind, 1.0)], tokens, numbers) + kind.mixed_s.max()) for kind in kinds]
    return np.asarray(sum(parts, np.zeros_like(numbers)))


def _crossed_s(kinds: list[_Kind], tokens: int, numbers: Array) -> Array:
    """Least seconds of all layers together: the sum of their weights, times a least time per weight for all kinds."""
    weights = np.array([float(kind.rows_s[-1]) for kind in kinds])
    mixed_s = np.min([kind.mixed_s / weight for kind, weight in zip(kinds, weights, strict=True)], axis=0).max()
    common_s = _rows_s(list(zip(kinds, weights, strict=True)), tokens, numbers) + mixed_s
    return np.asarray(common_s * (weights @ [kind.count for kind in kinds]))


def _rows_s(kinds: list[tuple[_Kind, float]], tokens: int, numbers: Array) -> Array:
    """Least seconds of at least these numbers of pieces in a layer of weight 1, from lines below all times."""
    scaled = [(kind.lengths, kind.rows_s / weight) for kind, weight in kinds]
    slopes = np.linspace(0.0, 1.0, _SLOPES) * min(float(rows_s[-1]) for _, rows_s in scaled) / tokens
    best = np.zeros_like(numbers)
    for slope in slopes:
        offset = min(float((rows_s - slope * lengths).min()) for lengths, rows_s in scaled)
        if offset >= 0:  # more pieces must not take less
            best = np.maximum(best, numbers * offset + slope * tokens)
    return best


def _kinds(scenario: Scenario) -> list[_Kind]:
    counts, tokens = np.bincount(scenario.share.layer_kind_index), scenario.request.new_tokens
    lengths, one = np.arange(1.0, tokens + 1), np.ones(1)
    each = scenario.layer_costs(scenario.optimistic_cost)
    mixed_s = _mixed_s(each, scenario.request.cached_prefix, tokens)
    kinds = []
    for count, costs, shares_s in zip(counts, each, mixed_s, strict=True):
        ops = layer_ops(PIPELINE_SEARCHED, Step(costs, (one,), (one,)), 0)
        host_s = sum(op.host_s for op in ops if isinstance(op, Compute | Collective))
        kinds.append(_Kind(int(count), *_below(lengths, _layer_rows_s(costs, lengths)), host_s, shares_s))
    return kinds


def _below(x: Array, y: Array) -> tuple[Array, Array]:
    """The corners of the lower convex hull of points with ascending x."""
    while len(x) > 2:
        slopes = np.diff(y) / np.diff(x)
        is_corner = np.concatenate([[True], slopes[1:] > slopes[:-1], [True]])
        if is_corner.all():
            break
        x, y = x[is_corner], y[is_corner]
    return x, y


def _layer_rows_s(costs: LayerCosts, lengths: Array) -> Array:
    """Seconds of a layer that depend only on the number of tokens in a piece."""
    seconds = costs.output_mlp_s(lengths)
    if costs.has_mixer:
        seconds = seconds + costs.qkv_s(lengths)
    if costs.setting.group is not None:
        summed = all_reduce(costs.setting.group, costs.activation_bytes(lengths), costs.setting.host.collective_s)
        seconds = seconds + costs.num_sums * summed.seconds
    return np.asarray(seconds)


def _mixed_s(each: Sequence[LayerCosts], cached: int, tokens: int) -> Array:
    """Least mixing seconds of all pieces together in a layer of each kind, by function V; shape (kinds, V)."""
    count = 2 + int(np.log(tokens) / np.log(_RATIO))
    edges = np.append(unique_rows(np.geomspace(1, tokens, count).astype(np.int64)), tokens + 1)
    lengths, starts = edges[:-1, None].astype(float), np.append(0.0, edges[:-1])[None]
    longest = edges[1:, None] - 1.0
    ends = np.minimum(np.append(0.0, edges[1:] - 1)[None] + longest, tokens)  # end of the last piece of each cell
    possible = lengths + starts <= tokens
    functions, least_s = list[Array](), list[Array]()
    for costs in each:
        pieces_s = np.where(possible, _mix_s(costs, lengths, starts + cached), np.inf)
        for axis in (0, 1):  # make the times increase with both axes
            pieces_s = np.flip(np.minimum.accumulate(np.flip(pieces_s, axis), axis=axis), axis)
        least_s.append(pieces_s)
        for parts in _PROBES:
            middle = np.maximum(0.5, starts[0])
            probe = np.maximum(1.0, np.minimum(tokens / parts, 2.0 * np.minimum(middle, tokens - middle)))
            rises = _mix_s(costs, probe, np.maximum(0.0, middle - 0.5 * probe) + cached) / probe
            rises = np.flip(np.minimum.accumulate(np.flip(rises)))
            functions.append(np.cumsum(np.append(0.0, rises[:-1] * np.diff(starts[0]))))
    shares_s = np.empty((len(each), len(functions)))
    for column, values in enumerate(functions):
        until, since = (np.interp(at, starts[0], values) for at in (ends, np.maximum(0.0, ends - longest)))
        rise = np.maximum(until - since, 1e-300)
        shares_s[:, column] = [np.min(one / rise, where=possible, initial=np.inf) * values[-1] for one in least_s]
    return shares_s


def _mix_s(costs: LayerCosts, chunk: Array, prefix: Array) -> Array:
    chunk, prefix = np.broadcast_arrays(chunk, prefix)
    if not costs.has_mixer:
        return np.zeros(chunk.shape)
    append_s = 0.0 if costs.has_state else costs.mixer.append_s(chunk, prefix)
    return np.asarray(append_s + costs.mixer.attention_s(chunk, prefix))


def _held_s(ops: tuple[Op, ...]) -> float:
    parts = (
        op.device_s if isinstance(op, Compute) else op.seconds for op in ops if isinstance(op, Compute | Collective)
    )
    return float(sum(float(np.ravel(part)[0]) for part in parts))
