"""Pool: equal groups of GPUs behind one queue, and the results."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvrsim.choices import Order
from kvrsim.program import Array
from planner.capacity.fleet.service import Service


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Requests and the groups that serve them. All requests fit on a group.

    A free group takes the first prompt of the queue; of several, the one that has been free longest, then the
    lowest number. A prompt may be taken while later ranks of the group still work on the one before.
    """

    arrival_s: Array  # shape (N,), ascending
    service: Service
    replicas: int
    order: Order = "first-come"

    def __post_init__(self) -> None:
        assert np.isfinite(self.service.ttft_s).all()
        assert self.replicas >= 1

    def ranks_in_queue(self) -> npt.NDArray[np.int64]:
        """Position of each request in a queue of all requests."""
        if self.order == "first-come":
            return np.arange(len(self.arrival_s))
        by_length = np.lexsort((np.arange(len(self.arrival_s)), self.service.new_tokens))
        places = np.empty(len(by_length), dtype=np.int64)
        places[by_length] = np.arange(len(by_length))
        return places


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRun:
    """Results by request; arrays of shape (N,)."""

    begin_s: Array  # start on a group
    end_s: Array  # first token
    group: npt.NDArray[np.int64]  # group that served it
    busy_s: float  # sum over groups of their GPUs' mean busy time: prefills and decoding


@dataclass(slots=True)
class Record:
    """Results while a simulation runs."""

    count: int
    begin_s: list[float] = field(init=False)
    end_s: list[float] = field(init=False)
    group: list[int] = field(init=False)
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.begin_s, self.end_s = [np.inf] * self.count, [np.inf] * self.count
        self.group = [-1] * self.count

    def done(self) -> PoolRun:
        """The results as arrays."""
        return PoolRun(
            begin_s=np.array(self.begin_s),
            end_s=np.array(self.end_s),
            group=np.array(self.group, dtype=np.int64),
            busy_s=self.busy_s,
        )
