"""The attention map of a prefill over several ranks, with the counts of the KV-Runahead paper (Figures 2, 4 and 5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kvrsim.errors import InputError
from kvrsim.scenario import Partition
from kvrsim.strategies import KVR_E, TSP, Strategy

COUNTED = "tsp, kvr-e, kvr-s, kvr-p or kvr-b, whose attention the paper counts"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMap:
    """The dot products of queries and keys of one head in one layer, and the K and V that cross links in that layer.

    The paper's example of 11 tokens on 4 GPUs, with TSP and with KV-Runahead:

    >>> tsp = AttentionMap(chunks=(3, 3, 3, 2), gathers=True)
    >>> kvr = AttentionMap(chunks=(5, 3, 2, 1), gathers=False)
    >>> tsp.dot_products, kvr.dot_products
    ((33, 33, 33, 22), (25, 24, 20, 11))
    >>> tsp.kv_entries, kvr.kv_entries
    (66, 46)
    >>> f"{tsp.coverage:.0%}, {kvr.coverage:.0%}"
    '55%, 82%'
    """

    chunks: tuple[int, ...]  # tokens of each rank
    gathers: bool  # True: each rank has the K and V of all tokens (TSP); False: of those up to its chunk's end
    query_blocks: tuple[int, ...] = field(default=())  # attention calls of each rank; empty: one each

    @classmethod
    def of(cls, strategy: Strategy, chunks: tuple[int, ...], query_blocks: tuple[int, ...] | None) -> AttentionMap:
        """The map of a strategy with a partition. Raises InputError for a strategy that the paper does not count."""
        if not (strategy == TSP or strategy.chains) or strategy.group_size != 1:
            raise InputError("explain", strategy.name, COUNTED)
        return cls(chunks=chunks, gathers=strategy.gathers_kv, query_blocks=query_blocks or ())

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(self.chunks)

    @property
    def rectangles(self) -> tuple[tuple[int, int, int], ...]:
        """What matrix products compute, from top to bottom: first query, number of queries, number of keys."""
        blocks = self.query_blocks or (1,) * len(self.chunks)
        start = 0
        rectangles = []
        for chunk, count in zip(self.chunks, blocks, strict=True):
            for block in range(count):
                first = start + chunk * block // count
                end = start + chunk * (block + 1) // count
                keys = self.num_tokens if self.gathers else end
                rectangles.append((first, end - first, keys))
            start += chunk
        return tuple(rectangles)

    @property
    def dot_products(self) -> tuple[int, ...]:
        """Dot products that each rank computes, masked ones included."""
        blocks = self.query_blocks or (1,) * len(self.chunks)
        sizes = iter(queries * keys for _, queries, keys in self.rectangles)
        return tuple(sum(next(sizes) for _ in range(count)) for count in blocks)

    @property
    def needed(self) -> int:
        """Dot products on and below the diagonal: those that the causal mask keeps."""
        return self.num_tokens * (self.num_tokens + 1) // 2

    @property
    def coverage(self) -> float:
        """Share of the computed dot products that the causal mask keeps; the rest is wasted (Figure 2)."""
        return self.needed / sum(self.dot_products)

    @property
    def kv_entries(self) -> int:
        """Rows of K and of V that cross a link in one layer: Net_tsp and Net_kvr, twice, for K and V."""
        if self.gathers:
            return 2 * (len(self.chunks) - 1) * self.num_tokens
        return 2 * sum(list(accumulate(self.chunks))[:-1])

    def least_share(self) -> float:
        """Equation 1: the least share of one GPU's TTFT, if the work grows as attention does and is balanced."""
        squares = sum(chunk**2 for chunk in self.chunks) / self.num_tokens**2
        return (1 + squares) / (2 * len(self.chunks))


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperCounts:
    """The paper's counts of a prefill, and those of even chunks with TSP and KV-Runahead."""

    strategy: str
    attention: AttentionMap
    single_s: float  # TTFT of one GPU, whether or not it fits

    @property
    def maps(self) -> dict[str, AttentionMap]:
        """The prefill, and even chunks with both ways to hand on K and V, by title."""
        even = Partition.even(self.attention.num_tokens, len(self.attention.chunks)).chunk_lens
        maps = {self.strategy: self.attention}
        for strategy in (TSP, KVR_E):
            if strategy.name not in maps:
                maps[strategy.name] = AttentionMap(chunks=even, gathers=strategy.gathers_kv)
        return maps

    @property
    def least_s(self) -> float:
        """Equation 1 with these chunks, seconds."""
        return self.single_s * self.attention.least_share()

    @property
    def ttft_star_s(self) -> float:
        """Equation 4: TTFT*(p), the same with even chunks, seconds."""
        num_ranks = len(self.attention.chunks)
        return self.single_s / 2 * (1 / num_ranks + 1 / num_ranks**2)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "dot_products": list(self.attention.dot_products),
            "needed": self.attention.needed,
            "coverage": self.attention.coverage,
            "kv_entries": self.attention.kv_entries,
            "least_s": self.least_s,
            "ttft_star_s": self.ttft_star_s,
        }
