"""A proven lower bound on the TTFT of every KVR partition over the given GPUs.

Why it holds. Let a partition have chunk ends e_0 < ... < e_(p-1) = C and last chunk x, and reach T.
1. Rank i cannot append in the first layer before a message has come down the chain to it (the fill,
   Fill_i), whatever it has projected meanwhile. From there it works through its layers in order, so that
   before its message of the last layer can go it has spent all its work but the first projection and the
   last layer's part after the append. That message, and each that follows it to the last rank, carries at
   least e_i tokens and is appended there (the drain); then the last rank has its attention and MLP of the
   last layer and the head to do. All these come one after another.
2. The link i -> i+1 carries the messages of all layers, of e_i tokens each, one after another: the first
   not before the fill, the last followed as in 1. A bus carries those of all links.
3. The last rank spends the fill, all its work after it, and the head; its host issues all its launches. Of a cached
   prefix that lies elsewhere, it loads all layers' one after another.

For a target T, 1 and 2 without fill limit e_i to some f_i(e_(i-1)). At a fixed end, a later start leaves
fewer queries over the same keys, so f_i does not fall with e_(i-1). Hence, from the right, the earliest
ends that still let the last rank begin at C - x bound every e_i from below: with them the fill is bounded.
From the left, with that fill, pushing every end as far as it goes reaches furthest. If even that does not
reach C - x, or 3 exceeds T, no partition with that x reaches T. x is cut into intervals; in each, every
condition takes the end of the interval that weakens it. Where messages hold the compute stream, those
received grow with the start; they count as much as at the earliest start. Attention counts as much as a
time that no call of its kernel beats and that, at a fixed end, does not grow with the start (tiles do not
shrink as smoothly as the work in them: `AttentionRates.least_seconds`).
In a layer with a state, the scan stands for the append, and its time for 0; a layer without a mixer hands nothing on:
the first and the last layer are the first and the last that do.
Other waiting, queueing and contention are left out, which only lowers the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrsim.compile import build_program
from kvrsim.program.operations import Array, Compute, Flags, Load
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from planner.search.neighbours import unique_rows
from planner.search.work import Chain, largest_within

_INTERVALS, _TARGETS, _ZOOMS, _ROUNDS = 20, 20, 2, 3
_COARSE = 2.0**-7  # of a first look, which only has to be on the safe side
_PRECISION = 2.0**-13  # of a chunk's length against what is left of the context


def lower_bound_s(scenario: Scenario, strategy: Strategy, ttft_s: float) -> float:
    """A TTFT that no partition beats; `ttft_s` is one that some partition reaches."""
    return _Bound(scenario, strategy, ttft_s).value_s()


@dataclass(frozen=True, slots=True)
class _Tails:
    """The least that the last rank has to do, for each interval of its chunk x."""

    least_chunk: Array
    most_chunk: Array
    whole_s: Array  # all its layers and the head
    first_qkv_s: Array  # of it, what may run during the fill
    after_append_s: Array  # its last layer after the append, and the head


class _Bound:
    def __init__(self, scenario: Scenario, strategy: Strategy, ttft_s: float) -> None:
        self.scenario, self.strategy, self.ttft_s = scenario, strategy, ttft_s
        self.chain = Chain(scenario, strategy, least=True)
        self.total = float(scenario.request.context_len)
        self.first_start = float(scenario.request.cached_prefix)
        self.holds = not scenario.sends_overlap

    def value_s(self) -> float:
        """The bound: the weakest interval of x, after refining the weak ones; never below the host's time."""
        num_ranks, tokens = self.chain.num_ranks, self.scenario.request.new_tokens
        if num_ranks == 1:
            only = np.array([float(tokens)])
            return max(self._issued_or_loaded_s(), float(self._tails(only, only).whole_s[0]))
        most = float(tokens - num_ranks + 1)
        share = tokens / num_ranks
        near = np.geomspace(max(1.0, share / 4), max(1.0, min(most, 4 * share)), _INTERVALS)
        ends = unique_rows(np.concatenate([[1.0], near, [most]]).clip(1.0, most))
        least, upper = (ends[:-1], ends[1:]) if len(ends) > 1 else (ends, ends)
        low = self._solve(least, upper, np.zeros_like(least))
        for _ in range(_ROUNDS - 1):
            weak = low <= low.min() + 0.5 * (self.ttft_s - low.min())
            pieces = max(2, 2 * _INTERVALS // int(weak.sum()))
            cuts = np.linspace(least[weak], upper[weak], pieces + 1)
            new = cuts[:-1].ravel(), cuts[1:].ravel(), np.repeat(low[weak][None], pieces, 0).ravel()
            solved = self._solve(*new)
            least = np.concatenate([least[~weak], new[0]])
            upper = np.concatenate([upper[~weak], new[1]])
            low = np.concatenate([low[~weak], solved])
        return max(self._issued_or_loaded_s(), float(low.min()))

    def _solve(self, least: Array, most: Array, low: Array) -> Array:
        """For each interval of x, a target above `low` that no partition with such an x reaches, or `low`."""
        tails = self._tails(least, most)
        high, columns = np.full_like(low, self.ttft_s), np.arange(len(low))
        for _ in range(_ZOOMS):
            steps = np.linspace(0.0, 1.0, _TARGETS + 2)
            grid = low + steps[:, None] * (high - low)
            reachable = self._reachable(grid[1:-1], tails)
            first = np.where(reachable.any(axis=0), reachable.argmax(axis=0), _TARGETS)
            low, high = grid[first, columns], grid[first + 1, columns]
        return low

    def _tails(self, least: Array, most: Array) -> _Tails:
        last = self.chain.num_ranks - 1
        work = self.chain.work(last, least, self.total - least)
        received = self.chain.work(last, least, self.total - most).recv_held_s
        epilogue = build_program(self.scenario, self.strategy, [least]).epilogue[-1]
        head = sum((op.device_s for op in epilogue if isinstance(op, Compute)), np.zeros(1))
        return _Tails(
            least,
            most,
            work.compute_s + received + head,
            work.first_qkv_s + np.zeros_like(least),
            work.last_post_s + head,
        )

    def _reachable(self, targets: Array, tails: _Tails) -> Flags:
        """Whether each target survives all conditions; targets of shape (targets, intervals)."""
        limit = targets - tails.after_append_s
        furthest = self.total - np.broadcast_to(tails.least_chunk, targets.shape)
        earliest = self.total - np.broadcast_to(tails.most_chunk, targets.shape)
        ends = self._earliest_ends(earliest, limit, None, _COARSE if self.holds else _PRECISION)
        if self.holds:
            ends = self._earliest_ends(earliest, limit, self._received_s(ends), _PRECISION)
        received, fills = self._received_s(ends), self._fills(ends)
        possible = targets >= tails.whole_s + np.maximum(0.0, fills[-1] - tails.first_qkv_s)
        if self.scenario.cluster.shares_bandwidth:
            possible &= self._bus_s(ends) <= limit
        end = np.full_like(targets, self.first_start)
        for rank in range(self.chain.num_ranks - 1):
            start, fill = end, fills[rank]
            most = furthest - (self.chain.num_ranks - 2 - rank)  # a token at least for every rank between
            end = largest_within(
                lambda e, r=rank, s=start, f=fill: self._needed_s(r, s, e, f, received[r]),  # type: ignore[misc]
                np.minimum(start + 1.0, most),
                most,
                limit,
                _PRECISION,
            )
            if (none := np.isnan(end)).any():
                end = np.where(none, self._last_single_token(rank, start, fill, received[rank], limit), end)
                possible &= ~np.isnan(end)
                end = np.where(np.isnan(end), start, end)
        return possible & (end >= earliest)

    def _last_single_token(self, rank: int, start: Array, fill: Array, received_s: Array, limit: Array) -> Array:
        """How far a rank's end may lie where not even one token from `start` on is within the limit.

        An earlier start, with an earlier end of the rank before, may allow it: at the furthest, one token.
        """
        least = np.full_like(start, self.first_start + rank + 1.0)
        return largest_within(
            lambda end: self._needed_s(rank, end - 1.0, end, fill, received_s), least, start + 1.0, limit, _PRECISION
        )

    def _received_s(self, ends: list[Array]) -> list[Array]:
        """For each rank, the least that received messages hold its stream, if starts are no earlier than these."""
        one = np.ones(1)
        held = [self.chain.work(rank + 1, one, end).recv_held_s for rank, end in enumerate(ends)]
        return [np.zeros(1), *held]

    def _bus_s(self, ends: list[Array]) -> Array:
        """All messages over the one bus, each at its least."""
        one = np.ones(1)
        return sum((self.chain.work(rank, one, end - 1.0).sends_s for rank, end in enumerate(ends)), np.zeros(1))

    def _earliest_ends(
        self, earliest: Array, limit: Array, received: list[Array] | None, precision: float
    ) -> list[Array]:
        """For each rank but the last, the earliest end from which the others can still reach the last chunk."""
        ends = [earliest]
        for rank in range(self.chain.num_ranks - 2, 0, -1):
            end = ends[-1]
            longest = np.maximum(end - (self.first_start + rank), 1.0)  # earlier ranks have a token each
            held = np.zeros(1) if received is None else received[rank]
            chunk = largest_within(
                lambda c, r=rank, e=end, g=held: self._needed_s(r, e - c, e, None, g),  # type: ignore[misc]
                np.ones_like(end),
                longest,
                limit,
                precision,
            )
            ends.append(end - np.where(np.isnan(chunk), longest, chunk))
        return ends[::-1]

    def _fills(self, ends: list[Array]) -> list[Array]:
        """For each rank, the least before its first append, if ends are no earlier than these."""
        fill = self.chain.first_message_ready_s(ends[0] - self.first_start)
        fills = [np.zeros_like(fill)]
        for rank, end in enumerate(ends):
            transfer = self.chain.first_message_s(rank, end)
            # A received message that holds the stream is counted as the receiver's work already.
            fills.append(fill if self.holds else fill + transfer)
            fill = fill + transfer + self.chain.first_append_s(end)
        return fills

    def _needed_s(self, rank: int, start: Array, end: Array, fill: Array | None, received_s: Array) -> Array:
        """Conditions 1 and 2 of a rank that ends there, up to the last rank's append."""
        work = self.chain.work(rank, end - start, start)
        own = work.compute_s - work.last_post_s + work.send_held_s - (work.last_send_s if self.holds else 0.0)
        own = own + received_s
        link = work.sends_s - work.last_send_s
        if fill is not None:
            own = own + np.maximum(0.0, fill - work.first_qkv_s)
            link = link + fill
        return np.maximum(own, link) + self.chain.drain_s(rank, end)

    def _issued_or_loaded_s(self) -> float:
        """Launches of the last rank, all layers; or what it loads of the cached prefix, one layer after another."""
        last = self.chain.num_ranks - 1
        ops = [op for _, op in build_program(self.scenario, self.strategy, [np.ones(1)] * (last + 1)).ops(last)]
        loads = [op for op in ops if isinstance(op, Load)]
        loaded_s = sum(op.seconds.item() for number, op in enumerate(loads) if number not in op.held)
        return max(float(sum(float(np.sum(op.host_s)) for op in ops)), loaded_s)
