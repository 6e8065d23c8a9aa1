"""Ring attention: the ranks' K and V go round while each attends to those that it holds."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from kvrsim.runtime.exchange.attending import AttendingExchange
from kvrsim.runtime.exchange.kernels import Merged, block


class Ring(AttendingExchange):
    """Chunks follow each other: a rank passes on the blocks of later ranks without attending to them."""

    @cached_property
    def _blocks(self) -> list[Any]:
        """Where others' blocks arrive in turn: one is worked on while the next one comes."""
        own, size = self.buffer(self.geometry.linked_layers[0]).data, self.transport.size
        longest = max(self.plan.partition.chunk_lens)
        return [own.new_empty(longest, own.shape[1]) for _ in range(min(2, size - 1))]

    def scratch(self) -> list[Any]:
        """What one layer at a time needs besides what is kept."""
        return self._blocks

    def attend(self, query: Any, scale: float | None) -> Any:
        """Attend to the own block while it goes to the next rank, and so on round the ring; merge in fp32."""
        layer, transport, lens = self.layer, self.transport, self.plan.partition.chunk_lens
        assert layer is not None
        buffer, merged = self.buffer(layer), Merged()
        held, owner = buffer.data, transport.rank
        for turn in range(transport.size):
            coming, after = None, (owner - 1) % transport.size
            if turn < transport.size - 1:
                room = self._blocks[turn % 2][: lens[after]]
                coming = transport.irecv_prev(room)
                self.send(held, layer, (transport.rank + 1) % transport.size)
            self.clock.mark("attending", layer)
            keys, values = buffer.views(held)
            self.add(merged, owner, query, keys, values, scale)
            if coming is not None:
                self.wait_for(coming, layer, (transport.rank - 1) % transport.size)
                self.finish()
                held, owner = room, after
        return merged.out.to(query.dtype)

    def add(self, merged: Merged, owner: int, query: Any, key: Any, value: Any, scale: float | None) -> None:
        """Attend to a rank's block: to the own one causally, to those before in full."""
        if owner <= self.transport.rank:
            causal = owner == self.transport.rank
            merged.add(*self.block(query, key, value, scale, causal=causal))

    def block(self, query: Any, key: Any, value: Any, scale: float | None, *, causal: bool) -> tuple[Any, Any]:
        """Attention to a block with the model's kernel, and the log of its sums of exponentials."""
        return block(self.geometry.attention, query, key, value, scale, causal=causal)


EXCHANGE = Ring
