"""The executor of machines whose messages share one bandwidth: many partitions at once, each at its own next event.

A rank has a sequence of waits: for the arrival of messages, or until other ranks reach certain waits. When a wait ends
at t, the times until the next wait are known: the next wait begins, and messages are posted, at `t' = max(t + delay_s,
floor_s)`. Messages wait in lanes until the previous message of the lane has left, and share the bus.

The bus is kept in virtual time, as in the event executor: each of n concurrent messages gets 1/n of the bandwidth, and
`served_s` is the service that each message has received, in seconds of the whole bandwidth.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvrsim.executors.batch import Block, Message, Segment, Step, compile_blocks
from kvrsim.executors.steady import periods_of, steady_advance
from kvrsim.hardware import Cluster
from kvrsim.program import AllGather, AllToAll, Array, Load, Program, Recv, RingPass, beside_message_s

if TYPE_CHECKING:  # importing noise would slow the start of every plan
    from kvrsim.noise import NoiseDraw

Index = npt.NDArray[np.intp]
Value = Array | float
Key = tuple[str | int, ...]
_EVALUATED = 4  # periods of a steady program that are evaluated; one with less than twice as many runs as a whole


def run_shared(program: Program, cluster: Cluster, draw: NoiseDraw | None = None) -> Array:
    """Finish time of each rank in seconds, shape (num_ranks, B), on a cluster whose flows share a bus.

    TTFT is the time of the last rank. Results equal those of the event executor up to rounding.
    draw: jitter, for a program of one partition; the shape is then (num_ranks, samples).
    """
    blocks = compile_blocks(program, cluster.path, draw)
    if draw is None:
        finish_s = _steady_finish_s(program, cluster, blocks)
        if finish_s is not None:
            return finish_s
    prologue, *kinds, epilogue = blocks
    graph = _Graph(cluster, program.num_ranks, program.num_rows, draw)
    graph.take([prologue, *(kinds[kind] for kind in program.layer_kind_index), epilogue])
    return _Run(graph).finish_s()


def run_steps(steps: Block, cluster: Cluster, num_rows: int) -> Array:
    """Finish time of each rank, seconds, shape (num_ranks, num_rows), from all steps of the ranks."""
    graph = _Graph(cluster, len(steps), num_rows)
    graph.take([steps])
    return _Run(graph).finish_s()


def _steady_finish_s(program: Program, cluster: Cluster, blocks: Sequence[Block]) -> Array | None:
    """Finish times from a few layers, if the layers then reach steady state; else None.

    In steady state, ranks and hosts advance alike, and all messages of a layer leave before any rank begins the next.
    """
    periods = periods_of(program)
    if len(periods) != 1 or periods[0][1] < 2 * _EVALUATED:
        return None
    period, times = periods[0]
    prologue, *kinds, epilogue = blocks
    steps: list[Step] = []
    for kind in period:
        steps += chain.from_iterable(kinds[kind])
    if any(isinstance(step, Message) for step in steps) or all(isinstance(step, Segment) for step in steps):
        return None
    graph = _Graph(cluster, program.num_ranks, program.num_rows)
    graph.take([prologue])
    marks = [graph.mark()]
    for _ in range(_EVALUATED):
        graph.take([kinds[kind] for kind in period])
        marks.append(graph.mark())
    run = _Run(graph, keeps_left=True)
    run.finish_s()
    ends_s = np.stack([run.passed_s(mark) for mark in marks])  # shape (periods + 1, ranks, B)
    hosts_s = np.array([[rank.host_s for rank in mark] for mark in marks])
    issued_s = hosts_s[-1] - hosts_s[-2]
    advance_s, is_steady = steady_advance(list(ends_s[-3:]), issued_s.max())
    if not is_steady.all() or (run.all_left_s(_EVALUATED) > ends_s[1:].min(axis=1)).any():
        return None
    finish_s = ends_s[-1] + (times - _EVALUATED) * advance_s
    left = times - _EVALUATED
    for rank, steps_of_rank in enumerate(epilogue):
        host_s = hosts_s[-1, rank] + left * issued_s[rank]
        for step in steps_of_rank:
            assert isinstance(step, Segment)
            finish_s[rank] = np.maximum(finish_s[rank] + step.device_s, step.floor_s + host_s)
    return np.asarray(finish_s)


@dataclass(frozen=True, slots=True)
class _Later:
    """A function of time: `t' = max(t + delay_s, floor_s)`."""

    delay_s: Value = 0.0
    floor_s: Value = -np.inf

    def plus(self, seconds: Value) -> _Later:
        """The function whose result is later by `seconds`."""
        return _Later(self.delay_s + seconds, self.floor_s + seconds)

    def at_least(self, seconds: Value) -> _Later:
        """The function whose result is at least `seconds`."""
        return _Later(self.delay_s, np.maximum(self.floor_s, seconds))


_AT_ONCE = _Later()


@dataclass(frozen=True, slots=True)
class _Post:
    """A message: number of waits of its rank before it is posted, time of the post, and seconds alone on the bus."""

    after: int
    later: _Later
    busy_s: Value | None  # None: see _Graph.pieces_s
    jitter: Value  # factor on busy_s
    key: Key


class _Target(NamedTuple):
    """A wait for an arrival, and the latency of the arrival."""

    rank: int
    wait: int
    latency_s: float


class _Mark(NamedTuple):
    """State of a rank at a mark in the program."""

    num_waits: int
    host_s: float


@dataclasses.dataclass(slots=True)
class _Track:
    """Waits of one rank, and its work before each wait and after the last one."""

    now: _Later = field(default_factory=_Later)  # work since the last wait
    parts: list[_Later] = field(default_factory=list)  # work before each wait
    missing: list[int] = field(default_factory=list)  # number of arrivals that each wait needs
    # By wait: work since the rank's previous wait, in seconds without jitter, and its jitter factor.
    works: dict[int, tuple[Array, Value]] = field(default_factory=dict)
    num_computed: int = 0
    host_s: float = 0.0
    lags: bool = False  # whether the device time may be earlier than host_s; False after a computation
    receives: bool = False  # whether the last step was a receive
    # End of all loads so far: an event, and seconds after it; None: seconds after the start.
    loaded: tuple[Key | None, float] = (None, 0.0)


class _Graph:
    """Waits of all ranks and messages of all lanes, built from the ranks' steps."""

    def __init__(self, cluster: Cluster, num_ranks: int, num_rows: int, draw: NoiseDraw | None = None) -> None:
        self.cluster = cluster
        self.num_ranks = num_ranks
        self.draw = draw
        self.num_rows = num_rows if draw is None else draw.num_samples
        self.tracks = [_Track() for _ in range(self.num_ranks)]
        self.lanes: dict[Key, list[_Post]] = defaultdict(list)  # messages, by rank and its way out
        # Events, by the rank and the number of the wait whose start triggers them.
        self.notices: dict[tuple[int, int], list[Key]] = defaultdict(list)
        self.targets: dict[Key, list[_Target]] = defaultdict(list)
        self.counts: dict[Key, int] = defaultdict(int)
        self.pieces_s: dict[Key, Array] = {}  # seconds of each message of an all-gather alone on the bus
        self.message_share = 0.0  # share of its rate that an operation loses while a ring's message is in flight

    def take(self, blocks: Iterable[Block]) -> None:
        """Add the steps of these blocks for all ranks."""
        for block in blocks:
            for rank, steps in enumerate(block):
                for step in steps:
                    self._step(rank, self.tracks[rank], step)

    def mark(self) -> list[_Mark]:
        """Add a wait without arrivals to all ranks, and return their states."""
        for rank in range(self.num_ranks):
            self._wait(rank)
        return [_Mark(len(track.missing), track.host_s) for track in self.tracks]

    def _step(self, rank: int, track: _Track, step: Step) -> None:
        receives = track.receives
        track.receives = False
        match step:
            case Segment():
                self._work(rank, track, step)
            case Message():
                self._send(rank, track, step)
            case Recv():
                self._recv(rank, track, step, joins=receives)
            case AllGather():
                self._all_gather(rank, track, step)
            case RingPass():
                self._ring_pass(rank, track, step)
            case AllToAll():
                self._all_to_all(rank, track, step)
            case Load():
                self._load(rank, track, step)

    def _work(self, rank: int, track: _Track, segment: Segment) -> None:
        device_s: Value = segment.device_s
        floor_s: Value = segment.floor_s
        if self.draw is not None:
            if segment.has_noise:
                device_s = device_s * self._work_jitter(rank)
            floor_s = np.maximum(device_s, segment.host_s)
        track.now = track.now.plus(device_s).at_least(floor_s + track.host_s)
        track.host_s += segment.host_s
        track.lags = False

    def _number(self, *name: str | int) -> Key:
        """The name with the next number of its counter appended."""
        self.counts[name] += 1
        return (*name, self.counts[name])

    def _wait(self, rank: int, *arrivals: tuple[Key, float], notice: Key | None = None) -> None:
        """Add a wait for these arrivals, each with its latency. `notice`: event that occurs when the wait starts."""
        track = self.tracks[rank]
        number = len(track.missing)
        track.parts.append(track.now)
        track.missing.append(len(arrivals))
        track.now = _Later()
        for key, latency_s in arrivals:
            self.targets[key].append(_Target(rank, number, latency_s))
        if notice is not None:
            self.notices[rank, number].append(notice)

    def _post(
        self, rank: int, dst: int, key: Key, busy_s: Value | None, later: _Later = _AT_ONCE, *, in_turn: bool = False
    ) -> None:
        *_, number = self._number("sent", rank, dst)
        assert isinstance(number, int)
        jitter: Value = 1.0
        if self.draw is not None:
            jitter = self.draw.message_jitter((rank, dst), number - 1)
        post = _Post(len(self.tracks[rank].missing), later, busy_s, jitter, key)
        lane: Key = (rank, dst)
        if in_turn:
            lane = (rank, "turn")
        self.lanes[lane].append(post)

    def _work_jitter(self, rank: int) -> Value:
        """Jitter factor of the next work of the rank."""
        if self.draw is None:
            return 1.0
        self.tracks[rank].num_computed += 1
        return self.draw.compute_jitter((rank,), self.tracks[rank].num_computed - 1)

    def _issue(self, track: _Track, host_s: float) -> _Later:
        """Issue an operation on the host; return the time at which the device reaches it."""
        track.host_s += host_s
        track.lags = track.lags or host_s > 0
        if not track.lags:
            return track.now
        return track.now.at_least(track.host_s)

    def _send(self, rank: int, track: _Track, message: Message) -> None:
        key = self._number("message", rank, message.dst)
        issued = self._issue(track, message.host_s)
        if not message.rendezvous:
            self._post(rank, message.dst, key, message.link_s, issued, in_turn=message.in_turn)
            return
        track.now = issued
        self._wait(rank, (("ready", *key), 0.0))
        self._post(rank, message.dst, key, message.link_s, in_turn=message.in_turn)
        self._wait(rank, (key, 0.0))

    def _recv(self, rank: int, track: _Track, recv: Recv, *, joins: bool) -> None:
        arrival = self._number("receive", recv.src, rank)
        key = ("message", *arrival[1:])
        issued = self._issue(track, recv.host_s)
        latency_s = self.cluster.path(recv.src, rank).latency_s
        if recv.rendezvous:
            track.now = issued
            self._wait(rank, (key, latency_s), notice=("ready", *key))
        elif joins:
            track.missing[-1] += 1
            self.targets[key].append(_Target(rank, len(track.missing) - 1, latency_s))
        else:
            self._wait(rank, (key, latency_s))
        track.receives = not recv.rendezvous

    def _all_gather(self, rank: int, track: _Track, op: AllGather) -> None:
        ranks = op.members(rank, self.num_ranks)
        dst = ranks[(rank - ranks[0] + 1) % len(ranks)]
        src = ranks[rank - ranks[0] - 1]
        path = self.cluster.path(rank, dst)
        latency_s = self.cluster.path(src, rank).gather_latency_s
        *_, number = self._number("gather", rank)
        track.now = self._issue(track, op.host_s).plus(path.gather_launch_s)
        self._wait(rank, (("come", dst, "gather", number), 0.0), notice=("come", rank, "gather", number))
        for step in range(len(ranks) - 1):
            # After `step` steps, a rank's own piece is forwarded by the rank `step` positions later.
            holder = ranks[(rank - ranks[0] + step) % len(ranks)]
            after = ranks[(rank - ranks[0] + step + 1) % len(ranks)]
            size_s = self.cluster.path(holder, after).gather_step_s(op.nbytes, len(ranks))
            self.pieces_s["gather", holder, number, step] = size_s
            self._post(rank, dst, ("gather", rank, number, step), None)
            self._wait(rank, (("gather", src, number, step), latency_s))

    def _ring_pass(self, rank: int, track: _Track, op: RingPass) -> None:
        """Add the rounds of a ring: a rank sends its piece on while it works, then waits for the previous one's."""
        dst = (rank + 1) % self.num_ranks
        src = (rank - 1) % self.num_ranks
        for work_s, nbytes, host_s in zip(op.device_s, op.nbytes, op.host_s, strict=False):
            key = self._number("pass", rank)
            *_, number = key
            track.now = track.now.at_least(track.host_s)
            self._wait(rank, (("come", dst, "pass", number), 0.0), notice=("come", rank, "pass", number))
            self._post(rank, dst, key, self.cluster.path(rank, dst).busy_s(nbytes))
            self._wait(rank, (key, 0.0), (("pass", src, number), self.cluster.path(src, rank).latency_s))
            jitter = self._work_jitter(rank)
            if op.overlaps:
                track.works[len(track.missing) - 1] = work_s, jitter
                self.message_share = op.message_share
            else:
                track.now = track.now.plus(work_s * jitter)
            track.host_s += host_s
            track.now = track.now.at_least(track.host_s)
        track.now = track.now.at_least(track.host_s).plus(op.device_s[-1] * self._work_jitter(rank))
        track.now = self._issue(track, op.host_s[-1])

    def _all_to_all(self, rank: int, track: _Track, op: AllToAll) -> None:
        """Add a rank's waits and messages of an all-to-all; each message waits for the rank's previous one."""
        *_, number = self._number("exchange", rank)
        track.now = self._issue(track, op.host_s)
        before: list[tuple[Key, float]] = []  # the rank's own previous message
        arrivals = []
        for shift, nbytes in enumerate(op.nbytes, start=1):
            dst = (rank + shift) % self.num_ranks
            src = (rank - shift) % self.num_ranks
            notice = None
            if shift == 1:
                notice = ("come", rank, "exchange", number)
            self._wait(rank, (("come", dst, "exchange", number), 0.0), *before, notice=notice)
            key = ("exchange", rank, number, shift)
            self._post(rank, dst, key, self.cluster.path(rank, dst).busy_s(nbytes))
            before = [(key, 0.0)]
            arrivals.append((("exchange", src, number, shift), self.cluster.path(src, rank).latency_s))
        self._wait(rank, *before, *arrivals)

    def _load(self, rank: int, track: _Track, load: Load) -> None:
        """Add a wait for a part of the cached prefix, which arrives over the rank's own link."""
        key, seconds = track.loaded
        seconds += load.seconds.item()
        if key is None:
            track.now = track.now.at_least(seconds + load.latency_s)
        else:
            self._wait(rank, (key, seconds + load.latency_s))
        track.loaded = key, seconds
        if not load.ahead:
            track.loaded = self._number("loaded", rank), 0.0
            self._wait(rank, notice=track.loaded[0])


class _Targets:
    """Arrivals that each cause triggers; a cause is a cell (row and column) of a table."""

    def __init__(self, targets: Mapping[tuple[int, int], Sequence[_Target]], shape: tuple[int, int]) -> None:
        self.columns: list[tuple[Index, Index, Array]] = []
        for number in range(max(map(len, targets.values()), default=0)):
            rank = np.full(shape, -1)
            wait = np.zeros(shape, dtype=np.intp)
            latency_s = np.zeros(shape)
            for cell, targets_of_cell in targets.items():
                if number < len(targets_of_cell):
                    rank[cell], wait[cell], latency_s[cell] = targets_of_cell[number]
            self.columns.append((rank.ravel(), wait.ravel(), latency_s.ravel()))

    def of(self, causes: Index, rows: Index, time_s: Array, num_rows: int) -> _Arrivals:
        """Arrivals that causes trigger at `time_s`; causes: index of each cell in the table. rows: its partition."""
        parts = []
        for rank, wait, latency_s in self.columns:
            ranks = rank.take(causes)
            found = np.flatnonzero(ranks >= 0)
            ranks = ranks.take(found)
            causes = causes.take(found)
            rows = rows.take(found)
            time_s = time_s.take(found)
            parts.append((ranks * num_rows + rows, wait.take(causes), time_s + latency_s.take(causes)))
        return _joined(parts)


_Arrivals = tuple[Index, Index, Array]  # places, their waits, arrival times in seconds


def _no_arrivals() -> _Arrivals:
    none = np.zeros(0, dtype=np.intp)
    return none, none, np.zeros(0)


def _joined(parts: Sequence[_Arrivals]) -> _Arrivals:
    if not parts:
        return _no_arrivals()
    if len(parts) == 1:
        return parts[0]
    places, waits, time_s = zip(*parts, strict=True)
    return np.concatenate(places), np.concatenate(waits), np.concatenate(time_s)


class _Run:
    """One evaluation. A place is a number for a rank and a partition: rank times B plus partition.

    A slot is a number for a lane and a partition: lane times B plus partition.
    """

    def __init__(self, graph: _Graph, *, keeps_left: bool = False) -> None:
        """keeps_left: whether the departures of messages are kept for all_left_s."""
        self.keeps_left = keeps_left
        self.num_ranks = graph.num_ranks
        self.num_rows = graph.num_rows
        self.message_share = graph.message_share
        tracks = graph.tracks
        self.num_waits = np.array([len(track.missing) for track in tracks])
        most = int(self.num_waits.max())
        missing = np.ones((most + 1, self.num_ranks), dtype=np.intp)  # 1 after the last wait, which no message ends
        self.work_of = np.full((most + 1, self.num_ranks), -1)
        works: list[tuple[Array, Value]] = []
        for rank, track in enumerate(tracks):
            missing[: len(track.missing), rank] = track.missing
            for wait, work in track.works.items():
                self.work_of[wait, rank] = len(works)
                works.append(work)
        self.works_s = np.array([np.broadcast_to(work_s, self.num_rows) for work_s, _ in works])
        self.work_jitter = np.array([np.broadcast_to(jitter, self.num_rows) for _, jitter in works])
        part_s, floor_s = self._laters([[*track.parts, track.now] for track in tracks], most + 1)
        self.part_s = part_s.ravel()
        self.part_floor_s = floor_s.ravel()
        self.size = self.num_ranks * self.num_rows
        self.missing = np.repeat(missing, self.num_rows)
        self.there_s = np.full(self.missing.size, -np.inf)  # last arrival so far, by wait and place
        # End of the last wait, by the number of waits that are over and by place.
        self.over_s = np.full((most + 2) * self.size, np.inf)
        self.passed = np.zeros(self.size, dtype=np.intp)  # number of waits that each place has passed
        self.ready_s = np.zeros(self.size)  # time at which each rank reaches its current wait
        self.came_s = np.zeros(self.size)  # time at which each rank reached its previous wait
        self.rank_of, self.row_of = np.divmod(np.arange(self.size), self.num_rows)
        self._prepare_lanes(graph, most)
        notices: dict[tuple[int, int], list[_Target]] = defaultdict(list)
        for (rank, wait), keys in graph.notices.items():
            for key in keys:
                notices[wait, rank] += graph.targets.pop(key, ())
        self.notices = _Targets(notices, missing.shape)
        assert not graph.targets, "the program deadlocks: a message is received that nobody sends"
        places = np.arange(self.size)
        none = np.zeros(self.size, dtype=np.intp)
        begun = self._go_on(places, none, np.zeros(self.size))
        empty = np.flatnonzero(self.missing[: self.size] == 0)
        self._deliver(_joined([begun, self._pass(empty, none[: empty.size])]))

    def _prepare_lanes(self, graph: _Graph, most_waits: int) -> None:
        keys = sorted(graph.lanes, key=lambda key: key[0])
        lanes = [graph.lanes[key] for key in keys]
        self.num_posts = np.array([len(posts) for posts in lanes], dtype=np.intp)
        # the last lane is empty
        most = max(map(len, lanes), default=0)
        num_lanes = len(lanes) + 1
        after = np.full((most + 1, num_lanes), most_waits + 1)
        busy_s = np.zeros((most + 1, num_lanes, self.num_rows))
        for lane, posts in enumerate(lanes):
            for number, post in enumerate(posts):
                after[number, lane] = post.after
                alone_s = post.busy_s
                if alone_s is None:
                    alone_s = graph.pieces_s[post.key]
                busy_s[number, lane] = alone_s * post.jitter
        laters = [[post.later for post in posts] for posts in lanes]
        post_s, floor_s = self._laters([*laters, []], most + 1)
        owners = np.array([*(key[0] for key in keys), 0], dtype=np.intp)
        self.post_s = post_s.ravel()
        self.post_floor_s = floor_s.ravel()
        self.after = after.ravel()
        self.busy_s = busy_s.ravel()
        self.num_lanes = num_lanes
        self.lane_of, self.row_of_slot = np.divmod(np.arange(num_lanes * self.num_rows), self.num_rows)
        self.own_slots = self._own_slots(keys)
        self.owner_place = owners.take(self.lane_of) * self.num_rows + self.row_of_slot
        self.number = np.zeros(self.lane_of.size, dtype=np.intp)  # number of the lane's next message
        self.enters_s = np.full(self.lane_of.size, np.inf)  # time at which this message enters the bus
        self.leaves_at = np.full(self.lane_of.size, np.inf)  # value of served_s at which the message on the bus leaves
        self.left_s = np.full((most + 1, self.lane_of.size), -np.inf)  # departure of each message, by number and slot
        arrivals: dict[tuple[int, int], list[_Target]] = {}
        sources: set[tuple[int, int]] = set()
        for lane, posts in enumerate(lanes):
            for number, post in enumerate(posts):
                targets = graph.targets.pop(post.key, [])
                assert targets, "a message that nobody receives"
                arrivals[number, lane] = targets
                sources.update((target.rank, lane) for target in targets)
        self.arrivals = _Targets(arrivals, after.shape)
        # Whether each wait is for one message, and messages arrive in the order of the rank's waits.
        self.in_order = len(sources) == len({rank for rank, _ in sources}) and bool((self.missing == 1).all())

    def _own_slots(self, keys: Sequence[Key]) -> list[Index]:
        """Slots of each place's first lane, second lane and so on; of the empty last lane if it has no such lane.

        keys: those of the lanes, without the empty one.
        """
        lanes_of_rank: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for lane, (rank, *_) in enumerate(keys):
            assert isinstance(rank, int)
            lanes_of_rank[rank].append(lane)
        slots = []
        for number in range(max(map(len, lanes_of_rank))):
            lane_of_rank = np.full(self.num_ranks, len(keys), dtype=np.intp)
            for rank, lanes in enumerate(lanes_of_rank):
                if number < len(lanes):
                    lane_of_rank[rank] = lanes[number]
            slots.append(lane_of_rank.take(self.rank_of) * self.num_rows + self.row_of)
        return slots

    def _laters(self, columns: Sequence[Sequence[_Later]], length: int) -> tuple[Array, Array]:
        """Arrays of delays and floors, shape (length, columns, B)."""
        shape = length, len(columns), self.num_rows
        delay_s = np.zeros(shape)
        floor_s = np.full(shape, -np.inf)
        for number, column in enumerate(columns):
            for row, later in enumerate(column):
                delay_s[row, number] = later.delay_s
                floor_s[row, number] = later.floor_s
        return delay_s, floor_s

    def finish_s(self) -> Array:
        """Run every partition from event to event until no message is left; return the finish time of each rank."""
        enters = self.enters_s.reshape(-1, self.num_rows)
        leaves = self.leaves_at.reshape(-1, self.num_rows)
        now_s = np.zeros(self.num_rows)
        served_s = np.zeros(self.num_rows)
        share = np.ones(self.num_rows)
        while enters.size:
            enter_s = np.minimum.reduce(enters)
            leave_at = np.minimum.reduce(leaves)
            leave_s = np.maximum(now_s, now_s + (leave_at - served_s) * share)
            next_s = np.minimum(enter_s, leave_s)
            done = np.isinf(next_s)
            if done.any():
                if done.all():
                    break
                next_s = np.where(done, now_s, next_s)
            served_s += (next_s - now_s) / share
            np.copyto(served_s, np.maximum(served_s, leave_at), where=(leave_s <= enter_s) & ~done)
            now_s = next_s
            slots = (leaves <= served_s).ravel().nonzero()[0]
            if slots.size:
                self._leave(slots, now_s)
            slots = (enters <= now_s).ravel().nonzero()[0]
            if slots.size:
                busy_s = self.busy_s.take(self.number.take(slots) * self.number.size + slots)
                self.leaves_at[slots] = served_s.take(self.row_of_slot.take(slots)) + busy_s
                self.enters_s[slots] = np.inf
            share = np.maximum(np.add.reduce(leaves < np.inf), 1.0)
        finished = self.passed.reshape(self.num_ranks, -1) == self.num_waits[:, None]
        assert finished.all(), "the program deadlocks"
        return self.ready_s.reshape(self.num_ranks, -1)

    def passed_s(self, marks: Sequence[_Mark]) -> Array:
        """Time at which each rank has passed its mark, shape (ranks, B)."""
        over_s = self.over_s.reshape(-1, self.num_ranks, self.num_rows)
        return np.stack([over_s[mark.num_waits, rank] for rank, mark in enumerate(marks)])

    def all_left_s(self, periods: int) -> Array:
        """Departure of the last message of each period, shape (periods, B); periods have equal numbers of messages."""
        left_s = self.left_s.reshape(len(self.left_s), -1, self.num_rows)
        lanes = [left_s[:count, lane].reshape(periods, -1, self.num_rows) for lane, count in enumerate(self.num_posts)]
        return np.asarray(np.concatenate(lanes, axis=1).max(axis=1))

    def _leave(self, slots: Index, now_s: Array) -> None:
        """Let the messages of these slots leave: the next messages may enter, and receivers may continue."""
        number = self.number.take(slots)
        rows = self.row_of_slot.take(slots)
        time_s = now_s.take(rows)
        if self.keeps_left:
            self.left_s[number, slots] = time_s
        self.number[slots] = number + 1
        self.leaves_at[slots] = np.inf
        self.enters_s[slots] = np.maximum(self._next_s(slots, number + 1), time_s)
        causes = number * self.num_lanes + self.lane_of.take(slots)
        arrivals = self.arrivals.of(causes, rows, time_s, self.num_rows)
        if self.in_order and not self.notices.columns:
            places, waits, there_s = arrivals
            self._go_on(places, waits + 1, np.maximum(there_s, self.ready_s.take(places)))
        else:
            self._deliver(arrivals)

    def _deliver(self, arrivals: _Arrivals) -> None:
        """Release ranks whose waits end with these arrivals, and ranks that wait for those ranks."""
        places, waits, time_s = arrivals
        while places.size:
            at = waits * self.size + places
            np.maximum.at(self.there_s, at, time_s)
            np.subtract.at(self.missing, at, 1)
            at = at[(self.missing.take(at) == 0) & (self.passed.take(places) == waits)]
            if at.size > 1:
                at = np.unique(at)
            waits, places = np.divmod(at, self.size)
            places, waits, time_s = self._pass(places, waits)

    def _pass(self, places: Index, waits: Index) -> _Arrivals:
        """End the waits of these ranks, and next waits without arrivals; return the arrivals that this triggers."""
        causes = []
        while places.size:
            over_s = np.maximum(self.there_s.take(waits * self.size + places), self.ready_s.take(places))
            if len(self.works_s):
                self._work_beside(places, waits, over_s)
            waits = waits + 1
            causes.append(self._go_on(places, waits, over_s))
            over = self.missing.take(waits * self.size + places) == 0
            places = places[over]
            waits = waits[over]
        return _joined(causes)

    def _work_beside(self, places: Index, waits: Index, over_s: Array) -> None:
        """End rounds of a ring whose messages have arrived and whose work is done; changes over_s in place."""
        works = self.work_of.take(waits * self.num_ranks + self.rank_of.take(places))
        working = np.flatnonzero(works >= 0)
        came_s = self.came_s.take(places.take(working))
        there_s = over_s.take(working)
        at = works.take(working), self.row_of.take(places.take(working))
        work_s = beside_message_s(self.works_s[at], there_s - came_s, self.message_share)
        done_s = came_s + work_s * self.work_jitter[at]
        over_s[working] = np.maximum(there_s, done_s)

    def _go_on(self, places: Index, passed: Index, over_s: Array) -> _Arrivals:
        """Advance these ranks to their next wait after `passed` waits; return the arrivals that this triggers."""
        at = passed * self.size + places
        self.over_s[at] = over_s
        self.passed[places] = passed
        ready_s = np.maximum(over_s + self.part_s.take(at), self.part_floor_s.take(at))
        if len(self.works_s):
            self.came_s[places] = self.ready_s.take(places)
        self.ready_s[places] = ready_s
        for slot_of in self.own_slots:
            slots = slot_of.take(places)
            enters_s = self.enters_s.take(slots)
            idle = np.isinf(enters_s) & np.isinf(self.leaves_at.take(slots))
            self.enters_s[slots] = np.where(idle, self._next_s(slots, self.number.take(slots)), enters_s)
        if not self.notices.columns:
            return _no_arrivals()
        causes = passed * self.num_ranks + self.rank_of.take(places)
        return self.notices.of(causes, self.row_of.take(places), ready_s, self.num_rows)

    def _next_s(self, slots: Index, number: Index) -> Array:
        """Time at which these messages may enter the bus; infinite before their wait ends, or without a message."""
        after = self.after.take(number * self.num_lanes + self.lane_of.take(slots))
        at = number * self.number.size + slots
        ready_s = self.over_s.take(after * self.size + self.owner_place.take(slots)) + self.post_s.take(at)
        return np.asarray(np.maximum(ready_s, self.post_floor_s.take(at)))
