"""Gemma 4: wide heads and shared keys in the layers that see all tokens; experts beside the dense MLP, or none."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.experts import read_experts
from kvrsim.model.architectures.parts import (
    MAX_WIDTH,
    Norms,
    Reader,
    Shape,
    assemble,
    gated_mlp,
    read_inner,
    read_num_layers,
    read_shape,
)
from kvrsim.model.architectures.windows import read_sliding
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import LayerSpec, ModelSpec

_PERIOD = 6  # of its layers the last sees all tokens


def gemma4_text(config: JsonObject, name: str) -> ModelSpec:
    """Not the small ones, which have an embedding for each layer, and layers that reuse keys of others."""
    for key, default in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        if config.integer(key, default, minimum=0):
            raise config.error(key, "0: models without embeddings for each layer and without shared layers")
    shape, norms = read_shape(config, head_dim=256), Norms(count=4, qk=True)
    last, window = read_num_layers(config) - 1, config.integer("sliding_window", 512)
    sliding = read_sliding(config, lambda layer: (layer + 1) % _PERIOD != 0)
    sliding[last] = False
    inner, bias = read_inner(config), config.flag("attention_bias", False)
    near = replace(_attention(shape, bias), sliding_window=window)
    wide, shared = _wide(config, shape), config.flag("attention_k_eq_v", False)
    far = _attention(wide, bias)
    far = replace(far, projections=far.projections[:2] if shared else far.projections)
    mlp = gated_mlp(shape.hidden, inner)
    kinds = {True: norms.layer(shape, near, mlp, gated=True), False: norms.layer(wide, far, mlp, gated=True)}
    if config.flag("enable_moe_block", False):
        kinds = {here: _with_experts(config, layer, shape.hidden) for here, layer in kinds.items()}
    layers = [kinds[here] for here in sliding]
    return assemble(config, name, shape, layers, Norms(count=4), inner=inner, tied=True)


def _attention(shape: Shape, bias: bool) -> Attention:
    return shape.attention(shape.separate_qkv(bias), "o_proj", bias, qk_norm=True)


def _wide(config: JsonObject, shape: Shape) -> Shape:
    """Of the layers that see all tokens; their KV heads differ only where keys are values."""
    head_dim = config.integer("global_head_dim", 512, maximum=MAX_WIDTH)
    kv_heads = shape.kv_heads
    if config.flag("attention_k_eq_v", False):
        kv_heads = config.integer("num_global_key_value_heads", kv_heads, maximum=MAX_WIDTH)
    if shape.heads % kv_heads:
        raise config.error("num_global_key_value_heads", f"a divisor of the {shape.heads} attention heads")
    return replace(shape, head_dim=head_dim, kv_heads=kv_heads)


def _with_experts(config: JsonObject, layer: LayerSpec, hidden: int) -> LayerSpec:
    """The dense MLP serves every token beside its experts; three more norms, and scales of the router."""
    experts = read_experts(config, "num_experts", per_token_key="top_k_experts")
    scales = hidden + experts.count
    experts = replace(experts, router="router.proj", place="experts.0.", other_parameters=3 * hidden + scales)
    sparse = experts.sparse(layer, hidden)
    shared = tuple(replace(gemm, name=f"mlp.{gemm.name}") for gemm in layer.mlp)
    return replace(sparse, shared_mlp=shared, norms_after_mixer=layer.norms_after_mixer + 3)


READERS: dict[str, Reader] = {"gemma4_text": gemma4_text}
