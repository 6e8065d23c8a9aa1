"""Routed experts of a layer, which engines compute as grouped products in one or two kernels: calls, rates and costs.

A row is one token for one of its experts. Each expert's rows are cut into tiles. The last tile is partly empty, on
average by half, so the waste is largest where many experts have few rows each. The weights of each expert that has a
row are read once. The start and the end of a tile take a constant time, which is expressed as additional features to
sum over. Reading and computing overlap in part: together they take the square root of the sum of their squares.
Permutation, quantisation, activation and the final sum move each row through memory.

Each expert is sliced over GPUs, or whole experts are spread over GPUs, or both (kvrsim.layout). The GPUs of a rank have
the same tokens: each computes the rows of its own experts, and the group's all-reduce sums the results. Where several
ranks share one copy of the experts, there are two exchanges. all-to-all: each token goes to the ranks that hold its
experts, and its results return, so all ranks synchronise twice per layer. gather: all tokens go to all ranks, and the
results are summed and scattered. Over several nodes, data groups send each token once to each node that has one of its
experts, and inside this node to the GPUs that have them, as DeepEP's kernels do. In all cases all ranks have about the
same number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, NamedTuple

import numpy as np

from kvrsim.errors import InputError
from kvrsim.io.schema import Keys, NonNegative
from kvrsim.kernels.cost import CalibratedCost, CostModel, Part, RooflineCost
from kvrsim.kernels.elementwise import Traffic, activation
from kvrsim.kernels.gemm import GEMM_TYPES, Product, Width, alike, launches, of_each
from kvrsim.kernels.tensor_parallel import Group
from kvrsim.layout import ONE_LAYOUT, Exchange, Layout
from kvrsim.model.spec import LayerSpec, ModelSpec
from kvrsim.program import Array, Collective

EXPERTS = Part("experts")
_HALF_BYTES = 2
# Standard deviation of an expert's load divided by its mean, for NVIDIA's power law of exponent 1.01 and loads from 1
# to 0.8 times the tokens, in prefills of 8192 tokens. aiconfigurator-core 0.12.0 uses this law for DeepSeek's models
# by default (sdk/models/deepseek.py; sample_power_law in helper.py of its collector).
POWER_LAW_LOAD_SD = 1.88

# Kernels of routing: scores, choice, counting, sorting, copying rows to experts, weighted sum (fused_moe of vLLM and
# SGLang).
_ROUTING_KERNELS = 6


class ExpertsCall(NamedTuple):
    """Work of one layer's routed experts on one GPU."""

    tokens: Array  # tokens of each sequence, on this GPU before routing, any shape
    hidden_size: int
    intermediate_size: int  # width of this GPU's share of an expert
    gated: bool  # whether an activated gate is multiplied with a second projection
    num_experts: int  # number of experts on this GPU
    num_experts_per_tok: float  # average number of a token's experts that are on this GPU
    compute: str | None = None  # a key of GEMM_TYPES; None: the request's dtype
    imbalance: float = 1.0  # rows of this GPU divided by the mean of all GPUs

    @property
    def up_features(self) -> int:
        """Output features of an expert's first product."""
        return (1 + self.gated) * self.intermediate_size

    @property
    def expert_weights(self) -> int:
        """Elements of the matrices of one expert."""
        return self.hidden_size * (self.up_features + self.intermediate_size)

    @property
    def part(self) -> Part:
        return EXPERTS

    def measured_s(self, cost: CalibratedCost) -> Array:
        """Seconds by the profile's rates of grouped products; without rates for the type, as separate products."""
        measured: tuple[GroupedRates, Width] | None = cost.rates.of(self, cost.traits.kernel)
        if measured is None or (self.compute is None and cost.traits.element_bytes != _HALF_BYTES):
            return cost.row_cost(*expert_products(self, fused=cost.traits.fused))(self.tokens * self.imbalance)
        rates, width = measured
        return cost.compute_scale * rates.seconds(self, cost.traits.batch, width)

    def roofline_s(self, cost: RooflineCost) -> Array:
        """Seconds of FLOPs at peak, or of one reading of the weights of experts with rows, whichever is longer."""
        width, flops_per_s = cost.limits_of(self.compute)
        rows = self.rows(cost.traits.batch)
        weights = self.active(rows) * self.expert_weights
        flops_s = rows * (2.0 * self.expert_weights / flops_per_s)
        return np.maximum(flops_s, weights * (width.weight / cost.bytes_per_s))

    def rows(self, batch: int) -> Array:
        """Rows of the busiest GPU: each token counts once per local expert."""
        return self.tokens * (batch * self.num_experts_per_tok * self.imbalance)

    def active(self, rows: Array) -> Array:
        """Expected number of experts that receive a row, if `rows` rows choose independently."""
        return np.asarray(self.num_experts * -np.expm1(-rows / self.num_experts))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRates:
    """Rates of grouped products in one type."""

    flops_per_s: float  # FLOP/s of full tiles, for sums over very many features
    weight_bytes_per_s: float  # rate of reading the experts' weights
    row_bytes_per_s: float  # rate of moving rows: permuted, quantised, activated, summed up
    tile_rows: NonNegative  # rows of a tile; half of the last tile of each expert is empty on average
    tile_features: NonNegative  # number of features that take as long as a tile's start and end
    start_s: NonNegative  # seconds to start all kernels together

    def seconds(self, call: ExpertsCall, batch: int, width: Width) -> Array:
        """Seconds of one call; `width` is the bytes per element of the operands."""
        operands = of_each(width)
        rows = call.rows(batch)
        active = call.active(rows)
        features = call.up_features * (call.hidden_size + self.tile_features)
        features += call.hidden_size * (call.intermediate_size + self.tile_features)
        compute_s = (rows + 0.5 * self.tile_rows * active) * (2.0 * features / self.flops_per_s)
        weights_s = active * (call.expert_weights * operands.weight / self.weight_bytes_per_s)
        row_bytes = (call.hidden_size + call.intermediate_size) * (operands.input + operands.output)
        moved_s = rows * (row_bytes / self.row_bytes_per_s)
        return np.asarray((self.start_s + np.hypot(compute_s, weights_s) + moved_s) * (call.tokens > 0))

    def in_decode(self, bytes_per_s: float) -> GroupedRates:
        """Rates in a decode step, in which each expert has few rows; bytes_per_s: rate at which products read weights.

        Kernels for few rows have small tiles without empty rows, and read the experts' weights at this rate.
        """
        return replace(self, tile_rows=0.0, weight_bytes_per_s=bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRates:
    """Rates of grouped products by type."""

    half: GroupedRates  # rates in fp16 and bf16
    types: Annotated[Mapping[str, GroupedRates], Keys(tuple(GEMM_TYPES))] = field(default_factory=dict)

    def in_decode(self, bytes_per_s: float) -> ExpertRates:
        """Rates in a decode step, see GroupedRates."""
        types = {name: rates.in_decode(bytes_per_s) for name, rates in self.types.items()}
        return replace(self, half=self.half.in_decode(bytes_per_s), types=types)

    def covers(self, compute: str | None, element_bytes: int) -> bool:
        """Whether there are rates of a type or a substitute; `element_bytes`: bytes of the request's dtype."""
        if compute is None:
            return element_bytes == _HALF_BYTES
        return self.rates_type(compute) is not None

    def of(self, call: ExpertsCall) -> tuple[GroupedRates, Width] | None:
        """Rates for a call's type and bytes per element of its operands; None if no measured type is similar."""
        if call.compute is None:
            return self.half, _HALF_BYTES
        kind = self.rates_type(call.compute)
        if kind is None:
            return None
        return self.types[kind], GEMM_TYPES[kind]

    def rates_type(self, compute: str) -> str | None:
        """The measured type that provides the rates of a quantised type; None if no measured type is similar."""
        return next((kind for kind in alike(compute) if kind in self.types), None)


def mean_imbalance(num_experts: int, num_experts_per_tok: int, num_gpus: int) -> float:
    """Rows of the busiest of `num_gpus` GPUs divided by the mean, where experts are spread over them in order.

    Loads of experts are independent, with a standard deviation of POWER_LAW_LOAD_SD times their mean. The load of the
    busiest GPU is the expected largest of `num_gpus` normal deviates (Blom, 1958), at most all tokens.
    """
    if num_gpus == 1:
        return 1.0
    from statistics import NormalDist  # imported here because this import slows the start of every command

    deviate = NormalDist().inv_cdf((num_gpus - 0.375) / (num_gpus + 0.25))
    imbalance = 1.0 + deviate * POWER_LAW_LOAD_SD / np.sqrt(num_experts / num_gpus)
    most = min(num_gpus, num_experts / num_experts_per_tok)
    return float(min(imbalance, most))


_MOST_IMBALANCE = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlacement:
    """Placement of routed experts on the GPUs of a run, and exchange of their tokens."""

    layout: Layout = ONE_LAYOUT
    gather: Group | None = None  # GPUs that gather tokens, one per rank that shares the experts; None: no gather
    tokens: int = 0  # tokens of each sequence that all ranks compute together
    load: float = 1.0  # sequences of all data groups divided by those of the busiest group
    imbalance: float | None = None  # rows of the busiest GPU divided by the mean; None: see mean_imbalance

    @property
    def num_gpus(self) -> int:
        """GPUs over which whole experts are spread."""
        return self.layout.expert_parallel

    def imbalance_of(self, num_experts: int, num_experts_per_tok: int) -> float:
        """Rows of the busiest GPU divided by the mean, in a layer with `num_experts` experts on all GPUs."""
        if self.imbalance is not None and self.num_gpus > 1:
            return self.imbalance
        return mean_imbalance(num_experts, num_experts_per_tok, self.num_gpus)


ONE_GPU = ExpertPlacement()


def check_imbalance(imbalance: float | None) -> None:
    """Raise InputError for an imbalance out of range."""
    if imbalance is not None and not 1.0 <= imbalance <= _MOST_IMBALANCE:
        raise InputError("expert_imbalance", imbalance, f"a number from 1 to {_MOST_IMBALANCE:g}")


def place_experts(share: ModelSpec, model: ModelSpec, layout: Layout) -> ModelSpec:
    """A GPU's share of a model, with the routed experts (or slices of experts) that are on this GPU.

    Raises InputError where the experts do not divide over the GPUs.
    """
    groups = layout.expert_parallel

    def place(mine: LayerSpec, whole: LayerSpec) -> LayerSpec:
        if not whole.num_experts:
            return mine
        if whole.num_experts % groups:
            accepted = f"a number of GPUs that the {whole.num_experts} experts of {model.name} divide over"
            raise InputError("expert_parallel", f"{groups} GPUs", accepted)
        mlp = tuple(gemm.share(layout.expert_tensor) for gemm in whole.mlp)
        return replace(mine, mlp=mlp, num_experts=whole.num_experts // groups)

    kinds = list(zip(share.layer_kind_index, model.layer_kind_index, strict=True))
    pairs = {(mine, whole): place(share.layer_kinds[mine], model.layer_kinds[whole]) for mine, whole in set(kinds)}
    return replace(share, layers=tuple(pairs[kind] for kind in kinds))


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Seconds, bytes and kernels of the routed experts that a GPU holds."""

    layer: LayerSpec  # a GPU's share of a layer, with the experts on this GPU
    cost: CostModel
    placement: ExpertPlacement

    @property
    def exchange(self) -> Exchange:
        """How tokens reach experts of other ranks."""
        return self.placement.layout.exchange

    @property
    def kernels(self) -> int:
        """Number of kernels of a call: products, activations, sorting of tokens by expert, and sums of results."""
        fused = self.cost.traits.fused
        products, steps = expert_products(self.call(np.ones(1)), fused=fused)
        return launches(products, fused=fused) + sum(step.kernels for step in steps) + _ROUTING_KERNELS

    def seconds(self, chunk: Array, together: Array | None = None) -> Array:
        """Seconds of the busiest GPU, for which the others wait; `chunk` is tokens per sequence on the rank.

        together: tokens on all ranks that share the experts; None: see call.
        """
        return self.cost.call_s(self.call(chunk, together))

    def call(self, chunk: Array, together: Array | None = None) -> ExpertsCall:
        """The call of one GPU; `together`: tokens of all ranks, if they exchange tokens (None: the request's)."""
        first, *_, back = self.layer.mlp
        placement = self.placement
        layer = self.layer
        tokens = chunk
        if self.exchange != "none":
            if together is None:
                together = np.full(1, float(placement.tokens))
            tokens = together * placement.load
        return ExpertsCall(
            tokens=tokens,
            hidden_size=first.in_features,
            intermediate_size=back.in_features,
            gated=layer.gated_mlp,
            num_experts=layer.num_experts,
            num_experts_per_tok=layer.num_experts_per_tok / placement.num_gpus,
            compute=first.compute,
            imbalance=placement.imbalance_of(layer.num_experts * placement.num_gpus, layer.num_experts_per_tok),
        )

    @property
    def reach(self) -> float:
        """Share of the tokens that have an expert on a given GPU, if all experts are equally likely."""
        return self._reach_of(1)

    def _reach_of(self, gpus: int) -> float:
        """Share of the tokens that have an expert on some of `gpus` GPUs."""
        experts = self.layer.num_experts * gpus
        per_tok = self.layer.num_experts_per_tok
        total = self.layer.num_experts * self.placement.num_gpus
        return 1.0 - prod(max(0.0, total - experts - draw) / (total - draw) for draw in range(per_tok))

    @property
    def is_dispatched(self) -> bool:
        """Whether data groups on several nodes exchange tokens by all-to-all: each GPU then has whole experts."""
        gather = self.placement.gather
        return self.placement.layout.dispatches_tokens and gather is not None and gather.across.size > 1

    def dispatch(self, tokens: Array, more_s: float) -> Collective:
        """The all-to-all that sends a rank's tokens to their experts; `more_s` is added to the kernel's seconds."""
        return self._exchange("dispatch", tokens * self.dispatched_bytes, more_s)

    def combine(self, tokens: Array, more_s: float) -> Collective:
        """The all-to-all that returns the experts' results for a rank's tokens."""
        return self._exchange("combine", tokens * self.combined_bytes, more_s)

    def _exchange(self, name: str, nbytes: Array, more_s: float) -> Collective:
        """An all-to-all of `nbytes` of a rank's tokens, of which each GPU of the rank sends an equal part.

        Messages between nodes and inside them overlap. A token reaches each node once, and is forwarded there.
        """
        gather = self.placement.gather
        assert gather is not None
        tensor = self.placement.layout.tensor
        nodes = gather.across.size
        per_node = gather.inside.size * tensor
        sent = nbytes / tensor
        across = sent * ((nodes - 1) * self._reach_of(per_node))
        inside = sent * ((nodes * per_node - 1) * self.reach)
        far = gather.across.path
        near = gather.inside.path
        seconds = np.maximum(far.busy_s(across), near.busy_s(inside)) + (far.latency_s + near.latency_s)
        return Collective(name=name, seconds=more_s + seconds, nbytes=across + inside)

    @property
    def dispatched_bytes(self) -> float:
        """Bytes sent per token to a rank that has some of its experts, in the type of the experts' inputs."""
        first, *_ = self.layer.mlp
        element_bytes: float = self.cost.traits.element_bytes
        kind = GEMM_TYPES.get(first.compute or "")
        if kind is not None and kind.quantised:
            element_bytes = kind.input
        return element_bytes * first.in_features

    @property
    def combined_bytes(self) -> float:
        """Bytes of a token's results that return from a rank."""
        return float(self.cost.traits.element_bytes * self.layer.mlp[-1].out_features)


def expert_products(call: ExpertsCall, *, fused: bool) -> tuple[tuple[Product, ...], tuple[Traffic, ...]]:
    """Routed experts as separate products, each for its share of the tokens, and their activation.

    The kernels that permute the rows and sum them up are not counted.
    """
    share = call.num_experts_per_tok / call.num_experts
    up = Product(call.hidden_size, call.intermediate_size, call.num_experts, share, call.compute)
    back = Product(call.intermediate_size, call.hidden_size, call.num_experts, share, call.compute)
    products = [up, back]
    if fused:
        products = [up._replace(out_features=call.up_features), back]
    elif call.gated:
        products = [up, up, back]
    width = call.num_experts_per_tok * call.intermediate_size
    return tuple(products), (activation(width, gated=call.gated, fused=fused),)
