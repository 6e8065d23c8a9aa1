"""The batch executor: max-plus arithmetic over thousands of partitions at once, and over samples of noise.

The order in which messages match does not depend on durations. So a program is evaluated once, with arrays instead of
numbers: of shape (B,), or (B, samples) under noise. Work before and after messages, and collectives, are evaluated for
all ranks at once; messages are evaluated per rank, as far as they allow. This executor is for networks whose flows do
not share bandwidth; for other networks see kvrsim.executors.bus.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from kvrsim.executors.steady import CYCLES, is_closed, periods_of, steady_advance
from kvrsim.hardware import Cluster, Path
from kvrsim.program import (
    AllGather,
    AllToAll,
    Array,
    Collective,
    Collectives,
    Compute,
    Load,
    Op,
    Program,
    Recv,
    RingPass,
    Send,
    beside_message_s,
    host_s_of,
    run_order,
    stream_s,
)

if TYPE_CHECKING:  # importing noise would slow the start of every plan
    from kvrsim.noise import NoiseDraw

Edge = tuple[int, int]
_MANY = 8  # number of consecutive operations from which segment_of uses arrays
_LARGE = 2**14  # partitions x ranks of a large batch, whose last partitions to become steady run again on their own
_RING_CELLS = 2**22  # largest number of partitions x ranks x rounds evaluated together; an array has 32 MiB
_FEW = 16  # a large batch leaves at most 1/16 of its partitions to this second run


class Segment(NamedTuple):
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
        if not self.host_s and not other.host_s:
            return Segment(device_s, device_s, 0.0)
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


class Message(NamedTuple):
    """A send with its time on the link."""

    dst: int
    link_s: Array
    latency_s: float
    host_s: float
    rendezvous: bool
    in_turn: bool


Step = Segment | Message | Recv | Load | Collectives
Block = list[list[Step]]  # steps of each rank
Action = Callable[[], None]


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
    return segment._replace(device_s=segment.device_s[..., None], floor_s=segment.floor_s[..., None])


@dataclass(frozen=True, slots=True)
class _PreparedLayer:
    """A layer, prepared for many repetitions."""

    actions: list[Action]
    issued_s: Array  # host seconds of each rank
    in_order: bool  # whether ranks wait only for earlier ranks
    ways: set[Edge]  # links of messages that overlap with computation; see _Evaluation.free_s


class Links:
    """Paths between ranks, each prepared once for many programs."""

    def __init__(self, path: Callable[[int, int], Path]) -> None:
        self.path = cache(path)
        self.edges = cache(lambda ranks, shift: _Edges(self.path, ranks, shift))


def run_batch(program: Program, cluster: Cluster | Links, draw: NoiseDraw | None = None) -> Array:
    """Time at which each rank finishes, seconds, shape (num_ranks, B), or (num_ranks, B, samples) under noise.

    TTFT is the time of the last rank.
    """
    assert isinstance(cluster, Links) or not cluster.shares_bandwidth, "flows that share a bandwidth need run_shared"
    links = cluster if isinstance(cluster, Links) else Links(cluster.path)
    at_once = _rows_at_once(program)
    if draw is None and at_once < program.num_rows:
        firsts = range(0, program.num_rows, at_once)
        return np.concatenate([run_batch(program.rows(slice(one, one + at_once)), links) for one in firsts], axis=1)
    run = _Evaluation(program.num_ranks, (program.num_rows,), links, draw=draw)
    run.run(program)
    if run.unsteady.any():
        rows = np.flatnonzero(run.unsteady)
        rest = _Evaluation(program.num_ranks, rows.shape, links, is_rest=True)
        rest.run(program.rows(rows))
        run.clock[:, rows] = rest.clock
    return run.clock


def _rows_at_once(program: Program) -> int:
    """Number of partitions that are evaluated together, so that the rounds of large rings take little memory."""
    has_ring = any(isinstance(op, RingPass) for layer in program.layers for op in layer[0])
    return max(1, _RING_CELLS // program.num_ranks**2) if has_ring else program.num_rows


def layer_matrix(
    ops: Sequence[Sequence[Op]], path: Callable[[int, int], Path], shape: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """The ends of ranks in a layer without messages, as a function of their begins.

    Rank j ends at the latest of `begin_i + seconds[j, i]` over all ranks i, and of `host begin + floor_s[j]`. The layer
    is evaluated once per rank i, which begins at 0 while nothing waits for the other ranks, and once with only the
    hosts, which begin at 0. Returns seconds, shape (ranks, ranks, *shape), floors, shape (ranks, *shape), and host
    seconds of each rank.
    ops: operations of each rank, with arrays of the given shape.
    """
    size = len(ops)
    run = _Evaluation(size, (size + 1, *shape), Links(path), axis=1)
    run.clock[:] = -np.inf
    run.clock[range(size), range(size)] = 0.0
    run.hosts_s = np.full((size, size + 1, *[1] * len(shape)), -np.inf)
    run.hosts_s[:, -1] = 0.0
    layer = run.layer([_compile(rank, own, path, under_noise=False) for rank, own in enumerate(ops)])
    for action in layer.actions:
        action()
    return run.clock[:, :-1], run.clock[:, -1], layer.issued_s


class _Evaluation:
    """One evaluation of a program, with the state of the ranks and of the messages in flight.

    `clock`: device time of each rank, at the end the time at which it finishes, shape (num_ranks, B), or (num_ranks, B,
    samples). `unsteady`: partitions whose times are not valid, because most others reach steady state sooner.
    `free_s`: time at which each link has carried its last message. The key (rank, rank) stands for the rank's messages
    that leave in turn. Links without overlapping messages need no entry: after a rendezvous or a collective, a rank has
    received everything that was sent to it, so its links are free.
    """

    def __init__(
        self,
        num_ranks: int,
        shape: tuple[int, ...],
        links: Links,
        *,
        draw: NoiseDraw | None = None,
        axis: int | None = None,
        is_rest: bool = False,
    ) -> None:
        """shape: that of operations' arrays. draw: samples of noise, on a last axis; the same for every partition.

        axis: an axis of `clock` that operations' arrays do not have. is_rest: whether the partitions are known to be
        unsteady.
        """
        self.links = links
        self.draw = draw
        self.is_rest = is_rest
        self.axis = axis if draw is None else -1
        self.clock = np.zeros((num_ranks, *shape) if draw is None else (num_ranks, *shape, draw.num_samples))
        self.unsteady = np.zeros(shape[0], dtype=bool)
        self.hosts_s = np.zeros(num_ranks)  # times at which hosts have issued all operations so far
        self.leads = False  # whether no host delays its device
        self.loaded_s: dict[int, Array] = {}  # time at which all loads of a rank so far have left its link
        self.num_computes = [0] * num_ranks
        self.num_messages: dict[Edge, int] = {}
        self.arrivals: dict[Edge, deque[Array]] = defaultdict(deque)
        self.free_s: dict[Edge, Array] = {}

    def run(self, program: Program) -> None:
        """Run all ranks from the start to the end."""
        blocks = compile_blocks(program, self.links.path, self.draw)
        periods = periods_of(program)
        if not is_closed(program):  # all layers are one, because states do not contain messages in flight
            _, *kinds, _ = blocks
            ranks = range(program.num_ranks)
            whole = [[step for kind in program.layer_kind_index for step in kinds[kind][rank]] for rank in ranks]
            blocks[1:-1] = [whole]
            periods = [((0,), 1)]
        prologue, *layers, epilogue = map(self.layer, blocks)
        self._repeat([prologue], 1)
        for period, times in periods:
            self._repeat([layers[kind] for kind in period], times)
        self._repeat([epilogue], 1)

    def layer(self, steps: Block) -> _PreparedLayer:
        """Prepare a layer: actions in an order in which none has to wait.

        Computations before and after all messages of their ranks are moved to the start and to the end. Computations
        of all ranks are one action, unless under noise.
        """
        order, ends = run_order(steps)
        assert ends == list(map(len, steps)), "the program deadlocks"
        at = [0] * len(steps)
        parts = list[tuple[int, Sequence[int], list[Step]]]()
        for ranks in order:
            ops = [steps[rank][at[rank]] for rank in ranks]
            place = at[ranks[0]]
            last = len(steps[ranks[0]]) - 1
            parts.append(((place > 0) + (place == last > 0) if isinstance(ops[0], Segment) else 1, ranks, ops))
            for rank in ranks:
                at[rank] += 1
        # known: by first rank and its operations
        actions = list[Action]()
        known = dict[tuple[int, ...], Action]()
        for is_work, group in groupby(sorted(parts, key=itemgetter(0)), lambda part: isinstance(part[2][0], Segment)):
            own = list(group)
            work = {ranks[0]: cast(Segment, ops[0]) for _, ranks, ops in own}
            if is_work and self.draw is None and len(own) == len(work) == len(steps):
                actions.append(self._joint([work[rank] for rank in range(len(steps))]))
            else:
                for _, ranks, ops in own:
                    key = ranks[0], *map(id, ops)
                    if key not in known:
                        known[key] = self._action(ranks, ops)
                    actions.append(known[key])
        exchanges = [(rank, step) for rank, own in enumerate(steps) for step in own if not isinstance(step, Segment)]
        in_order = all(
            isinstance(one, Recv | Load) or (isinstance(one, Message) and one.dst > rank and not one.rendezvous)
            for rank, one in exchanges
        )
        ways = {way for rank, one in exchanges if (way := _way(rank, one)) is not None}
        self.free_s |= {way: np.full(self.clock.shape[1:], -np.inf) for way in ways - set(self.free_s)}
        return _PreparedLayer(actions, np.array([sum(map(host_s_of, own)) for own in steps]), in_order, ways)

    def _action(self, ranks: Sequence[int], ops: Sequence[Step]) -> Action:
        """The next operations of these ranks, which run together."""
        match ops[0]:
            case Segment():
                return partial(self._compute, ranks[0], ops[0])
            case Message() if ops[0].rendezvous:
                return partial(self._meet, ranks[0], ops[0], cast(Recv, ops[1]).host_s)
            case Message():
                return partial(self._send, ranks[0], ops[0])
            case Recv():
                return partial(self._recv, ranks[0], ops[0])
            case Load():
                return partial(self._load, ranks[0], ops[0])
            case AllGather():
                return self._all_gather(ranks, cast(list[AllGather], ops))
            case RingPass():
                return self._ring_pass(ranks, cast(list[RingPass], ops))
            case AllToAll():
                return self._all_to_all(ranks, cast(list[AllToAll], ops))

    def _repeat(self, layers: Sequence[_PreparedLayer], times: int) -> None:
        """Run the layers of a period `times` times; once all times advance steadily, add the rest in one step.

        A large batch does not wait for its last partitions: they become `unsteady`.
        """
        in_order = all(one.in_order for one in layers)
        issued_s = np.sum([one.issued_s for one in layers], axis=0)
        few = self.clock.shape[1] // _FEW if self.clock.size >= _LARGE else 0
        ways = set().union(*(one.ways for one in layers))
        rows = sorted([*((rank, -1) for rank in range(len(self.clock))), *ways])  # links after the rank that sends
        states_s: list[Array] = []
        led: list[bool] = []  # whether no host delayed its device, by period
        for left in reversed(range(times)):
            self._run(layers, issued_s)
            if self.draw is not None or times == 1:
                continue
            led.append(self.leads)
            states_s = states_s[-2 * max(CYCLES) :]
            states_s.append(np.stack([self.clock[row[0]] if row[1] < 0 else self.free_s[row] for row in rows]))
            # A check takes almost as long as a layer of few partitions.
            for cycle in () if self.is_rest and left % 4 else filter(lambda cycle: left % cycle == 0, CYCLES):
                # If no host delays anything in the last cycle, one advance is enough.
                first = (1 if not in_order and all(led[-cycle:]) else 2) * cycle
                if len(states_s) <= first:
                    break
                advance_s, is_steady = steady_advance(
                    states_s[-1 - first :: cycle], cycle * issued_s.max(), in_order=in_order
                )
                if np.count_nonzero(~is_steady) > few:
                    continue
                self.unsteady |= ~is_steady
                for row, seconds in zip(rows, left // cycle * advance_s, strict=True):
                    later = self.clock[row[0]] if row[1] < 0 else self.free_s[row]
                    later += seconds
                self.hosts_s += left * issued_s
                return

    def _run(self, layers: Sequence[_PreparedLayer], issued_s: Array) -> None:
        hosts_s = self.hosts_s + issued_s
        # Hosts that issue the whole period before any device begins it delay nothing in it.
        self.leads = self.draw is None and (not hosts_s.any() or bool((hosts_s <= self.clock.min(axis=1)).all()))
        for layer in layers:
            for action in layer.actions:
                action()

    def _hosts_s(self, ranks: slice = slice(None)) -> Array:
        """Host time of these ranks, with as many axes as their clocks."""
        hosts_s = self.hosts_s[ranks]
        return hosts_s.reshape(*hosts_s.shape, *[1] * (self.clock.ndim - hosts_s.ndim))

    def _reached_s(self, rank: int, host_s: float) -> Array:
        """Issue an operation on the host; return the time at which the device reaches it."""
        self.hosts_s[rank] += host_s
        clock: Array = self.clock[rank]
        return clock if self.leads else np.maximum(clock, self.hosts_s[rank])

    def _joint(self, segments: Sequence[Segment]) -> Action:
        """One segment per rank."""
        device_s = self._stack([one.device_s for one in segments])
        hosts_s = _column([one.host_s for one in segments], self.hosts_s)
        is_device = all(one.floor_s is one.device_s for one in segments)
        floor_s = device_s if is_device else self._stack([one.floor_s for one in segments])

        def run() -> None:
            self.clock += device_s
            if not self.leads:
                np.maximum(self.clock, floor_s + self._hosts_s(), out=self.clock)
            self.hosts_s += hosts_s

        return run

    def _compute(self, rank: int, segment: Segment) -> None:
        clock = self.clock[rank]
        host_s = self.hosts_s[rank]
        if self.draw is not None:
            begin_s = np.maximum(clock, host_s)
            seconds = segment.device_s
            end_s = self._computed_s(rank, begin_s, seconds) if segment.has_noise else begin_s + seconds
            np.maximum(end_s, host_s + segment.host_s, out=clock)
        else:
            clock += segment.device_s
            if not self.leads:
                np.maximum(clock, segment.floor_s + host_s, out=clock)
        self.hosts_s[rank] += segment.host_s

    def _send(self, rank: int, message: Message) -> None:
        """Put a message on its link."""
        free_s = self.free_s[rank, rank if message.in_turn else message.dst]
        np.maximum(free_s, self._reached_s(rank, message.host_s), out=free_s)
        self._left((rank, message.dst), free_s, message.link_s)
        self.arrivals[rank, message.dst].append(free_s + message.latency_s)

    def _meet(self, src: int, message: Message, recv_host_s: float) -> None:
        """Run a rendezvous. The streams of both ranks have waited for all earlier messages, so the link is free."""
        own = self.clock[src]
        other = self.clock[message.dst]
        np.maximum(self._reached_s(src, message.host_s), self._reached_s(message.dst, recv_host_s), out=own)
        self._left((src, message.dst), own, message.link_s)
        np.add(own, message.latency_s, out=other)

    def _recv(self, rank: int, recv: Recv) -> None:
        self.hosts_s[rank] += recv.host_s
        np.maximum(self.clock[rank], self.arrivals[recv.src, rank].popleft(), out=self.clock[rank])

    def _load(self, rank: int, load: Load) -> None:
        """Wait for a part of the cached prefix, whose arrival does not depend on other ranks."""
        left_s = self.loaded_s.get(rank, 0.0) + load.seconds
        clock = self.clock[rank]
        np.maximum(clock, left_s + load.latency_s, out=clock)
        self.loaded_s[rank] = left_s if load.ahead else clock.copy()

    def _left(self, edge: Edge, time_s: Array, busy_s: Array) -> None:
        """Change the time at which a message starts to the time at which it has left; noise may delay it."""
        if self.draw is None:
            time_s += busy_s
            return
        number = self.num_messages[edge] = self.num_messages.get(edge, -1) + 1
        time_s[:] = self.draw.message_end_s(*edge, number, time_s, busy_s)

    def _computed_s(self, rank: int, start_s: Array, device_s: Array) -> Array:
        """Time at which a rank ends a computation; noise may delay it."""
        if self.draw is None:
            return start_s + device_s
        self.num_computes[rank] += 1
        return self.draw.compute_end_s(rank, self.num_computes[rank] - 1, start_s, device_s)

    # Collectives are computed for all of their ranks at once: arrays of shape (num_ranks, B) or (num_ranks, B,
    # samples). Their costs are prepared once per kind of layer.

    def _issued_s(self, ranks: Sequence[int], ops: Sequence[AllGather | AllToAll]) -> Array:
        """Issue a collective on the hosts; return the times at which the devices reach it, in a new array."""
        own = slice(ranks[0], ranks[-1] + 1)
        self.hosts_s[own] += _column([op.host_s for op in ops], self.hosts_s)
        return self.clock[own].copy() if self.leads else np.maximum(self.clock[own], self._hosts_s(own))

    def _all_gather(self, ranks: Sequence[int], ops: Sequence[AllGather]) -> Action:
        """Prepare a ring all-gather: in step k, each rank forwards the piece that has made k hops."""
        edges = self.links.edges(ranks, 1)
        size = len(ranks)

        def step_s(path: Path, nbytes: Array) -> Array:
            return path.gather_step_s(nbytes, size)

        pieces = self._stack([op.nbytes for op in ops])
        # By step: seconds of the piece that each rank holds in this step.
        if len(edges.rows) == 1:
            twice_s = np.concatenate([seconds_on(edges.rows, step_s, pieces)] * 2)
            pieces_s = [twice_s[size - step : 2 * size - step] for step in range(size - 1)]
        else:
            pieces_s = [seconds_on(edges.rows, step_s, np.roll(pieces, step, axis=0)) for step in range(size - 1)]
        launch_s = edges.values("gather_launch_s", pieces)
        latency_s = edges.values("gather_latency_s", pieces)
        is_late = latency_s.any()  # measured steps include the latency

        def run() -> None:
            start = self._issued_s(ranks, ops)
            start += launch_s
            link = np.empty_like(start)
            other = np.empty_like(start)
            # When both ranks are there and the link is free; each later step waits only for pieces.
            _later_of(start, start, -1, link)
            self._wait(edges, link)
            for step, step_s in enumerate(pieces_s):
                if step:
                    link, other = _later_of(link, link + latency_s if is_late else link, 1, other), link
                self._sent(edges, link, step_s)
            if pieces_s:
                _later_of(start, link + latency_s if is_late else link, 1, start)
                self._keep(edges, link)
            self.clock[ranks[0] : ranks[-1] + 1] = start

        return run

    def _ring_pass(self, ranks: Sequence[int], ops: Sequence[RingPass]) -> Action:
        """Prepare rounds of work, in each of which a piece goes to the next rank."""
        edges = self.links.edges(ranks, 1)
        rounds_s = self._rounds([op.device_s for op in ops])
        pieces = [op.nbytes for op in ops]
        is_alike = len(ranks) > 1 and all(not nbytes.strides[0] for nbytes in pieces)  # equal chunks: equal messages
        if is_alike:
            pieces = [nbytes[:1] for nbytes in pieces]
        sent_s = [seconds_on(edges.rows, Path.busy_s, nbytes) for nbytes in self._rounds(pieces)]
        sent_s *= len(ranks) - 1 if is_alike else 1
        issued_s = np.array([op.host_s for op in ops])
        hosts_s = [_column(issued_s[:, number], rounds_s[0]) for number in range(len(ranks))]
        total_s = _column(issued_s.sum(axis=1), self.hosts_s)
        latency_s = edges.values("latency_s", rounds_s[0])

        def compute(start: Array, work_s: Array) -> None:
            for rank in ranks if self.draw is not None else ():
                start[rank] = self._computed_s(rank, start[rank], work_s[rank])
            if self.draw is None:
                start += work_s

        def run() -> None:
            clock = self.clock
            host = self._hosts_s()
            link = np.empty_like(clock)
            there = np.empty_like(clock)
            if not self.leads:
                np.maximum(clock, host, out=clock)
            for number, (work_s, busy_s, host_s) in enumerate(zip(rounds_s, sent_s, hosts_s, strict=False)):
                _later_of(clock, clock, -1, link)
                if not number:
                    self._wait(edges, link)
                self._sent(edges, link, busy_s)
                _later_of(link, link + latency_s, 1, there)
                if ops[0].overlaps:
                    compute(clock, beside_message_s(work_s, there - clock, ops[0].message_share))
                    np.maximum(clock, there, out=clock)
                else:
                    clock[:] = there
                    compute(clock, work_s)
                host = host + host_s
                if not self.leads:
                    np.maximum(clock, host, out=clock)
            compute(clock, rounds_s[-1])
            if not self.leads:
                np.maximum(clock, host + hosts_s[-1], out=clock)
            self.hosts_s += total_s

        return run

    def _all_to_all(self, ranks: Sequence[int], ops: Sequence[AllToAll]) -> Action:
        """Prepare an all-to-all: messages to the ranks `shift` positions later are evaluated together."""
        size = len(ranks)
        by_shift = [self.links.edges(ranks, shift) for shift in range(1, size)]
        # Messages of equal size are one row, repeated without a copy.
        rows = [op.nbytes if op.nbytes.strides[0] else op.nbytes[:1] for op in ops]
        nbytes = np.stack(np.broadcast_arrays(*rows))  # by rank and shift
        busy_s = {path: path.busy_s(nbytes) for path in {path for edges in by_shift for path in edges.rows}}
        each = []  # by shift: edges, seconds on the links, latencies
        for index, edges in enumerate(by_shift):
            row = min(index, nbytes.shape[1] - 1)
            seconds = np.empty((size, *nbytes.shape[2:]))
            for path, positions in edges.rows.items():
                seconds[positions] = busy_s[path][positions, row]
            sent_s = seconds if self.axis is None else np.expand_dims(seconds, self.axis)
            each.append((edges, sent_s, edges.values("latency_s", sent_s)))

        def run() -> None:
            left = self._issued_s(ranks, ops)
            arrival = np.empty_like(left)
            # Ranks twice in a row: the rank `shift` positions later is then a slice.
            start = np.concatenate([left, left])
            clock = np.concatenate([left, left])
            for shift, (edges, sent_s, late_s) in enumerate(each, 1):
                np.maximum(left, start[shift : shift + size], out=left)
                self._wait(edges, left)
                self._sent(edges, left, sent_s)
                there = clock[shift : shift + size]
                np.maximum(there, np.add(left, late_s, out=arrival), out=there)
            np.maximum(clock[:size], clock[size:], out=self.clock)
            np.maximum(self.clock, left, out=self.clock)

        return run

    def _stack(self, values: Sequence[Array]) -> Array:
        """One row per rank, with the additional axis of the clock."""
        rows = np.stack(np.broadcast_arrays(*values))
        return rows if self.axis is None else np.expand_dims(rows, self.axis)

    def _rounds(self, values: Sequence[Array]) -> list[Array]:
        """The rows of each round from arrays with a row per round, one per rank; with the axes of `_stack`."""
        by_round = np.swapaxes(np.stack(np.broadcast_arrays(*values)), 0, 1)
        return [one if self.axis is None else np.expand_dims(one, self.axis) for one in by_round]

    def _wait(self, edges: _Edges, start_s: Array) -> None:
        """Delay messages until earlier messages have left these edges."""
        for index, edge in enumerate(edges.pairs) if self.free_s else ():
            if edge in self.free_s:
                np.maximum(start_s[index], self.free_s[edge], out=start_s[index])

    def _keep(self, edges: _Edges, left_s: Array) -> None:
        """Keep the times at which these edges are free again."""
        for index, edge in enumerate(edges.pairs) if self.free_s else ():
            if edge in self.free_s:
                self.free_s[edge][:] = left_s[index]

    def _sent(self, edges: _Edges, time_s: Array, busy_s: Array) -> None:
        """Change the times at which messages start on their edges to the times at which they have left."""
        if self.draw is None:
            time_s += busy_s
            return
        for index, edge in enumerate(edges.pairs):
            self._left(edge, time_s[index], busy_s[index])


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


def _later_of(rows: Array, others: Array, by: int, out: Array) -> Array:
    """The later of each rank's row and the row of `others` of the rank `by` positions before it on the ring.

    out: the result's array, which may be `rows`, but not `others`.
    """
    np.maximum(rows[by:], others[:-by], out=out[by:])
    np.maximum(rows[:by], others[-by:], out=out[:by])
    return out


def _way(rank: int, step: Step) -> Edge | None:
    """The key of a message in `free_s`; None for other steps and for a rendezvous."""
    if not isinstance(step, Message) or step.rendezvous:
        return None
    return rank, rank if step.in_turn else step.dst
