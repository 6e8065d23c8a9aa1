"""The sampled executor: a program under many draws of noise at once, or from many starting points.

As the batch executor, it walks the program once, with arrays in place of numbers; here they have two axes,
(partitions, samples), and what is computed or sent ends when the noise lets it. It holds where flows do not
share bandwidth, for programs of computing, messages and all-gathers; the event executor runs everything.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvrsim.hardware.cluster import Cluster
from kvrsim.noise.draw import NoiseDraw
from kvrsim.program import AllGather, Array, Compute, Op, Program, Recv, RingPass, Send

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: when each rank and each link is free, seconds, arrays of shape (partitions, samples)."""

    ranks_s: list[Array]
    links_s: dict[Edge, Array] = field(default_factory=dict)  # those that are free at once are absent


@dataclass(frozen=True, slots=True)
class Finish:
    """Where it ends: when each rank has finished, and each link it has used."""

    ranks_s: Array  # shape (num_ranks, partitions, samples)
    links_s: dict[Edge, Array]


def can_sample(program: Program, cluster: Cluster) -> bool:
    """Whether this executor knows every operation of the program, on links that nobody shares."""
    if cluster.shares_bandwidth:
        return False
    blocks = (program.prologue, *program.layers, program.epilogue)
    return all(_is_known(op) for block in blocks for ops in block for op in ops)


def _is_known(op: Op) -> bool:
    return isinstance(op, Compute | Recv | AllGather) or (isinstance(op, Send) and not op.in_turn)


def run_sampled(
    program: Program, cluster: Cluster, draw: NoiseDraw | None = None, start: Start | None = None
) -> Finish:
    """Run a batch of partitions under every sample of the draw; without one, on a quiet machine."""
    assert can_sample(program, cluster)
    return _Walk(program, cluster, draw, start).run()


@dataclass(slots=True)
class _Rank:
    """Where one rank stands; its host begins with it and runs ahead."""

    begin_s: Array
    clock_s: Array
    ops: list[Op]
    host_leads: bool  # the host's clock is never the later one
    host_s: float = 0.0  # issued since it began
    step: int = 0
    num_computed: int = 0

    def issued(self, host_s: float) -> Array:
        """When the device has come to an operation that the host takes that long to issue."""
        self.host_s += host_s
        return self.clock_s if self.host_leads else np.maximum(self.clock_s, self.begin_s + self.host_s)


class _Walk:
    def __init__(self, program: Program, cluster: Cluster, draw: NoiseDraw | None, start: Start | None) -> None:
        self.cluster, self.draw = cluster, draw
        self.links: dict[Edge, Array] = {} if start is None else dict(start.links_s)
        self.messages: dict[Edge, int] = {}  # so far
        self.arrivals: dict[Edge, deque[Array]] = {}
        self.offers: dict[Edge, tuple[Array, int]] = {}  # rendezvous whose receiver has not come: link time, number
        self.taken: set[Edge] = set()
        merges = draw is None or not draw.jitters_compute
        zero = np.zeros((1, 1))
        self.ranks = []
        for rank in range(program.num_ranks):
            ops = [_column(op) for _, op in program.ops(rank)]
            leads = merges and _host_leads(ops)
            begin = zero if start is None else start.ranks_s[rank]
            self.ranks.append(_Rank(begin, begin, _merged(ops) if leads else ops, leads))

    def run(self) -> Finish:
        """Walk every rank to its end, gathering wherever all have come to a collective."""
        while True:
            states = [self._advance(index, rank) for index, rank in enumerate(self.ranks)]
            if all(state == "done" for state in states):
                return Finish(np.stack(np.broadcast_arrays(*[rank.clock_s for rank in self.ranks])), self.links)
            if all(state == "gather" for state in states):
                self._all_gather()
            elif "moved" not in states:
                raise AssertionError(f"the program deadlocks: {states}")

    def _advance(self, index: int, rank: _Rank) -> str:
        """Run one rank until it ends ("done"), must gather ("gather") or lacks a message ("moved", "stuck")."""
        moved = "stuck"
        while rank.step < len(rank.ops):
            op = rank.ops[rank.step]
            if isinstance(op, Compute):
                self._compute(index, rank, op)
            elif isinstance(op, Send):
                if not self._send(index, rank, op):
                    return moved
            elif isinstance(op, Recv):
                if not self._recv(index, rank, op):
                    return moved
            else:
                return "gather"
            rank.step += 1
            moved = "moved"
        return "done"

    def _compute(self, index: int, rank: _Rank, op: Compute) -> None:
        begin_s = rank.issued(0.0)
        if self.draw is None:
            rank.clock_s = begin_s + op.device_s
        else:
            rank.clock_s = self.draw.compute_end_s(index, rank.num_computed, begin_s, op.device_s)
        rank.num_computed += 1
        rank.clock_s = rank.issued(op.host_s)

    def _transmit(self, edge: Edge, number: int, start_s: Array, busy_s: Array) -> Array:
        """When a message that starts then has left."""
        return start_s + busy_s if self.draw is None else self.draw.message_end_s(*edge, number, start_s, busy_s)

    def _number(self, edge: Edge) -> int:
        """Of the next message on a link."""
        self.messages[edge] = self.messages.get(edge, -1) + 1
        return self.messages[edge]

    def _send(self, index: int, rank: _Rank, op: Send) -> bool:
        """Put a message on its link; False where a rendezvous still waits for its receiver."""
        edge = (index, op.dst)
        if edge in self.taken:
            self.taken.remove(edge)
            return True
        if edge in self.offers:
            return False
        path = self.cluster.path(*edge)
        busy_s, number = path.busy_s(op.nbytes), self._number(edge)
        posted_s = rank.issued(op.host_s)
        if op.rendezvous:
            rank.clock_s = posted_s
            self.offers[edge] = busy_s, number
            return False
        start_s = np.maximum(self.links.get(edge, -np.inf), posted_s)
        self.links[edge] = self._transmit(edge, number, start_s, busy_s)
        self.arrivals.setdefault(edge, deque()).append(self.links[edge] + path.latency_s)
        return True

    def _recv(self, index: int, rank: _Rank, op: Recv) -> bool:
        """Wait for a message; False where it is not on its way yet."""
        edge = (op.src, index)
        if offer := self.offers.pop(edge, None):
            # Both streams have waited for every message before, so the link is free.
            busy_s, number = offer
            sender = self.ranks[op.src]
            sender.clock_s = self._transmit(edge, number, np.maximum(sender.clock_s, rank.issued(op.host_s)), busy_s)
            rank.clock_s = sender.clock_s + self.cluster.path(*edge).latency_s
            self.taken.add(edge)
            return True
        if queue := self.arrivals.get(edge):
            rank.host_s += op.host_s
            rank.clock_s = np.maximum(rank.clock_s, queue.popleft())
            return True
        return False

    def _all_gather(self) -> None:
        """The ring, all ranks at once: step k moves the piece that came k hops to the next rank."""
        count = len(self.ranks)
        edges = [(rank, (rank + 1) % count) for rank in range(count)]
        paths = [self.cluster.path(*edge) for edge in edges]
        start, pieces = [], []
        for rank, path in zip(self.ranks, paths, strict=True):
            op = rank.ops[rank.step]
            assert isinstance(op, AllGather)
            start.append(rank.issued(op.host_s) + path.gather_launch_s)
            pieces.append(op.nbytes)
        held, clock = list(start), list(start)
        for _ in range(count - 1):
            left = []
            for index, (edge, path) in enumerate(zip(edges, paths, strict=True)):
                free_s = np.maximum(self.links.get(edge, -np.inf), np.maximum(held[index], start[edge[1]]))
                busy_s = path.gather_step_s(pieces[index], count)
                self.links[edge] = self._transmit(edge, self._number(edge), free_s, busy_s)
                left.append(self.links[edge] + path.gather_latency_s)
            held = [left[rank - 1] for rank in range(count)]
            pieces = [pieces[rank - 1] for rank in range(count)]
            clock = [np.maximum(mine, came) for mine, came in zip(clock, held, strict=True)]
        for rank, clock_s in zip(self.ranks, clock, strict=True):
            rank.clock_s = clock_s
            rank.step += 1


def _column(op: Op) -> Op:
    """The operation with its numbers as a column, one row a partition."""
    if isinstance(op, Compute):
        return Compute(name=op.name, device_s=op.device_s.reshape(-1, 1), host_s=op.host_s)
    if isinstance(op, Send):
        return Send(dst=op.dst, nbytes=op.nbytes.reshape(-1, 1), host_s=op.host_s, rendezvous=op.rendezvous)
    if isinstance(op, AllGather):
        return AllGather(nbytes=op.nbytes.reshape(-1, 1), host_s=op.host_s)
    return op


def _host_leads(ops: list[Op]) -> bool:
    """Whether the device alone is at every point later than the host; noise and waiting only delay the device."""
    device_s, host_s = np.zeros((1, 1)), 0.0
    for op in ops:
        if isinstance(op, Compute):
            if not (host_s <= device_s).all():
                return False
            device_s = device_s + op.device_s
        assert not isinstance(op, RingPass), "see can_sample"
        host_s += op.host_s
        if not (host_s <= device_s).all() and host_s > 0:
            return False
    return True


def _merged(ops: list[Op]) -> list[Op]:
    """Computes in a row as one."""
    merged: list[Op] = []
    for op in ops:
        last = merged[-1] if merged else None
        if isinstance(op, Compute) and isinstance(last, Compute):
            merged[-1] = Compute(name=last.name, device_s=last.device_s + op.device_s, host_s=last.host_s + op.host_s)
        else:
            merged.append(op)
    return merged
