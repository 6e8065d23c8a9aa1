"""The batch executor of chains and stages on a bus: ranks that wait for messages, compute, and have one way out each.

A rank takes one wait after another, each for one message or several. What follows the n-th wait is known when it is
over: `t' = max(t + delay_s, floor_s)`, for the next wait and for each message. So an event on the bus concerns a lane
and a receiver, and a few array operations take all partitions of a batch through their next events. Programs that do
more (collectives, messages that hold their sender) have the graph of kvrsim.executors.bus.flows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvrsim.executors.steps import Message, Segment, Step, Steps
from kvrsim.hardware import Cluster
from kvrsim.program import Array, Program, Recv

Index = npt.NDArray[np.intp]
Value = Array | float


def run_lanes(program: Program, cluster: Cluster) -> Array | None:
    """When each rank has finished, seconds, shape (num_ranks, B), on a bus; None: the program does more."""
    ranks = [found for steps in Steps(cluster).of(program)[0].steps if (found := _Rank.of(steps)) is not None]
    if len(ranks) < program.num_ranks or not any(rank.messages for rank in ranks):
        return None
    return _Run(ranks, program.num_rows, cluster.path(0, 1).latency_s).finish_s()


@dataclass(frozen=True, slots=True)
class _Later:
    """`t' = max(t + delay_s, floor_s)`."""

    delay_s: Value = 0.0
    floor_s: Value = -np.inf


@dataclass(slots=True)
class _Rank:
    """What a rank waits for, and what it does before each wait and after the last."""

    parts: list[_Later] = field(default_factory=list)  # one more than waits
    waits: list[list[int]] = field(default_factory=list)  # the senders of each
    messages: list[Message] = field(default_factory=list)
    posts: list[_Later] = field(default_factory=list)  # of each message, from the end of the wait before it
    after: list[int] = field(default_factory=list)  # how many waits come before each message

    @classmethod
    def of(cls, steps: Sequence[Step]) -> _Rank | None:
        """None: it does more than to compute, to receive, and to send one message after another."""
        self, now, host_s = cls(), _Later(), 0.0
        waits = lags = False  # whether nothing was done since the last wait; lags: as of RankState
        for step in steps:
            if isinstance(step, Segment):
                floor_s: Value = now.floor_s + step.device_s
                if step.host_floor_s is not None:
                    floor_s = np.maximum(floor_s, step.host_floor_s + host_s)
                now = _Later(now.delay_s + step.device_s, floor_s)
                lags = False
            elif isinstance(step, Message) and not step.rendezvous:
                lags = lags or step.host_s > 0
                floor_s = np.maximum(now.floor_s, host_s + step.host_s) if lags else now.floor_s
                self.messages.append(step)
                self.posts.append(_Later(now.delay_s, floor_s))
                self.after.append(len(self.waits))
            elif isinstance(step, Recv) and not step.rendezvous:
                lags = lags or step.host_s > 0
                if waits:
                    self.waits[-1].append(step.src)
                else:
                    self.parts.append(now)
                    self.waits.append([step.src])
                    now = _Later()
            else:
                return None
            waits = isinstance(step, Recv)
            host_s += step.host_s
        self.parts.append(now)
        ways = {None if message.in_turn else message.dst for message in self.messages}
        return self if len(ways) <= 1 else None


class _Tables:
    """All ranks' messages and parts, shapes (number, ranks) and (number, ranks, B)."""

    def __init__(self, ranks: Sequence[_Rank], num_rows: int) -> None:
        num_waits = max(len(one.waits) for one in ranks)
        shape = max(len(one.messages) for one in ranks) + 1, len(ranks)
        self.never = num_waits + 1  # of waits: one that no message asks for
        self.after, self.receiver, self.wait = np.full(shape, self.never), np.zeros(shape, int), np.zeros(shape, int)
        self.missing = np.full((num_waits + 1, len(ranks)), -1)
        self.post_s, self.busy_s, self.part_s = (
            np.zeros((number, len(ranks), num_rows)) for number in (shape[0], shape[0], num_waits + 1)
        )
        post_floor_s, part_floor_s = np.full_like(self.post_s, -np.inf), np.full_like(self.part_s, -np.inf)
        sent: dict[tuple[int, int], list[int]] = {}  # numbers of the messages of each sender to each receiver
        for rank, one in enumerate(ranks):
            for number, (message, post) in enumerate(zip(one.messages, one.posts, strict=True)):
                sent.setdefault((rank, message.dst), []).append(number)
                self.after[number, rank], self.receiver[number, rank] = one.after[number], message.dst
                self.post_s[number, rank], post_floor_s[number, rank] = post.delay_s, post.floor_s
                self.busy_s[number, rank] = message.link_s
            for number, part in enumerate(one.parts):
                self.part_s[number, rank], part_floor_s[number, rank] = part.delay_s, part.floor_s
        for rank, one in enumerate(ranks):
            for number, sources in enumerate(one.waits):
                self.missing[number, rank] = len(sources)
                for src in sources:
                    assert sent.get((src, rank)), "the program deadlocks: a message is received that nobody sends"
                    self.wait[sent[src, rank].pop(0), src] = number
        assert not any(sent.values()), "a message that nobody receives"
        least_s = np.cumsum(self.part_s, axis=0)  # before which no part can end
        begun_s = np.concatenate([np.zeros_like(least_s[:1]), least_s, np.zeros_like(least_s[:1])])
        posted_s = begun_s[self.after, np.arange(len(ranks))] + self.post_s
        self.part_floor_s = None if (part_floor_s <= least_s).all() else part_floor_s.ravel()
        self.post_floor_s = None if (post_floor_s <= posted_s).all() else post_floor_s.ravel()


class _Run:
    """One evaluation. Ranks and partitions are numbered together, as rank times B plus partition: places."""

    def __init__(self, ranks: Sequence[_Rank], num_rows: int, latency_s: float) -> None:
        tables = self.tables = _Tables(ranks, num_rows)
        self.num_ranks, self.num_rows, self.latency_s = len(ranks), num_rows, latency_s
        size = self.size = len(ranks) * num_rows
        self.after, self.receiver, self.wait = tables.after.ravel(), tables.receiver.ravel(), tables.wait.ravel()
        self.post_s, self.busy_s, self.part_s = tables.post_s.ravel(), tables.busy_s.ravel(), tables.part_s.ravel()
        self.rank_of, self.row_of = np.divmod(np.arange(size), num_rows)
        self.alone = bool(tables.missing.max() == 1)  # every wait is for one message
        self.missing = np.repeat(tables.missing, num_rows)
        self.there_s = np.full(self.missing.size, -np.inf)  # by wait and place: the last message so far
        self.over_s = np.full((tables.never + 1) * size, np.inf)  # by how many waits came before, and place
        self.over_s[:size] = 0.0
        self.number, self.current = np.zeros((2, size), dtype=np.intp)  # of the next message, and of the wait
        self.ready_s = self._done(np.arange(size), self.over_s[:size])
        self.enters_s, self.leaves_at = np.full((2, size), np.inf)  # by lane: the next flow enters; the flow leaves
        self.enters_s[:] = self._next_s(np.arange(size), self.number)

    def finish_s(self) -> Array:
        """Every partition from event to event until no message is left."""
        shape = self.num_ranks, self.num_rows
        enters, leaves = self.enters_s.reshape(shape), self.leaves_at.reshape(shape)
        now_s, served_s = np.zeros(self.num_rows), np.zeros(self.num_rows)
        share = np.ones(self.num_rows)
        while True:
            enter_s, leave_at = np.minimum.reduce(enters), np.minimum.reduce(leaves)
            leave_s = np.maximum(now_s, now_s + (leave_at - served_s) * share)
            next_s = np.minimum(enter_s, leave_s)
            done = np.isinf(next_s)
            if done.any():
                if done.all():
                    break
                next_s = np.where(done, now_s, next_s)
            served_s += (next_s - now_s) / share
            np.copyto(served_s, np.maximum(served_s, leave_at), where=(leave_s <= enter_s) & ~done)
            now_s = next_s
            places = np.flatnonzero(leaves <= served_s)
            if places.size:
                self._leave(places, now_s.take(self.row_of.take(places)))
            places = np.flatnonzero(enters <= now_s)
            if places.size:
                busy_s = self.busy_s.take(self.number.take(places) * self.size + places)
                self.leaves_at[places] = served_s.take(self.row_of.take(places)) + busy_s
                self.enters_s[places] = np.inf
            share = np.maximum(np.add.reduce(leaves < np.inf), 1.0)
        assert ((self.tables.missing >= 0).sum(axis=0) == self.current.reshape(shape).T).all(), "the program deadlocks"
        return self.ready_s.reshape(shape)

    def _leave(self, places: Index, now_s: Array) -> None:
        """Messages of these lanes have left: the next ones may enter, and receivers may go on."""
        number = self.number.take(places)
        message = number * self.num_ranks + self.rank_of.take(places)
        number += 1
        self.number[places] = number
        self.leaves_at[places] = np.inf
        self.enters_s[places] = np.maximum(self._next_s(places, number), now_s)
        receivers = self.receiver.take(message) * self.num_rows + self.row_of.take(places)
        waits, there_s = self.wait.take(message), now_s + self.latency_s
        if not self.alone:
            at = waits * self.size + receivers
            np.maximum.at(self.there_s, at, there_s)
            np.subtract.at(self.missing, at, 1)
            over = (self.missing.take(at) == 0) & (self.current.take(receivers) == waits)
            receivers, waits, there_s = receivers[over], waits[over], self.there_s.take(at[over])
        while receivers.size:
            self._go_on(receivers, waits, there_s)
            if self.alone:
                return
            waits = waits + 1
            at = waits * self.size + receivers
            over = self.missing.take(at) == 0
            receivers, waits, there_s = receivers[over], waits[over], self.there_s.take(at[over])

    def _go_on(self, places: Index, waits: Index, there_s: Array) -> None:
        """The waits of these ranks are over."""
        over_s = np.maximum(there_s, self.ready_s.take(places))
        waits = waits + 1
        at = waits * self.size + places
        self.over_s[at] = over_s
        self.current[places] = waits
        self.ready_s[places] = self._done(at, over_s)
        enters_s = self.enters_s.take(places)
        idle = np.isinf(enters_s) & np.isinf(self.leaves_at.take(places))
        self.enters_s[places] = np.where(idle, self._next_s(places, self.number.take(places)), enters_s)

    def _done(self, at: Index, begin_s: Array) -> Array:
        """When parts end that begin then; `at`: the waits before each times ranks times B, plus place."""
        end_s = begin_s + self.part_s.take(at)
        floor_s = self.tables.part_floor_s
        return end_s if floor_s is None else np.maximum(end_s, floor_s.take(at))

    def _next_s(self, places: Index, number: Index) -> Array:
        """When these messages of the lanes may enter; infinite: the wait before is not over, or there is none."""
        after = self.after.take(number * self.num_ranks + self.rank_of.take(places))
        at = number * self.size + places
        ready_s = self.over_s.take(after * self.size + places) + self.post_s.take(at)
        floor_s = self.tables.post_floor_s
        return ready_s if floor_s is None else np.maximum(ready_s, floor_s.take(at))
