"""Pools as SimPy processes, the reference for planner/capacity/fleet.py; groups run prompts one by one.

At each instant the dispatcher runs after all other events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import numpy as np
import simpy
from simpy.events import EventPriority

from planner.capacity.fleet import GroupPool, PoolRun

LAST = EventPriority(2)  # after all other events of an instant; these have SimPy's priorities 0 and 1


class SimpyPool:
    """A pool, simulated event by event."""

    def __init__(self, pool: GroupPool) -> None:
        self.pool, self.service, count = pool, pool.service, len(pool.arrival_s)
        self.env, self.now_s = simpy.Environment(), -np.inf  # SimPy's clock, and a clock without rounding errors
        self.queue = deque[int]()
        self.idle = dict.fromkeys(range(pool.replicas), -np.inf)  # group -> time at which its first rank became free
        self.ranks_s = [[-np.inf] * self.service.overlap.num_ranks] * pool.replicas  # time at which each rank is free
        self.begin_s, self.end_s, self.group = np.zeros(count), np.zeros(count), np.zeros(count, dtype=np.int64)
        self.busy_s = 0.0

    def run(self) -> PoolRun:
        """Serve all requests and return the times."""
        for request, arrival_s in enumerate(self.pool.arrival_s.tolist()):
            self._at(arrival_s, partial(self.queue.append, request))
        self.env.run()
        return PoolRun(
            begin_s=self.begin_s, end_s=self.end_s, group=self.group, busy_s=self.busy_s, arrival_s=self.pool.arrival_s
        )

    def _at(self, time_s: float, then: Callable[[], None]) -> None:
        """Call `then` at this time, and dispatch after all other events of that instant."""

        def process() -> Generator[simpy.Event, Any, Any]:
            yield self.env.timeout(max(0.0, time_s - self.env.now))
            self.now_s = max(self.now_s, time_s)
            then()
            event = self.env.event()
            event.callbacks.append(lambda _: self._dispatch())
            event._ok, event._value = True, None
            self.env.schedule(event, priority=LAST)

        self.env.process(process())

    def _dispatch(self) -> None:
        while self.queue and self.idle:
            group = min(self.idle, key=lambda one: (self.idle[one], one))
            del self.idle[group]
            self._begin(group, self.queue.popleft())

    def _begin(self, group: int, request: int) -> None:
        service, length_class = self.service, int(self.service.length_class[request])
        alone_s, hold_s = float(service.ttft_s[request]), float(service.hold_s[request])
        begin_s, free_s = service.overlap.run(length_class, alone_s, self.now_s, self.ranks_s[group])
        self.begin_s[request], self.end_s[request], self.group[request] = begin_s, free_s[-1], group
        self.busy_s += service.overlap.busy[length_class] * alone_s
        self.ranks_s[group] = [free_s[-1] + hold_s] * len(free_s) if hold_s else free_s
        first_s = self.ranks_s[group][0]
        self._at(first_s, lambda: self.idle.update({group: first_s}))
