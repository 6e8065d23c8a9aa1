"""The event executor: the same program as SimPy processes, with every span recorded.

A rank is a process; a link has a queue and a latency. This executor records timelines, runs single samples of noise,
and is the reference for all others.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import simpy

from kvrsim.hardware import Cluster, Path
from kvrsim.noise import NoiseDraw
from kvrsim.program import (
    AllGather,
    AllToAll,
    Array,
    Collective,
    Compute,
    Load,
    Payload,
    Program,
    Recv,
    RingPass,
    Send,
    beside_message_s,
)
from kvrsim.results.timeline import Span, SpanKind, SpanOp, Timeline

Process = Generator[simpy.Event, Any, Any]
EndsAt = Callable[[int, float, float], float]  # number, start and duration of a message -> its end under noise


class FairBus:
    """Processor sharing: each of n concurrent flows gets 1/n of the bandwidth.

    The bus is kept in virtual time: `served_bytes` counts the bytes of a flow that has been on the bus since the start.
    A flow with n bytes that enters when served_bytes is v leaves when it is v + n, however many flows join or leave
    meanwhile.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.bandwidth_bytes_per_s = float("inf")
        self.served_bytes = 0.0  # bytes that each flow has received
        self.updated_s = 0.0
        self.flows: list[tuple[float, int, simpy.Event]] = []  # heap of (leaves at this served_bytes, order, done)
        self.order = count()
        self.wake: simpy.Event | None = None  # wake-up for the next flow that leaves; earlier ones are stale

    def transmit(self, nbytes: float) -> Generator[simpy.Event, Any, float]:
        """Share the bus until all bytes have passed; return the time at which the first byte left."""
        start_s = self.env.now
        self._serve()
        done = self.env.event()
        heapq.heappush(self.flows, (self.served_bytes + nbytes, next(self.order), done))
        self._plan()
        yield done
        return start_s

    def _serve(self) -> None:
        """Update the bytes that every flow has received until now."""
        if self.flows:
            elapsed_s = self.env.now - self.updated_s
            self.served_bytes += elapsed_s * self.bandwidth_bytes_per_s / len(self.flows)
        self.updated_s = self.env.now

    def _plan(self) -> None:
        """Schedule a wake-up for the next flow that leaves."""
        if self.flows:
            leaves_at = self.flows[0][0]
            missing = max(0.0, leaves_at - self.served_bytes)
            self.wake = self.env.timeout(missing * len(self.flows) / self.bandwidth_bytes_per_s)
            self.wake.callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        if event is not self.wake:
            return
        leaves_at = self.flows[0][0]
        self._serve()
        self.served_bytes = max(self.served_bytes, leaves_at)
        while self.flows and self.flows[0][0] <= self.served_bytes:
            heapq.heappop(self.flows)[2].succeed()
        self._plan()


class Link:
    """The link of a pair of ranks: one message at a time, first in, first out, with its own bandwidth or on a bus."""

    def __init__(
        self, env: simpy.Environment, path: Path, bus: FairBus | None = None, ends_s: EndsAt | None = None
    ) -> None:
        self.env = env
        self.path = path
        self.bus = bus
        self.ends_s = ends_s
        self.queue = simpy.Resource(env, capacity=1)
        self.num_messages = 0

    def transmit(self, nbytes: float, busy_s: float) -> Process:
        """Wait for the link, then keep it busy, or share the bus; return the time at which the first byte left."""
        with self.queue.request() as turn:
            yield turn
            start_s = self.env.now
            number = self.num_messages
            self.num_messages = self.num_messages + 1
            noisy_s = busy_s
            if self.ends_s is not None:
                noisy_s = self.ends_s(number, start_s, busy_s) - start_s
            if self.bus is None:
                yield self.env.timeout(noisy_s)
            elif busy_s:
                yield from self.bus.transmit(nbytes * noisy_s / busy_s)
            else:
                yield from self.bus.transmit(nbytes)
        return start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A message, or a piece of an all-gather."""

    src: int
    dst: int
    nbytes: float
    op: SpanOp  # content of the message, or "all-gather"
    layer: int | None
    gathered_by: int | None = None  # number of ranks of the all-gather; None: a message


@dataclass(frozen=True, slots=True)
class Meeting:
    """State of one collective, or of one round of it, while its ranks arrive."""

    joined: dict[int, simpy.Event]  # by rank: event of the rank's arrival
    pieces: dict[int, simpy.Store]  # by rank: pieces that other ranks have sent to the rank


class Network:
    """All links between ranks, the messages that wait for them, and the recorded spans."""

    def __init__(
        self, env: simpy.Environment, cluster: Cluster, num_ranks: int, *, record: bool, noise: NoiseDraw | None
    ) -> None:
        self.env = env
        self.cluster = cluster
        self.num_ranks = num_ranks
        self.record = record
        self.noise = noise
        self.spans: list[Span] = []
        self.bus = FairBus(env)
        self.links: dict[tuple[int, int], Link] = {}
        self.inboxes: dict[tuple[int, int], simpy.Store] = {}
        self.readies: dict[tuple[int, int], simpy.Store] = {}
        self.meetings: dict[tuple[range, int], Meeting] = {}

    def link(self, src: int, dst: int) -> Link:
        """The link that carries messages from src to dst."""
        if (src, dst) not in self.links:
            path = self.cluster.path(src, dst)
            bus = None
            if path.shared_bus:
                bus = self.bus
            ends_s = None
            if self.noise is not None:
                ends_s = partial(self._message_end_s, src, dst)
            self.bus.bandwidth_bytes_per_s = path.bandwidth_bytes_per_s
            self.links[src, dst] = Link(self.env, path, bus, ends_s)
        return self.links[src, dst]

    def _message_end_s(self, src: int, dst: int, number: int, start_s: float, busy_s: float) -> float:
        assert self.noise is not None
        return self.noise.message_end_s(src, dst, number, np.array([start_s]), np.array([busy_s])).item()

    def inbox(self, src: int, dst: int) -> simpy.Store:
        """Messages from src that have arrived at dst and wait to be received."""
        return self.inboxes.setdefault((src, dst), simpy.Store(self.env))

    def ready(self, src: int, dst: int) -> simpy.Store:
        """Receives that dst has reached and whose rendezvous with src has not begun."""
        return self.readies.setdefault((src, dst), simpy.Store(self.env))

    def meeting(self, index: int, ranks: range) -> Meeting:
        """The index-th collective of these ranks, or round of a collective."""
        if (ranks, index) not in self.meetings:
            joined = {rank: self.env.event() for rank in ranks}
            pieces = {rank: simpy.Store(self.env) for rank in ranks}
            self.meetings[ranks, index] = Meeting(joined, pieces)
        return self.meetings[ranks, index]

    def note(
        self, rank: int, kind: SpanKind, name: str, op: SpanOp, layer: int | None, start_s: float, end_s: float
    ) -> None:
        """Record a span of a rank's compute stream, unless it is empty."""
        if self.record and end_s > start_s:
            self.spans.append(Span(rank=rank, kind=kind, op=op, name=name, layer=layer, start_s=start_s, end_s=end_s))

    def carry(self, parcel: Parcel, to: simpy.Store, left: simpy.Event | None = None) -> Process:
        """Queue, transmit and delay a parcel; `left` is triggered when its last byte leaves; then `to` receives it."""
        src = parcel.src
        dst = parcel.dst
        gathered_by = parcel.gathered_by
        link = self.link(src, dst)
        nbytes = np.array(parcel.nbytes)
        if gathered_by:
            busy_s = link.path.gather_step_s(nbytes, gathered_by)
            latency_s = link.path.gather_latency_s
        else:
            busy_s = link.path.busy_s(nbytes)
            latency_s = link.path.latency_s
        start_s = yield from link.transmit(parcel.nbytes, busy_s.item())
        if left is not None:
            left.succeed()
        if self.record:
            span = Span(
                rank=src,
                kind="transfer",
                op=parcel.op,
                name=f"{parcel.op} {src}→{dst}",
                layer=parcel.layer,
                start_s=start_s,
                end_s=self.env.now,
                peer=dst,
                nbytes=parcel.nbytes,
            )
            self.spans.append(span)
        if latency_s:
            yield self.env.timeout(latency_s)
        yield to.put(parcel.nbytes)


class EventSimulation:
    """One simulated prefill. `finish_s`: end of each rank; TTFT is the end of the last rank.

    noise: one sample of noise for this prefill.
    """

    def __init__(
        self, program: Program, cluster: Cluster, *, record: bool = True, noise: NoiseDraw | None = None
    ) -> None:
        assert noise is None or noise.num_samples == 1, "one sample at a time"
        self.program = program
        env = simpy.Environment()
        self.network = Network(env, cluster, program.num_ranks, record=record, noise=noise)
        ranks = [RankProcess(program, rank, self.network) for rank in range(program.num_ranks)]
        processes = [env.process(rank.run()) for rank in ranks]
        env.run(simpy.AllOf(env, processes))
        self.finish_s = tuple(float(rank.clock_s) for rank in ranks)

    @property
    def timeline(self) -> Timeline:
        """All spans, ordered by start."""
        spans = tuple(sorted(self.network.spans, key=lambda span: (span.start_s, span.rank, span.end_s)))
        return Timeline(strategy=self.program.strategy, num_ranks=self.program.num_ranks, spans=spans)


class RankProcess:
    """One rank. Its host and device clocks are numbers, which meet the simulation's clock only in communication."""

    def __init__(self, program: Program, rank: int, network: Network) -> None:
        self.program = program
        self.rank = rank
        self.network = network
        self.env = network.env
        self.host_s = 0.0
        self.clock_s = 0.0
        # Numbers of the rank's collectives and rounds, by the ranks that meet.
        self.meetings = defaultdict[range, Iterator[int]](count)
        self.loaded_s = 0.0  # time at which all loads so far have left their link
        self.num_computed = 0
        self.last_left: simpy.Event | None = None  # departure of the last message that leaves in turn

    def run(self) -> Process:
        """Run all operations of one request in order."""
        for layer, op in self.program.ops(self.rank):
            match op:
                case Compute():
                    self._compute(layer, op)
                case Send():
                    yield from self._send(layer, op)
                case Recv():
                    yield from self._recv(layer, op)
                case AllGather():
                    yield from self._all_gather(layer, op)
                case RingPass():
                    yield from self._ring_pass(layer, op)
                case AllToAll():
                    yield from self._all_to_all(layer, op)
                case Collective():
                    self._collective(layer, op)
                case Load():
                    self._load(layer, op)
        yield from self._until(self.clock_s)

    def _until(self, time_s: float) -> Process:
        if time_s > self.env.now:
            yield self.env.timeout(time_s - self.env.now)

    def _compute(self, layer: int | None, op: Compute) -> None:
        """Advance only the clock: no other rank is affected."""
        begin_s = self.clock_s
        start_s = max(begin_s, self.host_s)
        self.host_s += op.host_s
        self.clock_s = max(self._computed_s(start_s, op.device_s), self.host_s)
        self.network.note(self.rank, "wait", "host", "stall", layer, begin_s, start_s)
        self.network.note(self.rank, "compute", op.name, op.kind, layer, start_s, self.clock_s)

    def _computed_s(self, start_s: float, device_s: Array) -> float:
        """Time at which the device finishes an operation; noise may delay it."""
        number = self.num_computed
        self.num_computed = self.num_computed + 1
        if self.network.noise is None:
            return start_s + device_s.item()
        return self.network.noise.compute_end_s(self.rank, number, np.array([start_s]), device_s.reshape(1)).item()

    def _waited(self, name: str, layer: int | None, op: SpanOp = "stall") -> None:
        """Record that the compute stream waited until now."""
        self.network.note(self.rank, "wait", name, op, layer, self.clock_s, self.env.now)
        self.clock_s = max(self.clock_s, self.env.now)

    def _send(self, layer: int | None, op: Send) -> Process:
        yield from self._until(self.clock_s)
        self.host_s += op.host_s
        left = None
        if op.rendezvous or op.in_turn:
            left = self.env.event()
        before = None
        if op.in_turn:
            before = self.last_left
            self.last_left = left
        self.env.process(self._post(max(self.clock_s, self.host_s), layer, op, before, left))
        if left is not None and op.rendezvous:
            yield left
            self._waited(f"send to rank {op.dst}", layer, op.payload)

    def _post(
        self, posted_s: float, layer: int | None, op: Send, before: simpy.Event | None, left: simpy.Event | None
    ) -> Process:
        """Send a message; `before` is the event of the previous message's departure."""
        yield from self._until(posted_s)
        inbox = self.network.inbox(self.rank, op.dst)
        if op.rendezvous:
            yield self.network.ready(self.rank, op.dst).get()
        if before is not None:
            yield before
        parcel = Parcel(src=self.rank, dst=op.dst, nbytes=op.nbytes.item(), op=op.payload, layer=layer)
        yield from self.network.carry(parcel, inbox, left)

    def _recv(self, layer: int | None, op: Recv) -> Process:
        yield from self._until(self.clock_s)
        self.host_s += op.host_s
        if op.rendezvous:
            self.env.process(self._tell_ready(op.src, self.host_s))
        yield self.network.inbox(op.src, self.rank).get()
        self._waited(f"{op.payload} from rank {op.src}", layer, op.payload)

    def _tell_ready(self, src: int, time_s: float) -> Process:
        """Signal that a rendezvous may begin, once the host has issued the receive."""
        yield from self._until(time_s)
        yield self.network.ready(src, self.rank).put(True)

    def _all_gather(self, layer: int | None, op: AllGather) -> Process:
        """Join the all-gather, start a process that forwards pieces, and wait until all pieces have arrived."""
        self.host_s += op.host_s
        ranks = op.members(self.rank, self.program.num_ranks)
        launch_s = self.network.link(self.rank, self._after(ranks)).path.gather_launch_s
        yield from self._until(max(self.clock_s, self.host_s) + launch_s)
        done = self.env.event()
        self.env.process(self._forward(self._join(ranks), ranks, layer, op.nbytes.item(), done))
        yield done
        self._waited("all-gather", layer, "all-gather")

    @property
    def _all(self) -> range:
        return range(self.program.num_ranks)

    def _after(self, ranks: range) -> int:
        """The next rank on the ring."""
        return ranks[(self.rank - ranks[0] + 1) % len(ranks)]

    def _join(self, ranks: range) -> Meeting:
        """Join the next collective of these ranks, or round of a collective."""
        meeting = self.network.meeting(next(self.meetings[ranks]), ranks)
        meeting.joined[self.rank].succeed()
        return meeting

    def _forward(self, meeting: Meeting, ranks: range, layer: int | None, nbytes: float, done: simpy.Event) -> Process:
        """Send the rank's own piece and forward arriving pieces except the last; `done`: all pieces have arrived."""
        dst = self._after(ranks)
        steps = len(ranks) - 1
        for step in range(steps):
            yield meeting.joined[dst]
            piece = Parcel(src=self.rank, dst=dst, nbytes=nbytes, op="all-gather", layer=layer, gathered_by=len(ranks))
            self.env.process(self.network.carry(piece, meeting.pieces[dst]))
            nbytes = yield meeting.pieces[self.rank].get()
            if step == steps - 1:
                done.succeed()

    def _ring_pass(self, layer: int | None, op: RingPass) -> Process:
        """Run the rounds: compute with a piece while it is sent, then wait for the next; one compute span per round."""
        last = len(op.host_s) - 1
        for index, host_s in enumerate(op.host_s):
            yield from self._until(max(self.clock_s, self.host_s))
            self._waited("host", layer)
            begin_s = self.env.now
            self.host_s += host_s
            work_s = op.device_s[index]
            if index < last:
                meeting = self._join(self._all)
                dst = self._after(self._all)
                yield from self._pass_on(meeting, dst, op.nbytes[index], op.payload, layer)
                yield meeting.pieces[self.rank].get()
                if op.overlaps:
                    work_s = beside_message_s(work_s, np.array([self.env.now - begin_s]), op.message_share)
                else:
                    self._waited("ring", layer, op.payload)
                    begin_s = self.env.now
            self.clock_s = max(self._computed_s(begin_s, work_s), self.host_s)
            self.network.note(self.rank, "compute", op.name, op.kind, layer, begin_s, self.clock_s)
            if index < last and op.overlaps:
                self._waited("ring", layer, op.payload)

    def _pass_on(self, meeting: Meeting, dst: int, nbytes: Array, payload: Payload, layer: int | None) -> Process:
        """Send a message to a rank as soon as it has joined the meeting; return when the message has left."""
        yield meeting.joined[dst]
        left = self.env.event()
        parcel = Parcel(src=self.rank, dst=dst, nbytes=nbytes.item(), op=payload, layer=layer)
        self.env.process(self.network.carry(parcel, meeting.pieces[dst], left))
        yield left

    def _all_to_all(self, layer: int | None, op: AllToAll) -> Process:
        """Send the messages in turn, then wait for the other ranks' messages."""
        self.host_s += op.host_s
        yield from self._until(max(self.clock_s, self.host_s))
        meeting = self._join(self._all)
        for shift, nbytes in enumerate(op.nbytes, start=1):
            yield from self._pass_on(meeting, (self.rank + shift) % self.program.num_ranks, nbytes, op.payload, layer)
        for _ in op.nbytes:
            yield meeting.pieces[self.rank].get()
        self._waited("all-to-all", layer, op.payload)

    def _collective(self, layer: int | None, op: Collective) -> None:
        """Advance only the clock: no rank outside the group takes part."""
        start_s = max(self.clock_s, self.host_s)
        self.network.note(self.rank, "wait", "host", "stall", layer, self.clock_s, start_s)
        self.host_s += op.host_s
        self.clock_s = max(start_s + op.seconds.item(), self.host_s)
        self.network.note(self.rank, "wait", op.name, "collective", layer, start_s, self.clock_s)

    def _load(self, layer: int | None, op: Load) -> None:
        """Advance only the clock: each rank loads over a link of its own, so no other rank is affected."""
        left_s = self.loaded_s + op.seconds.item()
        start_s = self.clock_s
        self.clock_s = max(self.clock_s, left_s + op.latency_s)
        self.loaded_s = self.clock_s
        if op.ahead:
            self.loaded_s = left_s
        self.network.note(self.rank, "wait", f"prefix from {op.name}", "KV", layer, start_s, self.clock_s)
