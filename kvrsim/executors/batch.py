"""The batch executor: max-plus arithmetic over thousands of partitions at once.

The order in which messages match does not depend on durations, so a program is walked once, each rank
as far as its messages allow, with arrays over the batch in place of numbers. It holds on networks where
flows do not share bandwidth; where they do, the event executor is needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvrsim.hardware import Cluster
from kvrsim.program import AllGather, Array, Compute, Op, Program, Recv, Send


@dataclass(frozen=True, slots=True)
class _Segment:
    """Computes in a row, merged: `t' = max(t + device_s, host_begin + host_floor_s)`."""

    device_s: Array
    host_floor_s: Array
    host_s: float


_Step = _Segment | Send | Recv | AllGather


def run_batch(program: Program, cluster: Cluster) -> Array:
    """When each rank has finished, seconds, shape (num_ranks, B). TTFT is the last row."""
    return _Walk(program, cluster).run()


def _merge(first: _Segment, second: Compute) -> _Segment:
    """Two computes in a row as one; the maxima distribute over the sums."""
    floor = np.maximum(first.host_floor_s + second.device_s, first.host_s + np.maximum(second.device_s, second.host_s))
    return _Segment(first.device_s + second.device_s, floor, first.host_s + second.host_s)


def _compile(ops: tuple[Op, ...]) -> tuple[_Step, ...]:
    steps: list[_Step] = []
    for op in ops:
        if not isinstance(op, Compute):
            steps.append(op)
        elif steps and isinstance(steps[-1], _Segment):
            steps[-1] = _merge(steps[-1], op)
        else:
            steps.append(_Segment(op.device_s, np.maximum(op.device_s, op.host_s), op.host_s))
    return tuple(steps)


@dataclass(slots=True)
class _Rank:
    """Where one rank stands in its program."""

    clock: Array  # device time, shape (B,)
    blocks: list[tuple[_Step, ...]]  # prologue, layers, epilogue
    host_s: float = 0.0  # host time issued so far
    block: int = 0
    step: int = 0


class _Walk:
    """One walk through a program; messages in flight are the state besides the ranks."""

    def __init__(self, program: Program, cluster: Cluster) -> None:
        width = _width(program)
        kinds = [[_compile(ops) for ops in kind] for kind in program.layers]
        self.ranks = [
            _Rank(
                np.zeros(width),
                [_compile(program.prologue[rank])]
                + [kinds[kind][rank] for kind in program.layer_kind_index]
                + [_compile(program.epilogue[rank])],
            )
            for rank in range(program.num_ranks)
        ]
        self.cluster = cluster
        self.arrivals: dict[tuple[int, int], deque[Array]] = {}
        self.links: dict[tuple[int, int], Array] = {}
        self.offers: dict[tuple[int, int], Send] = {}  # rendezvous whose receiver has not come yet
        self.taken: set[tuple[int, int]] = set()  # rendezvous done, whose sender may go on
        self.scratch = np.empty(width)

    def run(self) -> Array:
        """Walk every rank to its end, gathering wherever all have come to a collective."""
        while True:
            states = [self._advance(index, rank) for index, rank in enumerate(self.ranks)]
            if all(state == "done" for state in states):
                return np.stack([rank.clock for rank in self.ranks])
            if all(state == "gather" for state in states):
                self._all_gather()
            elif "moved" not in states:
                raise AssertionError(f"the program deadlocks: {states}")

    def _advance(self, index: int, rank: _Rank) -> str:
        """Run one rank until it ends ("done"), must gather ("gather") or lacks a message ("moved", "stuck")."""
        moved = "stuck"
        while rank.block < len(rank.blocks):
            steps = rank.blocks[rank.block]
            while rank.step < len(steps):
                step = steps[rank.step]
                if isinstance(step, _Segment):
                    self._compute(rank, step)
                elif isinstance(step, Send):
                    if not self._send(index, rank, step):
                        return moved
                elif isinstance(step, Recv):
                    if not self._recv(index, rank, step):
                        return moved
                else:
                    return "gather"
                rank.step += 1
                moved = "moved"
            rank.block, rank.step = rank.block + 1, 0
        return "done"

    def _compute(self, rank: _Rank, segment: _Segment) -> None:
        rank.clock += segment.device_s
        if segment.host_s or rank.host_s:
            np.add(segment.host_floor_s, rank.host_s, out=self.scratch)
            np.maximum(rank.clock, self.scratch, out=rank.clock)
            rank.host_s += segment.host_s

    def _send(self, index: int, rank: _Rank, send: Send) -> bool:
        """Put a message on its link; False where a rendezvous still waits for its receiver."""
        edge = (index, send.dst)
        if not send.rendezvous:
            rank.host_s += send.host_s
            ready = np.maximum(rank.clock, rank.host_s) if rank.host_s else rank.clock
            self.arrivals.setdefault(edge, deque()).append(self._transmit(edge, ready, send.nbytes))
            return True
        if edge in self.taken:
            self.taken.remove(edge)
            return True
        if edge not in self.offers:
            rank.host_s += send.host_s
            self.offers[edge] = send
        return False

    def _recv(self, index: int, rank: _Rank, recv: Recv) -> bool:
        """Wait for a message; False where it is not on its way yet."""
        edge = (recv.src, index)
        if offer := self.offers.pop(edge, None):
            rank.host_s += recv.host_s
            sender = self.ranks[recv.src]
            ready = np.maximum(np.maximum(sender.clock, sender.host_s), np.maximum(rank.clock, rank.host_s))
            rank.clock = self._transmit(edge, ready, offer.nbytes)
            np.maximum(sender.clock, self.links[edge], out=sender.clock)
            self.taken.add(edge)
            return True
        if queue := self.arrivals.get(edge):
            rank.host_s += recv.host_s
            np.maximum(rank.clock, queue.popleft(), out=rank.clock)
            return True
        return False

    def _transmit(self, edge: tuple[int, int], ready: Array, nbytes: Array) -> Array:
        """Queue on the link and cross it; returns when the message arrives, a new array."""
        path = self.cluster.path(*edge)
        link = np.maximum(self.links.get(edge, 0.0), ready)
        link += nbytes / path.bandwidth_bytes_per_s
        self.links[edge] = link
        return link + path.latency_s

    def _all_gather(self) -> None:
        """The ring, all ranks at once: step k moves the piece that came k hops to the next rank."""
        num_ranks = len(self.ranks)
        ops = [_gather_of(rank) for rank in self.ranks]
        for rank, op in zip(self.ranks, ops, strict=True):
            rank.host_s += op.host_s
        start = np.stack([np.maximum(rank.clock, rank.host_s) for rank in self.ranks])
        paths = [self.cluster.path(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
        latency = np.array([path.latency_s for path in paths])[:, None]
        seconds_per_byte = 1.0 / np.array([path.bandwidth_bytes_per_s for path in paths])[:, None]
        pieces = np.stack([np.broadcast_to(op.nbytes, start.shape[1:]) for op in ops])
        both_there = np.maximum(start, np.roll(start, -1, axis=0))
        edges = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
        link = np.stack([np.broadcast_to(self.links.get(edge, 0.0), start.shape[1:]) for edge in edges])
        held, clock = start, start.copy()
        for _ in range(num_ranks - 1):
            link = np.maximum(np.maximum(held, both_there), link) + pieces * seconds_per_byte
            held = np.roll(link + latency, 1, axis=0)
            pieces = np.roll(pieces, 1, axis=0)
            np.maximum(clock, held, out=clock)
        for index, rank in enumerate(self.ranks):
            self.links[edges[index]] = link[index]
            rank.clock[:] = clock[index]
            rank.step += 1


def _gather_of(rank: _Rank) -> AllGather:
    op = rank.blocks[rank.block][rank.step]
    assert isinstance(op, AllGather)
    return op


def _width(program: Program) -> int:
    """The batch size B that the program's numbers were built for."""
    sizes = [np.size(op.device_s) for kind in program.layers for ops in kind for op in ops if isinstance(op, Compute)]
    return max(sizes, default=1)
