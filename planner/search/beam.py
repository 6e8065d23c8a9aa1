"""A beam search over the pieces of a pipeline. It keeps the best few states of all stages at each end of a piece.

Pieces end at given nodes of the context. The time of a piece on a stage depends only on its two ends and on the layers
of the stage. So dynamic programming over the nodes finds the best pieces of any number: each node extends the labels of
all earlier nodes by one piece. A label holds the number of pieces, and the times at which each stage and each link are
free. A node keeps the labels with the least TTFT if the rest of the context is divided as in a reference partition.

The times are those of the executor of pipelines with three differences: equal layers of a stage are treated as
neighbours, the request is omitted because all pieces share it, and flows do not share bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrsim.execution import Execution
from kvrsim.executors.batch import Segment, segment_of
from kvrsim.executors.pipeline import one_by_one
from kvrsim.kernels.layer import LayerCosts
from kvrsim.program import Array, Op, slower
from kvrsim.strategies import Step, Strategy
from kvrsim.strategies.layers import before_step, embedding, last, layer_ops

Index = npt.NDArray[np.int64]

_LABELS = 8  # labels per node
_MEAN = 0.01  # weight of the mean clock relative to the latest clock, to order states with equal latest clocks
_CAPS = 2.0 ** -np.arange(0, 8, 0.5)  # limits of a piece's time, as shares of the longest piece's time
_ONE_STAGE = 0  # index of the only rank in a Step

Layers = tuple[int, ...]  # number of layers of each stage


class Pieces(NamedTuple):
    """Pieces with the TTFT that the beam search predicts."""

    ttft_s: float
    layers: Layers
    inner: Index  # indices of the nodes at which pieces end, without the last node


class _Stages(NamedTuple):
    """Seconds of every piece between two nodes (a cell), on each stage, for several layouts of layers."""

    device_s: Array  # shape (stages, layouts, cells)
    floor_s: Array  # least time from the host's begin to the device's end, shape (stages, layouts, cells)
    issued_s: Array  # host time per piece without messages, shape (stages, layouts)

    @property
    def rest_s(self) -> Array:
        """Seconds of each piece if neither device nor host waits for another stage."""
        return np.maximum(self.device_s, self.issued_s[..., None])


def layers_s(execution: Execution, lengths: Array, starts: Array) -> Array:
    """Seconds of a layer of each kind, shape (kinds, pieces): the maximum of device and host; arguments in tokens."""
    each = [
        segment_of(_layer_ops(execution.strategy, costs, lengths, starts)) for costs in execution.placed.layer_costs()
    ]
    return np.stack([np.maximum(one.device_s, one.host_s) for one in each])


def _layer_ops(strategy: Strategy, costs: LayerCosts, lengths: Array, starts: Array) -> tuple[Op, ...]:
    return tuple(layer_ops(strategy, Step(costs, (lengths,), (starts,)), _ONE_STAGE))


class Beam:
    """All pieces between nodes; `nodes`: tokens from 0 to the context, ascending.

    least: fewest tokens per piece, except for a single piece. most: the longest piece from each node; None: no limit.
    """

    def __init__(self, execution: Execution, nodes: Array, least: float, most: Array | None = None) -> None:
        self.scenario = execution.placed
        self.nodes = nodes
        self.num_stages = execution.cluster.num_gpus
        self.last = len(nodes) - 1
        begin, end = np.triu_indices(len(nodes), 1)
        lengths = nodes[end] - nodes[begin]
        allowed = (lengths >= least) | ((begin == 0) & (end == self.last))
        if most is not None:
            allowed &= lengths <= most[begin]
        order = np.flatnonzero(allowed)[np.argsort(end[allowed], kind="stable")]
        self.begin = begin[order]
        lengths = lengths[order]
        self.first = np.searchsorted(end[order], np.arange(len(nodes) + 1))  # by node: first cell that ends there
        starts = execution.request.cached_prefix + nodes[self.begin]
        costs = execution.placed.layer_costs()
        cost = execution.placed.cost
        self.slowness = [execution.cluster.slowness(stage) for stage in range(self.num_stages)]
        self.kinds = execution.placed.share.layer_kind_index
        prepared = before_step(execution.placed, lengths, starts + lengths, cost)
        # Operations before the layers of the first stage and of later stages, then those of each kind of layer.
        ops = [(*embedding(execution.placed, lengths, cost), *prepared), prepared]
        ops += [_layer_ops(execution.strategy, one, lengths, starts) for one in costs]
        work = {one: [segment_of(slower(own, one)) for own in ops] for one in dict.fromkeys(self.slowness)}
        self.work = [work[one] for one in self.slowness]  # operations per stage
        whole = slice(self.first[self.last], None)
        head = last(execution.placed, lengths[whole], starts[whole] + lengths[whole], cost)
        self.head = segment_of(slower(head, self.slowness[-1]))  # for pieces that end the context
        paths = [execution.cluster.path(stage, stage + 1) for stage in range(self.num_stages - 1)]
        busy_s = {path: path.busy_s(costs[0].activation_bytes(lengths)) for path in paths}
        # Messages behind each stage; behind the last stage, there is none.
        self.sent_s = np.stack([*(busy_s[path] for path in paths), np.zeros_like(lengths)])
        self.latency_s = np.array([*(path.latency_s for path in paths), 0.0])
        self.message_s = execution.placed.host.message_s
        self.holds = not execution.placed.sends_overlap

    def best(self, layouts: Sequence[Layers], references: Sequence[Index] = ()) -> list[Pieces]:
        """The best pieces for layouts of layers, fastest first.

        The time of the rest of the context is estimated from the references, which must be allowed partitions. By
        default, they are the partitions with the least sum of piece times.
        """
        if not references:
            references = self.least_sums(layouts[0])
        each = [layers for layers in layouts for _ in references]
        pieces = self._walk(each, [*references] * len(layouts))
        return sorted(pieces, key=lambda one: one.ttft_s)

    def least_sums(self, layers: Layers, number: int = 3) -> list[Index]:
        """Partitions with the least sum of piece times, each for a limit on the longest piece; at most `number`.

        On equal stages, TTFT is this sum plus the longest piece on each other stage.
        """
        work_s = self._stages([layers]).rest_s[:, 0]
        longest_s = work_s.max(axis=0)
        sent_s = self.sent_s.max(axis=0)
        longest_s = longest_s + sent_s if self.holds else np.maximum(longest_s, sent_s)
        shares = work_s.sum(axis=1)
        caps = _CAPS * longest_s.max()
        sums_s = np.full((len(self.nodes), len(caps)), np.inf)
        before = np.zeros((len(self.nodes), len(caps)), dtype=np.int64)
        sums_s[0] = 0.0
        for node in range(1, len(self.nodes)):
            cells = slice(self.first[node], self.first[node + 1])
            begin = self.begin[cells]
            if len(begin):
                until_s = np.where(longest_s[cells, None] <= caps, longest_s[cells, None] + sums_s[begin], np.inf)
                best = until_s.argmin(axis=0)
                sums_s[node], before[node] = until_s[best, np.arange(len(caps))], begin[best]
        ttft_s = sums_s[-1] + (shares.sum() / shares.max() - 1) * caps
        by_number: dict[int, Index] = {}
        for column in np.argsort(ttft_s, kind="stable"):
            if not np.isfinite(ttft_s[column]) or len(by_number) == number:
                break
            inner = list[int]()
            node = self.last
            while node := int(before[node, column]):
                inner.append(node)
            by_number.setdefault(len(inner), np.array(inner[::-1], dtype=np.int64))
        return list(by_number.values())

    def _stages(self, layouts: Sequence[Layers]) -> _Stages:
        known: dict[tuple[int, range], Segment] = {}
        shape = (self.num_stages, len(layouts), len(self.begin))
        device_s = np.empty(shape)
        floor_s = np.empty(shape)
        issued_s = np.empty(shape[:2])
        for column, layers in enumerate(layouts):
            ends = accumulate(layers, initial=0)
            for stage, (first, after) in enumerate(pairwise(ends)):
                key = stage, range(first, after)
                if key not in known:
                    known[key] = self._stage(*key)
                one = known[key]
                device_s[stage, column], floor_s[stage, column] = one.device_s, one.floor_s
                issued_s[stage, column] = one.host_s
        return _Stages(device_s, floor_s, issued_s)

    def _stage(self, stage: int, layers: range) -> Segment:
        """The times of all pieces on a stage with these layers."""
        whole = self.work[stage][min(stage, 1)]
        kinds = self.work[stage][2:]
        for kind, count in Counter(self.kinds[layers.start : layers.stop]).items():
            one = kinds[kind]
            assert one.floor_s is not None
            floor_s = one.floor_s + (count - 1) * np.maximum(one.device_s, one.host_s)
            whole = whole.then(Segment(count * one.device_s, floor_s, count * one.host_s))
        return whole

    def _rest_s(self, stages: _Stages, references: Sequence[Index]) -> Array:
        """Remaining seconds after a stage, or the link behind it, is free at a node, from one reference per layout.

        The shape is (2, stages, layouts, nodes): stages, then links. Values are linear between nodes of the reference.
        """
        rest_s = np.zeros((2, self.num_stages, len(references), len(self.nodes)))
        work_s = stages.rest_s
        columns: dict[bytes, list[int]] = {}
        for column, inner in enumerate(references):
            columns.setdefault(inner.tobytes(), []).append(column)
        for same in columns.values():
            at = np.concatenate([[0], references[same[0]], [self.last]])
            cells = [self._cell(*pair) for pair in pairwise(at)]
            own_s = self._rest_of(work_s[:, same][:, :, cells], self.sent_s[:, cells])
            after = np.minimum(np.searchsorted(at, np.arange(self.last + 1), side="right"), len(at) - 1)
            begin = self.nodes[at[after - 1]]
            end = self.nodes[at[after]]
            share = (self.nodes - begin) / (end - begin)
            rest_s[:, :, same] = own_s[..., after - 1] + share * (own_s[..., after] - own_s[..., after - 1])
        return rest_s

    def _rest_of(self, work_s: Array, sent_s: Array) -> Array:
        """Seconds from each piece to the end, shape (2, stages, layouts, pieces + 1): after stages, then after links.

        work_s: shape (stages, layouts, pieces); sent_s: (stages, pieces).
        """
        shape = (*work_s.shape[:2], work_s.shape[2] + 1)
        rest_s = np.zeros(shape)
        link_s = np.zeros(shape)
        latency_s = self.latency_s[:, None]
        for piece in range(work_s.shape[2] - 1, -1, -1):
            own_s = work_s[:, :, piece]
            busy_s = sent_s[:, None, piece]
            next_s = rest_s[:, :, piece + 1]
            if self.holds:
                least_s = own_s + busy_s + next_s
            else:
                least_s = own_s + np.maximum(next_s, busy_s + link_s[:, :, piece + 1])
            onward_s = own_s + busy_s + latency_s
            begun_s = one_by_one(least_s[::-1], onward_s[::-1], -np.inf)[::-1]
            if self.holds:
                rest_s[0, :, piece], rest_s[1:, :, piece] = begun_s[0], (begun_s - own_s)[:-1]
                continue
            rest_s[:, :, piece] = begun_s
            after_s = np.maximum(link_s[:-1, :, piece + 1], latency_s[:-1] + begun_s[1:])
            link_s[:-1, :, piece] = busy_s[:-1] + after_s
        return np.stack([rest_s, link_s])

    def _cell(self, begin: int, end: int) -> int:
        first = self.first[end]
        cell = first + int(np.searchsorted(self.begin[first : self.first[end + 1]], begin))
        assert self.begin[cell] == begin, "a piece of the reference that is not allowed"
        return int(cell)

    def _walk(self, layouts: Sequence[Layers], references: Sequence[Index]) -> list[Pieces]:
        """Visit all nodes; return the labels of the last one. Each layout has a reference for the remaining time."""
        stages = self._stages(layouts)
        walk = _Walk(self, stages)
        rest_s = self._rest_s(stages, references)
        count = len(references)
        rows = np.arange(len(references))[:, None]
        # Times at which stages and, if messages overlap with computation, the links behind them are free. The last row
        # is the number of pieces.
        parts = 1 if self.holds else 2
        state = np.full((parts * self.num_stages + 1, count, len(self.nodes), _LABELS), np.inf)
        state[:, :, 0, 0] = -np.inf
        state[: self.num_stages, :, 0, 0] = 0.0
        state[-1] = 0.0
        rest_s = rest_s[:parts].reshape(-1, *rest_s.shape[2:])
        before = np.zeros(state.shape[1:], dtype=np.int64)  # previous node times _LABELS, plus label
        for node in range(1, len(self.nodes)):
            cells = slice(self.first[node], self.first[node + 1])
            begin = self.begin[cells]
            if not len(begin):
                continue
            adjacent = begin[-1] - begin[0] + 1 == len(begin)
            now = state[:, :, begin[0] : begin[-1] + 1].copy() if adjacent else state[:, :, begin]
            now_s = now[:-1].reshape(parts, self.num_stages, *now.shape[1:])
            begin_s = walk.each_s * now[-1]
            walk.advance(cells, now_s, begin_s)
            if node == self.last:
                assert self.head.floor_s is not None
                issued_s = begin_s[-1] + walk.each_s[-1]
                now_s[0, -1] = np.maximum(
                    now_s[0, -1] + self.head.device_s[:, None], issued_s + self.head.floor_s[:, None]
                )
                score = now_s[0, -1]
            else:
                ends_s = now[:-1] + rest_s[..., node, None, None]
                score = np.add.reduce(ends_s[: self.num_stages], axis=0)
                score *= _MEAN / self.num_stages
                score += np.maximum.reduce(ends_s, axis=0)
            now[-1] += 1
            chosen = score.reshape(count, -1).argpartition(_LABELS - 1, axis=1)[:, :_LABELS]
            state[:, :, node] = now.reshape(*now.shape[:2], -1)[:, rows, chosen]
            before[:, node] = begin[chosen // _LABELS] * _LABELS + chosen % _LABELS
        ttft_s = state[self.num_stages - 1, :, self.last]
        labels = before.tolist()
        return [
            Pieces(float(ttft_s[column, label]), layouts[column], self._traced(labels[column], int(label)))
            for column, label in zip(*np.nonzero(np.isfinite(ttft_s)), strict=True)
        ]

    def _traced(self, before: Sequence[Sequence[int]], label: int) -> Index:
        """The inner nodes of a label of the last node, in ascending order."""
        inner = list[int]()
        node = self.last
        while True:
            node, label = divmod(before[node][label], _LABELS)
            if not node:
                return np.array(inner[::-1], dtype=np.int64)
            inner.append(node)


class _Walk:
    """One piece further, for all stages at once.

    A stage begins a piece when it is free and the piece has come from the previous stage. So it ends at the latest of
    an own time and of the previous stage's end plus known seconds: a cumulative maximum over the stages, after the
    seconds `through_s` from the begin of the first stage are subtracted.
    """

    def __init__(self, beam: Beam, stages: _Stages) -> None:
        self.holds = beam.holds
        self.message_s = beam.message_s
        self.sent_s = beam.sent_s[:-1, None]
        into_s = self.sent_s + beam.latency_s[:-1, None, None]
        self.through_s = stages.device_s.copy()
        self.through_s[1:] += into_s
        np.cumsum(self.through_s, axis=0, out=self.through_s)
        place = np.arange(beam.num_stages)[:, None]
        last = beam.num_stages - 1
        received_s = beam.message_s * (place > 0)
        posted_s = received_s + stages.issued_s + beam.message_s  # when the host has issued the send
        self.each_s = (received_s + stages.issued_s + beam.message_s * (place < last))[..., None, None]
        self.posted_s = posted_s[:-1, :, None, None]
        self.own_s = stages.device_s - self.through_s
        self.onward_s = self.own_s[1:] + into_s
        self.floor_s = stages.floor_s + received_s[..., None]
        if self.holds:
            np.maximum(self.floor_s[:-1], posted_s[:-1, :, None], out=self.floor_s[:-1])
        self.floor_s -= self.through_s

    def advance(self, cells: slice, free_s: Array, begin_s: Array) -> None:
        """Change the times at which stages and links are free; begin_s: when hosts begin the piece.

        free_s: shape (1 or 2, stages, layouts, pieces, labels).
        """
        own_s, onward_s, floor_s, through_s, sent_s = (
            one[:, :, cells, None] for one in (self.own_s, self.onward_s, self.floor_s, self.through_s, self.sent_s)
        )
        clock_s = free_s[0]
        least_s = clock_s + own_s
        if self.holds:
            there_s = np.maximum(clock_s[1:], begin_s[1:] + self.message_s)
            np.add(there_s, onward_s, out=least_s[1:])
        else:
            there_s = np.maximum(free_s[1, :-1], begin_s[:-1] + self.posted_s)
            np.maximum(least_s[1:], there_s + onward_s, out=least_s[1:])
        np.maximum(least_s, begin_s + floor_s, out=least_s)
        for earlier_s, later_s in pairwise(least_s):  # faster than a cumulative maximum along the first axis
            np.maximum(earlier_s, later_s, out=later_s)
        np.add(least_s, through_s, out=clock_s)
        np.maximum(clock_s[:-1], there_s, out=free_s[-1, :-1])
        free_s[-1, :-1] += sent_s
