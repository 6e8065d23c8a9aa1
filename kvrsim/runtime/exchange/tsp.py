"""TSP: all chunks' K and V go to all ranks. A state goes from rank to rank even so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrsim.errors import InputError
from kvrsim.runtime.exchange.base import Exchange, not_a_chunk_a_rank
from kvrsim.runtime.kept.buffers import KvBuffer

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry
    from kvrsim.runtime.kept.layers import KeptTokens
    from kvrsim.runtime.plan import RunPlan


class Gathered(Exchange):
    """Each rank has the K and V of all tokens in place."""

    @classmethod
    def place_of(cls, plan: RunPlan, rank: int, size: int) -> int | None:
        """Every rank takes a chunk; raises InputError where there are not as many."""
        if len(plan.partition.chunk_lens) != size:
            raise not_a_chunk_a_rank(plan, size)
        return rank

    @classmethod
    def tokens_held(cls, plan: RunPlan, rank: int, size: int, kept: KeptTokens) -> int:
        """All."""
        cls.place_of(plan, rank, size)
        return plan.context_len

    @classmethod
    def check(cls, plan: RunPlan, geometry: Geometry) -> None:
        """Raise InputError where the model cannot run the plan, or the kernel leaves out what dense TSP computes."""
        super().check(plan, geometry)
        if plan.tsp_keys == "dense" and geometry.attention == "flash":
            raise InputError("attention", "flash", "eager or sdpa for dense TSP: flash leaves out what dense computes")

    def buffer_sizes(self) -> dict[str, int]:
        """Room for all tokens, seen up to the chunk's end, or all of them."""
        start, end = self.bounds()
        # To a single query transformers hands no mask, under which it would see the tokens after it.
        dense = self.plan.tsp_keys == "dense" and end - start > 1
        total = self.plan.context_len
        return super().buffer_sizes() | dict(total_len=total, visible_len=total if dense else end)

    def before_attention(self, layer: int) -> None:
        """Gather K and V; wait for a state."""
        if self.transport.size == 1:
            return
        buffer, boundaries = self.buffer(layer), self.plan.partition.boundaries
        if not isinstance(buffer, KvBuffer):
            self.post(layer)
            self.receive(layer)
            return
        self.clock.mark("wait", layer)
        if self.plan.gather == "ring":
            self.transport.ring_all_gather(buffer.data, boundaries)
        else:
            self.transport.all_gather(buffer.data, boundaries)
        self.mark_received(layer, None)

    def after_scan(self, layer: int) -> None:
        """Hand the state on."""
        self.hand_on(layer)


EXCHANGE = Gathered
