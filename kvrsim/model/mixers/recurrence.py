"""Recurrence: linear attention and state-space layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers.indexer import Tokens

RecurrenceKind = Literal["gated_delta", "kda", "mamba2"]
RECURRENCE_TITLES: dict[RecurrenceKind, str] = {
    "gated_delta": "gated delta rule",
    "kda": "Kimi delta attention",
    "mamba2": "Mamba-2",
}
_STATE_ELEMENT_BYTES = 4  # recurrent states are kept in fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """Linear attention or a state-space layer: a state of fixed size in place of a cache."""

    kind: RecurrenceKind
    projections: tuple[Gemm, ...]  # the layer's input to queries, keys, values, gates and decays
    output: tuple[Gemm, ...]
    num_key_heads: int  # of queries and keys; of Mamba-2 its groups
    num_value_heads: int  # each with a state of its own
    key_head_dim: int  # of Mamba-2 ssm_state_size
    value_head_dim: int
    conv_channels: int  # that pass through a short convolution along the tokens; 0: none
    conv_kernel: int  # tokens of the convolution

    @property
    def title(self) -> str:
        """In a few words, for tables."""
        return RECURRENCE_TITLES[self.kind]

    @property
    def num_attention_heads(self) -> int:
        """Heads with a state of their own."""
        return self.num_value_heads

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys, or groups."""
        return self.num_key_heads

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.key_head_dim

    @property
    def reach(self) -> int | None:
        """A state holds all tokens before it."""
        return None

    @property
    def is_sparse(self) -> bool:
        """There are no keys to choose."""
        return False

    @property
    def matrices(self) -> tuple[Gemm, ...]:
        """All weight matrices; the convolution's weights count as other parameters of the layer."""
        return (*self.projections, *self.output)

    def token_bytes(self, element_bytes: float) -> float:
        """Nothing is kept of a token by itself."""
        return 0.0

    def state_bytes(self, element_bytes: float) -> float:
        """The state, in fp32, and the last inputs of the convolution."""
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim * _STATE_ELEMENT_BYTES
        return state + max(0, self.conv_kernel - 1) * self.conv_channels * element_bytes

    def cache_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """The state, whatever the tokens."""
        return 0.0 * tokens + self.state_bytes(element_bytes)

    def needed_bytes(self, tokens: Tokens, element_bytes: float) -> Tokens:
        """The state, where there is a token."""
        return np.where(np.asarray(tokens) > 0, self.state_bytes(element_bytes), 0.0)

    def share(self, size: int) -> Recurrence:
        """What one of `size` GPUs holds: its heads; a key head or group that does not divide lies on several."""
        keys = max(1, self.num_key_heads // size)
        values = self.num_value_heads * self.value_head_dim
        queries_keys = self.conv_channels - values  # channels of queries and keys
        channels = values // size + queries_keys // self.num_key_heads * keys if self.conv_channels else 0
        return replace(
            self,
            projections=tuple(gemm.share(size) for gemm in self.projections),
            output=tuple(gemm.share(size) for gemm in self.output),
            num_key_heads=keys,
            num_value_heads=self.num_value_heads // size,
            conv_channels=channels,
        )
