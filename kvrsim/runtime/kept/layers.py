"""KeptTokens and KeptState: what one decoder layer keeps of the tokens before a chunk, and a rank hands on."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

RECURRENT_BYTES = 4  # of an element of a recurrent state, which is kept in fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTokens:
    """K and V of each token. Latent attention keeps one head: the latent as K, the rotary key as V."""

    num_key_value_heads: int  # that are stored and sent
    head_dim: int  # width of a head of K
    v_head_dim: int  # width of a head of V
    sliding_window: int | None = None  # tokens that a query sees, itself included; None: all before it
    model_heads_per_kv_head: int = 1  # heads in which the model hands over each KV head: Falcon 40B repeats it
    returned_heads_per_kv_head: int = 1  # heads in which attention gets each KV head back
    is_latent: bool = False

    @property
    def elements(self) -> int:
        """Of one token."""
        return self.num_key_value_heads * (self.head_dim + self.v_head_dim)

    def first_seen(self, start: int) -> int:
        """The first token that a query at `start` sees: tokens before it are not needed from there on."""
        return 0 if self.sliding_window is None else max(0, start - self.sliding_window + 1)

    @property
    def title(self) -> str:
        """For people, such as "K and V of a window of 4096 tokens"."""
        what = "latents" if self.is_latent else "K and V"
        return f"{what} of {'all' if self.sliding_window is None else f'a window of {self.sliding_window}'} tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptState:
    """A recurrent state of fixed size, in fp32, and the last inputs of the convolution before it."""

    recurrent: tuple[int, ...]  # shape of one prompt's
    conv_channels: int  # of the convolution
    conv_tokens: int  # whose inputs the next token's convolution needs: its kernel's size less one
    least_chunk: int = 1  # tokens of a chunk behind a state, for the same result as in one go

    def nbytes(self, batch: int, element_bytes: int) -> int:
        """Of so many prompts; element_bytes: of an input of the convolution."""
        conv = self.conv_channels * self.conv_tokens * element_bytes
        return batch * (prod(self.recurrent) * RECURRENT_BYTES + conv)

    @property
    def title(self) -> str:
        """For people."""
        return "a state"


Kept = KeptTokens | KeptState | None  # None: the layer keeps nothing, as an MLP by itself
