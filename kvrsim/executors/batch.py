"""The batch executor: max-plus arithmetic over thousands of partitions at once.

The order in which messages match does not depend on durations, so a program is walked once, each rank
as far as its messages allow, with arrays over the batch in place of numbers. It holds on networks where
flows do not share bandwidth; where they do, the event executor is needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from kvrsim.hardware import Cluster, Path
from kvrsim.program import AllGather, Array, Compute, Op, Program, Recv, Send


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


_Step = _Segment | _Message | Recv | AllGather


def run_batch(program: Program, cluster: Cluster) -> Array:
    """When each rank has finished, seconds, shape (num_ranks, B). TTFT is the last row."""
    assert not cluster.shares_bandwidth, "flows that share a bandwidth need the event executor"
    return _Walk(program, cluster).run()


def _compile(rank: int, ops: tuple[Op, ...], cluster: Cluster) -> tuple[_Step, ...]:
    """Merge computes in a row and put times to messages."""
    steps: list[_Step] = []
    for op in ops:
        if isinstance(op, Compute):
            if steps and isinstance(steps[-1], _Segment):
                steps[-1] = _merge(steps[-1], op)
            else:
                steps.append(_Segment(op.device_s, np.maximum(op.device_s, op.host_s), op.host_s))
        elif isinstance(op, Send):
            path = cluster.path(rank, op.dst)
            steps.append(_Message(op.dst, path.busy_s(op.nbytes), path.latency_s, op.host_s, op.rendezvous))
        else:
            steps.append(op)
    return _without_host(steps)


def _merge(first: _Segment, second: Compute) -> _Segment:
    """Two computes in a row as one; the maxima distribute over the sums."""
    assert first.host_floor_s is not None
    floor = np.maximum(first.host_floor_s + second.device_s, first.host_s + np.maximum(second.device_s, second.host_s))
    return _Segment(first.device_s + second.device_s, floor, first.host_s + second.host_s)


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
        host_s += step.host_s
    return tuple(_Segment(step.device_s, None, step.host_s) if isinstance(step, _Segment) else step for step in steps)


def _joined(blocks: list[tuple[_Step, ...]]) -> list[_Step]:
    """All steps in a row; segments that meet where one layer follows another are merged if the host is ahead."""
    steps: list[_Step] = []
    merged: dict[tuple[int, int], _Segment] = {}
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
        width = _width(program)
        ranks = range(program.num_ranks)
        kinds = [[_compile(rank, kind[rank], cluster) for rank in ranks] for kind in program.layers]
        self.ranks = [
            _Rank(
                np.zeros(width),
                _joined(
                    [
                        _compile(rank, program.prologue[rank], cluster),
                        *(kinds[kind][rank] for kind in program.layer_kind_index),
                        _compile(rank, program.epilogue[rank], cluster),
                    ]
                ),
            )
            for rank in ranks
        ]
        self.cluster = cluster
        self.arrivals: dict[tuple[int, int], deque[Array]] = {}
        self.links: dict[tuple[int, int], Array] = {}
        self.offers: dict[tuple[int, int], _Message] = {}  # rendezvous whose receiver has not come yet
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
                return "gather"
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
            link = np.maximum(self.links.get(edge, 0.0), self._issued(rank, message.host_s))
            link += message.link_s
            self.links[edge] = link
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

    def _all_gather(self) -> None:
        """The ring, all ranks at once: step k moves the piece that came k hops to the next rank."""
        num_ranks = len(self.ranks)
        ops = [_gather_of(rank) for rank in self.ranks]
        for rank, op in zip(self.ranks, ops, strict=True):
            rank.host_s += op.host_s
        paths = [self.cluster.path(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
        launch_s, latency = (
            np.array([getattr(path, name) for path in paths])[:, None]
            for name in ("gather_launch_s", "gather_latency_s")
        )
        start = np.stack([np.maximum(rank.clock, rank.host_s) for rank in self.ranks]) + launch_s
        pieces = np.stack([np.broadcast_to(op.nbytes, start.shape[1:]) for op in ops])
        before, after = np.arange(-1, num_ranks - 1), np.arange(1, num_ranks + 1) % num_ranks
        both_there = np.maximum(start, start[after])
        edges = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
        link = np.stack([np.broadcast_to(self.links.get(edge, 0.0), start.shape[1:]) for edge in edges])
        held, clock = start, start.copy()
        alike = all(path == paths[0] for path in paths)
        steps_s = _steps_s(paths, pieces)
        for _ in range(num_ranks - 1):
            link = np.maximum(np.maximum(held, both_there), link) + steps_s
            held = (link + latency)[before]
            pieces = pieces[before]
            steps_s = steps_s[before] if alike else _steps_s(paths, pieces)
            np.maximum(clock, held, out=clock)
        for index, rank in enumerate(self.ranks):
            self.links[edges[index]] = link[index]
            rank.clock[:] = clock[index]
            rank.step += 1


def _steps_s(paths: list[Path], pieces: Array) -> Array:
    """Seconds that each rank's piece, shape (num_ranks, B), takes to the next rank."""
    return np.stack([path.gather_step_s(piece, len(paths)) for path, piece in zip(paths, pieces, strict=True)])


def _gather_of(rank: _Rank) -> AllGather:
    op = rank.steps[rank.step]
    assert isinstance(op, AllGather)
    return op


def _width(program: Program) -> int:
    """The batch size B that the program's numbers were built for."""
    sizes = [np.size(op.device_s) for kind in program.layers for ops in kind for op in ops if isinstance(op, Compute)]
    return max(sizes, default=1)
