"""Service times of requests on a group of GPUs, and the pipelined overlap of consecutive prompts.

A prompt starts on a group at time S. Rank i is free at S + f_i, and the first token comes at S + T, where T is the
last f_i. Rank i has slack w_i: it could start w_i later without delaying any rank, because it waits for the KV-cache
of earlier tokens anyway. So the next prompt can start before the first is done, once no rank delays it beyond its
slack: at S + max over ranks of (f_i - w'_i), with w' of the next prompt. Both then take exactly as long as alone,
because finish times are maxima of sums of earlier times. Only the last prompt matters: each f_i is at least its own
w_i, so the prompt before it has already left the rank.

f_i / T and w_i are tabulated by class of new tokens and cached prefix; f is rounded up, w down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrsim.program.operations import Array
from planner.capacity.workloads.workload import Lengths

if TYPE_CHECKING:
    from planner.packing.prices import Packing

Classes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """When a group can start the next prompt, by the classes of the current and the next prompt."""

    release: tuple[float, ...]  # when rank 0 is free, over T; one a class
    follow: tuple[tuple[float, ...], ...]  # [current class][next class]: earliest start of the next prompt, over T
    busy: tuple[float, ...]  # mean of the ranks' f_i over T; one a class

    @classmethod
    def whole(cls) -> Overlap:
        """No overlap: all ranks are busy until the first token; one class."""
        return cls(release=(1.0,), follow=((1.0,),), busy=(1.0,))


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
