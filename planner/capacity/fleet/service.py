"""How long each request holds a group of GPUs, in the form in which queues need it.

A prompt begins on a group at S. Rank i is free again at S + f_i, and the first token comes at S + T, T the last
f_i. Rank i could begin up to w_i later and no rank would end later: while the KV-cache of the tokens before comes
down the chain, it waits. So the next prompt can begin before the first is done, as soon as no rank of it has to
wait longer than it would have waited anyway: at S + max over ranks of (f_i - w'_i), w' of the next prompt. Then
both run as if alone, to the digit, because finish times are maxima of sums of what came before. It is enough to
look at the last prompt: each f_i is at least its w_i, so the one before was out of the way already.

f_i / T and w_i are tabulated by classes of new tokens and cached prefix; f is rounded up, w down.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrsim.program import Array
from planner.capacity.workloads.workload import Lengths

Classes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """When a group can begin the next prompt, by class of the one that it has and of the next."""

    release: tuple[float, ...]  # rank 0 is free again, over T; one a class
    follow: tuple[tuple[float, ...], ...]  # [class of the one before][class of the next]: may begin, over T
    busy: tuple[float, ...]  # mean of the ranks' f_i over T; one a class

    @classmethod
    def whole(cls) -> Overlap:
        """All ranks are held until the first token: one class."""
        return cls(release=(1.0,), follow=((1.0,),), busy=(1.0,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Seconds of several prompts run as one, by their new tokens and the longest of their cached prefixes."""

    tokens: int  # at most, in a pack
    prefixes: tuple[int, ...]  # cached prefixes that have a row, rising
    seconds: tuple[tuple[float, ...], ...]  # [row][new tokens, 0 to `tokens`]
    classes: tuple[tuple[int, ...], ...]  # the same, the class of such a prompt

    def holds(self, tokens: int, prefix: int) -> bool:
        """Whether prompts of so many new tokens may run as one: within the limit, and within the group's memory."""
        return tokens <= self.tokens and self.of(tokens, prefix)[0] < float("inf")

    def of(self, tokens: int, prefix: int) -> tuple[float, int]:
        """Seconds alone and class of a pack; inf seconds where it does not fit in memory."""
        row = bisect_left(self.prefixes, prefix)
        return self.seconds[row][tokens], self.classes[row][tokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What requests ask of a group of one size; arrays of shape (N,)."""

    num_gpus: int
    ttft_s: Array  # from begin to first token, alone; inf where it does not fit in memory
    hold_s: Array  # that the group is held after the first token, by decoding on its last GPU
    length_class: Classes  # row of `overlap`
    strategies: tuple[str, ...]  # of each class
    overlap: Overlap
    new_tokens: Lengths  # for order and packing
    cached_prefix: Lengths
    packing: Packing | None = None  # None: prompts run one by one

    @classmethod
    def plain(cls, ttft_s: Array, *, num_gpus: int = 1, hold_s: Array | None = None) -> Service:
        """Times alone, ranks free together; shorter prompts are taken to be those that are done sooner."""
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
        )
