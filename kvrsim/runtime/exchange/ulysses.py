"""Ulysses: tokens are split outside of attention, heads inside, with an all-to-all at either end."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvrsim.errors import InputError
from kvrsim.runtime.cache import PrefixCache
from kvrsim.runtime.exchange.attending import AttendingExchange
from kvrsim.runtime.exchange.kernels import lower_right
from kvrsim.runtime.kept.buffers import KvBuffer
from kvrsim.runtime.kept.layers import KeptTokens

if TYPE_CHECKING:
    from kvrsim.runtime.geometry import Geometry
    from kvrsim.runtime.plan import RunPlan


class Ulysses(AttendingExchange):
    """Each rank keeps the K and V of all tokens, of its own heads; a KV head may lie on several ranks."""

    @classmethod
    def edges(cls, plan: RunPlan, size: int) -> list[tuple[int, int]]:
        """Between all ranks."""
        return [(src, dst) for src in range(size) for dst in range(size) if src != dst]

    @classmethod
    def tokens_held(cls, plan: RunPlan, rank: int, size: int, kept: KeptTokens) -> int:
        """Tokens of all heads that take as much memory."""
        cls.place_of(plan, rank, size)
        return -(-plan.context_len * _own_kv_heads(kept, size) // kept.num_key_value_heads)

    @classmethod
    def check(cls, plan: RunPlan, geometry: Geometry) -> None:
        """Raise InputError where the model cannot run the plan, or its heads do not divide into the ranks."""
        super().check(plan, geometry)
        heads, ranks = geometry.num_attention_heads, len(plan.partition.chunk_lens)
        for kept in geometry.kept:
            kv_heads = kept.num_key_value_heads if isinstance(kept, KeptTokens) else ranks
            if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
                raise InputError("gpus", ranks, f"ranks that {heads} heads and {kv_heads} KV heads divide into")

    def own_part(self, whole: Any) -> Any:
        """The rank's own heads."""
        buffer = self.buffer(self.geometry.linked_layers[0])
        own = buffer.kept.num_key_value_heads * buffer.kept.model_heads_per_kv_head
        first = self.transport.rank * whole.shape[1] // self.transport.size
        first -= first % buffer.kept.model_heads_per_kv_head
        return whole[:, first : first + own]

    def make_cache(self, room: list[Any] | None) -> PrefixCache:
        """Of all tokens, of the rank's heads."""
        size = self.transport.size
        buffers = [
            None if not isinstance(kept, KeptTokens)
            else _HeadsBuffer(self.geometry, kept, size, self.plan, None if room is None else room[layer])
            for layer, kept in enumerate(self.geometry.kept)
        ]  # fmt: skip
        return PrefixCache(buffers, on_update=self.on_update)

    def attend(self, query: Any, scale: float | None) -> Any:
        """Swap the chunk's tokens of all heads for all tokens of the own heads; attend; swap back."""
        buffer, size, boundaries = self.buffer(self._layer), self.transport.size, self.plan.partition.boundaries
        own_heads, kv_heads, batch = query.shape[1] // size, buffer.kept.num_key_value_heads, query.shape[0]
        keys, values = buffer.given
        leaving = []
        for rank in range(size):
            first = rank * keys.shape[1] // size
            shares = keys[:, first : first + kv_heads], values[:, first : first + kv_heads]
            leaving.append(_rows(query[:, rank * own_heads : (rank + 1) * own_heads], *shares))
        width = batch * own_heads * query.shape[-1]
        queries = query.new_empty(self.plan.context_len, width)
        coming = self._all_to_all(leaving, [end - start for start, end in pairwise(boundaries)])
        for (start, end), rows in zip(pairwise(boundaries), coming, strict=True):
            queries[start:end].copy_(rows[:, :width])
            buffer.data[start:end].copy_(rows[:, width:])
        del leaving, coming
        self.clock.mark("attending", self._layer)
        queries = queries.unflatten(1, (batch, own_heads, -1)).permute(1, 2, 0, 3)
        whole_keys, whole_values = buffer.views(buffer.data)
        out = _rows(lower_right(self.geometry.attention, queries, whole_keys, whole_values, scale))
        parts = self._all_to_all([out[start:end] for start, end in pairwise(boundaries)], [query.shape[2]] * size)
        return torch.cat([part.unflatten(1, (batch, own_heads, -1)) for part in parts], dim=2).permute(1, 2, 0, 3)

    @property
    def _layer(self) -> int:
        assert self.layer is not None
        return self.layer

    def _all_to_all(self, leaving: list[Any], rows: list[int]) -> list[Any]:
        """To each rank its part, the next rank's first; from each so many rows, the own ones as they are."""
        rank, size = self.transport.rank, self.transport.size
        found, pending = list(leaving), []
        for shift in range(1, size):
            src = (rank - shift) % size
            found[src] = leaving[rank].new_empty(rows[src], leaving[rank].shape[1])
            pending.append((src, self.transport.irecv(found[src], src)))
        for shift in range(1, size):
            self.send(leaving[(rank + shift) % size], self._layer, (rank + shift) % size)
        for src, message in pending:
            self.wait_for(message, self._layer, src)
        self.finish()
        return found


class _HeadsBuffer(KvBuffer):
    """All tokens' K and V of a share of the heads; what the model hands over, the chunk's of all heads, is `given`."""

    def __init__(self, geometry: Geometry, kept: KeptTokens, size: int, plan: RunPlan, data: Any) -> None:
        share = replace(kept, num_key_value_heads=_own_kv_heads(kept, size))
        width = plan.batch * share.elements
        room = None if data is None else data.flatten()[: plan.context_len * width].view(plan.context_len, width)
        super().__init__(geometry, share, prefix_len=0, chunk_len=plan.context_len, batch=plan.batch, data=room)
        self.given: tuple[Any, Any] = (None, None)

    def write(self, keys: Any, values: Any) -> None:
        """Wait for attention, which exchanges them."""
        step = self.kept.model_heads_per_kv_head
        self.given = keys[:, ::step], values[:, ::step]

    def keys_values(self) -> tuple[Any, Any]:
        """The chunk's."""
        return self.given


def _own_kv_heads(kept: KeptTokens, size: int) -> int:
    return max(1, kept.num_key_value_heads // size)


def _rows(*parts: Any) -> Any:
    """[B, H, c, D] of several kinds as rows of tokens, contiguous: [c, B H D + ...]."""
    return torch.cat([part.permute(2, 0, 1, 3).flatten(1) for part in parts], dim=1)


EXCHANGE = Ulysses
