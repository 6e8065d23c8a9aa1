"""Pools in tight loops: about a microsecond a request, a few microseconds with failures.

Groups wait in a heap by when they are free. Requests are taken in the order in which the queue gives them, so that
each turn of the loop is one dispatch, at times that never fall. `event.py` is the reference that it agrees with.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from planner.capacity.fleet.packed import PackedPool
from planner.capacity.fleet.pool import MOST_RETRIES, Pool, PoolRun, Record

_NEVER = float("inf")


def run_pool(pool: Pool) -> PoolRun:
    """Serve all requests."""
    if pool.service.packing is not None:
        return PackedPool(pool).run()
    plain = pool.order == "first-come" and pool.outages is None
    return _first_come(pool) if plain else _Loop(pool).run()


def _first_come(pool: Pool) -> PoolRun:
    """First come, first served, without failures: one pass over the requests."""
    service, overlap, factors = pool.service, pool.service.overlap, pool.factors()
    run, num_ranks = overlap.run, overlap.num_ranks
    free = [(-_NEVER, group) for group in range(pool.replicas)]
    ranks = [[-_NEVER] * num_ranks for _ in range(pool.replicas)]
    begins, ends, groups = [], [], []
    rows = (pool.arrival_s, service.ttft_s, service.length_class, service.hold_s)
    for arrival, alone, kind, hold in zip(*(column.tolist() for column in rows), strict=True):
        ready, group = free[0]
        begin = ready if ready > arrival else arrival
        took = alone * factors[group]
        if num_ranks == 1:
            end = begin + took
            heapreplace(free, (end + hold, group))
        else:
            begin, free_s = run(kind, took, begin, ranks[group])
            end = free_s[-1]
            ranks[group] = free_s = [end + hold] * num_ranks if hold else free_s
            heapreplace(free, (free_s[0], group))
        begins.append(begin)
        ends.append(end)
        groups.append(group)
    group_of = np.array(groups, dtype=np.int64)
    took_s = service.ttft_s * np.array(factors)[group_of]
    busy = np.array(overlap.busy)[service.length_class]
    return PoolRun(
        begin_s=np.array(begins),
        end_s=np.array(ends),
        group=group_of,
        retries=np.zeros(len(begins), dtype=np.int64),
        busy_s=float((took_s * busy + service.hold_s * (service.hold_gpus / service.num_gpus)).sum()),
        lost_s=0.0,
    )


class _Loop:
    """The general case: any order, failures."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.service, self.overlap = pool, pool.service, pool.service.overlap
        self.record = Record(len(pool.arrival_s))
        places = pool.ranks_in_queue()
        self.place, self.at_place = places.tolist(), np.argsort(places).tolist()
        self.factors = pool.factors()
        self.free = [(-_NEVER, group) for group in range(pool.replicas)]
        heapify(self.free)
        self.ranks = [[-_NEVER] * self.overlap.num_ranks for _ in range(pool.replicas)]  # when each is free
        self.busy = self.overlap.busy
        self.queue: list[int] = []  # positions of waiting requests
        self.lost: list[tuple[float, int]] = []  # requests to queue again: time, position
        self.uptimes = [pool.outages.uptimes_s(group) for group in range(pool.replicas)] if pool.outages else []
        self.fails_s = [next(uptime) for uptime in self.uptimes] or [_NEVER] * pool.replicas
        self.repair_s = pool.outages.repair_s if pool.outages else 0.0

    def run(self) -> PoolRun:
        """Dispatch until no request waits or is still to arrive."""
        arrivals = [*self.pool.arrival_s.tolist(), _NEVER]
        come, now = 0, -_NEVER
        lost, queue, free, fails_s = self.lost, self.queue, self.free, self.fails_s
        while True:
            if not queue:
                wake = lost[0][0] if lost and lost[0][0] < arrivals[come] else arrivals[come]
                if wake == _NEVER:
                    return self.record.done()
                now = wake if wake > now else now
            ready, group = free[0]
            now = ready if ready > now else now
            if fails_s[group] <= now:
                heapreplace(free, (self._repaired_s(group), group))
                continue
            while arrivals[come] <= now:
                heappush(queue, self.place[come])
                come += 1
            while lost and lost[0][0] <= now:
                heappush(queue, heappop(lost)[1])
            self._dispatch(now, group)

    def _repaired_s(self, group: int) -> float:
        """When a failing group is free again; draws its next failure."""
        back_s = self.fails_s[group] + self.repair_s
        self.ranks[group] = [-_NEVER] * self.overlap.num_ranks
        self.fails_s[group] = back_s + next(self.uptimes[group])
        return back_s

    def _dispatch(self, now: float, group: int) -> None:
        """Start the first of the queue on the group on top of the heap."""
        request = self.at_place[heappop(self.queue)]
        service, kind = self.service, int(self.service.length_class[request])
        took = float(service.ttft_s[request]) * self.factors[group]
        begin, free_s = self.overlap.run(kind, took, now, self.ranks[group])
        end, hold, fails = free_s[-1], float(service.hold_s[request]), self.fails_s[group]
        self.ranks[group] = free_s = [end + hold] * len(free_s) if hold else free_s
        busy_s = self.busy[kind] * took
        record = self.record
        if fails < end:
            spent = busy_s * max(0.0, fails - begin) / (end - begin)
            record.busy_s += spent
            record.lost_s += spent
            record.retries[request] += 1
            if record.retries[request] <= MOST_RETRIES:
                heappush(self.lost, (fails, self.place[request]))
        else:
            record.busy_s += busy_s + hold * service.hold_gpus / service.num_gpus
            record.begin_s[request], record.end_s[request], record.group[request] = begin, end, group
        heapreplace(self.free, (self._repaired_s(group) if free_s[0] >= fails else free_s[0], group))
