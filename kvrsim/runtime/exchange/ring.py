"""Ring attention: the ranks' blocks of K and V travel in a circle, and each rank attends to its current block."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvrsim.errors import InputError
from kvrsim.runtime.attention import Merged, block_attention
from kvrsim.runtime.exchange import OwnAttentionExchange
from kvrsim.runtime.exchange.gather import zigzag_pieces
from kvrsim.scenario import Partition

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry
    from kvrsim.runtime.plan import RunPlan


class RingAttention(OwnAttentionExchange):
    """Ring attention with consecutive chunks: a rank sends the blocks of later ranks on without attending to them."""

    @cached_property
    def _blocks(self) -> list[Any]:
        """At most two buffers for others' blocks: attention reads one while the next block arrives in the other."""
        own, size = self.buffer(self.geometry.linked_layers[0]).data, self.transport.size
        longest = max(self.plan.partition.chunk_lens)
        return [own.new_empty(longest, own.shape[1]) for _ in range(min(2, size - 1))]

    def attend(self, query: Any, scale: float | None) -> Any:
        """Attend to the rank's block while it is sent to the next rank, then to each received block; merge in fp32."""
        layer, transport, lens = self.layer, self.transport, self.plan.partition.chunk_lens
        assert layer is not None
        buffer, merged = self.buffer(layer), Merged()
        block, owner = buffer.data, self.rank
        for turn in range(transport.size):
            receive, previous = None, (owner - 1) % transport.size
            if turn < transport.size - 1:
                landing = self._blocks[turn % 2][: lens[previous]]
                receive = transport.irecv_prev(landing)
                self.send(block, layer, (self.rank + 1) % transport.size)
            self.clock.mark("attending", layer)
            queries, seen, causal = self.visible(owner)
            if seen:
                keys, values = (part[:, :, :seen] for part in buffer.views(block))
                part = block_attention(
                    self.geometry.attention, query[:, :, queries:], keys, values, scale, causal=causal
                )
                merged.add(*part, first=queries)
            if receive is not None:
                self.wait_for(receive, layer, (self.rank - 1) % transport.size)
                self.finish()
                block, owner = landing, previous
        return merged.out.to(query.dtype)

    def visible(self, owner: int) -> tuple[int, int, bool]:
        """Return the first query that sees `owner`'s block, the number of visible keys, and whether it is causal."""
        return 0, self.plan.partition.chunk_lens[owner] if owner <= self.rank else 0, owner == self.rank


class StripedRing(RingAttention):
    """Each rank has every p-th token. Every block is causal; in a later rank's block, a query sees one key less."""

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
        """Return every p-th position."""
        return [range(rank, plan.context_len, len(plan.partition.chunk_lens))]

    @classmethod
    def first_token_rank(cls, plan: RunPlan, size: int) -> int:
        """Return the rank of the last token."""
        return (plan.context_len - 1) % size

    def visible(self, owner: int) -> tuple[int, int, bool]:
        """Leave out the first query for a later rank's block, because this query sees none of its keys."""
        skipped = int(owner > self.rank)
        return skipped, self.plan.partition.chunk_lens[self.rank] - skipped, True


class ZigzagRing(RingAttention):
    """Each rank has an early and a late piece.

    All queries see the early piece of a later rank; only queries of the late piece see the whole block of an earlier
    rank.
    """

    positions_of = staticmethod(zigzag_pieces)

    def visible(self, owner: int) -> tuple[int, int, bool]:
        """Return the visible part; early pieces are in reverse order of the ranks, late pieces in their order."""
        lens = self.plan.partition.chunk_lens
        if owner > self.rank:
            return 0, lens[owner] // 2, False
        return lens[self.rank] // 2 if owner < self.rank else 0, lens[owner], owner == self.rank
