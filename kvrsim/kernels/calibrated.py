"""Seconds of device time for one operation: the protocol, and its implementation by measured rates.

All arguments may be arrays over a batch of partitions; all results have their shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvrsim.kernels.attention import AttentionCall, AttentionRates, EagerRates, LatentRates
from kvrsim.kernels.elementwise import CacheCopies, Traffic, eager_score_bytes
from kvrsim.kernels.experts import ExpertsCall, counted_experts
from kvrsim.kernels.gemm import Product, RowCost, of_each, summed
from kvrsim.kernels.profile import KernelRates
from kvrsim.kernels.recurrence import RecurrenceCall, RecurrenceSeconds, counted_recurrence
from kvrsim.kernels.sparse import SparseCall, counted_sparse
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array


class CostModel(Protocol):
    """Device seconds of the three things that a layer is made of."""

    @property
    def fused(self) -> bool:
        """Whether element-wise kernels are fused."""

    @property
    def fused_merge(self) -> bool:
        """Whether one kernel merges partial results of attention."""

    @property
    def measures_merge(self) -> bool:
        """Whether that was measured."""

    @property
    def whole_attention(self) -> bool:
        """Whether attention's times hold the repeating of shared KV heads and the output's transposition."""

    @property
    def copies(self) -> CacheCopies:
        """Copies of K and V on their way into the cache."""

    @property
    def head_on_all_tokens(self) -> bool:
        """Whether logits are computed for every token of the last chunk."""

    @property
    def repeats_rotary(self) -> bool:
        """Whether Falcon's eager code repeats cos and sin for every head."""

    @property
    def least(self) -> bool:
        """Whether mixers take the time that no call beats and that does not grow with the start, for proofs."""

    def row_cost(self, products: tuple[Product, ...], steps: tuple[Traffic, ...]) -> Callable[[Array], Array]:
        """Seconds of matrix products and element-wise kernels as a function of tokens, prepared once."""

    def head_s(self, tokens: Array, product: Product) -> Array:
        """Logits of `tokens` tokens, no faster than the weights can be read."""

    def score_bytes(self, model: ModelSpec) -> float:
        """Bytes that eager attention moves per element of the score matrix, for elements of two bytes."""

    def attention_s(self, call: AttentionCall) -> Array:
        """QK^T, softmax and PV of all heads."""

    def experts_s(self, call: ExpertsCall) -> Array:
        """The routed experts of a layer, from permuting their rows to summing them up."""

    def recurrence_s(self, call: RecurrenceCall) -> RecurrenceSeconds:
        """Convolution and scan of linear attention or of a state-space layer."""

    def sparse_s(self, call: SparseCall) -> Array:
        """Index scores, the choice of keys, and attention to them."""

    def traffic_s(self, tokens: Array, steps: tuple[Traffic, ...]) -> Array:
        """Element-wise kernels and copies of `tokens` tokens."""

    def mask_s(self, mask_elements: Array) -> Array:
        """The attention mask, made before the first layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedCost:
    """Coefficients from a profile: each rate is what was measured, not what a datasheet promises."""

    rates: KernelRates
    kernel: str  # attention kernel, one of the profile's
    batch: int
    element_bytes: int
    least: bool = False  # attention takes the time that no call beats, for proofs
    scale: float = 1.0  # seconds of every kernel over those that the rates give
    pace: float = 1.0  # more for products and attention, as the clock falls under load

    @property
    def fused(self) -> bool:
        """As the profile says."""
        return self.rates.elementwise.fused

    @property
    def fused_merge(self) -> bool:
        """As the profile says."""
        return self.rates.elementwise.fused_merge

    @property
    def measures_merge(self) -> bool:
        """As the profile says."""
        return self.rates.elementwise.merge_bytes_per_s is not None

    @property
    def whole_attention(self) -> bool:
        """As the profile says."""
        return self.rates.whole_attention

    @property
    def copies(self) -> CacheCopies:
        """As the profile says."""
        return self.rates.copies

    @property
    def head_on_all_tokens(self) -> bool:
        """As the profile says."""
        return self.rates.head_on_all_tokens

    @property
    def repeats_rotary(self) -> bool:
        """As the profile says."""
        return self.rates.repeats_rotary

    def row_cost(self, products: tuple[Product, ...], steps: tuple[Traffic, ...]) -> RowCost:
        """By tiles and waves or as measured, and bytes; each product at its type's rates."""
        gemm = self._products(products)
        token_s, start_s = self._traffic(steps)
        return RowCost(
            rows_per_step=gemm.rows_per_step and gemm.rows_per_step / self.batch,
            table=gemm.table * (self.scale * self.pace) + start_s,
            row_s=gemm.row_s * (self.batch * self.scale * self.pace) + token_s,
        )

    def head_s(self, tokens: Array, product: Product) -> Array:
        """As any product; without tiles, that has not counted the reading of the weights.

        One row streams the weights, at a rate of its own where that was measured.
        """
        gemm, width = self.rates.gemm_of(product.compute, self.element_bytes)
        nbytes = product.in_features * product.out_features * of_each(width).weight
        read_s = self.scale * nbytes / (gemm.head_bytes_per_s or gemm.bytes_per_s)
        seconds = np.maximum(self.row_cost((product,), ())(tokens), read_s)
        return seconds if gemm.head_bytes_per_s is None else np.where(tokens * self.batch <= 1, read_s, seconds)

    def _products(self, products: tuple[Product, ...]) -> RowCost:
        types = tuple(dict.fromkeys(self.rates.priced_as(product.compute) for product in products)) or (None,)
        costs = []
        for compute in types:
            rates, width = self.rates.gemm_of(compute, self.element_bytes)
            alike = tuple(product for product in products if self.rates.priced_as(product.compute) == compute)
            costs.append(rates.row_cost(alike, width))
        return costs[0] if len(costs) == 1 else summed(costs)

    def score_bytes(self, model: ModelSpec) -> float:
        """As fitted to the model's type, or else as counted."""
        rates = self.rates.attention[self.kernel]
        fitted = rates.score_bytes.get(model.model_type) if isinstance(rates, EagerRates) else None
        return eager_score_bytes(model) if fitted is None else fitted

    def attention_s(self, call: AttentionCall) -> Array:
        """By the profile's rates of this kernel, or of latent attention's own."""
        rates: AttentionRates | LatentRates = self.rates.attention[self.kernel]
        if call.latent and self.kernel == "flash" and self.rates.latent is not None:
            rates = self.rates.latent
        seconds = (rates.least_seconds if self.least else rates.seconds)(call, self.batch, self.element_bytes)
        factor = self.scale * self.pace
        return seconds if factor == 1.0 else factor * seconds

    def experts_s(self, call: ExpertsCall) -> Array:
        """By the profile's rates of grouped products; counted where it has none of such a type."""
        experts, element_bytes = self.rates.experts, self.element_bytes
        if experts is None or not experts.covers(call.compute, element_bytes):
            return self.row_cost(*counted_experts(call, fused=self.fused))(call.tokens * call.imbalance)
        return self.scale * self.pace * experts.seconds(call, self.batch, element_bytes)

    def recurrence_s(self, call: RecurrenceCall) -> RecurrenceSeconds:
        """By the profile's rates; counted where it has none. Memory sets the pace, not the clock."""
        rates = self.rates.recurrence
        if rates is None:
            return counted_recurrence(self.rates, call, self.batch, self.element_bytes).times(self.scale)
        return rates.seconds(call, self.batch, self.element_bytes).times(self.scale)

    def sparse_s(self, call: SparseCall) -> Array:
        """By the profile's rates; counted where it has none for this kind of call."""
        kernels = None if self.rates.sparse is None else self.rates.sparse.of(call)
        if kernels is None:
            return self.scale * self.pace * counted_sparse(self.rates, call, self.batch)
        return self.scale * self.pace * kernels.seconds(call, self.batch, least=self.least)

    def traffic_s(self, tokens: Array, steps: tuple[Traffic, ...]) -> Array:
        """Bytes at the rate of each operation, and each kernel's start."""
        token_s, start_s = self._traffic(steps)
        return tokens * token_s + start_s if start_s else tokens * token_s

    def mask_s(self, mask_elements: Array) -> Array:
        """As the profile says."""
        return mask_elements * (self.scale * self.rates.elementwise.mask_element_s)

    def _traffic(self, steps: tuple[Traffic, ...]) -> tuple[float, float]:
        """Seconds a token, and seconds whatever the tokens."""
        rates = self.rates.elementwise
        bytes_s = sum(step.nbytes / rates.bytes_per_s(step.op) for step in steps)
        token_s = bytes_s * self.batch * self.element_bytes / 2
        return self.scale * token_s, self.scale * rates.start_s * sum(step.kernels for step in steps)
