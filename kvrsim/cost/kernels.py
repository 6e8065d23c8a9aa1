"""Seconds of device time for one operation: the protocol and its two implementations.

All arguments may be arrays over a batch of partitions; all results have their shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvrsim.cost.traffic import EAGER_SCORE_BYTES
from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec
from kvrsim.profile import CacheCopies, KernelRates
from kvrsim.program import Array

NO_COPIES = CacheCopies(keep=0.0, append=0.0, gather=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionArea:
    """What one attention call covers, in elements of one head's score matrix."""

    dense: Array  # elements that a kernel without mask skipping computes
    causal: Array  # elements that are not masked


class CostModel(Protocol):
    """Device seconds of the three things that a layer is made of."""

    @property
    def fused(self) -> bool:
        """Whether element-wise kernels are fused."""

    @property
    def copies(self) -> CacheCopies:
        """Copies of K and V on their way into the cache."""

    @property
    def head_on_all_tokens(self) -> bool:
        """Whether logits are computed for every token of the last chunk."""

    def gemm_s(self, tokens: Array, weight_elements: float) -> Array:
        """Matrix products of `tokens` rows with weights of that many elements in all."""

    def attention_s(self, area: AttentionArea, num_heads: int, head_dim: int) -> Array:
        """QK^T, softmax and PV of all heads."""

    def traffic_s(self, nbytes: Array) -> Array:
        """Element-wise kernels and copies that move that many bytes through HBM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedCost:
    """Coefficients from a profile: each rate is what was measured, not what a datasheet promises."""

    rates: KernelRates
    kernel: str  # attention kernel, "eager" or "flash"
    batch: int
    element_bytes: int

    @property
    def fused(self) -> bool:
        """As the profile says."""
        return self.rates.fused

    @property
    def copies(self) -> CacheCopies:
        """As the profile says."""
        return self.rates.copies

    @property
    def head_on_all_tokens(self) -> bool:
        """As the profile says."""
        return self.rates.head_on_all_tokens

    def gemm_s(self, tokens: Array, weight_elements: float) -> Array:
        """2 FLOPs a token and weight at the measured rate."""
        return tokens * (2.0 * self.batch * weight_elements / self.rates.gemm_flops_per_s)

    def attention_s(self, area: AttentionArea, num_heads: int, head_dim: int) -> Array:
        """Eager: products at the GEMM-like rate plus the score matrix's traffic; flash: unmasked FLOPs only."""
        flops = 4.0 * self.batch * num_heads * head_dim / self.rates.attention_flops_per_s[self.kernel]
        if self.kernel == "flash":
            return area.causal * flops
        traffic = self.batch * num_heads * self.rates.score_bytes * self.element_bytes / 2
        return area.dense * (flops + traffic / self.rates.hbm_bytes_per_s)

    def traffic_s(self, nbytes: Array) -> Array:
        """Bytes at the measured HBM rate."""
        return nbytes * (self.batch / self.rates.hbm_bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineCost:
    """The datasheet's limits: no kernel is faster than its FLOPs or its bytes allow (Williams et al., 2009)."""

    gpu: GpuSpec
    kernel: str
    batch: int
    element_bytes: int
    peak_flops: float
    fused: bool = True
    copies: CacheCopies = NO_COPIES
    head_on_all_tokens: bool = False

    @classmethod
    def of(cls, gpu: GpuSpec, *, kernel: str, batch: int, dtype: str, element_bytes: int) -> RooflineCost:
        """Limits of one GPU in one dtype; InputError where the GPU has no such arithmetic."""
        peak_flops = dict(gpu.peak_flops).get(dtype)
        if peak_flops is None:
            raise InputError("--dtype", dtype, f"what {gpu.name} computes in: {', '.join(dict(gpu.peak_flops))}")
        return cls(gpu=gpu, kernel=kernel, batch=batch, element_bytes=element_bytes, peak_flops=peak_flops)

    def gemm_s(self, tokens: Array, weight_elements: float) -> Array:
        """The longer of FLOPs at peak and one reading of the weights."""
        flops_s = tokens * (2.0 * self.batch * weight_elements / self.peak_flops)
        return np.maximum(flops_s, weight_elements * self.element_bytes / self.gpu.hbm_bytes_per_s)

    def attention_s(self, area: AttentionArea, num_heads: int, head_dim: int) -> Array:
        """Flash: FLOPs of the unmasked part; eager: the longer of all FLOPs and the score matrix's traffic."""
        flops_s = 4.0 * self.batch * num_heads * head_dim / self.peak_flops
        if self.kernel == "flash":
            return area.causal * flops_s
        traffic = self.batch * num_heads * EAGER_SCORE_BYTES * self.element_bytes / 2
        return area.dense * max(flops_s, traffic / self.gpu.hbm_bytes_per_s)

    def traffic_s(self, nbytes: Array) -> Array:
        """Bytes at the datasheet's HBM rate."""
        return nbytes * (self.batch / self.gpu.hbm_bytes_per_s)
