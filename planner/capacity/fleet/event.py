"""Pools as SimPy processes: arrivals and service; the reference that `fast.py` is tested against.

At each instant the dispatcher runs after all other events of that instant.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import EventPriority

from planner.capacity.fleet.pool import Pool, PoolRun, Record

Process = Generator[simpy.Event, Any, Any]
_LAST = EventPriority(2)  # after all events of an instant, which have SimPy's priorities 0 and 1


@dataclass(frozen=True, slots=True)
class _Run:
    """A prompt that runs on a group."""

    begin_s: float
    end_s: float
    request: int
    busy_s: float  # mean time of the ranks


@dataclass(slots=True)
class _Group:
    """One group of GPUs."""

    number: int
    ranks_s: list[float]  # when each rank is free
    free_since_s: float | None = -float("inf")  # None: rank 0 is busy


class _Look(simpy.Event):
    """An event that runs after all others of this instant; otherwise like SimPy's Timeout without delay."""

    def __init__(self, env: simpy.Environment, then: Callable[[], None]) -> None:
        super().__init__(env)
        self.callbacks.append(lambda _: then())
        self._ok, self._value = True, None
        env.schedule(self, priority=_LAST)


class PoolProcesses:
    """One pool, simulated event by event."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.service = pool, pool.service
        self.env = simpy.Environment()
        self.now_s = -float("inf")  # like SimPy's clock, but without rounding of delays
        self.record = Record(len(pool.arrival_s))
        self.places = pool.ranks_in_queue().tolist()
        self.queue: list[tuple[int, int]] = []
        self.open = len(pool.arrival_s)
        self.groups = [_Group(number, self._free_ranks()) for number in range(pool.replicas)]
        self.over = self.env.event()

    def _free_ranks(self) -> list[float]:
        return [-float("inf")] * self.service.overlap.num_ranks

    def run(self) -> PoolRun:
        """Serve all requests."""
        self.env.process(self._arrivals())
        self.env.run(self.over)
        return self.record.done()

    def _at(self, time_s: float, then: Callable[[], None]) -> Process:
        """Call `then` at a time."""
        yield self.env.timeout(max(0.0, time_s - self.env.now))
        self.now_s = max(self.now_s, time_s)
        then()

    def _arrivals(self) -> Process:
        for request, arrival_s in enumerate(self.pool.arrival_s.tolist()):
            yield from self._at(arrival_s, lambda request=request: self._queue([request]))  # type: ignore[misc]

    def _queue(self, requests: list[int]) -> None:
        for request in requests:
            heappush(self.queue, (self.places[request], request))
        self._look()

    def _look(self) -> None:
        """Run the dispatcher after all events of this instant."""
        _Look(self.env, self._dispatch)

    def _dispatch(self) -> None:
        while self.queue:
            idle = [group for group in self.groups if group.free_since_s is not None]
            if not idle:
                return
            self._begin(min(idle, key=lambda group: (group.free_since_s, group.number)))

    def _begin(self, group: _Group) -> None:
        """Start the next prompt on rank 0."""
        request = heappop(self.queue)[1]
        overlap, kind = self.service.overlap, int(self.service.length_class[request])
        took_s = float(self.service.ttft_s[request])
        begin_s, ranks_s = overlap.run(kind, took_s, self.now_s, group.ranks_s)
        end_s, hold_s = ranks_s[-1], float(self.service.hold_s[request])
        group.ranks_s = [end_s + hold_s] * len(ranks_s) if hold_s else ranks_s
        free_s, group.free_since_s = group.ranks_s[0], None
        run = _Run(begin_s, end_s, request, overlap.busy[kind] * took_s)
        self.env.process(self._at(end_s, lambda: self._end(group, run)))
        self.env.process(self._at(free_s, lambda: self._free(group, free_s)))

    def _end(self, group: _Group, run: _Run) -> None:
        """Record first tokens."""
        self.record.busy_s += run.busy_s
        hold_s = float(self.service.hold_s[run.request])
        self.record.busy_s += hold_s * self.service.hold_gpus / self.service.num_gpus
        self.record.begin_s[run.request], self.record.end_s[run.request] = run.begin_s, run.end_s
        self.record.group[run.request] = group.number
        self.open -= 1
        if not self.open:
            self.over.succeed()

    def _free(self, group: _Group, free_s: float) -> None:
        group.free_since_s = free_s
        self._look()
