"""The batch executor: max-plus arithmetic over thousands of partitions at once, and over samples of noise.

The order in which messages match does not depend on durations. So a program is evaluated once, each rank as far as its
messages allow, with arrays instead of numbers: of shape (B,), or (B, samples) under noise. This executor is for
networks whose flows do not share bandwidth; for other networks see kvrsim.executors.bus.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING, cast

import numpy as np

from kvrsim.executors.steady import CYCLES, periods_of, steady_advance
from kvrsim.hardware import Cluster, Path
from kvrsim.program import (
    AllGather,
    AllToAll,
    Array,
    Collective,
    Compute,
    Load,
    Op,
    Program,
    Recv,
    RingPass,
    Send,
    beside_message_s,
    host_s_of,
    stream_s,
)
from kvrsim.values import dataclass

if TYPE_CHECKING:  # importing noise would slow the start of every plan
    from kvrsim.noise import NoiseDraw

Edge = tuple[int, int]
_NEVER = -np.inf  # time at which an unused link was last busy
_MANY = 8  # number of consecutive operations from which segment_of uses arrays


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive computations as one function of time: `t' = max(t + device_s, host_begin + floor_s)`."""

    device_s: Array
    floor_s: Array
    host_s: float
    has_noise: bool = True  # whether noise delays it: True for computations, False for collectives of a rank's GPUs

    @classmethod
    def of(cls, op: Op) -> Segment:
        """The segment of one compute or collective."""
        assert isinstance(op, Compute | Collective)
        device_s = op.device_s if isinstance(op, Compute) else op.seconds
        return cls(device_s, np.maximum(device_s, op.host_s), op.host_s, isinstance(op, Compute))

    def then(self, other: Segment) -> Segment:
        """This segment followed by another one; the maxima distribute over the sums."""
        floor_s = np.maximum(self.floor_s + other.device_s, self.host_s + other.floor_s)
        return Segment(self.device_s + other.device_s, floor_s, self.host_s + other.host_s)


def segment_of(ops: Sequence[Op]) -> Segment:
    """Consecutive computes and collectives as one segment, with few numpy calls if they are many."""
    if len(ops) < _MANY:
        return reduce(Segment.then, map(Segment.of, ops)) if ops else NO_WORK
    device_s = np.stack(np.broadcast_arrays(*map(stream_s, ops)))
    host_s = np.array([host_s_of(op) for op in ops]).reshape(-1, *[1] * (device_s.ndim - 1))
    rest_s = np.cumsum(device_s[::-1], axis=0)[::-1] - device_s  # device seconds of the operations after each one
    floors_s = np.cumsum(host_s, axis=0) - host_s + np.maximum(device_s, host_s) + rest_s
    return Segment(device_s.sum(axis=0), floors_s.max(axis=0), float(host_s.sum()))


NO_WORK = Segment(np.zeros(1), np.full(1, -np.inf), 0.0)


@dataclass(frozen=True, slots=True)
class Message:
    """A send with its time on the link."""

    dst: int
    link_s: Array
    latency_s: float
    host_s: float
    rendezvous: bool
    in_turn: bool


Step = Segment | Message | Recv | AllGather | RingPass | AllToAll | Load
Block = list[list[Step]]  # steps of each rank


def compile_blocks(program: Program, cluster: Cluster, draw: NoiseDraw | None = None) -> list[Block]:
    """Steps of a program: blocks of the prologue, of each kind of layer, and of the epilogue, in this order.

    Consecutive computes are merged, except under noise, where arrays have an axis of samples.
    """
    # Ranks share steps, except those with messages on a rank's own links.
    known: dict[tuple[int | None, int], list[Step]] = {}

    def compiled(rank: int, ops: tuple[Op, ...]) -> list[Step]:
        key = rank if any(isinstance(op, Send) for op in ops) else None, id(ops)
        if key not in known:
            known[key] = _compile(rank, ops, cluster, under_noise=draw is not None)
        return known[key]

    return [
        [compiled(rank, ops) for rank, ops in enumerate(block)]
        for block in (program.prologue, *program.layers, program.epilogue)
    ]


def _compile(rank: int, ops: Sequence[Op], cluster: Cluster, *, under_noise: bool) -> list[Step]:
    steps: list[Step] = []
    for is_work, group in groupby(ops, lambda op: isinstance(op, Compute | Collective)):
        if is_work:
            if under_noise:
                steps.extend(_wide(Segment.of(op)) for op in group)
            else:
                steps.append(segment_of(list(group)))
            continue
        for op in group:
            if isinstance(op, Send):
                path = cluster.path(rank, op.dst)
                link_s = path.busy_s(op.nbytes[..., None] if under_noise else op.nbytes)
                steps.append(Message(op.dst, link_s, path.latency_s, op.host_s, op.rendezvous, op.in_turn))
            else:
                steps.append(cast(Step, op))
    return steps


def _wide(segment: Segment) -> Segment:
    """Return the segment with an additional axis of samples."""
    return replace(segment, device_s=segment.device_s[..., None], floor_s=segment.floor_s[..., None])


@dataclasses.dataclass(slots=True)
class _Rank:
    """State of one rank in its program."""

    clock: Array  # device time
    host_s: float = 0.0  # time at which the host has issued all operations so far; the host runs ahead
    steps: Sequence[Step] = ()
    step: int = 0
    num_computes: int = 0
    loaded_s: Array | float = 0.0  # time at which all loads so far have left their link

    def issue(self, host_s: float) -> Array:
        """Issue an operation on the host; return the time at which the device reaches it."""
        self.host_s += host_s
        return np.maximum(self.clock, self.host_s) if self.host_s else self.clock


def run_batch(program: Program, cluster: Cluster, draw: NoiseDraw | None = None) -> Array:
    """Time at which each rank finishes, seconds, shape (num_ranks, B), or (num_ranks, B, samples) under noise.

    TTFT is the time of the last rank.
    """
    return BatchEvaluator(program, cluster, draw=draw).finish_s


class BatchEvaluator:
    """One evaluation of a program, with the state of the ranks and of the messages in flight.

    `finish_s`: time at which each rank finishes, shape (num_ranks, B), or (num_ranks, B, samples). `links_s`: time at
    which each link is free again; a key (rank, rank) stands for all messages of a rank that leave in turn.

    draw: samples of noise, the same for every partition.
    """

    def __init__(self, program: Program, cluster: Cluster, *, draw: NoiseDraw | None = None) -> None:
        assert not cluster.shares_bandwidth, "flows that share a bandwidth need run_shared"
        self.cluster, self.draw = cluster, draw
        self.shape = (program.num_rows,) if draw is None else (program.num_rows, draw.num_samples)
        self.ranks = [_Rank(np.zeros(self.shape)) for _ in range(program.num_ranks)]
        self.links_s: dict[Edge, Array] = {}
        self.never = np.full(self.shape, _NEVER)
        self.num_messages: dict[Edge, int] = {}
        self.arrivals: dict[Edge, deque[Array]] = {}
        self.offers: dict[Edge, Message] = {}  # rendezvous sends whose receiver has not arrived yet
        self.taken: set[Edge] = set()  # completed rendezvous, whose sender may continue
        self.edges: dict[tuple[range, int], _Edges] = {}
        self.collectives: dict[tuple[int, int], Callable[[], Array]] = {}  # prepared, by first rank and its operation
        prologue, *kinds, epilogue = compile_blocks(program, cluster, draw)
        self._run(prologue)
        for period, times in periods_of(program):
            self._repeat(
                [[step for kind in period for step in kinds[kind][rank]] for rank in range(len(self.ranks))], times
            )
        self._run(epilogue)
        self.collectives.clear()  # they refer to this evaluator: a cycle would keep its arrays until a collection
        self.finish_s = np.stack([rank.clock for rank in self.ranks])

    def _repeat(self, steps: Block, times: int) -> None:
        """Run the period `times` times; once all ranks advance alike, add the rest in one step.

        Ranks that exchange only messages may advance at different rates, so every period is run for them.
        """
        exchanges = [step for own in steps for step in own if not isinstance(step, Segment)]
        is_collective = not exchanges or any(isinstance(one, AllGather | RingPass | AllToAll) for one in exchanges)
        states_s: list[Array] = []
        for left in reversed(range(times)):
            hosts_s, links_s = [rank.host_s for rank in self.ranks], dict(self.links_s)
            self._run(steps)
            if self.draw is not None or not is_collective:
                continue
            used = [edge for edge, free_s in self.links_s.items() if free_s is not links_s.get(edge)]
            states_s = states_s[-2 * max(CYCLES) :]
            states_s.append(np.stack([*(rank.clock for rank in self.ranks), *(self.links_s[edge] for edge in used)]))
            issued_s = [rank.host_s - before_s for rank, before_s in zip(self.ranks, hosts_s, strict=True)]
            for cycle in filter(lambda cycle: left % cycle == 0, CYCLES):
                advance_s = steady_advance(states_s[-1 - 2 * cycle :: cycle], cycle * max(issued_s))
                if advance_s is not None:
                    for rank, host_s in zip(self.ranks, issued_s, strict=True):
                        rank.clock += left // cycle * advance_s
                        rank.host_s += left * host_s
                    for edge in used:
                        self.links_s[edge] = self.links_s[edge] + left // cycle * advance_s
                    return

    def _run(self, steps: Block) -> None:
        """Run ranks to the end of their steps; a collective runs once all of its ranks have reached it."""
        for rank, own in zip(self.ranks, steps, strict=True):
            rank.steps, rank.step = own, 0
        while True:
            before = self._progress()
            states = [self._advance(index, rank) for index, rank in enumerate(self.ranks)]
            if all(state == "done" for state in states):
                return
            groups = self._ready(states)
            for ranks in groups:
                self._collective(ranks)
            if not groups and self._progress() == before:
                raise AssertionError(f"the program deadlocks: {states}")

    def _ready(self, states: Sequence[str]) -> list[range]:
        """Groups of ranks that have all reached their collective."""
        groups = set()
        for index, state in enumerate(states):
            if state == "collective":
                op, num_ranks = self.ranks[index].steps[self.ranks[index].step], len(self.ranks)
                groups.add(op.members(index, num_ranks) if isinstance(op, AllGather) else range(num_ranks))
        return [ranks for ranks in groups if all(states[rank] == "collective" for rank in ranks)]

    def _progress(self) -> tuple[int, int, int]:
        """A value that changes whenever a rank advances or offers a message."""
        return sum(rank.step for rank in self.ranks), len(self.offers), len(self.taken)

    def _advance(self, index: int, rank: _Rank) -> str:
        """Run one rank to its end ("done"), to a collective, or to a step whose message is missing ("waits")."""
        while rank.step < len(rank.steps):
            step = rank.steps[rank.step]
            if isinstance(step, Segment):
                self._compute(index, rank, step)
            elif isinstance(step, Message):
                if not self._send(index, rank, step):
                    return "waits"
            elif isinstance(step, Recv):
                if not self._recv(index, rank, step):
                    return "waits"
            elif isinstance(step, Load):
                self._load(rank, step)
            else:
                return "collective"
            rank.step += 1
        return "done"

    def _compute(self, index: int, rank: _Rank, segment: Segment) -> None:
        if self.draw is not None:
            begin_s = np.maximum(rank.clock, rank.host_s)
            rank.clock = begin_s + segment.device_s
            if segment.has_noise:
                rank.clock = self._computed_s(index, begin_s, segment.device_s)
            np.maximum(rank.clock, rank.host_s + segment.host_s, out=rank.clock)
        else:
            rank.clock += segment.device_s
            np.maximum(rank.clock, segment.floor_s + rank.host_s, out=rank.clock)
        rank.host_s += segment.host_s

    def _send(self, index: int, rank: _Rank, message: Message) -> bool:
        """Put a message on its link; return False if a rendezvous still waits for its receiver."""
        edge = (index, message.dst)
        if not message.rendezvous:
            way = (index, index) if message.in_turn else edge  # one way out of the rank, or the link of the pair
            begin_s = np.maximum(self.links_s.get(way, _NEVER), rank.issue(message.host_s))
            left_s = self.links_s[way] = self._left_s(edge, begin_s, message.link_s)
            self.arrivals.setdefault(edge, deque()).append(left_s + message.latency_s)
            return True
        if edge in self.taken:
            self.taken.remove(edge)
            return True
        if edge not in self.offers:
            rank.clock = rank.issue(message.host_s)
            self.offers[edge] = message
        return False

    def _recv(self, index: int, rank: _Rank, recv: Recv) -> bool:
        """Wait for a message; return False if it is not sent yet."""
        edge = (recv.src, index)
        if offer := self.offers.pop(edge, None):
            # The streams of both ranks have waited for all earlier messages, so the link is free.
            sender = self.ranks[recv.src]
            begin_s = np.maximum(sender.clock, rank.issue(recv.host_s))
            sender.clock = self._left_s(edge, begin_s, offer.link_s)
            rank.clock = sender.clock + offer.latency_s
            self.taken.add(edge)
            return True
        if queue := self.arrivals.get(edge):
            rank.host_s += recv.host_s
            np.maximum(rank.clock, queue.popleft(), out=rank.clock)
            return True
        return False

    def _load(self, rank: _Rank, load: Load) -> None:
        """Wait for a part of the cached prefix, whose arrival does not depend on other ranks."""
        left_s = rank.loaded_s + load.seconds
        np.maximum(rank.clock, left_s + load.latency_s, out=rank.clock)
        rank.loaded_s = left_s if load.ahead else rank.clock.copy()

    def _left_s(self, edge: Edge, start_s: Array, busy_s: Array) -> Array:
        """Time at which a message that starts at `start_s` has left; noise may delay it."""
        if self.draw is None:
            return start_s + busy_s
        number = self.num_messages[edge] = self.num_messages.get(edge, -1) + 1
        return self.draw.message_end_s(*edge, number, start_s, busy_s)

    def _computed_s(self, index: int, start_s: Array, device_s: Array) -> Array:
        """Time at which a rank ends a computation; noise may delay it."""
        if self.draw is None:
            return start_s + device_s
        rank = self.ranks[index]
        rank.num_computes += 1
        return self.draw.compute_end_s(index, rank.num_computes - 1, start_s, device_s)

    # Collectives are computed for all of their ranks at once: arrays of shape (num_ranks, B) or (num_ranks, B,
    # samples).

    def _collective(self, ranks: range) -> None:
        """Run the collective that these ranks have reached; its costs are prepared once per kind of layer."""
        members = self.ranks[ranks[0] : ranks[-1] + 1]
        ops = [rank.steps[rank.step] for rank in members]
        assert len({type(op) for op in ops}) == 1, "the ranks have come to different collectives"
        key = ranks[0], id(ops[0])
        if key not in self.collectives:
            if isinstance(ops[0], AllGather):
                self.collectives[key] = self._all_gather(ranks, cast(list[AllGather], ops))
            elif isinstance(ops[0], RingPass):
                self.collectives[key] = self._ring_pass(ranks, cast(list[RingPass], ops))
            else:
                self.collectives[key] = self._all_to_all(ranks, cast(list[AllToAll], ops))
        for rank, clock in zip(members, self.collectives[key](), strict=True):
            rank.clock[:] = clock
            rank.step += 1

    def _all_gather(self, ranks: range, ops: Sequence[AllGather]) -> Callable[[], Array]:
        """Prepare a ring all-gather: in step k, each rank forwards the piece that has made k hops."""
        edges = self._edges(ranks, 1)
        pieces = self._stack([op.nbytes for op in ops])
        pieces_s = [  # by step: seconds of the piece that each rank holds in this step
            edges.seconds(lambda path, nbytes: path.gather_step_s(nbytes, len(ranks)), _shifted(pieces, step))
            for step in range(len(ranks) - 1)
        ]
        launch_s = edges.values("gather_launch_s", pieces)
        latency_s = edges.values("gather_latency_s", pieces)

        def run() -> Array:
            start = (
                np.stack([self.ranks[rank].issue(op.host_s) for rank, op in zip(ranks, ops, strict=True)]) + launch_s
            )
            both_there = np.maximum(start, _shifted(start, -1))
            link, held, clock = self._free_s(edges), start, start.copy()
            for step_s in pieces_s:
                link = self._sent_s(edges, np.maximum(np.maximum(held, both_there), link), step_s)
                held = _shifted(link + latency_s, 1)
                np.maximum(clock, held, out=clock)
            self.links_s.update(zip(edges.pairs, link, strict=True))
            return clock

        return run

    def _ring_pass(self, ranks: range, ops: Sequence[RingPass]) -> Callable[[], Array]:
        """Prepare rounds of work, in each of which a piece goes to the next rank."""
        edges = self._edges(ranks, 1)
        rounds_s = [self._stack([op.device_s[index] for op in ops]) for index in range(len(ranks))]
        sent_s = [
            edges.seconds(Path.busy_s, self._stack([op.nbytes[index] for op in ops])) for index in range(len(ranks) - 1)
        ]
        hosts_s = [_column([op.host_s[index] for op in ops], rounds_s[0]) for index in range(len(ranks))]
        latency_s = edges.values("latency_s", rounds_s[0])

        def computed(start: Array, work_s: Array) -> Array:
            if self.draw is None:
                return start + work_s
            return np.stack([self._computed_s(rank, start[rank], work_s[rank]) for rank in ranks])

        def run() -> Array:
            clock, link = np.stack([rank.clock for rank in self.ranks]), self._free_s(edges)
            host = _column([rank.host_s for rank in self.ranks], clock)
            for rank, op in zip(self.ranks, ops, strict=True):
                rank.host_s += sum(op.host_s)
            for work_s, busy_s, host_s in zip(rounds_s, sent_s, hosts_s, strict=False):
                clock = np.maximum(clock, host)
                host = host + host_s
                link = self._sent_s(edges, np.maximum(np.maximum(clock, _shifted(clock, -1)), link), busy_s)
                there = np.maximum(link, _shifted(link + latency_s, 1))
                if ops[0].overlaps:
                    beside_s = beside_message_s(work_s, there - clock, ops[0].message_share)
                    clock = np.maximum(np.maximum(computed(clock, beside_s), host), there)
                else:
                    clock = np.maximum(computed(there, work_s), host)
            return np.maximum(computed(np.maximum(clock, host), rounds_s[-1]), host + hosts_s[-1])

        return run

    def _all_to_all(self, ranks: range, ops: Sequence[AllToAll]) -> Callable[[], Array]:
        """Prepare an all-to-all: messages to the ranks `shift` positions later are evaluated together."""
        size = len(ranks)
        nbytes = self._stack([op.nbytes for op in ops])
        each = []  # by shift: edges, seconds on the links, latencies
        for shift in range(1, size):
            edges, own = self._edges(ranks, shift), nbytes[:, shift - 1]
            each.append((edges, edges.seconds(Path.busy_s, own), edges.values("latency_s", own)))

        def run() -> Array:
            left = np.stack([rank.issue(op.host_s) for rank, op in zip(self.ranks, ops, strict=True)])
            # Ranks twice in a row: the rank `shift` positions later is then a slice.
            start, clock = np.concatenate([left, left]), np.concatenate([left, left])
            for shift, (edges, sent_s, late_s) in enumerate(each, 1):
                left = self._sent_s(edges, np.maximum(left, start[shift : shift + size]), sent_s)
                there = clock[shift : shift + size]
                np.maximum(there, left + late_s, out=there)
            return np.asarray(np.maximum(np.maximum(clock[:size], clock[size:]), left))

        return run

    def _edges(self, ranks: range, shift: int) -> _Edges:
        if (ranks, shift) not in self.edges:
            self.edges[ranks, shift] = _Edges(self.cluster, ranks, shift)
        return self.edges[ranks, shift]

    def _stack(self, values: Sequence[Array]) -> Array:
        """One row per rank, shape (ranks, B), with an additional axis of samples under noise."""
        rows = np.stack(np.broadcast_arrays(*values))
        return rows[..., None] if self.draw is not None else rows

    def _free_s(self, edges: _Edges) -> Array:
        """Time at which each of these links is free."""
        return np.array([self.links_s.get(edge, self.never) for edge in edges.pairs])

    def _sent_s(self, edges: _Edges, start_s: Array, busy_s: Array) -> Array:
        """Time at which each rank's message has left over its edge."""
        if self.draw is None:
            return start_s + busy_s
        return np.stack([self._left_s(edge, start_s[index], busy_s[index]) for index, edge in enumerate(edges.pairs)])


class _Edges:
    """Edges from every rank of a collective to the rank `shift` positions later."""

    def __init__(self, cluster: Cluster, ranks: range, shift: int) -> None:
        self.pairs = tuple((rank, ranks[(number + shift) % len(ranks)]) for number, rank in enumerate(ranks))
        self.paths = [cluster.path(*pair) for pair in self.pairs]

    def seconds(self, time_of: Callable[[Path, Array], Array], nbytes: Array) -> Array:
        """Seconds of each rank's message, shape (ranks, ...), on the rank's own path."""
        return seconds_on(self.paths, time_of, nbytes)

    def values(self, name: str, like: Array) -> Array:
        """An attribute of the path of each rank; axes of length 1 are added up to the number of axes of `like`."""
        return _column([getattr(path, name) for path in self.paths], like)


def seconds_on(paths: Sequence[Path], time_of: Callable[[Path, Array], Array], nbytes: Array) -> Array:
    """Seconds of messages, one per path; nbytes: shape (paths, ...)."""
    if paths and all(path == paths[0] for path in paths):  # a comparison is faster than a hash
        return time_of(paths[0], nbytes)
    rows: dict[Path, list[int]] = {}
    for row, path in enumerate(paths):
        rows.setdefault(path, []).append(row)
    seconds = np.empty(nbytes.shape)
    for path, own in rows.items():
        seconds[own] = time_of(path, nbytes[own])
    return seconds


def _column(values: Sequence[float] | Array, like: Array) -> Array:
    """One value per rank, with as many axes as `like`."""
    return np.array(values).reshape(-1, *[1] * (like.ndim - 1))


def _shifted(rows: Array, by: int) -> Array:
    """Rows rotated by `by` positions: each rank gets the row of the rank `by` positions before it on the ring."""
    return np.concatenate([rows[-by:], rows[:-by]]) if by else rows
