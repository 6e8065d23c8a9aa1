"""Rings: collectives made of messages between neighbours, an all-gather and an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return when the tensor holds the message, or may be used again; raises LinkError."""


class Ring(Protocol):
    """A rank's links to the rank before and the rank after it, the last one's being the first."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def isend_next(self, tensor: Any) -> Pending:
        """Send to rank + 1 beside computation."""

    def irecv_prev(self, tensor: Any) -> Pending:
        """Receive in place from rank - 1 beside computation."""


def ring_all_gather(ring: Ring, whole: Any, boundaries: Sequence[int]) -> None:
    """An all-gather of the rows between boundaries, of which boundaries[rank] to boundaries[rank + 1] are own."""
    gather_pieces(ring, [whole[start:end] for start, end in pairwise(boundaries)])


def gather_pieces(ring: Ring, pieces: Sequence[Any]) -> None:
    """p - 1 steps between neighbours: each passes on the piece that it received last. pieces: by rank, of any size."""
    piece = ring.rank
    for _ in range(ring.size - 1):
        before = (piece - 1) % ring.size
        coming = ring.irecv_prev(pieces[before])
        leaving = ring.isend_next(pieces[piece])
        coming.wait()
        leaving.wait()
        piece = before


def neighbour(ring: Ring, step: int) -> int:
    """The rank after (1) or before (-1) this one on the ring."""
    return (ring.rank + step) % ring.size


def ring_all_reduce(ring: Ring, flat: Any, scratch: Any) -> None:
    """Replace `flat`, [n], by its sum over all ranks: p - 1 steps that add up a p-th each, then an all-gather.

    Patarasuk and Yuan, 2009. scratch: memory for at least a p-th, rounded up; nothing else may use it meanwhile.
    """
    size, rank = ring.size, ring.rank
    boundaries = [len(flat) * piece // size for piece in range(size + 1)]
    parts = [flat[start:end] for start, end in pairwise(boundaries)]
    for step in range(size - 1):
        own, other = parts[(rank - 1 - step) % size], parts[(rank - 2 - step) % size]
        landing = scratch[: len(other)]
        coming = ring.irecv_prev(landing)
        leaving = ring.isend_next(own)
        coming.wait()
        other += landing
        leaving.wait()
    ring_all_gather(ring, flat, boundaries)
