"""What a profile has no rates for, counted from the rates of other operations."""

from __future__ import annotations

import numpy as np

from kvrsim.cost.traffic import activation
from kvrsim.profile.profile import KernelRates
from kvrsim.profile.rates.elementwise import Traffic
from kvrsim.profile.rates.experts import ExpertsCall
from kvrsim.profile.rates.gemm import Product
from kvrsim.profile.rates.recurrence import SCAN_CHUNK, SCAN_KERNELS, RecurrenceCall, RecurrenceSeconds
from kvrsim.profile.rates.sparse import SparseCall
from kvrsim.program import Array

_SCORE_BYTES = 4.0  # of a score, fp32
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


def counted_sparse(rates: KernelRates, call: SparseCall, batch: int) -> Array:
    """FLOPs at the rate of products, scores in FP8 where there is one; scores are written and read once."""
    elementwise = rates.elementwise
    score_rates, _ = rates.gemm_of("fp8" if call.block == 1 else None, 2)
    flops_s = call.score_flops / score_rates.flops_per_s + call.attention_flops / rates.gemm.flops_per_s
    scores = call.chunk * call.seen * call.chooses
    start_s = elementwise.start_s * (1.0 + 2.0 * call.chooses)
    return start_s + batch * (flops_s + scores * (2.0 * _SCORE_BYTES / elementwise.copy))


def least_sparse(call: SparseCall, batch: int, *, score_flops_per_s: float, flops_per_s: float) -> Array:
    """FLOPs alone: of scores, and of attention to the keys that queries do attend to."""
    score_s, attention_s = call.score_flops / score_flops_per_s, call.least_attention_flops / flops_per_s
    return np.asarray(batch * (score_s + attention_s))


def counted_experts(call: ExpertsCall, *, fused: bool) -> tuple[tuple[Product, ...], tuple[Traffic, ...]]:
    """Routed experts as one product after another, each of its share of the tokens, and their activation.

    Nothing is counted for permuting the rows and summing them up.
    """
    share = call.num_experts_per_tok / call.num_experts
    up = [call.up_features] if fused else [call.intermediate_size] * (2 if call.gated else 1)
    into = (Product(call.hidden_size, features, call.num_experts, share, call.compute) for features in up)
    back = Product(call.intermediate_size, call.hidden_size, call.num_experts, share, call.compute)
    width = call.num_experts_per_tok * call.intermediate_size
    return (*into, back), (activation(width, gated=call.gated, fused=fused),)
