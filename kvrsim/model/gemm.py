"""Gemm: one weight matrix, how its weights are stored, and how many bytes it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# How the GPUs of a tensor-parallel group split a matrix. whole: not at all. columns: by columns. rows: by rows.
# kv_heads: by columns of KV heads, at least one per GPU. qkv_heads: by columns of one matrix that holds Q (and a gate),
# K and V.
Split = Literal["whole", "columns", "rows", "kv_heads", "qkv_heads"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How the weights of a matrix are stored, and the type in which its product is computed."""

    compute: str  # type of the product, a key of GEMM_TYPES in kvrsim/kernels/gemm.py
    bits: int  # bits per weight
    scale_bits: int  # bits of the scale and the zero point that a group of weights shares
    group_outputs: int | None = 1  # output features that share a scale; None: all
    group_inputs: int | None = None  # input features that share a scale; None: all

    def nbytes(self, in_features: int, out_features: int) -> int:
        """Bytes of a matrix and its scales."""
        groups = _groups(in_features, self.group_inputs) * _groups(out_features, self.group_outputs)
        return -(-(in_features * out_features * self.bits + groups * self.scale_bits) // 8)


def _groups(features: int, size: int | None) -> int:
    if size is None:
        return 1
    return -(-features // size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """Quantisation of a model's weights and KV cache, from a file or a request for FP8."""

    method: str  # name in the file, such as "awq"
    formats: tuple[WeightFormat, ...]  # formats of the matrices; empty if only the cache is quantised
    kv_cache_bits: int | None = None  # bits per element of the KV cache; None: as the request's dtype

    def describe(self) -> str:
        """Describe the format, such as "awq, 4 bits"."""
        text = self.method
        bits = sorted({weights.bits for weights in self.formats})
        if bits:
            text += f", {' and '.join(map(str, bits))} bits"
        if self.kv_cache_bits is not None:
            text += f", {self.kv_cache_bits} bits a KV-cache element"
        return text


FP8 = WeightFormat(compute="fp8", bits=8, scale_bits=32)
FP8_ON_REQUEST = Quantization(method="fp8, quantised on loading", formats=(FP8,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """One weight matrix: a token costs 2 x in_features x out_features FLOPs."""

    name: str  # name of the Hugging Face module
    in_features: int  # width of the input
    out_features: int  # width of the output
    bias: bool = False  # whether a vector of out_features is added
    weights: WeightFormat | None = None  # format if quantised; None: the request's dtype
    groups: int = 1  # blocks on the diagonal, each with in_features / groups inputs; 1: a full matrix
    split: Split = "whole"  # how the GPUs of a tensor-parallel group split the matrix

    @property
    def num_weights(self) -> int:
        """Elements of the matrix, without the bias."""
        return self.in_features * self.out_features // self.groups

    @property
    def num_parameters(self) -> int:
        """Elements of the matrix and of the bias."""
        if self.bias:
            return self.num_weights + self.out_features
        return self.num_weights

    @property
    def compute(self) -> str | None:
        """Type of the product, a key of GEMM_TYPES; None: the request's dtype."""
        if self.weights is None:
            return None
        return self.weights.compute

    def weight_bytes(self, bytes_per_element: int) -> int:
        """Bytes of weights, scales and bias; `bytes_per_element` applies to elements that are not quantised."""
        if self.weights is None:
            return self.num_parameters * bytes_per_element
        nbytes = self.weights.nbytes(self.in_features // self.groups, self.out_features)
        if self.bias:
            nbytes += self.out_features * bytes_per_element
        return nbytes

    def share(self, size: int) -> Gemm:
        """The part of a matrix on one of `size` GPUs, split by columns or rows, or not at all."""
        groups = max(1, self.groups // size)
        if self.split == "columns":
            in_features = self.in_features * groups // self.groups
            return replace(self, in_features=in_features, out_features=-(-self.out_features // size), groups=groups)
        if self.split == "rows":
            return replace(self, in_features=-(-self.in_features // size))
        assert self.split == "whole", f"{self.name} is split by its mixer"
        return self
