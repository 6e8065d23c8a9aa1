"""LinkSpec, a link between two devices, and Path, what a message from one GPU to another goes over."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvrsim.errors import InputError
from kvrsim.hardware.all_reduce import AllReduceRates
from kvrsim.hardware.gather import GatherRates
from kvrsim.io.json_text import JsonObject
from kvrsim.io.schema import NonNegative, read
from kvrsim.program import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpec:
    """A link between two devices, one way; full duplex."""

    name: str  # as in links.json
    bandwidth_bytes_per_s: float  # payload in one direction
    latency_s: NonNegative  # from the first byte sent to the first received, software included
    source: str  # citation, or who said so
    short_bytes_per_s: float | None = None  # at which messages short against the latency add time; None: as all
    gather: GatherRates | None = None  # of all-gathers over such links; None: as single messages
    all_reduce: AllReduceRates | None = None  # of all-reduces over such links; None: as two all-gathers
    like: str | None = None  # a link of the same kind, whose measured latencies hold and whose rates hold in proportion
    profile: str | None = None  # whose measurement these figures are; None: a datasheet's or a user's

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise InputError("link_bandwidth", self.bandwidth_bytes_per_s, "a finite bandwidth above 0")
        if not 0 <= self.latency_s < math.inf:
            raise InputError("link_latency", self.latency_s, "a finite time of at least 0")

    @classmethod
    def read(cls, data: JsonObject) -> LinkSpec:
        """As links.json has one; one without a source has its file as its source."""
        return read(cls, data, source=data.text("source", data.where))


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """What a message from one GPU to another goes over."""

    bandwidth_bytes_per_s: float  # of the slowest link on the way
    latency_s: float  # of all links on the way together
    shared_bus: bool  # whether all paths of the cluster share this one bandwidth
    short_bytes_per_s: float | None = None  # as of LinkSpec
    gather: GatherRates | None = None  # as of LinkSpec
    all_reduce: AllReduceRates | None = None  # as of LinkSpec

    def busy_s(self, nbytes: Array) -> Array:
        """How long a message of that size keeps the path busy; it arrives `latency_s` later.

        Where a short message is faster than the bandwidth, the time from end to end is
        max(latency + n / short, n / bandwidth).
        """
        long_s = nbytes * (1.0 / self.bandwidth_bytes_per_s)
        if self.short_bytes_per_s is None:
            return long_s
        return np.maximum(nbytes * (1.0 / self.short_bytes_per_s), long_s - self.latency_s)

    def gather_step_s(self, nbytes: Array, num_ranks: int) -> Array:
        """How long one step of a ring all-gather keeps the path busy."""
        return self.busy_s(nbytes) if self.gather is None else self.gather.step_s(nbytes, num_ranks)

    @property
    def gather_latency_s(self) -> float:
        """From a step's end on this path until the piece has come; measured steps hold it already."""
        return self.latency_s if self.gather is None else 0.0

    @property
    def gather_launch_s(self) -> float:
        """Before a rank's first step."""
        return 0.0 if self.gather is None else self.gather.launch_s
