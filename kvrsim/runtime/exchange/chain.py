"""Exchanges in which the model computes attention: one GPU, KV-Runahead with and without forwarding, and TSP."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from torch import Tensor

from kvrsim.runtime.exchange import Exchange
from kvrsim.runtime.kv_cache import Chunk, KvBuffer, Memory, PrefixCache
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.transport import Edge


class Single(Exchange):
    """The last rank runs the whole context; the other ranks have no part."""

    @classmethod
    def chunk_of(cls, plan: RunPlan, rank: int, size: int) -> Chunk | None:
        if rank < size - 1:
            return None
        return Chunk(start=0, length=plan.context_len, batch=plan.batch, room=plan.output_tokens - 1)


class ChainExchange(Exchange):
    """Each rank waits for the prefix from the previous rank and sends it on with its own chunk.

    A layer's receives are posted before the attention of the previous layer, because gloo moves a message only once its
    receive is posted.
    """

    def run(self, input_ids: Tensor) -> Tensor | None:
        """Post the first layer's receives, then run the chunk."""
        self.post(self.geometry.linked_layers[0])
        return super().run(input_ids)

    def before_attention(self, layer: int) -> None:
        """Wait for the prefix; send it on with the chunk (a state after the scan); post the next layer's receives."""
        self.receive(layer)
        if isinstance(self.buffer(layer), KvBuffer):
            self.forward_kv(layer)
        self.post_after(layer)

    def after_scan(self, layer: int) -> None:
        self.forward_state(layer)

    def post_after(self, layer: int) -> None:
        """Post the receives of the next layer that has K and V or a state."""
        for later in self.geometry.linked_layers:
            if later > layer:
                self.post(later)
                return


class DirectChain(ChainExchange):
    """A chain without forwarding: each rank sends its K and V to all later ranks; states go from rank to rank."""

    @classmethod
    def edges(cls, plan: RunPlan, size: int) -> list[Edge]:
        """Return the edges from each rank to all later ranks."""
        return list(combinations(range(size), 2))

    def incoming(self, layer: int) -> list[tuple[int, Tensor]]:
        """Return the visible part of each earlier rank's piece; it is received directly into the buffer."""
        buffer = self.buffer(layer)
        if not isinstance(buffer, KvBuffer):
            return super().incoming(layer)
        messages = []
        for src, (start, end) in enumerate(pairwise(self.plan.partition.boundaries[: self.rank + 1])):
            first_seen = max(start, buffer.first_seen)
            if first_seen < end:
                messages.append((src, buffer.rows(first_seen, end)))
        return messages

    def outgoing(self, layer: int) -> list[tuple[int, Tensor]]:
        """Return the chunk's K and V for each later rank, limited to the tokens that this rank sees."""
        buffer = self.buffer(layer)
        if not isinstance(buffer, KvBuffer):
            return super().outgoing(layer)
        chunk = buffer.chunk
        messages = []
        for dst in range(self.rank + 1, self.transport.size):
            start_there = self.plan.partition.boundaries[dst]
            first_seen = max(chunk.start, buffer.layout.first_seen(start_there))
            if first_seen < chunk.end:
                messages.append((dst, buffer.rows(first_seen, chunk.end)))
        return messages

    def before_attention(self, layer: int) -> None:
        """Send the chunk's K and V to all later ranks, then wait for those of all earlier ranks."""
        if isinstance(self.buffer(layer), KvBuffer):
            self.forward_kv(layer)
        self.receive(layer)
        self.post_after(layer)


class GatherExchange(Exchange):
    """TSP: each rank gathers the K and V of all tokens in its own buffer. A state goes from rank to rank."""

    @classmethod
    def chunk_of(cls, plan: RunPlan, rank: int, size: int) -> Any:
        """Return the rank's chunk, with memory for all tokens."""
        return replace(super().chunk_of(plan, rank, size), total_len=plan.context_len)

    def make_cache(self, chunk: Chunk, memory: Memory | None) -> PrefixCache:
        """Let attention see all tokens; masks hide the later ones. Flash kernels see only tokens up to the chunk's end.

        transformers passes no mask for a single query; then later tokens are left out, too.
        """
        visible_len: int | None = chunk.end
        if self.geometry.attention != "flash" and chunk.length > 1:
            visible_len = chunk.total_len
        return super().make_cache(replace(chunk, visible_len=visible_len), memory)

    def before_attention(self, layer: int) -> None:
        """Gather K and V, or wait for a state."""
        buffer = self.buffer(layer)
        if isinstance(buffer, KvBuffer):
            self.gather(buffer.data, layer)
        else:
            self.post(layer)
            self.receive(layer)

    def after_scan(self, layer: int) -> None:
        self.forward_state(layer)
