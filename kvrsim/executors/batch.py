"""The batch executor: max-plus arithmetic over thousands of partitions at once, and over samples of noise.

The order in which messages match does not depend on durations, so a program is evaluated once, each rank as far as
its messages allow, with arrays in place of numbers: of shape (B,), or (B, samples) under noise. It holds on networks
where flows do not share bandwidth; where they do, see kvrsim.executors.bus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from kvrsim.executors.collectives import AllGatherEvaluator, AllToAllEvaluator, Edges, RingPassEvaluator
from kvrsim.executors.repeats import has_runs, repeat, runs
from kvrsim.executors.steps import Message, RankState, Segment, Step, Steps
from kvrsim.hardware import Cluster
from kvrsim.program import AllGather, AllToAll, Array, Load, Program, Recv, RingPass

if TYPE_CHECKING:  # noise costs the start of a plan that has none
    from kvrsim.noise import NoiseDraw

Edge = tuple[int, int]
T = TypeVar("T")
_NEVER = -np.inf  # busy


@dataclass(frozen=True, slots=True)
class Start:
    """When each rank and each link is free at the start, seconds, arrays of shape (B,)."""

    ranks_s: Sequence[Array]
    links_s: dict[Edge, Array] = field(default_factory=dict)  # those that are free at once are absent


def run_batch(program: Program, cluster: Cluster, draw: NoiseDraw | None = None) -> Array:
    """When each rank has finished, seconds, shape (num_ranks, B), or (num_ranks, B, samples) under a draw of noise.

    TTFT is the last rank's.
    """
    return BatchEvaluator(program, cluster, draw=draw).finish_s


class BatchEvaluator:
    """One evaluation of a program; messages in flight are the state besides the ranks.

    `finish_s` is when each rank has finished, shape (num_ranks, B), or (num_ranks, B, samples). `links_s` is when each
    link is free that messages have used; one from a rank to itself is the one way out of messages that leave in turn.

    draw: samples of noise, the same for every partition. start: for a batch that begins at different times.
    """

    def __init__(
        self, program: Program, cluster: Cluster, *, draw: NoiseDraw | None = None, start: Start | None = None
    ) -> None:
        assert not cluster.shares_bandwidth, "flows that share a bandwidth need run_shared"
        assert draw is None or start is None, "noise begins at 0"
        self.cluster, self.draw = cluster, draw
        self.shape: tuple[int, ...] = (program.num_rows,)
        if draw is not None:
            self.shape = (*self.shape, draw.num_samples)
        elif start is not None:
            self.shape = np.broadcast_shapes(self.shape, start.ranks_s[0].shape)
        prepared = Steps(cluster, under_noise=draw is not None, jitters=draw is not None and draw.jitters_compute)
        self.wide = prepared.wide
        begins: Sequence[Array | float] = [0.0] * program.num_ranks if start is None else start.ranks_s
        self.ranks = [RankState(begin_s, np.array(np.broadcast_to(begin_s, self.shape))) for begin_s in begins]
        free = {} if start is None else start.links_s
        self.links_s: dict[Edge, Array] = {edge: np.broadcast_to(free_s, self.shape) for edge, free_s in free.items()}
        self.never = np.full(self.shape, _NEVER)
        self.num_messages: dict[Edge, int] = {}
        self.arrivals: dict[Edge, deque[Array]] = {}
        self.offers: dict[Edge, Message] = {}  # rendezvous whose receiver has not come yet
        self.taken: set[Edge] = set()  # rendezvous done, whose sender may go on
        self.prepared: dict[tuple[int, int], Any] = {}  # collectives, by the first rank and its operation
        self.edges: dict[tuple[range, int], Edges] = {}  # of ranks, by how many ranks further on
        self.scratch = np.empty(self.shape)
        repeats = draw is None and has_runs(program)
        for part in prepared.of(program, runs(program.layer_kind_index) if repeats else None):
            if part.times == 1:
                self.run_steps(part.steps)
            else:
                repeat(self, part.steps, part.times)
        self.finish_s = np.stack([rank.clock for rank in self.ranks])

    def run_steps(self, steps: Sequence[list[Step]]) -> None:
        """Take every rank to the end of its steps, together wherever all of a collective have come to it."""
        for rank, own in zip(self.ranks, steps, strict=True):
            rank.steps, rank.step = own, 0
        while True:
            before = self._progress()
            states = [self._advance(index, rank) for index, rank in enumerate(self.ranks)]
            if all(state == "done" for state in states):
                return
            groups = self._ready(states)
            for ranks in groups:
                self._collective(ranks)
            if not groups and self._progress() == before:
                raise AssertionError(f"the program deadlocks: {states}")

    def _ready(self, states: Sequence[str]) -> list[range]:
        """Ranks that have all come to a collective of theirs."""
        found, first = [], 0
        while first < len(states):
            ranks = range(first, first + 1)
            if states[first] == "collective":
                op = self.ranks[first].steps[self.ranks[first].step]
                ranks = op.members(first, len(states)) if isinstance(op, AllGather) else range(len(states))
                if ranks[0] == first and all(states[rank] == "collective" for rank in ranks):
                    found.append(ranks)
            first = ranks[-1] + 1
        return found

    def _progress(self) -> tuple[int, int, int]:
        """Another one wherever a rank has come further or has offered a message."""
        return sum(rank.step for rank in self.ranks), len(self.offers), len(self.taken)

    def _advance(self, index: int, rank: RankState) -> str:
        """Take one rank to its end ("done"), to a collective, or to where it lacks a message ("waits")."""
        while rank.step < len(rank.steps):
            step = rank.steps[rank.step]
            if isinstance(step, Segment):
                self._compute(index, rank, step)
            elif isinstance(step, Message):
                if not self._send(index, rank, step):
                    return "waits"
            elif isinstance(step, Recv):
                if not self._recv(index, rank, step):
                    return "waits"
            elif isinstance(step, Load):
                self._load(rank, step)
            else:
                return "collective"
            rank.step += 1
        return "done"

    def _compute(self, index: int, rank: RankState, segment: Segment) -> None:
        if self.draw is not None:
            self._compute_under_noise(index, rank, segment)
        else:
            rank.clock += segment.device_s
            if segment.host_floor_s is not None:
                np.add(segment.host_floor_s, rank.begin_s + rank.host_s, out=self.scratch)
                np.maximum(rank.clock, self.scratch, out=rank.clock)
        rank.host_s += segment.host_s
        rank.lags = False

    def _compute_under_noise(self, index: int, rank: RankState, segment: Segment) -> None:
        floor = segment.host_floor_s is not None
        begin_s = np.maximum(rank.clock, rank.host_s) if floor else rank.clock
        rank.clock = self._end_s(index, begin_s, segment.device_s) if segment.has_noise else begin_s + segment.device_s
        if floor:
            np.maximum(rank.clock, rank.host_s + segment.host_s, out=rank.clock)

    def _send(self, index: int, rank: RankState, message: Message) -> bool:
        """Put a message on its link; False where a rendezvous still waits for its receiver."""
        edge = (index, message.dst)
        if not message.rendezvous:
            way = (index, index) if message.in_turn else edge  # the rank's one way out, or the pair's own
            link = np.maximum(self.links_s.get(way, _NEVER), rank.issued(message.host_s))
            if self.draw is None:
                link += message.link_s
            else:
                link = self._left_s(edge, link, message.link_s)
            self.links_s[way] = link
            self.arrivals.setdefault(edge, deque()).append(link + message.latency_s)
            return True
        if edge in self.taken:
            self.taken.remove(edge)
            return True
        if edge not in self.offers:
            rank.clock = rank.issued(message.host_s)
            self.offers[edge] = message
        return False

    def _recv(self, index: int, rank: RankState, recv: Recv) -> bool:
        """Wait for a message; False where it is not on its way yet."""
        edge = (recv.src, index)
        if offer := self.offers.pop(edge, None):
            # Both streams have waited for every message before, so the link is free.
            sender = self.ranks[recv.src]
            np.maximum(sender.clock, rank.issued(recv.host_s), out=sender.clock)
            if self.draw is None:
                sender.clock += offer.link_s
            else:
                sender.clock = self._left_s(edge, sender.clock, offer.link_s)
            np.add(sender.clock, offer.latency_s, out=rank.clock)
            self.taken.add(edge)
            return True
        if queue := self.arrivals.get(edge):
            if recv.host_s:
                rank.host_s += recv.host_s
                rank.lags = True
            np.maximum(rank.clock, queue.popleft(), out=rank.clock)
            return True
        return False

    def _load(self, rank: RankState, load: Load) -> None:
        """Wait for a part of the cached prefix, which comes whatever the ranks do."""
        left_s = (rank.begin_s if rank.loaded_s is None else rank.loaded_s) + load.seconds
        np.maximum(rank.clock, left_s + load.latency_s, out=rank.clock)
        rank.loaded_s = left_s if load.ahead else rank.clock.copy()

    def _left_s(self, edge: Edge, start_s: Array, busy_s: Array) -> Array:
        """When a message that starts then has left, under noise."""
        assert self.draw is not None
        number = self.num_messages[edge] = self.num_messages.get(edge, -1) + 1
        return self.draw.message_end_s(*edge, number, start_s, busy_s)

    def _end_s(self, index: int, start_s: Array, device_s: Array) -> Array:
        """When a rank has done what it computes, under noise."""
        assert self.draw is not None
        rank = self.ranks[index]
        rank.num_computed += 1
        return self.draw.compute_end_s(index, rank.num_computed - 1, start_s, device_s)

    def sent_s(self, edges: Sequence[Edge], start_s: Array, busy_s: Array) -> Array:
        """When each rank's message over its edge has left; shapes (ranks, ...)."""
        if self.draw is None:
            return start_s + busy_s
        return np.stack([self._left_s(edge, start_s[index], busy_s[index]) for index, edge in enumerate(edges)])

    def computed_s(self, start_s: Array, device_s: Array) -> Array:
        """When each rank has done what it computes; shapes (num_ranks, ...)."""
        if self.draw is None:
            return start_s + device_s
        return np.stack([self._end_s(rank, start_s[rank], device_s[rank]) for rank in range(len(self.ranks))])

    def _collective(self, ranks: range) -> None:
        """The collective that these ranks have come to."""
        members = self.ranks[ranks[0] : ranks[-1] + 1]
        ops = [rank.steps[rank.step] for rank in members]
        assert len({type(op) for op in ops}) == 1, "the ranks have come to different collectives"
        if isinstance(ops[0], AllGather):
            clock = self._all_gather(cast(list[AllGather], ops), ranks)
        elif isinstance(ops[0], RingPass):
            clock = self._ring_pass(cast(list[RingPass], ops))
        else:
            clock = self._all_to_all(cast(list[AllToAll], ops))
        for rank, clock_s in zip(members, clock, strict=True):
            rank.clock[:] = clock_s
            rank.lags = False
            rank.step += 1

    def _all_gather(self, ops: list[AllGather], ranks: range) -> Array:
        edges = self._edges(1, ranks)
        gather = self._once(ops[0], lambda: AllGatherEvaluator.of(ops, edges, self.wide), ranks[0])
        start = np.stack([self.ranks[rank].issued(op.host_s) for rank, op in zip(ranks, ops, strict=True)])
        clock, link = gather.run(start, self._free_s(edges), self)
        self.links_s.update(zip(edges.pairs, link, strict=True))
        return clock

    def _ring_pass(self, ops: list[RingPass]) -> Array:
        edges = self._edges(1)
        ring = self._once(ops[0], lambda: RingPassEvaluator.of(ops, edges, self.wide))
        start = np.stack([rank.clock for rank in self.ranks])
        host = np.array([rank.begin_s + rank.host_s for rank in self.ranks])
        host = host.reshape(len(host), *[1] * (start.ndim - host.ndim), *host.shape[1:])
        for rank, op in zip(self.ranks, ops, strict=True):
            rank.host_s += sum(op.host_s)
        return ring.run(start, host, self._free_s(edges), self)

    def _all_to_all(self, ops: list[AllToAll]) -> Array:
        exchange = self._once(ops[0], lambda: AllToAllEvaluator.of(ops, self._edges, self.wide))
        start = np.stack([rank.issued(op.host_s) for rank, op in zip(self.ranks, ops, strict=True)])
        return exchange.run(start, self)

    def _once(self, op: object, make: Callable[[], T], first: int = 0) -> T:
        """A collective prepared at its first layer; `first`: the first rank that takes part."""
        key = first, id(op)
        if key not in self.prepared:
            self.prepared[key] = make()
        return cast(T, self.prepared[key])

    def _free_s(self, edges: Edges) -> Array:
        """When these links are free."""
        return np.array([self.links_s.get(edge, self.never) for edge in edges.pairs])

    def _edges(self, shift: int, ranks: range | None = None) -> Edges:
        """From each of the ranks (None: of all) to the one so many further on among them."""
        ranks = range(len(self.ranks)) if ranks is None else ranks
        if (ranks, shift) not in self.edges:
            self.edges[ranks, shift] = Edges.of(self.cluster, ranks, shift)
        return self.edges[ranks, shift]
