"""What one kind of layer costs on a rank: a model's shapes put to a cost model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvrsim.cost.kernels import CostModel
from kvrsim.cost.merges import PYTORCH_SHARE, cast, merge
from kvrsim.cost.tensor_parallel import Group
from kvrsim.cost.traffic import (
    LayerKernels,
    after_attention,
    attention_kernels,
    before_attention,
)
from kvrsim.engine.host import HostRates
from kvrsim.model.spec import Gemm, LayerSpec, ModelSpec
from kvrsim.profile.rates.attention import AttentionCall
from kvrsim.profile.rates.elementwise import Traffic
from kvrsim.profile.rates.gemm import GEMM_TYPES, Product, merged
from kvrsim.program.operations import Array

# Shares of HostRates.layer_s before, in and after attention. Eager Llama issues about 21 kernels up to
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
    resume_s: float  # device time lost after a layer's communication
    kernel: str
    group: Group | None = None  # GPUs that the rank stands for and that split `model`; None: it is one GPU
    message_share: float = 0.0  # of the compute rate, lost while a ring's message is in flight
    hbm_bytes_per_s: float = math.inf  # of the GPU's datasheet

    # Prepared once: what depends on the chunk alone.
    _before: Callable[[Array], Array] = field(init=False, repr=False)
    _after: Callable[[Array], Array] = field(init=False, repr=False)
    kernels: LayerKernels = field(init=False, repr=False)  # that one layer launches

    def __post_init__(self) -> None:
        before, after = self._before_attention(), self._after_attention()
        object.__setattr__(self, "_before", self.cost.row_cost(*before))
        object.__setattr__(self, "_after", self.cost.row_cost(*after))
        attention = attention_kernels(self.model, self.kernel, repeats=self._repeats, copies=self.cost.copies)
        object.__setattr__(self, "kernels", LayerKernels(self._launches(*before), attention, self._launches(*after)))

    # -- before attention
    def qkv_s(self, chunk: Array) -> Array:
        """Input norm, projections, rotary embedding; the device idles after a wait of the host's."""
        return self._before(chunk) + self.host.resume_s * self._repeats_rotary

    def append_s(self, chunk: Array, prefix: Array) -> Array:
        """Copies that put the K, V of prefix and chunk into one cache: one more where there is a prefix."""
        copies = self.cost.copies
        tokens = self._window(prefix) + chunk
        seconds = self.resume_s + self._copy_s(tokens * (copies.keep + copies.append * (prefix > 0)))
        return seconds + self._write_s(chunk) if copies.own else seconds

    def assemble_s(self, chunk: Array, others: Array) -> Array:
        """Copies that put gathered pieces into one cache; alone, a rank only keeps its own."""
        copies = self.cost.copies
        seconds = self.resume_s + self._copy_s(
            (chunk + self._window(others)) * (copies.keep + copies.gather * (others > 0))
        )
        return seconds + self._write_s(chunk) if copies.own else seconds

    def _copy_s(self, tokens: Array, kernels: int = 0) -> Array:
        """Each byte of K and V is read and written."""
        nbytes = 2.0 * self.model.kv_bytes_per_token_layer(2)
        return self.cost.traffic_s(tokens, (Traffic("copy", nbytes, kernels),))

    def _write_s(self, chunk: Array) -> Array:
        """The chunk's own K, V into a buffer."""
        return self._copy_s(chunk * self.cost.copies.own, kernels=1)

    # -- attention
    def attention_s(self, chunk: Array, prefix: Array) -> Array:
        """The chunk's queries against prefix and chunk; eager code repeats shared KV heads for all queries."""
        return self._called_s(self._call(chunk, self._window(prefix), self._causal(chunk, prefix), own=True))

    def decode_attention_s(self, keys: Array) -> Array:
        """One query against `keys` tokens: decoding kernels split them over the device and read K and V once."""
        keys = self._window(keys)
        bytes_s = self.cost.traffic_s(keys, (Traffic("copy", float(self.model.kv_bytes_per_token_layer(2)), 1),))
        one = np.ones_like(keys)
        return np.minimum(bytes_s, self._called_s(self._call(one, keys - one, keys, own=True)))

    def block_attention_s(self, chunk: Array, start: Array, keys: Array, end: Array, *, part: bool = False) -> Array:
        """The chunk's queries, which begin at `start`, against `keys` tokens before them that end at `end`.

        The result is merged with that of other blocks; a block outside of the window takes no time.
        part: the queries are a part of the rank's chunk.
        """
        window = self.layer.sliding_window
        seen = keys if window is None else np.clip(window - (start - end), 0.0, keys)
        attention_s = self._called_s(self._call(chunk, seen, chunk * seen, own=False))
        return np.where(seen > 0, attention_s + self.merge_s(chunk, part=part), 0.0)

    def merge_s(self, chunk: Array, *, part: bool = False) -> Array:
        """A block's result for these queries merged with that of the blocks before; `part`: as in block_attention_s."""
        return self._merging_s(chunk, merge(self.model, fused=self.cost.fused_merge, part=part))

    def cast_s(self, chunk: Array) -> Array:
        """The chunk's output to fp32, in which results are merged, or back."""
        return self._merging_s(chunk, cast(self.model))

    def _merging_s(self, chunk: Array, step: Traffic) -> Array:
        """No faster than PyTorch's kernels, unless results are merged by one kernel of an engine's."""
        seconds = self.cost.traffic_s(chunk, (step,))
        if self.cost.fused_merge:
            return seconds
        nbytes = chunk * (step.nbytes * self.batch * self.element_bytes / 2)
        start_s = self.cost.traffic_s(0.0 * chunk, (step,))
        return np.maximum(seconds, start_s + nbytes / (PYTORCH_SHARE * self.hbm_bytes_per_s))

    def _call(self, chunk: Array, prefix: Array, causal: Array, *, own: bool) -> AttentionCall:
        model = self.model
        return AttentionCall(
            chunk=chunk,
            prefix=prefix,
            causal=causal,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            score_bytes=self.cost.score_bytes(model),
            own=own,
        )

    def _called_s(self, call: AttentionCall) -> Array:
        model = self.model
        seconds = self.cost.attention_s(call)
        if self._repeats and model.num_key_value_heads < model.num_attention_heads:
            heads = model.num_key_value_heads + model.num_attention_heads
            nbytes = 2.0 * heads * model.head_dim * 2  # K and V: read few heads, write all; two bytes an element
            seconds = seconds + self.cost.traffic_s(call.keys, (Traffic("copy", nbytes, 2),))
        return seconds

    @property
    def _repeats_rotary(self) -> bool:
        """Whether cos and sin are repeated for every head, for which the host waits for the device."""
        return self.cost.repeats_rotary and self.model.model_type == "falcon" and self.model.rotary

    @property
    def _repeats(self) -> bool:
        """Whether shared KV heads are written once for each of their query heads."""
        return self.kernel == "eager" and not self.cost.whole_attention

    def _window(self, tokens: Array) -> Array:
        window = self.layer.sliding_window
        return tokens if window is None else np.minimum(tokens, window)

    def _causal(self, chunk: Array, prefix: Array) -> Array:
        """Score elements of one head that are not masked."""
        window = self.layer.sliding_window
        if window is None:
            return chunk * (prefix + 0.5 * chunk)
        return _causal(prefix + chunk, window) - _causal(prefix, window)

    # -- after attention
    def output_mlp_s(self, chunk: Array) -> Array:
        """Output projection, norm, MLP (of a mixture: its active experts), residuals."""
        return self._after(chunk)

    def _before_attention(self) -> tuple[tuple[Product, ...], tuple[Traffic, ...]]:
        fused = self.cost.fused
        steps = before_attention(self.model, fused=fused, repeats_rotary=self._repeats_rotary)
        return self._products(self.layer.qkv), steps

    def _after_attention(self) -> tuple[tuple[Product, ...], tuple[Traffic, ...]]:
        layer = self.layer
        experts = max(1, layer.num_experts_per_tok)
        width = experts * self._mlp_width(layer.mlp) + self._mlp_width(layer.shared_mlp)
        steps = after_attention(
            self.model, fused=self.cost.fused, intermediate=width, reshapes=not self.cost.whole_attention
        )
        parts = [(layer.output,), (layer.router,) if layer.router else (), layer.shared_mlp]
        products = [product for gemms in parts for product in self._products(gemms)]
        return (*products, *self._mlp_products()), steps

    def _launches(self, products: Sequence[Product], steps: Sequence[Traffic]) -> int:
        """Kernels of products, of what quantises their inputs, and of element-wise steps.

        Engines compute all experts of a mixture in one kernel.
        """
        matrices = sum(1 if self.cost.fused else product.num_matrices for product in products)
        quantised = sum(
            product.compute is not None and GEMM_TYPES[product.compute].quantised > 0 for product in products
        )
        return matrices + quantised + sum(step.kernels for step in steps)

    def _mlp_products(self) -> tuple[Product, ...]:
        """The dense MLP; or all experts, each of which sees its share of the tokens."""
        layer = self.layer
        if not layer.num_experts:
            return self._products(layer.mlp)
        return self._products(layer.mlp, layer.num_experts, layer.num_experts_per_tok / layer.num_experts)

    def _products(self, gemms: Sequence[Gemm], num_matrices: int = 1, share: float = 1.0) -> tuple[Product, ...]:
        """Those of one input are one where the engine fuses."""
        products = tuple(
            Product(gemm.in_features, gemm.out_features, num_matrices, share, gemm.compute) for gemm in gemms
        )
        return merged(products) if self.cost.fused else products

    def _mlp_width(self, mlp: Sequence[Gemm]) -> int:
        """Features between the matrices of an MLP: the input of the one that leads back to the residual stream."""
        back = (gemm.in_features for gemm in reversed(mlp) if gemm.out_features == self.model.hidden_size)
        return next(back, 0)

    # -- memory
    def score_elements(self, chunk: Array, keys: Array) -> Array:
        """Elements of the score matrix of so many queries and keys, all heads."""
        return chunk * keys * float(self.batch * self.model.num_attention_heads)

    # -- messages and memory
    def kv_bytes(self, tokens: Array) -> Array:
        """K and V of that many tokens in this layer."""
        return tokens * float(self.batch * self.model.kv_bytes_per_token_layer(self.element_bytes))

    def handed_kv_bytes(self, end: Array) -> Array:
        """What a rank hands on: all K, V up to `end` but the cached prefix; of a window, its tail."""
        return self.kv_bytes(self._window(end - self.cached_prefix))

    def activation_bytes(self, tokens: Array) -> Array:
        """The residual stream of that many tokens."""
        return tokens * float(self.batch * self.model.hidden_size * self.element_bytes)

    def heads_bytes(self, tokens: Array, num_heads: int) -> Array:
        """So many heads of that many tokens."""
        return tokens * float(self.batch * num_heads * self.model.head_dim * self.element_bytes)

    def on_heads(self, ranks: int) -> LayerCosts:
        """The same where each of so many ranks has its share of the heads and all tokens."""
        model = self.model
        kv_heads = max(1, model.num_key_value_heads // ranks)
        heads = replace(model, num_attention_heads=model.num_attention_heads // ranks, num_key_value_heads=kv_heads)
        return replace(self, model=heads)

    def gathered_prefix(self, chunk: Array, start: Array, total: Array) -> Array:
        """Tokens besides the chunk that attention over the gathered context covers.

        An eager or masked kernel covers all, masked or not; a causal flash kernel stops at the chunk's end.
        """
        return start if self.kernel == "flash" else total - chunk

    # -- the host clock
    @property
    def host_qkv_s(self) -> float:
        """Launches up to rotary."""
        return self.host.layer_s * _HOST_SHARES[0] + self.host.kernel_s * self.kernels.before

    @property
    def host_attention_s(self) -> float:
        """Launches of attention."""
        return self.host.layer_s * _HOST_SHARES[1] + self.host.kernel_s * self.kernels.attention

    @property
    def host_merge_s(self) -> float:
        """Launches that merge a block's result with that of the blocks before."""
        return self.host.kernel_s * merge(self.model, fused=self.cost.fused_merge, part=False).kernels

    @property
    def host_output_mlp_s(self) -> float:
        """Launches after attention."""
        return self.host.layer_s * _HOST_SHARES[2] + self.host.kernel_s * self.kernels.after

    def host_all_gather_s(self, num_ranks: int) -> float:
        """Launches of the all-gathers: an output tensor a rank has to be made and copied."""
        return self.host.gather_piece_s * num_ranks


def _causal(tokens: Array, window: int) -> Array:
    """Score elements of the first `tokens` queries when each sees at most `window` keys."""
    inside = np.minimum(tokens, window)
    return 0.5 * inside * inside + (tokens - inside) * window
