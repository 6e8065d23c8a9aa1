"""Mixtures of experts: Llama's attention, and in most layers a router over many small MLPs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrsim.io.json_text import JsonObject
from kvrsim.model.architectures.llama import Family, dense_layers
from kvrsim.model.architectures.parts import (
    MAX_WIDTH,
    Norms,
    assemble,
    gated_mlp,
    gemm,
    read_inner,
    read_num_layers,
    read_shape,
)
from kvrsim.model.architectures.windows import Windows, gpt_oss_windows, qwen_windows, same_window
from kvrsim.model.gemm import Gemm
from kvrsim.model.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of a sparse layer."""

    count: int  # routed experts
    per_token: int  # routed experts that a token passes through
    inner: int  # width of a routed expert
    shared_inner: int | None = None  # width of the expert that all tokens pass through; None: there is none
    bias: bool = False  # in the router and the experts
    router: str = "gate"  # its name

    def sparse(self, layer: LayerSpec, hidden: int) -> LayerSpec:
        """The layer with these experts instead of its dense MLP."""
        return replace(
            layer,
            mlp=gated_mlp(hidden, self.inner, self.bias),
            num_experts=self.count,
            num_experts_per_tok=self.per_token,
            router=gemm(self.router, hidden, self.count, self.bias),
            shared_mlp=self._shared(hidden),
        )

    def _shared(self, hidden: int) -> tuple[Gemm, ...]:
        if self.shared_inner is None:
            return ()
        return (*gated_mlp(hidden, self.shared_inner), gemm("shared_expert_gate", hidden, 1))


def read_experts(
    config: JsonObject, count_key: str, *, count: int, per_token: int, inner: int | None = None
) -> Experts:
    """`count` and `per_token` are the architecture's defaults; `inner` overrules moe_intermediate_size."""
    count = config.integer(count_key, count, maximum=MAX_WIDTH)
    if not config.has("num_experts_per_tok") and per_token > count:
        raise config.error("num_experts_per_tok", f"a whole number from 1 to {count}")
    per_token = config.integer("num_experts_per_tok", per_token, maximum=count)
    width = read_inner(config, "moe_intermediate_size") if inner is None else inner
    return Experts(count=count, per_token=per_token, inner=width)


def read_sparse_layers(config: JsonObject) -> list[bool]:
    """For each layer whether it has experts: every decoder_sparse_step-th, not those in mlp_only_layers."""
    step, dense = config.integer("decoder_sparse_step", 1), config.sequence("mlp_only_layers")
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in dense):
        raise config.error("mlp_only_layers", "an array of layer numbers")
    skipped = set(dense)
    return [(layer + 1) % step == 0 and layer not in skipped for layer in range(read_num_layers(config))]


def _mixture(
    config: JsonObject, name: str, family: Family, experts: Experts, windows: Windows, sparse: list[bool]
) -> ModelSpec:
    shape = read_shape(config, head_dim=family.head_dim)
    dense = dense_layers(config, shape, family, windows)
    kinds = {layer: experts.sparse(layer, shape.hidden) for layer in set(dense)}
    layers = [kinds[layer] if here else layer for layer, here in zip(dense, sparse, strict=True)]
    inner = read_inner(config)
    return assemble(config, name, shape, layers, family.norms, inner=inner, tied=family.tied)


def mixtral(config: JsonObject, name: str) -> ModelSpec:
    """Every layer is sparse, and an expert is as wide as intermediate_size says."""
    experts = read_experts(config, "num_local_experts", count=8, per_token=2, inner=read_inner(config))
    sparse = [True] * read_num_layers(config)
    return _mixture(config, name, Family(), experts, same_window(config), sparse)


def qwen2_moe(config: JsonObject, name: str) -> ModelSpec:
    """A shared expert with its own gate; alternate layers below max_window_layers may slide."""
    experts = read_experts(config, "num_experts", count=60, per_token=4)
    experts = replace(experts, shared_inner=read_inner(config, "shared_expert_intermediate_size"))
    windows = qwen_windows(config, lambda layer, boundary: layer % 2 == 0 and layer < boundary)
    family = Family(qkv_bias=config.flag("qkv_bias", True))
    return _mixture(config, name, family, experts, windows, read_sparse_layers(config))


def qwen3_moe(config: JsonObject, name: str) -> ModelSpec:
    """Norms on queries and keys, no shared expert; with use_sliding_window all layers slide."""
    bias = config.flag("attention_bias", False)
    experts = read_experts(config, "num_experts", count=128, per_token=8)
    family = Family(qkv_bias=bias, output_bias=bias, norms=Norms(count=2, qk=True))
    windows = qwen_windows(config, lambda _layer, _boundary: True)
    return _mixture(config, name, family, experts, windows, read_sparse_layers(config))


def gpt_oss(config: JsonObject, name: str) -> ModelSpec:
    """Biases everywhere, a learned sink for each query head, and a window in every other layer."""
    bias = config.flag("attention_bias", True)
    experts = read_experts(config, "num_local_experts", count=128, per_token=4, inner=read_inner(config))
    experts = replace(experts, bias=True, router="router")
    family = Family(qkv_bias=bias, output_bias=bias, head_dim=64)
    model = _mixture(config, name, family, experts, gpt_oss_windows(config), [True] * read_num_layers(config))
    sinks = model.num_attention_heads
    with_sinks = {kind: replace(kind, other_parameters=kind.other_parameters + sinks) for kind in model.layer_kinds}
    return replace(model, layers=tuple(with_sinks[layer] for layer in model.layers))
