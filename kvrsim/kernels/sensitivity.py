"""WeightedCost: the same times with a weight for every part, so that one run tells what each part is worth.

Weights are arrays over a batch: a column that has 1.05 for attention and 1 for the rest asks what TTFT does when
attention is 5 % slower; a column of zeros but for attention has attention's seconds alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvrsim.kernels.attention import AttentionCall
from kvrsim.kernels.calibrated import CostModel
from kvrsim.kernels.elementwise import CacheCopies, Traffic
from kvrsim.kernels.experts import ExpertsCall
from kvrsim.kernels.gemm import Product
from kvrsim.kernels.recurrence import RecurrenceCall, RecurrenceSeconds
from kvrsim.kernels.sparse import SparseCall
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array


class Part(NamedTuple):
    """What a weight belongs to."""

    kind: str  # one of OPERATION_KINDS
    product: Product | None = None  # which matrix product, of kind gemm
    variant: str | None = None  # which recurrence, of kind recurrence


ATTENTION, EXPERTS, ELEMENTWISE = Part("attention"), Part("experts"), Part("elementwise")
_LATENT, _SPARSE = Part("latent"), Part("sparse")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedCost:
    """A cost model whose parts are multiplied by weights of shape (B,)."""

    cost: CostModel
    weights: Mapping[Part, Array]

    @property
    def fused(self) -> bool:
        """As in the cost model."""
        return self.cost.fused

    @property
    def fused_merge(self) -> bool:
        """As in the cost model."""
        return self.cost.fused_merge

    @property
    def measures_merge(self) -> bool:
        """As in the cost model."""
        return self.cost.measures_merge

    @property
    def whole_attention(self) -> bool:
        """As in the cost model."""
        return self.cost.whole_attention

    @property
    def copies(self) -> CacheCopies:
        """As in the cost model."""
        return self.cost.copies

    @property
    def head_on_all_tokens(self) -> bool:
        """As in the cost model."""
        return self.cost.head_on_all_tokens

    @property
    def repeats_rotary(self) -> bool:
        """As in the cost model."""
        return self.cost.repeats_rotary

    @property
    def least(self) -> bool:
        """As in the cost model."""
        return self.cost.least

    def score_bytes(self, model: ModelSpec) -> float:
        """As in the cost model."""
        return self.cost.score_bytes(model)

    def row_cost(self, products: tuple[Product, ...], steps: tuple[Traffic, ...]) -> Callable[[Array], Array]:
        """Products and element-wise kernels, each with its weight."""
        parts = [(self.weights[Part("gemm", product)], self.cost.row_cost((product,), ())) for product in products]
        if steps:
            parts.append((self.weights[ELEMENTWISE], self.cost.row_cost((), steps)))

        def seconds(tokens: Array) -> Array:
            return sum((weight * part(tokens) for weight, part in parts), np.zeros(1))

        return seconds

    def head_s(self, tokens: Array, product: Product) -> Array:
        """The product with its weight."""
        return self.weights[Part("gemm", product)] * self.cost.head_s(tokens, product)

    def attention_s(self, call: AttentionCall) -> Array:
        """Attention with its weight."""
        return self.weights[_LATENT if call.latent else ATTENTION] * self.cost.attention_s(call)

    def sparse_s(self, call: SparseCall) -> Array:
        """Attention to chosen keys with its weight."""
        return self.weights[_SPARSE] * self.cost.sparse_s(call)

    def experts_s(self, call: ExpertsCall) -> Array:
        """Routed experts with their weight."""
        return self.weights[EXPERTS] * self.cost.experts_s(call)

    def recurrence_s(self, call: RecurrenceCall) -> RecurrenceSeconds:
        """Convolution and scan with the weight of their kind."""
        return self.cost.recurrence_s(call).times(self.weights[Part("recurrence", variant=call.kind)])

    def traffic_s(self, tokens: Array, steps: tuple[Traffic, ...]) -> Array:
        """Element-wise kernels and copies with their weight."""
        return self.weights[ELEMENTWISE] * self.cost.traffic_s(tokens, steps)

    def mask_s(self, mask_elements: Array) -> Array:
        """With the weight of element-wise kernels."""
        return self.weights[ELEMENTWISE] * self.cost.mask_s(mask_elements)


class _Listing(dict[Part, Array]):
    """Weights that are made as they are asked for."""

    def __missing__(self, part: Part) -> Array:
        self[part] = np.ones(1)
        return self[part]


def listing(cost: CostModel) -> tuple[WeightedCost, Mapping[Part, Array]]:
    """A cost model that notes which parts it is asked for, and the parts so far."""
    parts = _Listing()
    return WeightedCost(cost=cost, weights=parts), parts
