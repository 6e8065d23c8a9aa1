"""Attention to chosen keys, between its products: calls, rates and costs.

An indexer scores all keys before a query with a few small heads; all heads attend to the keys with the best scores. A
key is a token's latent (DeepSeek V3.2, GLM-5), an entry that stands for several tokens next to a window of tokens
(DeepSeek V4), or one of a block of tokens that are chosen together (MiniMax M3). The work of the indexer grows with
queries times keys. The work of attention grows only with queries once there are more keys than are chosen.

Each step is a kernel. Its time is constant until its queries fill the device, and then grows with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvrsim.errors import ABSENT, InputError
from kvrsim.io.schema import NonNegative
from kvrsim.kernels.attention import absorbing
from kvrsim.kernels.cost import CalibratedCost, Part, RooflineCost
from kvrsim.kernels.elementwise import Traffic
from kvrsim.kernels.mixer import LayerSetting, MixerCost
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Attention, CompressedAttention, LatentAttention
from kvrsim.program import Array

SparseMixer = Attention | LatentAttention | CompressedAttention
_SCORE_BYTES = 4.0  # bytes of a score in fp32


class SparseCall(NamedTuple):
    """Queries of a chunk, the keys that they see, and the keys that they attend to."""

    chunk: Array  # queries
    prefix: Array  # tokens before the first query
    num_attention_heads: int
    head_dim: int  # width of queries and keys
    v_head_dim: int  # width of values
    top_k: int | None = None  # maximum number of keys that a query attends to; None: all visible keys
    window: int = 0  # recent tokens that every query also attends to
    compress_ratio: int = 1  # tokens per key
    block: int = 1  # tokens that are chosen together
    index_heads: int = 0  # heads of the indexer; 0 if the layer computes no scores but uses another layer's choice
    index_head_dim: int = 0

    @property
    def part(self) -> Part:
        return Part("sparse")

    @property
    def mean_keys(self) -> Array:
        """Mean number of keys that a query sees."""
        return (self.prefix + 0.5 * self.chunk) / self.compress_ratio

    @property
    def keys(self) -> Array:
        """Keys that the last query sees."""
        return (self.prefix + self.chunk) / self.compress_ratio

    @property
    def kernel_keys(self) -> Array:
        """Keys that the kernel processes per query: the same number for all, padded where a query sees fewer."""
        window = np.minimum(self.window, self.prefix + self.chunk)
        chosen = self.keys
        if self.top_k is not None:
            chosen = np.minimum(self.top_k, chosen)
        return window + chosen

    @property
    def chooses(self) -> Array:
        """1 where the layer computes scores and some query sees more keys than it attends to; else 0."""
        if self.top_k is None or not self.index_heads:
            return np.zeros_like(self.keys)
        return np.where(self.keys > self.top_k, 1.0, 0.0)

    @property
    def score_flops(self) -> Array:
        """FLOPs of the indexer's products for one sequence."""
        return self.chunk * self.mean_keys * (2.0 * self.index_heads * self.index_head_dim) * self.chooses

    @property
    def attention_flops(self) -> Array:
        """FLOPs of QK^T and PV of all heads for one sequence."""
        return self.chunk * self.kernel_keys * self._key_flops

    @property
    def least_attention_flops(self) -> Array:
        """FLOPs of attention without the window: a query attends to at most top_k of the keys that it sees."""
        if self.top_k is None:
            return self.chunk * self.mean_keys * self._key_flops
        # The mean over the queries of min(keys seen, top_k): the integral of min(x, top_k) from the keys that the first
        # query sees to those that the last one sees, divided by their difference.
        start = self.prefix / self.compress_ratio
        end = self.keys
        inside_start = np.minimum(start, self.top_k)
        inside_end = np.minimum(end, self.top_k)
        area = 0.5 * (inside_end * inside_end - inside_start * inside_start)
        area = area + self.top_k * ((end - inside_end) - (start - inside_start))
        return np.asarray(self.chunk * (area / np.maximum(end - start, 1e-30)) * self._key_flops)

    def measured_s(self, cost: CalibratedCost) -> Array:
        """Seconds with the profile's rates.

        If the profile has no rates for this kind of call, FLOPs take the rate of matrix products, and the scores are
        written to memory and read once. Scores of single keys take the rate of FP8 products if there is one.
        """
        rates = cost.rates
        batch = cost.traits.batch
        kernels: SparseKernels | None = rates.of(self, cost.traits.kernel)
        if kernels is not None:
            return cost.compute_scale * kernels.seconds(self, batch, least=cost.traits.lower_bound)
        score_format = "fp8" if self.block == 1 else None
        score_rates, _ = rates.gemm_of(score_format, 2)
        flops_s = self.score_flops / score_rates.flops_per_s + self.attention_flops / rates.gemm.flops_per_s
        scores = self.chunk * self.mean_keys * self.chooses
        start_s = rates.elementwise.start_s * (1.0 + 2.0 * self.chooses)
        scores_s = scores * (2.0 * _SCORE_BYTES / rates.elementwise.copy)
        return cost.compute_scale * (start_s + batch * (flops_s + scores_s))

    def roofline_s(self, cost: RooflineCost) -> Array:
        """Seconds of FLOPs: of scores, in FP8 where single keys are chosen, and of attention to at most top_k keys."""
        score_flops_per_s = cost.flops_per_s
        if self.block == 1:
            score_flops_per_s = cost.low_flops_per_s
        score_s = self.score_flops / score_flops_per_s
        attention_s = self.least_attention_flops / cost.flops_per_s
        return np.asarray(cost.traits.batch * (score_s + attention_s))

    @property
    def _key_flops(self) -> float:
        """FLOPs per query and attended key, over all heads."""
        return 2.0 * self.num_attention_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRates:
    """Rates of the indexer's products of queries with all keys that they see, and of the choice of the best."""

    start_s: NonNegative
    flops_per_s: float
    full_heads: NonNegative  # queries times heads that fill the device

    def seconds(self, queries: Array, keys: Array, heads: Array, head_dim: int, *, least: bool = False) -> Array:
        """Seconds for a mean of `keys` keys per query; `least`: assumes that any number of queries fills the device."""
        least_rows = 0.0 if least else self.full_heads
        rows = np.maximum(queries * heads, least_rows)
        return self.start_s + rows * keys * (2.0 * head_dim / self.flops_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendRates:
    """Rates of attention of each query to its chosen keys, all heads together."""

    start_s: NonNegative
    flops_per_s: float  # FLOP/s of QK^T and PV
    query_keys: NonNegative  # constant time per query, expressed in keys
    full_queries: NonNegative  # number of queries that fill the device
    least_heads: NonNegative  # below this number of heads the time is constant

    def seconds(self, queries: Array, keys: Array, heads: Array, width: int, *, least: bool = False) -> Array:
        """Seconds of attention; `width`: sum of the widths of a key and its value."""
        least_queries = 0.0 if least else self.full_queries
        rows = np.maximum(queries, least_queries) * np.maximum(heads, self.least_heads)
        return self.start_s + rows * (keys + self.query_keys) * (2.0 * width / self.flops_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseKernels:
    """The kernels of one kind of sparse attention."""

    score: ScoreRates
    attend: AttendRates

    def seconds(self, call: SparseCall, batch: int, *, least: bool = False) -> Array:
        """Seconds of both kernels in sequence; without a choice only attention runs."""
        queries = batch * call.chunk
        chosen_s = self.score.seconds(
            queries, call.mean_keys, np.asarray(call.index_heads), call.index_head_dim, least=least
        )
        heads = call.num_attention_heads
        width = call.head_dim + call.v_head_dim
        attend_s = self.attend.seconds(queries, call.kernel_keys, np.asarray(heads), width, least=least)
        return call.chooses * chosen_s + attend_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseRates:
    """Rates by the unit that is chosen: single keys, entries that stand for several tokens, or blocks of tokens."""

    keys: SparseKernels | None = None  # None: from the rates of other operations
    entries: SparseKernels | None = None  # None: the rates of `keys` apply
    blocks: SparseKernels | None = None

    def __post_init__(self) -> None:
        if self.keys is None and self.blocks is None:
            raise InputError("keys", ABSENT, "rates of keys, of blocks or of both")

    def of(self, call: SparseCall) -> SparseKernels | None:
        """Kernels that price a call; None if kernels of this kind were not measured."""
        if call.block > 1:
            return self.blocks
        chooses_entries = call.compress_ratio > 1 or call.window > 0
        if chooses_entries and self.entries is not None:
            return self.entries
        return self.keys


def sparse_call(mixer: SparseMixer, chunk: Array, prefix: Array) -> SparseCall:
    """The call between a mixer's products; in latent attention, heads attend to the latents directly.

    A layer that uses the choice of an earlier layer computes no scores.
    """
    indexer = mixer.indexer
    if isinstance(mixer, LatentAttention):
        head_dim = mixer.kv_lora_rank + mixer.qk_rope_head_dim
        v_head_dim = mixer.kv_lora_rank
    else:
        head_dim = mixer.head_dim
        v_head_dim = mixer.v_head_dim
    ratio = 1
    window = 0
    if isinstance(mixer, CompressedAttention):
        ratio = mixer.compress_ratio
        window = mixer.sliding_window
    top_k = None
    block = 1
    index_heads = 0
    index_head_dim = 0
    if indexer is not None:
        top_k = indexer.top_k
        block = indexer.block
        if not indexer.shared:
            index_heads = indexer.num_heads
            index_head_dim = indexer.head_dim
    if ratio == 0:  # every query attends only to the window
        ratio = 1
        top_k = 0
    return SparseCall(
        chunk=chunk,
        prefix=prefix,
        num_attention_heads=mixer.num_attention_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        top_k=top_k,
        window=window,
        compress_ratio=ratio,
        block=block,
        index_heads=index_heads,
        index_head_dim=index_head_dim,
    )


class SparseCost(MixerCost):
    """Cost of attention to chosen keys: an indexer scores all keys before a query, and all heads attend to the best.

    Where keys are latents, their expansion is absorbed into queries and outputs.
    """

    mixer: SparseMixer

    def __init__(self, setting: LayerSetting, mixer: SparseMixer) -> None:
        super().__init__(setting, mixer)
        self._absorb: Callable[[Array], Array] | None = None  # the products that absorb the expansion of latents
        if isinstance(mixer, LatentAttention):
            self._absorb = self.cost.row_cost(absorbing(mixer), ())

    @property
    def projections(self) -> tuple[Gemm, ...]:
        """Projections of the mixer and of its indexer."""
        indexer = self.mixer.indexer
        if indexer is None:
            return self.mixer.projections
        return (*self.mixer.projections, *indexer.projections)

    @property
    def kernels(self) -> int:
        """Number of kernels: scores and choice, attention, the absorbed products, and the copy into the cache."""
        kernels = 1
        indexer = self.mixer.indexer
        if indexer is not None and not indexer.shared:
            kernels += 2
        if self._absorb is not None:
            kernels += 2
        if self.traits.copies.own > 0:
            kernels += 1
        return kernels

    def attention_s(self, chunk: Array, prefix: Array) -> Array:
        """Seconds of scores, choice and attention of the chunk."""
        seconds = self.cost.call_s(sparse_call(self.mixer, chunk, prefix))
        if self._absorb is None:
            return seconds
        return seconds + self._absorb(chunk)

    def decode_s(self, keys: Array) -> Array:
        """Seconds of one token in kernels that split the keys over the device and read each of them once.

        The indexer reads the index keys of all tokens, and attention reads the chosen keys.
        """
        token = np.ones_like(keys)
        call = sparse_call(self.mixer, token, keys - token)
        index_bytes = self.mixer.index_key_bytes / call.compress_ratio
        read = Traffic("copy", self._half_token_bytes - index_bytes, 1)
        seconds = self.cost.traffic_s(call.kernel_keys, (read,))
        if index_bytes:
            chosen = self.cost.traffic_s(keys, (Traffic("copy", index_bytes, 2),))
            seconds = seconds + call.chooses * chosen
        seconds = np.minimum(seconds, self.cost.call_s(call))
        if self._absorb is None:
            return seconds
        return seconds + self._absorb(token)
