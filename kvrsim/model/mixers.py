"""Mixers: the part of a layer in which tokens see each other, by kind; shapes only.

A mixer defines its cache (the bytes per token that later tokens need, and for how many tokens) and its state (bytes
that do not grow with tokens). Token counts may be numbers or arrays; results have their shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

import numpy as np

from kvrsim.model.gemm import Gemm

T = TypeVar("T")
Tokens = Any  # a number or an array of tokens
RecurrenceKind = Literal["gated_delta", "kda", "mamba2", "linear", "scan"]
RECURRENCE_TITLES: dict[RecurrenceKind, str] = {
    "gated_delta": "gated delta rule",
    "kda": "Kimi delta attention",
    "mamba2": "Mamba-2",
    "linear": "linear attention",
    "scan": "recurrent scan",
}
_STATE_ELEMENT_BYTES = 4  # recurrent states are kept in fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """Part of a mixer that scores all earlier keys with a few small heads and chooses the best for attention."""

    num_heads: int  # number of query heads; all share one key
    head_dim: int  # width of queries and keys
    top_k: int  # number of keys that are chosen per query
    block: int = 1  # tokens that are chosen together
    projections: tuple[Gemm, ...] = ()  # from the layer's input or its latent to index queries, keys and weights
    key_bytes: int = 0  # bytes of one stored index key, scales included, for any dtype of the request
    shared: bool = False  # whether the layer uses an earlier layer's choice and therefore scores and stores nothing


class _Mixer:
    """Base of most mixers: the cache grows with all tokens, and heads are split over GPUs."""

    __slots__ = ()
    projections: tuple[Gemm, ...]
    output: tuple[Gemm, ...]
    num_attention_heads: int
    indexer: Indexer | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether a query attends to chosen keys."""
        return self.indexer is not None

    @property
    def matrices(self) -> tuple[Gemm, ...]:
        """All weight matrices."""
        matrices = [*self.projections]
        if self.indexer is not None:
            matrices.extend(self.indexer.projections)
        if isinstance(self, LatentAttention):
            matrices.append(self.expand)
        return (*matrices, *self.output)

    @property
    def reach(self) -> int | None:
        """Largest number of tokens that a query sees, itself included; None: no limit."""
        return None

    @property
    def index_key_bytes(self) -> int:
        """Bytes of one token's index key; 0 without an indexer or if the indexer uses an earlier layer's choice."""
        if self.indexer is None or self.indexer.shared:
            return 0
        return self.indexer.key_bytes

    def token_bytes(self, element_bytes: float) -> float:
        """Bytes that one more token adds to a long cache; `element_bytes` is the size of a cached element."""
        return 0.0

    def state_bytes(self, element_bytes: float) -> float:
        """Bytes in addition to the cache that do not grow with tokens."""
        return 0.0

    def cache_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """Bytes of the cache and the state after `tokens` tokens."""
        return tokens * self.token_bytes(element_bytes) + self.state_bytes(element_bytes)

    def needed_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """Bytes of the cache of `tokens` tokens that later tokens need."""
        return self.cache_bytes(tokens, element_bytes)

    def share(self, size: int) -> Self:
        """The mixer on one of `size` GPUs: a share of the heads; latents and shared keys are on every GPU."""
        split = with_matrices(self, lambda gemm: gemm.share(size))
        return replace(split, num_attention_heads=self.num_attention_heads // size)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention(_Mixer):
    """Softmax attention over K and V: multi-head, grouped-query or multi-query."""

    projections: tuple[Gemm, ...]  # from the layer's input to Q, K, V (and an output gate): separate or one matrix
    output: tuple[Gemm, ...]  # projection of the attention's output
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # width of queries and keys
    v_head_dim: int  # width of values
    sliding_window: int | None = None  # number of tokens that a query sees, itself included; None: all earlier tokens
    attention_chunk: int | None = None  # length of the chunks to which attention is limited; None: no chunks
    qk_norm: bool = False  # whether queries and keys are normalised
    rotary: bool = True  # whether queries and keys are rotated by their positions
    gate: bool = False  # whether a projection of the input scales the output
    indexer: Indexer | None = None  # None: a query attends to all keys that it sees
    shared: bool = False  # whether the layer uses K and V of an earlier layer and computes and caches none

    @property
    def title(self) -> str:
        """Short name for tables."""
        if self.indexer is not None:
            return f"sparse attention, {self.indexer.top_k} keys"
        if self.attention_chunk is not None:
            return f"attention in chunks of {self.attention_chunk}"
        if self.sliding_window is not None:
            return f"window of {self.sliding_window}"
        return "full attention"

    @property
    def reach(self) -> int | None:
        if self.attention_chunk is not None:
            return self.attention_chunk
        return self.sliding_window

    def token_bytes(self, element_bytes: float) -> float:
        elements = self.num_key_value_heads * (self.head_dim + self.v_head_dim)
        if self.shared:
            elements = 0
        return elements * element_bytes + self.index_key_bytes

    def needed_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """Bytes of the cache that later tokens need; with a window, those of its last tokens."""
        if self.reach is not None:
            tokens = np.minimum(tokens, self.reach)
        return self.cache_bytes(tokens, element_bytes)

    def share(self, size: int) -> Attention:
        """The mixer on one of `size` GPUs: a share of the heads; a KV head may be on several (Shoeybi et al., 2019).

        If each index head chooses for one KV head, it is on the GPUs of this KV head; other index heads are on every
        GPU.
        """
        kv_heads = max(1, self.num_key_value_heads // size)
        split = with_matrices(self, lambda gemm: self._share_of(gemm, size, kv_heads))
        if split.indexer is not None and split.indexer.num_heads == self.num_key_value_heads:
            split = replace(split, indexer=replace(split.indexer, num_heads=kv_heads))
        return replace(split, num_attention_heads=self.num_attention_heads // size, num_key_value_heads=kv_heads)

    def _share_of(self, gemm: Gemm, size: int, kv_heads: int) -> Gemm:
        if gemm.split == "kv_heads":
            return replace(gemm, out_features=gemm.out_features // self.num_key_value_heads * kv_heads)
        if gemm.split == "qkv_heads":
            kv_width = self.num_key_value_heads * (self.head_dim + self.v_head_dim)
            width = (gemm.out_features - kv_width) // size + kv_heads * (self.head_dim + self.v_head_dim)
            return replace(gemm, out_features=width)
        return gemm.share(size)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention(_Mixer):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): K and V of all heads from one latent per token."""

    num_key_value_heads: ClassVar[int] = 1  # cached heads: one for all query heads
    projections: tuple[Gemm, ...]  # to queries (directly or through a latent), and to the latent with its rotated key
    expand: Gemm  # projection of the latent to each head's key and value (kv_b_proj)
    output: tuple[Gemm, ...]
    num_attention_heads: int
    kv_lora_rank: int  # width of the latent
    qk_nope_head_dim: int  # width of the part of a head's query and key that is not rotated
    qk_rope_head_dim: int  # width of the rotated part; one rotated key for all heads
    v_head_dim: int
    indexer: Indexer | None = None  # None: a query attends to all keys
    rotary: bool = True
    gate: bool = False  # whether a projection of the input scales the output

    @property
    def title(self) -> str:
        """Short name for tables."""
        if self.indexer is None:
            return "latent attention"
        return f"sparse latent attention, {self.indexer.top_k} keys"

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def token_bytes(self, element_bytes: float) -> float:
        """Bytes per token of the latent, the rotated key and the index key."""
        return (self.kv_lora_rank + self.qk_rope_head_dim) * element_bytes + self.index_key_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttention(_Mixer):
    """Attention to a window of tokens and to compressed entries before the window (DeepSeek-V4).

    One vector of head_dim per token is key and value of all heads; every compress_ratio tokens make one entry.
    """

    num_key_value_heads: ClassVar[int] = 1  # cached heads: one for all query heads
    is_sparse: ClassVar[bool] = True  # a query attends to a window and to entries, all or chosen
    projections: tuple[Gemm, ...]  # from the layer's input to queries, the shared key and the vectors to compress
    output: tuple[Gemm, ...]  # projections of the attention's output, in two steps
    num_attention_heads: int
    head_dim: int
    rotary_dim: int  # width of the rotated part of head_dim
    sliding_window: int
    compress_ratio: int  # tokens per entry; 0: the layer has only the window
    indexer: Indexer | None = None  # choice of entries; None: a query attends to all of them

    @property
    def title(self) -> str:
        """Short name for tables."""
        if not self.compress_ratio:
            return f"window of {self.sliding_window}"
        best = "" if self.indexer is None else f", best {self.indexer.top_k}"
        return f"entries of {self.compress_ratio} tokens{best}, window of {self.sliding_window}"

    @property
    def v_head_dim(self) -> int:
        """Width of values, which are the keys themselves."""
        return self.head_dim

    @property
    def reach(self) -> int | None:
        """The window's length if the layer has only a window; else None: no limit."""
        return None if self.compress_ratio else self.sliding_window

    def entries(self, tokens: Tokens) -> Tokens:
        """Number of compressed entries of `tokens` tokens."""
        if not self.compress_ratio:
            return 0.0 * tokens
        return tokens / self.compress_ratio

    def token_bytes(self, element_bytes: float) -> float:
        if not self.compress_ratio:
            return 0.0
        entry_bytes = self.head_dim * element_bytes + self.index_key_bytes
        return entry_bytes / self.compress_ratio

    def cache_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """Bytes of the entries and of the window's tokens."""
        window = np.minimum(tokens, self.sliding_window) * (self.head_dim * element_bytes)
        return tokens * self.token_bytes(element_bytes) + window


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence(_Mixer):
    """Linear attention or a state-space layer: a state of fixed size instead of a cache."""

    kind: RecurrenceKind
    projections: tuple[Gemm, ...]  # from the layer's input to queries, keys, values, gates and decays
    output: tuple[Gemm, ...]
    num_key_heads: int  # number of heads of queries and keys; for Mamba-2 the number of groups
    num_value_heads: int  # number of value heads, each with its own state
    key_head_dim: int  # width of a key; for Mamba-2 ssm_state_size
    value_head_dim: int
    conv_channels: int  # channels of the short convolution along the tokens; 0 without one
    conv_kernel: int  # number of tokens that the convolution spans

    @property
    def title(self) -> str:
        """Short name for tables."""
        return RECURRENCE_TITLES[self.kind]

    @property
    def num_attention_heads(self) -> int:  # type: ignore[override]
        """Number of heads that have their own state."""
        return self.num_value_heads

    @property
    def num_key_value_heads(self) -> int:
        """Number of key heads, or of groups."""
        return self.num_key_heads

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.key_head_dim

    def state_bytes(self, element_bytes: float) -> float:
        """Bytes of the state, in fp32, and of the last inputs of the convolution."""
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim * _STATE_ELEMENT_BYTES
        return state + max(0, self.conv_kernel - 1) * self.conv_channels * element_bytes

    def needed_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """Bytes of the state; 0 without tokens."""
        return np.where(np.asarray(tokens) > 0, self.state_bytes(element_bytes), 0.0)

    def share(self, size: int) -> Recurrence:
        """The mixer on one of `size` GPUs: a share of the heads; a key head that does not divide is on several GPUs."""
        keys = max(1, self.num_key_heads // size)
        values = self.num_value_heads * self.value_head_dim
        queries_keys = self.conv_channels - values  # channels of queries and keys
        channels = 0
        if self.conv_channels:
            channels = values // size + queries_keys // self.num_key_heads * keys
        return replace(
            with_matrices(self, lambda gemm: gemm.share(size)),
            num_key_heads=keys,
            num_value_heads=self.num_value_heads // size,
            conv_channels=channels,
        )


Mixer = Attention | LatentAttention | CompressedAttention | Recurrence


def with_matrices(value: T, of: Callable[[Gemm], Gemm]) -> T:
    """The mixer or layer with `of` applied to each of its weight matrices."""
    changed: Any = value
    if isinstance(value, Gemm):
        changed = of(value)
    elif isinstance(value, tuple):
        changed = tuple(with_matrices(part, of) for part in value)
    elif is_dataclass(value):
        content = {field.name: with_matrices(getattr(value, field.name), of) for field in fields(value)}
        changed = replace(changed, **content)
    return cast(T, changed)
