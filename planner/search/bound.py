"""A proven lower bound on the TTFT of every KVR partition over the given GPUs.

Proof. Let a partition have the chunk ends e_0 < ... < e_(p-1) = C, the last chunk x, and the TTFT T. No rank begins a
layer before the request and the engine's step. Times count from there; those of hosts and loads count from the start.
1. Rank i cannot append in the first layer before a message has passed along the chain to it (the fill, Fill_i), even if
   it has projected its chunk before. Then it computes its layers in order. Before its message of the last layer leaves,
   it has done all its work except the first projection and the part of the last layer after the append. Its device
   also begins no operation before its host has begun to issue it: the last message leaves no earlier than the host
   begins any operation of the last layer before it, plus the device's time from this operation on; the first rank's
   first message likewise. The host issues the same operations for all chunks. The last message, and each following one
   up to the last rank, carries at least e_i tokens, which the receiver appends (the drain). Then the last rank computes
   its attention and MLP of the last layer, and the head. These steps follow one another.
2. Link i -> i+1 carries the messages of all layers, of e_i tokens each, one after another. The first one is sent after
   the fill; after the last one, the drain follows as in 1. A bus carries the messages of all links.
3. The last rank needs the fill, all its work after the fill, and the head; its host issues all launches. If a cached
   prefix is elsewhere, the last rank loads the prefix of all layers, one layer after another.

Any walls w_0 <= ... <= w_(p-2) = C - x can refute a target T. At a fixed end, a later start leaves fewer queries over
the same keys, so the times that 1 and 2 need decrease with the start; they increase with the end. Suppose that these
times exceed T for every rank i but the first and the last, with a chunk from w_(i-1) to w_i. Then no rank that ends at
w_i or later can start before w_(i-1). From right to left, it follows that every e_i is at least w_i. This bounds fill
and drain, because their messages carry at least w_j tokens. If the first rank also needs more than T from the start
to w_0, or if 3 exceeds T, no partition with this x reaches T. So every choice of walls proves a bound, the least of the
needed times. The best walls make these times equal for all ranks, as balanced chunks do for busy times. They are
computed first without a fill, then with the fill that these walls prove. Every rank before a wall has at least one
token; a wall at this limit needs no proof. A chunk counts with at least one token.

The range of x is divided into intervals. In each, every condition is evaluated at the end where it is weakest. If
messages occupy the compute stream, the time of received messages increases with the start; it is counted for a start at
the wall. Each of them also lets the receiver wait for the latency of the link, because it begins when both are ready.
The time of attention is one that no call of its kernel beats and that, at a fixed end, does not increase with the start
(measured times may, because work is rounded up to tiles: `AttentionRates.least_seconds`).
In a layer with a state, the scan takes the place of the append, whose time counts as 0. A layer without a mixer sends
nothing: the "first" and the "last" layer are the first and the last one that send.
Other waiting, queueing and contention are ignored, which only lowers the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvrsim.compile import build_program
from kvrsim.execution import Execution
from kvrsim.placement import PlacedScenario
from kvrsim.program import Array, Compute, Flags, Load
from kvrsim.strategies.layers import before_step, request
from planner.search.balance import ChainWork, balanced_chunks
from planner.search.minimise import unique_rows

PRECISION = 2.0**-12  # relative precision of a chunk
_INSIDE = np.array([-0.2, 0.2, 0.4, 0.6, 0.8, 1.2])[:, None]  # trial points, some outside the bracket
_NEAR = np.array([-0.02, 0.02])[:, None]  # trial points next to the linear estimate of the crossing
_BRACKET_GROWTH = 2.0  # factor by which a bracket without a crossing grows
_DAMPING = 0.8  # a longer chunk shortens those after it; without damping, chunks oscillate
_WALL_SHARE = 0.999  # a wall is proven if a chunk that ends there takes this share of the time limit
# (half-width of the first bracket as a share of a chunk, number of rounds)
FIRST = (0.25, 32)
AGAIN = (0.05, 12)


class StallBounds(NamedTuple):
    """Proven lower bounds on the stalls of each rank, given walls."""

    fills_s: Array  # least seconds before each rank's first append, shape (ranks, columns)
    received_s: Array  # least seconds for which received messages occupy each sender's stream, shape (senders, columns)

    def where(self, flags: Flags, others: StallBounds) -> StallBounds:
        """Return these bounds in the columns where the flag is set, and the others' bounds elsewhere."""
        fills_s = np.where(flags, self.fills_s, others.fills_s)
        return StallBounds(fills_s, np.where(flags, self.received_s, others.received_s))


class Walls(NamedTuple):
    """Walls for several limits, one per column, and the seconds that the ranks between these walls need."""

    chunks: Array  # chunks of all senders but the first, shape (senders - 1, columns)
    ends: Array  # chunk ends of all senders, shape (senders, columns)
    first_s: Array  # seconds that the first sender needs; 0 if its wall is not proven
    others_s: Array  # needed seconds, the least over the other senders that prove their walls
    free: Array  # share of the walls that are at their left limit


class SendersBetweenWalls:
    """All ranks of a chain but the last (the senders), with chunks between walls."""

    def __init__(self, chain: ChainWork, host_s: float) -> None:
        """host_s: time at which hosts begin to issue the first layer, in the time of the devices."""
        self.chain = chain
        self.host_s = host_s
        self.senders = range(chain.num_ranks - 1)
        self.holds = not chain.execution.placed.sends_overlap
        self.first_start = float(chain.execution.placed.request.cached_prefix)
        self.total = float(chain.execution.placed.request.context_len)
        self.floors = self.first_start + np.arange(1.0, chain.num_ranks)[:, None]  # every rank has at least one token

    def walls_for(
        self, last_end: Array, limit: Array, chunks: Array, waits: StallBounds | None, within: tuple[float, int]
    ) -> Walls:
        """Find walls: chunks of all senders except the first that just exceed the limit; also their seconds."""

        def ends_of(chunks: Array) -> Array:
            behind = np.cumsum(chunks[::-1], axis=0)[::-1]
            return np.asarray(np.maximum(np.concatenate([last_end - behind, last_end[None]]), self.floors))

        def needed_s(settling: Array, tried: Array) -> Array:
            ends = ends_of(settling)
            starts = np.maximum(ends[1:, None] - tried, self.floors[:-1, None])
            return self._needed_s(1, starts, ends, waits)

        def room(chunks: Array) -> Array:
            return np.asarray(ends_of(chunks)[1:] - self.floors[:-1])

        if len(self.senders) > 1:
            chunks = _chunks_beyond(needed_s, limit, chunks, room, within)
        ends = ends_of(chunks)
        starts = np.concatenate([np.full_like(ends[:1], self.first_start), ends[:-1]])
        each_s = self._needed_s(0, starts[:, None], ends, waits)[:, 0]
        free = ends[:-1] <= self.floors[:-1]  # a wall at this limit needs no proof
        holds = np.logical_and.accumulate((free | (each_s[1:] >= limit * _WALL_SHARE))[::-1], axis=0)[::-1]
        others_s = np.where(holds & ~free, each_s[1:], np.inf).min(axis=0, initial=np.inf)
        ends[:-1] = np.where(holds, ends[:-1], self.floors[:-1])
        first_s = np.where(holds.all(axis=0), each_s[0], 0.0)
        none = (ends[:-1] <= self.floors[:-1]).mean(axis=0) if len(free) else np.zeros(1)
        return Walls(chunks, ends, first_s, others_s, none)

    def waits(self, ends: Array) -> StallBounds:
        """Lower bounds on the stalls, if chunk ends are not before `ends`."""
        return StallBounds(self._fills(ends), self._received_s(ends))

    def bus_s(self, ends: Array) -> Array:
        """The least seconds of all messages over a single bus."""
        return np.asarray(self.chain.work(self.senders, np.ones_like(ends), ends - 1.0).sends_s.sum(axis=0))

    def _received_s(self, ends: Array) -> Array:
        """Least seconds for which received messages occupy each sender's stream, for ends not earlier than these."""
        starts = np.concatenate([np.full_like(ends[:1], self.first_start), ends[:-1]])
        return self.chain.work(self.senders, np.ones_like(starts), starts).recv_held_s + np.zeros_like(ends)

    def _fills(self, ends: Array) -> Array:
        """Least seconds of each rank before its first append, for ends not earlier than these."""
        message_s = self.chain.first_message_s(self.senders, ends)
        hops_s = message_s + self.chain.first_append_s(ends)
        reached_s = (
            self.chain.first_message_ready_s(ends[0] - self.first_start, self.host_s)
            + np.cumsum(hops_s, axis=0)
            - hops_s
        )
        # If received messages occupy the stream, they already count as work of the receiver.
        fills = reached_s if self.holds else reached_s + message_s
        return np.concatenate([np.zeros_like(fills[:1]), fills])

    def _needed_s(self, first: int, starts: Array, walls: Array, waits: StallBounds | None) -> Array:
        """Seconds that conditions 1 and 2 need of the senders from `first` on, up to the last rank's append.

        Shapes: starts (senders, K, columns); walls and waits (senders, columns), for all senders.
        """
        ranks = self.senders[first:]
        ends = walls[first:, None]
        chunks = np.maximum(ends - starts, 1.0)
        work = self.chain.work(ranks, chunks, ends - chunks)
        own = work.compute_s - work.last_post_s + work.send_held_s - (work.last_send_s if self.holds else 0.0)
        link = work.sends_s - work.last_send_s
        if waits is not None:
            fill = waits.fills_s[first:-1, None]
            own = own + waits.received_s[first:, None] + np.maximum(0.0, fill - work.first_qkv_s)
            link = link + fill
        if self.chain.layers_host_s.any():
            own = np.maximum(own, self.chain.last_message_ready_s(ranks, chunks, ends - chunks, self.host_s))
        drain_s = np.cumsum(self.chain.last_hop_s(self.senders, walls)[::-1], axis=0)[::-1]
        return np.maximum(own, link) + drain_s[first:, None]


def _chunks_beyond(
    needed_s: Callable[[Array, Array], Array],
    limit_s: Array,
    chunks: Array,
    most: Callable[[Array], Array],
    within: tuple[float, int],
) -> Array:
    """A chunk of each rank that exceeds the limit, longer by at most the precision than the longest one within it.

    All ranks are solved together. `needed_s(chunks, tried)` returns the seconds of the chunks `tried`, shape (ranks, K,
    columns), if the other ranks have `chunks`, shape (ranks, columns); it must not decrease with a rank's own chunk.
    Brackets around the crossings shrink while the other chunks converge, and move if these shift the crossing out of a
    bracket. The other chunks converge only to the precision, so proofs have to evaluate the results once more.

    limit_s: shape (columns,). chunks: start values, shape (ranks, columns). most: returns the most tokens of each rank,
    given the chunks; the least is 1. within: half-width of the first brackets over the chunks, and number of rounds.
    """
    spread, rounds = within
    low = np.maximum(1.0, chunks * (1.0 - spread))
    high = chunks * (1.0 + spread)
    for _ in range(rounds):
        width = np.maximum(high - low, PRECISION * high)
        around = np.concatenate(
            [low[:, None] + _INSIDE * width[:, None], chunks[:, None] + _NEAR * width[:, None]], axis=1
        )
        room = np.maximum(1.0, most(chunks))
        tried = np.clip(around, 1.0, room[:, None])
        over_s = needed_s(chunks, tried) - limit_s
        within_limit = over_s <= 0
        low_s = np.maximum.reduce(over_s, axis=1, where=within_limit, initial=-np.inf)
        high_s = np.minimum.reduce(over_s, axis=1, where=~within_limit, initial=np.inf)
        low = np.maximum.reduce(tried, axis=1, where=within_limit, initial=1.0)
        high = np.minimum(np.minimum.reduce(tried, axis=1, where=~within_limit, initial=np.inf), room)
        none = low_s == -np.inf
        all_ = high_s == np.inf
        low = np.where(none, np.maximum(1.0, high - _BRACKET_GROWTH * width), low)
        high = np.where(all_, np.minimum(room, low + _BRACKET_GROWTH * width), high)
        with np.errstate(invalid="ignore"):
            share = np.where(none | all_, 0.5, low_s / (low_s - high_s))
        chunks = chunks + _DAMPING * (low + share * (high - low) - chunks)
        if (high - low <= PRECISION * high).all():
            break
    return high


_LENGTHS = 129  # tried lengths of the last chunk; the longest one that is not refuted at once is used
_INTERVALS = 12  # intervals of x
_CUTS = 2  # rounds of dividing weak intervals
_STEPS = 12  # most targets per round
_WEAK = 0.5  # intervals are divided if their gap exceeds this share of the weakest interval's gap
_PLANS = 4  # number of partitions between walls that are returned
_OPEN = 0.1  # share of the gap that may remain before the next division
_CLOSE = 2.5e-3  # relative gap to the given TTFT below which a bound is not improved


def lower_bound_s(execution: Execution, ttft_s: float, warm_start: Array | None = None) -> float:
    """A TTFT that no partition beats; `ttft_s` is the TTFT of some partition.

    warm_start: chunks from which the search for walls starts, shape (num_ranks,), tokens; None: balanced chunks.
    """
    start = balanced_chunks(execution) if warm_start is None else warm_start
    return lower_bound_and_plans(execution, ttft_s, start)[0]


def lower_bound_and_plans(execution: Execution, ttft_s: float, warm_start: Array) -> tuple[float, Array]:
    """The bound, and the chunks between the walls of the weakest intervals, shape (few, num_ranks).

    These chunks balance all ranks, including their waits for each other.
    """
    begin_s, host_s = _begin_s(execution.placed)
    bound = _Bound(execution, ttft_s - begin_s, warm_start, host_s - begin_s)
    return max(begin_s + bound.value_s(), issued_or_loaded_s(execution)), bound.plans


def _begin_s(scenario: PlacedScenario) -> tuple[float, float]:
    """Seconds of the request and the engine's step, on the device and on the host, before the first layer."""
    one = np.ones(1)
    begin = (*request(scenario, one), *before_step(scenario, one, one, scenario.cost))
    ops = [op for op in begin if isinstance(op, Compute)]
    return sum(float(op.device_s[0]) for op in ops if op.kind == "request"), sum(op.host_s for op in ops)


def issued_or_loaded_s(execution: Execution) -> float:
    """Seconds in which the last rank's host issues all layers, or the rank loads the cached prefix, if longer."""
    program = build_program(execution, [np.ones(1)] * execution.cluster.num_gpus)
    ops = [op for _, op in program.ops(program.num_ranks - 1)]
    loaded_s = sum(op.seconds.item() for op in ops if isinstance(op, Load))
    return max(float(sum(float(np.sum(op.host_s)) for op in ops)), loaded_s)


class _Tails(NamedTuple):
    """The least seconds of work of the last rank, for each interval of its chunk x."""

    whole_s: Array  # seconds of all layers and the head
    first_qkv_s: Array  # the part of the work that may run during the fill
    after_append_s: Array  # part of the last layer after the append, and the head


class _Intervals:
    """Intervals of the last chunk's length x with proven bounds; the last axis of every array is the interval."""

    def __init__(self, bound: _Bound, least: Array, most: Array, chunks: Array, within: tuple[float, int]) -> None:
        """Bound the stalls, first without a fill; `chunks`: start values for all senders but the first."""
        self.bound = bound
        self.least = least
        self.most = most
        self.tails = bound.tails(least, most)
        self.last_wall = bound.chain.total - most
        self.goal = self.above = self.holds = np.full_like(least, bound.ttft_s)
        # low: proven bound; below, above: highest refuted and lowest other target; *_by: needed time less target.
        self.low = self.below = np.zeros_like(least)
        self.below_by = self.above_by = np.full_like(least, np.nan)
        after_s = self.tails.after_append_s
        walls = bound.chain.walls_for(self.last_wall, self.goal - after_s, chunks, None, within)
        self.chunks = walls.chunks
        self.waits = bound.chain.waits(walls.ends)
        self.holds = np.minimum(self.holds, after_s + walls.others_s)  # the waits are proven for TTFTs below this value

    def improve(self) -> None:
        """Evaluate the bound at the next target TTFT of each interval, and choose the target after it.

        The search ends at the target that equals the first rank's time with its remaining chunk. Waits that are proven
        for a target are proven for all lower targets.
        """
        chain = self.bound.chain
        goal = self.goal
        after_s = self.tails.after_append_s
        walls = chain.walls_for(self.last_wall, goal - after_s, self.chunks, self.waits, AGAIN)
        first_s = after_s + walls.first_s
        ends_s = self._last_s()
        if chain.chain.execution.placed.cluster.shares_bandwidth:
            ends_s = np.maximum(ends_s, after_s + chain.bus_s(walls.ends))
        holds = np.minimum(self.holds, after_s + walls.others_s)
        needed_s = np.maximum(first_s, ends_s)
        self.low = np.maximum(self.low, np.minimum(np.minimum(goal, holds), needed_s))
        by = needed_s - goal
        is_below = needed_s >= goal
        self.below, self.below_by = np.where(is_below, (goal, by), (self.below, self.below_by))
        self.above, self.above_by = np.where(is_below, (self.above, self.above_by), (goal, by))
        self.chunks, self.holds = walls.chunks, np.where(is_below, self.holds, holds)
        self.waits = self.waits.where(is_below, chain.waits(walls.ends))
        # A higher target makes the chunks of all other ranks longer, and the first rank's chunk shorter.
        first = np.where(walls.free > 0, (1.0 - walls.free) * goal, goal + 1.2 * (first_s - goal) / len(chain.senders))
        alone = np.maximum(first, ends_s)
        share = np.clip(self.below_by / (self.below_by - self.above_by), 0.05, 0.95)
        between = self.below + share * (self.above - self.below)
        self.goal = np.where(np.isnan(share), np.clip(alone, 0.5 * (self.below + goal), self.above), between)

    def _last_s(self) -> Array:
        """Seconds of condition 3, without the times of the host and of loads."""
        waits_s = np.maximum(0.0, self.waits.fills_s[-1] - self.tails.first_qkv_s)
        return np.asarray(self.tails.whole_s + waits_s)

    @property
    def is_done(self) -> bool:
        """Whether more targets can hardly raise the bound of the weakest interval."""
        weakest = int(self.low.argmin())
        missing_s = self.bound.ttft_s - self.low[weakest]
        return bool(self.above[weakest] - self.low[weakest] <= max(_OPEN * missing_s, PRECISION * self.bound.ttft_s))

    def plans(self) -> Array:
        """Partitions between the walls of the weakest intervals."""
        index = np.argsort(self.low, kind="stable")[:_PLANS]
        chunks = self.chunks[:, index]
        last = self.most[index]
        first = self.last_wall[index] - self.bound.chain.first_start - chunks.sum(axis=0)
        return np.asarray(np.maximum(1.0, np.concatenate([first[None], chunks, last[None]])).T)

    def divide(self, weak: npt.NDArray[np.intp], pieces: int) -> _Intervals:
        """The weak intervals, each divided into `pieces`, which begin with the bound of the whole interval."""
        edges = np.linspace(self.least[weak], self.most[weak], pieces + 1)
        whole = np.tile(weak, pieces)
        parts = _Intervals(self.bound, edges[:-1].ravel(), edges[1:].ravel(), self.chunks[:, whole], FIRST)
        parts.low = parts.below = self.low[whole]
        return parts


class _Bound:
    def __init__(self, execution: Execution, ttft_s: float, warm_start: Array, host_s: float) -> None:
        self.execution = execution
        self.ttft_s = ttft_s
        self.chain = SendersBetweenWalls(ChainWork(execution, least=True), host_s)
        self.num_ranks = self.chain.chain.num_ranks
        self.warm_start = np.asarray(warm_start, dtype=float)[:-1, None]
        self.plans = np.empty((0, self.num_ranks))

    def value_s(self) -> float:
        """The bound of the layers and the head: that of the weakest interval of x, after dividing weak intervals."""
        tokens = float(self.execution.request.new_tokens)
        if self.num_ranks == 1:
            only = np.array([tokens])
            return float(self.tails(only, only).whole_s[0])
        least, most = self._possible(tokens - self.num_ranks + 1.0)
        if not len(least):
            return self.ttft_s
        chunks = self.warm_start[1:] * ((self.chain.total - most - self.chain.first_start) / self.warm_start.sum())
        intervals = _Intervals(self, least, most, chunks, FIRST)
        proven_s = self.ttft_s
        for division in count():
            for targets in range(_STEPS):
                intervals.improve()
                if targets > 1 and intervals.is_done:
                    break
            lowest_s = float(intervals.low.min())
            weak = intervals.low <= max(intervals.above.min(), lowest_s + _WEAK * (self.ttft_s - lowest_s))
            proven_s = min(proven_s, float(intervals.low.min(where=~weak, initial=np.inf)))
            is_close = lowest_s > (1.0 - _CLOSE) * self.ttft_s
            if division == _CUTS or is_close:
                break
            intervals = intervals.divide(np.flatnonzero(weak), max(2, -(-_INTERVALS // int(weak.sum()))))
        self.plans = intervals.plans()
        return min(proven_s, float(intervals.low.min()))

    def _possible(self, most: float) -> tuple[Array, Array]:
        """Intervals of the last chunk's length x, narrower near the longest that the last rank can compute in time."""
        ends = np.geomspace(1.0, most, _LENGTHS)
        possible = self.tails(ends[:-1], ends[1:]).whole_s < self.ttft_s
        if not possible.any():
            return np.empty(0), np.empty(0)
        steps = np.linspace(0.0, 1.0, _INTERVALS + 1)
        ends = unique_rows(1.0 + (ends[1:][possible].max() - 1.0) * steps * (2.0 - steps))
        return (ends[:-1], ends[1:]) if len(ends) > 1 else (ends, ends)

    def tails(self, least: Array, most: Array) -> _Tails:
        """The least work of the last rank with a chunk from `least` to `most` tokens."""
        last = range(self.num_ranks - 1, self.num_ranks)
        total = self.chain.total
        work = self.chain.chain.work(last, least[None], (total - least)[None])
        received = self.chain.chain.work(last, least[None], (total - most)[None]).recv_held_s
        epilogue = build_program(self.execution, [least]).epilogue[-1]
        head = sum((op.device_s for op in epilogue if isinstance(op, Compute)), np.zeros(1))
        first_qkv_s = work.first_qkv_s[0] + np.zeros_like(least)
        return _Tails((work.compute_s + received)[0] + head, first_qkv_s, work.last_post_s[0] + head)
