"""A fleet: pools of equal groups, the routing of prompts to pools, and the simulation of their queues.

A prompt starts on rank 0 of a group at time S. Alone, rank i is free at S + f_i, and the first token comes at S + T,
where T is the last f_i. Rank i has slack w_i: it could start w_i later without delaying any rank, because it has to
wait for the KV cache or the activations of earlier ranks. The next prompt starts as soon as rank 0 is free. If rank i
is still busy with the previous prompt until S + w_i + d_i, it delays itself and the ranks after it by at most d_i,
because finish times are maxima of sums of earlier times. This is true for prompts of any length. If a sender is busy
until its message has arrived, a delay also reaches ranks before i; then the prompt starts on rank 0 later by the
largest d_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrsim.program import Array
from planner.capacity.prefixes import PrefixTraffic, Tier
from planner.capacity.serving import LateLimit, StepRequests, run_steps
from planner.capacity.steps import StepTimes
from planner.capacity.workload import Lengths, Workload

WHOLE = "whole"  # every GPU of a group holds all weights
_NEVER = float("inf")
Indices = npt.NDArray[np.int64]


class GroupType(NamedTuple):
    """The number of GPUs of a group, and the placement of the weights on them."""

    gpus: int
    weights: str = WHOLE  # WHOLE, or an engine's name such as tp4 or tp2+pp4; the other GPUs split the context
    colocated: bool = False  # whether the group also decodes


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuGroup:
    """Equal groups behind one queue, and the prompts that they serve."""

    type: GroupType
    least_new: int  # the fewest new tokens (context less cached prefix) per prompt
    most_new: int  # the most new tokens per prompt
    replicas: int = 1

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.type.gpus * self.replicas

    def of(self, replicas: int) -> GpuGroup:
        """The same groups with another number of replicas."""
        return replace(self, replicas=replicas)


Fleet = tuple[GpuGroup, ...]  # groups in ascending order of their prompt lengths; together they serve all lengths


def gpus_of(fleet: Fleet) -> int:
    """GPUs of all groups."""
    return sum(group.num_gpus for group in fleet)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLimits:
    """The fleets that are allowed, and what they cost."""

    sizes: tuple[int, ...] = (1, 2, 4, 8)  # numbers of GPUs per group
    max_gpus: int = 512
    prices: Mapping[int, float] = field(default_factory=dict)  # price of a GPU per hour, by group size; empty: unknown
    by_cost: bool = False  # whether to minimise cost rather than the number of GPUs
    node_gpus: int = 1  # GPUs of a node, which is rented as a whole
    spare: int = 0  # nodes, or largest groups if GPUs are rented singly, beyond those that work

    def idle_gpus(self, working: int, largest_group: int) -> int:
        """GPUs that are rented although they do not work: the rest of the last node, and the spare ones."""
        rest = -working % self.node_gpus
        unit = self.node_gpus * math.ceil(largest_group / self.node_gpus)
        return rest + self.spare * unit

    def cost(self, gpus_per_group: int) -> float:
        """Cost of one group in the objective: its GPUs or its price per hour."""
        if self.by_cost:
            return gpus_per_group * self.prices[gpus_per_group]
        return float(gpus_per_group)

    def cost_per_hour(self, fleet: Fleet) -> float | None:
        """The price of a fleet in USD per hour; None: unknown."""
        if not self.prices:
            return None
        return sum(self.prices[group.type.gpus] * group.num_gpus for group in fleet)


def fewest_groups(is_enough: Callable[[int], bool], start: int, most: int) -> int | None:
    """The fewest groups that are enough, if more groups never are worse; None if `most` groups are too few.

    start: the number that is tried first.
    """
    if most < 1:
        return None
    low = 0
    high = min(most, max(1, start))
    while not is_enough(high):
        if high == most:
            return None
        low = high
        high = min(most, max(high + 1, math.ceil(high * 1.25)))
    middle = (low + high) // 2
    if low == 0:
        middle = high - 1  # the start is often the answer
    while high - low > 1:
        if is_enough(middle):
            high = middle
        else:
            low = middle
        middle = (low + high) // 2
    return high


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Times at which the ranks of a group are free for the next prompt, by class of prompt (a range of lengths)."""

    finish: tuple[tuple[float, ...], ...]  # [class][rank]: time f_i at which the rank is free, divided by T; rounded up
    slack: tuple[tuple[float, ...], ...]  # [class][rank]: slack w_i of the rank's start, divided by T; rounded down
    holds: bool = False  # whether a sender is busy until its message has arrived

    @classmethod
    def whole(cls) -> Overlap:
        """Timing without overlap: all ranks are busy until the first token, in one class."""
        return cls(finish=((1.0,),), slack=((0.0,),))

    @property
    def num_ranks(self) -> int:
        """Number of ranks that are timed separately."""
        return len(self.finish[0])

    @property
    def busy(self) -> tuple[float, ...]:
        """Busy share of T per class: the mean over the ranks of (f_i - w_i) / T, without the initial wait."""
        return tuple((sum(ends) - sum(waits)) / len(ends) for ends, waits in zip(self.finish, self.slack, strict=True))

    @property
    def periods(self) -> tuple[float, ...]:
        """Least time between two prompts of a class, divided by T: the longest f_i - w_i, that of the bottleneck."""
        pairs = zip(self.finish, self.slack, strict=True)
        return tuple(max(end - wait for end, wait in zip(ends, waits, strict=True)) for ends, waits in pairs)

    def run(
        self, length_class: int, alone_s: float, begin_s: float, free_s: Sequence[float]
    ) -> tuple[float, list[float]]:
        """Run a prompt on ranks that are free at `free_s`; on an idle group, the prompt takes `alone_s`.

        Returns the start on rank 0, and when each rank is free afterwards; the last rank gives the first token.
        """
        finish = self.finish[length_class]
        delay_s = 0.0
        ends_s = []
        for end, slack, busy_s in zip(finish, self.slack[length_class], free_s, strict=True):
            late_s = busy_s - begin_s - slack * alone_s
            if late_s > delay_s:
                delay_s = late_s
            ends_s.append(begin_s + end * alone_s + delay_s)
        if self.holds and delay_s:
            begin_s += delay_s
            ends_s = [begin_s + end * alone_s for end in finish]
        return begin_s, ends_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """Service times of requests on groups of one type; arrays of shape (N,)."""

    ttft_s: Array  # seconds from the start to the first token on an idle group; inf: the prompt exceeds the memory
    busy_s: Array  # seconds for which each prompt keeps a group busy before its first token (mean over the GPUs)
    hold_s: Array  # seconds after the prefill for which the cache is sent; the group is busy if prompts run one by one
    length_class: Indices  # class of each request: its row in the tables of `overlap`
    strategies: tuple[str, ...]  # strategy of each class
    overlap: Overlap
    new_tokens: Lengths  # lengths that fill the steps
    cached_prefix: Lengths
    decode_steps: Lengths  # tokens that the same group decodes
    cache_bytes: Array  # bytes of a GPU for the cache of each sequence
    steps: StepTimes | None = None  # None: prompts run one by one
    prefixes: PrefixTraffic | None = None  # turns of sessions, in steps; `cached_prefix` is then the longest possible

    @classmethod
    def plain(cls, ttft_s: Array, hold_s: Array | None = None) -> Service:
        """Service times without overlap."""
        none = np.zeros(len(ttft_s), dtype=np.int64)
        if hold_s is None:
            hold_s = np.zeros(len(ttft_s))
        return cls(
            ttft_s=ttft_s,
            busy_s=ttft_s,
            hold_s=hold_s,
            length_class=none,
            strategies=("single",),
            overlap=Overlap.whole(),
            new_tokens=np.ones_like(none),
            cached_prefix=none,
            decode_steps=none,
            cache_bytes=np.zeros(len(ttft_s)),
        )

    @property
    def answer_s(self) -> Array:
        """TTFT without a queue: the prefill, and the transfer of the cache to the GPUs that decode."""
        return self.ttft_s + self.hold_s

    def select(self, index: Indices) -> Service:
        """The service times of the requests with these indices."""
        names = (
            "ttft_s",
            "busy_s",
            "hold_s",
            "length_class",
            "new_tokens",
            "cached_prefix",
            "decode_steps",
            "cache_bytes",
        )
        prefixes = None if self.prefixes is None else self.prefixes.select(index)
        return replace(self, prefixes=prefixes, **{name: getattr(self, name)[index] for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPool:
    """Requests and the groups that serve them. All requests fit on a group.

    The group that has been free longest takes the next prompt; among equals, the group with the lowest number. A group
    may take a prompt while its later ranks still work on the previous one.
    """

    arrival_s: Array  # shape (N,), ascending
    service: Service
    replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRun:
    """Results by request; arrays of shape (N,)."""

    begin_s: Array  # start of the prefill on a group
    end_s: Array  # time of the first token
    group: Indices  # number of the group that served the request
    busy_s: float  # mean busy time of a group's GPUs, summed over the groups
    arrival_s: Array
    tpot_s: Array | None = None  # mean time per output token after the first; 0 for one token; None: not decoded here
    hits: Mapping[Tier, Lengths] = field(default_factory=dict)  # tokens of each prompt in a cache; empty: no turns


def run_pool(pool: GroupPool, limit: LateLimit | None = None) -> PoolRun:
    """Serve all requests in the order of arrival, which takes about 1 µs per request, or several in shared steps.

    limit: the simulation may end as soon as more requests are late; requests that it has not served never end.
    """
    if pool.service.steps is not None:
        return _run_steps(pool, pool.service.steps, limit)
    if _is_equal(pool):
        return _run_equal(pool)
    slo_s = _NEVER
    allowed = len(pool.arrival_s)
    if limit is not None:
        slo_s = limit.ttft_s
        allowed = limit.allowed
    late = 0
    service = pool.service
    overlap = pool.service.overlap
    run = overlap.run
    num_ranks = overlap.num_ranks
    free = [(-_NEVER, group) for group in range(pool.replicas)]
    ranks = [[-_NEVER] * num_ranks for _ in range(pool.replicas)]
    begins = []
    ends = []
    groups = []
    rows = (pool.arrival_s, service.ttft_s, service.length_class, service.hold_s)
    for arrival, alone, length_class, hold in zip(*(column.tolist() for column in rows), strict=True):
        ready, group = free[0]
        begin = ready if ready > arrival else arrival
        if num_ranks == 1:
            end = begin + alone
            heapreplace(free, (end + hold, group))
        else:
            begin, free_s = run(length_class, alone, begin, ranks[group])
            end = free_s[-1]
            if hold:
                free_s = [end + hold] * num_ranks
            ranks[group] = free_s
            heapreplace(free, (free_s[0], group))
        begins.append(begin)
        ends.append(end)
        groups.append(group)
        if end + hold - arrival > slo_s:
            late += 1
            if late > allowed:
                break
    not_served = len(pool.arrival_s) - len(ends)
    begins += [_NEVER] * not_served
    ends += [_NEVER] * not_served
    groups += [0] * not_served
    return PoolRun(
        begin_s=np.array(begins),
        end_s=np.array(ends),
        group=np.array(groups, dtype=np.int64),
        busy_s=float(service.busy_s.sum()),
        arrival_s=pool.arrival_s,
    )


def _is_equal(pool: GroupPool) -> bool:
    """Whether one group serves prompts that all take the same time."""
    service = pool.service
    if pool.replicas != 1 or service.hold_s.any():
        return False
    return bool((service.ttft_s == service.ttft_s[0]).all() and (service.length_class == service.length_class[0]).all())


def _run_equal(pool: GroupPool) -> PoolRun:
    """Serve equal prompts on one group, all at once: about 0.01 µs per request and rank.

    For equal prompts, the rules of Overlap.run say that rank i is free for the next prompt f_i - w_i after the last
    start that it sees. The largest of these periods, that of the bottleneck, therefore separates the starts that the
    last rank sees; f_0 separates those on rank 0 unless senders wait for later ranks.
    """
    service = pool.service
    length_class = int(service.length_class[0])
    alone_s = float(service.ttft_s[0])
    period_s = alone_s * service.overlap.periods[length_class]
    first_s = alone_s * service.overlap.finish[length_class][0]
    start_s = _starts_s(pool.arrival_s, period_s)
    begin_s = start_s
    if not service.overlap.holds:
        begin_s = _starts_s(pool.arrival_s, first_s)
    return PoolRun(
        begin_s=begin_s,
        end_s=start_s + alone_s,
        group=np.zeros(len(pool.arrival_s), dtype=np.int64),
        busy_s=float(service.busy_s.sum()),
        arrival_s=pool.arrival_s,
    )


def _starts_s(arrival_s: Array, period_s: float) -> Array:
    """Starts in first-come order, at least a period apart: S_k = max(arrival_k, S_{k-1} + period)."""
    shift_s = period_s * np.arange(len(arrival_s))
    return np.asarray(np.maximum.accumulate(arrival_s - shift_s) + shift_s)


def _run_steps(pool: GroupPool, times: StepTimes, limit: LateLimit | None) -> PoolRun:
    """Serve the requests in steps that they share."""
    service = pool.service
    requests = StepRequests(
        arrival_s=pool.arrival_s,
        new_tokens=service.new_tokens,
        cached_prefix=service.cached_prefix,
        decode_steps=service.decode_steps,
        cache_bytes=service.cache_bytes,
        prefixes=service.prefixes,
    )
    run = run_steps(requests, times, pool.replicas, limit=limit)
    return PoolRun(
        begin_s=run.begin_s,
        end_s=run.first_s,
        group=run.group,
        busy_s=run.busy_s,
        arrival_s=pool.arrival_s if run.arrival_s is None else run.arrival_s,
        tpot_s=run.tpot_s(requests),
        hits=run.hits,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetRun:
    """Results of a workload by request; arrays of shape (N,)."""

    workload: Workload  # of turns, with the arrivals and the cached prefixes of this run
    ttft_s: Array  # TTFT with queueing and the transfer of the cache; inf: never served
    begin_s: Array
    pool: Indices  # index of the group that served the request; -1: the request fits in no group's memory
    busy_gpu_s: float  # busy time of all GPUs, without waits inside a group
    tpot_s: Array | None = None  # mean time per output token after the first; None: the fleet only prefills
    hits: Mapping[Tier, Lengths] = field(default_factory=dict)  # tokens of each prompt in a cache; empty: no turns

    @property
    def horizon_s(self) -> float:
        """Seconds from the first arrival to the last first token or, if the groups decode, to the last token."""
        ends_s = self.workload.arrival_s + self.ttft_s
        if self.tpot_s is not None:
            ends_s = ends_s + np.nan_to_num(self.tpot_s) * np.maximum(0, self.workload.output_tokens - 1)
        last_s = ends_s[np.isfinite(ends_s)].max(initial=self.workload.arrival_s.max())
        return float(last_s - self.workload.arrival_s[0])


def route(new_tokens: Lengths, services: Mapping[GroupType, Service], fleet: Fleet) -> Indices:
    """Index of the group that serves each prompt: the group for its length, or the next one in whose memory it fits.

    -1: the prompt fits in no group's memory.
    """
    target = np.searchsorted(np.array([group.most_new for group in fleet[:-1]]), new_tokens)
    choice = np.full(len(new_tokens), -1, dtype=np.int64)
    for index, group in enumerate(fleet):
        choice[(target <= index) & (choice < 0) & np.isfinite(services[group.type].ttft_s)] = index
    return choice


def run_fleet(
    workload: Workload,
    services: Mapping[GroupType, Service],
    fleet: Fleet,
    serve: Callable[[GroupPool], PoolRun] = run_pool,
) -> FleetRun:
    """Serve a workload; `services` has its service times by type of group, `serve` simulates one pool."""
    pool_of = route(workload.new_tokens, services, fleet)
    ttft_s = np.full(len(workload), np.inf)
    begin_s = np.full(len(workload), np.inf)
    busy_gpu_s = 0.0
    arrival_s = workload.arrival_s.copy()
    hits: dict[Tier, Lengths] = {}
    tpot_s = None
    if any(group.type.colocated for group in fleet):
        tpot_s = np.zeros(len(workload))
    for index, group in enumerate(fleet):
        mine = np.flatnonzero(pool_of == index)
        if len(mine):
            service = services[group.type].select(mine)
            run = serve(GroupPool(arrival_s=workload.arrival_s[mine], service=service, replicas=group.replicas))
            ttft_s[mine] = run.end_s + service.hold_s - run.arrival_s
            arrival_s[mine] = run.arrival_s
            for tier, tokens in run.hits.items():
                hits.setdefault(tier, np.zeros(len(workload), dtype=np.int64))[mine] = tokens
            begin_s[mine] = run.begin_s
            if tpot_s is not None and run.tpot_s is not None:
                tpot_s[mine] = run.tpot_s
            busy_gpu_s += run.busy_s * group.type.gpus
    if hits:
        workload = replace(workload, arrival_s=arrival_s, cached_prefix=sum(hits.values(), 0 * pool_of))
    return FleetRun(
        workload=workload, ttft_s=ttft_s, begin_s=begin_s, pool=pool_of, busy_gpu_s=busy_gpu_s, tpot_s=tpot_s, hits=hits
    )
