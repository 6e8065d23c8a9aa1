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

Layers. f(s) is the weight of a stage's layers, which depends on their kinds, and D(m) what a layer of weight 1 takes at
least for the piece: an amount per piece, an amount per token (a line below the times of all lengths, for each slope),
and its share of the mixing of the whole context. The share is the rise of a convex function V of the context over the
piece, times a factor that no piece undercuts: time grows with the length and the start of a piece, so that the shortest
and first piece of each cell of a grid bounds all pieces of the cell, and V rises most over its longest and last piece.
Kinds that grow unlike each other leave part of their work out of D. Then the mean over the stages may be larger: each
stage does its work on all pieces, and the others at least the first or the last piece, a token long. On slow GPUs, the
mean is the work over the sum of their speeds. The number of pieces is the one for which the bound is least.

Hosts. The host of a stage issues the launches of its layers for each piece, one after another; the mean over the stages
counts.

Links. Each link carries all pieces one after another, between what the first piece takes on the stages before it and
the last piece on those behind it, where every layer takes at least what it takes for a token. Where messages hold both
stages, a stage has the messages of both its links besides its layers; the mean over the stages counts, and the stage
that needs the most with one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvrsim.ends import last, request, step
from kvrsim.hardware import Path
from kvrsim.kernels.layer import LayerCosts
from kvrsim.kernels.tensor_parallel import all_reduce
from kvrsim.program import Array, Collective, Compute, Op
from kvrsim.scenario import Scenario
from kvrsim.strategies import Step
from kvrsim.strategies.layers import layer_ops
from kvrsim.strategies.pipeline import PIPELINE_SEARCHED
from planner.search.minimise import unique_rows

_SLOPES, _NUMBERS = 48, 400  # of lines below the times of all lengths; of intervals of numbers of pieces
_RATIO = 1.02  # of a cell's longest piece to its shortest
_PROBES = (4, 16, 128)  # parts of the context: pieces whose time per token is the rise of V


@dataclass(frozen=True, slots=True)
class _Kind:
    """The least times of a kind of layer."""

    count: int
    rows_s: Array  # of 1, 2, ... tokens: products, element-wise kernels, all-reduces
    host_s: float  # to issue one layer for one piece
    mixed_s: Array  # of all pieces together, as shares of each V, shape (functions V,)


def pipeline_bound_s(scenario: Scenario, least_piece: int = 1) -> float:
    """A TTFT that no pipeline beats whose pieces have at least `least_piece` tokens.

    scenario: as the strategy sees it, stages for ranks.
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
    step_s = _held_s(tuple(op for op in step(scenario, one, one, scenario.cost) if op.host_s))
    edges = unique_rows(np.geomspace(1, tokens // least_piece + 1, _NUMBERS).astype(np.int64))
    fewest, most = edges[:-1].astype(float), edges[1:] - 1.0  # numbers of pieces, in intervals
    crossed_s = _crossed_s(kinds, tokens, fewest) * (num_stages + most - 1) / (num_stages * most)
    least_s = sum(kind.count * kind.rows_s.min() for kind in kinds)
    slowness = np.array([scenario.cluster.slowness(stage) for stage in range(num_stages)])
    speed = (1 / slowness).sum()  # in stages on unslowed GPUs
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
    """The least seconds of at most these numbers of messages that have these bytes together."""
    if path.short_bytes_per_s is None:
        return path.busy_s(nbytes) + np.zeros_like(numbers)
    long_s = nbytes / path.bandwidth_bytes_per_s - numbers * path.latency_s
    return np.asarray(np.maximum(nbytes / path.short_bytes_per_s, long_s))


def _work_s(kinds: list[_Kind], tokens: int, numbers: Array) -> Array:
    """The least time of all layers for at least these numbers of pieces."""
    parts = [kind.count * (_rows_s([(kind, 1.0)], tokens, numbers) + kind.mixed_s.max()) for kind in kinds]
    return np.asarray(sum(parts, np.zeros_like(numbers)))


def _crossed_s(kinds: list[_Kind], tokens: int, numbers: Array) -> Array:
    """Least seconds of all layers together: the sum of their weights, times a least time per weight that all share."""
    weights = np.array([float(kind.rows_s[-1]) for kind in kinds])
    mixed_s = np.min([kind.mixed_s / weight for kind, weight in zip(kinds, weights, strict=True)], axis=0).max()
    common_s = _rows_s(list(zip(kinds, weights, strict=True)), tokens, numbers) + mixed_s
    return np.asarray(common_s * (weights @ [kind.count for kind in kinds]))


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


def _kinds(scenario: Scenario) -> list[_Kind]:
    counts, tokens = np.bincount(scenario.share.layer_kind_index), scenario.request.new_tokens
    lengths, one = np.arange(1.0, tokens + 1), np.ones(1)
    each = scenario.layer_costs(scenario.optimistic_cost)
    mixed_s = _mixed_s(each, scenario.request.cached_prefix, tokens)
    kinds = []
    for count, costs, shares_s in zip(counts, each, mixed_s, strict=True):
        ops = layer_ops(PIPELINE_SEARCHED, Step(costs, (one,), (one,)), 0)
        host_s = sum(op.host_s for op in ops if isinstance(op, Compute | Collective))
        kinds.append(_Kind(int(count), _layer_rows_s(costs, lengths), host_s, shares_s))
    return kinds


def _layer_rows_s(costs: LayerCosts, lengths: Array) -> Array:
    """What depends on the tokens of a piece alone."""
    seconds = costs.output_mlp_s(lengths)
    if costs.has_mixer:
        seconds = seconds + costs.qkv_s(lengths)
    if costs.setting.group is not None:
        summed = all_reduce(costs.setting.group, costs.activation_bytes(lengths), costs.setting.host.collective_s)
        seconds = seconds + costs.num_sums * summed.seconds
    return np.asarray(seconds)


def _mixed_s(each: Sequence[LayerCosts], cached: int, tokens: int) -> Array:
    """What all pieces take together in a layer of each kind, as shares of several functions V; shape (kinds, V)."""
    count = 2 + int(np.log(tokens) / np.log(_RATIO))
    edges = np.append(unique_rows(np.geomspace(1, tokens, count).astype(np.int64)), tokens + 1)
    lengths, starts = edges[:-1, None].astype(float), np.append(0.0, edges[:-1])[None]
    longest = edges[1:, None] - 1.0
    ends = np.minimum(np.append(0.0, edges[1:] - 1)[None] + longest, tokens)  # of the last piece of each cell
    possible = lengths + starts <= tokens
    functions, least_s = list[Array](), list[Array]()
    for costs in each:
        pieces_s = np.where(possible, _mix_s(costs, lengths, starts + cached), np.inf)
        for axis in (0, 1):  # in case it does not grow with both
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
