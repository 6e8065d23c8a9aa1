"""Measured collectives: ring all-gathers by their two protocols, all-reduces by number of GPUs and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from kvrsim.errors import InputError
from kvrsim.interp import cell, log_interp
from kvrsim.io.schema import NonNegative, Range
from kvrsim.program import Array
from kvrsim.units import MAX_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherRates:
    """Two segments by size: a latency-bound protocol, and one that cuts a message into chunks and pipelines them.

    Over p ranks with pieces of n bytes, M = (p - 1 + own_share) n bytes pass the busiest link, in
    launch_s + (p - 1) hop_s + min(M / small, (sqrt(M / large) + sqrt(setup_s))^2).
    """

    launch_s: NonNegative  # of the collective
    hop_s: NonNegative  # of each of its p - 1 steps
    small_bytes_per_s: float  # of the latency-bound protocol
    large_bytes_per_s: float  # of the pipelined one, for endless messages
    setup_s: NonNegative  # of the pipeline
    own_share: NonNegative  # the copy of a rank's own piece, as a share of one link crossing

    def step_s(self, piece_bytes: Array, num_ranks: int) -> Array:
        """One of the p - 1 steps of the ring, for pieces of that size; the launch comes before the first."""
        steps = num_ranks - 1
        nbytes = (steps + self.own_share) * piece_bytes
        large_s = (np.sqrt(nbytes / self.large_bytes_per_s) + np.sqrt(self.setup_s)) ** 2
        return np.asarray(self.hop_s + np.minimum(nbytes / self.small_bytes_per_s, large_s) / steps)

    def seconds(self, total_bytes: Array, num_ranks: int) -> Array:
        """Of an all-gather of equal pieces, `total_bytes` together."""
        return self.launch_s + (num_ranks - 1) * self.step_s(total_bytes / num_ranks, num_ranks)


Bytes = Annotated[int, Range(least=1, most=MAX_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredAllReduce:
    """All-reduces of one number of GPUs: latency_s + n / rate, the rate between measured sizes on logarithmic scales.

    Below the smallest size and beyond the largest the rate stays.
    """

    num_gpus: Annotated[int, Range(least=2, most=2**16)]
    latency_s: NonNegative  # of the smallest
    nbytes: tuple[Bytes, ...]  # of the tensor, rising
    bytes_per_s: tuple[float, ...]  # of the fastest method at that size, latency apart

    def __post_init__(self) -> None:
        sizes = list(self.nbytes)
        if not sizes or len(sizes) != len(self.bytes_per_s) or sorted(set(sizes)) != sizes:
            raise InputError("nbytes", sizes, "rising whole numbers from 1, as many as bytes_per_s")

    def seconds(self, nbytes: Array) -> Array:
        """Of tensors of that size, any shape."""
        return self.latency_s + nbytes / log_interp(np.maximum(nbytes, 1.0), self.nbytes, self.bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceRates:
    """Measured inside one node."""

    measured: tuple[MeasuredAllReduce, ...]  # number of GPUs rising

    def __post_init__(self) -> None:
        counts = [table.num_gpus for table in self.measured]
        if not counts or sorted(set(counts)) != counts:
            raise InputError("measured", counts, "tables for at least one number of GPUs, rising")

    def covers(self, num_gpus: int) -> bool:
        """Whether that number of GPUs lies within what was measured."""
        return self.measured[0].num_gpus <= num_gpus <= self.measured[-1].num_gpus

    def seconds(self, nbytes: Array, num_gpus: int) -> Array:
        """Of a tensor of `nbytes`, any shape; between two measured numbers of GPUs, between their times."""
        low, share = cell(num_gpus, [table.num_gpus for table in self.measured])
        below_s = self.measured[int(low)].seconds(nbytes)
        return below_s if not share else (1 - share) * below_s + share * self.measured[int(low) + 1].seconds(nbytes)
