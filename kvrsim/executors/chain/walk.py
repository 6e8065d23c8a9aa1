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

import numpy as np

from kvrsim.executors.chain.program import ChainProgram
from kvrsim.executors.maxplus import last_of_row, row_after
from kvrsim.program import Array, Collective, Compute, Flags, Op


def chain_finish_s(program: ChainProgram, *, whole: bool = True) -> tuple[Array, Flags]:
    """When each rank has finished, shape (ranks, B), and in which partitions that holds, shape (B,).

    It does not hold where a host delays its device after the first layer. whole: False: of the last rank alone, whose
    time is TTFT.
    """
    return _Walk(program).finish_s(whole=whole)


class _Walk:
    """Where all ranks of a chain stand; seconds, with an axis of ranks and one of partitions."""

    def __init__(self, program: ChainProgram) -> None:
        self.program = program
        ops = (*program.before, *program.append, *program.rest)
        self.layer_host_s = program.recv_host_s + program.send_host_s + sum(map(_host_s, ops))
        self.before_s, self.append_s, self.rest_s = map(_total_s, (program.before, program.append, program.rest))
        self.clock = np.zeros(self.append_s.shape)  # of each rank's device
        self.host_s = np.zeros((len(self.clock), 1))  # issued so far by each rank's host
        # When each message has begun to move; of those that overlap, when it has left.
        self.moved_s = np.full(program.link_s.shape, -np.inf)

    def finish_s(self, *, whole: bool) -> tuple[Array, Flags]:
        """As of chain_finish_s."""
        self._run(self.program.prologue)
        self._run(self.program.before)
        left, known = self.program.num_layers, self._device_leads(exact=False)  # layers, from their receive on
        if not known.all():
            self._pass_on(as_issued=True)
            self._run(self.program.rest)
            left -= 1
            if left:
                self._run(self.program.before)
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
        program, last = self.program, len(self.clock) - 1
        for rank, (link_s, latency_s) in enumerate(zip(program.link_s, program.latency_s, strict=True)):
            own, behind, moved_s = self.clock[rank], self.clock[rank + 1], self.moved_s[rank]
            self._append(rank, as_issued=as_issued)
            if as_issued:
                self._issue(rank, program.send_host_s)
                self._issue(rank + 1, program.recv_host_s)
            if program.overlaps:
                np.maximum(moved_s, own, out=moved_s)
                moved_s += link_s
                np.maximum(behind, moved_s + latency_s, out=behind)
            else:
                np.maximum(own, behind, out=moved_s)
                np.add(moved_s, link_s, out=own)
                np.add(own, latency_s, out=behind)
        self._append(last, as_issued=as_issued)

    def _append(self, rank: int, *, as_issued: bool) -> None:
        """Take one rank from its receive to its send."""
        if not as_issued:
            self.clock[rank] += self.append_s[rank]
            return
        for op in self.program.append:
            self.clock[rank] += _seconds(op)[rank]
            self._issue(rank, _host_s(op))

    def _issue(self, rank: int, host_s: float) -> None:
        """No earlier than the host has issued it."""
        if host_s:
            self.host_s[rank] += host_s
            np.maximum(self.clock[rank], self.host_s[rank], out=self.clock[rank])

    def _device_leads(self, *, exact: bool) -> Flags:
        """Whether no rank's host is ever the later one from the receive on: of each partition, or of all at once.

        Messages only delay the device. exact: partition by partition, if the least of all partitions does not show it.
        """
        if not self.layer_host_s:
            return np.ones(1, dtype=bool)
        leads = self._keeps_ahead(lambda seconds: seconds.min(axis=1, keepdims=True))
        return self._keeps_ahead(lambda seconds: seconds) if exact and not leads.all() else leads

    def _keeps_ahead(self, least: Callable[[Array], Array]) -> Flags:
        """The same with the least of each rank's seconds; shape (1,) or (B,)."""
        program, begun_s = self.program, least(self.clock)
        ops = (None, *program.append, None, *program.rest, *program.before)  # None: a message
        issued_s = iter((program.recv_host_s, program.send_host_s))
        gains_s = [
            np.full_like(begun_s, -next(issued_s)) if op is None else least(_seconds(op)) - _host_s(op) for op in ops
        ]
        ahead_s = np.cumsum(gains_s, axis=0)  # more than at the receive, after each operation
        leads = (ahead_s.min(axis=0) >= self.host_s - begun_s) & (ahead_s[-1] >= 0)
        return np.asarray(leads.all(axis=0))

    def _after(self, layers: int, *, whole: bool) -> Array:
        """When each rank, or the last one alone, has finished so many layers from the receive on."""
        self._pass_on(as_issued=False)
        after = self._overlapping if self.program.overlaps else self._rendezvous
        finish_s = after(layers - 1, whole=whole)
        finish_s += self.rest_s[-len(finish_s) :]
        issued_s = layers * (self.layer_host_s - self.program.send_host_s) - sum(map(_host_s, self.program.before))
        self.host_s[-1] += issued_s
        return finish_s

    def _overlapping(self, more: int, *, whole: bool) -> Array:
        """When ranks have appended so many layers later; every time is convex in their number."""
        links_s, layer_s = self.program.link_s, self.before_s + self.append_s + self.rest_s
        alone_s, free_s = self.clock + more * layer_s, self.moved_s + more * links_s  # if nothing is waited for
        on_s = self.program.latency_s + self.append_s[1:]  # from the end of a message to that of its append
        for rank, link_s in enumerate(links_s):
            left_s = np.maximum(alone_s[rank] + link_s, free_s[rank])
            left_s += on_s[rank]
            np.maximum(alone_s[rank + 1], left_s, out=alone_s[rank + 1])
        return alone_s if whole else alone_s[-1:]

    def _rendezvous(self, more: int, *, whole: bool) -> Array:
        """When ranks go on to the rest so many layers later; messages follow those before and behind them."""
        links_s, around_s = self.program.link_s, self.before_s + self.rest_s
        passed_s = links_s + self.program.latency_s
        on, back = np.empty_like(passed_s), np.empty_like(passed_s)
        np.add(passed_s[:-1], self.append_s[1:-1], out=on[1:])
        np.add(links_s[1:], around_s[1:-1], out=back[:-1])
        on[0] = links_s[0] + around_s[0] + self.append_s[0]  # the first rank alone, from layer to layer
        last_s = passed_s[-1] + self.append_s[-1]
        back[-1] = last_s + around_s[-1]  # the last one alone
        if not whole:
            return np.asarray(last_of_row(self.moved_s, on, back, more) + last_s)[None]
        moved_s = row_after(self.moved_s, on, back, more)
        return np.concatenate([moved_s + links_s, moved_s[-1:] + last_s])


def _seconds(op: Op) -> Array:
    """That a rank's stream is held by what it does alone."""
    assert isinstance(op, Compute | Collective)
    return op.device_s if isinstance(op, Compute) else op.seconds


def _host_s(op: Op) -> float:
    """That its host needs to issue it."""
    assert isinstance(op, Compute | Collective)
    return op.host_s


def _total_s(ops: Sequence[Op]) -> Array:
    first, *others = map(_seconds, ops)
    return np.asarray(sum(others, first))
