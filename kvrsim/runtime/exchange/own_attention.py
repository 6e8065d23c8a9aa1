"""Exchanges that compute attention in place of the model: zigzag, the rings and Ulysses."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise, permutations
from typing import Any

import torch
from torch import Tensor

from kvrsim.errors import InputError
from kvrsim.runtime.attention import Merged, block_attention, lower_right
from kvrsim.runtime.exchange import Exchange
from kvrsim.runtime.geometry import Geometry, StateLayout
from kvrsim.runtime.kv_cache import Chunk, KvBuffer, Memory, PrefixCache, make_buffers
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.transport import Edge
from kvrsim.scenario import Partition


class OwnAttentionExchange(Exchange):
    """Each rank keeps the K and V of its own tokens, in their order, and computes attention itself."""

    @classmethod
    def chunk_of(cls, plan: RunPlan, rank: int, size: int) -> Any:
        """Return the rank's tokens, which need not be consecutive."""
        return replace(super().chunk_of(plan, rank, size), start=0)

    @classmethod
    def check(cls, plan: RunPlan, geometry: Geometry) -> None:
        """Raise InputError where a layer does not attend to the K and V of all tokens by plain attention."""
        super().check(plan, geometry)
        reason = geometry.why_no_own_attention()
        for layout in geometry.layouts:
            if isinstance(layout, StateLayout):
                reason = "its layers keep states"
            elif layout is not None and (layout.sliding_window or plan.context_len) < plan.context_len:
                reason = reason or f"its layers see a window of {layout.sliding_window} tokens"
        if reason is not None:
            accepted = f"single, tsp, kvr or kvr-direct for {geometry.model_type}: {reason}"
            raise InputError("strategy", plan.name, accepted)

    @classmethod
    def positions_of(cls, plan: RunPlan, rank: int) -> list[range]:
        """Return the positions of the rank's tokens, one range per group of consecutive tokens."""
        start, end = plan.partition.boundaries[rank : rank + 2]
        return [range(start, end)]

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the rank's tokens, shape [c]."""
        runs = self.positions_of(self.plan, self.rank)
        return torch.tensor(list(chain.from_iterable(runs)), device=self.geometry.device)

    def run(self, input_ids: Tensor) -> Tensor | None:
        ids = input_ids[:, self.positions]
        return self.forward(ids, 0, self.cache, is_last=self.emits_token, positions=self.positions, attend=self.attend)


def zigzag_pieces(plan: RunPlan, rank: int) -> list[range]:
    """Return the positions of a rank's early and late piece; early pieces are in reverse order of the ranks.

    The last rank has the first and the last piece. A piece may be empty.
    """
    lens = plan.partition.chunk_lens
    early = [length // 2 for length in lens]
    late = [length - half for length, half in zip(lens, early, strict=True)]
    first = sum(early[rank + 1 :])
    second = sum(early) + sum(late[:rank])
    return [range(first, first + early[rank]), range(second, second + late[rank])]


class Zigzag(OwnAttentionExchange):
    """Zigzag: pieces are gathered and joined in the order of the context, in memory that all layers share."""

    positions_of = staticmethod(zigzag_pieces)

    @cached_property
    def _whole(self) -> Tensor:
        """K and V of all tokens, in the order of the context."""
        rows = self.buffer(self.geometry.linked_layers[0]).data
        return rows.new_zeros(self.plan.context_len, rows.shape[1])

    @cached_property
    def _pieces(self) -> Tensor:
        """Gathered K and V of all tokens, in the order of the ranks."""
        return torch.zeros_like(self._whole)

    def before_attention(self, layer: int) -> None:
        """Gather K and V and join them in the order of the context."""
        boundaries = self.plan.partition.boundaries
        self._pieces[boundaries[self.rank] : boundaries[self.rank + 1]].copy_(self.buffer(layer).data)
        self.gather(self._pieces, layer)
        for rank, (start, end) in enumerate(pairwise(boundaries)):
            runs = zigzag_pieces(self.plan, rank)
            for run, part in zip(runs, self._pieces[start:end].split([len(run) for run in runs]), strict=True):
                self._whole[run.start : run.stop].copy_(part)

    def attend(self, query: Tensor, scale: float | None) -> Tensor:
        """Attend from each piece to all tokens up to its end."""
        buffer = self.buffer(self.layer)
        runs = zigzag_pieces(self.plan, self.rank)
        parts = []
        for run, part in zip(runs, query.split([len(run) for run in runs], dim=2), strict=True):
            if run:
                keys, values = buffer.views(self._whole[: run.stop])
                parts.append(lower_right(self.geometry.attention, part, keys, values, scale))
        return torch.cat(parts, dim=2)


class RingAttention(OwnAttentionExchange):
    """Ring attention with consecutive chunks: a rank sends the blocks of later ranks on without attending to them."""

    @cached_property
    def _blocks(self) -> list[Tensor]:
        """At most two buffers for others' blocks: attention reads one while the next block arrives in the other."""
        rows = self.buffer(self.geometry.linked_layers[0]).data
        size = self.transport.size
        longest = max(self.plan.partition.chunk_lens)
        return [rows.new_empty(longest, rows.shape[1]) for _ in range(min(2, size - 1))]

    def attend(self, query: Tensor, scale: float | None) -> Tensor:
        """Attend to the rank's block while it is sent to the next rank, then to each received block; merge in fp32."""
        transport = self.transport
        lens = self.plan.partition.chunk_lens
        buffer = self.buffer(self.layer)
        merged = Merged()
        block = buffer.data
        owner = self.rank
        for turn in range(transport.size):
            receive = None
            previous = (owner - 1) % transport.size
            if turn < transport.size - 1:
                landing = self._blocks[turn % 2][: lens[previous]]
                receive = transport.irecv_prev(landing)
                self.send(block, self.layer, (self.rank + 1) % transport.size)
            self.clock.mark("attending", self.layer)
            queries, visible, causal = self.visible(owner)
            if visible:
                keys, values = buffer.views(block)
                out, lse = block_attention(
                    self.geometry.attention,
                    query[:, :, queries:],
                    keys[:, :, :visible],
                    values[:, :, :visible],
                    scale,
                    causal=causal,
                )
                merged.add(out, lse, first=queries)
            if receive is not None:
                self.wait_for(receive, self.layer, (self.rank - 1) % transport.size)
                self.finish()
                block = landing
                owner = previous
        return merged.out.to(query.dtype)

    def visible(self, owner: int) -> tuple[int, int, bool]:
        """Return the first query that sees `owner`'s block, the number of keys, and whether a causal mask applies."""
        visible = 0
        if owner <= self.rank:
            visible = self.plan.partition.chunk_lens[owner]
        return 0, visible, owner == self.rank


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
        """Leave out the first query for the block of a later rank: the mask hides all keys of the block from it."""
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
        if owner < self.rank:
            return lens[self.rank] // 2, lens[owner], False
        return 0, lens[owner], True


class Ulysses(OwnAttentionExchange):
    """Each rank keeps the K and V of all tokens for its own heads; a KV head may be on several ranks."""

    @classmethod
    def edges(cls, plan: RunPlan, size: int) -> list[Edge]:
        """Return the edges between all ranks."""
        return list(permutations(range(size), 2))

    def make_cache(self, chunk: Chunk, memory: Memory | None) -> PrefixCache:
        """Return a cache of all tokens for the rank's heads."""
        whole = Chunk(start=0, length=self.plan.context_len, batch=self.plan.batch)
        return PrefixCache(make_buffers(self.geometry.share(self.transport.size), whole, memory, _HeadsBuffer), self)

    def attend(self, query: Tensor, scale: float | None) -> Tensor:
        """Exchange the chunk's tokens of all heads for all tokens of the rank's heads; attend; exchange back."""
        buffer = self.buffer(self.layer)
        size = self.transport.size
        boundaries = self.plan.partition.boundaries
        own_heads = query.shape[1] // size
        kv_heads = buffer.layout.num_key_value_heads
        batch = query.shape[0]
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

    def _all_to_all(self, leaving: list[Tensor], rows: list[int]) -> list[Tensor]:
        """Send each rank its part, the next rank first; return the parts from all ranks; `rows`: their lengths."""
        rank = self.rank
        size = self.transport.size
        parts = list(leaving)
        receives = []
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

    chunk_kv: tuple[Tensor, Tensor]

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Keep the chunk's K and V of all heads for attention."""
        step = self.layout.model_heads_per_kv_head
        self.chunk_kv = keys[:, ::step], values[:, ::step]

    def keys_values(self) -> tuple[Tensor, Tensor]:
        """Return the chunk's K and V of all heads."""
        return self.chunk_kv


def _rows(*parts: Tensor) -> Tensor:
    """Join tensors [B, H, c, D] to contiguous rows of tokens: [c, B H D + ...]."""
    return torch.cat([part.permute(2, 0, 1, 3).flatten(1) for part in parts], dim=1)
