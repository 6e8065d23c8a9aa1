"""The executor of pipelines: many partitions and layouts of the stages at once.

A stage computes each piece in a time that does not depend on other stages. If the stage is one rank, this is one
segment. The context ranks of a stage gather K and V in every layer; all layers together are then a matrix: a rank ends
at the latest of the times at which the ranks begin, each plus an entry of the matrix.

If messages overlap with computation and each stage is one rank, a stage waits only for the previous stage and for its
own previous piece: `end(m) = max(end(m - 1) + d(m), least(m))`, a cumulative maximum over the pieces m, one stage after
another. Otherwise stages work in steps: stage s and piece m with the same s + m do not depend on each other. A
rendezvous also holds the sender until the next stage has sent its previous piece on; then those with the same s + 2 m
are computed in one step. On a shared bus, the executor of a bus runs the segments. Results equal those of the executors
of programs up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrsim.compile import PieceOps
from kvrsim.execution import Execution
from kvrsim.executors.batch import Block, Message, Segment, Step, layer_matrix, rows_of, seconds_on, segment_of
from kvrsim.hardware import Cluster, Path
from kvrsim.kernels.cost import CostModel
from kvrsim.placement import PlacedScenario
from kvrsim.program import AllGather, Array, Op, Recv, slower

Index = npt.NDArray[np.intp]

_MOST_CONTEXT = 128  # most context ranks per stage; their matrices have this number squared of entries per piece


def run_pipeline(
    execution: Execution, pieces: Sequence[Array], cluster: Cluster, cost: CostModel, stage_layers: Index | None = None
) -> Array | None:
    """Finish time of each rank, seconds, shape (ranks, B); None if the pipeline can only be run as a program.

    This is the case with loads of a cached prefix, with layers that do not gather exactly once between context ranks,
    with very many context ranks, and with context ranks on a shared bus.
    pieces: tokens of each piece, arrays of shape (B,). stage_layers: layers per stage of each partition, shape (stages,
    B), for stages of one rank; None: those of the strategy.
    """
    ops = PieceOps.of(execution, pieces, cost)
    context = len(ops.embedding)
    gathers = int(context > 1)  # of each rank in a layer
    for ops_of_rank in chain.from_iterable(ops.layers):
        if sum(isinstance(op, AllGather) for op in ops_of_rank) != gathers:
            return None
    if any(chain.from_iterable(ops.loads)):
        return None
    if context > _MOST_CONTEXT or (context > 1 and cluster.shares_bandwidth):
        return None
    if stage_layers is None:
        stage_layers = np.array([[len(layers)] for layers in execution.stages])
    elif (stage_layers == stage_layers[:, :1]).all():
        stage_layers = stage_layers[:, :1]
    run = _PipelineRun(execution.placed, ops, stage_layers, cluster, cost)
    if cluster.shares_bandwidth:
        return run.on_a_bus()
    return run.finish_s()


class _Joint(NamedTuple):
    """Work of a stage's context ranks on all pieces, as a function of the times at which the ranks begin.

    Rank j ends at the latest of `begin_i + device_s[j, i]` over all ranks i, and of `host begin + floor_s[j]`.
    """

    device_s: Array  # shape (context ranks j, context ranks i, M, B)
    floor_s: Array  # shape (context ranks, M, B)
    host_s: float  # host time of each rank

    def then(self, other: _Joint) -> _Joint:
        """This work followed by another one; the maxima distribute over the sums."""
        both_s = other.device_s[:, 0, None] + self.device_s[0]
        for rank in range(1, len(self.device_s)):
            np.maximum(both_s, other.device_s[:, rank, None] + self.device_s[rank], out=both_s)
        floor_s = np.maximum((other.device_s + self.floor_s).max(axis=1), self.host_s + other.floor_s)
        return _Joint(both_s, floor_s, self.host_s + other.host_s)

    def repeat(self, times: int) -> _Joint:
        """This work several times in a row."""
        if times == 1:
            return self
        half = self.repeat(times // 2)
        doubled = half.then(half)
        if times % 2:
            return doubled.then(self)
        return doubled

    @classmethod
    def of(cls, ops: Sequence[Sequence[Op]], ring: Sequence[Path], shape: tuple[int, ...]) -> _Joint:
        """Work of ranks that may gather K and V.

        ring: path of each rank to the next one of the ring. shape: (pieces, partitions).
        """
        device_s, floor_s, hosts_s = layer_matrix(ops, lambda rank, _: ring[rank], shape)
        return cls(device_s, floor_s, hosts_s[0].item())


class _PipelineRun:
    """One evaluation: a stage receives a piece, prepares it, computes its layers, and sends it on.

    Arrays broadcast to the shape (stages, pieces, context ranks, B). Hosts never wait, so the times at which they issue
    operations are known in advance.
    """

    def __init__(
        self, scenario: PlacedScenario, ops: PieceOps, stage_layers: Index, cluster: Cluster, cost: CostModel
    ) -> None:
        """stage_layers: layers per stage, shape (stages, B), or (stages, 1) for all partitions."""
        self.ops = ops
        self.cluster = cluster
        self.stage_layers = stage_layers
        self.kinds = scenario.share.layer_kind_index
        self.message_s = scenario.host.message_s
        self.rendezvous = not scenario.sends_overlap
        self.num_stages = len(stage_layers)
        self.context = len(ops.embedding)
        self.num_pieces = len(ops.lengths)
        self.slowness = [scenario.cluster.slowness(rank) for rank in range(cluster.num_gpus)]
        prologue, epilogue = ops.ends(scenario, cost)
        self.prologue = segment_of(prologue)
        self.epilogue = segment_of(slower(epilogue, self.slowness[-1]))
        nbytes = np.stack(ops.sent_bytes)  # (context ranks, pieces, B)
        self.paths: list[list[Path]] = []  # by stage: paths of its ranks to the next stage
        self.sent_s: list[Array] = []  # by stage: seconds of the messages to the next one, (pieces, context ranks, B)
        for stage in range(self.num_stages - 1):
            ranks = range(stage * self.context, (stage + 1) * self.context)
            paths = [cluster.path(rank, rank + self.context) for rank in ranks]
            self.paths.append(paths)
            self.sent_s.append(seconds_on(rows_of(paths), Path.busy_s, nbytes).swapaxes(0, 1))
        # Device seconds by stage: an array of shape (pieces, B), or a matrix of shape (pieces, i, j, B).
        self.device_s: list[Array] = []
        if self.context == 1:
            self.floor_s, self.host_s = self._prepare_segments()
        else:
            self.floor_s, self.host_s = self._prepare_joints()

    def _way_in(self, stage: int, rank: int) -> tuple[Op, ...]:
        """Operations of a context rank of a stage before the layers."""
        ops = self.ops.preparation[rank]
        if stage == 0:
            ops = (*self.ops.embedding[rank], *ops)
        return tuple(slower(ops, self.slowness[stage * self.context + rank]))

    def _prepare_segments(self) -> tuple[Array, Array]:
        """Work of stages of one rank: floors, shape (stages, pieces, 1, B), and host seconds per piece (stages, B)."""
        shape = self.num_stages, *self.ops.lengths.shape
        way_in = [segment_of(self._way_in(stage, 0)) for stage in range(self.num_stages)]
        device_s = np.empty(shape)
        floor_s = np.empty(shape)
        host_s = np.empty(self.stage_layers.shape)
        for stage, segment in enumerate(way_in):
            device_s[stage] = segment.device_s
            floor_s[stage] = segment.floor_s
            host_s[stage] = segment.host_s
        ends = np.cumsum(self.stage_layers, axis=0)
        first = 0
        for kind, alike in groupby(self.kinds):
            after = first + len(list(alike))
            ops = self.ops.layers[kind][0]
            layer_by_slowness = {slowness: segment_of(slower(ops, slowness)) for slowness in set(self.slowness)}
            number = np.minimum(ends, after) - np.maximum(ends - self.stage_layers, first)
            for stage, slowness in enumerate(self.slowness):
                layer = layer_by_slowness[slowness]
                count = np.maximum(number[stage], 0)  # of these layers, shape (B,)
                least_s = host_s[stage] + layer.floor_s + (count - 1) * np.maximum(layer.device_s, layer.host_s)
                floor_s[stage] += count * layer.device_s
                np.maximum(floor_s[stage], least_s, out=floor_s[stage], where=count > 0)
                device_s[stage] += count * layer.device_s
                host_s[stage] += count * layer.host_s
            first = after
        self.device_s = list(device_s)
        return floor_s[:, :, None], host_s

    def _prepare_joints(self) -> tuple[Array, Array]:
        """Work of stages of several ranks; floors and host seconds as for stages of one rank."""
        size = self.context
        shape = self.ops.lengths.shape

        @cache
        def way_in(is_first: bool, ring: tuple[Path, ...], slowness: tuple[float, ...]) -> _Joint:
            ops_of_ranks = []
            for embedding, preparation, factor in zip(self.ops.embedding, self.ops.preparation, slowness, strict=True):
                ops = preparation
                if is_first:
                    ops = (*embedding, *ops)
                ops_of_ranks.append(slower(ops, factor))
            return _Joint.of(ops_of_ranks, ring, shape)

        @cache
        def layers(kind: int, count: int, ring: tuple[Path, ...], slowness: tuple[float, ...]) -> _Joint:
            if count > 1:
                return layers(kind, 1, ring, slowness).repeat(count)
            ops_of_ranks = [slower(ops, factor) for ops, factor in zip(self.ops.layers[kind], slowness, strict=True)]
            return _Joint.of(ops_of_ranks, ring, shape)

        @cache
        def whole(
            is_first: bool, kinds: tuple[int, ...], ring: tuple[Path, ...], slowness: tuple[float, ...]
        ) -> tuple[Array, Array, float]:
            work = way_in(is_first, ring, slowness)
            for kind, alike in groupby(kinds):
                work = work.then(layers(kind, len(list(alike)), ring, slowness))
            matrix = np.ascontiguousarray(work.device_s.transpose(2, 1, 0, 3))
            return matrix, work.floor_s.swapaxes(0, 1), work.host_s

        floors_s = []
        hosts_s = []
        for stage, (first, after) in enumerate(pairwise(accumulate(self.stage_layers[:, 0].tolist(), initial=0))):
            ranks = range(stage * size, (stage + 1) * size)
            ring = tuple(self.cluster.path(rank, ranks[(place + 1) % size]) for place, rank in enumerate(ranks))
            slowness = tuple(self.slowness[ranks.start : ranks.stop])
            device_s, floor_s, host_s = whole(stage == 0, self.kinds[first:after], ring, slowness)
            self.device_s.append(device_s)
            floors_s.append(floor_s)
            hosts_s.append([host_s])
        return np.stack(floors_s), np.array(hosts_s)

    def finish_s(self) -> Array:
        """Finish time of each rank, shape (ranks, B)."""
        begin_s = np.broadcast_to(_end_s(self.prologue, 0.0, 0.0), self.floor_s.shape[2:])
        later = np.minimum(np.arange(self.num_stages), 1)
        piece_s = self.host_s + self.message_s * (later + later[::-1])[:, None]  # host seconds per piece, (stages, B)
        begun_s = self.prologue.host_s + np.arange(self.num_pieces)[:, None] * piece_s[:, None]  # (stages, pieces, B)
        received_s = (begun_s + self.message_s * later[:, None, None])[:, :, None]
        issued_s = received_s + self.host_s[:, None, None] + self.message_s  # when hosts have issued the send
        if self.rendezvous or self.context > 1:
            clock = self._in_steps(begin_s, received_s, issued_s)
        else:
            clock = self._in_turn(begin_s, received_s, issued_s)
        last_host_s = self.prologue.host_s + self.num_pieces * piece_s[-1]
        clock[-1, -1] = _end_s(self.epilogue, clock[-1, -1], last_host_s)
        return clock.reshape(-1, clock.shape[-1])

    def on_a_bus(self) -> Array:
        """Finish time of each rank, shape (ranks, B), if the messages of all stages share one bandwidth."""
        from kvrsim.executors.bus import run_steps  # imported only when needed

        steps: Block = []
        for stage in range(self.num_stages):
            steps_of_stage: list[Step] = [self.prologue]
            for piece in range(self.num_pieces):
                if stage:
                    steps_of_stage.append(Recv(src=stage - 1, host_s=self.message_s, rendezvous=self.rendezvous))
                device_s = self.device_s[stage][piece]
                floor_s = self.floor_s[stage, piece, 0]
                steps_of_stage.append(Segment(device_s, floor_s, self.host_s[stage]))
                if stage < self.num_stages - 1:
                    sent_s = self.sent_s[stage][piece, 0]
                    latency_s = self.paths[stage][0].latency_s
                    message = Message(stage + 1, sent_s, latency_s, self.message_s, self.rendezvous, False)
                    steps_of_stage.append(message)
            steps.append(steps_of_stage)
        steps[-1].append(self.epilogue)
        return run_steps(steps, self.cluster, self.ops.lengths.shape[1])

    def _in_turn(self, begin_s: Array, received_s: Array, issued_s: Array) -> Array:
        """Run one stage after another, with all pieces of a stage at once."""
        ends_s = []
        there_s = np.full(1, -np.inf)
        last = self.num_stages - 1
        for stage, device_s in enumerate(self.device_s):
            floor_s = self.floor_s[stage, :, 0] + received_s[stage, :, 0]
            done_s = one_by_one(np.maximum(there_s + device_s, floor_s), device_s, begin_s[0])
            ends_s.append(done_s[-1:])
            if stage < last:
                busy_s = self.sent_s[stage][:, 0]
                left_s = one_by_one(np.maximum(done_s, issued_s[stage, :, 0]) + busy_s, busy_s, -np.inf)
                there_s = left_s + self.paths[stage][0].latency_s
        return np.stack(ends_s)

    def _in_steps(self, begin_s: Array, received_s: Array, issued_s: Array) -> Array:
        """Run all stages that work in the same step; arrays of stages have one extra row at both ends."""
        apart = 1
        if self.rendezvous:
            apart = 2
        pieces = self.num_pieces
        last = self.num_stages - 1
        issued_s[-1] = -np.inf  # the last stage sends nothing
        into_s, latency_s = self._messages()
        floor_s = _flat(self.floor_s + received_s)
        received_s = _flat(received_s)
        issued_s = _flat(issued_s)
        if self.rendezvous:
            np.maximum(floor_s, issued_s, out=floor_s)  # a stage ends when its host has issued the send
        if self.context == 1:
            pieces_s = _flat(np.stack(self.device_s))[:, None]
        clock = np.full((last + 3, *begin_s.shape), -np.inf)
        clock[1:] = begin_s
        link_s = np.full_like(clock, -np.inf)
        arrival_s = np.full_like(clock, -np.inf)
        step = max(1, apart * pieces - 1)  # from a stage's piece to that of the next stage in the same wave
        for wave in range(apart * (pieces - 1) + last + 1):
            first = max(wave % apart, wave - apart * (pieces - 1))
            stages = range(first, min(wave, last) + 1, apart)
            if not stages:
                continue
            before = slice(first, stages[-1] + 1, apart)
            here = slice(first + 1, stages[-1] + 2, apart)
            after = slice(first + 2, stages[-1] + 3, apart)
            place = first * pieces + (wave - first) // apart
            at = slice(place, place + (len(stages) - 1) * step + 1, step)
            if self.rendezvous:
                there_s = np.maximum(clock[before], clock[here])
                np.maximum(there_s, received_s[at], out=there_s)
                there_s += into_s[at]
                clock[before] = there_s
                there_s += latency_s[before]
            else:
                there_s = np.maximum(clock[here], arrival_s[here])
            if self.context == 1:
                there_s += pieces_s[at]
            else:
                work_s = np.stack([self.device_s[stage][(wave - stage) // apart] for stage in stages])
                there_s = (there_s[:, :, None] + work_s).max(axis=1)
            done_s = np.maximum(there_s, floor_s[at])
            clock[here] = done_s
            if not self.rendezvous:
                onward = slice(at.start + pieces, at.stop + pieces, step)
                link_s[after] = np.maximum(link_s[after], np.maximum(done_s, issued_s[at])) + into_s[onward]
                arrival_s[after] = link_s[after] + latency_s[here]
        return clock[1:-1]

    def _messages(self) -> tuple[Array, Array]:
        """Seconds of the messages into each stage, (stages x pieces + pieces, ranks, B), and latencies of their links.

        There are no messages into the first stage. A last row of zeros follows the last stage.
        """
        into_s = np.zeros((self.num_stages + 1, *self.floor_s.shape[1:]))
        latency_s = np.zeros((self.num_stages + 1, self.context, 1))
        for stage, paths in enumerate(self.paths, start=1):
            into_s[stage] = self.sent_s[stage - 1]
            latency_s[stage, :, 0] = [path.latency_s for path in paths]
        return _flat(into_s), latency_s


def one_by_one(least_s: Array, seconds: Array, begin_s: Array | float) -> Array:
    """Solve `end(m) = max(end(m - 1) + seconds(m), least(m))` along the first axis, starting at begin_s."""
    total_s = np.cumsum(seconds, axis=0)
    return np.asarray(total_s + np.maximum(begin_s, np.maximum.accumulate(least_s - total_s, axis=0)))


def _flat(values: Array) -> Array:
    """Merge the axes of stages and pieces."""
    return values.reshape(-1, *values.shape[2:])


def _end_s(segment: Segment, clock: Array | float, host_s: Array | float) -> Array:
    return np.maximum(clock + segment.device_s, host_s + segment.floor_s)
