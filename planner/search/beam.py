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
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from kvrsim.executors.batch import Segment, segment_of
from kvrsim.kernels.layer import LayerCosts
from kvrsim.program import Array, Op, slower
from kvrsim.scenario import Scenario
from kvrsim.strategies import Step, Strategy
from kvrsim.strategies.layers import before_step, embedding, last, layer_ops

Index = npt.NDArray[np.int64]

_LABELS = 8  # labels per node
_MEAN = 0.01  # weight of the mean clock relative to the latest clock, to order states with equal latest clocks
_CAPS = 2.0 ** -np.arange(0, 8, 0.5)  # limits of a piece's time, as shares of the longest piece's time
_ONE_STAGE = 0  # index of the only rank in a Step

Layers = tuple[int, ...]  # number of layers of each stage


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces with the TTFT that the beam search predicts."""

    ttft_s: float
    layers: Layers
    inner: Index  # indices of the nodes at which pieces end, without the last node


@dataclass(frozen=True, slots=True)
class _Stages:
    """Seconds of every piece between two nodes (a cell), on each stage, for several layouts of layers."""

    device_s: Array  # shape (stages, layouts, cells)
    floor_s: Array  # least time from the host's begin to the device's end, shape (stages, layouts, cells)
    issued_s: Array  # host time per piece without messages, shape (stages, layouts)

    @property
    def rest_s(self) -> Array:
        """Seconds of each piece if neither device nor host waits for another stage."""
        return np.maximum(self.device_s, self.issued_s[..., None])


def layers_s(scenario: Scenario, strategy: Strategy, lengths: Array, starts: Array) -> Array:
    """Seconds of a layer of each kind, shape (kinds, pieces): the maximum of device and host; arguments in tokens."""
    each = [segment_of(_layer_ops(strategy, costs, lengths, starts)) for costs in scenario.layer_costs()]
    return np.stack([np.maximum(one.device_s, one.host_s) for one in each])


def _layer_ops(strategy: Strategy, costs: LayerCosts, lengths: Array, starts: Array) -> tuple[Op, ...]:
    return tuple(layer_ops(strategy, Step(costs, (lengths,), (starts,)), _ONE_STAGE))


class Beam:
    """All pieces between nodes; `nodes`: tokens from 0 to the context, ascending.

    least: fewest tokens per piece, except for a single piece. most: the longest piece from each node; None: no limit.
    """

    def __init__(
        self, scenario: Scenario, strategy: Strategy, nodes: Array, least: float, most: Array | None = None
    ) -> None:
        self.scenario, self.nodes = scenario, nodes
        self.num_stages, self.last = scenario.cluster.num_gpus, len(nodes) - 1
        begin, end = np.triu_indices(len(nodes), 1)
        lengths = nodes[end] - nodes[begin]
        allowed = (lengths >= least) | ((begin == 0) & (end == self.last))
        if most is not None:
            allowed &= lengths <= most[begin]
        order = np.flatnonzero(allowed)[np.argsort(end[allowed], kind="stable")]
        self.begin, lengths = begin[order], lengths[order]
        self.first = np.searchsorted(end[order], np.arange(len(nodes) + 1))  # by node: first cell that ends there
        starts = scenario.request.cached_prefix + nodes[self.begin]
        costs, cost = scenario.layer_costs(), scenario.cost
        self.slowness = [scenario.cluster.slowness(stage) for stage in range(self.num_stages)]
        self.kinds = scenario.share.layer_kind_index
        prepared = before_step(scenario, lengths, starts + lengths, cost)
        # Operations before the layers of the first stage and of later stages, then those of each kind of layer.
        ops = [(*embedding(scenario, lengths, cost), *prepared), prepared]
        ops += [_layer_ops(strategy, one, lengths, starts) for one in costs]
        work = {one: [segment_of(slower(own, one)) for own in ops] for one in dict.fromkeys(self.slowness)}
        self.work = [work[one] for one in self.slowness]  # operations per stage
        whole = slice(self.first[self.last], None)
        head = last(scenario, lengths[whole], starts[whole] + lengths[whole], cost)
        self.head = segment_of(slower(head, self.slowness[-1]))  # for pieces that end the context
        paths = [scenario.cluster.path(stage, stage + 1) for stage in range(self.num_stages - 1)]
        busy_s = {path: path.busy_s(costs[0].activation_bytes(lengths)) for path in paths}
        self.sent_s, self.latency_s = [busy_s[path] for path in paths], [path.latency_s for path in paths]
        self.message_s, self.holds = scenario.host.message_s, not scenario.sends_overlap

    def best(self, layouts: Sequence[Layers], references: Sequence[Index] = ()) -> list[Pieces]:
        """The best pieces for layouts of layers, fastest first.

        The time of the rest of the context is estimated from the references, which must be allowed partitions. By
        default, they are the partitions with the least sum of piece times.
        """
        if not references:
            references = self.least_sums(layouts[0])
        each = [layers for layers in layouts for _ in references]
        found = self._walk(each, [*references] * len(layouts))
        return sorted(found, key=lambda one: one.ttft_s)

    def least_sums(self, layers: Layers, number: int = 3) -> list[Index]:
        """Partitions with the least sum of piece times, each for a limit on the longest piece; at most `number`.

        On equal stages, TTFT is this sum plus the longest piece on each other stage.
        """
        work_s = self._stages([layers]).rest_s[:, 0]
        longest_s = work_s.max(axis=0)
        if self.sent_s:
            sent_s = np.max(self.sent_s, axis=0)
            longest_s = longest_s + sent_s if self.holds else np.maximum(longest_s, sent_s)
        shares = work_s.sum(axis=1)
        caps = _CAPS * longest_s.max()
        sums_s, before = (
            np.full((len(self.nodes), len(caps)), np.inf),
            np.zeros((len(self.nodes), len(caps)), dtype=np.int64),
        )
        sums_s[0] = 0.0
        for node in range(1, len(self.nodes)):
            cells = slice(self.first[node], self.first[node + 1])
            begin = self.begin[cells]
            if len(begin):
                until_s = np.where(longest_s[cells, None] <= caps, longest_s[cells, None] + sums_s[begin], np.inf)
                best = until_s.argmin(axis=0)
                sums_s[node], before[node] = until_s[best, np.arange(len(caps))], begin[best]
        ttft_s = sums_s[-1] + (shares.sum() / shares.max() - 1) * caps
        found: dict[int, Index] = {}
        for column in np.argsort(ttft_s, kind="stable"):
            if not np.isfinite(ttft_s[column]) or len(found) == number:
                break
            inner, node = list[int](), self.last
            while node := int(before[node, column]):
                inner.append(node)
            found.setdefault(len(inner), np.array(inner[::-1], dtype=np.int64))
        return list(found.values())

    def _stages(self, layouts: Sequence[Layers]) -> _Stages:
        known: dict[tuple[int, range], Segment] = {}
        shape = (self.num_stages, len(layouts), len(self.begin))
        device_s, floor_s, issued_s = np.empty(shape), np.empty(shape), np.empty(shape[:2])
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
        whole, kinds = self.work[stage][min(stage, 1)], self.work[stage][2:]
        for kind, count in Counter(self.kinds[layers.start : layers.stop]).items():
            one = kinds[kind]
            assert one.floor_s is not None
            floor_s = one.floor_s + (count - 1) * np.maximum(one.device_s, one.host_s)
            whole = whole.then(Segment(count * one.device_s, floor_s, count * one.host_s))
        return whole

    def _rest_s(self, stages: _Stages, references: Sequence[Index]) -> tuple[Array, Array]:
        """Remaining seconds after a stage, or the link behind it, is free at a node, from one reference per layout.

        Both have shape (stages, layouts, nodes), and are linear between the nodes of the reference.
        """
        shape = (self.num_stages, len(references), len(self.nodes))
        rest_s, link_s = np.zeros(shape), np.zeros(shape)
        work_s = stages.rest_s
        columns: dict[bytes, list[int]] = {}
        for column, inner in enumerate(references):
            columns.setdefault(inner.tobytes(), []).append(column)
        for same in columns.values():
            at = np.concatenate([[0], references[same[0]], [self.last]])
            cells = [self._cell(*pair) for pair in pairwise(at)]
            sent_s = np.array([one[cells] for one in self.sent_s]).reshape(-1, len(cells))
            own = self._rest_of(work_s[:, same][:, :, cells], sent_s)
            for rows, one in zip((rest_s, link_s), own, strict=True):
                for stage in range(self.num_stages):
                    for column, values in zip(same, one[stage], strict=True):
                        rows[stage, column] = np.interp(self.nodes, self.nodes[at], values)
        return rest_s, link_s

    def _rest_of(self, work_s: Array, sent_s: Array) -> tuple[Array, Array]:
        """Seconds from each piece to the end; work_s: shape (stages, layouts, pieces), sent_s: (stages - 1, pieces)."""
        shape = (*work_s.shape[:2], work_s.shape[2] + 1)
        rest_s, link_s = np.zeros(shape), np.zeros(shape)
        last = self.num_stages - 1
        for piece in range(work_s.shape[2] - 1, -1, -1):
            after_s = work_s[last, :, piece] + rest_s[last, :, piece + 1]
            if not self.holds:
                rest_s[last, :, piece] = after_s
            for stage in range(last - 1, -1, -1):
                if self.holds:
                    behind_s = np.maximum(rest_s[stage, :, piece + 1], self.latency_s[stage] + after_s)
                    behind_s = sent_s[stage, piece] + behind_s
                    rest_s[stage + 1, :, piece] = behind_s
                    after_s = work_s[stage, :, piece] + behind_s
                else:
                    behind_s = np.maximum(
                        link_s[stage, :, piece + 1], self.latency_s[stage] + rest_s[stage + 1, :, piece]
                    )
                    link_s[stage, :, piece] = behind_s = sent_s[stage, piece] + behind_s
                    rest_s[stage, :, piece] = work_s[stage, :, piece] + np.maximum(
                        rest_s[stage, :, piece + 1], behind_s
                    )
            if self.holds:
                rest_s[0, :, piece] = after_s
        return rest_s, link_s

    def _cell(self, begin: int, end: int) -> int:
        first = self.first[end]
        cell = first + int(np.searchsorted(self.begin[first : self.first[end + 1]], begin))
        assert self.begin[cell] == begin, "a piece of the reference that is not allowed"
        return int(cell)

    def _walk(self, layouts: Sequence[Layers], references: Sequence[Index]) -> list[Pieces]:
        """The labels of the last node, for each layout with a reference partition that estimates the remaining time."""
        stages = self._stages(layouts)
        rest_s, link_rest_s = self._rest_s(stages, references)
        count = len(references)
        shape = (self.num_stages, count, len(self.nodes), _LABELS)
        clock_s, link_s, number = np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(shape[1:], dtype=np.int64)
        before = np.zeros((*shape[1:], 2), dtype=np.int64)  # node and label of the previous piece's end
        clock_s[:, :, 0, 0], link_s[:, :, 0, 0] = 0.0, -np.inf
        rows = np.arange(count)[:, None]
        for node in range(1, len(self.nodes)):
            cells = slice(self.first[node], self.first[node + 1])
            begin = self.begin[cells]
            if not len(begin):
                continue
            now_s, sent_s = clock_s[:, :, begin], link_s[:, :, begin]
            host_s = self._piece(stages, cells, now_s, sent_s, number[:, begin])
            if node == self.last:
                assert self.head.floor_s is not None
                now_s[-1] = np.maximum(now_s[-1] + self.head.device_s[:, None], host_s[-1] + self.head.floor_s[:, None])
                score = now_s[-1]
            else:
                ends_s = np.maximum(now_s, host_s) + rest_s[:, :, node, None, None]
                if not self.holds:
                    np.maximum(ends_s, sent_s + link_rest_s[:, :, node, None, None], out=ends_s)
                score = ends_s.max(axis=0) + _MEAN * ends_s.mean(axis=0)
            score = score.reshape(count, -1)
            chosen = np.argpartition(score, _LABELS - 1, axis=1)[:, :_LABELS]
            clock_s[:, :, node] = now_s.reshape(self.num_stages, count, -1)[:, rows, chosen]
            link_s[:, :, node] = sent_s.reshape(self.num_stages, count, -1)[:, rows, chosen]
            src, label = np.divmod(chosen, _LABELS)
            before[:, node, :, 0], before[:, node, :, 1] = begin[src], label
            number[:, node] = number[rows, begin[src], label] + 1
        ttft_s = clock_s[-1, :, self.last]
        return [
            Pieces(float(ttft_s[column, label]), layouts[column], self._traced(before[column], int(label)))
            for column, label in zip(*np.nonzero(np.isfinite(ttft_s)), strict=True)
        ]

    def _piece(self, stages: _Stages, cells: slice, clock_s: Array, link_s: Array, number: Index) -> Array:
        """Advance clocks and links, shape (stages, layouts, pieces, labels), by a piece; return when hosts are free."""
        end = self.num_stages - 1
        place = np.arange(end + 1)[:, None]
        received_s = self.message_s * (place > 0)
        each_s = (stages.issued_s + received_s + self.message_s * (place < end))[..., None, None]
        begin_s = each_s * number
        device_s, floor_s = stages.device_s[:, :, cells, None], stages.floor_s[:, :, cells, None]
        there_s = clock_s[0]
        for stage in range(end + 1):
            host_s = begin_s[stage] + received_s[stage]
            if stage and self.holds:
                held_s = np.maximum(np.maximum(clock_s[stage - 1], clock_s[stage]), host_s)
                clock_s[stage - 1] = held_s + self.sent_s[stage - 1][cells, None]
                there_s = clock_s[stage - 1] + self.latency_s[stage - 1]
            elif stage:
                there_s = np.maximum(clock_s[stage], link_s[stage - 1] + self.latency_s[stage - 1])
            done_s = np.maximum(there_s + device_s[stage], floor_s[stage] + host_s)
            if stage < end:
                sent_s = np.maximum(done_s, host_s + stages.issued_s[stage][:, None, None] + self.message_s)
                if self.holds:
                    done_s = sent_s
                else:
                    link_s[stage] = np.maximum(link_s[stage], sent_s) + self.sent_s[stage][cells, None]
            clock_s[stage] = done_s
        return np.asarray(begin_s + each_s)

    def _traced(self, before: Index, label: int) -> Index:
        """The inner nodes of a label of the last node, in ascending order."""
        inner, node = list[int](), self.last
        while True:
            node, label = before[node, label]
            if not node:
                return np.array(inner[::-1], dtype=np.int64)
            inner.append(int(node))
