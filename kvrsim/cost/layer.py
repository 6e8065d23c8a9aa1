"""What one kind of layer costs on a rank: a model's shapes put to a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrsim.cost.kernels import AttentionArea, CostModel
from kvrsim.cost.traffic import after_attention_bytes, before_attention_bytes
from kvrsim.model import Gemm, LayerSpec, ModelSpec
from kvrsim.profile import HostRates
from kvrsim.program import Array

# Shares of a layer's launches before, in and after attention. Eager Llama issues about 21 kernels up to
# rotary, 10 in attention and 14 after it.
_HOST_SHARES = (21 / 45, 10 / 45, 14 / 45)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds and bytes of one kind of layer, for one request on one machine."""

    model: ModelSpec
    layer: LayerSpec
    cost: CostModel
    host: HostRates
    batch: int
    element_bytes: int
    cached_prefix: int  # tokens whose K, V every rank holds already and nobody sends
    sends_overlap: bool
    kernel: str

    # -- before attention
    def qkv_s(self, chunk: Array) -> Array:
        """Input norm, projections, rotary embedding."""
        weights = sum(gemm.in_features * gemm.out_features for gemm in self.layer.qkv)
        nbytes = before_attention_bytes(self.model, fused=self.cost.fused) * self._scale
        return self.cost.gemm_s(chunk, weights) + self.cost.traffic_s(chunk * nbytes)

    def append_s(self, chunk: Array, prefix: Array) -> Array:
        """Copies that put the K, V of prefix and chunk into one cache: one more where there is a prefix."""
        copies = self.cost.copies
        tokens = self._window(prefix) + chunk
        return self._copy_s(tokens * (copies.keep + copies.append * (prefix > 0)))

    def assemble_s(self, chunk: Array, others: Array) -> Array:
        """Copies that put gathered pieces into one cache; alone, a rank only keeps its own."""
        copies = self.cost.copies
        return self._copy_s((chunk + self._window(others)) * (copies.keep + copies.gather * (others > 0)))

    def _copy_s(self, tokens: Array) -> Array:
        """Each byte of K and V is read and written."""
        return self.cost.traffic_s(tokens * (2.0 * self.model.kv_bytes_per_token_layer(self.element_bytes)))

    # -- attention
    def attention_s(self, chunk: Array, prefix: Array) -> Array:
        """The chunk's queries against prefix and chunk; eager code repeats shared KV heads for all queries."""
        area = self._area(chunk, prefix)
        seconds = self.cost.attention_s(area, self.model.num_attention_heads, self.model.head_dim)
        shared = self.model.num_key_value_heads < self.model.num_attention_heads
        if self.kernel == "eager" and shared:
            heads = self.model.num_key_value_heads + self.model.num_attention_heads
            nbytes = 2 * heads * self.model.head_dim * self.element_bytes  # K and V: read few heads, write all
            seconds = seconds + self.cost.traffic_s((self._window(prefix) + chunk) * nbytes)
        return seconds

    def _window(self, tokens: Array) -> Array:
        window = self.layer.sliding_window
        return tokens if window is None else np.minimum(tokens, window)

    def _area(self, chunk: Array, prefix: Array) -> AttentionArea:
        """Score elements of one head: the dense rectangle, and what is not masked."""
        window = self.layer.sliding_window
        dense = chunk * (self._window(prefix) + chunk)
        if window is None:
            return AttentionArea(dense=dense, causal=chunk * (prefix + 0.5 * chunk))
        return AttentionArea(dense=dense, causal=_causal(prefix + chunk, window) - _causal(prefix, window))

    # -- after attention
    def output_mlp_s(self, chunk: Array) -> Array:
        """Output projection, norm, MLP (of a mixture: the active experts), residuals."""
        layer = self.layer
        experts = max(1, layer.num_experts_per_tok)
        mlp = experts * sum(gemm.in_features * gemm.out_features for gemm in layer.mlp)
        shared = sum(gemm.in_features * gemm.out_features for gemm in layer.shared_mlp)
        router = layer.router.in_features * layer.router.out_features if layer.router else 0
        weights = layer.output.in_features * layer.output.out_features + mlp + shared + router
        width = experts * self._mlp_width(layer.mlp) + self._mlp_width(layer.shared_mlp)
        nbytes = after_attention_bytes(self.model, fused=self.cost.fused, intermediate=width) * self._scale
        return self.cost.gemm_s(chunk, weights) + self.cost.traffic_s(chunk * nbytes)

    def _mlp_width(self, mlp: Sequence[Gemm]) -> int:
        """Features between the matrices of an MLP: the input of the one that leads back to the residual stream."""
        back = (gemm.in_features for gemm in reversed(mlp) if gemm.out_features == self.model.hidden_size)
        return next(back, 0)

    # -- messages
    def kv_bytes(self, tokens: Array) -> Array:
        """K and V of that many tokens in this layer."""
        return tokens * float(self.batch * self.model.kv_bytes_per_token_layer(self.element_bytes))

    def handed_kv_bytes(self, end: Array) -> Array:
        """What a rank hands on: all K, V up to `end` but the cached prefix; of a window, its tail."""
        return self.kv_bytes(self._window(end - self.cached_prefix))

    def gathered_prefix(self, chunk: Array, start: Array, total: Array) -> Array:
        """Tokens besides the chunk that attention over the gathered context covers.

        An eager kernel covers all, masked or not; a causal flash kernel stops at the chunk's end.
        """
        return total - chunk if self.kernel == "eager" else start

    # -- the host clock
    @property
    def host_qkv_s(self) -> float:
        """Launches up to rotary."""
        return self.host.layer_s * _HOST_SHARES[0]

    @property
    def host_attention_s(self) -> float:
        """Launches of attention."""
        return self.host.layer_s * _HOST_SHARES[1]

    @property
    def host_output_mlp_s(self) -> float:
        """Launches after attention."""
        return self.host.layer_s * _HOST_SHARES[2]

    def host_all_gather_s(self, num_ranks: int) -> float:
        """Launches of the all-gathers: an output tensor a rank has to be made and copied."""
        return self.host.gather_piece_s * num_ranks

    @property
    def _scale(self) -> float:
        """Element-wise byte counts are for elements of two bytes."""
        return self.element_bytes / 2


def _causal(tokens: Array, window: int) -> Array:
    """Score elements of the first `tokens` queries when each sees at most `window` keys."""
    inside = np.minimum(tokens, window)
    return 0.5 * inside * inside + (tokens - inside) * window
