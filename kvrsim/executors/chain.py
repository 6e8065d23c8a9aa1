"""The executor of KVR's chain: TTFTs of thousands of partitions by a recurrence, with all ranks in one array.

Ranks of a chain differ only in their neighbours: each rank projects, receives from the previous rank, appends, sends to
the next rank and computes the rest. So an operation is an array of shape (ranks, B), and no messages are matched.

At most one layer is evaluated with the hosts' issue times. If hosts then stay ahead of their devices, the times of all
further layers follow from those of the next layer:

- If messages overlap with computation, a rank waits only for the previous rank. All times are convex in the number of
  layers, so the latest of many paths to a time is one of the two extreme paths.
- If messages hold the streams, let m_i(l) be the start time of message i in layer l. Its sender is ready a constant
  time after message i - 1, its receiver a constant time after message i + 1 of the previous layer. So messages are the
  nodes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvrsim.execution import Execution
from kvrsim.executors.batch import rows_of, seconds_on
from kvrsim.executors.steady import ROUNDING
from kvrsim.hardware import Cluster, Path
from kvrsim.kernels.cost import CostModel
from kvrsim.program import (
    Array,
    Flags,
    Op,
    Recv,
    Send,
    host_s_of,
    slowed_by_pending_recv,
    slower,
    stream_s,
    with_senders,
)
from kvrsim.strategies.base import Step
from kvrsim.strategies.kv_runahead import KVR_S
from kvrsim.strategies.layers import before_step, embedding, has_prefill, last, last_is_alike, layer_ops, request


class Chain:
    """A chain of KV-Runahead with equal layers, prepared for any chunks."""

    def __init__(self, execution: Execution, cluster: Cluster, cost: CostModel | None = None) -> None:
        self.execution = execution
        self.cluster = cluster
        self.costs = execution.placed.layer_costs(cost)[execution.placed.share.layer_kind_index[0]]
        ranks = range(cluster.num_gpus)
        paths = [cluster.path(rank, rank + 1) for rank in ranks[:-1]]
        self.path_rows = rows_of(paths)
        self.latency_s = np.array([[path.latency_s] for path in paths])
        pending = execution.placed.pending_share
        self.pending: Array | None = None
        if pending:
            self.pending = np.full((len(ranks), 1), pending)
            self.pending[0] = 0.0
        self.sends = np.ones((len(ranks), 1))  # 0 for the last rank, which sends nothing
        self.sends[-1] = 0.0
        slowness = np.array([[execution.cluster.slowness(rank)] for rank in ranks])
        self.slowness: Array | None = None
        if (slowness != 1.0).any():
            self.slowness = slowness
        self.epilogue: tuple[Op, ...] | None = None
        if last_is_alike(execution.placed, self.costs.cost):
            any_tokens = np.ones(1)
            self.epilogue = last(execution.placed, any_tokens, any_tokens, self.costs.cost)

    @staticmethod
    def suits(execution: Execution, cluster: Cluster) -> bool:
        """Whether the program is a chain of KV-Runahead with equal layers on unshared links."""
        return (
            execution.strategy.layer is KVR_S.layer
            and not execution.strategy.is_pipeline
            and cluster.num_gpus > 1
            and not cluster.shares_bandwidth
            and execution.placed.chain_is_proven
            and execution.placed.prefix_access_plan.is_local
            and len(execution.placed.share.layer_kinds) == 1
            and execution.placed.share.layers[0].mixer is not None
            and has_prefill(execution.placed)
        )

    def finish_s(self, chunks: Array, *, last_only: bool = False) -> tuple[Array, Flags]:
        """Finish time of each rank, shape (ranks, B), and whether it is valid for each partition, shape (B,).

        It is not valid if a host delays its device after the first layer. chunks: tokens, shape (ranks, B).
        last_only: only TTFT, shape (1, B).
        """
        return _ChainRun(self, chunks).finish_s(last_only=last_only)


class _ChainRun:
    """State of all ranks of a chain; arrays of seconds have an axis of ranks and an axis of partitions.

    A layer is `before`, a receive, `append`, a send and `rest`. The first rank receives nothing; the last rank sends
    nothing.
    """

    def __init__(self, chain: Chain, chunks: Array) -> None:
        scenario = chain.execution.placed
        cost = chain.costs.cost
        starts = np.full_like(chunks, scenario.request.cached_prefix)
        for rank in range(1, len(chunks)):
            np.add(starts[rank - 1], chunks[rank - 1], out=starts[rank])
        ends = starts + chunks
        ranks = Step.of_all_ranks(chain.costs, chunks, starts, chain.execution.strategy.query_blocks)
        layer = tuple(layer_ops(chain.execution.strategy, ranks, 1))  # rank 1 has neighbours on both sides
        layer = with_senders(layer, chain.sends)
        if chain.pending is not None:
            layer = slowed_by_pending_recv(layer, chain.pending)
        prologue = (
            *request(scenario, chunks),
            *embedding(scenario, chunks, cost),
            *before_step(scenario, chunks, ends, cost),
        )
        epilogue = chain.epilogue or last(scenario, chunks[-1], ends[-1], cost)
        if chain.slowness is not None:
            prologue = slower(prologue, chain.slowness)
            layer = slower(layer, chain.slowness)
            epilogue = slower(epilogue, chain.slowness[-1])
        recv_at = next(index for index, op in enumerate(layer) if isinstance(op, Recv))
        send_at = next(index for index, op in enumerate(layer) if isinstance(op, Send))
        recv = layer[recv_at]
        send = layer[send_at]
        assert isinstance(recv, Recv)
        assert isinstance(send, Send)
        self.prologue = prologue
        self.epilogue = epilogue
        self.before = layer[:recv_at]
        self.append = layer[recv_at + 1 : send_at]
        self.rest = layer[send_at + 1 :]
        self.before_s = _total_s(self.before)
        self.append_s = _total_s(self.append)
        self.rest_s = _total_s(self.rest)
        self.recv_host_s = recv.host_s
        self.send_host_s = send.host_s
        self.overlaps = not send.rendezvous
        self.layer_host_s = sum(map(host_s_of, layer))
        self.link_s = seconds_on(chain.path_rows, Path.busy_s, send.nbytes[:-1])
        self.latency_s = chain.latency_s
        self.num_layers = len(scenario.share.layer_kind_index)
        self.clock = np.zeros(self.append_s.shape)  # device time of each rank
        self.host_s = np.zeros((len(chunks), 1))  # time at which each rank's host has issued all operations so far
        # Start time of each message; if messages overlap with computation, its departure time.
        self.moved_s = np.full(self.link_s.shape, -np.inf)

    def finish_s(self, *, last_only: bool) -> tuple[Array, Flags]:
        """See Chain.finish_s."""
        self._run(self.prologue)
        self._run(self.before)
        layers = self.num_layers  # remaining layers, each counted from its receive
        holds = self._device_leads()
        if not holds.all():
            self._pass_on(as_issued=True)
            self._run(self.rest)
            layers -= 1
            holds = np.ones(1, dtype=bool)
            if layers:
                self._run(self.before)
                holds = self._device_leads()
        finish_s = self.clock
        if layers:
            finish_s = self._after(layers, last_only=last_only)
        elif last_only:
            finish_s = self.clock[-1:]
        last_s = finish_s[-1]
        host_s = self.host_s[-1]
        for op in self.epilogue:
            host_s = host_s + host_s_of(op)
            np.maximum(last_s + stream_s(op), host_s, out=last_s)
        return finish_s, np.broadcast_to(holds, last_s.shape)

    def _run(self, ops: Sequence[Op]) -> None:
        """Run all ranks through operations without waits."""
        for op in ops:
            self.clock += stream_s(op)
            if host_s := host_s_of(op):
                self.host_s += host_s
                np.maximum(self.clock, self.host_s, out=self.clock)

    def _pass_on(self, *, as_issued: bool) -> None:
        """Run all ranks from their receive until their message has left their streams.

        as_issued: whether hosts may delay their devices; if not, hosts stay ahead.
        """
        for rank, (link_s, latency_s) in enumerate(zip(self.link_s, self.latency_s, strict=True)):
            sender = self.clock[rank]
            receiver = self.clock[rank + 1]
            moved_s = self.moved_s[rank]
            self._append(rank, as_issued=as_issued)
            if as_issued:
                self._issue(rank, self.send_host_s)
                self._issue(rank + 1, self.recv_host_s)
            if self.overlaps:
                np.maximum(moved_s, sender, out=moved_s)
                moved_s += link_s
                np.maximum(receiver, moved_s + latency_s, out=receiver)
            else:
                np.maximum(sender, receiver, out=moved_s)
                np.add(moved_s, link_s, out=sender)
                np.add(sender, latency_s, out=receiver)
        self._append(len(self.clock) - 1, as_issued=as_issued)

    def _append(self, rank: int, *, as_issued: bool) -> None:
        """Run one rank from its receive to its send."""
        if not as_issued:
            self.clock[rank] += self.append_s[rank]
            return
        for op in self.append:
            self.clock[rank] += stream_s(op)[rank]
            self._issue(rank, host_s_of(op))

    def _issue(self, rank: int, host_s: float) -> None:
        """Let a rank wait until its host has issued the operation."""
        if host_s:
            self.host_s[rank] += host_s
            np.maximum(self.clock[rank], self.host_s[rank], out=self.clock[rank])

    def _device_leads(self) -> Flags:
        """Whether hosts stay ahead of their devices after the receive: per partition, or one value for all.

        Messages only delay the devices. The value for all comes from the least times of all partitions, if it is True.
        """
        if not self.layer_host_s:
            return np.ones(1, dtype=bool)
        leads = self._keeps_ahead(lambda seconds: seconds.min(axis=1, keepdims=True))
        if leads.all():
            return leads
        return self._keeps_ahead(lambda seconds: seconds)

    def _keeps_ahead(self, least: Callable[[Array], Array]) -> Flags:
        """Whether hosts stay ahead of their devices, by the `least` of each rank's seconds; shape (1,) or (B,)."""
        begun_s = least(self.clock)
        gains_s = [
            np.full_like(begun_s, -self.recv_host_s),
            *(least(stream_s(op)) - host_s_of(op) for op in self.append),
            np.full_like(begun_s, -self.send_host_s),
            *(least(stream_s(op)) - host_s_of(op) for op in (*self.rest, *self.before)),
        ]
        ahead_s = np.cumsum(gains_s, axis=0)  # lead of the host after each operation, relative to the receive
        leads = (ahead_s.min(axis=0) >= self.host_s - begun_s) & (ahead_s[-1] >= 0)
        return np.asarray(leads.all(axis=0))

    def _after(self, layers: int, *, last_only: bool) -> Array:
        """End of each rank, or only of the last rank, `layers` layers later, counted from the receive."""
        self._pass_on(as_issued=False)
        if self.overlaps:
            finish_s = self._after_overlap(layers - 1, last_only=last_only)
        else:
            finish_s = self._after_rendezvous(layers - 1, last_only=last_only)
        finish_s += self.rest_s[-len(finish_s) :]
        issued_s = layers * (self.layer_host_s - self.send_host_s) - sum(map(host_s_of, self.before))
        self.host_s[-1] += issued_s
        return finish_s

    def _after_overlap(self, more: int, *, last_only: bool) -> Array:
        """Time at which ranks have appended, `more` layers later; every time is convex in the number of layers."""
        layer_s = self.before_s + self.append_s + self.rest_s
        # without any wait
        alone_s = self.clock + more * layer_s
        free_s = self.moved_s + more * self.link_s
        on_s = self.latency_s + self.append_s[1:]  # from the end of a message to the end of its append
        for rank, link_s in enumerate(self.link_s):
            left_s = np.maximum(alone_s[rank] + link_s, free_s[rank])
            left_s += on_s[rank]
            np.maximum(alone_s[rank + 1], left_s, out=alone_s[rank + 1])
        if last_only:
            return alone_s[-1:]
        return alone_s

    def _after_rendezvous(self, more: int, *, last_only: bool) -> Array:
        """Time at which ranks start `rest`, `more` layers later; messages wait for neighbours on both sides."""
        around_s = self.before_s + self.rest_s
        passed_s = self.link_s + self.latency_s
        on = np.empty_like(passed_s)
        back = np.empty_like(passed_s)
        np.add(passed_s[:-1], self.append_s[1:-1], out=on[1:])
        np.add(self.link_s[1:], around_s[1:-1], out=back[:-1])
        # Seconds from layer to layer of the first rank, without waits for the other ranks.
        on[0] = self.link_s[0] + around_s[0] + self.append_s[0]
        last_s = passed_s[-1] + self.append_s[-1]
        # Seconds from layer to layer of the last rank, without waits for the other ranks.
        back[-1] = last_s + around_s[-1]
        if last_only and more >= 2 * len(self.moved_s):
            return np.asarray(last_of_row(self.moved_s, on, back, more) + last_s)[None]
        moved_s = row_after(self.moved_s, on, back, more)
        if last_only:
            return np.asarray(moved_s[-1:] + last_s)
        return np.concatenate([moved_s + self.link_s, moved_s[-1:] + last_s])


def row_after(x: Array, on: Array, back: Array, periods: int) -> Array:
    """Nodes of a row after `periods` periods: `x_i(l) = max(x_(i-1)(l) + on_i, x_(i+1)(l-1) + back_i)`.

    on: seconds from the previous node to a node, in the same period. back: seconds from the next node to a node, in
    which a period passes. At the ends, `on_0` and the last `back` are loops from a node to itself, of one period. All
    arrays have the shape (nodes, B).
    The order is by anti-diagonals: step s has period l of every node i with s = i + 2 l; these do not depend on each
    other.
    """
    nodes = len(x)
    row = np.concatenate([x[:1], x, x[-1:]])  # both ends are repeated
    from_previous = np.empty_like(x)
    from_next = np.empty_like(x)
    for step_number in range(2, nodes + 2 * periods):
        first = max(step_number - 2 * periods, step_number % 2)
        now = slice(first, min(nodes, step_number - 1), 2)
        size = len(range(nodes)[now])
        np.add(row[:-2][now], on[now], out=from_previous[:size])
        np.add(row[2:][now], back[now], out=from_next[:size])
        np.maximum(from_previous[:size], from_next[:size], out=row[1:-1][now])
        row[0] = row[1]
        row[-1] = row[-2]
    return row[1:-1]


def last_of_row(x: Array, on: Array, back: Array, periods: int) -> Array:
    """The last node of row_after, after at least twice as many periods as there are nodes.

    On every way back to a node, each neighbour on the way takes one period. The longest way goes to the slowest loop
    that it meets, repeats this loop, and goes on; it passes other loops no more often than necessary.
    x: nodes after a period, so that each node is at least the previous node plus `on`. on, back: as in row_after.
    """
    loops = np.empty_like(back)  # seconds of the way from a node to the next one and back, or of the loops at the ends
    np.add(back[:-1], on[1:], out=loops[:-1])
    loops[-1] = back[-1]
    np.maximum(loops[0], on[0], out=loops[0])
    begun = x
    if (x[1:] > (1.0 + ROUNDING) * (x[:-1] + on[1:])).any():  # else a start at the previous node is as good
        to_first = np.zeros_like(x)  # seconds from each node back to the first one
        np.cumsum(back[:-1], axis=0, out=to_first[1:])
        far = x + to_first
        begun = np.full_like(x, -np.inf)
        # A way from a later node takes one period per neighbour that it passes; the loop has these periods less.
        for further in reversed(range(len(x))):
            count = len(x) - further
            begun[:count] -= loops[:count]
            np.maximum(begun[:count], far[further:], out=begun[:count])
        begun -= to_first
    stayed = begun + periods * loops  # times of ways that repeat the loop of one node in all periods
    latest: Array = stayed[0]
    for index in range(1, len(x)):
        latest = np.maximum(latest + on[index], stayed[index])
    return latest


def _total_s(ops: Sequence[Op]) -> Array:
    first, *others = map(stream_s, ops)
    return np.asarray(sum(others, first))
