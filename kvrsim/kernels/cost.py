"""CostModel: seconds of device time for one operation, by one of three classes.

CalibratedCost uses the measured rates of a profile, RooflineCost the limits of a datasheet (Williams et al., 2009).
WeightedCost multiplies the parts of another cost model by weights, so that one run shows the effect of each part.

Each kind of operation is a call, such as AttentionCall, with its seconds by a profile (`measured_s`) and by a datasheet
(`roofline_s`).

All arguments may be arrays over a batch of partitions; all results have their shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvrsim.errors import InputError
from kvrsim.hardware import GpuSpec
from kvrsim.kernels.elementwise import NO_COPIES, CacheCopies, ElementwiseRates, Traffic
from kvrsim.kernels.gemm import GEMM_TYPES, GemmRates, GemmType, Product, RowCost, Width, of_each, sum_costs
from kvrsim.program import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTraits:
    """Properties of a run that all kernels share, except rates; the defaults are those of a serving engine."""

    kernel: str  # attention kernel
    batch: int  # number of sequences
    element_bytes: int  # bytes per element of the request's dtype
    fused: bool = True  # whether norm, rotary and activation are single kernels, and products of one input are joined
    fused_merge: bool = True  # whether one kernel merges partial results of attention
    measures_merge: bool = False  # whether the merging kernel was measured
    whole_attention: bool = False  # whether attention's times include repeated KV heads and the transposed output
    copies: CacheCopies = NO_COPIES  # copies of K and V on their way into the cache
    score_bytes: Mapping[str, float] = field(default_factory=dict)  # bytes per score element, fitted, by model type
    head_on_all_tokens: bool = False  # whether logits are computed for every token of the last chunk
    repeats_rotary: bool = False  # whether Falcon's eager code repeats cos and sin for every head
    lower_bound: bool = False  # whether mixers use lower bounds, which do not grow with the chunk's start


class Part(NamedTuple):
    """Part of a device's time, for sensitivities and breakdowns."""

    kind: str  # one of OPERATION_KINDS
    product: Product | None = None  # the matrix product, for kind gemm
    variant: str | None = None  # kind of recurrence, for kind recurrence


ELEMENTWISE = Part("elementwise")


class Call(Protocol):
    """One operation between the matrix products of a layer."""

    @property
    def part(self) -> Part: ...

    def measured_s(self, cost: CalibratedCost) -> Array:
        """Seconds by a profile's rates; without a rate for this call, by the rates of other operations."""

    def roofline_s(self, cost: RooflineCost) -> Array:
        """Lower bound of the seconds, by the datasheet."""


class Rates(Protocol):
    """Rates of a device, such as KernelRates: of products, of element-wise kernels, and of each other operation."""

    @property
    def gemm(self) -> GemmRates: ...

    @property
    def elementwise(self) -> ElementwiseRates: ...

    def rates_type(self, compute: str | None) -> str | None: ...

    def gemm_of(self, compute: str | None, element_bytes: int) -> tuple[GemmRates, Width]: ...

    def of(self, call: Call, kernel: str) -> Any:
        """Rates of the call's operation; None if it was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedCost:
    """Seconds from the measured rates of a profile."""

    rates: Rates
    traits: KernelTraits
    scale: float = 1.0  # factor on the seconds of every kernel
    clock_factor: float = 1.0  # factor on products and attention, because the clock falls under load

    @property
    def compute_scale(self) -> float:
        """Factor on the seconds of products and attention."""
        return self.scale * self.clock_factor

    def row_cost(self, products: tuple[Product, ...], steps: tuple[Traffic, ...]) -> RowCost:
        """Seconds of products, each by the rates of its type, and of element-wise kernels."""
        types = tuple(dict.fromkeys(self.rates.rates_type(product.compute) for product in products)) or (None,)
        costs = []
        for compute in types:
            rates, width = self.rates.gemm_of(compute, self.traits.element_bytes)
            of_type = tuple(product for product in products if self.rates.rates_type(product.compute) == compute)
            costs.append(rates.row_cost(of_type, width))
        gemm = costs[0] if len(costs) == 1 else sum_costs(costs)
        token_s, start_s = self._traffic(steps)
        return RowCost(
            rows_per_step=gemm.rows_per_step and gemm.rows_per_step / self.traits.batch,
            table=gemm.table * self.compute_scale + start_s,
            row_s=gemm.row_s * (self.traits.batch * self.compute_scale) + token_s,
        )

    def head_s(self, tokens: Array, product: Product) -> Array:
        """Seconds of the head's product, at least the time to read the weights.

        A product with one row takes exactly this time if the profile has head_bytes_per_s.
        """
        gemm, width = self.rates.gemm_of(product.compute, self.traits.element_bytes)
        nbytes = product.in_features * product.out_features * of_each(width).weight
        read_s = self.scale * nbytes / (gemm.head_bytes_per_s or gemm.bytes_per_s)
        seconds = np.maximum(self.row_cost((product,), ())(tokens), read_s)
        if gemm.head_bytes_per_s is not None:
            seconds = np.where(tokens * self.traits.batch <= 1, read_s, seconds)
        return seconds

    def call_s(self, call: Call) -> Array:
        return call.measured_s(self)

    def traffic_s(self, tokens: Array, steps: tuple[Traffic, ...]) -> Array:
        """Seconds of the bytes at each operation's rate, plus each kernel's start."""
        token_s, start_s = self._traffic(steps)
        seconds = tokens * token_s
        if start_s:
            seconds = seconds + start_s
        return seconds

    def mask_s(self, mask_elements: Array) -> Array:
        """Seconds to make the attention mask, once before the first layer."""
        return mask_elements * (self.scale * self.rates.elementwise.mask_element_s)

    def _traffic(self, steps: tuple[Traffic, ...]) -> tuple[float, float]:
        """Seconds per token, and seconds that do not depend on the tokens."""
        rates = self.rates.elementwise
        bytes_s = sum(step.nbytes / rates.bytes_per_s(step.op) for step in steps)
        token_s = bytes_s * self.traits.batch * self.traits.element_bytes / 2
        return self.scale * token_s, self.scale * rates.start_s * sum(step.kernels for step in steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineCost:
    """Cost from the datasheet: no kernel is faster than its FLOPs or its bytes allow."""

    traits: KernelTraits
    bytes_per_s: float  # bandwidth of device memory
    flops_per_s: float  # FLOP/s of the request's dtype; half precision's with fp8, in which attention computes
    low_flops_per_s: float  # FLOP/s of products with quantised inputs, where the GPU supports them

    @classmethod
    def of(cls, gpu: GpuSpec, traits: KernelTraits, dtype: str) -> RooflineCost:
        """Limits of one GPU in one dtype; raises InputError if the GPU does not compute in this dtype.

        All products with quantised inputs, also INT8 and NVFP4, have the peak of FP8; gpus.json has no other peaks.
        """
        peaks = gpu.peak_flops
        if dtype not in peaks:
            raise InputError("dtype", dtype, f"what {gpu.name} computes in: {', '.join(peaks)}")
        half = peaks[dtype]
        if dtype == "fp8":
            half = peaks.get("bf16", peaks.get("fp16", half))
        low = peaks.get("fp8", half)
        return cls(traits=traits, bytes_per_s=gpu.hbm_bytes_per_s, flops_per_s=half, low_flops_per_s=low)

    def row_cost(self, products: tuple[Product, ...], steps: tuple[Traffic, ...]) -> Callable[[Array], Array]:
        """Seconds of element-wise bytes, and of products: the longer of FLOPs at peak and one read of the weights."""

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

    def limits_of(self, compute: str | None) -> tuple[GemmType, float]:
        """Bytes per element of each operand of a type of product, and its FLOP/s."""
        width = of_each(self.traits.element_bytes)
        if compute is not None:
            width = of_each(GEMM_TYPES[compute])
        if width.quantised:
            return width, self.low_flops_per_s
        return width, self.flops_per_s

    def call_s(self, call: Call) -> Array:
        return call.roofline_s(self)

    def traffic_s(self, tokens: Array, steps: tuple[Traffic, ...]) -> Array:
        """Seconds of the bytes at the datasheet's memory bandwidth."""
        nbytes = self.traits.batch * self.traits.element_bytes / 2 * sum(step.nbytes for step in steps)
        return tokens * (nbytes / self.bytes_per_s)

    def mask_s(self, mask_elements: Array) -> Array:
        return np.zeros_like(mask_elements)


def no_time(traits: KernelTraits) -> RooflineCost:
    """A cost model in which nothing takes time, for questions other than seconds, such as memory."""
    return RooflineCost(traits=traits, bytes_per_s=inf, flops_per_s=inf, low_flops_per_s=inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedCost:
    """A cost model whose parts are multiplied by weights of shape (B,).

    A column with 1.05 for attention and 1 for the rest shows how TTFT changes when attention is 5 % slower; a column
    with 1 for attention and 0 for the rest gives the seconds of attention alone.
    """

    cost: CostModel
    weights: Mapping[Part, Array]

    @property
    def traits(self) -> KernelTraits:
        return self.cost.traits

    def row_cost(self, products: tuple[Product, ...], steps: tuple[Traffic, ...]) -> Callable[[Array], Array]:
        """Seconds of products and element-wise kernels, each multiplied by its weight."""
        parts = [(self.weights[Part("gemm", product)], self.cost.row_cost((product,), ())) for product in products]
        if steps:
            parts.append((self.weights[ELEMENTWISE], self.cost.row_cost((), steps)))

        def seconds(tokens: Array) -> Array:
            return sum((weight * part(tokens) for weight, part in parts), np.zeros(1))

        return seconds

    def head_s(self, tokens: Array, product: Product) -> Array:
        return self.weights[Part("gemm", product)] * self.cost.head_s(tokens, product)

    def call_s(self, call: Call) -> Array:
        return self.weights[call.part] * self.cost.call_s(call)

    def traffic_s(self, tokens: Array, steps: tuple[Traffic, ...]) -> Array:
        return self.weights[ELEMENTWISE] * self.cost.traffic_s(tokens, steps)

    def mask_s(self, mask_elements: Array) -> Array:
        return self.weights[ELEMENTWISE] * self.cost.mask_s(mask_elements)


CostModel = CalibratedCost | RooflineCost | WeightedCost


def column_of(cost: CostModel, column: int) -> CostModel:
    """The cost model with one column of its weights; unchanged if it has no weights, or lists the parts."""
    if not isinstance(cost, WeightedCost) or isinstance(cost.weights, _Listing):
        return cost
    return replace(cost, weights={part: weight[column : column + 1] for part, weight in cost.weights.items()})


class _Listing(dict[Part, Array]):
    """A weight of 1 for each part whose weight was read, so that its keys list the parts of a cost."""

    def __missing__(self, part: Part) -> Array:
        self[part] = np.ones(1)
        return self[part]


def listing(cost: CostModel) -> tuple[WeightedCost, Mapping[Part, Array]]:
    """A cost model that records the parts that it prices, and this record, which grows with use."""
    parts = _Listing()
    return WeightedCost(cost=cost, weights=parts), parts
