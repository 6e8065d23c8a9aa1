"""A program prepared for the batch evaluator: computes in a row are merged, messages get their time on the link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvrsim.hardware import Cluster
from kvrsim.program import (
    AllGather,
    AllToAll,
    Array,
    Collective,
    Compute,
    Load,
    Op,
    Program,
    Recv,
    RingPass,
    Send,
)

_MANY = 8  # computes in a row, from which on they are merged in one numpy call


@dataclass(frozen=True, slots=True)
class Segment:
    """One compute, or several in a row: `t' = max(t + device_s, host_begin + host_floor_s)`."""

    device_s: Array
    host_floor_s: Array | None  # None: the device is never ahead of the host here
    host_s: float
    has_noise: bool  # noise delays what a rank computes, not what its group of GPUs communicates


@dataclass(frozen=True, slots=True)
class Message:
    """A send with its time on the link."""

    dst: int
    link_s: Array
    latency_s: float
    host_s: float
    rendezvous: bool
    in_turn: bool


@dataclass(frozen=True, slots=True)
class _Block:
    """The steps of a block of operations."""

    steps: list[Step]
    without_host: list[Step] | None  # the same with fewer host clocks; None: the host may be ahead when it ends


Step = Segment | Message | Recv | AllGather | RingPass | AllToAll | Load


@dataclass(frozen=True, slots=True)
class Part:
    """Steps of each rank, which it takes so many times before it comes to the next part."""

    steps: list[list[Step]]
    times: int


@dataclass(slots=True)
class RankState:
    """Where one rank stands in its program."""

    begin_s: Array | float  # its host begins then, and runs ahead
    clock: Array  # device time
    steps: list[Step] = field(default_factory=list)
    host_s: float = 0.0  # host time issued since it began
    lags: bool = False  # whether the device may be before the host: it never is once something was computed
    step: int = 0
    num_computed: int = 0
    loaded_s: Array | float | None = None  # when the loads so far have left their link; None: none has

    def issued(self, host_s: float) -> Array:
        """When the device has come to an operation that the host takes that long to issue."""
        if host_s:
            self.host_s += host_s
            self.lags = True
        return np.maximum(self.clock, self.begin_s + self.host_s) if self.lags else self.clock


class Steps:
    """Prepares blocks of operations, each once, since ranks and layers share them.

    under_noise: computes are kept apart where noise may reach them, and all arrays get a last axis for samples.
    jitters: noise disturbs each compute on its own and may shorten it, so that the host may delay any.
    """

    def __init__(self, cluster: Cluster, *, under_noise: bool = False, jitters: bool = False) -> None:
        self.cluster, self.under_noise, self.jitters = cluster, under_noise, jitters
        self.blocks: dict[int, _Block] = {}
        self.merged: dict[tuple[int, int], Segment] = {}

    def of(self, program: Program, runs: Iterable[tuple[tuple[int, ...], int]] | None = None) -> list[Part]:
        """All steps of every rank in order: prologue, layers, epilogue.

        runs: kinds of layers, and how often they follow each other, all of them in order; None: in one part.
        """
        ranks = range(program.num_ranks)
        kinds = [[self._block(rank, kind[rank]) for rank in ranks] for kind in program.layers]
        first, last = ([self._block(rank, ops[rank]) for rank in ranks] for ops in (program.prologue, program.epilogue))
        used = [first, last, *(kinds[kind] for kind in set(program.layer_kind_index))]
        keeps = [self.jitters or any(blocks[rank].without_host is None for blocks in used) for rank in ranks]

        def steps(blocks: Sequence[list[_Block]]) -> list[list[Step]]:
            return [
                self._joined(of[rank].steps if keeps[rank] else of[rank].without_host or [] for of in blocks)
                for rank in ranks
            ]

        if runs is None:
            return [Part(steps([first, *(kinds[kind] for kind in program.layer_kind_index), last]), 1)]
        layers = [Part(steps([kinds[kind] for kind in period]), times) for period, times in runs]
        return [Part(steps([first]), 1), *layers, Part(steps([last]), 1)]

    def wide(self, values: Array) -> Array:
        """With an axis of samples, where there are some."""
        return values[..., None] if self.under_noise else values

    def _block(self, rank: int, ops: tuple[Op, ...]) -> _Block:
        """The same for all ranks, unless it has messages, whose links are the rank's own."""
        if id(ops) in self.blocks:
            return self.blocks[id(ops)]
        steps = self._steps(rank, ops)
        block = _Block(steps, _without_host(steps))
        if not any(isinstance(op, Send) for op in ops):
            self.blocks[id(ops)] = block
        return block

    def _steps(self, rank: int, ops: tuple[Op, ...]) -> list[Step]:
        if not self.under_noise and len(ops) >= _MANY and all(isinstance(op, Compute | Collective) for op in ops):
            return [_merged(ops)]
        steps: list[Step] = []
        for op in ops:
            last = steps[-1] if steps else None
            if isinstance(op, Compute | Collective):
                device_s = self.wide(_held_s(op))
                if isinstance(last, Segment) and not self.under_noise:
                    steps[-1] = _merge(last, device_s, op.host_s)
                else:
                    floor_s = np.maximum(device_s, op.host_s)
                    steps.append(Segment(device_s, floor_s, op.host_s, isinstance(op, Compute)))
            elif isinstance(op, Send):
                path = self.cluster.path(rank, op.dst)
                link_s = path.busy_s(self.wide(op.nbytes))
                steps.append(Message(op.dst, link_s, path.latency_s, op.host_s, op.rendezvous, op.in_turn))
            else:
                steps.append(op)
        return steps

    def _joined(self, blocks: Iterable[list[Step]]) -> list[Step]:
        """All steps in a row; segments that the host does not delay are merged where one follows another."""
        steps: list[Step] = []
        last: Segment | None = None  # the last step, if it is a segment that the host does not delay
        for block in blocks:
            for step in block:
                if not isinstance(step, Segment) or step.host_floor_s is not None:
                    steps.append(step)
                    last = None
                elif last is None or last.has_noise != step.has_noise:
                    steps.append(step)
                    last = step
                else:
                    both = id(last), id(step)
                    if both not in self.merged:
                        device_s, host_s = last.device_s + step.device_s, last.host_s + step.host_s
                        self.merged[both] = Segment(device_s, None, host_s, step.has_noise)
                    steps[-1] = last = self.merged[both]
        return steps


def _merge(first: Segment, device_s: Array, host_s: float) -> Segment:
    """A segment and what follows it as one; the maxima distribute over the sums."""
    assert first.host_floor_s is not None
    floor = np.maximum(first.host_floor_s + device_s, first.host_s + np.maximum(device_s, host_s))
    return Segment(first.device_s + device_s, floor, first.host_s + host_s, has_noise=True)


def _merged(ops: Sequence[Op]) -> Segment:
    """Many computes in a row as one: the same as merging one after another."""
    device_s = np.stack([_held_s(op) for op in ops])
    host_s = np.array([[op.host_s] for op in ops if not isinstance(op, RingPass)])
    rest_s = np.cumsum(device_s[::-1], axis=0)[::-1] - device_s  # of those after each
    floors = np.cumsum(host_s, axis=0) - host_s + np.maximum(device_s, host_s) + rest_s
    return Segment(device_s.sum(axis=0), floors.max(axis=0), float(host_s.sum()), has_noise=True)


def _held_s(op: Op) -> Array:
    assert isinstance(op, Compute | Collective)
    return op.device_s if isinstance(op, Compute) else op.seconds


def _without_host(steps: list[Step]) -> list[Step] | None:
    """Drop the host's clock where it cannot matter: where the device alone is at every point the later one.

    It holds for a block at whose beginning the device is not before the host, and None says that the block may end
    otherwise. Noise and messages only delay the device.
    """
    device_s: Array | float = 0.0
    host_s = since_s = 0.0  # since_s: issued since the device was last at least where the host was
    leads = True
    for step in steps:
        issued_s = sum(step.host_s) if isinstance(step, RingPass) else step.host_s
        if isinstance(step, Segment):
            assert step.host_floor_s is not None
            device_s = device_s + step.device_s
            leads = leads and bool(np.all(host_s + step.host_floor_s <= device_s))
        host_s += issued_s
        since_s = since_s + issued_s if isinstance(step, Message | Recv | Load) else 0.0
    if since_s and not (leads and np.all(host_s <= device_s)):
        return None
    if not leads:
        return steps
    return [
        Segment(step.device_s, None, step.host_s, step.has_noise) if isinstance(step, Segment) else step
        for step in steps
    ]
