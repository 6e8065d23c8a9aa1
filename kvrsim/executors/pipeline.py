"""The executor of pipelines: many partitions and layouts of the stages at once.

If messages overlap with computation and each stage is one rank, a stage waits only for the previous stage and for its
own previous piece: `end(m) = max(end(m - 1) + d(m), least(m))`, a cumulative maximum over the pieces m, one stage after
another. Otherwise stages work in steps: stage s and piece m with the same s + m do not depend on each other. A
rendezvous also holds the sender until the next stage has sent its previous piece on; then those with the same s + 2 m
are computed in one step. Results equal those of the executors of programs up to rounding. With context ranks this
executor is ten times as fast as the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import numpy as np
import numpy.typing as npt

from kvrsim.executors.batch import Segment, segment_of
from kvrsim.executors.steady import steady_advance
from kvrsim.hardware import Cluster, Path
from kvrsim.kernels.cost import CostModel
from kvrsim.program import AllGather, Array, Op, slower
from kvrsim.scenario import Scenario
from kvrsim.strategies.base import Strategy
from kvrsim.strategies.pipeline import PieceOps, program, stages

Index = npt.NDArray[np.intp]


def run_pipeline(
    scenario: Scenario,
    strategy: Strategy,
    pieces: Sequence[Array],
    cluster: Cluster,
    cost: CostModel,
    stage_layers: Index | None = None,
) -> Array | None:
    """Finish time of each rank, seconds, shape (ranks, B); None if the pipeline can only be run as a program.

    This is the case with loads of a cached prefix, with shared links, with layers that do not gather exactly once
    between context ranks, and with context ranks on slow GPUs.
    pieces: tokens of each piece, arrays of shape (B,). stage_layers: layers per stage of each partition, shape (stages,
    B), for stages of one rank; None: those of the strategy.
    """
    if strategy.pipeline is not program or cluster.shares_bandwidth:
        return None
    ops = PieceOps.of(scenario, strategy, pieces, cost)
    gathers = {sum(isinstance(op, AllGather) for op in own) for ranks in ops.layers for own in ranks}
    if gathers != {int(len(ops.embedding) > 1)} or any(load for ranks in ops.loads for load in ranks):
        return None
    slowness = tuple(scenario.cluster.slowness(rank) for rank in range(cluster.num_gpus))
    if len(ops.embedding) > 1 and set(slowness) != {1.0}:
        return None
    if stage_layers is None:
        each = stages(strategy, len(scenario.share.layer_kind_index), cluster.num_gpus)
        stage_layers = np.array([[len(layers)] for layers in each])
    elif (stage_layers == stage_layers[:, :1]).all():
        stage_layers = stage_layers[:, :1]
    return _PipelineRun(scenario, ops, stage_layers, slowness, (cluster, cost)).finish_s()


class _Segments:
    """Segments of all pieces, kinds of layers and context ranks; arrays of shape (M, kinds, context ranks, B)."""

    def __init__(self, kinds: Sequence[Sequence[Segment]], shape: tuple[int, ...]) -> None:
        """kinds: segments per kind and context rank. shape: (pieces, partitions)."""

        def together(name: str) -> Array:
            rows = [np.stack([np.broadcast_to(getattr(one, name), shape) for one in ranks], axis=1) for ranks in kinds]
            return np.stack(rows, axis=1)

        self.device_s, self.floor_s = together("device_s"), together("floor_s")
        self.host_s = np.array([ranks[0].host_s for ranks in kinds])

    def run(self, piece: Index, kind: Index, clock: Array, host_s: Array) -> Array:
        """Return the times at which the stages end the segment; add the hosts' issue times to `host_s` in place."""
        end_s = np.maximum(clock + self.device_s[piece, kind], self.floor_s[piece, kind] + host_s)
        host_s += self.host_s[kind][:, None, None]
        return end_s


@dataclass(frozen=True, slots=True)
class _Links:
    """Links of the ranks: the different paths, and the index of the path of each rank."""

    paths: tuple[Path, ...]
    kind: Index  # shape (stages, context ranks)

    @classmethod
    def of(cls, paths: Iterable[Path], context: int) -> _Links:
        """Links with these paths, given in the order of the ranks."""
        kinds: dict[Path, int] = {}
        kind = [kinds.setdefault(path, len(kinds)) for path in paths]
        return cls(tuple(kinds), np.array(kind, dtype=np.intp).reshape(-1, context))

    def values(self, name: str) -> Array:
        """Values of an attribute of the paths, shape (stages, context ranks, 1)."""
        return np.array([getattr(path, name) for path in self.paths] or [0.0])[self.kind][..., None]


class _PipelineRun:
    """One evaluation: a stage receives a piece, prepares it, computes its layers, and sends it on.

    Arrays broadcast to the shape (stages x pieces, context ranks, B). Hosts never wait, so the times at which they
    issue operations are known in advance.
    """

    def __init__(
        self,
        scenario: Scenario,
        ops: PieceOps,
        stage_layers: Index,
        slowness: tuple[float, ...],
        machine: tuple[Cluster, CostModel],
    ) -> None:
        """stage_layers: layers per stage, shape (stages, B), or (stages, 1) for all partitions. slowness: per rank."""
        cluster, cost = machine
        prologue, epilogue = ops.ends(scenario, cost)
        self.prologue, self.epilogue = segment_of(prologue), segment_of(slower(epilogue, slowness[-1]))
        self.kinds, self.stage_layers = scenario.share.layer_kind_index, stage_layers
        self.rendezvous = not scenario.sends_overlap
        self.num_stages, self.context, self.num_pieces = len(stage_layers), len(ops.embedding), len(ops.lengths)
        self.shape = self.num_pieces, self.context, ops.lengths.shape[1]
        self._prepare_messages(ops, cluster)
        both = [(*embedding, *own) for embedding, own in zip(ops.embedding, ops.preparation, strict=True)]
        later = np.minimum(np.arange(self.num_stages), 1)
        kinds = list(zip(later.tolist(), slowness[:: self.context], strict=True))
        known = list(dict.fromkeys(kinds))
        way_in = _Segments(
            [[segment_of(slower(own, factor)) for own in (both, ops.preparation)[kind]] for kind, factor in known],
            ops.lengths.shape,
        )
        index = np.array([known.index(kind) for kind in kinds])
        device_s, floor_s = (values.swapaxes(0, 1)[index] for values in (way_in.device_s, way_in.floor_s))
        issued_s = way_in.host_s[index, None]  # host seconds per piece, shape (stages, 1)
        layers_issued_s = np.zeros((self.num_stages, stage_layers.shape[1]))
        self.gathers = self.context > 1
        if self.gathers:
            self._prepare_layers(ops, cluster, layers_issued_s)
        else:
            self._add_layers(ops, (device_s, floor_s, layers_issued_s), issued_s, slowness)
        message_s = scenario.host.message_s
        all_s = issued_s + layers_issued_s + message_s * (later + later[::-1])[:, None]
        begun_s = self.prologue.host_s + np.arange(self.num_pieces)[:, None] * all_s[:, None]  # (stages, pieces, B)
        received_s = begun_s + message_s * later[:, None, None]
        sent_s = received_s + (issued_s + layers_issued_s)[:, None] + message_s
        sent_s[-1] = -np.inf  # the last stage sends nothing
        self.received_s, self.sent_s = (_flat(one[:, :, None]) for one in (received_s, sent_s))
        if self.gathers:
            # Times at which hosts issue the layers.
            self.layers_s = _flat(received_s[:, :, None] + issued_s[:, None, None])
        self.host_s = self.prologue.host_s + self.num_pieces * all_s[-1]  # host time of the last stage after all pieces
        self.device_s, self.floor_s = _flat(device_s), _flat(floor_s + received_s[:, :, None])

    def _prepare_messages(self, ops: PieceOps, cluster: Cluster) -> None:
        """Prepare the messages into each stage. The first stage receives none; an empty row follows the last stage."""
        ranks = range((self.num_stages - 1) * self.context)
        links = _Links.of((cluster.path(rank, rank + self.context) for rank in ranks), self.context)
        nbytes, none = np.stack(ops.sent_bytes, axis=1), np.zeros((1, *self.shape))
        busy_s = [path.busy_s(nbytes) for path in links.paths]
        each_s = [np.stack([busy_s[kind][:, rank] for rank, kind in enumerate(own)], axis=1) for own in links.kind]
        self.into_s = _flat(np.concatenate([none, *(one[None] for one in each_s), none]))
        none = np.zeros((1, self.context, 1))
        self.latency_s = np.concatenate([none, links.values("latency_s")[: len(each_s)], none])

    def _add_layers(
        self, ops: PieceOps, seconds: tuple[Array, Array, Array], issued_s: Array, slowness: tuple[float, ...]
    ) -> None:
        """Append each stage's layers to its work per piece; change `seconds` (device, floor, host) in place."""
        device_s, floor_s, host_s = (one[:, :, 0] if one.ndim > 2 else one for one in seconds)
        ends, first = np.cumsum(self.stage_layers, axis=0), 0
        known = list(dict.fromkeys(slowness))
        each = [
            _Segments([[segment_of(slower(ranks[0], one)) for one in known]], ops.lengths.shape) for ranks in ops.layers
        ]
        index = [known.index(one) for one in slowness] if len(known) > 1 else [0]
        for kind, alike in groupby(self.kinds):
            after = first + len(list(alike))
            own_s, least_s = (
                values[:, 0].swapaxes(0, 1)[index] for values in (each[kind].device_s, each[kind].floor_s)
            )
            own_host_s = each[kind].host_s.item()
            number = np.minimum(ends, after) - np.maximum(ends - self.stage_layers, first)
            count = np.maximum(number, 0)[:, None]  # of these layers on each stage, shape (stages, 1, B)
            least_s = (issued_s + host_s)[:, None] + least_s + (count - 1) * np.maximum(own_s, own_host_s)
            floor_s += count * own_s
            np.maximum(floor_s, least_s, out=floor_s, where=count > 0)
            device_s += count * own_s
            host_s += count[:, 0] * own_host_s
            first = after

    def _prepare_layers(self, ops: PieceOps, cluster: Cluster, host_s: Array) -> None:
        """Prepare each layer's segments before and after its all-gather, and the rings; set `host_s` in place."""
        size, ranks, shape = self.context, range(self.num_stages * self.context), ops.lengths.shape
        places = [[_place_of_gather(own) for own in kind] for kind in ops.layers]
        pairs = [list(zip(*one, strict=True)) for one in zip(ops.layers, places, strict=True)]
        self.before = _Segments([[segment_of(own[:at]) for own, at in kind] for kind in pairs], shape)
        self.after = _Segments([[segment_of(own[at + 1 :]) for own, at in kind] for kind in pairs], shape)
        gathers = [[cast(AllGather, own[at]) for own, at in kind] for kind in pairs]
        ring = _Links.of((cluster.path(rank, rank // size * size + (rank + 1) % size) for rank in ranks), size)
        kinds = [np.stack([np.broadcast_to(op.nbytes, shape) for op in ops], axis=1) for ops in gathers]
        nbytes = np.stack(kinds, axis=1)  # (M, kinds, context ranks, B)
        self.gathered_s = np.array([path.gather_step_s(nbytes, size) for path in ring.paths])
        self.ring_kind, self.gather_host_s = ring.kind, np.array([ops[0].host_s for ops in gathers])
        self.gather_latency_s, self.gather_launch_s = ring.values("gather_latency_s"), ring.values("gather_launch_s")
        self.previous = np.arange(-1, size - 1)  # the ring predecessor of each context rank
        self.num_layers = self.stage_layers[:, 0]
        self.ring_s = np.full((self.num_stages, *self.shape[1:]), -np.inf)
        ends, most = np.cumsum(self.num_layers), int(self.num_layers.max())
        layers = [self.kinds[end - count : end] for end, count in zip(ends, self.num_layers, strict=True)]
        self.kind_at = np.array([[*own, *own[-1:] * (most - len(own))] for own in layers])
        each_s = self.before.host_s + self.gather_host_s + self.after.host_s
        host_s[:, 0] = [each_s[list(own)].sum() for own in layers]

    def finish_s(self) -> Array:
        """Finish time of each rank, shape (ranks, B)."""
        begin_s = np.broadcast_to(_end_s(self.prologue, 0.0, 0.0), self.shape[1:])
        clock = self._in_steps(begin_s) if self.rendezvous or self.gathers else self._in_turn(begin_s)
        clock[-1, -1] = _end_s(self.epilogue, clock[-1, -1], self.host_s)
        return clock.reshape(-1, self.shape[-1])

    def _in_turn(self, begin_s: Array) -> Array:
        """Run one stage after another, with all pieces of a stage at once."""
        ends_s, there_s, into_s = [], np.full(1, -np.inf), self.into_s.reshape(-1, *self.shape)
        each = (one.reshape(self.num_stages, *self.shape[:2], -1) for one in (self.device_s, self.floor_s))
        sent_s = self.sent_s.reshape(self.num_stages, self.num_pieces, 1, -1)
        for device_s, floor_s, issued_s, busy_s, latency_s in zip(
            *each, sent_s, into_s[1:], self.latency_s[1:], strict=True
        ):
            done_s = _one_by_one(np.maximum(there_s + device_s, floor_s), device_s, begin_s)
            there_s = _one_by_one(np.maximum(done_s, issued_s) + busy_s, busy_s, -np.inf) + latency_s
            ends_s.append(done_s[-1])
        return np.stack(ends_s)

    def _in_steps(self, begin_s: Array) -> Array:
        """Run all stages that work in the same step; arrays of stages have one extra row at both ends."""
        apart, pieces, last = 2 if self.rendezvous else 1, self.num_pieces, self.num_stages - 1
        clock = np.concatenate([np.full((1, *begin_s.shape), -np.inf), *[begin_s[None]] * (last + 2)])
        link_s, arrival_s = np.full_like(clock, -np.inf), np.full_like(clock, -np.inf)
        for wave in range(apart * (pieces - 1) + last + 1):
            first = max(wave % apart, wave - apart * (pieces - 1))
            stage = np.arange(first, min(wave, last) + 1, apart)
            if not len(stage):
                continue
            before, own, after = (slice(first + by, stage[-1] + by + 1, apart) for by in range(3))
            piece = (wave - stage) // apart
            place, step = first * pieces + piece[0], max(1, apart * pieces - 1)
            at, onward = (slice(begin, begin + (len(stage) - 1) * step + 1, step) for begin in (place, place + pieces))
            if self.rendezvous:
                clock[before] = np.maximum(np.maximum(clock[before], clock[own]), self.received_s[at]) + self.into_s[at]
                there_s = clock[before] + self.latency_s[stage]
            else:
                there_s = np.maximum(clock[own], arrival_s[own])
            done_s = np.maximum(there_s + self.device_s[at], self.floor_s[at])
            if self.gathers:
                done_s = self._layers(stage, piece, done_s, self.layers_s[at].copy())
            issued_s = np.maximum(done_s, self.sent_s[at])
            clock[own] = issued_s if self.rendezvous else done_s
            link_s[after] = np.maximum(link_s[after], issued_s) + self.into_s[onward]
            arrival_s[after] = link_s[after] + self.latency_s[stage + 1]
        return clock[1:-1]

    def _layers(self, active: Index, piece: Index, clock: Array, host_s: Array) -> Array:
        """Run all layers of these stages; once every stage is in steady state, add the remaining layers in one step."""
        ring_s, counts = self.ring_s[active], self.num_layers[active]
        alike, states_s = len(self.gather_host_s) == 1, []
        for layer in range(int(counts.max())):
            on = np.flatnonzero(counts > layer)
            own, of, kind = active[on], piece[on], self.kind_at[active[on], layer]
            hosts_s = host_s[on]
            there_s = self.before.run(of, kind, clock[on], hosts_s)
            there_s, ring_s[on] = self._gather(own, of, kind, there_s, hosts_s, ring_s[on])
            clock[on] = self.after.run(of, kind, there_s, hosts_s)
            issued_s = hosts_s - host_s[on]
            host_s[on] = hosts_s
            if not alike or len(on) < len(active):
                continue
            states_s.append(np.concatenate([clock, ring_s], axis=1).swapaxes(0, 1))
            advance_s = steady_advance(states_s[-3:], issued_s[:, 0])
            if advance_s is not None:
                left = (counts - layer - 1)[:, None, None]
                clock = clock + left * advance_s[:, None]
                ring_s = ring_s + left * advance_s[:, None]
                break
        self.ring_s[active] = ring_s
        return clock

    def _gather(
        self, active: Index, piece: Index, kind: Index, clock: Array, host_s: Array, ring_s: Array
    ) -> tuple[Array, Array]:
        """Run an all-gather in each of these stages; return the times of ranks and those at which links are free."""
        host_s += self.gather_host_s[kind][:, None, None]
        own_s = np.maximum(clock, host_s) + self.gather_launch_s[active]
        held_s, clock = own_s, own_s
        both_s = np.empty_like(own_s)
        both_s[:, self.previous] = np.maximum(own_s[:, self.previous], own_s)
        holder = np.arange(self.context)
        for _ in range(self.context - 1):
            step_s = self.gathered_s[self.ring_kind[active], piece[:, None], kind[:, None], holder]
            ring_s = np.maximum(np.maximum(held_s, both_s), ring_s) + step_s
            held_s = (ring_s + self.gather_latency_s[active])[:, self.previous]
            holder = holder[self.previous]
            clock = np.maximum(clock, held_s)
        return clock, ring_s


def _one_by_one(least_s: Array, seconds: Array, begin_s: Array | float) -> Array:
    """Solve `end(m) = max(end(m - 1) + seconds(m), least(m))` along the first axis, starting at begin_s."""
    total_s = np.cumsum(seconds, axis=0)
    return np.asarray(total_s + np.maximum(begin_s, np.maximum.accumulate(least_s - total_s, axis=0)))


def _flat(values: Array) -> Array:
    """Merge the axes of stages and pieces."""
    return values.reshape(-1, *values.shape[2:])


def _end_s(segment: Segment, clock: Array | float, host_s: Array | float) -> Array:
    return np.maximum(clock + segment.device_s, host_s + segment.floor_s)


def _place_of_gather(ops: Sequence[Op]) -> int:
    return next(place for place, op in enumerate(ops) if isinstance(op, AllGather))
