"""Pools in tight loops: about a microsecond a request, a few microseconds with failures or packing.

Groups wait in a heap by when they are free. Requests are taken in the order in which the queue gives them, so that
each turn of the loop is one dispatch, at times that never fall. `event.py` is the reference that it agrees with.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from planner.capacity.fleet.pool import MOST_RETRIES, Pool, PoolRun, Record

_NEVER = float("inf")


def run_pool(pool: Pool) -> PoolRun:
    """Serve all requests."""
    plain = pool.order == "first-come" and pool.outages is None and pool.service.packing is None
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
    """The general case: any order, failures, packing."""

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
        """Start the first of the queue, or a pack, on the group on top of the heap."""
        members, alone, kind = self._taken()
        took = alone * self.factors[group]
        follows = self.began[group] + self.span[group] * self.row[group][kind]
        begin = follows if follows > now else now
        end, fails = begin + took, self.fails_s[group]
        hold = max(self.service.hold_s[member] for member in members)
        free = end + hold if hold else begin + took * self.overlap.release[kind]
        self.began[group], self.span[group], self.row[group] = begin, took, self.overlap.follow[kind]
        busy = self.overlap.busy[kind]
        record = self.record
        if fails < end:
            spent = busy * max(0.0, fails - begin)
            record.busy_s += spent
            record.lost_s += spent
            for member in members:
                record.retries[member] += 1
                if record.retries[member] <= MOST_RETRIES:
                    heappush(self.lost, (fails, self.place[member]))
        else:
            record.busy_s += busy * took + hold * self.service.hold_gpus / self.service.num_gpus
            for member in members:
                record.begin_s[member], record.end_s[member], record.group[member] = begin, end, group
        heapreplace(self.free, (self._repaired_s(group) if free >= fails else free, group))

    def _taken(self) -> tuple[list[int], float, int]:
        """The first of the queue and those after it that fit in a pack: requests, seconds alone, class."""
        service, packing = self.service, self.service.packing
        first = self.at_place[heappop(self.queue)]
        members = [first]
        if packing is not None:
            tokens, prefix = int(service.new_tokens[first]), int(service.cached_prefix[first])
            while self.queue:
                other = self.at_place[self.queue[0]]
                more_tokens = tokens + int(service.new_tokens[other])
                longest_prefix = max(prefix, int(service.cached_prefix[other]))
                if not packing.holds(more_tokens, longest_prefix):
                    break
                heappop(self.queue)
                members.append(other)
                tokens, prefix = more_tokens, longest_prefix
            if len(members) > 1:
                return members, *packing.of(tokens, prefix)
        return members, float(service.ttft_s[first]), int(service.length_class[first])
