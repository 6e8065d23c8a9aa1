"""The batch executor of pipelines: all stages that are at work at the same time take a step together.

A stage takes piece m no earlier than the stage before has done it, so that stage s and piece m with the same s + m do
not wait for each other. Arrays hold all stages, their context ranks and all partitions of a batch: shape (stages,
context ranks, B). A rendezvous holds the sender, too, until the next stage has handed its own piece on; then those with
the same s + 2 m take a step together. Equal to the executors of programs to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrsim.executors.maxplus import SAME
from kvrsim.executors.stages.work import StageWork, Stretches
from kvrsim.hardware import Cluster, Path
from kvrsim.kernels.calibrated import CostModel
from kvrsim.program import AllGather, Array
from kvrsim.scenario import Scenario
from kvrsim.strategies.base import Strategy
from kvrsim.strategies.pipeline import program

Index = npt.NDArray[np.intp]


def run_stages(
    scenario: Scenario, strategy: Strategy, pieces: Sequence[Array], cluster: Cluster, cost: CostModel
) -> Array | None:
    """When each rank has finished, seconds, shape (ranks, B); None: it takes the program to tell.

    pieces: tokens of each, arrays of shape (B,). cluster: on which flows do not share bandwidth.
    """
    if strategy.pipeline is not program or cluster.shares_bandwidth:
        return None
    work = StageWork.of(scenario, strategy, np.stack([np.asarray(piece) for piece in pieces]), cost)
    return None if work is None else _Run(work, scenario, cluster).finish_s()


@dataclass(frozen=True, slots=True)
class _Ways:
    """Links of the ranks, by stage and context rank: few kinds of path, and the kind of each."""

    paths: tuple[Path, ...]
    kind: Index  # shape (stages, context ranks)

    @classmethod
    def of(cls, paths: Iterable[Path], context: int) -> _Ways:
        """In the order of the ranks."""
        kinds: dict[Path, int] = {}
        kind = [kinds.setdefault(path, len(kinds)) for path in paths]
        return cls(tuple(kinds), np.array(kind, dtype=np.intp).reshape(-1, context))

    def values(self, name: str) -> Array:
        """An attribute of each path, shape (stages, context ranks, 1)."""
        return np.array([getattr(path, name) for path in self.paths] or [0.0])[self.kind][..., None]


class _Run:
    """One evaluation: when each rank, its link to the next stage and its link in the ring of its stage are free."""

    def __init__(self, work: StageWork, scenario: Scenario, cluster: Cluster) -> None:
        self.work, self.held = work, not scenario.sends_overlap
        self.message_host_s = scenario.host.message_s
        self.num_pieces, self.context, rows = work.sent_bytes.shape
        self.num_stages = len(work.layers)
        shape = (self.num_stages, self.context, rows)
        begin_s = np.maximum(work.prologue.device_s, work.prologue.floor_s)
        self.clock = np.array(np.broadcast_to(begin_s, shape))
        self.host_s = np.full((self.num_stages, 1, 1), work.prologue.host_s)
        self.link_s, self.ring_s = np.full(shape, -np.inf), np.full(shape, -np.inf)
        self.arrives_s = np.full(shape, -np.inf)  # what the stage has sent last
        ranks = range(self.num_stages * self.context)
        onward = _Ways.of((cluster.path(rank, rank + self.context) for rank in ranks[: -self.context]), self.context)
        self.sent_s = np.array([path.busy_s(work.sent_bytes) for path in onward.paths])
        self.sent_by, self.latency_s = onward.kind, onward.values("latency_s")
        self.num_layers = np.array([len(kinds) for kinds in work.layers])
        most = int(self.num_layers.max())
        self.kind_at = np.array([[*kinds, *kinds[-1:] * (most - len(kinds))] for kinds in work.layers])
        if work.after is not None:
            self._prepare_rings(cluster, work.gathers, shape)

    def _prepare_rings(self, cluster: Cluster, gathers: Sequence[Sequence[AllGather]], shape: tuple[int, ...]) -> None:
        size, ranks = self.context, range(shape[0] * shape[1])
        ring = _Ways.of((cluster.path(rank, rank // size * size + (rank + 1) % size) for rank in ranks), size)
        like = self.work.lengths.shape
        kinds = [np.stack([np.broadcast_to(op.nbytes, like) for op in ops], axis=1) for ops in gathers]
        nbytes = np.stack(kinds, axis=1)  # (M, kinds, context ranks, B)
        self.gathered_s = np.array([path.gather_step_s(nbytes, size) for path in ring.paths])
        self.ring_by, self.gather_host_s = ring.kind, np.array([ops[0].host_s for ops in gathers])
        self.gather_latency_s, self.gather_launch_s = ring.values("gather_latency_s"), ring.values("gather_launch_s")
        self.before = np.arange(-1, size - 1)  # of each context rank

    def finish_s(self) -> Array:
        """When each rank has finished, shape (ranks, B)."""
        apart = 2 if self.held else 1  # by which s + apart x m grows from piece to piece
        for wave in range(apart * (self.num_pieces - 1) + self.num_stages):
            first = max(0, wave - apart * (self.num_pieces - 1))
            active = np.arange(first + (wave - first) % apart, min(wave, self.num_stages - 1) + 1, apart)
            if len(active):
                self._take(active, (wave - active) // apart)
        epilogue, end_s = self.work.epilogue, self.clock[-1, -1]
        floor_s = self.host_s[-1, 0] + epilogue.floor_s
        self.clock[-1, -1] = np.maximum(end_s + epilogue.device_s, floor_s)
        return self.clock.reshape(-1, self.clock.shape[-1])

    def _take(self, active: Index, piece: Index) -> None:
        """Each of these stages receives a piece, computes its layers, and sends it on."""
        receivers = active > 0
        if receivers.any():
            self._receive(active[receivers], piece[receivers])
        clock, host_s, work = self.clock[active], self.host_s[active], self.work
        clock, _ = _computed(work.begins, piece, np.minimum(active, 1), clock, host_s)
        if work.after is None:
            clock, _ = _computed(work.before, piece, self.kind_at[active, 0], clock, host_s)
        else:
            clock = self._layers(active, piece, clock, host_s)
        senders = active[active < self.num_stages - 1]
        self.clock[active], self.host_s[active] = clock, host_s
        if len(senders):
            self._send(senders, piece[: len(senders)])

    def _receive(self, active: Index, piece: Index) -> None:
        self.host_s[active] += self.message_host_s
        src = active - 1
        if not self.held:
            self.clock[active] = np.maximum(self.clock[active], self.arrives_s[src])
            return
        begin_s = np.maximum(self.clock[src], np.maximum(self.clock[active], self.host_s[active]))
        self.clock[src] = begin_s + self._sent_s(src, piece)
        self.clock[active] = self.clock[src] + self.latency_s[src]

    def _send(self, active: Index, piece: Index) -> None:
        self.host_s[active] += self.message_host_s
        issued_s = np.maximum(self.clock[active], self.host_s[active])
        if self.held:
            self.clock[active] = issued_s
            return
        self.link_s[active] = np.maximum(self.link_s[active], issued_s) + self._sent_s(active, piece)
        self.arrives_s[active] = self.link_s[active] + self.latency_s[active]

    def _sent_s(self, src: Index, piece: Index) -> Array:
        """Activations on their link."""
        return np.asarray(self.sent_s[self.sent_by[src], piece[:, None], np.arange(self.context)])

    def _layers(self, active: Index, piece: Index, clock: Array, host_s: Array) -> Array:
        """All layers of each of these stages; once all that moves advances alike, so do the layers that are left."""
        assert self.work.after is not None
        ring_s, counts = self.ring_s[active], self.num_layers[active]
        alike = len(self.gather_host_s) == 1
        for layer in range(int(counts.max())):
            on = np.flatnonzero(counts > layer)
            own, of, kind = active[on], piece[on], self.kind_at[active[on], layer]
            before_s, ring_before_s, host_before_s = clock[on], ring_s[on], host_s[on]
            hosts_s = host_before_s.copy()
            there_s, leads = _computed(self.work.before, of, kind, before_s, hosts_s)
            there_s, ring_after_s = self._gather(own, of, kind, there_s, hosts_s, ring_before_s)
            after_s, also_leads = _computed(self.work.after, of, kind, there_s, hosts_s)
            clock[on], ring_s[on], host_s[on] = after_s, ring_after_s, hosts_s
            if not (alike and leads and also_leads and len(on) == len(active)):
                continue
            with np.errstate(invalid="ignore"):  # a link that has not been used yet is -inf
                advance = np.concatenate([after_s - before_s, ring_after_s - ring_before_s], axis=1)
            least = advance.min(axis=1, keepdims=True)
            same = advance.max(axis=1, keepdims=True) - least <= SAME * after_s[:, :1]
            issued_s = hosts_s - host_before_s
            if same.all() and (least >= issued_s).all():
                left = (counts - layer - 1)[:, None, None]
                clock, ring_s = clock + left * least, ring_s + left * least
                host_s += left * issued_s
                break
        self.ring_s[active] = ring_s
        return clock

    def _gather(
        self, active: Index, piece: Index, kind: Index, clock: Array, host_s: Array, ring_s: Array
    ) -> tuple[Array, Array]:
        """An all-gather in each of these stages, as AllGatherEvaluator has it: when ranks go on, and links are free."""
        host_s += self.gather_host_s[kind][:, None, None]
        own_s = np.maximum(clock, host_s) + self.gather_launch_s[active]
        held_s, clock = own_s, own_s
        both_s = np.empty_like(own_s)
        both_s[:, self.before] = np.maximum(own_s[:, self.before], own_s)
        holder = np.arange(self.context)
        for _ in range(self.context - 1):
            step_s = self.gathered_s[self.ring_by[active], piece[:, None], kind[:, None], holder]
            ring_s = np.maximum(np.maximum(held_s, both_s), ring_s) + step_s
            held_s = (ring_s + self.gather_latency_s[active])[:, self.before]
            holder = holder[self.before]
            clock = np.maximum(clock, held_s)
        return clock, ring_s


def _computed(stretches: Stretches, piece: Index, kind: Index, clock: Array, host_s: Array) -> tuple[Array, bool]:
    """A stretch of each stage: when it is done, and whether no host was the last; adds to `host_s` what they issue."""
    done_s = clock + stretches.device_s[piece, kind]
    floor_s = stretches.floor_s[piece, kind] + host_s
    host_s += stretches.host_s[kind][:, None, None]
    return np.maximum(done_s, floor_s), bool((floor_s <= done_s).all())
