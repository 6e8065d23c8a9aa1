"""Prefix caches of groups: which leading tokens of a prompt a group has when the request begins, and in which memory.

Caches hold blocks of BLOCK_TOKENS tokens. A request that has begun uses the blocks of its whole sequence. When it ends,
they stay on the GPU, idle, in the memory that running requests leave free. If there are too many, the block that has
been idle longest leaves: to the memory of the host or, if that is full, for good. A store, if there is one, keeps the
sequences of all groups without limit. Blocks of host and store are loaded while the request's first step computes.

A request goes to the group with the fewest prompt tokens to compute before its first token, among the groups with at
most IMBALANCE times the requests of the least busy one, and IMBALANCE_REQUESTS more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvrsim.program import Array

BLOCK_TOKENS = 512  # tokens per block; also of Mooncake's hash_ids
IMBALANCE = 2  # with SGLang's router it is 1.5
IMBALANCE_REQUESTS = 4
ROUTING = (
    "a request goes to the group with the fewest prompt tokens to compute before its first token, among the groups"
    f" with at most {IMBALANCE} times the requests of the least busy one and {IMBALANCE_REQUESTS} more"
)
_BLOCKS_OF_A_COPY = 2**48  # numbers of blocks of a trace, which its copies do not share
Numbers = npt.NDArray[np.int64]
Tier = Literal["gpu", "host", "remote"]
TIERS: tuple[Tier, ...] = ("gpu", "host", "remote")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTiers:
    """The memories that keep the blocks of requests that have ended."""

    gpu: bool = True  # whether groups keep blocks at all
    host_bytes: float = 0.0  # memory of the host for each GPU
    host_bytes_per_s: float = np.inf  # rate at which a GPU loads from it
    remote_bytes_per_s: float | None = None  # rate at which a GPU loads from the store; None: there is no store


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Turns of sessions, and the blocks of their sequences; one entry per request, turns of a session in order.

    A request without a session is a session of one turn.
    """

    session: Numbers  # number of the session
    think_s: Array  # seconds from the end of the answer before to this turn; it never arrives earlier than its arrival
    reusable: Numbers  # leading tokens of the prompt that earlier requests have computed, at most
    blocks: Sequence[Sequence[int]]  # numbers of the blocks of the sequence, in order; equal blocks hold equal prefixes

    def select(self, index: npt.NDArray[Any] | slice) -> Turns:
        """The turns of the requests with these indices."""
        numbers = np.arange(len(self.session))[index]
        return replace(
            self,
            session=self.session[index],
            think_s=self.think_s[index],
            reusable=self.reusable[index],
            blocks=[self.blocks[number] for number in numbers],
        )

    def faster(self, factor: float) -> Turns:
        """The same turns with shorter pauses."""
        return replace(self, think_s=self.think_s / factor)

    def renumbered(self, copy: Numbers) -> Turns:
        """The turns of copies of sessions, which are other sessions with other texts; copy: number of the copy."""
        sessions = int(self.session.max()) + 1
        blocks: list[Sequence[int]] = []
        for number, sequence in zip(copy.tolist(), self.blocks, strict=True):
            offset = number * _BLOCKS_OF_A_COPY
            if isinstance(sequence, range):
                blocks.append(range(sequence.start + offset, sequence.stop + offset))
            else:
                blocks.append([block + offset for block in sequence])
        return replace(self, session=self.session + sessions * copy, blocks=blocks)

    def numbers(self) -> Numbers:
        """Number of each turn in its session, from 1."""
        count: dict[int, int] = {}
        turns: list[int] = []
        for session in self.session.tolist():
            count[session] = count.get(session, 0) + 1
            turns.append(count[session])
        return np.array(turns, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixTraffic:
    """Turns on groups of one type, and the memories of these groups."""

    turns: Turns
    tiers: CacheTiers
    token_bytes: float  # bytes of a GPU for a token in the cache

    def select(self, index: npt.NDArray[Any]) -> PrefixTraffic:
        """The traffic of the requests with these indices."""
        return replace(self, turns=self.turns.select(index))


class _GroupCache:
    """Blocks of one group. The first of the idle ones has been idle longest."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}  # number of requests that use the block
        self.idle = OrderedDict[int, None]()
        self.host = OrderedDict[int, None]()
        self.pending = 0  # prompt tokens of waiting requests that the group has to compute
        self.turn = 0  # number of requests that had arrived when the last one came here

    def shrink(self, most_idle: int, most_host: int) -> None:
        """Let blocks leave until at most these numbers are idle on the GPU and in the memory of the host."""
        while len(self.idle) > most_idle:
            block, _ = self.idle.popitem(last=False)
            self.host[block] = None
        while len(self.host) > most_host:
            self.host.popitem(last=False)


class PrefixCaches:
    """The prefix caches of all groups in a simulation. The queue calls it when a request arrives, begins or ends."""

    def __init__(self, traffic: PrefixTraffic, context_len: Sequence[int], replicas: int) -> None:
        turns = traffic.turns
        count = len(context_len)
        self.context_len = context_len
        self.blocks = turns.blocks
        self.reusable: list[int] = turns.reusable.tolist()
        self.think_s: list[float] = turns.think_s.tolist()
        self.tiers = traffic.tiers
        self.token_bytes = traffic.token_bytes
        self.host_blocks = int(traffic.tiers.host_bytes / (BLOCK_TOKENS * self.token_bytes))
        self.groups = [_GroupCache() for _ in range(replicas)]
        self.remote = set[int]()
        self.arrived = 0  # number of requests
        self.hits: dict[Tier, list[int]] = {tier: [0] * count for tier in TIERS}  # tokens of each request, by memory
        self.pending = [0] * count  # prompt tokens that each request adds to its group until it begins
        self.next_turn: list[int | None] = [None] * count
        self.first_turns: list[int] = []
        last_turn: dict[int, int] = {}
        for request, session in enumerate(turns.session.tolist()):
            if session in last_turn:
                self.next_turn[last_turn[session]] = request
            else:
                self.first_turns.append(request)
            last_turn[session] = request

    def route(self, request: int, in_flight: Sequence[int]) -> int:
        """The group for a request that arrives; in_flight: requests of each group that have arrived and not ended."""
        most = IMBALANCE * min(in_flight) + IMBALANCE_REQUESTS
        costs: list[tuple[int, int, int, int, int]] = []
        for number, group in enumerate(self.groups):
            if in_flight[number] <= most:
                hits = self._hits(group, request)
                tokens = self.context_len[request] - hits["gpu"] - hits["host"]
                costs.append((group.pending + tokens, in_flight[number], group.turn, number, tokens))
        *_, number, tokens = min(costs)
        self.arrived += 1
        self.groups[number].turn = self.arrived
        self.groups[number].pending += tokens
        self.pending[request] = tokens
        return number

    def begin(self, request: int, number: int, free_bytes: float) -> tuple[int, float]:
        """Begin a request on a group; the tokens that need not be computed, and the seconds to load them.

        free_bytes: free memory of a GPU beside all running requests; this request counts as running.
        """
        group = self.groups[number]
        group.pending -= self.pending[request]
        hits = self._hits(group, request)
        for tier, tokens in hits.items():
            self.hits[tier][request] = tokens
        for block in self.blocks[request]:
            group.used[block] = group.used.get(block, 0) + 1
            group.idle.pop(block, None)
            group.host.pop(block, None)
        self._shrink(group, free_bytes)
        load_s = hits["host"] * self.token_bytes / self.tiers.host_bytes_per_s
        if self.tiers.remote_bytes_per_s is not None:
            load_s += hits["remote"] * self.token_bytes / self.tiers.remote_bytes_per_s
        return sum(hits.values()), load_s

    def end(self, request: int, number: int, free_bytes: float) -> None:
        """End a request: its blocks are idle; the last ones of the sequence leave first."""
        group = self.groups[number]
        for block in reversed(self.blocks[request]):
            group.used[block] -= 1
            if not group.used[block]:
                del group.used[block]
                group.idle[block] = None
        if self.tiers.remote_bytes_per_s is not None:
            self.remote.update(self.blocks[request])
        self._shrink(group, free_bytes)

    def _shrink(self, group: _GroupCache, free_bytes: float) -> None:
        most_idle = 0
        if self.tiers.gpu:
            most_idle = max(0, int(free_bytes / (BLOCK_TOKENS * self.token_bytes)))
        group.shrink(most_idle, self.host_blocks)

    def _hits(self, group: _GroupCache, request: int) -> dict[Tier, int]:
        """Tokens at the start of a prompt that a group has cached or can load, by memory."""
        hits: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        reusable = self.reusable[request]
        tokens = 0
        tier: Tier = "gpu"
        for block in self.blocks[request]:
            if tokens >= reusable:
                break
            if block in group.idle or block in group.used:
                tier = "gpu"
            elif block in group.host:
                tier = "host"
            elif block in self.remote:
                tier = "remote"
            else:
                break
            hits[tier] += BLOCK_TOKENS
            tokens += BLOCK_TOKENS
        hits[tier] -= max(0, tokens - reusable)  # the last block holds other tokens, too
        return hits
