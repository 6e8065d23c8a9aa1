"""Zigzag: each rank has an early and a late piece; all pieces' K and V go to all ranks, one layer's at a time."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvrsim.runtime.exchange.attending import AttendingExchange
from kvrsim.runtime.exchange.kernels import lower_right

if TYPE_CHECKING:
    from kvrsim.runtime.plan import RunPlan


def pieces_of(plan: RunPlan, rank: int) -> list[range]:
    """Where a rank's early and late piece stand: the ranks take turns backwards, then forwards.

    The last rank has the first piece and the last one. A piece may be empty.
    """
    lens = plan.partition.chunk_lens
    early = [length // 2 for length in lens]
    late = [length - half for length, half in zip(lens, early, strict=True)]
    first = sum(early[rank + 1 :])
    second = sum(early) + sum(late[:rank])
    return [range(first, first + early[rank]), range(second, second + late[rank])]


class Zigzag(AttendingExchange):
    """Gathered pieces are joined in the order of the context, in memory that all layers use."""

    @classmethod
    def positions_of(cls, plan: RunPlan, rank: int) -> list[range]:
        """The early piece, then the late one."""
        return pieces_of(plan, rank)

    @cached_property
    def _whole(self) -> Any:
        """K and V of all tokens, in the order of the context."""
        own = self._own(self.geometry.linked_layers[0])
        return own.new_zeros(self.plan.context_len, own.shape[1])

    @cached_property
    def _others(self) -> Any:
        """Where the other ranks' pieces arrive; all ranks' in the backend's own all-gather."""
        own = self._own(self.geometry.linked_layers[0])
        rows = self.plan.context_len - (len(own) if self.plan.gather == "ring" else 0)
        return own.new_zeros(rows, own.shape[1])

    def _own(self, layer: int) -> Any:
        return self.buffer(layer).data

    def scratch(self) -> list[Any]:
        """What one layer at a time needs besides what is kept."""
        return [self._whole, self._others]

    def before_attention(self, layer: int) -> None:
        """Gather and join."""
        if self.transport.size == 1:
            self._whole.copy_(self._own(layer))
            return
        self.clock.mark("wait", layer)
        pieces = self._gathered(layer)
        self.mark_received(layer, None)
        for rank, piece in enumerate(pieces):
            runs = pieces_of(self.plan, rank)
            for run, part in zip(runs, piece.split([len(run) for run in runs]), strict=True):
                self._whole[run.start : run.stop].copy_(part)

    def _gathered(self, layer: int) -> list[Any]:
        """Every rank's piece."""
        lens, rank = self.plan.partition.chunk_lens, self.transport.rank
        if self.plan.gather == "ring":
            pieces = list(self._others.split([*lens[:rank], *lens[rank + 1 :]]))
            pieces.insert(rank, self._own(layer))
            self.transport.gather_pieces(pieces)
            return pieces
        boundaries = self.plan.partition.boundaries
        pieces = [self._others[start:end] for start, end in pairwise(boundaries)]
        pieces[rank].copy_(self._own(layer))
        self.transport.all_gather(self._others, boundaries)
        return pieces

    def attend(self, query: Any, scale: float | None) -> Any:
        """Each piece attends to all tokens up to its end."""
        assert self.layer is not None
        buffer, found, first = self.buffer(self.layer), [], 0
        for run in pieces_of(self.plan, self.transport.rank):
            if run:
                keys, values = buffer.views(self._whole[: run.stop])
                part = query[:, :, first : first + len(run)]
                found.append(lower_right(self.geometry.attention, part, keys, values, scale))
            first += len(run)
        return torch.cat(found, dim=2)


EXCHANGE = Zigzag
