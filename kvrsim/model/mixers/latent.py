"""Latent attention: one vector a token, or one for several tokens, stands for K and V of all heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers.indexer import Indexer, Tokens, index_key_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): K and V of all heads from one latent a token."""

    projections: tuple[
        Gemm, ...
    ]  # to queries (by a latent of their own, or not) and to the latent with its rotated key
    expand: Gemm  # from the latent to each head's key and value (kv_b_proj)
    output: tuple[Gemm, ...]
    num_attention_heads: int
    kv_lora_rank: int  # width of the latent
    qk_nope_head_dim: int  # of a head's query and key, not rotated
    qk_rope_head_dim: int  # rotated; one key for all heads
    v_head_dim: int
    indexer: Indexer | None = None  # None: a query attends to all keys
    rotary: bool = True
    gate: bool = False  # whether a projection of the input scales the output

    @property
    def title(self) -> str:
        """In a few words, for tables."""
        return "latent attention" if self.indexer is None else f"sparse latent attention, {self.indexer.top_k} keys"

    @property
    def head_dim(self) -> int:
        """Of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_key_value_heads(self) -> int:
        """Heads that are cached: one latent for all."""
        return 1

    @property
    def reach(self) -> int | None:
        """No limit."""
        return None

    @property
    def is_sparse(self) -> bool:
        """Whether a query attends to chosen keys."""
        return self.indexer is not None

    @property
    def matrices(self) -> tuple[Gemm, ...]:
        """All weight matrices."""
        return (*self.projections, *(self.indexer.projections if self.indexer else ()), self.expand, *self.output)

    def token_bytes(self, element_bytes: float) -> float:
        """The latent and the rotated key of one token, and its index key."""
        return (self.kv_lora_rank + self.qk_rope_head_dim) * element_bytes + index_key_bytes(self.indexer)

    def state_bytes(self, element_bytes: float) -> float:
        """Nothing besides the cache."""
        return 0.0

    def cache_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """Cache of so many tokens."""
        return tokens * self.token_bytes(element_bytes)

    def needed_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """All of it."""
        return self.cache_bytes(tokens, element_bytes)

    def share(self, size: int) -> LatentAttention:
        """What one of `size` GPUs holds: its heads; the latent and what makes it are on every GPU."""
        return replace(
            self,
            projections=tuple(gemm.share(size) for gemm in self.projections),
            expand=self.expand.share(size),
            output=tuple(gemm.share(size) for gemm in self.output),
            num_attention_heads=self.num_attention_heads // size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttention:
    """Attention to a window of tokens and to compressed entries before them (DeepSeek-V4).

    One vector of head_dim a token is key and value of all heads; every compress_ratio tokens make one entry.
    """

    projections: tuple[Gemm, ...]  # to queries, to the shared key, and to what is compressed
    output: tuple[Gemm, ...]  # of the attention's output, in two steps
    num_attention_heads: int
    head_dim: int
    rotary_dim: int  # of head_dim, rotated
    sliding_window: int
    compress_ratio: int  # tokens an entry; 0: the layer has the window alone
    indexer: Indexer | None = None  # chooses entries; None: a query attends to all of them

    @property
    def title(self) -> str:
        """In a few words, for tables."""
        if not self.compress_ratio:
            return f"window of {self.sliding_window}"
        chosen = "" if self.indexer is None else f", best {self.indexer.top_k}"
        return f"entries of {self.compress_ratio} tokens{chosen}, window of {self.sliding_window}"

    @property
    def v_head_dim(self) -> int:
        """As wide as keys, which they are."""
        return self.head_dim

    @property
    def num_key_value_heads(self) -> int:
        """One for all query heads."""
        return 1

    @property
    def reach(self) -> int | None:
        """The window, where there is nothing else."""
        return None if self.compress_ratio else self.sliding_window

    @property
    def is_sparse(self) -> bool:
        """A query attends to a window and to entries, all or chosen."""
        return True

    @property
    def matrices(self) -> tuple[Gemm, ...]:
        """All weight matrices."""
        return (*self.projections, *(self.indexer.projections if self.indexer else ()), *self.output)

    def entries(self, tokens: Tokens) -> Tokens:
        """Compressed entries of so many tokens."""
        return tokens / self.compress_ratio if self.compress_ratio else 0.0 * tokens

    def token_bytes(self, element_bytes: float) -> float:
        """What one more token adds to a long cache."""
        entry_bytes = self.head_dim * element_bytes + index_key_bytes(self.indexer)
        return entry_bytes / self.compress_ratio if self.compress_ratio else 0.0

    def state_bytes(self, element_bytes: float) -> float:
        """Nothing besides the cache."""
        return 0.0

    def cache_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """Entries and the window's tokens."""
        window = np.minimum(tokens, self.sliding_window) * (self.head_dim * element_bytes)
        return tokens * self.token_bytes(element_bytes) + window

    def needed_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """All of it."""
        return self.cache_bytes(tokens, element_bytes)

    def share(self, size: int) -> CompressedAttention:
        """What one of `size` GPUs holds: its heads; keys and entries are on every GPU."""
        return replace(
            self,
            projections=tuple(gemm.share(size) for gemm in self.projections),
            output=tuple(gemm.share(size) for gemm in self.output),
            num_attention_heads=self.num_attention_heads // size,
        )
