"""Attention: softmax attention over K and V of heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers.indexer import Indexer, Tokens, index_key_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Softmax attention over K and V: multi-head, grouped-query or multi-query."""

    projections: tuple[Gemm, ...]  # the layer's input to Q, K, V (and an output gate): separate matrices or one fused
    output: tuple[Gemm, ...]  # of the attention's output
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # of queries and keys
    v_head_dim: int  # of values
    sliding_window: int | None = None  # tokens that a query sees, itself included; None: all before it
    attention_chunk: int | None = None  # a query sees only tokens of its own chunk of so many; None: of all
    qk_norm: bool = False  # whether queries and keys are normalised
    rotary: bool = True  # whether they are rotated by their positions
    gate: bool = False  # whether a projection of the input scales the output
    indexer: Indexer | None = None  # None: a query attends to all keys that it sees

    @property
    def title(self) -> str:
        """In a few words, for tables."""
        if self.indexer is not None:
            return f"sparse attention, {self.indexer.top_k} keys"
        if self.attention_chunk is not None:
            return f"attention in chunks of {self.attention_chunk}"
        return "full attention" if self.sliding_window is None else f"window of {self.sliding_window}"

    @property
    def is_sparse(self) -> bool:
        """Whether a query attends to chosen keys."""
        return self.indexer is not None

    @property
    def matrices(self) -> tuple[Gemm, ...]:
        """All weight matrices."""
        return (*self.projections, *(self.indexer.projections if self.indexer else ()), *self.output)

    @property
    def reach(self) -> int | None:
        """Tokens, itself included, that a query can see at most; None: no limit."""
        return self.sliding_window if self.attention_chunk is None else self.attention_chunk

    def token_bytes(self, element_bytes: float) -> float:
        """Cache of one token; element_bytes: of a cached element."""
        elements = self.num_key_value_heads * (self.head_dim + self.v_head_dim)
        return elements * element_bytes + index_key_bytes(self.indexer)

    def state_bytes(self, element_bytes: float) -> float:
        """Nothing besides the cache."""
        return 0.0

    def cache_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """Cache of so many tokens, all kept."""
        return tokens * self.token_bytes(element_bytes)

    def needed_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """Of the cache of so many tokens, what the tokens after them need: of a window, its tail."""
        reach = self.reach
        return self.cache_bytes(tokens if reach is None else np.minimum(tokens, reach), element_bytes)

    def share(self, size: int) -> Attention:
        """What one of `size` GPUs holds: its heads, where a KV head may lie on several (Shoeybi et al., 2019)."""
        kv_heads = max(1, self.num_key_value_heads // size)
        return replace(
            self,
            projections=tuple(self._share_of(gemm, size, kv_heads) for gemm in self.projections),
            output=tuple(gemm.share(size) for gemm in self.output),
            num_attention_heads=self.num_attention_heads // size,
            num_key_value_heads=kv_heads,
            indexer=None if self.indexer is None else self._indexer_share(self.indexer, size, kv_heads),
        )

    def _indexer_share(self, indexer: Indexer, size: int, kv_heads: int) -> Indexer:
        """Index heads that choose for one KV head each lie where their KV head lies; others are on every GPU."""
        if indexer.num_heads != self.num_key_value_heads:
            return indexer
        projections = tuple(self._share_of(gemm, size, kv_heads) for gemm in indexer.projections)
        return replace(indexer, num_heads=kv_heads, projections=projections)

    def _share_of(self, gemm: Gemm, size: int, kv_heads: int) -> Gemm:
        if gemm.split == "kv_heads":
            return replace(gemm, out_features=gemm.out_features // self.num_key_value_heads * kv_heads)
        if gemm.split == "qkv_heads":
            kv_width = self.num_key_value_heads * (self.head_dim + self.v_head_dim)
            width = (gemm.out_features - kv_width) // size + kv_heads * (self.head_dim + self.v_head_dim)
            return replace(gemm, out_features=width)
        return gemm.share(size)
