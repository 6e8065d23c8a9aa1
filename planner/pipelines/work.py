"""Seconds of pieces of the context in layers, and of a whole pipeline with any stages: what seeds and layouts rest on.

The flow here leaves the host's clock out but for a layer's own launches; the executors have the last word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvrsim.ends import embedding, step
from kvrsim.program import Array, Collective, Compute, Op
from kvrsim.scenario import Scenario
from kvrsim.strategies import Step, Strategy
from kvrsim.strategies.layers import layer_ops

_ONE_STAGE = 0  # layers of a pipeline are the same on every rank


class PieceWork:
    """What pieces take in the layers of a scenario; `strategy`: a pipeline."""

    def __init__(self, scenario: Scenario, strategy: Strategy) -> None:
        self.scenario, self.strategy = scenario, strategy
        self.num_stages = scenario.cluster.num_gpus
        self.costs = scenario.layer_costs()
        self.kinds = np.array(scenario.share.layer_kind_index)
        self.counts = np.bincount(self.kinds, minlength=len(self.costs))

    def kinds_s(self, lengths: Array, starts: Array) -> Array:
        """Seconds of a layer of each kind, shape (kinds, pieces); tokens of each piece, and before it."""
        return np.stack([self._layer_s(Step(costs, (lengths,), (starts,))) for costs in self.costs])

    def all_s(self, lengths: Array, starts: Array) -> Array:
        """Seconds of each piece in all layers, and of its step on every stage; shape (pieces,)."""
        return np.asarray(self.counts @ self.kinds_s(lengths, starts) + self.num_stages * self.step_s(lengths, starts))

    def step_s(self, lengths: Array, starts: Array) -> Array:
        """What each piece costs on each stage before its first layer."""
        return _held_s(step(self.scenario, lengths, starts + lengths, self.scenario.cost), lengths)

    def _layer_s(self, one: Step) -> Array:
        ops = tuple(layer_ops(self.strategy, one, _ONE_STAGE))
        return np.maximum(_held_s(ops, one.chunks[0]), sum(op.host_s for op in ops if isinstance(op, Compute)))

    def starts(self, lengths: Array) -> Array:
        """Tokens before each piece, the cached prefix included."""
        return np.asarray(self.scenario.request.cached_prefix + np.cumsum(lengths) - lengths)


class Flow:
    """TTFT of given pieces with any layers on the stages, many layouts at once."""

    def __init__(self, work: PieceWork, lengths: Array) -> None:
        scenario, starts = work.scenario, work.starts(lengths)
        layers_s = work.kinds_s(lengths, starts)[work.kinds]
        self._before_s = np.concatenate([np.zeros((1, len(lengths))), np.cumsum(layers_s, axis=0)])
        self._step_s = work.step_s(lengths, starts)
        self._embedding_s = _held_s(embedding(scenario, lengths, scenario.cost), lengths)
        nbytes = work.costs[0].activation_bytes(lengths)
        paths = [scenario.cluster.path(rank, rank + 1) for rank in range(work.num_stages - 1)]
        self._sent_s = np.array([path.busy_s(nbytes) + path.latency_s for path in paths])

    @property
    def layers_s(self) -> Array:
        """Seconds of all pieces in the layers before each layer, and in all; shape (layers + 1,)."""
        return np.asarray(self._before_s.sum(axis=1))

    def seconds(self, boundaries: npt.NDArray[np.int64]) -> Array:
        """When the last stage has finished the last piece; boundaries: first layers of stages 1, 2, ..., (B, S - 1)."""
        rows, last = len(boundaries), len(self._before_s) - 1
        edges = np.concatenate([np.zeros((rows, 1), dtype=np.int64), boundaries, np.full((rows, 1), last)], axis=1)
        stages_s = np.diff(self._before_s[edges], axis=1) + self._step_s  # (B, stages, pieces)
        stages_s[:, 0] += self._embedding_s
        done = np.zeros(stages_s.shape[:1] + stages_s.shape[2:])
        for stage in range(stages_s.shape[1]):
            there = done if stage == 0 else done + self._sent_s[stage - 1]
            alone = np.cumsum(stages_s[:, stage], axis=1)  # the latest piece that the stage waited for, and all since
            done = alone + np.maximum.accumulate(there - (alone - stages_s[:, stage]), axis=1)
        return np.asarray(done[:, -1])


def _held_s(ops: tuple[Op, ...], like: Array) -> Array:
    """Device seconds of operations one after another."""
    parts = (
        op.device_s if isinstance(op, Compute) else op.seconds for op in ops if isinstance(op, Compute | Collective)
    )
    return sum(parts, np.zeros_like(like))
