"""Where requests come from, as a user names it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.capacity.workloads.files import AZURE, MOONCAKE, read_trace
from planner.capacity.workloads.synthetic import Synthetic
from planner.capacity.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A trace or a specification, with what is done to its times."""

    trace: Workload | None  # None: drawn at random
    synthetic: Synthetic | None
    rate_scale: float = 1.0  # times as many requests in the same time
    time_compression: float = 1.0  # times as fast

    @classmethod
    def of(cls, text: str, *, rate_scale: float = 1.0, time_compression: float = 1.0) -> Source:
        """FILE, azure:FILE, mooncake:FILE or synthetic:SPEC."""
        kind, mark, rest = text.partition(":")
        scales = {"rate_scale": rate_scale, "time_compression": time_compression}
        if mark and kind == "synthetic":
            return cls(trace=None, synthetic=Synthetic.parse(rest), **scales)
        if mark and kind in (AZURE, MOONCAKE):
            return cls(trace=read_trace(rest, kind), synthetic=None, **scales)
        return cls(trace=read_trace(text), synthetic=None, **scales)

    @property
    def is_random(self) -> bool:
        """Whether another seed gives other requests of the same kind."""
        return self.synthetic is not None

    def workload(self, seed: int, replication: int = 0) -> Workload:
        """The requests; independent ones for each replication where they are drawn at random."""
        rng = np.random.default_rng([seed, replication])
        if self.synthetic is not None:
            return self.synthetic.scaled(self.rate_scale).draw(rng).compressed(self.time_compression)
        assert self.trace is not None
        return self.trace.compressed(self.time_compression).scaled(self.rate_scale, rng)
