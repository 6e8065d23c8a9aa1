"""Seconds of calls that a profile has no rates for, from FLOPs and bytes at the rates of other operations."""

from __future__ import annotations

import numpy as np

from kvrsim.profile.profile import KernelRates
from kvrsim.profile.rates.recurrence import SCAN_CHUNK, SCAN_KERNELS, RecurrenceCall, RecurrenceSeconds

_CHUNK_S = 1.5e-6  # a chunk's step took 1.2 to 1.8 us on all GPUs whose scans were measured


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
