"""What one rank of a KVR chain must do, whatever the others do: the pieces that plans and bounds are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from kvrsim.hardware.links import Path
from kvrsim.program.operations import Array, Collective, Compute, Op, Send
from kvrsim.scenario import Scenario
from kvrsim.strategies import Step, Strategy
from kvrsim.strategies.layers import layer_ops

_SECTIONS = 4
_NEAR = np.array([2.0**-4, 2.0**-8])  # either side of a parabola's root


@dataclass(frozen=True, slots=True)
class _Same(Sequence[Array]):
    """The same array for every rank, so that one rank's program can be asked for alone."""

    array: Array
    num_ranks: int

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        return self.array if isinstance(index, int) else [self.array]

    def __len__(self) -> int:
        return self.num_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Seconds of one rank with given chunk and start; every field of shape (B,)."""

    compute_s: Array  # device time of all layers
    first_qkv_s: Array  # of it, what comes before the append of the first layer that hands anything on
    last_post_s: Array  # of it, what comes after that of the last such layer: attention, output, MLP, layers behind
    sends_s: Array  # messages of all layers on the link to the next rank
    last_send_s: Array  # of it, the last one
    recv_held_s: Array  # messages of all layers from the rank before, where they hold the compute stream
    send_held_s: Array  # `sends_s`, where they hold the compute stream

    @property
    def busy_s(self) -> Array:
        """Everything that occupies the compute stream."""
        return self.compute_s + self.recv_held_s + self.send_held_s


class Chain:
    """A KVR chain of a scenario, rank by rank; `least`: with attention at the least that proofs may count on."""

    def __init__(self, scenario: Scenario, strategy: Strategy, *, least: bool = False) -> None:
        self.scenario, self.strategy = scenario, strategy
        self.num_ranks = scenario.cluster.num_gpus
        self.costs = scenario.layer_costs(scenario.least_cost if least else None)
        self.kinds = scenario.share.layer_kind_index
        self.counts = np.bincount(self.kinds)
        mixed = [index for index, kind in enumerate(self.kinds) if self.costs[kind].mixing is not None]
        first, last = mixed[0], mixed[-1]  # layers that hand anything on; those besides are an MLP alone
        self._before = np.bincount(self.kinds[:first], minlength=len(self.costs))
        self._behind = np.bincount(self.kinds[last + 1 :], minlength=len(self.costs))
        self._first, self._last = self.kinds[first], self.kinds[last]
        self.paths = [scenario.cluster.path(rank, rank + 1) for rank in range(self.num_ranks - 1)]
        self._downstream = _counts_from_each(self.paths)
        self._latency_s = np.cumsum([path.latency_s for path in self.paths[::-1]])[::-1]  # from each rank to the last

    def work(self, rank: int, chunk: Array, start: Array) -> RankWork:
        """The work of `rank`, if its chunk and start were these (tokens, any one shape)."""
        compute = qkv = post = sent = received = last_sent = np.zeros(1)
        slowness, blocks = self.scenario.cluster.slowness(rank), self.strategy.query_blocks
        for kind, costs in enumerate(self.costs):
            step = Step(costs, _Same(chunk, self.num_ranks), _Same(start, self.num_ranks), query_blocks=blocks)
            ops = list(layer_ops(self.strategy, step, rank))
            *times, nbytes = _split(ops)
            total, before, after = (slowness * time for time in times)
            inside = sum((op.seconds for op in ops if isinstance(op, Collective)), np.zeros(1))
            total, after = total + inside, after + inside  # those of a rank's own group end a layer
            compute = compute + self.counts[kind] * total
            sent_s = self.paths[rank].busy_s(nbytes) if rank < self.num_ranks - 1 else np.zeros(1)
            sent = sent + self.counts[kind] * sent_s
            if rank:
                received = received + self.counts[kind] * self.paths[rank - 1].busy_s(costs.handed_kv_bytes(start))
            qkv, post = qkv + self._before[kind] * total, post + self._behind[kind] * total
            if kind == self._first:
                qkv = qkv + before
            if kind == self._last:
                post, last_sent = post + after, sent_s
        hold = 0.0 if self.scenario.sends_overlap else 1.0
        return RankWork(
            compute_s=compute,
            first_qkv_s=qkv,
            last_post_s=post,
            sends_s=sent,
            last_send_s=last_sent,
            recv_held_s=hold * received,
            send_held_s=hold * sent,
        )

    def first_message_s(self, rank: int, end: Array) -> Array:
        """The first message, of `end` tokens, from `rank` to the next."""
        path = self.paths[rank]
        return path.busy_s(self.costs[self._first].handed_kv_bytes(end)) + path.latency_s

    def first_append_s(self, end: Array) -> Array:
        """The least that a rank takes to append to a prefix of `end` tokens, of the first message."""
        return self.costs[self._first].append_s(np.zeros_like(end), end)

    def first_message_ready_s(self, chunk: Array) -> Array:
        """The least that rank 0 takes to have its first message ready: project the chunk, keep its K, V or scan it."""
        costs, none = self.costs[self._first], np.zeros_like(chunk)
        return costs.qkv_s(chunk) + (costs.attention_s(chunk, none) if costs.has_state else costs.append_s(chunk, none))

    def drain_s(self, rank: int, end: Array) -> Array:
        """The least from the append of `rank`, which ends there, to that of the last rank, of the last message."""
        costs = self.costs[self._last]
        hops = self.num_ranks - 1 - rank
        nbytes = costs.handed_kv_bytes(end)
        transfer_s = sum((count * path.busy_s(nbytes) for path, count in self._downstream[rank].items()), np.zeros(1))
        return np.asarray(transfer_s + self._latency_s[rank] + hops * costs.append_s(np.zeros_like(end), end))


def _counts_from_each(paths: Sequence[Path]) -> list[dict[Path, int]]:
    """For each rank, how many paths of each kind lead from it to the last rank."""
    counts: list[dict[Path, int]] = [{}]
    for path in reversed(paths):
        counts.append(counts[-1] | {path: counts[-1].get(path, 0) + 1})
    return counts[::-1]


def _split(ops: Sequence[Op]) -> tuple[Array, Array, Array, Array]:
    """All compute, what of it comes before and after the append or the scan, and the bytes sent.

    The scan of a layer with a state stands for its append: what is sent waits for it.
    """
    total = before = after = nbytes = np.zeros(1)
    appended = False
    for op in ops:
        if isinstance(op, Send):
            nbytes = op.nbytes
        elif isinstance(op, Compute):
            total = total + op.device_s
            if op.kind == "append" or op.name == "scan":
                appended = True
            elif appended:
                after = after + op.device_s
            else:
                before = before + op.device_s
    return total, before, after, nbytes


def largest_within(
    needed_s: Callable[[Array], Array], least: Array, most: Array, limit_s: Array, precision: float
) -> Array:
    """The largest x in [least, most] whose `needed_s`, which does not fall with it, is within the limit.

    Never below it, and above by at most that share of (most - least); nan where not even `least` is within.
    Costs are quadratic in x but for kinks and steps, so the root of a parabola is tried first; then what is
    left is cut into sections, several at once since a call costs little more for more numbers.
    """
    width = most - least

    def over_s(shares: Array) -> Array:
        return needed_s(least + shares * width) - limit_s

    axes = (-1, *[1] * np.ndim(width))
    at_least, middle, at_most = over_s(np.array([0.0, 0.5, 1.0]).reshape(axes))
    root = _parabola_root(at_least, middle, at_most)
    tried = np.clip(
        root + np.concatenate([-_NEAR, [-precision / 2, precision / 2], _NEAR[::-1]]).reshape(axes), 0.0, 1.0
    )
    within = over_s(tried) <= 0
    low, high = np.max(tried, axis=0, where=within, initial=0.0), np.min(tried, axis=0, where=~within, initial=1.0)
    low, high = np.where(at_most <= 0, 1.0, low), np.where(at_least > 0, 0.0, high)
    sections = (np.arange(1, _SECTIONS) / _SECTIONS).reshape(axes)
    while (high - low > 1.01 * precision).any():
        passed = (over_s(low + sections * (high - low)) <= 0).sum(axis=0)
        low, high = low + passed * (high - low) / _SECTIONS, low + (passed + 1) * (high - low) / _SECTIONS
    return np.where(at_least <= 0, least + high * width, np.nan)


def _parabola_root(at_0: Array, at_half: Array, at_1: Array) -> Array:
    """Where the parabola through three values, at most 0 at 0, crosses zero from below; in [0, 1]."""
    square = 2.0 * (at_0 - 2.0 * at_half + at_1)
    slope = at_1 - at_0 - square
    root = np.sqrt(np.maximum(slope * slope - 4.0 * square * at_0, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = -2.0 * at_0 / (slope + root)
    return np.clip(np.nan_to_num(share, nan=0.5), 0.0, 1.0)
