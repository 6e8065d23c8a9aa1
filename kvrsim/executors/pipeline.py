"""The executor of pipelines: all stages that are at work at the same time take a step together.

A stage takes piece m no earlier than the stage before has done it, so that stage s and piece m with the same s + m do
not wait for each other. Arrays hold all stages, their context ranks and all partitions of a batch: shape (stages,
context ranks, B). A rendezvous holds the sender, too, until the next stage has handed its own piece on; then those with
the same s + 2 m take a step together. Equal to the executors of programs to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvrsim.executors.batch import NO_WORK, Segment, segment_of
from kvrsim.executors.steady import steady_advance
from kvrsim.hardware import Cluster, Path
from kvrsim.kernels.cost import CostModel
from kvrsim.program import AllGather, Array, Op
from kvrsim.scenario import Scenario
from kvrsim.strategies.base import Strategy
from kvrsim.strategies.pipeline import PieceOps, program, stages

Index = npt.NDArray[np.intp]


def run_pipeline(
    scenario: Scenario, strategy: Strategy, pieces: Sequence[Array], cluster: Cluster, cost: CostModel
) -> Array | None:
    """When each rank has finished, seconds, shape (ranks, B); None if only its program can be run.

    That is a pipeline whose layers wait for different things, that loads a cached prefix, or whose links are shared.
    pieces: tokens of each, arrays of shape (B,).
    """
    if strategy.pipeline is not program or cluster.shares_bandwidth:
        return None
    ops = PieceOps.of(scenario, strategy, pieces, cost)
    gathers = {sum(isinstance(op, AllGather) for op in own) for ranks in ops.layers for own in ranks}
    if gathers != {int(len(ops.embedding) > 1)} or any(load for ranks in ops.loads for load in ranks):
        return None
    return _PipelineRun(scenario, strategy, ops, cluster, cost).finish_s()


class _Segments:
    """Segments of all pieces, kinds and context ranks; arrays (M, kinds, context ranks, B)."""

    def __init__(self, kinds: Sequence[Sequence[Segment]], shape: tuple[int, ...]) -> None:
        """kinds: by kind, by context rank; shape: pieces, and partitions."""

        def together(name: str) -> Array:
            rows = [np.stack([np.broadcast_to(getattr(one, name), shape) for one in ranks], axis=1) for ranks in kinds]
            return np.stack(rows, axis=1)

        self.device_s, self.floor_s = together("device_s"), together("floor_s")
        self.host_s = np.array([ranks[0].host_s for ranks in kinds])

    def run(self, piece: Index, kind: Index, clock: Array, host_s: Array) -> Array:
        """When each stage has computed its segment; adds to `host_s` what the hosts issue."""
        end_s = np.maximum(clock + self.device_s[piece, kind], self.floor_s[piece, kind] + host_s)
        host_s += self.host_s[kind][:, None, None]
        return end_s


@dataclass(frozen=True, slots=True)
class _Links:
    """Links of the ranks, by stage and context rank: few kinds of path, and the kind of each."""

    paths: tuple[Path, ...]
    kind: Index  # shape (stages, context ranks)

    @classmethod
    def of(cls, paths: Iterable[Path], context: int) -> _Links:
        """In the order of the ranks."""
        kinds: dict[Path, int] = {}
        kind = [kinds.setdefault(path, len(kinds)) for path in paths]
        return cls(tuple(kinds), np.array(kind, dtype=np.intp).reshape(-1, context))

    def values(self, name: str) -> Array:
        """An attribute of each path, shape (stages, context ranks, 1)."""
        return np.array([getattr(path, name) for path in self.paths] or [0.0])[self.kind][..., None]


class _PipelineRun:
    """One evaluation: when each rank, its link to the next stage and its link in the ring of its stage are free."""

    def __init__(
        self, scenario: Scenario, strategy: Strategy, ops: PieceOps, cluster: Cluster, cost: CostModel
    ) -> None:
        prologue, epilogue = map(segment_of, ops.ends(scenario, cost))
        layer_kinds = scenario.share.layer_kind_index
        layers = [
            tuple(layer_kinds[layer] for layer in rows) for rows in stages(strategy, len(layer_kinds), cluster.num_gpus)
        ]
        self.epilogue, self.rendezvous, self.message_host_s = (
            epilogue,
            not scenario.sends_overlap,
            scenario.host.message_s,
        )
        self.num_stages, self.context, self.num_pieces = len(layers), len(ops.embedding), len(ops.lengths)
        shape = self.num_stages, self.context, ops.lengths.shape[1]
        self.clock = np.array(np.broadcast_to(_end_s(prologue, 0.0, 0.0), shape))
        self.host_s = np.full((self.num_stages, 1, 1), prologue.host_s)
        self.link_s, self.ring_s = np.full(shape, -np.inf), np.full(shape, -np.inf)
        self.arrival_s = np.full(shape, -np.inf)  # of what the stage has sent last
        ranks = range(self.num_stages * self.context)
        onward = _Links.of((cluster.path(rank, rank + self.context) for rank in ranks[: -self.context]), self.context)
        sent_bytes = np.stack(ops.sent_bytes, axis=1)
        self.sent_s = np.array([path.busy_s(sent_bytes) for path in onward.paths])
        self.sent_kind, self.latency_s = onward.kind, onward.values("latency_s")
        both = [(*embedding, *own) for embedding, own in zip(ops.embedding, ops.preparation, strict=True)]
        size = ops.lengths.shape
        self.way_in = _Segments([[segment_of(own) for own in kind] for kind in (both, ops.preparation)], size)
        self.gathers = self.context > 1
        if self.gathers:  # a segment up to the all-gather of each layer, and one behind it
            places = [[_place_of_gather(own) for own in kind] for kind in ops.layers]
            pairs = [list(zip(*both, strict=True)) for both in zip(ops.layers, places, strict=True)]
            self.before = _Segments([[segment_of(own[:at]) for own, at in kind] for kind in pairs], size)
            self.after = _Segments([[segment_of(own[at + 1 :]) for own, at in kind] for kind in pairs], size)
            self._prepare_rings(cluster, [[own[at] for own, at in kind] for kind in pairs], size)  # type: ignore[misc]
        else:  # one segment of all layers of a stage
            patterns = list(dict.fromkeys(layers))
            self.before = _Segments([[_in_a_row(pattern, ops.layers)] for pattern in patterns], size)
            layers = [(patterns.index(pattern),) for pattern in layers]
        self.num_layers = np.array([len(kinds) for kinds in layers])
        most = int(self.num_layers.max())
        self.kind_at = np.array([[*kinds, *kinds[-1:] * (most - len(kinds))] for kinds in layers])

    def _prepare_rings(self, cluster: Cluster, gathers: Sequence[Sequence[AllGather]], shape: tuple[int, ...]) -> None:
        size, ranks = self.context, range(self.num_stages * self.context)
        ring = _Links.of((cluster.path(rank, rank // size * size + (rank + 1) % size) for rank in ranks), size)
        kinds = [np.stack([np.broadcast_to(op.nbytes, shape) for op in ops], axis=1) for ops in gathers]
        nbytes = np.stack(kinds, axis=1)  # (M, kinds, context ranks, B)
        self.gathered_s = np.array([path.gather_step_s(nbytes, size) for path in ring.paths])
        self.ring_kind, self.gather_host_s = ring.kind, np.array([ops[0].host_s for ops in gathers])
        self.gather_latency_s, self.gather_launch_s = ring.values("gather_latency_s"), ring.values("gather_launch_s")
        self.previous = np.arange(-1, size - 1)  # of each context rank

    def finish_s(self) -> Array:
        """When each rank has finished, shape (ranks, B)."""
        apart = 2 if self.rendezvous else 1  # s + apart x m is the same for those that take a step together
        for wave in range(apart * (self.num_pieces - 1) + self.num_stages):
            first = max(0, wave - apart * (self.num_pieces - 1))
            active = np.arange(first + (wave - first) % apart, min(wave, self.num_stages - 1) + 1, apart)
            if len(active):
                self._take(active, (wave - active) // apart)
        self.clock[-1, -1] = _end_s(self.epilogue, self.clock[-1, -1], self.host_s[-1, 0])
        return self.clock.reshape(-1, self.clock.shape[-1])

    def _take(self, active: Index, piece: Index) -> None:
        """Each of these stages receives a piece, computes its layers, and sends it on."""
        receivers = active > 0
        if receivers.any():
            self._receive(active[receivers], piece[receivers])
        host_s = self.host_s[active]
        clock = self.way_in.run(piece, np.minimum(active, 1), self.clock[active], host_s)
        if self.gathers:
            clock = self._layers(active, piece, clock, host_s)
        else:
            clock = self.before.run(piece, self.kind_at[active, 0], clock, host_s)
        self.clock[active], self.host_s[active] = clock, host_s
        senders = active[active < self.num_stages - 1]
        if len(senders):
            self._send(senders, piece[: len(senders)])

    def _receive(self, active: Index, piece: Index) -> None:
        self.host_s[active] += self.message_host_s
        src = active - 1
        if not self.rendezvous:
            self.clock[active] = np.maximum(self.clock[active], self.arrival_s[src])
            return
        begin_s = np.maximum(self.clock[src], np.maximum(self.clock[active], self.host_s[active]))
        self.clock[src] = begin_s + self._sent_s(src, piece)
        self.clock[active] = self.clock[src] + self.latency_s[src]

    def _send(self, active: Index, piece: Index) -> None:
        self.host_s[active] += self.message_host_s
        issued_s = np.maximum(self.clock[active], self.host_s[active])
        if self.rendezvous:
            self.clock[active] = issued_s
            return
        self.link_s[active] = np.maximum(self.link_s[active], issued_s) + self._sent_s(active, piece)
        self.arrival_s[active] = self.link_s[active] + self.latency_s[active]

    def _sent_s(self, src: Index, piece: Index) -> Array:
        """Activations on their link."""
        return np.asarray(self.sent_s[self.sent_kind[src], piece[:, None], np.arange(self.context)])

    def _layers(self, active: Index, piece: Index, clock: Array, host_s: Array) -> Array:
        """All layers of each of these stages; those that are left in steady state are one step."""
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
                host_s += left * issued_s
                break
        self.ring_s[active] = ring_s
        return clock

    def _gather(
        self, active: Index, piece: Index, kind: Index, clock: Array, host_s: Array, ring_s: Array
    ) -> tuple[Array, Array]:
        """An all-gather in each of these stages, as of BatchEvaluator: when ranks go on, and links are free."""
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


def _end_s(segment: Segment, clock: Array | float, host_s: Array | float) -> Array:
    assert segment.floor_s is not None
    return np.maximum(clock + segment.device_s, host_s + segment.floor_s)


def _place_of_gather(ops: Sequence[Op]) -> int:
    return next(place for place, op in enumerate(ops) if isinstance(op, AllGather))


def _in_a_row(pattern: Sequence[int], kinds: Sequence[Sequence[Sequence[Op]]]) -> Segment:
    """Layers of these kinds on one rank as one segment."""
    segment = NO_WORK
    for kind, rows in groupby(pattern):
        one, count = segment_of(kinds[kind][0]), len(list(rows))
        assert one.floor_s is not None
        floor_s = one.floor_s + (count - 1) * np.maximum(one.device_s, one.host_s)
        segment = segment.then(Segment(count * one.device_s, floor_s, count * one.host_s))
    return segment
