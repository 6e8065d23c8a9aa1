"""What the processes of the event executor communicate over: a shared bus, links, inboxes and collectives."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from kvrsim.hardware import Cluster, Path
from kvrsim.noise import NoiseDraw
from kvrsim.program import Payload
from kvrsim.results.timeline import Span, SpanKind, SpanOp

Process = Generator[simpy.Event, Any, Any]
EndsAt = Callable[[int, float, float], float]  # number, start and duration of what noise disturbs -> its end


class FairBus:
    """Processor sharing: n flows at once get 1/n of the bandwidth each.

    Kept in virtual time: `served_bytes` is what every flow on the bus has been given since the start,
    so a flow that enters at v with n bytes leaves when it reaches v + n, whatever joins or leaves.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.bandwidth_bytes_per_s = float("inf")
        self.served_bytes = 0.0  # per flow
        self.updated_s = 0.0
        self.flows: list[tuple[float, int, simpy.Event]] = []  # heap of (leaves at this served_bytes, order, done)
        self.entered = 0
        self.generation = 0  # a wake-up older than this is stale

    def transmit(self, nbytes: float) -> Generator[simpy.Event, Any, float]:
        """Share the bus until all bytes have passed; returns when the first byte left."""
        start_s = self.env.now
        self._serve()
        done = self.env.event()
        self.entered += 1
        heapq.heappush(self.flows, (self.served_bytes + nbytes, self.entered, done))
        self._plan()
        yield done
        return start_s

    def _serve(self) -> None:
        """Bring what every flow has been given up to now."""
        if self.flows:
            elapsed_s = self.env.now - self.updated_s
            self.served_bytes += elapsed_s * self.bandwidth_bytes_per_s / len(self.flows)
        self.updated_s = self.env.now

    def _plan(self) -> None:
        """Wake up when the next flow leaves; a wake-up planned before is stale."""
        self.generation += 1
        if self.flows:
            leaves_at = self.flows[0][0]
            missing = max(0.0, leaves_at - self.served_bytes)
            wake = self.env.timeout(missing * len(self.flows) / self.bandwidth_bytes_per_s, value=self.generation)
            wake.callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        if event.value != self.generation:
            return
        leaves_at = self.flows[0][0]
        self._serve()
        self.served_bytes = max(self.served_bytes, leaves_at)
        while self.flows and self.flows[0][0] <= self.served_bytes:
            heapq.heappop(self.flows)[2].succeed()
        self._plan()


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


OnLink = Callable[[int, int, Link], None]  # sender, receiver and their link, when it is first used


@dataclass(frozen=True, slots=True)
class Meeting:
    """One collective, or one round of it, as its ranks come to it."""

    joined: dict[int, simpy.Event]  # by rank: it has come
    pieces: dict[int, simpy.Store]  # by rank: pieces that others have sent to it


class Network:
    """All links between ranks, what waits on them, and the spans that were recorded."""

    def __init__(
        self,
        env: simpy.Environment,
        cluster: Cluster,
        num_ranks: int,
        *,
        record: bool,
        noise: NoiseDraw | None,
        on_link: OnLink | None,
    ) -> None:
        self.env, self.cluster, self.num_ranks = env, cluster, num_ranks
        self.record, self.noise, self.on_link = record, noise, on_link
        self.spans: list[Span] = []
        self.bus = FairBus(env)
        self.links: dict[tuple[int, int], Link] = {}
        self.inboxes: dict[tuple[int, int], simpy.Store] = {}
        self.readies: dict[tuple[int, int], simpy.Store] = {}
        self.meetings: dict[tuple[int, int], Meeting] = {}

    def link(self, src: int, dst: int) -> Link:
        """The link that carries messages from src to dst."""
        if (src, dst) not in self.links:
            path = self.cluster.path(src, dst)
            bus = self.bus if path.shared_bus else None
            self.bus.bandwidth_bytes_per_s = path.bandwidth_bytes_per_s
            self.links[src, dst] = Link(self.env, path, bus, self._message_noise(src, dst))
            if self.on_link is not None:
                self.on_link(src, dst, self.links[src, dst])
        return self.links[src, dst]

    def _message_noise(self, src: int, dst: int) -> EndsAt | None:
        noise = self.noise
        if noise is None:
            return None
        return lambda number, start_s, busy_s: noise.message_end_s(
            src, dst, number, np.array([start_s]), np.array([busy_s])
        ).item()

    def inbox(self, src: int, dst: int) -> simpy.Store:
        """Messages from src that have arrived at dst and wait to be received."""
        return self.inboxes.setdefault((src, dst), simpy.Store(self.env))

    def ready(self, src: int, dst: int) -> simpy.Store:
        """Receives that dst has come to and whose rendezvous with src has not begun."""
        return self.readies.setdefault((src, dst), simpy.Store(self.env))

    def meeting(self, index: int, ranks: range) -> Meeting:
        """The index-th collective of these ranks, or round of one."""
        if (ranks[0], index) not in self.meetings:
            joined, pieces = {rank: self.env.event() for rank in ranks}, {rank: simpy.Store(self.env) for rank in ranks}
            self.meetings[ranks[0], index] = Meeting(joined, pieces)
        return self.meetings[ranks[0], index]

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
        gathered_by: int | None = None,
        payload: Payload = "KV",
    ) -> Process:
        """Move one message, or a piece of an all-gather of so many ranks: queue, transmission, latency, delivery."""
        link, size = self.link(src, dst), np.array(nbytes)
        step_s = link.path.gather_step_s(size, gathered_by) if gathered_by else link.path.busy_s(size)
        start_s = yield from link.transmit(nbytes, step_s.item())
        end_s = self.env.now
        if left is not None:
            left.succeed()
        if self.record:
            op: SpanOp = "all-gather" if gathered_by else payload
            span = Span(
                rank=src,
                kind="transfer",
                op=op,
                name=f"{op} {src}→{dst}",
                layer=layer,
                start_s=start_s,
                end_s=end_s,
                peer=dst,
                nbytes=nbytes,
            )
            self.spans.append(span)
        latency_s = link.path.gather_latency_s if gathered_by else link.path.latency_s
        if latency_s:
            yield self.env.timeout(latency_s)
        yield to.put(nbytes)
