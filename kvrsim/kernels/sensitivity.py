"""WeightedCost: the same times with a weight for every part, so that one run shows what each part is worth.

Weights are arrays over a batch: a column that has 1.05 for attention and 1 for the rest shows how TTFT changes when
attention is 5 % slower; a column of zeros but for attention has attention's seconds alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvrsim.kernels.cost import ELEMENTWISE, Call, CostModel, KernelTraits, Part
from kvrsim.kernels.elementwise import Traffic
from kvrsim.kernels.gemm import Product
from kvrsim.program import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedCost:
    """A cost model whose parts are multiplied by weights of shape (B,)."""

    cost: CostModel
    weights: Mapping[Part, Array]

    @property
    def traits(self) -> KernelTraits:
        return self.cost.traits

    def row_cost(self, products: tuple[Product, ...], steps: tuple[Traffic, ...]) -> Callable[[Array], Array]:
        """Products and element-wise kernels, each with its weight."""
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


class _Listing(dict[Part, Array]):
    """Weights of 1, one for each part that is read."""

    def __missing__(self, part: Part) -> Array:
        self[part] = np.ones(1)
        return self[part]


def listing(cost: CostModel) -> tuple[WeightedCost, Mapping[Part, Array]]:
    """A cost model that lists the parts that it prices, and that list, which grows as it is used."""
    parts = _Listing()
    return WeightedCost(cost=cost, weights=parts), parts
