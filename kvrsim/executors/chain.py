"""KVR's chain by its direct recurrence: the TTFT of thousands of partitions, with all ranks in one array.

Ranks of a chain differ in nothing but their neighbours: each projects, receives from the rank before, appends, sends to
the next rank and computes the rest. So an operation is an array of shape (ranks, B), and nothing is matched or traced.

At most one layer is walked as the hosts issue it. Where the devices then lead, all other layers are one step (the laws
are in maxplus.py):

- Messages that hold the streams: let m_i(l) be when message i begins to move in layer l. The sender has come to it a
  constant after message i - 1, the receiver a constant after message i + 1 of the layer before: nodes in a row.
- Messages that overlap: a rank waits for the rank before, and that one for nobody behind it. All nodes are convex.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from kvrsim.executors.maxplus import last_of_row, row_after
from kvrsim.hardware.cluster import Cluster
from kvrsim.hardware.links import Path
from kvrsim.program.chain import ChainProgram
from kvrsim.program.operations import Array, Collective, Compute, Flags, Op, Recv, Send


def chain_finish_s(program: ChainProgram, cluster: Cluster, *, whole: bool = True) -> tuple[Array, Flags]:
    """When each rank has finished, shape (ranks, B), and in which partitions that holds, shape (B,).

    It does not hold where a host delays its device after the first layer. whole: False: of the last rank alone, whose
    time is TTFT.
    """
    return _Walk(program, cluster).finish_s(whole=whole)


class _Walk:
    """Where all ranks of a chain stand; seconds, with an axis of ranks and one of partitions."""

    def __init__(self, program: ChainProgram, cluster: Cluster) -> None:
        self.program, ops = program, program.layer
        recv = next(index for index, op in enumerate(ops) if isinstance(op, Recv))
        send = next(index for index, op in enumerate(ops) if isinstance(op, Send))
        self.recv, sends = ops[recv], ops[send]
        assert isinstance(sends, Send)
        self.send, self.overlaps = sends, not sends.rendezvous
        self.before, self.append, self.rest = ops[:recv], ops[recv + 1 : send], ops[send + 1 :]
        self.before_s, self.append_s, self.rest_s = map(_total_s, (self.before, self.append, self.rest))
        paths = [cluster.path(rank, rank + 1) for rank in range(len(self.append_s) - 1)]
        self.link_s = _busy_s(paths, sends.nbytes)  # of each message
        self.latency_s: Array = np.array([[path.latency_s] for path in paths])
        self.clock = np.zeros(self.append_s.shape)  # of each rank's device
        self.host_s = np.zeros((len(self.clock), 1))  # issued so far by each rank's host
        # When each message has begun to move; of those that overlap, when it has left.
        self.moved_s = np.full(self.link_s.shape, -np.inf)

    def finish_s(self, *, whole: bool) -> tuple[Array, Flags]:
        """As of chain_finish_s."""
        self._run(self.program.prologue)
        self._run(self.before)
        left, known = self.program.num_layers, self._device_leads(exact=False)  # layers, from their receive on
        if not known.all():
            self._pass_on(as_issued=True)
            self._run(self.rest)
            left -= 1
            if left:
                self._run(self.before)
            known = self._device_leads(exact=True) if left else np.ones(1, dtype=bool)
        finish_s = self._after(left, whole=whole) if left else self.clock[0 if whole else -1 :]
        last_s, host_s = finish_s[-1], self.host_s[-1]
        for op in self.program.epilogue:
            host_s = host_s + op.host_s
            np.maximum(last_s + _seconds(op), host_s, out=last_s)
        return finish_s, np.broadcast_to(known, last_s.shape)

    def _run(self, ops: Sequence[Op]) -> None:
        """Take all ranks through operations that wait for nobody."""
        for op in ops:
            self.clock += _seconds(op)
            if op.host_s:
                self.host_s += op.host_s
                np.maximum(self.clock, self.host_s, out=self.clock)

    def _pass_on(self, *, as_issued: bool) -> None:
        """Take all ranks from their receive until the message has left their streams.

        as_issued: the hosts may delay them; else the devices lead.
        """
        links = zip(self.moved_s, self.link_s, self.latency_s, strict=True)
        for rank, (moved_s, link_s, latency_s) in enumerate(links):
            own, behind = self.clock[rank], self.clock[rank + 1]
            self._append(rank, as_issued=as_issued)
            if as_issued:
                self._issue(rank, self.send)
                self._issue(rank + 1, self.recv)
            if self.overlaps:
                np.maximum(moved_s, own, out=moved_s)
                moved_s += link_s
                np.maximum(behind, moved_s + latency_s, out=behind)
            else:
                np.maximum(own, behind, out=moved_s)
                np.add(moved_s, link_s, out=own)
                np.add(own, latency_s, out=behind)
        self._append(len(self.clock) - 1, as_issued=as_issued)

    def _append(self, rank: int, *, as_issued: bool) -> None:
        """Take one rank from its receive to its send."""
        if not as_issued:
            self.clock[rank] += self.append_s[rank]
            return
        for op in self.append:
            self.clock[rank] += _seconds(op)[rank]
            self._issue(rank, op)

    def _issue(self, rank: int, op: Op) -> None:
        """No earlier than the host has issued it."""
        if op.host_s:
            self.host_s[rank] += op.host_s
            np.maximum(self.clock[rank], self.host_s[rank], out=self.clock[rank])

    def _device_leads(self, *, exact: bool) -> Flags:
        """Whether no rank's host is ever the later one from the receive on: of each partition, or of all at once.

        Messages only delay the device. exact: partition by partition, if the least of all partitions does not show it.
        """
        leads = self._keeps_ahead(lambda seconds: seconds.min(axis=1, keepdims=True))
        return self._keeps_ahead(lambda seconds: seconds) if exact and not leads.all() else leads

    def _keeps_ahead(self, least: Callable[[Array], Array]) -> Flags:
        """The same with the least of each rank's seconds; shape (1,) or (B,)."""
        ops = (self.recv, *self.append, self.send, *self.rest, *self.before)
        if not any(map(_issue_s, ops)):
            return np.ones(1, dtype=bool)
        ahead_s, layer_s, leads = least(self.clock) - self.host_s, np.zeros(1), np.ones(1, dtype=bool)
        for op in ops:
            gain_s = -op.host_s if isinstance(op, Send | Recv) else least(_seconds(op)) - op.host_s
            ahead_s, layer_s = ahead_s + gain_s, layer_s + gain_s
            leads = leads & (ahead_s >= 0).all(axis=0)
        return leads & (layer_s >= 0).all(axis=0)

    def _after(self, layers: int, *, whole: bool) -> Array:
        """When each rank, or the last one alone, has finished so many layers from the receive on."""
        self._pass_on(as_issued=False)
        after = self._overlapping if self.overlaps else self._rendezvous
        finish_s = after(layers - 1, whole=whole)
        finish_s += self.rest_s[-len(finish_s) :]
        of_last_s = sum(map(_issue_s, self.program.layer)) - self.send.host_s
        self.host_s[-1] += layers * of_last_s - sum(map(_issue_s, self.before))
        return finish_s

    def _overlapping(self, more: int, *, whole: bool) -> Array:
        """When ranks have appended so many layers later; every time is convex in their number."""
        layer_s = self.before_s + self.append_s + self.rest_s
        alone_s, free_s = self.clock + more * layer_s, self.moved_s + more * self.link_s  # if nothing is waited for
        on_s = self.latency_s + self.append_s[1:]  # from the end of a message to that of its append
        for rank, link_s in enumerate(self.link_s):
            left_s = np.maximum(alone_s[rank] + link_s, free_s[rank])
            left_s += on_s[rank]
            np.maximum(alone_s[rank + 1], left_s, out=alone_s[rank + 1])
        return alone_s if whole else alone_s[-1:]

    def _rendezvous(self, more: int, *, whole: bool) -> Array:
        """When ranks go on to the rest so many layers later; messages follow those before and behind them."""
        around_s, passed_s = self.before_s + self.rest_s, self.link_s + self.latency_s
        on, back = np.empty_like(passed_s), np.empty_like(passed_s)
        np.add(passed_s[:-1], self.append_s[1:-1], out=on[1:])
        np.add(self.link_s[1:], around_s[1:-1], out=back[:-1])
        on[0] = self.link_s[0] + around_s[0] + self.append_s[0]  # the first rank alone, from layer to layer
        last_s = passed_s[-1] + self.append_s[-1]
        back[-1] = last_s + around_s[-1]  # the last one alone
        if not whole:
            return np.asarray(last_of_row(self.moved_s, on, back, more) + last_s)[None]
        moved_s = row_after(self.moved_s, on, back, more)
        return np.concatenate([moved_s + self.link_s, moved_s[-1:] + last_s])


def _seconds(op: Op) -> Array:
    """That a rank's stream is held by what it does alone."""
    assert isinstance(op, Compute | Collective)
    return op.device_s if isinstance(op, Compute) else op.seconds


def _issue_s(op: Op) -> float:
    """That its host needs to issue it."""
    assert isinstance(op, Compute | Collective | Send | Recv)
    return op.host_s


def _total_s(ops: Sequence[Op]) -> Array:
    first, *others = map(_seconds, ops)
    return np.asarray(sum(others, first))


def _busy_s(paths: Sequence[Path], nbytes: Array) -> Array:
    """How long each message keeps its path busy, shape (ranks - 1, B); nbytes: that each rank sends."""
    parts, first = [], 0
    for path, same in groupby(paths):
        after = first + len(list(same))
        parts.append(path.busy_s(nbytes[first:after]))
        first = after
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
