"""The event executor: the same program as SimPy processes, with every span recorded.

A rank is a process; a link owns its queue, its delay and what has passed over it. Needed where
durations interact (a shared bus) and for timelines; elsewhere it agrees with the batch executor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from kvrsim.executors import meetings
from kvrsim.executors.bus import FairBus
from kvrsim.hardware.cluster import Cluster
from kvrsim.hardware.links import Path
from kvrsim.noise.draw import NoiseDraw
from kvrsim.program import AllGather, AllToAll, Array, Collective, Compute, Payload, Program, Recv, RingPass, Send
from kvrsim.timeline import Span, SpanKind, SpanOp, Timeline

Process = Generator[simpy.Event, Any, Any]
EndsAt = Callable[[int, float, float], float]  # number, start and duration of what noise disturbs -> its end


class Link:
    """What a pair of ranks sends over: one message at a time, first in, first out, alone or on a bus."""

    def __init__(
        self, env: simpy.Environment, path: Path, bus: FairBus | None = None, ends_s: EndsAt | None = None
    ) -> None:
        self.env, self.path, self.bus, self.ends_s = env, path, bus, ends_s
        self.queue = simpy.Resource(env, capacity=1)
        self.num_messages = 0

    def transmit(self, nbytes: float, busy_s: float) -> Process:
        """Wait for the link, then keep it busy, or share the bus; returns when the first byte left."""
        with self.queue.request() as turn:
            yield turn
            start_s = self.env.now
            number, self.num_messages = self.num_messages, self.num_messages + 1
            noisy_s = busy_s if self.ends_s is None else self.ends_s(number, start_s, busy_s) - start_s
            if self.bus is None:
                yield self.env.timeout(noisy_s)
            else:
                yield from self.bus.transmit(nbytes * noisy_s / busy_s if busy_s else nbytes)
        return start_s


@dataclass(slots=True)
class _Gathering:
    """One all-gather, as its ranks come to it."""

    joined: list[simpy.Event]  # per rank: it has reached the collective
    pieces: list[simpy.Store]  # per rank: pieces that have come from the rank before
    sizes: dict[int, float] = field(default_factory=dict)  # per rank: bytes of its own piece


class Replay:
    """One prefill, replayed. `finish_s` is when each rank ended; TTFT is the last rank's.

    noise: one sample that disturbs it. arrivals_s: of several requests alike, ascending; each rank runs them one
    after another, and `finishes_s` is when each rank ended each.
    """

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        *,
        record: bool = True,
        noise: NoiseDraw | None = None,
        arrivals_s: Sequence[float] = (0.0,),
    ) -> None:
        assert noise is None or noise.num_samples == 1, "one sample at a time"
        self.env = simpy.Environment()
        self.program, self.cluster, self.record = program, cluster, record
        self.noise, self.arrivals_s = noise, tuple(arrivals_s)
        self.spans: list[Span] = []
        self.bus = FairBus(self.env)
        self.links: dict[tuple[int, int], Link] = {}
        self.inboxes: dict[tuple[int, int], simpy.Store] = {}
        self.readies: dict[tuple[int, int], simpy.Store] = {}
        self.gatherings: dict[int, _Gathering] = {}
        ranks = [RankProcess(self, rank) for rank in range(program.num_ranks)]
        processes = [self.env.process(rank.run()) for rank in ranks]
        self.env.run(simpy.AllOf(self.env, processes))
        self.finishes_s = tuple(tuple(float(end) for end in process.value or ()) for process in processes)
        self.finish_s = tuple(ends[-1] for ends in self.finishes_s)

    @property
    def timeline(self) -> Timeline:
        """All spans, ordered by start."""
        spans = tuple(sorted(self.spans, key=lambda span: (span.start_s, span.rank, span.end_s)))
        return Timeline(strategy=self.program.strategy, num_ranks=self.program.num_ranks, spans=spans)

    def link(self, src: int, dst: int) -> Link:
        """The link that carries messages from src to dst."""
        if (src, dst) not in self.links:
            path = self.cluster.path(src, dst)
            bus = self.bus if path.shared_bus else None
            self.bus.bandwidth_bytes_per_s = path.bandwidth_bytes_per_s
            self.links[src, dst] = Link(self.env, path, bus, self._message_noise(src, dst))
        return self.links[src, dst]

    def _message_noise(self, src: int, dst: int) -> EndsAt | None:
        noise = self.noise
        if noise is None:
            return None
        return lambda number, start_s, busy_s: noise.message_end_s(
            src, dst, number, np.array([start_s]), np.array([busy_s])
        ).item()

    def after(self, rank: int) -> int:
        """The next rank on the ring."""
        return (rank + 1) % self.program.num_ranks

    def inbox(self, src: int, dst: int) -> simpy.Store:
        """Messages from src that have arrived at dst and wait to be received."""
        return self.inboxes.setdefault((src, dst), simpy.Store(self.env))

    def ready(self, src: int, dst: int) -> simpy.Store:
        """Receives that dst has come to and whose rendezvous with src has not begun."""
        return self.readies.setdefault((src, dst), simpy.Store(self.env))

    def gathering(self, index: int) -> _Gathering:
        """The index-th all-gather of the prefill."""
        if index not in self.gatherings:
            ranks = range(self.program.num_ranks)
            joined, pieces = [self.env.event() for _ in ranks], [simpy.Store(self.env) for _ in ranks]
            self.gatherings[index] = _Gathering(joined, pieces)
        return self.gatherings[index]

    def note(
        self, rank: int, kind: SpanKind, name: str, op: SpanOp, layer: int | None, start_s: float, end_s: float
    ) -> None:
        """Record a stretch of a rank's compute stream, unless it is empty."""
        if self.record and end_s > start_s:
            self.spans.append(Span(rank=rank, kind=kind, op=op, name=name, layer=layer, start_s=start_s, end_s=end_s))

    def carry(
        self,
        src: int,
        dst: int,
        nbytes: float,
        layer: int | None,
        left: simpy.Event | None,
        to: simpy.Store,
        *,
        gathers: bool = False,
        payload: Payload = "KV",
    ) -> Process:
        """Move one message, or one piece of an all-gather: queue, transmission, latency, delivery."""
        link, size = self.link(src, dst), np.array(nbytes)
        step_s = link.path.gather_step_s(size, self.program.num_ranks) if gathers else link.path.busy_s(size)
        start_s = yield from link.transmit(nbytes, step_s.item())
        end_s = self.env.now
        if left is not None:
            left.succeed()
        if self.record:
            span = Span(
                rank=src,
                kind="transfer",
                op=payload,
                name=f"{payload} {src}→{dst}",
                layer=layer,
                start_s=start_s,
                end_s=end_s,
                peer=dst,
                nbytes=nbytes,
            )
            self.spans.append(span)
        latency_s = link.path.gather_latency_s if gathers else link.path.latency_s
        if latency_s:
            yield self.env.timeout(latency_s)
        yield to.put(nbytes)


class RankProcess:
    """One rank: its host clock and its device clock are numbers; it meets the simulation's where it communicates."""

    def __init__(self, replay: Replay, rank: int) -> None:
        self.replay, self.rank, self.env = replay, rank, replay.env
        self.host_s = 0.0
        self.clock_s = 0.0
        self.num_gathered = 0
        self.num_computed = 0
        self.last_left: simpy.Event | None = None  # of the messages that leave in turn, the last one so far

    def run(self) -> Process:
        """All requests in order; returns when the device has finished each."""
        ends_s = []
        for arrival_s in self.replay.arrivals_s:
            # The token of the request before has been fetched: host and device begin the next one together.
            idle_s, begin_s = self.clock_s, max(self.clock_s, self.host_s, arrival_s)
            self.clock_s = self.host_s = begin_s
            self.replay.note(self.rank, "wait", "request", "stall", None, idle_s, begin_s)
            yield from self._prefill()
            ends_s.append(self.clock_s)
        return ends_s

    def _prefill(self) -> Process:
        """All operations of one request in order."""
        for layer, op in self.replay.program.ops(self.rank):
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
                    yield from meetings.ring_pass(self, layer, op)
                case AllToAll():
                    yield from meetings.all_to_all(self, layer, op)
                case Collective():
                    meetings.collective(self, layer, op)
        yield from self.until(self.clock_s)

    def until(self, time_s: float) -> Process:
        if time_s > self.env.now:
            yield self.env.timeout(time_s - self.env.now)

    def _compute(self, layer: int | None, op: Compute) -> None:
        """Nobody else sees it: advance the clock alone."""
        begin_s = self.clock_s
        start_s = max(begin_s, self.host_s)
        self.host_s += op.host_s
        self.clock_s = max(self.computed_s(start_s, op.device_s), self.host_s)
        self.replay.note(self.rank, "wait", "host", "stall", layer, begin_s, start_s)
        self.replay.note(self.rank, "compute", op.name, op.kind, layer, start_s, self.clock_s)

    def computed_s(self, start_s: float, device_s: Array) -> float:
        """When the device has done it, which noise may delay."""
        number, self.num_computed = self.num_computed, self.num_computed + 1
        if self.replay.noise is None:
            return start_s + device_s.item()
        return self.replay.noise.compute_end_s(self.rank, number, np.array([start_s]), device_s.reshape(1)).item()

    def waited(self, name: str, layer: int | None, op: SpanOp = "stall") -> None:
        """The stream was held until now."""
        self.replay.note(self.rank, "wait", name, op, layer, self.clock_s, self.env.now)
        self.clock_s = max(self.clock_s, self.env.now)

    def _send(self, layer: int | None, op: Send) -> Process:
        yield from self.until(self.clock_s)
        self.host_s += op.host_s
        left = self.env.event() if op.rendezvous or op.in_turn else None
        before, self.last_left = (self.last_left, left) if op.in_turn else (None, self.last_left)
        self.env.process(self._post(max(self.clock_s, self.host_s), layer, op, before, left))
        if left is not None and op.rendezvous:
            yield left
            self.waited(f"send to rank {op.dst}", layer, op.payload)

    def _post(
        self, posted_s: float, layer: int | None, op: Send, before: simpy.Event | None, left: simpy.Event | None
    ) -> Process:
        """Send; `before`: when the message that goes before it has left."""
        yield from self.until(posted_s)
        inbox = self.replay.inbox(self.rank, op.dst)
        if op.rendezvous:
            yield self.replay.ready(self.rank, op.dst).get()
        if before is not None:
            yield before
        carried = self.replay.carry(self.rank, op.dst, op.nbytes.item(), layer, left, inbox, payload=op.payload)
        yield from carried

    def _recv(self, layer: int | None, op: Recv) -> Process:
        yield from self.until(self.clock_s)
        self.host_s += op.host_s
        if op.rendezvous:
            self.env.process(self._tell_ready(op.src, self.host_s))
        yield self.replay.inbox(op.src, self.rank).get()
        self.waited(f"{op.payload} from rank {op.src}", layer, op.payload)

    def _tell_ready(self, src: int, time_s: float) -> Process:
        """Let a rendezvous begin, once the host has issued the receive."""
        yield from self.until(time_s)
        yield self.replay.ready(src, self.rank).put(True)

    def _all_gather(self, layer: int | None, op: AllGather) -> Process:
        """Join, let a forwarder pass pieces on, and wait until all others have come."""
        self.host_s += op.host_s
        launch_s = self.replay.link(self.rank, self.replay.after(self.rank)).path.gather_launch_s
        yield from self.until(max(self.clock_s, self.host_s) + launch_s)
        gathering = self.join(op.nbytes.item())
        others = self.replay.program.num_ranks - 1
        done = self.env.event()
        self.env.process(self._forward(gathering, layer, others, done))
        yield done
        self.waited("all-gather", layer, "KV")

    def join(self, nbytes: float = 0.0) -> _Gathering:
        """Come to the next collective, or round of one, with a piece of that many bytes."""
        gathering = self.replay.gathering(self.num_gathered)
        self.num_gathered += 1
        gathering.sizes[self.rank] = nbytes
        gathering.joined[self.rank].succeed()
        return gathering

    def _forward(self, gathering: _Gathering, layer: int | None, steps: int, done: simpy.Event) -> Process:
        """Send the own piece, then every piece that comes but the last; tell when all have come."""
        dst = self.replay.after(self.rank)
        nbytes = gathering.sizes[self.rank]
        for step in range(steps):
            yield gathering.joined[dst]
            to = gathering.pieces[dst]
            self.env.process(self.replay.carry(self.rank, dst, nbytes, layer, None, to, gathers=True))
            nbytes = yield gathering.pieces[self.rank].get()
            if step == steps - 1:
                done.succeed()
