"""The work of the ranks of a KVR chain without waits for each other: the basis of plans and bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from kvrsim.execution import Execution
from kvrsim.once import once
from kvrsim.program import Array, Collective, Compute, Op, Send, with_senders
from kvrsim.strategies import Step
from kvrsim.strategies.layers import layer_ops

_INSIDE = np.array([-0.2, 0.2, 0.4, 0.6, 0.8, 1.2])[:, None]  # trial points, some outside the bracket
_NEAR = np.array([-0.02, 0.02])[:, None]  # trial points next to the linear estimate of the crossing
_BRACKET_GROWTH = 2.0  # factor by which a bracket without a crossing grows
_DAMPING = 0.8  # a longer chunk shortens those after it; without damping, chunks oscillate


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


def longest_chunks_within(
    needed_s: Callable[[Array, Array], Array],
    limit_s: Array,
    chunks: Array,
    most: Callable[[Array], Array | float],
    precision: float,
    spread: float,
    rounds: int,
) -> tuple[Array, Array]:
    """The longest chunk of each rank within the limit, and a chunk beyond the limit, longer by at most the precision.

    All ranks are solved together. `needed_s(chunks, tried)` returns the seconds of the chunks `tried`, shape (ranks, K,
    columns), if the other ranks have `chunks`, shape (ranks, columns); it must not decrease with a rank's own chunk.
    Brackets around the crossings shrink while the other chunks converge, and move if these shift the crossing out of a
    bracket. The other chunks converge only to the precision, so proofs have to evaluate the results once more.

    limit_s: shape (columns,). chunks: start values, shape (ranks, columns). spread: half-width of the first
    brackets over the chunks. most: returns the most tokens of each rank, given the chunks; the least is 1.
    """
    low = np.maximum(1.0, chunks * (1.0 - spread))
    high = chunks * (1.0 + spread)
    for _ in range(rounds):
        width = np.maximum(high - low, precision * high)
        around = np.concatenate(
            [low[:, None] + _INSIDE * width[:, None], chunks[:, None] + _NEAR * width[:, None]], axis=1
        )
        room = np.maximum(1.0, most(chunks)) + np.zeros_like(chunks)
        tried = np.clip(around, 1.0, room[:, None])
        over_s = needed_s(chunks, tried) - limit_s
        within = over_s <= 0
        low_s = np.maximum.reduce(over_s, axis=1, where=within, initial=-np.inf)
        high_s = np.minimum.reduce(over_s, axis=1, where=~within, initial=np.inf)
        low = np.maximum.reduce(tried, axis=1, where=within, initial=1.0)
        high = np.minimum(np.minimum.reduce(tried, axis=1, where=~within, initial=np.inf), room)
        none = low_s == -np.inf
        all_ = high_s == np.inf
        low = np.where(none, np.maximum(1.0, high - _BRACKET_GROWTH * width), low)
        high = np.where(all_, np.minimum(room, low + _BRACKET_GROWTH * width), high)
        with np.errstate(invalid="ignore"):
            share = np.where(none | all_, 0.5, low_s / (low_s - high_s))
        chunks = chunks + _DAMPING * (low + share * (high - low) - chunks)
        if (high - low <= precision * high).all():
            break
    return low, high


# -- The analytical planner: without contention and on fast links, the best partition keeps all ranks busy equally long.

_TARGETS = 12  # target times on a grid
_AROUND = 0.08  # half-width of the first grid, as a share of the time of smooth chunks
_SPREAD = 0.25  # half-width of the first brackets, as a share of a chunk
_AGAIN = 0.05  # the same on the second grid, whose chunks are nearly known
_POINTS = 129  # points of the context at which the time of a token is computed
_ROUNDS = 32  # most rounds of a solution; brackets shrink about fivefold per round
_PRECISION = 2.0**-14  # relative precision of a chunk


@once
def balanced_chunks(execution: Execution) -> Array:
    """Chunk lengths for which all ranks are busy equally long: real-valued tokens, shape (num_ranks,).

    For a target time, each rank takes the longest chunk within this time. The least target whose chunks cover the
    context is found on finer and finer grids, then by linear interpolation between two targets. All ranks and targets
    are evaluated together, so that the number of calls does not increase with the ranks.
    """
    return _balanced(ChainWork(execution))


def _balanced(chain: ChainWork) -> Array:
    request = chain.execution.placed.request
    tokens = float(request.new_tokens)
    if chain.num_ranks == 1:
        return np.array([tokens])
    chunks = _smooth(chain)[:, None]
    middle_s = float(np.sort(_busy_s(chain, chunks, _starts(chain, chunks)), axis=0)[chain.num_ranks // 2, 0])
    low = (1.0 - _AROUND) * middle_s
    high = (1.0 + _AROUND) * middle_s
    for zoom in range(2):
        targets = np.linspace(low, high, _TARGETS)
        longest = _longest(chain, targets, chunks, _SPREAD if zoom == 0 else _AGAIN)
        lengths = longest.sum(axis=0)
        while zoom == 0 and not lengths[0] <= tokens <= lengths[-1]:
            targets = targets * (targets[0] / targets[-1] if lengths[0] >= tokens else targets[-1] / targets[0])
            longest = _longest(chain, targets, longest, _SPREAD)
            lengths = longest.sum(axis=0)
        above = max(1, int((lengths >= tokens).argmax()))
        low = targets[above - 1]
        high = targets[above]
        chunks = longest[:, above, None]
    share = (tokens - lengths[above - 1]) / max(1.0, lengths[above] - lengths[above - 1])
    return np.asarray(longest[:, above - 1] + share * (longest[:, above] - longest[:, above - 1]))


def _smooth(chain: ChainWork) -> Array:
    """Balanced chunks if every token took the time of a token in the middle of an even chunk."""
    request = chain.execution.placed.request
    share = request.new_tokens / chain.num_ranks
    middle = range(chain.num_ranks // 2, chain.num_ranks // 2 + 1)

    def token_s(ends: Array) -> Array:
        starts = request.cached_prefix + np.maximum(0.0, ends - 0.5 * share)
        return np.asarray(chain.work(middle, np.full((1, len(ends)), share), starts[None]).busy_s[0])

    return np.diff(ends_of_equal_time(token_s, request.new_tokens, chain.num_ranks))


def ends_of_equal_time(token_s: Callable[[Array], Array], tokens: int, count: int) -> Array:
    """Divide tokens into `count` parts that take equally long: their ends, from 0 to `tokens`, shape (count + 1,).

    token_s: returns the time of a token at each of the given ends, in any unit.
    """
    ends = np.linspace(0.0, tokens, _POINTS)
    rates = token_s(ends)
    until_s = np.concatenate([[0.0], np.cumsum(0.5 * (rates[1:] + rates[:-1]))])
    return np.interp(np.linspace(0.0, until_s[-1], count + 1), until_s, ends)


def _busy_s(chain: ChainWork, chunks: Array, starts: Array) -> Array:
    return chain.work(range(chain.num_ranks), chunks, starts).busy_s


def _starts(chain: ChainWork, chunks: Array) -> Array:
    return chain.execution.placed.request.cached_prefix + np.cumsum(chunks, axis=0) - chunks


def _longest(chain: ChainWork, targets: Array, chunks: Array, spread: float) -> Array:
    """The longest chunks that keep all ranks within each target, shape (num_ranks, targets); `chunks`: start values."""

    def needed_s(settling: Array, tried: Array) -> Array:
        return _busy_s(chain, tried, _starts(chain, settling)[:, None])

    most = float(chain.execution.placed.request.context_len)
    begin = np.broadcast_to(chunks, (len(chunks), len(targets)))
    return longest_chunks_within(needed_s, targets, begin, lambda _: most, _PRECISION, spread, _ROUNDS)[0]
