"""RoutedExperts: what the routed experts of one kind of layer cost, and where they lie.

Without expert parallelism every rank holds all experts, or each GPU of its group a slice of each. With it, the experts
are spread whole over all GPUs of the run. The GPUs of a group have the same tokens, so each computes those that its own
experts see, and the group's all-reduce sums what they have. Ranks have tokens of their own: each token goes to the
ranks that hold its experts and its results come back, so that all ranks meet twice in such a layer, and all have about
as many rows, whatever their chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from kvrsim.cost.mixing.base import launches
from kvrsim.cost.traffic import activation
from kvrsim.errors import InputError
from kvrsim.model.spec import LayerSpec, ModelSpec
from kvrsim.profile.rates.elementwise import Traffic
from kvrsim.profile.rates.experts import ExpertsCall, mean_imbalance
from kvrsim.profile.rates.gemm import GEMM_TYPES, Product
from kvrsim.program import Array

if TYPE_CHECKING:
    from kvrsim.cost.kernels import CostModel

_MOST_IMBALANCE = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlacement:
    """How routed experts lie on the GPUs of a run."""

    num_gpus: int = 1  # that they are spread over
    gpus_per_rank: int = 1  # of these, how many have the same tokens
    tokens: int = 0  # of each sequence, that all ranks compute together
    imbalance: float | None = None  # rows of the busiest GPU over the mean; None: see mean_imbalance

    def of_model(self, layer: LayerSpec) -> float:
        """Imbalance of a layer of the model, with all experts."""
        if self.imbalance is not None and self.num_gpus > 1:
            return self.imbalance
        return mean_imbalance(layer.num_experts, layer.num_experts_per_tok, self.num_gpus)


ONE_GPU = ExpertPlacement()


def check_experts(model: ModelSpec, num_gpus: int | None, imbalance: float | None) -> None:
    """InputError where experts cannot be spread over so many GPUs (None: they are not), or for an odd imbalance."""
    if num_gpus is None and imbalance is not None:
        raise InputError("expert_imbalance", imbalance, "nothing without expert_parallel, of which it is the imbalance")
    if imbalance is not None and not 1.0 <= imbalance <= _MOST_IMBALANCE:
        raise InputError("expert_imbalance", imbalance, f"a number from 1 to {_MOST_IMBALANCE:g}")
    if num_gpus is None:
        return
    counts = [layer.num_experts for layer in model.layer_kinds if layer.num_experts]
    if not counts:
        raise InputError("expert_parallel", "yes", f"a mixture of experts, which {model.name} is not")
    for count in counts:
        if count % num_gpus:
            accepted = f"a number of GPUs that the {count} experts of {model.name} divide over"
            raise InputError("expert_parallel", f"{num_gpus} GPUs", accepted)


def spread_experts(share: ModelSpec, model: ModelSpec, num_gpus: int) -> ModelSpec:
    """A GPU's share of a model, but of its routed experts one in `num_gpus`, and these whole."""
    pairs = {
        (mine, whole): replace(mine, mlp=whole.mlp, num_experts=whole.num_experts // num_gpus)
        if whole.num_experts
        else mine
        for mine, whole in zip(share.layers, model.layers, strict=True)
    }
    return replace(share, layers=tuple(pairs[pair] for pair in zip(share.layers, model.layers, strict=True)))


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Seconds, bytes and kernels of the routed experts that a GPU holds."""

    layer: LayerSpec  # a GPU's share, with the experts that it holds
    cost: CostModel
    placement: ExpertPlacement

    @property
    def meets(self) -> bool:
        """Whether ranks exchange tokens."""
        return self.placement.num_gpus > self.placement.gpus_per_rank

    @property
    def kernels(self) -> int:
        """That a call launches."""
        products, steps = counted_experts(self.call(np.ones(1)), fused=self.cost.fused)
        return launches(self.cost, products) + sum(step.kernels for step in steps)

    def seconds(self, chunk: Array) -> Array:
        """Of the busiest GPU, which the others wait for; `chunk`: of each sequence, tokens that the rank computes."""
        return self.cost.experts_s(self.call(chunk))

    def call(self, chunk: Array) -> ExpertsCall:
        """What one GPU computes: where ranks exchange tokens, of all ranks' chunks."""
        first, *_, back = self.layer.mlp
        placement, per_tok = self.placement, self.layer.num_experts_per_tok
        return ExpertsCall(
            tokens=np.full(1, float(placement.tokens)) if self.meets else chunk,
            hidden_size=first.in_features,
            intermediate_size=back.in_features,
            gated=self.layer.gated_mlp,
            num_experts=self.layer.num_experts,
            num_experts_per_tok=per_tok / placement.num_gpus,
            compute=first.compute,
            imbalance=placement.of_model(replace(self.layer, num_experts=self.layer.num_experts * placement.num_gpus)),
        )

    def rows(self, chunk: Array, batch: int) -> Array:
        """Rows of the busiest GPU."""
        return self.call(chunk).rows(batch)

    @property
    def reach(self) -> float:
        """Share of the tokens that have an expert on a given GPU, where all experts are alike."""
        held, per_tok = self.layer.num_experts, self.layer.num_experts_per_tok
        every = held * self.placement.num_gpus
        return 1.0 - prod(max(0.0, every - held - drawn) / (every - drawn) for drawn in range(per_tok))

    def dispatched_bytes(self, element_bytes: int) -> float:
        """Bytes of a token on its way to its experts, in the type that they compute in."""
        first, *_ = self.layer.mlp
        quantised = first.compute is not None and GEMM_TYPES[first.compute].quantised > 0
        width = GEMM_TYPES[first.compute].input if quantised and first.compute else element_bytes
        return width * first.in_features

    def combined_bytes(self, element_bytes: int) -> float:
        """Bytes of a token's results on their way back."""
        return float(element_bytes * self.layer.mlp[-1].out_features)


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
