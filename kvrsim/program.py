"""The operations that a strategy is written in.

A strategy is a program a rank and kind of layer: a list of these operations, run once a layer. Every
number in an operation may be an array over a batch of partitions, shape (B,), so that one program
describes thousands of candidates; the event executor takes B = 1.

Two clocks run on a rank. The host issues operations one after another, `host_s` each, and never waits
for the device. The device (the compute stream) starts an operation when it is free and the host has
begun to issue it, and ends it no earlier than the host has issued all of it:
`end = max(max(device, host_begin) + device_s, host_begin + host_s)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Work on the rank's own compute stream."""

    name: str  # what a timeline calls it
    device_s: Array  # seconds of device time, shape (B,)
    host_s: float = 0.0  # seconds that the host needs to issue it


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Hand a message to the link towards `dst`; messages on a link go first in, first out.

    It moves beside computation, or, as a rendezvous, only once the receiver has come to its Recv, and then
    holds both compute streams until the last byte has left (what torch.distributed's send and recv do).
    """

    dst: int  # rank that receives
    nbytes: Array  # message size, shape (B,)
    host_s: float = 0.0
    rendezvous: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recv:
    """Hold the compute stream until the next message from `src` has arrived."""

    src: int
    host_s: float = 0.0
    rendezvous: bool = False  # as of the Send that it matches


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGather:
    """A ring of p - 1 steps: at each, pass the piece received last to the next rank.

    Dataflow, not a barrier: a piece moves when the sender holds it, both ranks have reached the
    collective and the link is free. A rank goes on when it has received all pieces.
    """

    nbytes: Array  # this rank's own piece, shape (B,)
    host_s: float = 0.0


Op = Compute | Send | Recv | AllGather


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """All that every rank does from the prompt to the first token."""

    strategy: str
    prologue: tuple[tuple[Op, ...], ...]  # per rank: embedding
    layers: tuple[tuple[tuple[Op, ...], ...], ...]  # per kind of layer, per rank
    layer_kind_index: tuple[int, ...]  # which kind each layer is, in order
    epilogue: tuple[tuple[Op, ...], ...]  # per rank: final norm and head, on the last rank

    @property
    def num_ranks(self) -> int:
        """Ranks that take part."""
        return len(self.prologue)

    def ops(self, rank: int) -> Sequence[tuple[int | None, Op]]:
        """The whole sequence of one rank as (layer or None, operation)."""
        sequence: list[tuple[int | None, Op]] = [(None, op) for op in self.prologue[rank]]
        for layer, kind in enumerate(self.layer_kind_index):
            sequence.extend((layer, op) for op in self.layers[kind][rank])
        sequence.extend((None, op) for op in self.epilogue[rank])
        return sequence
