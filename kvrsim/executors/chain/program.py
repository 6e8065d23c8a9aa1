"""The program of a chain of ranks that differ in nothing but their neighbours: all ranks in one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np

from kvrsim.ends import embedding, has_prefill, last, last_is_alike, request, step
from kvrsim.hardware import Cluster, Path
from kvrsim.kernels.calibrated import CostModel
from kvrsim.program import Array, Op, Recv, Send, beside_receives, slower
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from kvrsim.strategies.base import Step
from kvrsim.strategies.kv_runahead import KVR_S
from kvrsim.strategies.layers import layer_ops

_INSIDE = 1  # a rank with neighbours on both sides


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainProgram:
    """What all ranks do: operations with arrays of shape (ranks, B), those of the epilogue (B,) or (1,).

    A layer is `before`, a receive, `append`, a send and `rest`. The first rank receives nothing, the last sends none.
    """

    prologue: Sequence[Op]
    before: Sequence[Op]
    append: Sequence[Op]
    rest: Sequence[Op]
    recv_host_s: float
    send_host_s: float
    overlaps: bool  # whether messages move beside computation; else they hold both streams
    link_s: Array  # that each message keeps its link busy, shape (ranks - 1, B)
    latency_s: Array  # until what has left a link is there, shape (ranks - 1, 1)
    num_layers: int  # all alike, at least 1
    epilogue: Sequence[Op]  # of the last rank


class Chain:
    """A KV-Runahead chain whose layers are alike, prepared for any chunks; see Chain.suits."""

    def __init__(self, scenario: Scenario, strategy: Strategy, cluster: Cluster, cost: CostModel | None = None) -> None:
        self.scenario, self.strategy, self.cluster = scenario, strategy, cluster
        self.costs = scenario.layer_costs(cost)[scenario.share.layer_kind_index[0]]
        ranks = range(cluster.num_gpus)
        self.paths = [cluster.path(rank, rank + 1) for rank in ranks[:-1]]
        self.latency_s = np.array([[path.latency_s] for path in self.paths])
        pending = scenario.pending_share
        self.pending = np.array([[pending if rank else 0.0] for rank in ranks]) if pending else None
        slowness = np.array([[scenario.cluster.slowness(rank)] for rank in ranks])
        self.slowness = None if (slowness == 1.0).all() else slowness
        one = np.ones(1)
        alike = last_is_alike(scenario, self.costs.cost)
        self.epilogue = last(scenario, one, one, self.costs.cost) if alike else None

    @staticmethod
    def suits(scenario: Scenario, strategy: Strategy, cluster: Cluster) -> bool:
        """Whether it is a chain of KV-Runahead with alike layers on links that are not shared; see for_strategy."""
        return (
            strategy.layer is KVR_S.layer
            and strategy.pipeline is None
            and cluster.num_gpus > 1
            and not cluster.shares_bandwidth
            and scenario.chain_is_proven
            and scenario.prefix_access_plan.is_local
            and len(scenario.share.layer_kinds) == 1
            and scenario.share.layers[0].mixer is not None
            and has_prefill(scenario)
        )

    def program(self, chunks: Array) -> ChainProgram:
        """Of a batch of partitions; chunks: tokens, shape (ranks, B)."""
        scenario, cost = self.scenario, self.costs.cost
        starts = np.full_like(chunks, scenario.request.cached_prefix)
        for rank in range(1, len(chunks)):
            np.add(starts[rank - 1], chunks[rank - 1], out=starts[rank])
        ends = starts + chunks
        ranks = Step.of_all_ranks(self.costs, chunks, starts, self.strategy.query_blocks)
        layer = tuple(layer_ops(self.strategy, ranks, _INSIDE))
        if self.pending is not None:  # the first rank receives nothing
            layer = beside_receives(layer, self.pending)
        prologue = request(scenario, chunks), embedding(scenario, chunks, cost), step(scenario, chunks, ends, cost)
        epilogue = self.epilogue or last(scenario, chunks[-1], ends[-1], cost)
        layer = self._slowed(layer)
        recv_at = next(index for index, op in enumerate(layer) if isinstance(op, Recv))
        send_at = next(index for index, op in enumerate(layer) if isinstance(op, Send))
        recv, send = layer[recv_at], layer[send_at]
        assert isinstance(recv, Recv)
        assert isinstance(send, Send)
        return ChainProgram(
            prologue=self._slowed(tuple(chain(*prologue))),
            before=layer[:recv_at],
            append=layer[recv_at + 1 : send_at],
            rest=layer[send_at + 1 :],
            recv_host_s=recv.host_s,
            send_host_s=send.host_s,
            overlaps=not send.rendezvous,
            link_s=_busy_s(self.paths, send.nbytes),
            latency_s=self.latency_s,
            num_layers=len(scenario.share.layer_kind_index),
            epilogue=epilogue if self.slowness is None else slower(epilogue, self.slowness[-1]),
        )

    def _slowed(self, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        """On ranks that compute more slowly than others."""
        return ops if self.slowness is None else slower(ops, self.slowness)


def _busy_s(paths: Sequence[Path], nbytes: Array) -> Array:
    """How long each message keeps its path busy, shape (ranks - 1, B); nbytes: that each rank sends."""
    parts, first = [], 0
    for path, same in groupby(paths):
        after = first + len(list(same))
        parts.append(path.busy_s(nbytes[first:after]))
        first = after
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
