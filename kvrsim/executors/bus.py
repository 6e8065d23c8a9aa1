"""A bus whose flows share its bandwidth fairly."""

from __future__ import annotations

import heapq
from collections.abc import Generator
from typing import Any

import simpy


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
