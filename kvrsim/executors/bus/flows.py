"""A program as a graph of moments, for machines whose messages share one bandwidth.

Which moments follow which is the same in all partitions of a batch, since the order in which messages match does not
depend on durations. A moment comes when the last of those before it has come and its delay has passed, and not before
its floor. A flow is a moment that enters the bus then, and that comes when its last byte has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvrsim.executors.steps import Message, Segment, Step, Steps
from kvrsim.hardware import Cluster
from kvrsim.program import AllGather, AllToAll, Array, Load, Program, Recv, RingPass

Value = Array | float
Key = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Clock:
    """A time: the latest of some moments, each with its delay, and of a floor."""

    terms: dict[int, Value] = field(default_factory=dict)  # delay after each moment, seconds, shape (B,)
    floor_s: Value = 0.0

    def plus(self, seconds: Value) -> Clock:
        """So much later."""
        return Clock({moment: delay + seconds for moment, delay in self.terms.items()}, self.floor_s + seconds)

    def at_least(self, seconds: Value) -> Clock:
        """No earlier than that."""
        return Clock(self.terms, np.maximum(self.floor_s, seconds))

    def after(self, other: Clock) -> Clock:
        """The later of two."""
        terms = dict(self.terms)
        for moment, delay in other.terms.items():
            terms[moment] = np.maximum(terms[moment], delay) if moment in terms else delay
        return Clock(terms, np.maximum(self.floor_s, other.floor_s))


@dataclass(frozen=True, slots=True)
class Beside:
    """Work of a round of a ring, which loses a share of its rate while messages move."""

    begins: int  # moment
    work_s: Value


@dataclass(slots=True)
class FlowGraph:
    """Moments, what they wait for, and the flows among them."""

    num_rows: int
    floors_s: list[Value] = field(default_factory=list)  # by moment
    edges: list[tuple[int, int, Value]] = field(default_factory=list)  # from, to, delay in seconds
    flows: dict[int, tuple[int, Value]] = field(default_factory=dict)  # moment -> its lane, seconds alone on the bus
    beside: dict[int, Beside] = field(default_factory=dict)  # by moment
    message_share: float = 0.0  # that such work loses
    ends: list[int] = field(default_factory=list)  # by rank: when it has finished
    lanes: dict[Key, int] = field(default_factory=dict)  # flows of a lane follow each other
    moments: dict[Key, int] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, cluster: Cluster) -> FlowGraph:
        """Of all ranks."""
        graph = cls(program.num_rows)
        for rank, steps in enumerate(Steps(cluster).of(program)[0].steps):
            RankFlows(graph, cluster, rank, program.num_ranks).take(steps)
        sent = {moment for key, moment in graph.moments.items() if key[0] != "come"}
        assert sent <= graph.flows.keys(), "the program deadlocks: a message is received that nobody sends"
        return graph

    def moment(self, key: Key | None = None) -> int:
        """A new moment, or the one of a key."""
        if key is not None and key in self.moments:
            return self.moments[key]
        self.floors_s.append(0.0)
        if key is not None:
            self.moments[key] = len(self.floors_s) - 1
        return len(self.floors_s) - 1

    def wait(self, moment: int, clock: Clock) -> None:
        """The moment comes no earlier than the clock."""
        self.floors_s[moment] = np.maximum(self.floors_s[moment], clock.floor_s)
        self.edges.extend((before, moment, delay) for before, delay in clock.terms.items())

    def flow(self, moment: int, lane: Key, seconds: Value) -> None:
        """The moment is when a flow has left that takes so long alone."""
        self.flows[moment] = self.lanes.setdefault(lane, len(self.lanes)), seconds

    def rows(self, values: Iterable[Value]) -> Array:
        """One row each, shape (values, B)."""
        listed = list(values)
        found = np.empty((len(listed), self.num_rows))
        for row, value in zip(found, listed, strict=True):
            row[:] = value
        return found

    def merged_delays(self) -> tuple[npt.NDArray[np.intp], Array]:
        """For each edge its row of the delays, and the delays, each once, shape (delays, B)."""
        index: dict[float | int, int] = {}
        values: list[Value] = []
        rows = np.empty(len(self.edges), dtype=np.intp)
        for number, (_, _, delay) in enumerate(self.edges):
            key = id(delay) if isinstance(delay, np.ndarray) else float(delay)
            if key not in index:
                index[key] = len(values)
                values.append(delay)
            rows[number] = index[key]
        return rows, self.rows(values)


class RankFlows:
    """One rank's steps, added to the graph."""

    def __init__(self, graph: FlowGraph, cluster: Cluster, rank: int, num_ranks: int) -> None:
        self.graph, self.cluster, self.rank, self.num_ranks = graph, cluster, rank, num_ranks
        self.clock, self.loaded = Clock(), Clock()
        self.host_s = 0.0
        self.lags = False  # as of RankState
        self.num_meetings = 0
        self.sent: dict[int, int] = {}  # messages so far, by receiver
        self.received: dict[int, int] = {}  # by sender
        self.last: dict[Key, int] = {}  # the last flow so far of each link or way out

    def take(self, steps: Sequence[Step]) -> None:
        """All steps in order."""
        for step in steps:
            match step:
                case Segment():
                    self._compute(step)
                case Message():
                    self._send(step)
                case Recv():
                    self._recv(step)
                case AllGather():
                    self._all_gather(step)
                case RingPass():
                    self._ring_pass(step)
                case AllToAll():
                    self._all_to_all(step)
                case Load():
                    self._load(step)
        end = self.graph.moment()
        self.graph.wait(end, self.clock)
        self.graph.ends.append(end)

    def _compute(self, segment: Segment) -> None:
        self.clock = self._joined(self.clock).plus(segment.device_s)
        if segment.host_floor_s is not None:
            self.clock = self.clock.at_least(segment.host_floor_s + self.host_s)
        self.host_s += segment.host_s
        self.lags = False

    def _joined(self, clock: Clock) -> Clock:
        """The clock as one moment, where it waits for several."""
        if len(clock.terms) < 2:
            return clock
        return self._named(self.graph.moment(), clock)

    def _named(self, moment: int, clock: Clock) -> Clock:
        self.graph.wait(moment, clock)
        return Clock({moment: 0.0})

    def _issued(self, host_s: float) -> Clock:
        """When the device has come to an operation that the host takes that long to issue."""
        if host_s:
            self.host_s += host_s
            self.lags = True
        return self.clock.at_least(self.host_s) if self.lags else self.clock

    def _in_order(self, flow: int, link: Key) -> None:
        """A flow waits until the one before on its link has left."""
        if link in self.last:
            self.graph.wait(flow, Clock({self.last[link]: 0.0}))
        self.last[link] = flow

    def _send(self, message: Message) -> None:
        number = self.sent[message.dst] = self.sent.get(message.dst, -1) + 1
        flow = self.graph.moment(("message", self.rank, message.dst, number))
        link = ("turn", self.rank, 0, 0) if message.in_turn else self._link(message.dst)
        self.graph.flow(flow, link, message.link_s)
        self._in_order(flow, link)
        self.clock = self._joined(self.clock)
        issued = self._issued(message.host_s)
        self.graph.wait(flow, issued)
        if message.rendezvous:
            self.clock = Clock({flow: 0.0})

    def _recv(self, recv: Recv) -> None:
        number = self.received[recv.src] = self.received.get(recv.src, -1) + 1
        flow = self.graph.moment(("message", recv.src, self.rank, number))
        arrives = Clock({flow: self.cluster.path(recv.src, self.rank).latency_s})
        issued = self._issued(recv.host_s)
        if recv.rendezvous:
            self.graph.wait(flow, issued)
            self.clock = arrives
        else:
            self.clock = self.clock.after(arrives)

    def _link(self, dst: int) -> Key:
        return ("link", self.rank, dst, 0)

    def _meeting(self, clock: Clock) -> tuple[int, int]:
        """Come to the next collective, or round of one: its number, and the moment."""
        number, self.num_meetings = self.num_meetings, self.num_meetings + 1
        come = self._come(self.rank, number)
        self.graph.wait(come, clock)
        return number, come

    def _come(self, rank: int, number: int) -> int:
        return self.graph.moment(("come", rank, number, 0))

    def _all_gather(self, op: AllGather) -> None:
        ranks = op.members(self.rank, self.num_ranks)
        place, steps = self.rank - ranks[0], range(len(ranks) - 1)
        dst, src = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        path, before = self.cluster.path(self.rank, dst), self.cluster.path(src, self.rank)
        number, come = self._meeting(self._issued(op.host_s).plus(path.gather_launch_s))
        there = Clock({come: 0.0, self._come(dst, number): 0.0})
        for step in steps:
            flow = self.graph.moment(("gather", self.rank, number, step))
            self._in_order(flow, self._link(dst))
            self.graph.wait(flow, there)
            there = Clock({self.graph.moment(("gather", src, number, step)): before.gather_latency_s})
            # The own piece is with the rank so many further on then, which passes it on.
            holder, after = ranks[(place + step) % len(ranks)], ranks[(place + step + 1) % len(ranks)]
            carried = self.graph.moment(("gather", holder, number, step))
            seconds = self.cluster.path(holder, after).gather_step_s(op.nbytes, len(ranks))
            self.graph.flow(carried, ("link", holder, after, 0), seconds)
        self.clock = Clock({come: 0.0}).after(there)
        self.lags = False

    def _ring_pass(self, op: RingPass) -> None:
        dst, src = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks
        for index, (work_s, host_s) in enumerate(zip(op.device_s, op.host_s, strict=True)):
            begins = self._joined(self.clock).at_least(self.host_s)
            self.host_s += host_s
            if index == len(op.host_s) - 1:
                self.clock = begins.plus(work_s).at_least(self.host_s)
                break
            number, come = self._meeting(begins)
            flow = self.graph.moment(("pass", self.rank, number, 0))
            self._in_order(flow, self._link(dst))
            self.graph.wait(flow, Clock({come: 0.0, self._come(dst, number): 0.0}))
            self.graph.flow(flow, self._link(dst), self.cluster.path(self.rank, dst).busy_s(op.nbytes[index]))
            comes = self.graph.moment(("pass", src, number, 0))
            there = Clock({flow: 0.0}).after(Clock({comes: self.cluster.path(src, self.rank).latency_s}))
            if not op.overlaps:
                self.clock = self._joined(there).plus(work_s)
            elif op.message_share:
                done = self.graph.moment()
                self.graph.beside[done], self.graph.message_share = Beside(come, work_s), op.message_share
                self.clock = self._named(done, there)
            else:
                self.clock = there.after(Clock({come: work_s}))
            self.clock = self.clock.at_least(self.host_s)
        self.lags = False

    def _all_to_all(self, op: AllToAll) -> None:
        number, come = self._meeting(self._issued(op.host_s))
        ready, done = Clock({come: 0.0}), Clock({come: 0.0})
        for shift, nbytes in enumerate(op.nbytes, start=1):
            dst, src = (self.rank + shift) % self.num_ranks, (self.rank - shift) % self.num_ranks
            flow = self.graph.moment(("exchange", self.rank, number, shift))
            self.graph.flow(flow, ("exchange", self.rank, 0, 0), self.cluster.path(self.rank, dst).busy_s(nbytes))
            self.graph.wait(flow, ready.after(Clock({self._come(dst, number): 0.0})))
            self._in_order(flow, self._link(dst))
            ready = Clock({flow: 0.0})
            comes = self.graph.moment(("exchange", src, number, shift))
            done = done.after(Clock({comes: self.cluster.path(src, self.rank).latency_s}))
        self.clock = done.after(ready)
        self.lags = False

    def _load(self, load: Load) -> None:
        """Wait for a part of the cached prefix, which comes over a link of the rank's own."""
        left = self.loaded.plus(load.seconds)
        self.clock = self.clock.after(left.plus(load.latency_s))
        self.loaded = left if load.ahead else self.clock
