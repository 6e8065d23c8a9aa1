"""ring_all_reduce: a sum over all ranks by messages between neighbours."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kvrsim.runtime.ranks.transport import Ring, ring_all_gather


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
