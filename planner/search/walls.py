"""Walls: ends of chunks that prove how long a KVR chain takes. planner/search/bound.py explains the proof."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrsim.program import Array, Flags
from planner.search.work import Chain, settled

PRECISION = 2.0**-12  # of a chunk
_NEARLY, _ROUNDING = 0.999, 1e-9  # of a limit, which proves a wall nearly as well; of the context
FIRST, AGAIN = (0.25, 32), (0.05, 12)  # of a chunk, to either side, in which the one for a limit is sought; rounds


@dataclass(frozen=True, slots=True)
class Waits:
    """What walls prove of the waits for other ranks."""

    fills_s: Array  # the least before each rank's first append, shape (ranks, columns)
    received_s: Array  # the least that received messages hold each sender's stream, shape (senders, columns)

    def where(self, kept: Flags, others: Waits) -> Waits:
        """These in the columns that are kept, the others' elsewhere."""
        fills_s = np.where(kept, self.fills_s, others.fills_s)
        return Waits(fills_s, np.where(kept, self.received_s, others.received_s))


@dataclass(frozen=True, slots=True)
class Walls:
    """Walls for a limit, several columns of them, and what they need up to the last rank's append."""

    chunks: Array  # of all senders but the first, shape (senders - 1, columns)
    ends: Array  # shape (senders, columns)
    first_s: Array  # needed by the first sender; 0 where nothing is proven of the walls before
    others_s: Array  # the least that is needed by any other, of those that prove the walls
    free: Array  # share of the walls that are as far to the left as they may be


class WalledChain:
    """The senders of a chain, all ranks but the last, between walls."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.senders = chain, range(chain.num_ranks - 1)
        self.holds = not chain.scenario.sends_overlap
        self.first_start = float(chain.scenario.request.cached_prefix)
        self.total = float(chain.scenario.request.context_len)
        self.floors = self.first_start + np.arange(1.0, chain.num_ranks)[:, None]  # a token for every rank

    def built(
        self, last_end: Array, limit: Array, chunks: Array, waits: Waits | None, within: tuple[float, int]
    ) -> Walls:
        """Walls from chunks of all senders but the first that take these just beyond the limit; what they need."""

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
            chunks = settled(needed_s, limit, chunks, room, PRECISION, *within)[1]
        ends = ends_of(chunks)
        starts = np.concatenate([np.full_like(ends[:1], self.first_start), ends[:-1]])
        each_s = self._needed_s(0, starts[:, None], ends, waits)[:, 0]
        free = ends[:-1] <= self.floors[:-1] + _ROUNDING * self.total  # to begin so early needs no proof
        holds = np.logical_and.accumulate((free | (each_s[1:] >= limit * _NEARLY))[::-1], axis=0)[::-1]
        others_s = np.where(holds & ~free, each_s[1:], np.inf).min(axis=0, initial=np.inf)
        ends[:-1] = np.where(holds, ends[:-1], self.floors[:-1])
        first_s = np.where(holds.all(axis=0), each_s[0], 0.0)
        none = (ends[:-1] <= self.floors[:-1]).mean(axis=0) if len(free) else np.zeros(1)
        return Walls(chunks, ends, first_s, others_s, none)

    def waits(self, ends: Array) -> Waits:
        """What is proven of the waits, if ends are no earlier than these."""
        return Waits(self._fills(ends), self._received_s(ends))

    def bus_s(self, ends: Array) -> Array:
        """All messages over the one bus, each at its least."""
        return np.asarray(self.chain.work(self.senders, np.ones_like(ends), ends - 1.0).sends_s.sum(axis=0))

    def _received_s(self, ends: Array) -> Array:
        """The least that received messages hold each sender's stream, if starts are no earlier than these ends."""
        starts = np.concatenate([np.full_like(ends[:1], self.first_start), ends[:-1]])
        return self.chain.work(self.senders, np.ones_like(starts), starts).recv_held_s + np.zeros_like(ends)

    def _fills(self, ends: Array) -> Array:
        """For each rank, the least before its first append, if ends are no earlier than these."""
        message_s = self.chain.first_message_s(self.senders, ends)
        hops_s = message_s + self.chain.first_append_s(ends)
        reached_s = self.chain.first_message_ready_s(ends[0] - self.first_start) + np.cumsum(hops_s, axis=0) - hops_s
        # A received message that holds the stream is counted as the receiver's work already.
        fills = reached_s if self.holds else reached_s + message_s
        return np.concatenate([np.zeros_like(fills[:1]), fills])

    def _needed_s(self, first: int, starts: Array, walls: Array, waits: Waits | None) -> Array:
        """Conditions 1 and 2 of the senders from `first` on, up to the last rank's append.

        starts: shape (senders, K, columns); the others: (senders, columns), of all senders.
        """
        ranks, ends = self.senders[first:], walls[first:, None]
        chunks = np.maximum(ends - starts, 1.0)
        work = self.chain.work(ranks, chunks, ends - chunks)
        own = work.compute_s - work.last_post_s + work.send_held_s - (work.last_send_s if self.holds else 0.0)
        link = work.sends_s - work.last_send_s
        if waits is not None:
            fill = waits.fills_s[first:-1, None]
            own = own + waits.received_s[first:, None] + np.maximum(0.0, fill - work.first_qkv_s)
            link = link + fill
        drain_s = np.cumsum(self.chain.last_hop_s(self.senders, walls)[::-1], axis=0)[::-1]
        return np.maximum(own, link) + drain_s[first:, None]
