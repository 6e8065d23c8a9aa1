"""The event executor: the same program as SimPy processes, with every span recorded.

A rank is a process; a link owns its queue, its delay and what has passed over it. Needed where durations interact
(a shared bus) and for timelines; elsewhere it agrees with the batch executor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import simpy

from kvrsim.executors.network import Meeting, Network, OnLink, Process
from kvrsim.hardware import Cluster
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
from kvrsim.results.timeline import SpanOp, Timeline


class EventSimulation:
    """One prefill, simulated. `finish_s` is when each rank ended; TTFT is the last rank's.

    noise: one sample that disturbs it. arrivals_s: of several requests, ascending; each rank runs them one after
    another, and `finishes_s` is when each rank ended each. programs: one a request; None: all are alike.
    on_link: called when a link is first used.
    """

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        *,
        record: bool = True,
        noise: NoiseDraw | None = None,
        arrivals_s: Sequence[float] = (0.0,),
        programs: Sequence[Program] | None = None,
        on_link: OnLink | None = None,
    ) -> None:
        assert noise is None or noise.num_samples == 1, "one sample at a time"
        self.program = program
        env = simpy.Environment()
        self.network = Network(env, cluster, program.num_ranks, record=record, noise=noise, on_link=on_link)
        ranks = [RankProcess(program, rank, self.network) for rank in range(program.num_ranks)]
        launches = list(zip(programs or [program] * len(arrivals_s), arrivals_s, strict=True))
        processes = [env.process(rank.run(launches)) for rank in ranks]
        env.run(simpy.AllOf(env, processes))
        self.finishes_s = tuple(tuple(float(end) for end in process.value or ()) for process in processes)
        self.finish_s = tuple(ends[-1] for ends in self.finishes_s)

    @property
    def timeline(self) -> Timeline:
        """All spans, ordered by start."""
        spans = tuple(sorted(self.network.spans, key=lambda span: (span.start_s, span.rank, span.end_s)))
        return Timeline(strategy=self.program.strategy, num_ranks=self.program.num_ranks, spans=spans)


class RankProcess:
    """One rank: its host clock and its device clock are numbers; it meets the simulation's where it communicates."""

    def __init__(self, program: Program, rank: int, network: Network) -> None:
        self.program, self.rank, self.network, self.env = program, rank, network, network.env
        self.host_s = 0.0
        self.clock_s = 0.0
        self.num_meetings = 0
        self.loaded_s = 0.0  # when the loads so far have left their link
        self.num_computed = 0
        self.last_left: simpy.Event | None = None  # of the messages that leave in turn, the last one so far

    def run(self, launches: Sequence[tuple[Program, float]]) -> Process:
        """All requests in order, each with its arrival; returns when the device has finished each."""
        ends_s = []
        for self.program, arrival_s in launches:
            # The token of the request before has been fetched: host and device begin the next one together.
            idle_s, begin_s = self.clock_s, max(self.clock_s, self.host_s, arrival_s)
            self.clock_s = self.host_s = self.loaded_s = begin_s
            self.network.note(self.rank, "wait", "request", "stall", None, idle_s, begin_s)
            yield from self._prefill()
            ends_s.append(self.clock_s)
        return ends_s

    def _prefill(self) -> Process:
        """All operations of one request in order."""
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
        """Nobody else sees it: advance the clock alone."""
        begin_s = self.clock_s
        start_s = max(begin_s, self.host_s)
        self.host_s += op.host_s
        self.clock_s = max(self._computed_s(start_s, op.device_s), self.host_s)
        self.network.note(self.rank, "wait", "host", "stall", layer, begin_s, start_s)
        self.network.note(self.rank, "compute", op.name, op.kind, layer, start_s, self.clock_s)

    def _computed_s(self, start_s: float, device_s: Array) -> float:
        """When the device has done it, which noise may delay."""
        number, self.num_computed = self.num_computed, self.num_computed + 1
        if self.network.noise is None:
            return start_s + device_s.item()
        return self.network.noise.compute_end_s(self.rank, number, np.array([start_s]), device_s.reshape(1)).item()

    def _waited(self, name: str, layer: int | None, op: SpanOp = "stall") -> None:
        """The stream was held until now."""
        self.network.note(self.rank, "wait", name, op, layer, self.clock_s, self.env.now)
        self.clock_s = max(self.clock_s, self.env.now)

    def _send(self, layer: int | None, op: Send) -> Process:
        yield from self._until(self.clock_s)
        self.host_s += op.host_s
        left = self.env.event() if op.rendezvous or op.in_turn else None
        before, self.last_left = (self.last_left, left) if op.in_turn else (None, self.last_left)
        self.env.process(self._post(max(self.clock_s, self.host_s), layer, op, before, left))
        if left is not None and op.rendezvous:
            yield left
            self._waited(f"send to rank {op.dst}", layer, op.payload)

    def _post(
        self, posted_s: float, layer: int | None, op: Send, before: simpy.Event | None, left: simpy.Event | None
    ) -> Process:
        """Send; `before`: when the message that goes before it has left."""
        yield from self._until(posted_s)
        inbox = self.network.inbox(self.rank, op.dst)
        if op.rendezvous:
            yield self.network.ready(self.rank, op.dst).get()
        if before is not None:
            yield before
        carried = self.network.carry(self.rank, op.dst, op.nbytes.item(), layer, left, inbox, payload=op.payload)
        yield from carried

    def _recv(self, layer: int | None, op: Recv) -> Process:
        yield from self._until(self.clock_s)
        self.host_s += op.host_s
        if op.rendezvous:
            self.env.process(self._tell_ready(op.src, self.host_s))
        yield self.network.inbox(op.src, self.rank).get()
        self._waited(f"{op.payload} from rank {op.src}", layer, op.payload)

    def _tell_ready(self, src: int, time_s: float) -> Process:
        """Let a rendezvous begin, once the host has issued the receive."""
        yield from self._until(time_s)
        yield self.network.ready(src, self.rank).put(True)

    def _all_gather(self, layer: int | None, op: AllGather) -> Process:
        """Join, let a forwarder pass pieces on, and wait until all others have come."""
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
        """The next rank on the ring of these ranks."""
        return ranks[(self.rank - ranks[0] + 1) % len(ranks)]

    def _join(self, ranks: range) -> Meeting:
        """Come to the next collective of these ranks, or round of one."""
        meeting = self.network.meeting(self.num_meetings, ranks)
        self.num_meetings += 1
        meeting.joined[self.rank].succeed()
        return meeting

    def _forward(self, meeting: Meeting, ranks: range, layer: int | None, nbytes: float, done: simpy.Event) -> Process:
        """Send the own piece, then every piece that comes but the last; tell when all have come."""
        dst, steps = self._after(ranks), len(ranks) - 1
        for step in range(steps):
            yield meeting.joined[dst]
            to = meeting.pieces[dst]
            self.env.process(self.network.carry(self.rank, dst, nbytes, layer, None, to, gathered_by=len(ranks)))
            nbytes = yield meeting.pieces[self.rank].get()
            if step == steps - 1:
                done.succeed()

    def _ring_pass(self, layer: int | None, op: RingPass) -> Process:
        """Round by round: work on a piece while it goes on, and wait for the next; nobody sees the work meanwhile."""
        last = len(op.host_s) - 1
        for index, host_s in enumerate(op.host_s):
            yield from self._until(max(self.clock_s, self.host_s))
            self._waited("host", layer)
            begin_s = self.env.now
            self.host_s += host_s
            work_s = op.device_s[index]
            if index < last:
                yield self.env.process(self._pass_on(layer, op.nbytes[index].item(), op.payload))
                if op.overlaps:
                    work_s = beside_message_s(work_s, np.array(self.env.now - begin_s), op.message_share)
                else:
                    self._waited("ring", layer, op.payload)
                    begin_s = self.env.now
            self.clock_s = max(self._computed_s(begin_s, work_s), self.host_s)
            self.network.note(self.rank, "compute", op.name, op.kind, layer, begin_s, self.clock_s)
            if index < last and op.overlaps:
                self._waited("ring", layer, op.payload)

    def _pass_on(self, layer: int | None, nbytes: float, payload: Payload) -> Process:
        """Hand the piece to the next rank once it has come to the round; ends when the next piece is there, too."""
        dst, meeting = self._after(self._all), self._join(self._all)
        yield meeting.joined[dst]
        left = self.env.event()
        carried = self.network.carry(self.rank, dst, nbytes, layer, left, meeting.pieces[dst], payload=payload)
        self.env.process(carried)
        yield left
        yield meeting.pieces[self.rank].get()

    def _all_to_all(self, layer: int | None, op: AllToAll) -> Process:
        """One message after another, then wait for the others'."""
        self.host_s += op.host_s
        yield from self._until(max(self.clock_s, self.host_s))
        meeting = self._join(self._all)
        for shift, nbytes in enumerate(op.nbytes, start=1):
            dst = (self.rank + shift) % self.program.num_ranks
            yield meeting.joined[dst]
            left = self.env.event()
            carried = self.network.carry(
                self.rank, dst, nbytes.item(), layer, left, meeting.pieces[dst], payload=op.payload
            )
            self.env.process(carried)
            yield left
        for _ in op.nbytes:
            yield meeting.pieces[self.rank].get()
        self._waited("all-to-all", layer, op.payload)

    def _collective(self, layer: int | None, op: Collective) -> None:
        """Nobody outside of the rank's own group sees it: advance the clock alone."""
        start_s = max(self.clock_s, self.host_s)
        self.network.note(self.rank, "wait", "host", "stall", layer, self.clock_s, start_s)
        self.host_s += op.host_s
        self.clock_s = max(start_s + op.seconds.item(), self.host_s)
        self.network.note(self.rank, "wait", op.name, "collective", layer, start_s, self.clock_s)

    def _load(self, layer: int | None, op: Load) -> None:
        """Nobody else sees it, as each rank loads over a link of its own: advance the clock alone."""
        left_s = self.loaded_s + op.seconds.item()
        start_s, self.clock_s = self.clock_s, max(self.clock_s, left_s + op.latency_s)
        self.loaded_s = left_s if op.ahead else self.clock_s
        self.network.note(self.rank, "wait", f"prefix from {op.name}", "KV", layer, start_s, self.clock_s)
