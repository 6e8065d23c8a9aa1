"""Mixtures of experts: Llama's attention, and in most layers a router over many small MLPs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family, dense_layers
from kvrsim.model.architectures.parts import (
    MAX_WIDTH,
    assemble,
    gated_mlp,
    gemm,
    read_inner,
    read_shape,
)
from kvrsim.model.architectures.windows import Windows
from kvrsim.model.gemm import Gemm
from kvrsim.model.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of a sparse layer."""

    count: int  # routed experts
    per_token: int  # routed experts that a token passes through
    inner: int  # width of a routed expert
    shared_inner: int | None = None  # width of the expert that all tokens pass through; None: there is none
    shared_gate: bool = True  # whether a gate of one feature scales the shared expert
    bias: bool = False  # in the router and the experts
    router: str = "gate"  # its name
    place: str = ""  # of a routed expert in the layer, such as "mlp.experts.0."; empty: Llama's
    shared_place: str = ""  # of the shared expert
    other_parameters: int = 0  # besides the matrices

    def sparse(self, layer: LayerSpec, hidden: int) -> LayerSpec:
        """The layer with these experts instead of its dense MLP."""
        return replace(
            layer,
            mlp=gated_mlp(hidden, self.inner, self.bias, self.place),
            gated_mlp=True,
            num_experts=self.count,
            num_experts_per_tok=self.per_token,
            router=gemm(self.router, hidden, self.count, self.bias),
            shared_mlp=self._shared(hidden),
            other_parameters=layer.other_parameters + self.other_parameters,
        )

    def _shared(self, hidden: int) -> tuple[Gemm, ...]:
        if self.shared_inner is None:
            return ()
        matrices = gated_mlp(hidden, self.shared_inner, place=self.shared_place)
        return (*matrices, gemm("shared_expert_gate", hidden, 1)) if self.shared_gate else matrices


def read_experts(
    config: JsonObject,
    count_key: str,
    *,
    count: int | None = None,
    per_token: int | None = None,
    per_token_key: str = "num_experts_per_tok",
    inner: int | None = None,
) -> Experts:
    """`count` and `per_token`: the architecture's defaults, if any; `inner` overrules moe_intermediate_size."""
    count = config.integer(count_key, count, maximum=MAX_WIDTH)
    if not config.has(per_token_key) and per_token is not None and per_token > count:
        raise config.error(per_token_key, f"a whole number from 1 to {count}")
    per_token = config.integer(per_token_key, per_token, maximum=count)
    width = read_inner(config, "moe_intermediate_size") if inner is None else inner
    return Experts(count=count, per_token=per_token, inner=width)


def mixture(
    config: JsonObject, name: str, family: Family, experts: Experts, windows: Windows, sparse: list[bool]
) -> ModelSpec:
    shape = read_shape(config, head_dim=family.head_dim)
    dense = dense_layers(config, shape, family, windows)
    kinds = {layer: experts.sparse(layer, shape.hidden) for layer in set(dense)}
    layers = [kinds[layer] if here else layer for layer, here in zip(dense, sparse, strict=True)]
    inner = read_inner(config)
    return assemble(config, name, shape, layers, family.norms, inner=inner, tied=family.tied)
