"""RecurrenceRates: seconds of linear attention and state-space layers between their projections.

Engines run two kernels or groups of kernels a layer: a short convolution along the tokens, and the scan, which goes
through the tokens in chunks. Inside of a chunk it works with matrix products; from chunk to chunk it hands on a state.
The convolution of a piece of the tokens needs the last few inputs before the piece; its scan needs their state, which
is known when their scan has ended.

Costs of linear attention and state-space layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np

from kvrsim.errors import InputError
from kvrsim.io.schema import Keys, NonNegative, RelativeError
from kvrsim.kernels.elementwise import Traffic
from kvrsim.kernels.mixer import Mixing
from kvrsim.model.mixers import Recurrence
from kvrsim.program import Array
from kvrsim.units import format_bandwidth, format_seconds

if TYPE_CHECKING:
    from kvrsim.kernels.profile import KernelRates

SCAN_CHUNK: Mapping[str, int] = {"gated_delta": 64, "kda": 64, "mamba2": 128}  # tokens; by kind of recurrence
SCAN_KERNELS = 6  # of one scan, as SGLang and mamba_ssm launch them
RECURRENCES = tuple(SCAN_CHUNK)
_ALIKE = {"gated_delta": "kda", "kda": "gated_delta", "mamba2": "gated_delta"}  # whose rates stand for one without
_CHUNK_S = 1.5e-6  # a chunk's step took 1.2 to 1.8 us on all GPUs whose scans were measured
_FP32 = 2  # elements of half precision in one of fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrenceCall:
    """What one recurrence covers: so many tokens of each sequence."""

    tokens: Array
    kind: str  # one of RECURRENCES, as of kvrsim.model.mixers.Recurrence
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_channels: int  # 0: no convolution
    conv_kernel: int  # tokens of the convolution

    @property
    def scan_flops(self) -> float:
        """FLOPs of a token in the chunked form, all heads.

        Delta rules, a head (Yang et al., 2024, arXiv:2406.06484): products of keys with keys and of queries with keys
        in a chunk, two products with the inverse of the first and one with the second; the state is read by the keys,
        read by the queries, and written. Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060): half of the chunk's scores a
        group, their product with the inputs; the state is read and written.
        """
        chunk, keys, values = SCAN_CHUNK[self.kind], self.key_head_dim, self.value_head_dim
        if self.kind == "mamba2":
            head = chunk * values + 4.0 * keys * values
            return self.num_value_heads * head + self.num_key_heads * chunk * keys
        return self.num_value_heads * (2.0 * chunk * (3 * keys + 2 * values) + 6.0 * keys * values)

    @property
    def scan_elements(self) -> float:
        """Elements of half precision that a token's scan moves, all heads.

        What goes from kernel to kernel is written once and read once. Delta rules: queries, keys and values, both
        products with the inverse, corrected values, a state a chunk, the output; Kimi delta attention also decays of
        each channel in fp32 (raw, and summed along the chunk), and keys and queries scaled by them. Mamba-2: inputs
        and outputs, B and C, and states a chunk in fp32 before and after they are passed on.
        """
        chunk, keys, values = SCAN_CHUNK[self.kind], self.key_head_dim, self.value_head_dim
        state = keys * values / chunk
        if self.kind == "mamba2":
            return self.num_value_heads * (2 * values + 4 * _FP32 * state) + self.num_key_heads * 2.0 * keys
        decays = 3 * _FP32 * keys + 4 * keys if self.kind == "kda" else 0
        return self.num_value_heads * (4.0 * keys + 6.0 * values + 2.0 * state + decays)

    @property
    def convolution_elements(self) -> float:
        """Elements that a token's convolution reads and writes."""
        return 2.0 * self.conv_channels


class RecurrenceSeconds(NamedTuple):
    """Seconds of a recurrence by what it waits for."""

    convolution: Array  # for the layer's projections alone
    scan: Array  # for the state behind the tokens before, too

    @property
    def total(self) -> Array:
        """Both."""
        return self.convolution + self.scan

    def times(self, factor: Array | float) -> RecurrenceSeconds:
        """So many times as long."""
        return RecurrenceSeconds(convolution=factor * self.convolution, scan=factor * self.scan)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanRates:
    """Start, a serial step a chunk, work that grows with tokens and heads, and memory.

    Tensors that go from kernel to kernel stay in the device's cache as long as it holds them all; what is beyond
    crosses device memory.
    """

    start_s: NonNegative  # of all kernels of a scan together
    chunk_s: NonNegative  # of a chunk's step: from the state before it to the state behind it
    flops_per_s: float  # of RecurrenceCall.scan_flops, where the cache holds all
    cached_bytes: NonNegative  # of RecurrenceCall.scan_elements that the cache holds
    bytes_per_s: float  # of what is beyond

    def seconds(self, call: RecurrenceCall, batch: int | Array, element_bytes: int) -> Array:
        """Never less for more tokens."""
        tokens = batch * call.tokens
        moved = tokens * (call.scan_elements * element_bytes)
        beyond_s = np.maximum(0.0, moved - self.cached_bytes) / self.bytes_per_s
        serial_s = call.tokens * (self.chunk_s / SCAN_CHUNK[call.kind])
        return self.start_s + serial_s + tokens * (call.scan_flops / self.flops_per_s) + beyond_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionRates:
    """Start and bytes, which cross device memory as far as the device's cache does not hold them."""

    start_s: NonNegative
    cached_bytes_per_s: float  # where the cache holds all
    cached_bytes: NonNegative  # that it holds
    bytes_per_s: float  # of what is beyond

    def seconds(self, call: RecurrenceCall, batch: int | Array, element_bytes: int) -> Array:
        """Nothing where there is no convolution."""
        moved = batch * call.tokens * (call.convolution_elements * element_bytes)
        beyond_s = np.maximum(0.0, moved - self.cached_bytes) / self.bytes_per_s
        return self.start_s * (call.conv_channels > 0) + moved / self.cached_bytes_per_s + beyond_s


@dataclass(frozen=True, kw_only=True, slots=True)
class KindRates:
    """One kind of recurrence."""

    scan: ScanRates
    convolution: ConvolutionRates


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrenceRates:
    """Recurrences by kind; a kind that was not measured takes the rates of one alike, with its own FLOPs and bytes."""

    kinds: Annotated[Mapping[str, KindRates], Keys(RECURRENCES)]
    alike_log_sd: RelativeError  # of log(predicted / measured) where one kind is priced by another's rates

    def __post_init__(self) -> None:
        if not self.kinds:
            raise InputError("kinds", "none", f"rates of one or more of {', '.join(RECURRENCES)}")

    def priced_as(self, kind: str) -> str:
        """The kind whose rates stand for one: itself, or one alike."""
        return next((one for one in (kind, _ALIKE[kind]) if one in self.kinds), next(iter(self.kinds)))

    def seconds(self, call: RecurrenceCall, batch: int, element_bytes: int) -> RecurrenceSeconds:
        """By the rates of the call's kind, or of one alike."""
        rates = self.kinds[self.priced_as(call.kind)]
        convolution_s = rates.convolution.seconds(call, batch, element_bytes)
        return RecurrenceSeconds(convolution=convolution_s, scan=rates.scan.seconds(call, batch, element_bytes))

    def describe(self) -> str:
        """What was found, in a few sentences."""
        described = " ".join(_described(kind, rates) for kind, rates in self.kinds.items())
        return f"{described} Other kinds take the rates of one of these (log standard deviation {self.alike_log_sd})."


def _described(kind: str, rates: KindRates) -> str:
    scan, convolution = rates.scan, rates.convolution
    return (
        f"{kind}: start {format_seconds(scan.start_s)}, a chunk of {SCAN_CHUNK[kind]} tokens"
        f" {format_seconds(scan.chunk_s)}, {scan.flops_per_s / 1e12:.0f} TFLOP/s, beyond"
        f" {scan.cached_bytes / 1e6:.0f} MB {format_bandwidth(scan.bytes_per_s)}; convolution"
        f" {format_seconds(convolution.start_s)}, {format_bandwidth(convolution.cached_bytes_per_s)}, beyond"
        f" {convolution.cached_bytes / 1e6:.0f} MB {format_bandwidth(convolution.bytes_per_s)}."
    )


def counted_recurrence(rates: KernelRates, call: RecurrenceCall, batch: int, element_bytes: int) -> RecurrenceSeconds:
    """FLOPs at the rate of products, and bytes at that of copies, one after the other."""
    elementwise = rates.elementwise
    tokens = batch * call.tokens
    byte_s = element_bytes / elementwise.copy
    scan_s = tokens * (call.scan_flops / rates.gemm.flops_per_s + call.scan_elements * byte_s)
    scan_s = scan_s + SCAN_KERNELS * elementwise.start_s + call.tokens * (_CHUNK_S / SCAN_CHUNK[call.kind])
    start_s = elementwise.start_s * (call.conv_channels > 0)
    return RecurrenceSeconds(convolution=start_s + tokens * (call.convolution_elements * byte_s), scan=scan_s)


def least_recurrence(
    call: RecurrenceCall, batch: int, element_bytes: int, *, flops_per_s: float, bytes_per_s: float
) -> RecurrenceSeconds:
    """The longer of FLOPs, and queries, keys, values and output that cross memory once."""
    tokens = batch * call.tokens
    elements = 2.0 * (call.num_key_heads * call.key_head_dim + call.num_value_heads * call.value_head_dim)
    token_s = max(call.scan_flops / flops_per_s, elements * element_bytes / bytes_per_s)
    convolution_s = call.convolution_elements * element_bytes / bytes_per_s
    return RecurrenceSeconds(convolution=tokens * convolution_s, scan=np.asarray(tokens * token_s))


class RecurrentMixing(Mixing):
    """A convolution of the chunk, then a scan that waits for the state before it."""

    mixer: Recurrence
    has_own = True

    @property
    def kernels(self) -> int:
        """Of the scan, and the convolution."""
        return SCAN_KERNELS + (self.mixer.conv_channels > 0)

    def append_s(self, chunk: Array, prefix: Array) -> Array:
        """Nothing: a state is replaced."""
        return 0.0 * chunk

    def own_s(self, chunk: Array) -> Array:
        """The convolution; of the tokens before the chunk it needs the last few inputs."""
        return self._called(chunk).convolution

    def mix_s(self, chunk: Array, prefix: Array) -> Array:
        """The scan, whatever the prefix."""
        return self._called(chunk).scan

    def decode_s(self, keys: Array) -> Array:
        """The state is read and written once."""
        width = self.setting.element_bytes
        nbytes = 2.0 * self.mixer.state_bytes(width) * 2 / width  # element-wise rates count elements of two bytes
        return self.cost.traffic_s(np.ones_like(keys), (Traffic("copy", nbytes, 1),))

    def _called(self, tokens: Array) -> RecurrenceSeconds:
        mixer = self.mixer
        return self.cost.recurrence_s(
            RecurrenceCall(
                tokens=tokens,
                kind=mixer.kind,
                num_key_heads=mixer.num_key_heads,
                num_value_heads=mixer.num_value_heads,
                key_head_dim=mixer.key_head_dim,
                value_head_dim=mixer.value_head_dim,
                conv_channels=mixer.conv_channels,
                conv_kernel=mixer.conv_kernel,
            )
        )
