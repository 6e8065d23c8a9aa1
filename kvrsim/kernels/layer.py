"""What one kind of layer costs on a rank: a model's shapes put to a cost model.

What the mixer of one kind of layer costs: an implementation for each kind of mixer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvrsim.engine import HostRates
from kvrsim.kernels.attention import LatentMixing, SoftmaxMixing
from kvrsim.kernels.calibrated import CalibratedCost, CostModel
from kvrsim.kernels.elementwise import LayerKernels, Traffic, after_mixer, before_mixer
from kvrsim.kernels.experts import ONE_GPU, ExpertPlacement, RoutedExperts
from kvrsim.kernels.gemm import Product
from kvrsim.kernels.mixer import BlockMixing, Mixing, Setting, launches, products_of
from kvrsim.kernels.prefix import LOCAL_PREFIX, PrefixAccessPlan
from kvrsim.kernels.recurrence import RecurrentMixing
from kvrsim.kernels.sparse import SparseMixing
from kvrsim.kernels.tensor_parallel import Group
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Attention, CompressedAttention, Mixer, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec
from kvrsim.program import Array

# Shares of HostRates.layer_s before, in and after attention. Eager Llama issues about 21 kernels up to
# rotary, 10 in attention and 14 after it.
_HOST_SHARES = (21 / 45, 10 / 45, 14 / 45)
_MANY = 512  # chunks, from which on those that are the same are worth to be found


def mlp_width(mlp: Sequence[Gemm]) -> int:
    """Features between the matrices of an MLP: the input of the last one that leads back to the MLP's input."""
    back = (gemm.in_features for gemm in reversed(mlp) if gemm.out_features == mlp[0].in_features)
    return next(back, 0)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds and bytes of one kind of layer, for one request on one machine."""

    model: ModelSpec
    layer: LayerSpec
    cost: CostModel
    host: HostRates
    batch: int
    element_bytes: int
    cached_prefix: int  # tokens whose K, V nobody sends
    sends_overlap: bool
    resume_s: float  # device time lost after a layer's communication
    kernel: str
    group: Group | None = None  # GPUs that the rank stands for and that split `model`; None: it is one GPU
    message_share: float = 0.0  # of the compute rate, lost while a ring's message is in flight
    hbm_bytes_per_s: float = math.inf  # of the GPU's datasheet
    placement: ExpertPlacement = ONE_GPU  # of routed experts
    prefix: PrefixAccessPlan = LOCAL_PREFIX  # how attention comes to the cached prefix

    # Prepared once: what depends on the chunk alone.
    mixing: Mixing | None = field(init=False, repr=False)  # costs of the layer's mixer; None: it has none
    experts: RoutedExperts | None = field(init=False, repr=False)  # costs of routed experts; None: it has none
    _before: Callable[[Array], Array] = field(init=False, repr=False)
    _after: Callable[[Array], Array] = field(init=False, repr=False)
    kernels: LayerKernels = field(init=False, repr=False)  # that one layer launches

    def __post_init__(self) -> None:
        setting = Setting(
            model=self.model,
            cost=self.cost,
            batch=self.batch,
            element_bytes=self.element_bytes,
            kernel=self.kernel,
            resume_s=self.resume_s,
            hbm_bytes_per_s=self.hbm_bytes_per_s,
        )
        mixing = None if self.layer.mixer is None else mixing_of(self.layer.mixer, setting)
        object.__setattr__(self, "mixing", mixing)
        routed = RoutedExperts(self.layer, self.cost, self.placement) if self.layer.num_experts else None
        object.__setattr__(self, "experts", routed)
        before, after = self._before_mixer(), self._after_mixer()
        object.__setattr__(self, "_before", self.cost.row_cost(*before))
        object.__setattr__(self, "_after", self.cost.row_cost(*after))
        mixer = 0 if mixing is None else mixing.kernels
        last = self._launches(*after) + (0 if routed is None else routed.kernels)
        object.__setattr__(self, "kernels", LayerKernels(self._launches(*before), mixer, last))

    @property
    def mixes(self) -> Mixing:
        """Costs of the layer's mixer, which it must have."""
        assert self.mixing is not None, "a layer without a mixer"
        return self.mixing

    @property
    def has_state(self) -> bool:
        """Whether tokens see those before them through a state, known when all of these have been computed."""
        return isinstance(self.layer.mixer, Recurrence)

    @property
    def num_sums(self) -> int:
        """All-reduces of a group of GPUs in the layer: one a block, or one where they are parallel."""
        return min(1, self.layer.num_blocks) if self.model.parallel_attn else self.layer.num_blocks

    # -- before tokens see each other
    def qkv_s(self, chunk: Array) -> Array:
        """Input norm, projections, rotary embedding; the device idles after a wait of the host's."""
        seconds = self._before(chunk)
        if self._repeats_rotary:
            seconds = seconds + self.host.resume_s
        if self.mixing is not None and self.mixing.has_own:
            seconds = seconds + self.mixing.own_s(chunk)
        return seconds

    def append_s(self, chunk: Array, prefix: Array) -> Array:
        """Copies that put the cache of prefix and chunk into one: one more where there is a prefix."""
        return self.mixes.append_s(chunk, prefix)

    def assemble_s(self, chunk: Array, others: Array) -> Array:
        """Copies that put gathered pieces into one cache; alone, a rank only keeps its own."""
        return self.mixes.assemble_s(chunk, others)

    @property
    def packs(self) -> bool:
        """Whether what is packed for an exchange is counted: where the runtime's own copies were measured."""
        return self.mixing is not None and self.mixing.cost.copies.own > 0

    def pack_s(self, tokens: Array, features: int) -> Array:
        """So many features of each token, read and written once, as a copy into the cache."""
        return self.mixes.cost.traffic_s(tokens, (Traffic("copy", 4.0 * features, 1),))

    # -- tokens see each other
    def attention_s(self, chunk: Array, prefix: Array) -> Array:
        """The chunk's tokens see prefix and chunk."""
        return self.mixes.mix_s(chunk, prefix)

    def attention_in_blocks(self, counts: Sequence[int], chunk: Array, prefix: Array) -> tuple[Array, Array]:
        """The same in as many calls, each of a block of the chunk's queries, as are the fastest: seconds, and calls.

        counts: of calls to choose from, the fewest first. Others are left out where the host does not launch the layer
        faster than the device computes it; not from the least time that proofs count on.
        """
        if not (isinstance(self.cost, CalibratedCost) and np.size(chunk) >= _MANY):  # others have an axis of their own
            return self._in_blocks(counts, chunk, prefix)
        chunk, prefix = np.broadcast_arrays(chunk, prefix)
        pairs, index = np.unique(chunk + 1j * prefix, return_inverse=True)  # searches move few boundaries at a time
        seconds, calls = self._in_blocks(counts, pairs.real, pairs.imag)
        index = index.reshape(chunk.shape)
        return seconds[index], calls[index]

    def _in_blocks(self, counts: Sequence[int], chunk: Array, prefix: Array) -> tuple[Array, Array]:
        calls = np.array(counts, dtype=float).reshape(-1, *[1] * np.ndim(chunk + prefix))
        times_s = np.stack(np.broadcast_arrays(*(self.mixes.in_blocks_s(chunk, prefix, count) for count in counts)))
        if not self.cost.least:
            device_s = self.qkv_s(chunk) + times_s + self.output_mlp_s(chunk)
            host_s = self.host_qkv_s + calls * self.host_attention_s + self.host_output_mlp_s
            times_s = np.where((calls == counts[0]) | (host_s < device_s), times_s, np.inf)
        best = times_s.argmin(axis=0)
        return np.take_along_axis(times_s, best[None], axis=0)[0], np.array(counts, dtype=float)[best]

    def decode_attention_s(self, keys: Array) -> Array:
        """One token sees `keys` tokens, itself included."""
        return np.zeros_like(keys) if self.mixing is None else self.mixing.decode_s(keys)

    def block_attention_s(self, chunk: Array, start: Array, keys: Array, end: Array, *, part: bool = False) -> Array:
        """The chunk's queries, which begin at `start`, against `keys` tokens before them that end at `end`, merged.

        part: the queries are a part of the rank's chunk.
        """
        return self._blocks.block_s(chunk, start, keys, end, part=part)

    def merge_s(self, chunk: Array, *, part: bool = False) -> Array:
        """A block's result for these queries merged with that of the blocks before; `part`: as in block_attention_s."""
        return self._blocks.merge_s(chunk, part=part)

    def cast_s(self, chunk: Array) -> Array:
        """The chunk's output to fp32, in which results are merged, or back."""
        return self._blocks.cast_s(chunk)

    def share_s(self, chunk: Array, start: Array) -> Array:
        """The chunk's queries, which begin at `start`, against a rank's share of the cached prefix, not merged."""
        return self._blocks.share_s(chunk, start, np.full_like(chunk, self.cached_prefix), self.prefix.share)

    @property
    def _blocks(self) -> BlockMixing:
        assert isinstance(self.mixing, BlockMixing), "a mixer whose blocks are not merged"
        return self.mixing

    @property
    def _repeats_rotary(self) -> bool:
        """Whether cos and sin are repeated for every head, for which the host waits for the device."""
        return self.cost.repeats_rotary and self.model.model_type == "falcon" and self.model.rotary

    # -- after tokens have seen each other
    def output_mlp_s(self, chunk: Array) -> Array:
        """Output projection, norm, MLP, residuals; routed experts too, unless ranks exchange tokens for them."""
        seconds = self._after(chunk)
        return seconds if self.experts is None or self.experts.meets else seconds + self.experts.seconds(chunk)

    def exchanged_experts_s(self, chunk: Array) -> Array:
        """Routed experts of the tokens that come from all ranks; nothing where ranks do not exchange any."""
        return self.experts.seconds(chunk) if self.experts is not None and self.experts.meets else 0.0 * chunk

    def _before_mixer(self) -> tuple[tuple[Product, ...], tuple[Traffic, ...]]:
        fused = self.cost.fused
        steps = before_mixer(self.model, self.layer, fused=fused, repeats_rotary=self._repeats_rotary)
        return ((), steps) if self.mixing is None else (products_of(self.cost, self.mixing.projections), steps)

    def _after_mixer(self) -> tuple[tuple[Product, ...], tuple[Traffic, ...]]:
        layer = self.layer
        dense = () if layer.num_experts else layer.mlp
        width = mlp_width(dense) + mlp_width(layer.shared_mlp)
        steps = after_mixer(
            self.model, layer, fused=self.cost.fused, intermediate=width, reshapes=not self.cost.whole_attention
        )
        output = () if layer.mixer is None else layer.mixer.output
        parts = [*((gemm,) for gemm in output), (layer.router,) if layer.router else (), layer.shared_mlp, dense]
        return tuple(product for gemms in parts for product in products_of(self.cost, gemms)), steps

    def _launches(self, products: Sequence[Product], steps: Sequence[Traffic]) -> int:
        """Kernels of products, of what quantises their inputs, and of element-wise steps."""
        return launches(self.cost, products) + sum(step.kernels for step in steps)

    # -- messages and memory
    def score_elements(self, chunk: Array, keys: Array) -> Array:
        """Elements of the score matrix of so many queries and keys, all heads."""
        return self.mixes.score_elements(chunk, keys)

    def kv_bytes(self, tokens: Array) -> Array:
        """Cache and state of that many tokens in this layer."""
        return self.mixes.cache_bytes(tokens)

    def handed_kv_bytes(self, end: Array) -> Array:
        """What a rank hands on: the cache up to `end` but the cached prefix; of a window, its tail; a state."""
        if self.mixing is None:
            return np.zeros_like(end)
        return self.mixing.needed_bytes(end - self.cached_prefix if self.cached_prefix else end)

    @property
    def prefix_bytes(self) -> Array:
        """What attention needs of the cached prefix, shape (1,): of a window, its tail; a state."""
        return self.mixes.needed_bytes(np.array([float(self.cached_prefix)]))

    @property
    def share_bytes(self) -> Array:
        """Of it, what a rank has that has not all, shape (1,); else 0."""
        return self.prefix.share * self.prefix_bytes

    def activation_bytes(self, tokens: Array) -> Array:
        """The residual stream of that many tokens."""
        return tokens * float(self.batch * self.model.hidden_size * self.element_bytes)

    def feature_bytes(self, tokens: Array, features: int) -> Array:
        """So many features of that many tokens."""
        return tokens * float(self.batch * features * self.element_bytes)

    def on_heads(self, ranks: int) -> LayerCosts:
        """The same where each of so many ranks has its share of the heads and all tokens."""
        assert self.layer.mixer is not None
        return replace(self, layer=replace(self.layer, mixer=self.layer.mixer.share(ranks)))

    def gathered_prefix(self, chunk: Array, start: Array, total: Array) -> Array:
        """Tokens besides the chunk that attention over the gathered context covers."""
        return self.mixes.gathered_prefix(chunk, start, total)

    # -- the host clock
    @property
    def host_qkv_s(self) -> float:
        """Launches up to rotary."""
        return self.host.layer_s * _HOST_SHARES[0] + self.host.kernel_s * self.kernels.before

    @property
    def host_attention_s(self) -> float:
        """Launches of attention."""
        return self.host.layer_s * _HOST_SHARES[1] + self.host.kernel_s * self.kernels.mixer

    @property
    def host_merge_s(self) -> float:
        """Launches that merge a block's result with that of the blocks before."""
        return self.host.kernel_s * self._blocks.merge_kernels

    @property
    def host_output_mlp_s(self) -> float:
        """Launches after attention."""
        return self.host.layer_s * _HOST_SHARES[2] + self.host.kernel_s * self.kernels.after

    def host_all_gather_s(self, num_ranks: int) -> float:
        """Launches of the all-gathers: an output tensor a rank has to be made and copied."""
        return self.host.gather_piece_s * num_ranks


__all__ = ["Mixing", "Setting", "mixing_of"]


def mixing_of(mixer: Mixer, setting: Setting) -> Mixing:
    """The costs of a mixer."""
    if isinstance(mixer, Recurrence):
        return RecurrentMixing(setting, mixer)
    if isinstance(mixer, CompressedAttention) or mixer.is_sparse:
        return SparseMixing(setting, mixer)
    return SoftmaxMixing(setting, mixer) if isinstance(mixer, Attention) else LatentMixing(setting, mixer)
