"""Cost models without measurements: the datasheet's limits, and no time at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.attention import AttentionCall
from kvrsim.kernels.elementwise import CacheCopies, Traffic, eager_score_bytes
from kvrsim.kernels.experts import ExpertsCall
from kvrsim.kernels.gemm import GEMM_TYPES, ElementBytes, Product, of_each
from kvrsim.kernels.recurrence import RecurrenceCall, RecurrenceSeconds, least_recurrence
from kvrsim.kernels.sparse import SparseCall, least_sparse
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array

_NO_COPIES = CacheCopies(keep=0.0, append=0.0, gather=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unmeasured:
    """What a cost model without a profile takes for granted: the code of a serving engine."""

    fused: bool = True
    fused_merge: bool = True
    measures_merge: bool = False
    whole_attention: bool = False
    copies: CacheCopies = _NO_COPIES
    head_on_all_tokens: bool = False
    repeats_rotary: bool = False
    least: bool = False

    def score_bytes(self, model: ModelSpec) -> float:
        """As counted."""
        return eager_score_bytes(model)

    def mask_s(self, mask_elements: Array) -> Array:
        """Nothing that a device must do."""
        return np.zeros_like(mask_elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoTime(_Unmeasured):
    """Nothing takes any time: for what a program says besides, such as memory."""

    def row_cost(self, products: tuple[Product, ...], steps: tuple[Traffic, ...]) -> Callable[[Array], Array]:
        """Nothing."""
        return np.zeros_like

    def head_s(self, tokens: Array, product: Product) -> Array:
        """Nothing."""
        return np.zeros_like(tokens)

    def attention_s(self, call: AttentionCall) -> Array:
        """Nothing."""
        return np.zeros_like(call.chunk)

    def experts_s(self, call: ExpertsCall) -> Array:
        """Nothing."""
        return np.zeros_like(call.tokens)

    def recurrence_s(self, call: RecurrenceCall) -> RecurrenceSeconds:
        """Nothing."""
        return RecurrenceSeconds(convolution=np.zeros_like(call.tokens), scan=np.zeros_like(call.tokens))

    def sparse_s(self, call: SparseCall) -> Array:
        """Nothing."""
        return np.zeros_like(call.chunk)

    def traffic_s(self, tokens: Array, steps: tuple[Traffic, ...]) -> Array:
        """Nothing."""
        return np.zeros_like(tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineCost(_Unmeasured):
    """The datasheet's limits: no kernel is faster than its FLOPs or its bytes allow (Williams et al., 2009)."""

    gpu: GpuSpec
    kernel: str
    batch: int
    element_bytes: int
    peak_flops: float  # of the request's dtype; under fp8 of half precision, which attention is computed in
    low_flops: float  # of products with quantised inputs, where the GPU has such arithmetic

    @classmethod
    def of(cls, gpu: GpuSpec, *, kernel: str, batch: int, dtype: str, element_bytes: int) -> RooflineCost:
        """Limits of one GPU in one dtype; InputError where the GPU has no such arithmetic.

        Of products with quantised inputs, INT8 and NVFP4 too, FP8's: datasheets are read for no other.
        """
        peaks = dict(gpu.peak_flops)
        if dtype not in peaks:
            raise InputError("dtype", dtype, f"what {gpu.name} computes in: {', '.join(peaks)}")
        half = peaks.get("bf16", peaks.get("fp16", peaks[dtype])) if dtype == "fp8" else peaks[dtype]
        low = peaks.get("fp8", half)
        return cls(gpu=gpu, kernel=kernel, batch=batch, element_bytes=element_bytes, peak_flops=half, low_flops=low)

    def row_cost(self, products: tuple[Product, ...], steps: tuple[Traffic, ...]) -> Callable[[Array], Array]:
        """Of each product, the longer of FLOPs at peak and one reading of the weights; and bytes."""

        def seconds(tokens: Array) -> Array:
            total_s = np.asarray(self.traffic_s(tokens, steps))
            for product in products:
                total_s += self._product_s(tokens, product)
            return total_s

        return seconds

    def head_s(self, tokens: Array, product: Product) -> Array:
        """As any product."""
        return self._product_s(tokens, product)

    def _product_s(self, tokens: Array, product: Product) -> Array:
        weights = product.in_features * product.out_features * product.num_matrices
        width, flops_per_s = self._type_of(product.compute)
        seconds = np.asarray(tokens * (self.batch * product.flops_per_row / flops_per_s))
        return np.maximum(seconds, weights * width.weight / self.gpu.hbm_bytes_per_s, out=seconds)

    def _type_of(self, compute: str | None) -> tuple[ElementBytes, float]:
        """Bytes of each operand of a type of product, and its FLOP/s."""
        width = of_each(self.element_bytes if compute is None else GEMM_TYPES[compute])
        return width, self.low_flops if width.quantised else self.peak_flops

    def attention_s(self, call: AttentionCall) -> Array:
        """FLOPs of the unmasked part; eager: the longer of all FLOPs and the score matrix's traffic."""
        flops_s = 4.0 * self.batch * call.num_attention_heads * call.mean_head_dim / self.peak_flops
        if self.kernel != "eager":
            return call.causal * flops_s
        traffic = self.batch * call.num_attention_heads * call.score_bytes * self.element_bytes / 2
        return call.chunk * call.keys * max(flops_s, traffic / self.gpu.hbm_bytes_per_s)

    def experts_s(self, call: ExpertsCall) -> Array:
        """The longer of the rows' FLOPs at peak and one reading of the weights of the experts that have any."""
        width, flops_per_s = self._type_of(call.compute)
        rows = call.rows(self.batch)
        weights = call.active(rows) * call.expert_weights
        flops_s = rows * (2.0 * call.expert_weights / flops_per_s)
        return np.maximum(flops_s, weights * (width.weight / self.gpu.hbm_bytes_per_s))

    def recurrence_s(self, call: RecurrenceCall) -> RecurrenceSeconds:
        """The longer of the scan's FLOPs and of its operands' bytes; the convolution's bytes."""
        bytes_per_s = self.gpu.hbm_bytes_per_s
        return least_recurrence(
            call, self.batch, self.element_bytes, flops_per_s=self.peak_flops, bytes_per_s=bytes_per_s
        )

    def sparse_s(self, call: SparseCall) -> Array:
        """FLOPs, those of scores in FP8 where single keys are chosen."""
        scores = self.low_flops if call.block == 1 else self.peak_flops
        return least_sparse(call, self.batch, score_flops_per_s=scores, flops_per_s=self.peak_flops)

    def traffic_s(self, tokens: Array, steps: tuple[Traffic, ...]) -> Array:
        """Bytes at the datasheet's HBM rate."""
        nbytes = self.batch * self.element_bytes / 2 * sum(step.nbytes for step in steps)
        return tokens * (nbytes / self.gpu.hbm_bytes_per_s)
