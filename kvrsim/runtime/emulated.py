"""EmulatedTransport: any transport, made as slow as a link that is not there.

Before each message goes its arrival time, as the emulated link would have it; the receiver sleeps until then.
Clocks are compared across processes, so that all ranks must run on one host.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrsim.errors import InputError
from kvrsim.runtime.ranks.rings import Pending, neighbour, ring_all_gather, ring_all_reduce
from kvrsim.runtime.ranks.transport import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedLink:
    """A link in one direction; messages on it go one after another."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0  # from the last byte's leaving to its arrival

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise InputError("link_bandwidth", self.bandwidth_bytes_per_s, "more than 0 bytes/s")
        if not self.latency_s >= 0:
            raise InputError("link_latency", self.latency_s, "at least 0 seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageTraffic:
    """Others' messages on some links, at random times, ahead of ours that come later."""

    pairs: tuple[tuple[int, int], ...]  # links by (sender, receiver)
    share: float  # of those links' time, below 1
    message_bytes: float  # of each of their messages
    seed: int = 0  # of their times

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise InputError("side traffic", self.share, "a share of the link's time from 0 to below 1")
        if not self.message_bytes > 0:
            raise InputError("side traffic", self.message_bytes, "messages of more than 0 bytes")


class Egress:
    """When a link is free, given what was sent over it and what others send."""

    def __init__(self, link: EmulatedLink, traffic: MessageTraffic | None, pair: tuple[int, int], now_s: float) -> None:
        self.link, self.free_s = link, now_s
        self.traffic = traffic if traffic and pair in traffic.pairs and traffic.share > 0 else None
        self._rng = random.Random(f"{traffic.seed if traffic else 0}:{pair}")
        self._other_s = now_s + self._gap_s()

    def arrival_s(self, nbytes: float, now_s: float) -> float:
        """Send a message now; returns when its last byte arrives."""
        while self.traffic is not None and self._other_s <= now_s:
            self.free_s = max(self.free_s, self._other_s) + self._busy_s(self.traffic.message_bytes)
            self._other_s += self._gap_s()
        self.free_s = max(self.free_s, now_s) + self._busy_s(nbytes)
        return self.free_s + self.link.latency_s

    def _busy_s(self, nbytes: float) -> float:
        return nbytes / self.link.bandwidth_bytes_per_s

    def _gap_s(self) -> float:
        """Seconds between two of the others' messages, so that they take their share of the time."""
        if self.traffic is None:
            return 0.0
        return self._rng.expovariate(self.traffic.share / self._busy_s(self.traffic.message_bytes))


class _Delayed:
    """A message that must not be seen before its time."""

    def __init__(self, stamp: Any, at: Pending, message: Pending) -> None:
        self.stamp, self.at, self.message = stamp, at, message

    def wait(self) -> None:
        self.at.wait()
        self.message.wait()
        delay_s = self.stamp.item() - time.monotonic()
        if delay_s > 0:
            time.sleep(delay_s)


class _Both:
    """Two messages that leave one after another."""

    def __init__(self, *messages: Pending) -> None:
        self.messages = messages

    def wait(self) -> None:
        for message in self.messages:
            message.wait()


class EmulatedTransport:
    """A transport whose messages take as long as on a given link; all-gathers are rings over such links."""

    def __init__(self, inner: Transport, link: EmulatedLink, traffic: MessageTraffic | None = None) -> None:
        if inner.name == "nccl":
            raise InputError("backend", "nccl", "gloo under an emulated link: the host waits for messages")
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.name = f"emulated {link.bandwidth_bytes_per_s * 8e-9:g} Gbit/s, {link.latency_s * 1e6:g} us"
        self.egress = Egress(link, traffic, (inner.rank, neighbour(inner, 1)), time.monotonic())

    def isend_next(self, tensor: Any) -> Pending:
        """Send to rank + 1 with the time at which it may be seen."""
        return self.isend(tensor, neighbour(self, 1))

    def irecv_prev(self, tensor: Any) -> Pending:
        """Receive from rank - 1, to be seen at its time."""
        return self.irecv(tensor, neighbour(self, -1))

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        """As the transport beneath."""
        self.inner.connect(edges)

    def isend(self, tensor: Any, dst: int) -> Pending:
        """Send with the time at which it may be seen: a rank's messages leave one after another."""
        stamp = torch.tensor([self.egress.arrival_s(tensor.nbytes, time.monotonic())], dtype=torch.float64)
        return _Both(self.inner.isend(stamp, dst), self.inner.isend(tensor, dst))

    def irecv(self, tensor: Any, src: int) -> Pending:
        """Receive, to be seen at its time."""
        stamp = torch.empty(1, dtype=torch.float64)
        return _Delayed(stamp, self.inner.irecv(stamp, src), self.inner.irecv(tensor, src))

    def all_gather(self, whole: Any, boundaries: Sequence[int]) -> None:
        """A ring over the emulated links."""
        ring_all_gather(self, whole, boundaries)

    def all_reduce(self, tensor: Any) -> None:
        """A ring over the emulated links."""
        flat = tensor.view(-1)
        ring_all_reduce(self, flat, torch.empty_like(flat[: -(-len(flat) // self.size)]))

    def exchange(self, value: Any, kind: Any = Any) -> list[Any]:
        """As the transport beneath: at full speed."""
        return self.inner.exchange(value, kind)

    def barrier(self) -> None:
        """As the transport beneath."""
        self.inner.barrier()

    def warmup(self) -> None:
        """As the transport beneath."""
        self.inner.warmup()

    def note(self, layer: int) -> None:
        """As the transport beneath."""
        self.inner.note(layer)

    def report(self, done: int, total: int, what: str) -> None:
        """As the transport beneath."""
        self.inner.report(done, total, what)
