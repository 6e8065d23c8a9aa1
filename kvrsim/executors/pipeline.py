"""The executor of pipelines whose stages are single ranks: many partitions and layouts of the stages at once.

If messages overlap with computation, a stage waits only for the previous stage and for its own previous piece: `end(m)
= max(end(m - 1) + d(m), least(m))`, a cumulative maximum over the pieces m, one stage after another. A rendezvous also
holds the sender until the next stage has sent its previous piece on. Then all stages s and pieces m with the same s + 2
m do not depend on each other and are computed in one step. Results equal those of the executors of programs up to
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvrsim.executors.batch import Segment, segment_of
from kvrsim.hardware import Cluster
from kvrsim.kernels.cost import CostModel
from kvrsim.program import Array, Op, slower
from kvrsim.scenario import Scenario
from kvrsim.strategies.base import Strategy
from kvrsim.strategies.pipeline import PieceOps, context_ranks, program, stages

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

    This is the case with several ranks per stage, with loads of a cached prefix, or with shared links.
    pieces: tokens of each piece, arrays of shape (B,). stage_layers: layers per stage of each partition, shape (stages,
    B); None: those of the strategy.
    """
    if strategy.pipeline is not program or cluster.shares_bandwidth or context_ranks(strategy) > 1:
        return None
    ops = PieceOps.of(scenario, strategy, pieces, cost)
    if any(load for ranks in ops.loads for load in ranks):
        return None
    if stage_layers is None:
        each = stages(strategy, len(scenario.share.layer_kind_index), cluster.num_gpus)
        stage_layers = np.array([[len(layers)] for layers in each])
    elif (stage_layers == stage_layers[:, :1]).all():
        stage_layers = stage_layers[:, :1]
    return _PipelineRun(scenario, ops, stage_layers, cluster, cost).finish_s()


class _PipelineRun:
    """One evaluation: a stage receives a piece, prepares it, computes its layers, and sends it on.

    Arrays broadcast to the shape (stages, pieces, B). Hosts never wait, so the times at which they issue operations are
    known in advance.
    """

    def __init__(
        self, scenario: Scenario, ops: PieceOps, stage_layers: Index, cluster: Cluster, cost: CostModel
    ) -> None:
        """stage_layers: layers per stage, shape (stages, B), or (stages, 1) for all partitions."""
        num_stages, num_pieces = len(stage_layers), len(ops.lengths)
        shape = num_stages, *ops.lengths.shape
        slowness = np.array([scenario.cluster.slowness(stage) for stage in range(num_stages)]).reshape(-1, 1, 1)
        is_even = bool((slowness == 1.0).all())
        prologue, epilogue = ops.ends(scenario, cost)
        self.prologue, self.epilogue = segment_of(prologue), segment_of(slower(epilogue, slowness[-1, 0]))

        def segment(own: Sequence[Op]) -> Segment:
            return segment_of(own if is_even else slower(own, slowness))

        first, later = segment((*ops.embedding[0], *ops.preparation[0])), segment(ops.preparation[0])
        ways = (first, slice(1)), (later, slice(1, None))
        self.device_s, self.floor_s = (
            np.concatenate([np.broadcast_to(getattr(one, name), shape)[at] for one, at in ways])
            for name in ("device_s", "floor_s")
        )
        self.rendezvous = not scenario.sends_overlap
        # Host seconds per piece, shape (stages, 1 or B).
        self.issued_s = np.array([[first.host_s], *[[later.host_s]] * (num_stages - 1)])
        self._add_layers(scenario.share.layer_kind_index, [segment(ranks[0]) for ranks in ops.layers], stage_layers)
        paths = [cluster.path(stage, stage + 1) for stage in range(num_stages - 1)]
        busy_s = {path: path.busy_s(ops.sent_bytes[0]) for path in paths}
        # Seconds of the messages into each stage; the first stage receives nothing.
        self.into_s = np.stack([np.zeros(shape[1:]), *(busy_s[path] for path in paths)])
        self.latency_s = np.array([0.0, *(path.latency_s for path in paths)])[:, None]
        message_s = scenario.host.message_s
        receives, sends = (np.array(one)[:, None] for one in ([0, *[1] * len(paths)], [*[1] * len(paths), 0]))
        all_s = self.issued_s + message_s * (receives + sends)  # host seconds per piece, (stages, 1 or B)
        begun_s = self.prologue.host_s + np.arange(num_pieces)[:, None] * all_s[:, None]
        self.host_s = self.prologue.host_s + num_pieces * all_s[-1]  # host time of the last stage after all pieces
        self.received_s = begun_s + (message_s * receives)[:, None]
        self.sent_s = self.received_s + (self.issued_s + message_s)[:, None]
        self.sent_s[-1] = -np.inf  # the last stage sends nothing
        self.floor_s += self.received_s

    def _add_layers(self, kinds: Sequence[int], layers: Sequence[Segment], stage_layers: Index) -> None:
        """Append each stage's layers to its work per piece. layers: one segment per kind of layer."""
        ends, start = np.cumsum(stage_layers, axis=0), 0
        for kind, alike in groupby(kinds):
            own, end = layers[kind], start + len(list(alike))
            # Number of layers of this kind in each stage.
            count = np.maximum(np.minimum(ends, end) - np.maximum(ends - stage_layers, start), 0)
            times = count[:, None]
            least_s = self.issued_s[:, None] + own.floor_s + (times - 1) * np.maximum(own.device_s, own.host_s)
            self.floor_s += times * own.device_s
            np.maximum(self.floor_s, least_s, out=self.floor_s, where=times > 0)
            self.device_s += times * own.device_s
            self.issued_s = self.issued_s + count * own.host_s
            start = end

    def finish_s(self) -> Array:
        """Finish time of each rank, shape (ranks, B)."""
        begin_s = np.broadcast_to(_end_s(self.prologue, 0.0, 0.0), self.into_s.shape[2:])
        clock = self._in_steps(begin_s) if self.rendezvous else self._in_turn(begin_s)
        clock[-1] = _end_s(self.epilogue, clock[-1], self.host_s)
        return clock

    def _in_turn(self, begin_s: Array) -> Array:
        """Run one stage after another, with all pieces of a stage at once."""
        ends_s, there_s = [], np.zeros(1)
        for stage, latency_s in enumerate([*self.latency_s[1:], 0.0]):
            device_s = self.device_s[stage]
            done_s = _one_by_one(np.maximum(there_s + device_s, self.floor_s[stage]), device_s, begin_s)
            ends_s.append(done_s[-1])
            if stage + 1 < len(self.into_s):
                busy_s = self.into_s[stage + 1]
                there_s = _one_by_one(np.maximum(done_s, self.sent_s[stage]) + busy_s, busy_s, -np.inf) + latency_s
        return np.stack(ends_s)

    def _in_steps(self, begin_s: Array) -> Array:
        """Run the stages step by step; the first clock belongs to a source before the first stage."""
        num_stages, num_pieces = self.into_s.shape[:2]
        clock = np.stack([begin_s] * (num_stages + 1))
        for step in range(2 * (num_pieces - 1) + num_stages):
            stage = np.arange(max(step % 2, step - 2 * (num_pieces - 1)), min(step + 1, num_stages), 2)
            at = stage, (step - stage) // 2
            both_s = np.maximum(np.maximum(clock[stage], clock[stage + 1]), self.received_s[at])
            clock[stage] = both_s + self.into_s[at]
            done_s = np.maximum(clock[stage] + self.latency_s[stage] + self.device_s[at], self.floor_s[at])
            clock[stage + 1] = np.maximum(done_s, self.sent_s[at])
        return clock[1:]


def _one_by_one(least_s: Array, seconds: Array, begin_s: Array | float) -> Array:
    """Solve `end(m) = max(end(m - 1) + seconds(m), least(m))` along the first axis, starting at begin_s."""
    total_s = np.cumsum(seconds, axis=0)
    return np.asarray(total_s + np.maximum(begin_s, np.maximum.accumulate(least_s - total_s, axis=0)))


def _end_s(segment: Segment, clock: Array | float, host_s: Array | float) -> Array:
    return np.maximum(clock + segment.device_s, host_s + segment.floor_s)
