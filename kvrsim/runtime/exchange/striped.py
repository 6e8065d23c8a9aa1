"""Striped attention: a ring in which each rank has every p-th token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.runtime.exchange.kernels import Merged
from kvrsim.runtime.exchange.ring import Ring
from kvrsim.scenario import Partition

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry
    from kvrsim.runtime.plan import RunPlan


class Striped(Ring):
    """Every block is causal for all ranks alike; a query sees one key less of a later rank's."""

    @classmethod
    def check(cls, plan: RunPlan, geometry: Geometry) -> None:
        """Raise InputError where the model cannot run the plan, or its chunks are not stripes."""
        super().check(plan, geometry)
        ranks = len(plan.partition.chunk_lens)
        even = Partition.even(plan.context_len, ranks)
        if plan.partition != even:
            accepted = f"{','.join(map(str, even.chunk_lens))}: every rank has one token in {ranks}"
            raise InputError("partition", plan.chunks, accepted)

    @classmethod
    def positions_of(cls, plan: RunPlan, rank: int) -> list[range]:
        """Every p-th token."""
        return [range(rank, plan.context_len, len(plan.partition.chunk_lens))]

    @classmethod
    def giver_of(cls, plan: RunPlan, size: int) -> int:
        """The rank that has the last token."""
        return (plan.context_len - 1) % size

    def add(self, merged: Merged, owner: int, query: Any, key: Any, value: Any, scale: float | None) -> None:
        """Attend to a rank's stripe; the first query sees nothing of a later rank's."""
        skipped = int(owner > self.transport.rank)
        seen = query.shape[2] - skipped
        if seen:
            keys, values = key[:, :, :seen], value[:, :, :seen]
            merged.add(*self.block(query[:, :, skipped:], keys, values, scale, causal=True), first=skipped)


EXCHANGE = Striped
