"""Service times of requests on a group of GPUs, and how consecutive prompts overlap there.

A prompt starts on rank 0 at time S. Alone, rank i is free at S + f_i, and the first token comes at S + T, where T is
the last f_i. Rank i has slack w_i: it could start w_i later without delaying any rank, because it waits for the
KV-cache or the activations of earlier ranks anyway. The next prompt starts as soon as rank 0 is free. A rank i that
still works on the prompt before, later than S + w_i by d_i, delays itself and the ranks after it by at most d_i,
because finish times are maxima of sums of earlier times. That holds for prompts of any lengths. Where a message holds
its sender, a delay also reaches ranks before i, so the prompt starts on rank 0 that much later instead.

f_i / T and w_i / T are tabulated by class of new tokens and cached prefix; f is rounded up, w down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrsim.program import Array
from planner.capacity.workloads.workload import Lengths

if TYPE_CHECKING:
    from planner.packing.prices import Packing

Classes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """When the ranks of a group are free for the next prompt, by the class of a prompt."""

    finish: tuple[tuple[float, ...], ...]  # [class][rank]: when the rank is free, over T
    slack: tuple[tuple[float, ...], ...]  # [class][rank]: how much later it could start, over T
    holds: bool = False  # whether a message holds its sender

    @classmethod
    def whole(cls) -> Overlap:
        """No overlap: all ranks are busy until the first token; one class."""
        return cls(finish=((1.0,),), slack=((0.0,),))

    @property
    def num_ranks(self) -> int:
        """Ranks that are told apart."""
        return len(self.finish[0])

    @property
    def busy(self) -> tuple[float, ...]:
        """Mean of the ranks' f_i - w_i over T, from when they have something to do; one a class."""
        return tuple((sum(ends) - sum(waits)) / len(ends) for ends, waits in zip(self.finish, self.slack, strict=True))

    def run(self, kind: int, took_s: float, begin_s: float, free_s: Sequence[float]) -> tuple[float, list[float]]:
        """A prompt of a class that takes `took_s` alone, on ranks that are free at `free_s`.

        Returns when rank 0 starts it, and when each rank is free after it; its first token is the last rank's.
        """
        finish, delay_s = self.finish[kind], 0.0
        ends_s = []
        for end, slack, busy_s in zip(finish, self.slack[kind], free_s, strict=True):
            late_s = busy_s - begin_s - slack * took_s
            if late_s > delay_s:
                delay_s = late_s
            ends_s.append(begin_s + end * took_s + delay_s)
        if self.holds and delay_s:
            begin_s += delay_s
            ends_s = [begin_s + end * took_s for end in finish]
        return begin_s, ends_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """Service times of requests on groups of one size; arrays of shape (N,)."""

    num_gpus: int
    ttft_s: Array  # from start to first token, alone; inf where it does not fit in memory
    hold_s: Array  # how long decoding, or a cache that leaves, occupies the group after the first token
    length_class: Classes  # row of `overlap`
    strategies: tuple[str, ...]  # of each class
    overlap: Overlap
    new_tokens: Lengths  # for order and packing
    cached_prefix: Lengths
    packing: Packing | None = None  # None: prompts run one by one
    least_s: Array | None = None  # of packed prompts, about the least busy time of a group each; None: they are not
    hold_gpus: int = 1  # GPUs that are busy meanwhile

    @classmethod
    def plain(cls, ttft_s: Array, *, num_gpus: int = 1, hold_s: Array | None = None) -> Service:
        """Given times without overlap; prompts with shorter times count as shorter."""
        ranks = np.argsort(np.argsort(ttft_s, kind="stable"), kind="stable")
        return cls(
            num_gpus=num_gpus,
            ttft_s=ttft_s,
            hold_s=np.zeros(len(ttft_s)) if hold_s is None else hold_s,
            length_class=np.zeros(len(ttft_s), dtype=np.int64),
            strategies=("single",),
            overlap=Overlap.whole(),
            new_tokens=1 + ranks,
            cached_prefix=np.zeros(len(ttft_s), dtype=np.int64),
        )

    def of(self, chosen: npt.NDArray[np.int64]) -> Service:
        """The requests of these indices."""
        return Service(
            num_gpus=self.num_gpus,
            ttft_s=self.ttft_s[chosen],
            hold_s=self.hold_s[chosen],
            length_class=self.length_class[chosen],
            strategies=self.strategies,
            overlap=self.overlap,
            new_tokens=self.new_tokens[chosen],
            cached_prefix=self.cached_prefix[chosen],
            packing=self.packing,
            least_s=None if self.least_s is None else self.least_s[chosen],
            hold_gpus=self.hold_gpus,
        )

    @property
    def busy_s(self) -> Array:
        """Busy time of a group, on the mean of its GPUs, that each prompt takes before its first token."""
        if self.least_s is not None:
            return self.least_s
        return np.asarray(self.ttft_s * np.array(self.overlap.busy)[self.length_class])
