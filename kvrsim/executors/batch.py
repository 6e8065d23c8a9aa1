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
from enum import IntEnum
from functools import cache, partial, reduce
from itertools import chain, groupby
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
_RING_CELLS = 2**22  # largest number of partitions x ranks x rounds evaluated together; an array has 32 MiB


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
        device_s = stream_s(op)
        floor_s = device_s
        if op.host_s:
            floor_s = np.maximum(device_s, op.host_s)
        return cls(device_s, floor_s, op.host_s, isinstance(op, Compute))

    def then(self, other: Segment) -> Segment:
        """This segment followed by another one; the maxima distribute over the sums."""
        device_s = self.device_s + other.device_s
        if not self.host_s and not other.host_s:
            return Segment(device_s, device_s, 0.0)
        floor_s = np.maximum(self.floor_s + other.device_s, self.host_s + other.floor_s)
        return Segment(device_s, floor_s, self.host_s + other.host_s)


def segment_of(ops: Sequence[Op]) -> Segment:
    """Consecutive computes and collectives as one segment."""
    if not ops:
        return Segment(np.zeros(1), np.full(1, -np.inf), 0.0)
    return reduce(Segment.then, map(Segment.of, ops))


class Message(NamedTuple):
    """A send with its time on the link."""

    dst: int
    link_s: Array
    latency_s: float
    host_s: float
    rendezvous: bool
    in_turn: bool


class _Place(IntEnum):
    """Where operations run in a layer."""

    START = 0  # a computation before all messages of its rank
    BETWEEN = 1
    END = 2  # a computation after all messages of its rank


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
        key: tuple[int | None, int] = (None, id(ops))
        if any(isinstance(op, Send) for op in ops):
            key = (rank, id(ops))
        if key not in known:
            known[key] = _compile(rank, ops, path, under_noise=draw is not None)
        return known[key]

    blocks: list[Block] = []
    for block in (program.prologue, *program.layers, program.epilogue):
        blocks.append([compiled(rank, ops) for rank, ops in enumerate(block)])
    return blocks


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
                nbytes = op.nbytes
                if under_noise:
                    nbytes = nbytes[..., None]
                link_s = path.busy_s(nbytes)
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
    links = cluster
    if isinstance(links, Cluster):
        links = Links(links.path)
    at_once = _rows_at_once(program)
    if draw is None and at_once < program.num_rows:
        parts_s = []
        for first in range(0, program.num_rows, at_once):
            parts_s.append(run_batch(program.rows(slice(first, first + at_once)), links))
        return np.concatenate(parts_s, axis=1)
    run = _Evaluation(program.num_ranks, (program.num_rows,), links, draw=draw)
    run.run(program)
    return run.clock


def _rows_at_once(program: Program) -> int:
    """Number of partitions that are evaluated together, so that the rounds of large rings take little memory."""
    ops = chain.from_iterable(layer[0] for layer in program.layers)
    if any(isinstance(op, RingPass) for op in ops):
        return max(1, _RING_CELLS // program.num_ranks**2)
    return program.num_rows


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
    layer = run.layer([_compile(rank, ops_of_rank, path, under_noise=False) for rank, ops_of_rank in enumerate(ops)])
    for action in layer.actions:
        action()
    return run.clock[:, :-1], run.clock[:, -1], layer.issued_s


class _LayerPart(NamedTuple):
    """Operations of a layer, one per rank, that are simulated in one step."""

    place: _Place
    ranks: Sequence[int]
    ops: list[Step]


def _parts_of(steps: Block) -> list[_LayerPart]:
    """The parts of a layer, in an order in which none has to wait: work before all messages first, work after last."""
    order, ends = run_order(steps)
    assert ends == list(map(len, steps)), "the program deadlocks"
    next_step = [0] * len(steps)
    parts = []
    for ranks in order:
        ops = [steps[rank][next_step[rank]] for rank in ranks]
        first = ranks[0]
        place = _Place.BETWEEN
        if isinstance(ops[0], Segment):
            if next_step[first] == 0:
                place = _Place.START
            elif next_step[first] == len(steps[first]) - 1:
                place = _Place.END
        parts.append(_LayerPart(place, ranks, ops))
        for rank in ranks:
            next_step[rank] += 1
    return sorted(parts, key=itemgetter(0))


class _Evaluation:
    """One evaluation of a program, with the state of the ranks and of the messages in flight.

    `clock`: device time of each rank, at the end the time at which it finishes, shape (num_ranks, B), or (num_ranks, B,
    samples). `free_s`: time at which each link has carried its last message. The key (rank, rank) stands for the
    rank's messages that leave in turn. Links without overlapping messages need no entry: after a rendezvous or a
    collective, a rank has received everything that was sent to it, so its links are free.
    """

    def __init__(
        self,
        num_ranks: int,
        shape: tuple[int, ...],
        links: Links,
        *,
        draw: NoiseDraw | None = None,
        axis: int | None = None,
    ) -> None:
        """shape: that of operations' arrays. draw: samples of noise, on a last axis; the same for every partition.

        axis: an axis of `clock` that operations' arrays do not have.
        """
        self.links = links
        self.draw = draw
        self.axis = axis
        clock_shape = (num_ranks, *shape)
        if draw is not None:
            self.axis = -1
            clock_shape = (*clock_shape, draw.num_samples)
        self.clock = np.zeros(clock_shape)
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
            whole: Block = []
            for rank in range(program.num_ranks):
                layers_of_rank = [kinds[kind][rank] for kind in program.layer_kind_index]
                whole.append(list(chain.from_iterable(layers_of_rank)))
            blocks[1:-1] = [whole]
            periods = [((0,), 1)]
        prologue, *layers, epilogue = map(self.layer, blocks)
        self._repeat([prologue], 1)
        for period, times in periods:
            self._repeat([layers[kind] for kind in period], times)
        self._repeat([epilogue], 1)

    def layer(self, steps: Block) -> _PreparedLayer:
        """Prepare a layer: actions in an order in which none has to wait.

        Computations of all ranks are one action, unless under noise.
        """
        actions: list[Action] = []
        known: dict[tuple[int, ...], Action] = {}  # by first rank and its operations
        for is_work, group in groupby(_parts_of(steps), lambda part: isinstance(part.ops[0], Segment)):
            parts = list(group)
            if is_work and self.draw is None:
                segments = {part.ranks[0]: cast(Segment, part.ops[0]) for part in parts}
                if len(parts) == len(segments) == len(steps):
                    actions.append(self._joint([segments[rank] for rank in range(len(steps))]))
                    continue
            for part in parts:
                key = (part.ranks[0], *map(id, part.ops))
                if key not in known:
                    known[key] = self._action(part.ranks, part.ops)
                actions.append(known[key])
        in_order = True
        ways: set[Edge] = set()
        for rank, steps_of_rank in enumerate(steps):
            for step in steps_of_rank:
                in_order = in_order and _waits_for_earlier(rank, step)
                way = _way(rank, step)
                if way is not None:
                    ways.add(way)
        for way in ways - set(self.free_s):
            self.free_s[way] = np.full(self.clock.shape[1:], -np.inf)
        issued_s = np.array([sum(map(host_s_of, steps_of_rank)) for steps_of_rank in steps])
        return _PreparedLayer(actions, issued_s, in_order, ways)

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
        """Run the layers of a period `times` times; once all times advance steadily, add the rest in one step."""
        in_order = all(layer.in_order for layer in layers)
        issued_s = np.sum([layer.issued_s for layer in layers], axis=0)
        times_s = self._times_s(layers)
        states_s: list[Array] = []
        led: list[bool] = []  # whether no host delayed its device, by period
        for left in reversed(range(times)):
            self._run(layers, issued_s)
            if self.draw is not None or times == 1:
                continue
            led.append(self.leads)
            states_s = states_s[-2 * max(CYCLES) :]
            states_s.append(np.stack(times_s))
            for cycle in CYCLES:
                if left % cycle:
                    continue
                first = 2 * cycle
                if not in_order and all(led[-cycle:]):  # no host delayed anything: one advance is enough
                    first = cycle
                if len(states_s) <= first:
                    break
                advance_s, is_steady = steady_advance(
                    states_s[-1 - first :: cycle], cycle * issued_s.max(), in_order=in_order
                )
                if not is_steady.all():
                    continue
                for time_s, seconds in zip(times_s, left // cycle * advance_s, strict=True):
                    time_s += seconds
                self.hosts_s += left * issued_s
                return

    def _times_s(self, layers: Sequence[_PreparedLayer]) -> list[Array]:
        """The arrays of times that a period changes: each rank's clock, followed by its links."""
        ways: set[Edge] = set()
        for layer in layers:
            ways |= layer.ways
        times_s = []
        for rank, clock in enumerate(self.clock):
            times_s.append(clock)
            times_s += [self.free_s[way] for way in sorted(ways) if way[0] == rank]
        return times_s

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
        if not self.leads:
            clock = np.maximum(clock, self.hosts_s[rank])
        return clock

    def _joint(self, segments: Sequence[Segment]) -> Action:
        """One segment per rank."""
        device_s = self._stack([segment.device_s for segment in segments])
        hosts_s = _column([segment.host_s for segment in segments], self.hosts_s)
        floor_s = device_s
        if any(segment.floor_s is not segment.device_s for segment in segments):
            floor_s = self._stack([segment.floor_s for segment in segments])

        def run() -> None:
            self.clock += device_s
            if not self.leads:
                np.maximum(self.clock, floor_s + self._hosts_s(), out=self.clock)
            self.hosts_s += hosts_s

        return run

    def _compute(self, rank: int, segment: Segment) -> None:
        """Advance a rank's clock and host by a segment; without noise, `floor_s` has the waits for the host."""
        clock = self.clock[rank]
        host_s = self.hosts_s[rank]
        if self.draw is not None:
            begin_s = np.maximum(clock, host_s)
            if segment.has_noise:
                end_s = self._computed_s(rank, begin_s, segment.device_s)
            else:
                end_s = begin_s + segment.device_s
            np.maximum(end_s, host_s + segment.host_s, out=clock)
        else:
            clock += segment.device_s
            if not self.leads:
                np.maximum(clock, segment.floor_s + host_s, out=clock)
        self.hosts_s[rank] += segment.host_s

    def _send(self, rank: int, message: Message) -> None:
        """Put a message on its link."""
        way = _way(rank, message)
        assert way is not None
        free_s = self.free_s[way]
        np.maximum(free_s, self._reached_s(rank, message.host_s), out=free_s)
        self._left((rank, message.dst), free_s, message.link_s)
        self.arrivals[rank, message.dst].append(free_s + message.latency_s)

    def _meet(self, src: int, message: Message, recv_host_s: float) -> None:
        """Run a rendezvous. The streams of both ranks have waited for all earlier messages, so the link is free."""
        clock = self.clock[src]
        np.maximum(self._reached_s(src, message.host_s), self._reached_s(message.dst, recv_host_s), out=clock)
        self._left((src, message.dst), clock, message.link_s)
        np.add(clock, message.latency_s, out=self.clock[message.dst])

    def _recv(self, rank: int, recv: Recv) -> None:
        self.hosts_s[rank] += recv.host_s
        np.maximum(self.clock[rank], self.arrivals[recv.src, rank].popleft(), out=self.clock[rank])

    def _load(self, rank: int, load: Load) -> None:
        """Wait for a part of the cached prefix, whose arrival does not depend on other ranks."""
        left_s = self.loaded_s.get(rank, 0.0) + load.seconds
        clock = self.clock[rank]
        np.maximum(clock, left_s + load.latency_s, out=clock)
        if not load.ahead:
            left_s = clock.copy()
        self.loaded_s[rank] = left_s

    def _left(self, edge: Edge, time_s: Array, busy_s: Array) -> None:
        """Change the time at which a message starts to the time at which it has left; noise may delay it."""
        if self.draw is None:
            time_s += busy_s
            return
        number = self.num_messages.get(edge, 0)
        self.num_messages[edge] = number + 1
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
        members = slice(ranks[0], ranks[-1] + 1)
        self.hosts_s[members] += _column([op.host_s for op in ops], self.hosts_s)
        if self.leads:
            return self.clock[members].copy()
        return np.maximum(self.clock[members], self._hosts_s(members))

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

        def arrived(left_s: Array) -> Array:
            if is_late:
                return left_s + latency_s
            return left_s

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
                    after = _later_of(link, arrived(link), 1, other)
                    other = link
                    link = after
                self._sent(edges, link, step_s)
            if pieces_s:
                _later_of(start, arrived(link), 1, start)
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
        if is_alike:
            sent_s *= len(ranks) - 1
        issued_s = np.array([op.host_s for op in ops])
        hosts_s = [_column(issued_s[:, number], rounds_s[0]) for number in range(len(ranks))]
        total_s = _column(issued_s.sum(axis=1), self.hosts_s)
        latency_s = edges.values("latency_s", rounds_s[0])

        def compute(start: Array, work_s: Array) -> None:
            if self.draw is None:
                start += work_s
                return
            for rank in ranks:
                start[rank] = self._computed_s(rank, start[rank], work_s[rank])

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
        rows = []
        for op in ops:
            if op.nbytes.strides[0]:
                rows.append(op.nbytes)
            else:  # messages of equal size are one row, repeated without a copy
                rows.append(op.nbytes[:1])
        nbytes = np.stack(np.broadcast_arrays(*rows))  # by rank and shift
        busy_s: dict[Path, Array] = {}
        exchanges = []  # by shift: edges, seconds on the links, latencies
        for index, edges in enumerate(by_shift):
            row = min(index, nbytes.shape[1] - 1)
            sent_s = np.empty((size, *nbytes.shape[2:]))
            for path, positions in edges.rows.items():
                if path not in busy_s:
                    busy_s[path] = path.busy_s(nbytes)
                sent_s[positions] = busy_s[path][positions, row]
            sent_s = self._with_axis(sent_s)
            exchanges.append((edges, sent_s, edges.values("latency_s", sent_s)))

        def run() -> None:
            left = self._issued_s(ranks, ops)
            arrival = np.empty_like(left)
            # Ranks twice in a row: the rank `shift` positions later is then a slice.
            start = np.concatenate([left, left])
            clock = np.concatenate([left, left])
            for shift, (edges, sent_s, late_s) in enumerate(exchanges, 1):
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
        return self._with_axis(np.stack(np.broadcast_arrays(*values)))

    def _with_axis(self, values: Array) -> Array:
        """The values with the additional axis of the clock, if it has one."""
        if self.axis is not None:
            values = np.expand_dims(values, self.axis)
        return values

    def _rounds(self, values: Sequence[Array]) -> list[Array]:
        """The rows of each round from arrays with a row per round, one per rank; with the axes of `_stack`."""
        by_round = np.swapaxes(np.stack(np.broadcast_arrays(*values)), 0, 1)
        return [self._with_axis(rows) for rows in by_round]

    def _wait(self, edges: _Edges, start_s: Array) -> None:
        """Delay messages until earlier messages have left these edges."""
        if not self.free_s:
            return
        for index, edge in enumerate(edges.pairs):
            if edge in self.free_s:
                np.maximum(start_s[index], self.free_s[edge], out=start_s[index])

    def _keep(self, edges: _Edges, left_s: Array) -> None:
        """Keep the times at which these edges are free again."""
        if not self.free_s:
            return
        for index, edge in enumerate(edges.pairs):
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
    for path, positions in rows.items():
        seconds[positions] = time_of(path, nbytes[positions])
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
    if step.in_turn:
        return rank, rank
    return rank, step.dst


def _waits_for_earlier(rank: int, step: Step) -> bool:
    """Whether a step makes ranks wait only for earlier ranks."""
    if isinstance(step, Message):
        return step.dst > rank and not step.rendezvous
    return isinstance(step, Segment | Recv | Load)
