"""The batch executor: max-plus arithmetic over thousands of partitions at once.

The order in which messages match does not depend on durations, so a program is walked once, each rank
as far as its messages allow, with arrays over the batch in place of numbers. It holds on networks where
flows do not share bandwidth; where they do, the event executor is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from kvrsim.executors.collectives import Edges, Exchanging, Gathering, Passing
from kvrsim.hardware.cluster import Cluster
from kvrsim.program import AllGather, AllToAll, Array, Collective, Compute, Op, Program, Recv, RingPass, Send


@dataclass(frozen=True, slots=True)
class _Segment:
    """Computes in a row, merged: `t' = max(t + device_s, host_begin + host_floor_s)`."""

    device_s: Array
    host_floor_s: Array | None  # None: the host is ahead whatever came before
    host_s: float


@dataclass(frozen=True, slots=True)
class _Message:
    """A send with its time on the link, the same for every layer of a kind."""

    dst: int
    link_s: Array
    latency_s: float
    host_s: float
    rendezvous: bool
    in_turn: bool


_MANY = 8  # computes in a row, from which on they are merged all at once

_Step = _Segment | _Message | Recv | AllGather | RingPass | AllToAll


def run_batch(program: Program, cluster: Cluster) -> Array:
    """When each rank has finished, seconds, shape (num_ranks, B). TTFT is the last row."""
    assert not cluster.shares_bandwidth, "flows that share a bandwidth need the event executor"
    return _Walk(program, cluster).run()


def _compile(rank: int, ops: tuple[Op, ...], cluster: Cluster) -> tuple[_Step, ...]:
    """Merge computes in a row and put times to messages."""
    if len(ops) >= _MANY and all(isinstance(op, Compute | Collective) for op in ops):
        return _without_host([_merged(ops)])
    steps: list[_Step] = []
    for op in ops:
        if isinstance(op, Compute | Collective):
            device_s = _held_s(op)
            if steps and isinstance(steps[-1], _Segment):
                steps[-1] = _merge(steps[-1], device_s, op.host_s)
            else:
                steps.append(_Segment(device_s, np.maximum(device_s, op.host_s), op.host_s))
        elif isinstance(op, Send):
            path = cluster.path(rank, op.dst)
            link_s = path.busy_s(op.nbytes)
            steps.append(_Message(op.dst, link_s, path.latency_s, op.host_s, op.rendezvous, op.in_turn))
        else:
            steps.append(op)
    return _without_host(steps)


def _merge(first: _Segment, device_s: Array, host_s: float) -> _Segment:
    """A segment and what follows it as one; the maxima distribute over the sums."""
    assert first.host_floor_s is not None
    floor = np.maximum(first.host_floor_s + device_s, first.host_s + np.maximum(device_s, host_s))
    return _Segment(first.device_s + device_s, floor, first.host_s + host_s)


def _merged(ops: Sequence[Op]) -> _Segment:
    """Many computes in a row as one, all at once: the same as merging one after another."""
    device_s = np.stack([_held_s(op) for op in ops])
    host_s = np.array([[op.host_s] for op in ops if not isinstance(op, RingPass)])
    rest_s = np.cumsum(device_s[::-1], axis=0)[::-1] - device_s  # of those after each
    floors = np.cumsum(host_s, axis=0) - host_s + np.maximum(device_s, host_s) + rest_s
    return _Segment(device_s.sum(axis=0), floors.max(axis=0), float(host_s.sum()))


def _held_s(op: Op) -> Array:
    assert isinstance(op, Compute | Collective)
    return op.device_s if isinstance(op, Compute) else op.seconds


def _without_host(steps: list[_Step]) -> tuple[_Step, ...]:
    """Drop the host's clock where it cannot matter: where the device alone is at every point the later one.

    The device is never before the host when a layer begins; that then holds at its end too.
    """
    device_s: Array = np.zeros(1)
    host_s = 0.0
    for step in steps:
        if isinstance(step, _Segment):
            assert step.host_floor_s is not None
            device_s = device_s + step.device_s
            if not (host_s + step.host_floor_s <= device_s).all():
                return tuple(steps)
        host_s += sum(step.host_s) if isinstance(step, RingPass) else step.host_s
    return tuple(_Segment(step.device_s, None, step.host_s) if isinstance(step, _Segment) else step for step in steps)


class _Compiler:
    """Blocks of operations made ready, each once, whoever runs it: a pipeline's pieces are thousands of blocks."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.blocks: dict[int, tuple[_Step, ...]] = {}
        self.merged: dict[tuple[int, int], _Segment] = {}

    def block(self, rank: int, ops: tuple[Op, ...]) -> tuple[_Step, ...]:
        """The same for all ranks, but for messages, whose links are the rank's own."""
        if id(ops) in self.blocks:
            return self.blocks[id(ops)]
        steps = _compile(rank, ops, self.cluster)
        if not any(isinstance(op, Send) for op in ops):
            self.blocks[id(ops)] = steps
        return steps


def _joined(blocks: Iterable[tuple[_Step, ...]], merged: dict[tuple[int, int], _Segment]) -> list[_Step]:
    """All steps in a row; segments that meet where one layer follows another are merged if the host is ahead."""
    steps: list[_Step] = []
    for step in (step for block in blocks for step in block):
        last = steps[-1] if steps else None
        if _is_plain(last) and _is_plain(step):
            both = id(last), id(step)
            if both not in merged:
                merged[both] = _Segment(last.device_s + step.device_s, None, last.host_s + step.host_s)
            steps[-1] = merged[both]
        else:
            steps.append(step)
    return steps


def _is_plain(step: _Step | None) -> TypeGuard[_Segment]:
    """Whether it is a segment that the host's clock does not touch."""
    return isinstance(step, _Segment) and step.host_floor_s is None


@dataclass(slots=True)
class _Rank:
    """Where one rank stands in its program."""

    clock: Array  # device time, shape (B,); never before host_s once something was computed
    steps: list[_Step]  # prologue, layers, epilogue
    host_s: float = 0.0  # host time issued so far
    step: int = 0


class _Walk:
    """One walk through a program; messages in flight are the state besides the ranks."""

    def __init__(self, program: Program, cluster: Cluster) -> None:
        width = program.num_rows
        ranks = range(program.num_ranks)
        compiler = _Compiler(cluster)
        kinds = [[compiler.block(rank, kind[rank]) for rank in ranks] for kind in program.layers]
        self.ranks = []
        for rank in ranks:
            before, after = program.prologue[rank], program.epilogue[rank]
            layers = (kinds[kind][rank] for kind in program.layer_kind_index)
            blocks = (compiler.block(rank, before), *layers, compiler.block(rank, after))
            self.ranks.append(_Rank(np.zeros(width), _joined(blocks, compiler.merged)))
        self.cluster = cluster
        self.arrivals: dict[tuple[int, int], deque[Array]] = {}
        self.links: dict[tuple[int, int], Array] = {}
        self.offers: dict[tuple[int, int], _Message] = {}  # rendezvous whose receiver has not come yet
        self.taken: set[tuple[int, int]] = set()  # rendezvous done, whose sender may go on
        self.prepared: dict[int, Gathering | Passing | Exchanging] = {}  # by the first rank's operation
        self.edges: dict[int, Edges] = {}  # by how many ranks further on
        self.scratch = np.empty(width)

    def run(self) -> Array:
        """Walk every rank to its end, together wherever all have come to a collective."""
        while True:
            states = [self._advance(index, rank) for index, rank in enumerate(self.ranks)]
            if all(state == "done" for state in states):
                return np.stack([rank.clock for rank in self.ranks])
            if all(state == "meet" for state in states):
                self._meet()
            elif "moved" not in states:
                raise AssertionError(f"the program deadlocks: {states}")

    def _advance(self, index: int, rank: _Rank) -> str:
        """Run one rank until it ends ("done"), comes to a collective ("meet") or lacks a message ("moved", "stuck")."""
        moved = "stuck"
        while rank.step < len(rank.steps):
            step = rank.steps[rank.step]
            if isinstance(step, _Segment):
                self._compute(rank, step)
            elif isinstance(step, _Message):
                if not self._send(index, rank, step):
                    return moved
            elif isinstance(step, Recv):
                if not self._recv(index, rank, step):
                    return moved
            else:
                return "meet"
            rank.step += 1
            moved = "moved"
        return "done"

    def _compute(self, rank: _Rank, segment: _Segment) -> None:
        rank.clock += segment.device_s
        if segment.host_floor_s is not None:
            np.add(segment.host_floor_s, rank.host_s, out=self.scratch)
            np.maximum(rank.clock, self.scratch, out=rank.clock)
        rank.host_s += segment.host_s

    def _send(self, index: int, rank: _Rank, message: _Message) -> bool:
        """Put a message on its link; False where a rendezvous still waits for its receiver."""
        edge = (index, message.dst)
        if not message.rendezvous:
            way = (index, index) if message.in_turn else edge  # the rank's one way out, or the pair's own
            link = np.maximum(self.links.get(way, 0.0), self._issued(rank, message.host_s))
            link += message.link_s
            self.links[way] = link
            self.arrivals.setdefault(edge, deque()).append(link + message.latency_s)
            return True
        if edge in self.taken:
            self.taken.remove(edge)
            return True
        if edge not in self.offers:
            rank.clock = self._issued(rank, message.host_s)
            self.offers[edge] = message
        return False

    def _recv(self, index: int, rank: _Rank, recv: Recv) -> bool:
        """Wait for a message; False where it is not on its way yet."""
        edge = (recv.src, index)
        if offer := self.offers.pop(edge, None):
            # Both streams have waited for every message before, so the link is free.
            sender = self.ranks[recv.src]
            np.maximum(sender.clock, self._issued(rank, recv.host_s), out=sender.clock)
            sender.clock += offer.link_s
            np.add(sender.clock, offer.latency_s, out=rank.clock)
            self.taken.add(edge)
            return True
        if queue := self.arrivals.get(edge):
            rank.host_s += recv.host_s
            np.maximum(rank.clock, queue.popleft(), out=rank.clock)
            return True
        return False

    def _issued(self, rank: _Rank, host_s: float) -> Array:
        """When the device has come to an operation that the host takes that long to issue."""
        if not host_s:
            return rank.clock
        rank.host_s += host_s
        return np.maximum(rank.clock, rank.host_s)

    def _meet(self) -> None:
        """The collective that all have come to."""
        ops = [rank.steps[rank.step] for rank in self.ranks]
        if all(isinstance(op, AllGather) for op in ops):
            self._all_gather([op for op in ops if isinstance(op, AllGather)])
        elif all(isinstance(op, RingPass) for op in ops):
            self._ring_pass([op for op in ops if isinstance(op, RingPass)])
        else:
            assert all(isinstance(op, AllToAll) for op in ops), "the ranks have come to different collectives"
            self._all_to_all([op for op in ops if isinstance(op, AllToAll)])
        for rank in self.ranks:
            rank.step += 1

    def _all_gather(self, ops: list[AllGather]) -> None:
        for rank, op in zip(self.ranks, ops, strict=True):
            rank.host_s += op.host_s
        start = np.stack([np.maximum(rank.clock, rank.host_s) for rank in self.ranks])
        if id(ops[0]) not in self.prepared:
            pieces = np.stack([np.broadcast_to(op.nbytes, start.shape[1:]) for op in ops])
            self.prepared[id(ops[0])] = Gathering(self._edges(1), pieces)
        gathering = self.prepared[id(ops[0])]
        assert isinstance(gathering, Gathering)
        clock, link = gathering.run(start, self._free(start))
        for index, rank in enumerate(self.ranks):
            self.links[index, (index + 1) % len(self.ranks)] = link[index]
            rank.clock[:] = clock[index]

    def _ring_pass(self, ops: list[RingPass]) -> None:
        start = np.stack([rank.clock for rank in self.ranks])
        if id(ops[0]) not in self.prepared:
            self.prepared[id(ops[0])] = Passing.of(ops, self._edges(1))
        passing = self.prepared[id(ops[0])]
        assert isinstance(passing, Passing)
        host = np.array([[rank.host_s] for rank in self.ranks])
        clock = passing.run(start, host, self._free(start))
        for index, (rank, op) in enumerate(zip(self.ranks, ops, strict=True)):
            rank.clock[:] = clock[index]
            rank.host_s += sum(op.host_s)

    def _all_to_all(self, ops: list[AllToAll]) -> None:
        for rank, op in zip(self.ranks, ops, strict=True):
            rank.host_s += op.host_s
        start = np.stack([np.maximum(rank.clock, rank.host_s) for rank in self.ranks])
        if id(ops[0]) not in self.prepared:
            self.prepared[id(ops[0])] = Exchanging.of(ops, self._edges)
        exchanging = self.prepared[id(ops[0])]
        assert isinstance(exchanging, Exchanging)
        clock = exchanging.run(start)
        for index, rank in enumerate(self.ranks):
            rank.clock[:] = clock[index]

    def _free(self, like: Array) -> Array:
        """When every rank's link to the next is free."""
        num_ranks = len(self.ranks)
        edges = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
        return np.stack([np.broadcast_to(self.links.get(edge, 0.0), like.shape[1:]) for edge in edges])

    def _edges(self, shift: int) -> Edges:
        if shift not in self.edges:
            self.edges[shift] = Edges.of(self.cluster, len(self.ranks), shift)
        return self.edges[shift]
