"""Pools whose groups pack prompts into steps: the queue of `Pool`, with the steps of planner/packing.

A step is filled when the first stage of a group is free: with the prompt that the group has begun, then from the
queue. Groups that have begun a prompt go on by themselves; idle ones wait for the queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from planner.capacity.fleet.pool import Pool, PoolRun, Record
from planner.packing.rule import Begun, PackingRule

_NEVER = float("inf")


@dataclass(slots=True)
class _Group:
    """One group of GPUs."""

    number: int
    free_s: list[float]  # when each stage is free
    begun: Begun | None = None
    begun_s: dict[int, float] = field(default_factory=dict)  # when it began the prompts that have no first token yet


class PackedPool:
    """One pool, step by step."""

    def __init__(self, pool: Pool) -> None:
        service, packing = pool.service, pool.service.packing
        assert packing is not None
        self.pool, self.prices = pool, packing.prices
        self.hold_s, self.hold_share = service.hold_s.tolist(), service.hold_gpus / service.num_gpus
        lengths = service.new_tokens.tolist(), service.cached_prefix.tolist()
        self.rule = PackingRule(*lengths, self.prices.budget, packing.most_held)
        places = pool.ranks_in_queue()
        self.place, self.at_place = places.tolist(), np.argsort(places).tolist()
        self.record = Record(len(pool.arrival_s))
        self.queue: list[int] = []  # places of waiting requests
        stages = self.prices.num_stages
        self.groups = [_Group(number, [-_NEVER] * stages) for number in range(pool.replicas)]
        self.idle: list[tuple[float, int]] = [(-_NEVER, number) for number in range(pool.replicas)]
        self.busy: list[tuple[float, int]] = []  # when the first stage of each other group is free

    def run(self) -> PoolRun:
        """Serve all requests."""
        arrivals = [*self.pool.arrival_s.tolist(), _NEVER]
        come, now = 0, -_NEVER
        while True:
            now = max(now, min(arrivals[come], self.busy[0][0] if self.busy else _NEVER))
            if now == _NEVER:
                return self.record.done()
            while arrivals[come] <= now:
                heappush(self.queue, self.place[come])
                come += 1
            while self.busy and self.busy[0][0] <= now:
                ready_s, number = heappop(self.busy)
                if self.groups[number].begun is None:
                    heappush(self.idle, (ready_s, number))
                else:
                    self._step(self.groups[number], now)
            while self.queue and self.idle:
                _, number = heappop(self.idle)
                self._step(self.groups[number], now)

    def _peek(self) -> int | None:
        return self.at_place[self.queue[0]] if self.queue else None

    def _pop(self) -> None:
        heappop(self.queue)

    def _step(self, group: _Group, now: float) -> None:
        """Fill a step and run it."""
        pieces, group.begun = self.rule.step(group.begun, self._peek, self._pop)
        for piece in pieces:
            if piece.is_first:
                group.begun_s[piece.prompt] = now
        spent_s = self.prices.run(group.free_s, now, self.prices.step(pieces))
        end_s = group.free_s[-1]
        ended = [piece.prompt for piece in pieces if piece.is_last]
        hold_s = max((self.hold_s[prompt] for prompt in ended), default=0.0)
        for prompt in ended:
            self.record.begin_s[prompt], self.record.end_s[prompt] = group.begun_s.pop(prompt), end_s
            self.record.group[prompt] = group.number
        self.record.busy_s += spent_s + hold_s * self.hold_share
        if hold_s:
            group.free_s = [end_s + hold_s] * len(group.free_s)
        heappush(self.busy, (group.free_s[0], group.number))
