"""GatherRates: seconds of a ring all-gather, whose small messages take another protocol than its large ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvrsim.io.json_text import JsonObject
from kvrsim.program import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherRates:
    """Two segments by size: a latency-bound protocol, and one that cuts a message into chunks and pipelines them.

    Over p ranks with pieces of n bytes, M = (p - 1 + own_share) n bytes pass the busiest link, in
    launch_s + (p - 1) hop_s + min(M / small, (sqrt(M / large) + sqrt(setup_s))^2).
    """

    launch_s: float  # of the collective
    hop_s: float  # of each of its p - 1 steps
    small_bytes_per_s: float  # of the latency-bound protocol
    large_bytes_per_s: float  # of the pipelined one, for messages without end
    setup_s: float  # of the pipeline
    own_share: float  # the copy of a rank's own piece, as a share of one link crossing

    @classmethod
    def read(cls, data: JsonObject) -> GatherRates:
        """Check the keys of the profile's links.gather section."""
        data.only(cls.__slots__)
        rates = {key: data.number(key) for key in ("small_bytes_per_s", "large_bytes_per_s")}
        rest = {key: data.number(key, allow_zero=True) for key in ("launch_s", "hop_s", "setup_s", "own_share")}
        return cls(**rates, **rest)

    def step_s(self, piece_bytes: Array, num_ranks: int) -> Array:
        """One of the p - 1 steps of the ring, for pieces of that size; the launch comes before the first."""
        steps = num_ranks - 1
        nbytes = (steps + self.own_share) * piece_bytes
        large_s = (np.sqrt(nbytes / self.large_bytes_per_s) + np.sqrt(self.setup_s)) ** 2
        return np.asarray(self.hop_s + np.minimum(nbytes / self.small_bytes_per_s, large_s) / steps)

    def seconds(self, total_bytes: Array, num_ranks: int) -> Array:
        """Of an all-gather of equal pieces, `total_bytes` together."""
        return self.launch_s + (num_ranks - 1) * self.step_s(total_bytes / num_ranks, num_ranks)

    def faster(self, factor: float) -> GatherRates:
        """Every rate `factor` times as high."""
        return replace(
            self,
            launch_s=self.launch_s / factor,
            hop_s=self.hop_s / factor,
            setup_s=self.setup_s / factor,
            small_bytes_per_s=self.small_bytes_per_s * factor,
            large_bytes_per_s=self.large_bytes_per_s * factor,
        )

    def slower(self, factor: float) -> GatherRates:
        """Over links with so many times less bandwidth; what does not grow with the bytes stays."""
        return replace(
            self,
            small_bytes_per_s=self.small_bytes_per_s / factor,
            large_bytes_per_s=self.large_bytes_per_s / factor,
        )
