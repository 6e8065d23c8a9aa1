"""Linear attention and state-space layers between their projections: calls, rates and costs.

Engines run two kernels or groups of kernels per layer: a short convolution along the tokens, and the scan, which goes
through the tokens in chunks. Inside a chunk the scan uses matrix products; from chunk to chunk it passes on a state.
The convolution of a piece of the tokens needs the last few inputs before the piece. The scan of the piece needs the
state after all tokens before the piece, which is known when their scan has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np

from kvrsim.errors import InputError
from kvrsim.io.schema import Keys, NonNegative, RelativeError
from kvrsim.kernels.cost import CalibratedCost, Part, RooflineCost
from kvrsim.kernels.elementwise import Traffic
from kvrsim.kernels.mixer import MixerCost
from kvrsim.model.mixers import Recurrence
from kvrsim.program import Array

# Tokens per chunk, by kind of recurrence.
SCAN_CHUNK: Mapping[str, int] = {"gated_delta": 64, "kda": 64, "mamba2": 128, "linear": 128, "scan": 2048}
SCAN_KERNELS = 6  # kernels of one scan, as SGLang and mamba_ssm launch them
# Kernels around a scan, as SGLang launches them (gdn_backend.py, fla/chunk.py): split of the projections, gates, test
# for a state, norms of queries, of keys and of the output, a triangle of zeros, 4 copies (of the convolution's input,
# queries, keys and values), 3 copies of the state.
_AROUND_KERNELS = {"gated_delta": 14, "kda": 14}
# Of these, the split, the gates and the norms are Triton's kernels, as are those of the scan.
_AROUND_TRITON_KERNELS = {"gated_delta": 5, "kda": 5}
# Launches of compiled kernels that take as long as one of a Triton kernel, whose arguments Python prepares. Published
# ratios: 1.95 against torch.add (triton-lang/triton-ascend#1675), 4.1 against a product (triton-lang/triton#459).
_TRITON_LAUNCH = 2
RECURRENCES = tuple(SCAN_CHUNK)
# Kinds without rates use those of a similar kind.
_ALIKE = {"gated_delta": "kda", "kda": "gated_delta", "mamba2": "gated_delta", "linear": "mamba2", "scan": "mamba2"}
_CHUNK_S = 1.5e-6  # a chunk's step took 1.2 to 1.8 us on all measured GPUs
_SCAN_FLOPS = 9  # FLOPs per token and element of a diagonal state: decay, input, product, sum (Mamba's scan)
_TENSOR_CORE_SPEEDUP = 16  # rate of tensor cores divided by that of other units: 312 and 19.5 TFLOP/s on an A100
_FP32_ELEMENTS = 2  # number of half-precision elements that have the bytes of one fp32 element


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrenceCall:
    """Size of one recurrence; `tokens` is per sequence."""

    tokens: Array
    kind: str  # one of RECURRENCES, see kvrsim.model.mixers.Recurrence
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_channels: int  # 0: no convolution
    conv_kernel: int  # number of tokens that the convolution spans

    @property
    def part(self) -> Part:
        return Part("recurrence", variant=self.kind)

    @property
    def scan_flops(self) -> float:
        """FLOPs per token in the chunked form, all heads.

        Delta rules, per head (Yang et al., 2024, arXiv:2406.06484): products of keys with keys and of queries with keys
        in a chunk, two products with the inverse of the first product and one with the second; the state is read by the
        keys, read by the queries, and written. Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060): half of the chunk's scores
        per group, and their product with the inputs; the state is read and written. Linear attention is counted as
        Mamba-2. A scan of a diagonal state has no matrix products.
        """
        chunk = SCAN_CHUNK[self.kind]
        keys = self.key_head_dim
        values = self.value_head_dim
        if self.kind == "scan":
            return float(_TENSOR_CORE_SPEEDUP * _SCAN_FLOPS * self.num_value_heads * keys * values)
        if self.kind in ("mamba2", "linear"):
            head = chunk * values + 4.0 * keys * values
            return self.num_value_heads * head + self.num_key_heads * chunk * keys
        return self.num_value_heads * (2.0 * chunk * (3 * keys + 2 * values) + 6.0 * keys * values)

    @property
    def scan_elements(self) -> float:
        """Half-precision elements that a token's scan moves, all heads.

        Tensors between kernels are written once and read once. Delta rules: queries, keys and values, both products
        with the inverse, corrected values, a state per chunk, the output; Kimi delta attention also has decays of each
        channel in fp32 (raw, and summed along the chunk), and keys and queries scaled by the decays. Mamba-2: inputs
        and outputs, B and C, and states per chunk in fp32, before and after they are passed on.
        """
        chunk = SCAN_CHUNK[self.kind]
        keys = self.key_head_dim
        values = self.value_head_dim
        state = keys * values / chunk
        if self.kind in ("mamba2", "linear", "scan"):
            return self.num_value_heads * (2 * values + 4 * _FP32_ELEMENTS * state) + self.num_key_heads * 2.0 * keys
        decays = 3 * _FP32_ELEMENTS * keys + 4 * keys if self.kind == "kda" else 0
        return self.num_value_heads * (4.0 * keys + 6.0 * values + 2.0 * state + decays)

    @property
    def convolution_elements(self) -> float:
        """Elements that a token's convolution reads and writes."""
        return 2.0 * self.conv_channels


class ScanCall(RecurrenceCall):
    """The scan, which waits for the state after all earlier tokens."""

    def measured_s(self, cost: CalibratedCost) -> Array:
        """Seconds by the profile's rates; else FLOPs at the rate of products plus bytes at the rate of copies.

        The factor of the clock does not apply, because memory limits a scan.
        """
        rates: KindRates | None = cost.rates.of(self, cost.traits.kernel)
        batch = cost.traits.batch
        element_bytes = cost.traits.element_bytes
        if rates is not None:
            return cost.scale * rates.scan.seconds(self, batch, element_bytes)
        elementwise = cost.rates.elementwise
        tokens = batch * self.tokens
        flops_s = self.scan_flops / cost.rates.gemm.flops_per_s
        serial_s = SCAN_KERNELS * elementwise.start_s + self.tokens * (_CHUNK_S / SCAN_CHUNK[self.kind])
        return cost.scale * (tokens * (flops_s + self.scan_elements * element_bytes / elementwise.copy) + serial_s)

    def roofline_s(self, cost: RooflineCost) -> Array:
        """Seconds of FLOPs, or of one pass of queries, keys, values and output through memory, whichever is longer."""
        elements = 2.0 * (self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim)
        bytes_s = elements * cost.traits.element_bytes / cost.bytes_per_s
        return np.asarray(cost.traits.batch * self.tokens * max(self.scan_flops / cost.flops_per_s, bytes_s))


class ConvolutionCall(RecurrenceCall):
    """The convolution, which waits only for the layer's projections."""

    def measured_s(self, cost: CalibratedCost) -> Array:
        """Seconds by the profile's rates; else bytes at the rate of copies."""
        rates: KindRates | None = cost.rates.of(self, cost.traits.kernel)
        batch = cost.traits.batch
        element_bytes = cost.traits.element_bytes
        if rates is not None:
            return cost.scale * rates.convolution.seconds(self, batch, element_bytes)
        elementwise = cost.rates.elementwise
        bytes_s = batch * self.tokens * (self.convolution_elements * element_bytes / elementwise.copy)
        return cost.scale * (elementwise.start_s * (self.conv_channels > 0) + bytes_s)

    def roofline_s(self, cost: RooflineCost) -> Array:
        """Seconds in which each element crosses memory once."""
        element_s = cost.traits.element_bytes / cost.bytes_per_s
        return cost.traits.batch * self.tokens * (self.convolution_elements * element_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanRates:
    """Rates of a scan: start, serial step per chunk, work that grows with tokens and heads, and memory.

    Tensors between kernels stay in the device's cache up to its capacity; the rest crosses device memory.
    """

    start_s: NonNegative  # seconds to start all kernels of a scan together
    chunk_s: NonNegative  # seconds of a chunk's step, from the state before the chunk to the state after it
    flops_per_s: float  # rate of RecurrenceCall.scan_flops if the cache holds all elements
    cached_bytes: NonNegative  # bytes of RecurrenceCall.scan_elements that the cache holds
    bytes_per_s: float  # rate of data beyond the capacity of the cache

    def seconds(self, call: RecurrenceCall, batch: int | Array, element_bytes: int) -> Array:
        """Seconds of a scan; more tokens never take less time."""
        tokens = batch * call.tokens
        moved = tokens * (call.scan_elements * element_bytes)
        beyond_s = np.maximum(0.0, moved - self.cached_bytes) / self.bytes_per_s
        serial_s = call.tokens * (self.chunk_s / SCAN_CHUNK[call.kind])
        return self.start_s + serial_s + tokens * (call.scan_flops / self.flops_per_s) + beyond_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionRates:
    """Rates of a convolution: start and bytes; bytes beyond the device's cache cross device memory."""

    start_s: NonNegative
    cached_bytes_per_s: float  # rate of data in the cache
    cached_bytes: NonNegative  # capacity of the cache
    bytes_per_s: float  # rate of data beyond the capacity of the cache

    def seconds(self, call: RecurrenceCall, batch: int | Array, element_bytes: int) -> Array:
        """Seconds of a convolution; 0 where there is none."""
        moved = batch * call.tokens * (call.convolution_elements * element_bytes)
        beyond_s = np.maximum(0.0, moved - self.cached_bytes) / self.bytes_per_s
        return self.start_s * (call.conv_channels > 0) + moved / self.cached_bytes_per_s + beyond_s


@dataclass(frozen=True, kw_only=True, slots=True)
class KindRates:
    """Rates of one kind of recurrence."""

    scan: ScanRates
    convolution: ConvolutionRates


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrenceRates:
    """Rates by kind; a kind that was not measured uses the rates of a similar one, with its own FLOPs and bytes."""

    kinds: Annotated[Mapping[str, KindRates], Keys(RECURRENCES)]
    alike_log_sd: RelativeError  # spread of log(predicted / measured) where one kind is priced by another's rates

    def __post_init__(self) -> None:
        if not self.kinds:
            raise InputError("kinds", "none", f"rates of one or more of {', '.join(RECURRENCES)}")

    def rates_type(self, kind: str) -> str:
        """The kind that provides the rates: the kind itself, or a similar one."""
        for candidate in (kind, _ALIKE[kind]):
            if candidate in self.kinds:
                return candidate
        return next(iter(self.kinds))

    def of(self, call: RecurrenceCall) -> KindRates:
        """The rates of the call's kind, or of a similar kind."""
        return self.kinds[self.rates_type(call.kind)]


class RecurrentCost(MixerCost):
    """Cost of a convolution of the chunk, then of a scan that waits for the state before the chunk."""

    mixer: Recurrence

    @property
    def kernels(self) -> int:
        """Number of kernels of the scan, the operations around it and the convolution; Triton's count twice."""
        kind = self.mixer.kind
        kernels = SCAN_KERNELS + _AROUND_KERNELS.get(kind, 0) + (self.mixer.conv_channels > 0)
        triton_kernels = SCAN_KERNELS + _AROUND_TRITON_KERNELS.get(kind, 0)
        return kernels + (_TRITON_LAUNCH - 1) * triton_kernels

    def append_s(self, chunk: Array, prefix: Array) -> Array:
        """No time, because a state is replaced in place."""
        return 0.0 * chunk

    def local_op_s(self, chunk: Array) -> Array:
        """Seconds of the convolution, which also reads the last few inputs before the chunk."""
        return self.cost.call_s(ConvolutionCall(tokens=chunk, **self._sizes))

    def attention_s(self, chunk: Array, prefix: Array) -> Array:
        """Seconds of the scan, which do not depend on the prefix."""
        return self.cost.call_s(ScanCall(tokens=chunk, **self._sizes))

    def decode_s(self, keys: Array) -> Array:
        """Seconds to read and write the state once."""
        width = self.setting.element_bytes
        nbytes = 2.0 * self.mixer.state_bytes(width) * 2 / width  # element-wise rates count elements of two bytes
        return self.cost.traffic_s(np.ones_like(keys), (Traffic("copy", nbytes, 1),))

    @property
    def _sizes(self) -> dict[str, Any]:
        names = [field.name for field in fields(RecurrenceCall) if field.name != "tokens"]
        return {name: getattr(self.mixer, name) for name in names}
