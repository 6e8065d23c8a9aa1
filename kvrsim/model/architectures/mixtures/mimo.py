"""MiMo V2 Flash: values narrower than keys, twice the KV heads and a sink for each head in layers with a window."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.errors import InputError
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
from kvrsim.model.spec import ModelSpec


def mimo_v2_flash(config: JsonObject, name: str) -> ModelSpec:
    """The pattern of layers is in hybrid_layer_pattern (1: a window) or layer_types, experts in moe_layer_freq."""
    layers, norms, inner = read_num_layers(config), Norms(count=2), read_inner(config)
    full = read_shape(config, head_dim=192)
    full = replace(full, v_head_dim=config.integer("v_head_dim", 128, maximum=MAX_WIDTH))
    near = _windowed(config, full)
    pattern = _flags(config, "hybrid_layer_pattern", [layer > 0 and (layer + 1) % 6 != 0 for layer in range(layers)])
    sliding = read_sliding(config, lambda layer: pattern[layer])
    sparse = _flags(config, "moe_layer_freq", [layer > 0 for layer in range(layers)])
    experts = read_experts(config, "n_routed_experts", count=256, per_token=8)
    if config.integer("n_shared_experts", 0, minimum=0):
        raise config.error("n_shared_experts", "0 or null: no shared expert")
    experts = replace(experts, router="mlp.gate", place="mlp.experts.0.")
    mlp, sinks = gated_mlp(full.hidden, inner), {here: _sinks(config, here) for here in (False, True)}
    specs = []
    for windowed, routed in zip(sliding, sparse, strict=True):
        shape = near if windowed else full
        mixer = replace(_attention(config, shape), sliding_window=_window(config) if windowed else None)
        layer = norms.layer(shape, mixer, mlp, gated=True)
        layer = replace(layer, other_parameters=layer.other_parameters + sinks[windowed] * shape.heads)
        specs.append(experts.sparse(layer, shape.hidden) if routed else layer)
    return assemble(config, name, full, specs, norms, inner=inner)


def _attention(config: JsonObject, shape: Shape) -> Attention:
    """The output projection has no bias."""
    bias = config.flag("attention_bias", False)
    return shape.attention(shape.separate_qkv(bias), "o_proj")


def _windowed(config: JsonObject, full: Shape) -> Shape:
    """The widths in layers with a window; twice the KV heads unless the file says otherwise."""
    heads = config.integer("swa_num_attention_heads", full.heads, maximum=MAX_WIDTH)
    kv_heads = config.integer("swa_num_key_value_heads", 2 * full.kv_heads, maximum=MAX_WIDTH)
    if heads % kv_heads:
        raise config.error("swa_num_key_value_heads", f"a divisor of the {heads} attention heads")
    head_dim = config.integer("swa_head_dim", full.head_dim, maximum=MAX_WIDTH)
    v_head_dim = config.integer("swa_v_head_dim", full.value_dim, maximum=MAX_WIDTH)
    return replace(full, heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)


def _window(config: JsonObject) -> int:
    """sliding_window_size counts the tokens before the query, sliding_window the query, too."""
    if config.has("sliding_window_size"):
        return config.integer("sliding_window_size") + 1
    return config.integer("sliding_window", 129)


def _sinks(config: JsonObject, windowed: bool) -> bool:
    """Whether each query head has a sink."""
    key = "add_swa_attention_sink_bias" if windowed else "add_full_attention_sink_bias"
    return config.flag(key, windowed)


def _flags(config: JsonObject, key: str, default: list[bool]) -> list[bool]:
    """Zeros and ones, one a layer."""
    flags = config.sequence(key)
    for number, flag in enumerate(flags):
        if flag not in (0, 1):
            raise InputError(f"{config.where}: {config.key_path}{key}[{number}]", flag, "0 or 1")
    if flags and len(flags) != len(default):
        raise config.error(key, f"an array of {len(default)}, one a layer")
    return [flag == 1 for flag in flags] or default


READERS: dict[str, Reader] = {"mimo_v2_flash": mimo_v2_flash}
