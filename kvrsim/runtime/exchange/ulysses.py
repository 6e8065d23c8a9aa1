"""Ulysses: tokens are split outside attention, heads inside attention, with an all-to-all before and after it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvrsim.errors import InputError
from kvrsim.runtime.attention import lower_right
from kvrsim.runtime.exchange import OwnAttentionExchange
from kvrsim.runtime.geometry import KvLayout
from kvrsim.runtime.kv_cache import Chunk, KvBuffer, Memory, PrefixCache

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry
    from kvrsim.runtime.plan import RunPlan
    from kvrsim.runtime.transport import Edge


class Ulysses(OwnAttentionExchange):
    """Each rank keeps the K and V of all tokens for its own heads; a KV head may be on several ranks."""

    @classmethod
    def edges(cls, plan: RunPlan, size: int) -> list[Edge]:
        """Return the edges between all ranks."""
        return [(src, dst) for src in range(size) for dst in range(size) if src != dst]

    @classmethod
    def check(cls, plan: RunPlan, geometry: Geometry) -> None:
        """Raise InputError where the model cannot run the plan, or its heads do not divide over the ranks."""
        super().check(plan, geometry)
        heads, ranks = geometry.num_attention_heads, len(plan.partition.chunk_lens)
        for layout in geometry.layouts:
            kv_heads = layout.num_key_value_heads if isinstance(layout, KvLayout) else ranks
            if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
                raise InputError("gpus", ranks, f"ranks that {heads} heads and {kv_heads} KV heads divide into")

    def own_share(self, whole: Any) -> Any:
        """Return the rank's heads of a layer's K or V."""
        layout = self.buffer(self.geometry.linked_layers[0]).layout
        times = layout.model_heads_per_kv_head
        first = self.rank * whole.shape[1] // self.transport.size
        first -= first % times
        return whole[:, first : first + layout.num_key_value_heads * times]

    def make_cache(self, chunk: Chunk, memory: Memory | None) -> PrefixCache:
        """Return a cache of all tokens for the rank's heads."""
        whole = Chunk(start=0, length=self.plan.context_len, batch=self.plan.batch)
        size = self.transport.size
        each = memory or [None] * self.geometry.num_hidden_layers
        buffers = [
            _HeadsBuffer(self.geometry, layout.share(size), whole, one) if isinstance(layout, KvLayout) else None
            for layout, one in zip(self.geometry.layouts, each, strict=True)
        ]
        return PrefixCache(buffers, self)

    def attend(self, query: Any, scale: float | None) -> Any:
        """Exchange the chunk's tokens of all heads for all tokens of the rank's heads; attend; exchange back."""
        assert self.layer is not None
        buffer, size, boundaries = self.buffer(self.layer), self.transport.size, self.plan.partition.boundaries
        own_heads, kv_heads, batch = query.shape[1] // size, buffer.layout.num_key_value_heads, query.shape[0]
        keys, values = buffer.chunk_kv
        leaving = []
        for rank in range(size):
            first = rank * keys.shape[1] // size
            shares = keys[:, first : first + kv_heads], values[:, first : first + kv_heads]
            leaving.append(_rows(query[:, rank * own_heads : (rank + 1) * own_heads], *shares))
        width = batch * own_heads * query.shape[-1]
        queries = query.new_empty(self.plan.context_len, width)
        arrived = self._all_to_all(leaving, list(self.plan.partition.chunk_lens))
        for (start, end), rows in zip(pairwise(boundaries), arrived, strict=True):
            queries[start:end].copy_(rows[:, :width])
            buffer.data[start:end].copy_(rows[:, width:])
        del leaving, arrived
        self.clock.mark("attending", self.layer)
        queries = queries.unflatten(1, (batch, own_heads, -1)).permute(1, 2, 0, 3)
        whole_keys, whole_values = buffer.views(buffer.data)
        out = _rows(lower_right(self.geometry.attention, queries, whole_keys, whole_values, scale))
        parts = self._all_to_all([out[start:end] for start, end in pairwise(boundaries)], [query.shape[2]] * size)
        return torch.cat([part.unflatten(1, (batch, own_heads, -1)) for part in parts], dim=2).permute(1, 2, 0, 3)

    def _all_to_all(self, leaving: list[Any], rows: list[int]) -> list[Any]:
        """Send each rank its part, the next rank first; return the parts from all ranks; `rows`: their lengths."""
        rank, size = self.rank, self.transport.size
        parts, receives = list(leaving), []
        for shift in range(1, size):
            src = (rank - shift) % size
            parts[src] = leaving[rank].new_empty(rows[src], leaving[rank].shape[1])
            receives.append((src, self.transport.irecv(parts[src], src)))
        for shift in range(1, size):
            self.send(leaving[(rank + shift) % size], self.layer, (rank + shift) % size)
        for src, message in receives:
            self.wait_for(message, self.layer, src)
        self.finish()
        return parts


class _HeadsBuffer(KvBuffer):
    """K and V of all tokens for the rank's heads. Attention gets all heads of the chunk, and exchanges them."""

    chunk_kv: tuple[Any, Any]

    def write(self, keys: Any, values: Any) -> None:
        """Keep the chunk's K and V of all heads for attention."""
        step = self.layout.model_heads_per_kv_head
        self.chunk_kv = keys[:, ::step], values[:, ::step]

    def keys_values(self) -> tuple[Any, Any]:
        """Return the chunk's K and V of all heads."""
        return self.chunk_kv


def _rows(*parts: Any) -> Any:
    """Join tensors [B, H, c, D] to contiguous rows of tokens: [c, B H D + ...]."""
    return torch.cat([part.permute(2, 0, 1, 3).flatten(1) for part in parts], dim=1)
