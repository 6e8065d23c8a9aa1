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
    service, overlap = pool.service, pool.service.overlap
    release, follow, factors = overlap.release, overlap.follow, pool.factors()
    free = [(-_NEVER, group) for group in range(pool.replicas)]
    began = [-_NEVER] * pool.replicas
    span = [0.0] * pool.replicas
    row = [follow[0]] * pool.replicas
    begins, groups = [], []
    rows = (pool.arrival_s, service.ttft_s, service.length_class, service.hold_s)
    for arrival, alone, kind, hold in zip(*(column.tolist() for column in rows), strict=True):
        ready, group = free[0]
        begin = ready if ready > arrival else arrival
        follows = began[group] + span[group] * row[group][kind]
        if follows > begin:
            begin = follows
        took = alone * factors[group]
        began[group], span[group], row[group] = begin, took, follow[kind]
        heapreplace(free, (begin + took + hold if hold else begin + took * release[kind], group))
        begins.append(begin)
        groups.append(group)
    begin_s, group_of = np.array(begins), np.array(groups, dtype=np.int64)
    took_s = service.ttft_s * np.array(factors)[group_of]
    busy = np.array(overlap.busy)[service.length_class]
    return PoolRun(
        begin_s=begin_s,
        end_s=begin_s + took_s,
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
        self.began = [-_NEVER] * pool.replicas
        self.span = [0.0] * pool.replicas
        self.row = [self.overlap.follow[0]] * pool.replicas
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
        self.began[group], self.span[group] = -_NEVER, 0.0
        self.fails_s[group] = back_s + next(self.uptimes[group])
        return back_s

    def _dispatch(self, now: float, group: int) -> None:
        """Start the first of the queue on the group on top of the heap."""
        request = self.at_place[heappop(self.queue)]
        service, kind = self.service, int(self.service.length_class[request])
        took = float(service.ttft_s[request]) * self.factors[group]
        follows = self.began[group] + self.span[group] * self.row[group][kind]
        begin = follows if follows > now else now
        end, fails = begin + took, self.fails_s[group]
        hold = float(service.hold_s[request])
        free = end + hold if hold else begin + took * self.overlap.release[kind]
        self.began[group], self.span[group], self.row[group] = begin, took, self.overlap.follow[kind]
        busy = self.overlap.busy[kind]
        record = self.record
        if fails < end:
            spent = busy * max(0.0, fails - begin)
            record.busy_s += spent
            record.lost_s += spent
            record.retries[request] += 1
            if record.retries[request] <= MOST_RETRIES:
                heappush(self.lost, (fails, self.place[request]))
        else:
            record.busy_s += busy * took + hold * service.hold_gpus / service.num_gpus
            record.begin_s[request], record.end_s[request], record.group[request] = begin, end, group
        heapreplace(self.free, (self._repaired_s(group) if free >= fails else free, group))
