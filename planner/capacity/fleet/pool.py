"""Pool: equal groups of GPUs behind one queue, their failures, and the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvrsim.choices import Order
from kvrsim.program import Array
from planner.capacity.fleet.service import Service

MOST_RETRIES = 100  # of one request; after that it counts as unserved


@dataclass(frozen=True, kw_only=True, slots=True)
class Outages:
    """When groups fail, and how long repairs take."""

    uptimes_s: Callable[[int], Iterator[float]]  # uptimes of a group before each failure
    repair_s: float

    @classmethod
    def drawn(cls, mtbf_s: float, repair_s: float, seed: int, *, replication: int = 0, bucket: int = 0) -> Outages:
        """Exponential times between failures, independent between replications, buckets and groups.

        A group has the same failures whatever the number of other groups is.
        """

        def uptimes_s(group: int) -> Iterator[float]:
            rng = np.random.default_rng([seed, replication, 1 + bucket, 1 + group])  # arrivals: [seed, replication]
            while True:
                yield float(rng.exponential(mtbf_s))

        return cls(uptimes_s=uptimes_s, repair_s=repair_s)


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
    slowness: tuple[float, ...] = ()  # slowdown of the first groups; all others have 1
    outages: Outages | None = None

    def __post_init__(self) -> None:
        assert np.isfinite(self.service.ttft_s).all()
        assert self.replicas >= 1

    def factors(self) -> list[float]:
        """Slowdown of each group."""
        return [*self.slowness[: self.replicas], *[1.0] * (self.replicas - len(self.slowness))]

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

    begin_s: Array  # last start on a group; inf: given up
    end_s: Array  # first token; inf: given up
    group: npt.NDArray[np.int64]  # group that served it; -1: none
    retries: npt.NDArray[np.int64]  # restarts after failures
    busy_s: float  # sum over groups of their GPUs' mean busy time: prefills, lost ones included, and decoding
    lost_s: float  # part of it spent on prompts that a failure ended


@dataclass(slots=True)
class Record:
    """Results while a simulation runs."""

    count: int
    begin_s: list[float] = field(init=False)
    end_s: list[float] = field(init=False)
    group: list[int] = field(init=False)
    retries: list[int] = field(init=False)
    busy_s: float = 0.0
    lost_s: float = 0.0

    def __post_init__(self) -> None:
        self.begin_s, self.end_s = [np.inf] * self.count, [np.inf] * self.count
        self.group, self.retries = [-1] * self.count, [0] * self.count

    def done(self) -> PoolRun:
        """The results as arrays."""
        return PoolRun(
            begin_s=np.array(self.begin_s),
            end_s=np.array(self.end_s),
            group=np.array(self.group, dtype=np.int64),
            retries=np.array(self.retries, dtype=np.int64),
            busy_s=self.busy_s,
            lost_s=self.lost_s,
        )
