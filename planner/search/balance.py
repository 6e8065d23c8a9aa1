"""The work of the ranks of a KVR chain without waits for each other: the basis of plans and bounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvrsim.execution import Execution
from kvrsim.once import once
from kvrsim.program import Array, Collective, Compute, Op, Send, with_senders
from kvrsim.strategies import Step
from kvrsim.strategies.layers import layer_ops


class RankWork(NamedTuple):
    """Seconds of some ranks with given chunks and starts; every field has the shape of the chunks, ranks first."""

    compute_s: Array  # device time of all layers
    first_qkv_s: Array  # part of compute_s before the append of the first layer that sends anything
    last_post_s: Array  # part of compute_s after the append of the last such layer, with later layers
    sends_s: Array  # messages of all layers on the link to the next rank
    last_send_s: Array  # last of these messages
    # Messages of all layers from the previous rank, if these occupy the compute stream; for proofs, with latencies.
    recv_held_s: Array
    send_held_s: Array  # `sends_s`, if messages occupy the compute stream

    @property
    def busy_s(self) -> Array:
        """Seconds for which the compute stream is occupied."""
        return self.compute_s + self.recv_held_s + self.send_held_s


class ChainWork:
    """A KVR chain; `least`: attention takes the lower limit of its time, for proofs.

    A call takes a range of ranks, which differ in their links and slowness but not in their layers.
    """

    def __init__(self, execution: Execution, *, least: bool = False) -> None:
        self.execution = execution
        self.num_ranks = execution.cluster.num_gpus
        self.costs = execution.placed.layer_costs(execution.placed.optimistic_cost if least else None)
        self.kinds = execution.placed.share.layer_kind_index
        self.counts = np.bincount(self.kinds)
        one = np.ones((1, 1))
        each = [self._layer(kind, one, one) for kind in range(len(self.costs))]
        self.layers_host_s = np.array(
            [sum(op.host_s for op in ops if isinstance(op, Compute | Collective)) for ops in each]
        )
        mixed = [index for index, kind in enumerate(self.kinds) if self.costs[kind].has_mixer]
        # first and last layer that send anything
        first = mixed[0]
        last = mixed[-1]
        self._before = np.bincount(self.kinds[:first], minlength=len(self.costs))
        self._behind = np.bincount(self.kinds[last + 1 :], minlength=len(self.costs))
        self._first = self.kinds[first]
        self._last = self.kinds[last]
        self._slowness = np.array([execution.cluster.slowness(rank) for rank in range(self.num_ranks)])
        paths = [execution.cluster.path(rank, rank + 1) for rank in range(self.num_ranks - 1)]
        self._paths = list(dict.fromkeys(paths))
        # For each path: 1 for ranks whose path to the next rank it is, else 0. The last rank sends nothing: 0.
        self._over = [np.array([path == one for path in paths] + [False], dtype=float) for one in self._paths]
        self._sends = np.append(np.ones(len(paths)), 0.0)  # 0 for the last rank, which sends nothing
        self._latency_s = np.array([path.latency_s for path in paths])
        # Seconds for which a rank waits in each layer for a message that begins when both ranks are ready.
        self._awaited_s = np.append(0.0, self._latency_s) * (least and not execution.placed.sends_overlap)

    def work(self, ranks: range, chunk: Array, start: Array) -> RankWork:
        """The work of these ranks with these chunks and starts (tokens, equal shapes, ranks first)."""
        compute = qkv = post = sent = received = last_sent = none = np.zeros((1,) * chunk.ndim)
        slowness = _along(self._slowness[ranks.start : ranks.stop], chunk)
        for kind, costs in enumerate(self.costs):
            ops = with_senders(
                tuple(self._layer(kind, chunk, start)), _along(self._sends[ranks.start : ranks.stop], chunk)
            )
            total, before, after, inside, nbytes = _split(ops, none)
            total = slowness * total + inside
            before = slowness * before
            after = slowness * after + inside
            compute = compute + self.counts[kind] * total
            sent_s = self._busy_s(ranks, nbytes)
            sent = sent + self.counts[kind] * sent_s
            if not self.execution.placed.sends_overlap and ranks[-1]:
                before_ranks = range(ranks.start - 1, ranks.stop - 1)
                received = received + self.counts[kind] * self._busy_s(before_ranks, costs.forwarded_kv_bytes(start))
                if costs.has_mixer:
                    awaited_s = _along(self._awaited_s[ranks.start : ranks.stop], chunk)
                    received = received + self.counts[kind] * awaited_s
            if self._before[kind]:
                qkv = qkv + self._before[kind] * total
            if self._behind[kind]:
                post = post + self._behind[kind] * total
            if kind == self._first:
                qkv = qkv + before
            if kind == self._last:
                post = post + after
                last_sent = sent_s
        return RankWork(
            compute_s=compute,
            first_qkv_s=qkv,
            last_post_s=post,
            sends_s=sent,
            last_send_s=last_sent,
            recv_held_s=received,
            send_held_s=none if self.execution.placed.sends_overlap else sent,
        )

    def first_message_s(self, ranks: range, end: Array) -> Array:
        """Seconds of the first message, of `end` tokens, from each of these ranks to the next one."""
        sent_s = self._busy_s(ranks, self.costs[self._first].forwarded_kv_bytes(end))
        return sent_s + _along(self._latency_s[ranks.start : ranks.stop], end)

    def first_append_s(self, end: Array) -> Array:
        """The least seconds to append the first message, of `end` tokens."""
        return self.costs[self._first].mixer.append_s(np.zeros_like(end), end)

    def first_message_ready_s(self, chunk: Array, host_s: float) -> Array:
        """The least seconds until rank 0's first message is ready; its host issues the first layer from `host_s` on."""
        host_s += float(self.layers_host_s @ self._before)
        chunk = chunk[None]
        return np.asarray(self._issued_s(self._first, host_s, chunk, np.zeros_like(chunk))[0])

    def last_message_ready_s(self, ranks: range, chunk: Array, start: Array, host_s: float) -> Array:
        """The least seconds until hosts let the last messages of these ranks leave; see first_message_ready_s."""
        host_s += float(self.layers_host_s @ (self.counts - self._behind)) - self.layers_host_s[self._last]
        slowness = _along(self._slowness[ranks.start : ranks.stop], chunk)
        return self._issued_s(self._last, host_s, chunk, start, slowness)

    def _issued_s(self, kind: int, host_s: float, chunk: Array, start: Array, slowness: Array | float = 1.0) -> Array:
        """Seconds until a device appends or scans; it begins the layer at 0, its host issues it from `host_s` on."""
        end_s = np.zeros_like(chunk)
        for op in self._layer(kind, chunk, start):
            if isinstance(op, Send):
                break
            if isinstance(op, Compute):
                end_s = np.maximum(np.maximum(end_s, host_s) + slowness * op.device_s, host_s + op.host_s)
                host_s += op.host_s
        return end_s

    def _layer(self, kind: int, chunk: Array, start: Array) -> Iterable[Op]:
        """Operations of a rank with a previous and a next rank, if there is one, in a layer."""
        blocks = self.execution.strategy.query_blocks
        inner = max(0, min(1, self.num_ranks - 2))
        step = Step(self.costs[kind], [chunk] * self.num_ranks, [start] * self.num_ranks, query_blocks=blocks)
        return layer_ops(self.execution.strategy, step, inner)

    def last_hop_s(self, ranks: range, end: Array) -> Array:
        """Least seconds of the last message, of `end` tokens, from each of these ranks to the next, with its append."""
        costs = self.costs[self._last]
        sent_s = self._busy_s(ranks, costs.forwarded_kv_bytes(end)) + costs.mixer.append_s(np.zeros_like(end), end)
        return np.asarray(sent_s + _along(self._latency_s[ranks.start : ranks.stop], end))

    def _busy_s(self, ranks: range, nbytes: Array) -> Array:
        """Seconds for which messages occupy the paths from these ranks to the next; 0 if there is no such path."""
        index = np.arange(ranks.start, ranks.stop)
        return sum(
            (
                _along(over[index], nbytes) * path.busy_s(nbytes)
                for over, path in zip(self._over, self._paths, strict=True)
            ),
            np.zeros(1),
        )


def _along(values: Array, shaped: Array) -> Array:
    """Values by rank, reshaped to broadcast with an array whose first axis is the ranks."""
    return values.reshape(-1, *[1] * (shaped.ndim - 1))


def _split(ops: Iterable[Op], none: Array) -> tuple[Array, Array, Array, Array, Array]:
    """All compute, its parts before and after the append or scan, the time of group collectives, and sent bytes.

    In a layer with a state, the scan takes the place of the append, because the message waits for the scan. Collectives
    inside a rank's group end a layer. none: zeros with the right number of dimensions.
    """
    total = before = after = inside = nbytes = none
    appended = False
    for op in ops:
        if isinstance(op, Compute):
            total = total + op.device_s
            if appended:
                after = after + op.device_s
            elif op.kind == "append" or op.name == "scan":
                appended = True
            else:
                before = before + op.device_s
        elif isinstance(op, Send):
            nbytes = op.nbytes
        elif isinstance(op, Collective):
            inside = inside + op.seconds
    return total, before, after, inside, nbytes


# -- the analytical plan: without contention and on fast links, the best partition keeps all ranks busy equally long

_ROUNDS = 16  # corrections of the chunks; twice as many change TTFT by less than 0.1 % in 18 random questions


@once
def balanced_chunks(execution: Execution) -> Array:
    """Chunk lengths for which all ranks are busy about equally long: real-valued tokens, shape (num_ranks,).

    A rank that is busy for longer than the mean gets fewer tokens, and the others get more, until all are alike. A
    chunk takes at least as long as its length and at most as its square, so the root of the ratio corrects it. Of all
    rounds, the chunks with the least maximum count: where work is rounded up to tiles, no chunks are exactly alike.
    """
    chain = ChainWork(execution)
    request = execution.request
    chunks = np.full((chain.num_ranks, 1), request.new_tokens / chain.num_ranks)
    best = chunks
    best_s = np.inf
    for _ in range(_ROUNDS):
        starts = request.cached_prefix + np.cumsum(chunks, axis=0) - chunks
        busy_s = chain.work(range(chain.num_ranks), chunks, starts).busy_s
        if busy_s.max() < best_s:
            best = chunks
            best_s = busy_s.max()
        chunks = np.maximum(1.0, chunks * np.sqrt(busy_s.mean() / busy_s))
        chunks = chunks * (request.new_tokens / chunks.sum())
    return np.asarray(best[:, 0])
