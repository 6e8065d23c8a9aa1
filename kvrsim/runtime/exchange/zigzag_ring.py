"""A balanced ring: each rank has an early and a late piece, whose K and V go round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrsim.runtime.exchange.kernels import Merged
from kvrsim.runtime.exchange.ring import Ring
from kvrsim.runtime.exchange.zigzag import pieces_of

if TYPE_CHECKING:
    from kvrsim.runtime.plan import RunPlan


class ZigzagRing(Ring):
    """Every block of another rank is seen in full: its early piece by all queries, or both by the late ones."""

    @classmethod
    def positions_of(cls, plan: RunPlan, rank: int) -> list[range]:
        """The early piece, then the late one."""
        return pieces_of(plan, rank)

    def add(self, merged: Merged, owner: int, query: Any, key: Any, value: Any, scale: float | None) -> None:
        """Attend to a rank's pieces; early ones follow each other from the last rank, late ones from the first."""
        rank, lens = self.transport.rank, self.plan.partition.chunk_lens
        first, seen = 0, lens[owner]
        if owner > rank:
            seen //= 2
        elif owner < rank:
            first = lens[rank] // 2
        if seen:
            keys, values = key[:, :, :seen], value[:, :, :seen]
            merged.add(*self.block(query[:, :, first:], keys, values, scale, causal=owner == rank), first=first)


EXCHANGE = ZigzagRing
