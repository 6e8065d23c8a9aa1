"""The batch executor: max-plus arithmetic over thousands of partitions at once, and over samples of noise.

The order in which messages match does not depend on durations. So a program is evaluated once, with arrays instead of
numbers: of shape (B,), or (B, samples) under noise. Work before and after messages, and collectives, are evaluated for
all ranks at once; messages are evaluated per rank, as far as they allow. This executor is for networks whose flows do
not share bandwidth; for other networks see kvrsim.executors.bus.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
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

if TYPE_CHECKING:  # importing noise would slow the start of every plan
    from kvrsim.noise import NoiseDraw

Edge = tuple[int, int]
_NEVER = -np.inf  # time at which an unused link was last busy
_MANY = 8  # number of consecutive operations from which segment_of uses arrays
_LARGE = 2**14  # partitions x ranks of a large batch, whose last partitions to become steady run again on their own
_FEW = 16  # a large batch leaves at most 1/16 of its partitions to this second run


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
        floor_s = np.maximum(device_s, op.host_s) if op.host_s else device_s
        return cls(device_s, floor_s, op.host_s, isinstance(op, Compute))

    def then(self, other: Segment) -> Segment:
        """This segment followed by another one; the maxima distribute over the sums."""
        device_s = self.device_s + other.device_s
        if self.floor_s is self.device_s and other.floor_s is other.device_s and not self.host_s:  # hosts issue nothing
            return Segment(device_s, device_s, other.host_s)
        floor_s = np.maximum(self.floor_s + other.device_s, self.host_s + other.floor_s)
        return Segment(device_s, floor_s, self.host_s + other.host_s)


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


_Collective = AllGather | RingPass | AllToAll
Step = Segment | Message | Recv | Load | _Collective
Block = list[list[Step]]  # steps of each rank


@dataclass(frozen=True, slots=True)
class _Segments:
    """One segment per rank."""

    device_s: Array  # shape (ranks, B)
    floor_s: Array
    hosts_s: list[float]


_Phase = _Segments | Callable[[], None] | Block  # or a collective of all ranks, or steps of each rank


def compile_blocks(program: Program, path: Callable[[int, int], Path], draw: NoiseDraw | None = None) -> list[Block]:
    """Steps of a program: blocks of the prologue, of each kind of layer, and of the epilogue, in this order.

    Consecutive computes are merged, except under noise, where arrays have an axis of samples.
    path: path from one rank to another.
    """
    # Ranks share steps, except those with messages on a rank's own links.
    known: dict[tuple[int | None, int], list[Step]] = {}

    def compiled(rank: int, ops: tuple[Op, ...]) -> list[Step]:
        key = rank if any(isinstance(op, Send) for op in ops) else None, id(ops)
        if key not in known:
            known[key] = _compile(rank, ops, path, under_noise=draw is not None)
        return known[key]

    return [
        [compiled(rank, ops) for rank, ops in enumerate(block)]
        for block in (program.prologue, *program.layers, program.epilogue)
    ]


def _compile(rank: int, ops: Sequence[Op], path_to: Callable[[int, int], Path], *, under_noise: bool) -> list[Step]:
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
                path = path_to(rank, op.dst)
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

    clock: Array  # device time: the rank's row of the array of all ranks
    host_s: float = 0.0  # time at which the host has issued all operations so far; the host runs ahead
    steps: Sequence[Step] = ()
    step: int = 0
    num_computes: int = 0
    loaded_s: Array | float = 0.0  # time at which all loads so far have left their link

    def issue(self, host_s: float) -> Array:
        """Issue an operation on the host; return the time at which the device reaches it."""
        self.host_s += host_s
        return np.maximum(self.clock, self.host_s) if self.host_s else self.clock


class Links:
    """Paths between the ranks of a cluster, each prepared once for many programs."""

    def __init__(self, cluster: Cluster) -> None:
        assert not cluster.shares_bandwidth, "flows that share a bandwidth need run_shared"
        self.path = cache(cluster.path)
        self.edges = cache(lambda ranks, shift: _Edges(self.path, ranks, shift))


def run_batch(program: Program, cluster: Cluster | Links, draw: NoiseDraw | None = None) -> Array:
    """Time at which each rank finishes, seconds, shape (num_ranks, B), or (num_ranks, B, samples) under noise.

    TTFT is the time of the last rank.
    """
    links = cluster if isinstance(cluster, Links) else Links(cluster)
    run = _Evaluation(program, links, draw=draw)
    if run.unsteady.any():
        run.clock[:, run.unsteady] = run_batch(program.rows(np.flatnonzero(run.unsteady)), links)
    return run.clock


class _Evaluation:
    """One evaluation of a program, with the state of the ranks and of the messages in flight.

    `clock`: device time of each rank, at the end the time at which it finishes, shape (num_ranks, B), or (num_ranks, B,
    samples). `unsteady`: partitions whose times are not valid, because most others reach steady state sooner.
    `links_s`: time at which each link is free again; a key (rank, rank) stands for all messages of a rank that leave in
    turn.

    draw: samples of noise, the same for every partition.
    """

    def __init__(self, program: Program, links: Links, *, draw: NoiseDraw | None = None) -> None:
        self.links, self.draw = links, draw
        self.shape = (program.num_rows,) if draw is None else (program.num_rows, draw.num_samples)
        self.clock = np.zeros((program.num_ranks, *self.shape))
        self.unsteady = np.zeros(program.num_rows, dtype=bool)
        self.ranks = [_Rank(clock) for clock in self.clock]
        self.links_s: dict[Edge, Array] = {}
        self.never = np.full(self.shape, _NEVER)
        self.num_messages: dict[Edge, int] = {}
        self.arrivals: dict[Edge, deque[Array]] = {}
        self.offers: dict[Edge, Message] = {}  # rendezvous sends whose receiver has not arrived yet
        self.taken: set[Edge] = set()  # completed rendezvous, whose sender may continue
        self.collectives: dict[tuple[int, int], Callable[[], None]] = {}  # prepared, by first rank and its operation
        prologue, *kinds, epilogue = compile_blocks(program, links.path, draw)
        self._run(self._phases(prologue))
        for period, times in periods_of(program):
            steps = [[step for kind in period for step in kinds[kind][rank]] for rank in range(len(self.ranks))]
            self._repeat(steps, times)
        self._run(self._phases(epilogue))
        self.collectives.clear()  # they refer to this evaluator: a cycle would keep its arrays until a collection

    def _phases(self, steps: Block) -> list[_Phase]:
        """Split a block into phases; one under noise, or if not all ranks run the same collectives together."""
        ranks = range(len(steps))
        collectives = [[step for step in own if isinstance(step, _Collective)] for own in steps]
        alike = len({tuple(map(type, own)) for own in collectives}) == 1
        if self.draw is not None or not alike or any(_members(op, 0, len(ranks)) != ranks for op in collectives[0]):
            return [steps]
        parts = [_split(own) for own in steps]
        phases = list(_around_messages([own[0] for own in parts]))
        for number, ops in enumerate(zip(*collectives, strict=True), 1):
            phases += [self._prepared(ranks, ops), *_around_messages([own[number] for own in parts])]
        return phases

    def _repeat(self, steps: Block, times: int) -> None:
        """Run the period `times` times; once all times advance steadily, add the rest in one step.

        A large batch does not wait for its last partitions: they become `unsteady`.
        """
        phases = self._phases(steps)
        exchanges = [(rank, step) for rank, own in enumerate(steps) for step in own if not isinstance(step, Segment)]
        in_order = all(
            isinstance(one, Recv | Load) or (isinstance(one, Message) and one.dst > rank and not one.rendezvous)
            for rank, one in exchanges
        )
        few = self.clock.shape[1] // _FEW if self.clock.size >= _LARGE else 0
        states_s: list[Array] = []
        least_s: list[Array] = []  # least clock of each rank after each period
        for left in reversed(range(times)):
            before_s, links_s = [rank.host_s for rank in self.ranks], dict(self.links_s)
            self._run(phases)
            if self.draw is not None:
                continue
            used = sorted(edge for edge, free_s in self.links_s.items() if free_s is not links_s.get(edge))
            rows = sorted([*((rank, -1) for rank in range(len(self.ranks))), *used])  # links after the rank that sends
            states_s = states_s[-2 * max(CYCLES) :]
            states_s.append(np.stack([self.clock[row[0]] if row[1] < 0 else self.links_s[row] for row in rows]))
            least_s.append(self.clock.min(axis=1))
            hosts_s = np.array([rank.host_s for rank in self.ranks])
            issued_s = hosts_s - before_s
            for cycle in filter(lambda cycle: left % cycle == 0, CYCLES):
                # Hosts that lead throughout the last cycle delay nothing in it: then one advance is enough.
                leads = not in_order and len(states_s) > cycle and (hosts_s <= least_s[-1 - cycle]).all()
                first = (1 if leads else 2) * cycle
                if len(states_s) <= first:
                    break
                compared_s, issued = states_s[-1 - first :: cycle], cycle * issued_s.max()
                advance_s, is_steady = steady_advance(compared_s, issued, in_order=in_order)
                if np.count_nonzero(~is_steady) > few:
                    continue
                self.unsteady |= ~is_steady
                for row, seconds in zip(rows, left // cycle * advance_s, strict=True):
                    if row[1] < 0:
                        self.clock[row[0]] += seconds
                    else:
                        self.links_s[row] = self.links_s[row] + seconds
                for rank, host_s in zip(self.ranks, issued_s.tolist(), strict=True):
                    rank.host_s += left * host_s
                return

    def _run(self, phases: Sequence[_Phase]) -> None:
        for phase in phases:
            if isinstance(phase, _Segments):
                self.clock += phase.device_s
                if any(phase.hosts_s) or any(rank.host_s for rank in self.ranks):
                    np.maximum(self.clock, phase.floor_s + self._hosts_s(), out=self.clock)
                for rank, host_s in zip(self.ranks, phase.hosts_s, strict=True):
                    rank.host_s += host_s
            elif isinstance(phase, list):
                self._run_apart(phase)
            else:
                phase()

    def _hosts_s(self, ranks: slice = slice(None)) -> Array:
        """Host time of these ranks, with as many axes as their clocks."""
        return _column([rank.host_s for rank in self.ranks[ranks]], self.clock)

    def _run_apart(self, steps: Block) -> None:
        """Run each rank to the end of its steps; a collective runs once all of its ranks have reached it."""
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
                op = cast(_Collective, self.ranks[index].steps[self.ranks[index].step])
                groups.add(_members(op, index, len(self.ranks)))
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
            end_s = (
                self._computed_s(index, begin_s, segment.device_s) if segment.has_noise else begin_s + segment.device_s
            )
            np.maximum(end_s, rank.host_s + segment.host_s, out=rank.clock)
        else:
            rank.clock += segment.device_s
            if segment.host_s or rank.host_s:
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
            rank.clock[:] = rank.issue(message.host_s)
            self.offers[edge] = message
        return False

    def _recv(self, index: int, rank: _Rank, recv: Recv) -> bool:
        """Wait for a message; return False if it is not sent yet."""
        edge = (recv.src, index)
        if offer := self.offers.pop(edge, None):
            # The streams of both ranks have waited for all earlier messages, so the link is free.
            sender = self.ranks[recv.src]
            begin_s = np.maximum(sender.clock, rank.issue(recv.host_s))
            sender.clock[:] = self._left_s(edge, begin_s, offer.link_s)
            np.add(sender.clock, offer.latency_s, out=rank.clock)
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
        members = self.ranks[ranks.start : ranks.stop]
        ops = [cast(_Collective, rank.steps[rank.step]) for rank in members]
        key = ranks.start, id(ops[0])
        if key not in self.collectives:
            self.collectives[key] = self._prepared(ranks, ops)
        self.collectives[key]()
        for rank in members:
            rank.step += 1

    def _prepared(self, ranks: range, ops: Sequence[_Collective]) -> Callable[[], None]:
        """Prepare a collective."""
        assert len({type(op) for op in ops}) == 1, "the ranks have come to different collectives"
        if isinstance(ops[0], AllGather):
            return self._all_gather(ranks, cast(list[AllGather], ops))
        if isinstance(ops[0], RingPass):
            return self._ring_pass(ranks, cast(list[RingPass], ops))
        return self._all_to_all(ranks, cast(list[AllToAll], ops))

    def _issued_s(self, ranks: range, ops: Sequence[AllGather | AllToAll]) -> Array:
        """Issue a collective on the hosts; return the times at which the devices reach it."""
        own = slice(ranks.start, ranks.stop)
        for rank, op in zip(self.ranks[own], ops, strict=True):
            rank.host_s += op.host_s
        return np.maximum(self.clock[own], self._hosts_s(own))

    def _all_gather(self, ranks: range, ops: Sequence[AllGather]) -> Callable[[], None]:
        """Prepare a ring all-gather: in step k, each rank forwards the piece that has made k hops."""
        edges, size = self.links.edges(ranks, 1), len(ranks)

        def step_s(path: Path, nbytes: Array) -> Array:
            return path.gather_step_s(nbytes, size)

        pieces = self._stack([op.nbytes for op in ops])
        twice, whole = (
            np.concatenate([pieces, pieces]),
            [slice(size - step, 2 * size - step) for step in range(size - 1)],
        )
        # By step: seconds of the piece that each rank holds in this step.
        if len(edges.rows) == 1:
            twice_s = seconds_on(edges.rows, step_s, twice)
            pieces_s = [twice_s[own] for own in whole]
        else:
            pieces_s = [seconds_on(edges.rows, step_s, twice[own]) for own in whole]
        launch_s, latency_s = edges.values("gather_launch_s", pieces), edges.values("gather_latency_s", pieces)

        def run() -> None:
            start = self._issued_s(ranks, ops)
            start += launch_s
            # When both ranks are there and the link is free; each later step waits only for pieces.
            link = np.maximum(_later_of(start, start, -1), self._free_s(edges))
            for step, step_s in enumerate(pieces_s):
                link = self._sent_s(edges, _later_of(link, link + latency_s, 1) if step else link, step_s)
            self.clock[ranks.start : ranks.stop] = _later_of(start, link + latency_s, 1) if pieces_s else start
            self.links_s.update(zip(edges.pairs, link, strict=True))

        return run

    def _ring_pass(self, ranks: range, ops: Sequence[RingPass]) -> Callable[[], None]:
        """Prepare rounds of work, in each of which a piece goes to the next rank."""
        edges = self.links.edges(ranks, 1)
        rounds_s = [self._stack([op.device_s[index] for op in ops]) for index in range(len(ranks))]
        sent_s = [
            seconds_on(edges.rows, Path.busy_s, self._stack([op.nbytes[index] for op in ops]))
            for index in range(len(ranks) - 1)
        ]
        hosts_s = [_column([op.host_s[index] for op in ops], rounds_s[0]) for index in range(len(ranks))]
        latency_s = edges.values("latency_s", rounds_s[0])

        def computed(start: Array, work_s: Array) -> Array:
            if self.draw is None:
                return start + work_s
            return np.stack([self._computed_s(rank, start[rank], work_s[rank]) for rank in ranks])

        def run() -> None:
            host, free = self._hosts_s(), self._free_s(edges)
            for rank, op in zip(self.ranks, ops, strict=True):
                rank.host_s += sum(op.host_s)
            clock = np.maximum(self.clock, host)
            for number, (work_s, busy_s, host_s) in enumerate(zip(rounds_s, sent_s, hosts_s, strict=False)):
                host = host + host_s
                begin = _later_of(clock, clock, -1)
                link = self._sent_s(edges, begin if number else np.maximum(begin, free), busy_s)
                there = _later_of(link, link + latency_s, 1)
                if ops[0].overlaps:
                    beside_s = beside_message_s(work_s, there - clock, ops[0].message_share)
                    clock = np.maximum(computed(clock, beside_s), there)
                else:
                    clock = computed(there, work_s)
                np.maximum(clock, host, out=clock)
            np.maximum(computed(clock, rounds_s[-1]), host + hosts_s[-1], out=self.clock)

        return run

    def _all_to_all(self, ranks: range, ops: Sequence[AllToAll]) -> Callable[[], None]:
        """Prepare an all-to-all: messages to the ranks `shift` positions later are evaluated together."""
        size = len(ranks)
        by_shift = [self.links.edges(ranks, shift) for shift in range(1, size)]
        # Messages of equal size are one row, repeated without a copy.
        nbytes = [op.nbytes if op.nbytes.strides[0] else op.nbytes[:1] for op in ops]
        busy_s = {path: list(map(path.busy_s, nbytes)) for path in {path for edges in by_shift for path in edges.rows}}
        each = []  # by shift: edges, seconds on the links, latencies
        for index, edges in enumerate(by_shift):
            of_rank = {rank: busy_s[path][rank] for path, rows in edges.rows.items() for rank in rows}
            sent_s = self._stack([of_rank[rank][min(index, len(nbytes[rank]) - 1)] for rank in ranks])
            each.append((edges, sent_s, edges.values("latency_s", sent_s)))

        def run() -> None:
            left = self._issued_s(ranks, ops)
            arrival = np.empty_like(left)
            # Ranks twice in a row: the rank `shift` positions later is then a slice.
            start, clock = np.concatenate([left, left]), np.concatenate([left, left])
            for shift, (edges, sent_s, late_s) in enumerate(each, 1):
                np.maximum(left, start[shift : shift + size], out=left)
                left = self._sent_s(edges, left, sent_s)
                there = clock[shift : shift + size]
                np.maximum(there, np.add(left, late_s, out=arrival), out=there)
            np.maximum(clock[:size], clock[size:], out=self.clock)
            np.maximum(self.clock, left, out=self.clock)

        return run

    def _stack(self, values: Sequence[Array]) -> Array:
        """One row per rank, shape (ranks, B), with an additional axis of samples under noise."""
        rows = np.stack(np.broadcast_arrays(*values))
        return rows[..., None] if self.draw is not None else rows

    def _free_s(self, edges: _Edges) -> Array:
        """Time at which each of these links is free."""
        return np.array([self.links_s.get(edge, self.never) for edge in edges.pairs])

    def _sent_s(self, edges: _Edges, start_s: Array, busy_s: Array) -> Array:
        """Time at which each rank's message has left over its edge, in the array of the start times or a new one."""
        if self.draw is None:
            start_s += busy_s
            return start_s
        return np.stack([self._left_s(edge, start_s[index], busy_s[index]) for index, edge in enumerate(edges.pairs)])


class _Edges:
    """Edges from every rank of a collective to the rank `shift` positions later."""

    def __init__(self, path: Callable[[int, int], Path], ranks: range, shift: int) -> None:
        self.pairs = tuple((rank, ranks[(number + shift) % len(ranks)]) for number, rank in enumerate(ranks))
        self.paths = [path(*pair) for pair in self.pairs]
        self.rows = rows_of(self.paths)

    def values(self, name: str, like: Array) -> Array:
        """An attribute of the path of each rank; axes of length 1 are added up to the number of axes of `like`."""
        return _column([getattr(path, name) for path in self.paths], like)


def rows_of(paths: Sequence[Path]) -> dict[Path, list[int]]:
    """Positions of each path."""
    rows: dict[Path, list[int]] = {}
    for row, path in enumerate(paths):
        rows.setdefault(path, []).append(row)
    return rows


def seconds_on(rows: Mapping[Path, list[int]], time_of: Callable[[Path, Array], Array], nbytes: Array) -> Array:
    """Seconds of messages, one per path; rows: result of rows_of; nbytes: shape (paths, ...)."""
    if len(rows) == 1:
        return time_of(next(iter(rows)), nbytes)
    seconds = np.empty(nbytes.shape)
    for path, own in rows.items():
        seconds[own] = time_of(path, nbytes[own])
    return seconds


def _column(values: Sequence[float] | Array, like: Array) -> Array:
    """One value per rank, with as many axes as `like`."""
    return np.array(values).reshape(-1, *[1] * (like.ndim - 1))


def _later_of(rows: Array, others: Array, by: int) -> Array:
    """The later of each rank's row and the row of `others` of the rank `by` positions before it on the ring."""
    later = np.empty(rows.shape)
    np.maximum(rows[by:], others[:-by], out=later[by:])
    np.maximum(rows[:by], others[-by:], out=later[:by])
    return later


def _members(op: _Collective, rank: int, num_ranks: int) -> range:
    """Ranks that run a rank's collective together."""
    return op.members(rank, num_ranks) if isinstance(op, AllGather) else range(num_ranks)


def _split(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps of a rank before, between and after its collectives."""
    parts: list[list[Step]] = [[]]
    for step in steps:
        if isinstance(step, _Collective):
            parts.append([])
        else:
            parts[-1].append(step)
    return parts


def _around_messages(steps: Block) -> Iterator[_Phase]:
    """Phases of steps without collectives: segments before all messages, the messages, and segments after them."""
    before, between, after = [], [], []
    for own in steps:
        waits = [at for at, step in enumerate(own) if not isinstance(step, Segment)]
        first, end = (waits[0], waits[-1] + 1) if waits else (len(own), len(own))
        before.append(own[:first])
        between.append(own[first:end])
        after.append(own[end:])
    if any(before):
        yield _joint(before)
    if any(between):
        yield between
    if any(after):
        yield _joint(after)


def _joint(steps: Block) -> _Segments:
    """One segment per rank from consecutive segments."""
    each = [reduce(Segment.then, cast(list[Segment], own)) if own else NO_WORK for own in steps]
    device_s = np.stack(np.broadcast_arrays(*(one.device_s for one in each)))
    is_device = all(one.floor_s is one.device_s for one in each)
    floor_s = device_s if is_device else np.stack(np.broadcast_arrays(*(one.floor_s for one in each)))
    return _Segments(device_s, floor_s, [one.host_s for one in each])
