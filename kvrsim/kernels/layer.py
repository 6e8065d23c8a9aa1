"""LayerCosts: the cost of each operation of one kind of layer on a rank, from a model's shapes and a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvrsim.kernels.attention import LatentCost, MergedCost, SoftmaxCost
from kvrsim.kernels.cost import CalibratedCost
from kvrsim.kernels.elementwise import Traffic, after_mixer, before_mixer
from kvrsim.kernels.experts import RoutedExperts
from kvrsim.kernels.gemm import Product, launches, products_of
from kvrsim.kernels.mixer import LayerSetting, MixerCost
from kvrsim.kernels.recurrence import RecurrentCost
from kvrsim.kernels.sparse import SparseCost
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Attention, CompressedAttention, Mixer, Recurrence
from kvrsim.model.spec import LayerSpec
from kvrsim.program import Array

_LEAST_UNIQUE = 512  # least number of chunks for which equal chunks are computed only once


class LayerKernels(NamedTuple):
    """Number of kernels that one layer launches; the mixer's are launched by each call of the mixer."""

    before: float  # norms, projections, rotary embedding
    mixer: float  # the mixer's operations, with the copies of K and V into the cache
    after: float  # output projection, norms, MLP, residuals


# Shares of HostRates.layer_s. Eager Llama issues about 21 kernels up to rotary, 10 in attention and 14 after it.
_HOST_SHARES = LayerKernels(21 / 45, 10 / 45, 14 / 45)


def mixer_cost(mixer: Mixer, setting: LayerSetting) -> MixerCost:
    """Cost of a mixer, by its kind."""
    if isinstance(mixer, Recurrence):
        return RecurrentCost(setting, mixer)
    if isinstance(mixer, CompressedAttention) or mixer.is_sparse:
        return SparseCost(setting, mixer)
    if isinstance(mixer, Attention):
        return SoftmaxCost(setting, mixer)
    return LatentCost(setting, mixer)


def mlp_width(mlp: Sequence[Gemm]) -> int:
    """Features inside an MLP: the input width of the last matrix that returns to the width of the MLP's input."""
    back = (gemm.in_features for gemm in reversed(mlp) if gemm.out_features == mlp[0].in_features)
    return next(back, 0)


def _products_after_mixer(layer: LayerSpec, dense: Sequence[Gemm], *, fused: bool) -> tuple[Product, ...]:
    """Products of the output projection, the router, the shared MLP and the dense MLP; those of one input may fuse."""
    groups: list[Sequence[Gemm]] = []
    if layer.mixer is not None:
        groups.extend((gemm,) for gemm in layer.mixer.output)
    if layer.router:
        groups.append((layer.router,))
    groups.append(layer.shared_mlp)
    groups.append(dense)
    products: list[Product] = []
    for same_input in groups:
        products.extend(products_of(same_input, fused=fused))
    return tuple(products)


class LayerCosts:
    """Seconds and bytes of one kind of layer, for one request on one machine; costs by chunk length are precomputed."""

    def __init__(self, setting: LayerSetting, layer: LayerSpec) -> None:
        self.setting = setting
        self.layer = layer
        self.cost = setting.cost
        model = setting.model
        traits = setting.cost.traits
        # Cos and sin are repeated for every head, and the host waits for the device each time.
        self._repeats_rotary = traits.repeats_rotary and model.model_type == "falcon" and model.rotary
        before = before_mixer(model, layer, fused=traits.fused, repeats_rotary=self._repeats_rotary)

        self._mixer: MixerCost | None = None
        projections: tuple[Product, ...] = ()
        mixer_kernels: float = 0
        if layer.mixer is not None:
            self._mixer = mixer_cost(layer.mixer, setting)
            projections = products_of(self._mixer.projections, fused=traits.fused)
            mixer_kernels = self._mixer.kernels

        self.experts: RoutedExperts | None = None
        dense = layer.mlp
        expert_kernels: float = 0
        if layer.num_experts:
            self.experts = RoutedExperts(layer, setting.cost, setting.placement)
            dense = ()
            expert_kernels = self.experts.kernels

        width = mlp_width(dense) + mlp_width(layer.shared_mlp)
        after = after_mixer(model, layer, fused=traits.fused, intermediate=width, reshapes=not traits.whole_attention)
        products = _products_after_mixer(layer, dense, fused=traits.fused)
        self._before = self.cost.row_cost(projections, before)
        self._after = self.cost.row_cost(products, after)
        before_kernels = launches(projections, fused=traits.fused) + sum(step.kernels for step in before)
        after_kernels = launches(products, fused=traits.fused) + sum(step.kernels for step in after)
        self.kernels = LayerKernels(before_kernels, mixer_kernels, after_kernels + expert_kernels)
        self.has_mixer = self._mixer is not None  # whether the layer has a mixer, in which tokens see each other
        self.has_state = isinstance(layer.mixer, Recurrence)  # whether a token needs the state after all earlier tokens
        # Number of all-reduces in a group of GPUs: one per block, or one if the blocks run in parallel.
        self.num_sums = min(1, layer.num_blocks) if model.parallel_attn else layer.num_blocks
        # Whether packing for an exchange takes time: only where the profile measured the copies of the runtime.
        self.packs = self.has_mixer and traits.copies.own > 0
        # Host seconds up to the rotary embedding, of attention, and of operations after it, without those per kernel.
        self.host_qkv_s = setting.host.layer_s * _HOST_SHARES.before
        self.host_attention_s = setting.host.layer_s * _HOST_SHARES.mixer
        self.host_output_mlp_s = setting.host.layer_s * _HOST_SHARES.after

    @property
    def mixer(self) -> MixerCost:
        """Costs of the layer's mixer; fails for a layer without a mixer."""
        assert self._mixer is not None, "a layer without a mixer"
        return self._mixer

    @property
    def block_mixer(self) -> MergedCost:
        """Costs of the layer's mixer where attention over several blocks of keys is merged into one result (ring)."""
        assert isinstance(self._mixer, MergedCost), "a mixer whose blocks are not merged"
        return self._mixer

    # -- before token mixing
    def qkv_s(self, chunk: Array) -> Array:
        """Seconds of input norm, projections and rotary embedding.

        Code that reads a value back to the host also leaves the device idle for a time.
        """
        seconds = self._before(chunk)
        if self._repeats_rotary:
            seconds = seconds + self.setting.host.resume_s
        if self._mixer is None:
            return seconds
        local_s = self._mixer.local_op_s(chunk)
        if local_s is None:
            return seconds
        return seconds + local_s

    def all_to_all_pack_s(self, tokens: Array, features: int) -> Array:
        """Seconds to read and write `features` features per token once, at the rate of copies."""
        return self.cost.traffic_s(tokens, (Traffic("copy", 4.0 * features, 1),))

    # -- token mixing
    def attention_in_blocks(self, counts: Sequence[int], chunk: Array, prefix: Array) -> tuple[Array, Array]:
        """Least seconds of attention with the chunk's queries in equal blocks, one call each, and the number of calls.

        counts: numbers of calls to choose from, rising. A number above the first is allowed only where the host
        launches the layer faster than the device computes it; the lower bound of proofs allows all. The seconds include
        the launches of the calls beyond the first of `counts`.
        """
        # WeightedCost has its own weights for each column, so equal (chunk, prefix) pairs do not have equal seconds.
        if not (isinstance(self.cost, CalibratedCost) and np.size(chunk) >= _LEAST_UNIQUE):
            return self._in_blocks(counts, chunk, prefix)
        chunk, prefix = np.broadcast_arrays(chunk, prefix)
        # A search changes few chunks at a time, so most pairs occur several times.
        pairs, index = np.unique(chunk + 1j * prefix, return_inverse=True)
        seconds, calls = self._in_blocks(counts, pairs.real, pairs.imag)
        index = index.reshape(chunk.shape)
        return seconds[index], calls[index]

    def _in_blocks(self, counts: Sequence[int], chunk: Array, prefix: Array) -> tuple[Array, Array]:
        assert isinstance(self._mixer, SoftmaxCost), "a mixer whose queries are not called in blocks"
        times_s = self._mixer.in_blocks_s(chunk, prefix, counts)
        if not self.cost.traits.lower_bound:
            host = self.setting.host
            calls = np.array(counts, dtype=float).reshape(-1, *[1] * (times_s.ndim - 1))
            times_s = times_s + (calls - counts[0]) * (host.launch_s * self.kernels.mixer)
            kernels = self.kernels.before + calls * self.kernels.mixer + self.kernels.after
            launches_s = host.launch_s * (self.kernels.before + counts[0] * self.kernels.mixer + self.kernels.after)
            device_s = self.qkv_s(chunk) + times_s + self.output_mlp_s(chunk) + launches_s
            issue_s = self.host_qkv_s + calls * self.host_attention_s + self.host_output_mlp_s
            host_s = issue_s + host.kernel_s * kernels
            times_s = np.where((calls == counts[0]) | (host_s < device_s), times_s, np.inf)
        best = times_s.argmin(axis=0)
        return np.take_along_axis(times_s, best[None], axis=0)[0], np.array(counts, dtype=float)[best]

    def decode_s(self, keys: Array) -> Array:
        """Seconds of the layer for one token of each sequence, which attends to `keys` tokens, itself included.

        Keys and values are not made from latents: a decoding kernel attends to the latents themselves.
        """
        token = np.ones_like(keys)
        seconds = self._before(token) + self.output_mlp_s(token)
        if self._repeats_rotary:
            seconds = seconds + self.setting.host.resume_s
        if self._mixer is None:
            return seconds
        return seconds + self._mixer.decode_s(keys)

    # -- after token mixing
    def output_mlp_s(self, chunk: Array) -> Array:
        """Seconds of output projection, norm, MLP and residuals, and of routed experts unless ranks exchange tokens."""
        seconds = self._after(chunk)
        if self.experts is None or self.experts.exchange != "none":
            return seconds
        return seconds + self.experts.seconds(chunk)

    def exchanged_experts_s(self, chunk: Array) -> Array:
        """Seconds of routed experts on the tokens of all ranks; 0 where ranks exchange no tokens."""
        if self.experts is None or self.experts.exchange == "none":
            return 0.0 * chunk
        return self.experts.seconds(chunk)

    # -- messages
    def forwarded_kv_bytes(self, end: Array) -> Array:
        """Bytes that a rank forwards: the new tokens' cache up to `end`, the last tokens of a window, or a state."""
        if self._mixer is None:
            return np.zeros_like(end)
        cached = self.setting.cached_prefix
        if cached:
            end = end - cached
        return self._mixer.needed_bytes(end)

    @property
    def prefix_bytes(self) -> Array:
        """Bytes of the cached prefix that attention needs, shape (1,): all, a window's last tokens, or a state."""
        return self.mixer.needed_bytes(np.array([float(self.setting.cached_prefix)]))

    @property
    def share_bytes(self) -> Array:
        """The part of prefix_bytes on each rank, shape (1,); 0 if a rank has the whole prefix."""
        return self.setting.prefix.share * self.prefix_bytes

    def activation_bytes(self, tokens: Array) -> Array:
        """Bytes of the residual stream of `tokens` tokens."""
        return self.feature_bytes(tokens, self.setting.model.hidden_size)

    def feature_bytes(self, tokens: Array, features: int) -> Array:
        """Bytes of `features` features of `tokens` tokens of each sequence."""
        return tokens * float(self.setting.batch * features * self.setting.element_bytes)

    def on_heads(self, ranks: int) -> LayerCosts:
        """Costs of a rank that has its share of the heads and all tokens."""
        assert self.layer.mixer is not None
        return LayerCosts(self.setting, replace(self.layer, mixer=self.layer.mixer.share(ranks)))
