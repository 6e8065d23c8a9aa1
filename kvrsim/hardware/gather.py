"""GatherRates: seconds of a ring all-gather, whose small messages take another protocol than its large ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrsim.io.schema import NonNegative
from kvrsim.program import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherRates:
    """Two segments by size: a latency-bound protocol, and one that cuts a message into chunks and pipelines them.

    Over p ranks with pieces of n bytes, M = (p - 1 + own_share) n bytes pass the busiest link, in
    launch_s + (p - 1) hop_s + min(M / small, (sqrt(M / large) + sqrt(setup_s))^2).
    """

    launch_s: NonNegative  # of the collective
    hop_s: NonNegative  # of each of its p - 1 steps
    small_bytes_per_s: float  # of the latency-bound protocol
    large_bytes_per_s: float  # of the pipelined one, for messages without end
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
