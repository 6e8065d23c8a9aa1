"""Quantization: how a model's weights are stored, and what its products are computed in.

A method stores some matrices in fewer bits, with a scale for each group of weights. Either the inputs of a product
are quantised, too, and the product is computed in that type (FP8, INT8, NVFP4); or the weights alone are, and the
kernel makes half precision of them again (AWQ, GPTQ, MXFP4, bitsandbytes: "weight only"). Attention, norms and the
residual stream stay in half precision.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How the weights of a matrix are stored, and what its product is computed in."""

    compute: str  # type of the product, a key of GEMM_TYPES in kvrsim/kernels/gemm.py
    bits: int  # of a weight
    scale_bits: int  # of what a group of weights shares: scale and zero point
    group_outputs: int | None = 1  # output features that share a scale; None: all
    group_inputs: int | None = None  # input features that share a scale; None: all

    def nbytes(self, in_features: int, out_features: int) -> int:
        """Bytes of a matrix and its scales."""
        groups = _groups(in_features, self.group_inputs) * _groups(out_features, self.group_outputs)
        return -(-(in_features * out_features * self.bits + groups * self.scale_bits) // 8)


def _groups(features: int, size: int | None) -> int:
    return 1 if size is None else -(-features // size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """What a file, or a request for FP8, says about a model's weights and KV cache."""

    method: str  # as the file names it, such as "awq"
    formats: tuple[WeightFormat, ...]  # of the matrices; none: a method that kvrsim does not know
    kv_cache_bits: int | None = None  # of an element of the KV cache; None: as the request's dtype

    def describe(self) -> str:
        """For people: "awq, 4 bits"."""
        bits = " and ".join(str(bits) for bits in sorted({one.bits for one in self.formats}))
        cache = "" if self.kv_cache_bits is None else f", {self.kv_cache_bits} bits a KV-cache element"
        return f"{self.method}, {bits} bits{cache}" if bits else f"{self.method}{cache}"


FP8 = WeightFormat(compute="fp8", bits=8, scale_bits=32)
FP8_ON_REQUEST = Quantization(method="fp8, quantised on loading", formats=(FP8,))
