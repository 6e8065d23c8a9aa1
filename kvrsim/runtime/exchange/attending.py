"""Attending: exchanges in which a rank's attention is their own, because its tokens do not follow a whole prefix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kvrsim.errors import InputError
from kvrsim.runtime.exchange.base import Exchange, KvPairs
from kvrsim.runtime.exchange.tsp import Gathered
from kvrsim.runtime.kept.layers import KeptTokens

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry
    from kvrsim.runtime.plan import RunPlan


class AttendingExchange(Exchange, ABC):
    """Each rank keeps the K and V of its own tokens, in their order, and attends with `attend`."""

    decodes = False
    place_of = Gathered.place_of

    @classmethod
    def tokens_held(cls, plan: RunPlan, rank: int, size: int, kept: KeptTokens) -> int:
        """The rank's own."""
        cls.place_of(plan, rank, size)
        return plan.partition.chunk_lens[rank]

    @classmethod
    def check(cls, plan: RunPlan, geometry: Geometry) -> None:
        """Raise InputError where attention is not plain, to all tokens' K and V of heads, in every layer."""
        super().check(plan, geometry)
        reason = _not_plain(geometry, plan.context_len)
        if reason is not None:
            raise InputError(
                "strategy", plan.name, f"single, tsp, kvr or kvr-direct for {geometry.model_type}: {reason}"
            )

    @classmethod
    def positions_of(cls, plan: RunPlan, rank: int) -> list[range]:
        """Where the rank's tokens stand, run by run."""
        start, end = plan.partition.boundaries[rank : rank + 2]
        return [range(start, end)]

    @cached_property
    def positions(self) -> Any:
        """Of the rank's tokens, shape [c]."""
        runs = self.positions_of(self.plan, self.transport.rank)
        return torch.tensor([at for run in runs for at in run], device=self.geometry.device)

    def part_of(self, kept: KvPairs) -> KvPairs:
        """The rank's own tokens."""
        return [None if pair is None else (self.own_part(pair[0]), self.own_part(pair[1])) for pair in kept]

    def own_part(self, whole: Any) -> Any:
        """What the rank keeps of a layer's K or V, [B, H, C, D]."""
        return whole[:, :, self.positions.to(whole.device)]

    def buffer_sizes(self) -> dict[str, int]:
        """Of the rank's own tokens."""
        return dict(prefix_len=0, chunk_len=self.plan.partition.chunk_lens[self.transport.rank], batch=self.plan.batch)

    def run(self, input_ids: Any) -> Any:
        """The rank's tokens, with its own attention."""
        assert self.cache is not None
        ids = input_ids[:, self.positions]
        return self.forward(ids, 0, self.cache, is_last=self.gives_token, attending=self)

    @abstractmethod
    def attend(self, query: Any, scale: float | None) -> Any:
        """The attention [B, H, c, E] of the layer to which the rank has come, of queries [B, H, c, D]."""


def _not_plain(geometry: Geometry, context_len: int) -> str | None:
    """Why blocks of keys cannot be attended to one by one; None where they can."""
    if geometry.alibi:
        return "its attention adds biases (ALiBi)"
    if geometry.family.eager_only is not None:
        return geometry.family.eager_only
    for kept in geometry.kept:
        if kept is not None and not isinstance(kept, KeptTokens):
            return "its layers keep states"
        if kept is not None and kept.is_latent:
            return "its layers keep latents"
        if kept is not None and kept.sliding_window is not None and kept.sliding_window < context_len:
            return f"its layers see a window of {kept.sliding_window} tokens"
    return None
