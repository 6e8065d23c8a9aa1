"""RooflineCost: the datasheet's limits (Williams et al., 2009)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.cost import Call, KernelTraits
from kvrsim.kernels.elementwise import Traffic
from kvrsim.kernels.gemm import GEMM_TYPES, ElementBytes, Product, of_each
from kvrsim.program import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineCost:
    """No kernel is faster than its FLOPs or its bytes allow."""

    traits: KernelTraits
    bytes_per_s: float  # of device memory
    flops_per_s: float  # of the request's dtype; under fp8 of half precision, which attention is computed in
    low_flops_per_s: float  # of products with quantised inputs, where the GPU has such arithmetic

    @classmethod
    def of(cls, gpu: GpuSpec, traits: KernelTraits, dtype: str) -> RooflineCost:
        """Limits of one GPU in one dtype; InputError where the GPU has no such arithmetic.

        Products with quantised inputs, INT8 and NVFP4 too, have the peak of FP8: datasheets are read for no other.
        """
        peaks = dict(gpu.peak_flops)
        if dtype not in peaks:
            raise InputError("dtype", dtype, f"what {gpu.name} computes in: {', '.join(peaks)}")
        half = peaks.get("bf16", peaks.get("fp16", peaks[dtype])) if dtype == "fp8" else peaks[dtype]
        low = peaks.get("fp8", half)
        return cls(traits=traits, bytes_per_s=gpu.hbm_bytes_per_s, flops_per_s=half, low_flops_per_s=low)

    def row_cost(self, products: tuple[Product, ...], steps: tuple[Traffic, ...]) -> Callable[[Array], Array]:
        """Of each product, the longer of FLOPs at peak and one reading of the weights; and bytes."""

        def seconds(tokens: Array) -> Array:
            total_s = np.asarray(self.traffic_s(tokens, steps))
            for product in products:
                total_s += self.head_s(tokens, product)
            return total_s

        return seconds

    def head_s(self, tokens: Array, product: Product) -> Array:
        weights = product.in_features * product.out_features * product.num_matrices
        width, flops_per_s = self.limits_of(product.compute)
        seconds = np.asarray(tokens * (self.traits.batch * product.flops_per_row / flops_per_s))
        return np.maximum(seconds, weights * width.weight / self.bytes_per_s, out=seconds)

    def limits_of(self, compute: str | None) -> tuple[ElementBytes, float]:
        """Bytes of each operand of a type of product, and its FLOP/s."""
        width = of_each(self.traits.element_bytes if compute is None else GEMM_TYPES[compute])
        return width, self.low_flops_per_s if width.quantised else self.flops_per_s

    def call_s(self, call: Call) -> Array:
        return call.roofline_s(self)

    def traffic_s(self, tokens: Array, steps: tuple[Traffic, ...]) -> Array:
        """Bytes at the datasheet's memory bandwidth."""
        nbytes = self.traits.batch * self.traits.element_bytes / 2 * sum(step.nbytes for step in steps)
        return tokens * (nbytes / self.bytes_per_s)

    def mask_s(self, mask_elements: Array) -> Array:
        return np.zeros_like(mask_elements)


def no_time(traits: KernelTraits) -> RooflineCost:
    """A cost model without limits: nothing takes any time, for what a program has besides seconds, such as memory."""
    return RooflineCost(traits=traits, bytes_per_s=inf, flops_per_s=inf, low_flops_per_s=inf)
