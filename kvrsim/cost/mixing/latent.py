"""Costs of multi-head latent attention.

Engines expand in a prefill: keys and values of the chunk and of all tokens before it, then multi-head attention. In
decoding they absorb the expansion into queries and outputs, and all heads attend to the latents themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvrsim.cost.mixing.base import Setting, products_of
from kvrsim.cost.mixing.softmax import MergedMixing
from kvrsim.model.mixers import LatentAttention
from kvrsim.profile.rates.attention import AttentionCall
from kvrsim.profile.rates.elementwise import Traffic
from kvrsim.profile.rates.gemm import Product
from kvrsim.program import Array


def absorbing(mixer: LatentAttention) -> tuple[Product, ...]:
    """Of each head: the query into the latent's width, and the attended latent into the head's output."""
    heads, compute = mixer.num_attention_heads, mixer.expand.compute
    return (
        Product(mixer.qk_nope_head_dim, mixer.kv_lora_rank, heads, 1.0, compute),
        Product(mixer.kv_lora_rank, mixer.v_head_dim, heads, 1.0, compute),
    )


class LatentMixing(MergedMixing):
    """Latent attention to all keys."""

    mixer: LatentAttention
    has_own = True

    def __init__(self, setting: Setting, mixer: LatentAttention) -> None:
        super().__init__(setting, mixer)
        heads, nope = mixer.num_attention_heads, mixer.qk_nope_head_dim
        # The one rotated key is written to every head's keys: reads expanded keys, writes whole ones.
        joined = Traffic("copy", 2.0 * heads * (nope + mixer.head_dim), 1)
        self._expand: Callable[[Array], Array] = self.cost.row_cost(products_of(self.cost, (mixer.expand,)), (joined,))
        self._absorb: Callable[[Array], Array] = self.cost.row_cost(absorbing(mixer), ())

    @property
    def kernels(self) -> int:
        """Expansion of what is cached, its joining with the rotated keys, twice, attention, and the cache's copy."""
        return 4 + (self.cost.copies.own > 0)

    def own_s(self, chunk: Array) -> Array:
        """Keys and values of the chunk."""
        return self.expand_s(chunk)

    def expand_s(self, tokens: Array) -> Array:
        """Keys and values of so many tokens from their latents."""
        return np.where(tokens > 0, self._expand(tokens), 0.0)

    def mix_s(self, chunk: Array, prefix: Array) -> Array:
        """The prefix is expanded, then all heads attend."""
        attention_s = self._expanded_s(chunk, prefix, chunk * (prefix + 0.5 * chunk), own=True)
        return attention_s if self.cost.least else self.expand_s(prefix) + attention_s

    def absorbed_s(self, chunk: Array, prefix: Array) -> Array:
        """The same without expansion: all heads attend to the latents."""
        return self._absorb(chunk) + self._to_latents_s(chunk, prefix)

    def decode_s(self, keys: Array) -> Array:
        """Absorbed; the latents are read once."""
        bytes_s = self.cost.traffic_s(keys, (Traffic("copy", self._half_token_bytes, 1),))
        one = np.ones_like(keys)
        return self._absorb(one) + np.minimum(bytes_s, self._to_latents_s(one, keys - one))

    def block_s(self, chunk: Array, start: Array, keys: Array, end: Array, *, part: bool = False) -> Array:
        """The block's latents are expanded first."""
        attention_s = self.expand_s(keys) + self._expanded_s(chunk, keys, chunk * keys, own=False)
        return np.where(keys > 0, attention_s + self.merge_s(chunk, part=part), 0.0)

    def share_s(self, chunk: Array, start: Array, prefix: Array, share: float) -> Array:
        """The share's latents are expanded already."""
        keys = share * prefix
        return np.where(keys * chunk > 0, self._expanded_s(chunk, keys, chunk * keys, own=False), 0.0)

    def prepare_share_s(self, keys: Array) -> Array:
        """Its latents are expanded."""
        return self.expand_s(keys)

    def _expanded_s(self, chunk: Array, prefix: Array, causal: Array, *, own: bool) -> Array:
        """Each head attends to keys and values of its own."""
        mixer = self.mixer
        widths = (mixer.head_dim, mixer.v_head_dim)
        return self._attention_s(chunk, prefix, causal, mixer.num_attention_heads, widths, own=own)

    def _to_latents_s(self, chunk: Array, prefix: Array) -> Array:
        """All heads attend to the latents."""
        width = self.mixer.kv_lora_rank
        widths = (width + self.mixer.qk_rope_head_dim, width)
        return self._attention_s(chunk, prefix, chunk * (prefix + 0.5 * chunk), 1, widths)

    def _attention_s(
        self,
        chunk: Array,
        prefix: Array,
        causal: Array,
        num_key_value_heads: int,
        widths: tuple[int, int],
        *,
        own: bool = True,
    ) -> Array:
        """`widths`: of a key and of a value."""
        call = AttentionCall(
            chunk=chunk,
            prefix=prefix,
            causal=causal,
            num_attention_heads=self.mixer.num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=widths[0],
            v_head_dim=widths[1],
            latent=True,
            score_bytes=self.cost.score_bytes(self.setting.model),
            own=own,
        )
        return self.cost.attention_s(call)
