"""Pools in tight loops: about a microsecond per request.

Groups wait in a heap by when they are free. Requests are taken in the order in which the queue gives them, so that
each turn of the loop is one dispatch, at times that never fall. `event.py` is the reference that it agrees with.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

import numpy as np

from planner.capacity.fleet.packed import PackedPool
from planner.capacity.fleet.pool import Pool, PoolRun, Record

_NEVER = float("inf")


def run_pool(pool: Pool) -> PoolRun:
    """Serve all requests."""
    if pool.service.packing is not None:
        return PackedPool(pool).run()
    return _first_come(pool) if pool.order == "first-come" else _Loop(pool).run()


def _first_come(pool: Pool) -> PoolRun:
    """First come, first served: one pass over the requests."""
    service, overlap = pool.service, pool.service.overlap
    run, num_ranks = overlap.run, overlap.num_ranks
    free = [(-_NEVER, group) for group in range(pool.replicas)]
    ranks = [[-_NEVER] * num_ranks for _ in range(pool.replicas)]
    begins, ends, groups = [], [], []
    rows = (pool.arrival_s, service.ttft_s, service.length_class, service.hold_s)
    for arrival, took, kind, hold in zip(*(column.tolist() for column in rows), strict=True):
        ready, group = free[0]
        begin = ready if ready > arrival else arrival
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
    busy = np.array(overlap.busy)[service.length_class]
    return PoolRun(
        begin_s=np.array(begins),
        end_s=np.array(ends),
        group=np.array(groups, dtype=np.int64),
        busy_s=float((service.ttft_s * busy + service.hold_s * (service.hold_gpus / service.num_gpus)).sum()),
    )


class _Loop:
    """The general case: any order."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.service, self.overlap = pool, pool.service, pool.service.overlap
        self.record = Record(len(pool.arrival_s))
        places = pool.ranks_in_queue()
        self.place, self.at_place = places.tolist(), np.argsort(places).tolist()
        self.free = [(-_NEVER, group) for group in range(pool.replicas)]
        self.ranks = [[-_NEVER] * self.overlap.num_ranks for _ in range(pool.replicas)]  # when each is free
        self.busy = self.overlap.busy
        self.queue: list[int] = []  # positions of waiting requests

    def run(self) -> PoolRun:
        """Dispatch until no request waits or is still to arrive."""
        arrivals = [*self.pool.arrival_s.tolist(), _NEVER]
        come, now = 0, -_NEVER
        queue, free = self.queue, self.free
        while True:
            if not queue:
                if arrivals[come] == _NEVER:
                    return self.record.done()
                now = max(now, arrivals[come])
            ready, group = free[0]
            now = ready if ready > now else now
            while arrivals[come] <= now:
                heappush(queue, self.place[come])
                come += 1
            self._dispatch(now, group)

    def _dispatch(self, now: float, group: int) -> None:
        """Start the first of the queue on the group on top of the heap."""
        request = self.at_place[heappop(self.queue)]
        service, kind = self.service, int(self.service.length_class[request])
        took = float(service.ttft_s[request])
        begin, free_s = self.overlap.run(kind, took, now, self.ranks[group])
        end, hold = free_s[-1], float(service.hold_s[request])
        self.ranks[group] = free_s = [end + hold] * len(free_s) if hold else free_s
        record = self.record
        record.busy_s += self.busy[kind] * took + hold * service.hold_gpus / service.num_gpus
        record.begin_s[request], record.end_s[request], record.group[request] = begin, end, group
        heapreplace(self.free, (free_s[0], group))
