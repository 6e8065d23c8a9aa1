"""Llama 4: attention within chunks in three layers of four, a shared expert beside one routed expert a token."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.experts import read_experts
from kvrsim.model.architectures.parts import Norms, Reader, assemble, gated_mlp, read_inner, read_num_layers, read_shape
from kvrsim.model.architectures.windows import read_layer_types, read_window
from kvrsim.model.spec import ModelSpec

_PLACE = "feed_forward."
_FULL, _CHUNKED = "full_attention", "chunked_attention"


def llama4_text(config: JsonObject, name: str) -> ModelSpec:
    """Layers without positions see all tokens; experts are in every interleave_moe_layer_step-th layer."""
    shape, norms = read_shape(config, head_dim=128), Norms(count=2)
    inner, dense_inner = read_inner(config), read_inner(config, "intermediate_size_mlp", 16384)
    experts = read_experts(config, "num_local_experts", count=16, per_token=1, inner=inner)
    experts = replace(experts, shared_inner=inner, shared_gate=False, router=f"{_PLACE}router")
    experts = replace(experts, place=f"{_PLACE}experts.0.", shared_place=f"{_PLACE}shared_expert.")
    bias, qk_norm = config.flag("attention_bias", False), config.flag("use_qk_norm", True)
    chunk = read_window(config, 8192, "attention_chunk_size")
    mixer = shape.attention(shape.separate_qkv(bias), "o_proj", bias)
    dense_mlp = gated_mlp(shape.hidden, dense_inner, place=_PLACE)
    sparse, layers = set(_sparse_layers(config, shape.layers)), []
    for number, kind in enumerate(_kinds(config)):
        chunked = kind == _CHUNKED
        here = replace(mixer, attention_chunk=chunk if chunked else None, rotary=chunked, qk_norm=qk_norm and chunked)
        layer = norms.layer(shape, here, dense_mlp, gated=True)
        layers.append(experts.sparse(layer, shape.hidden) if number in sparse else layer)
    return assemble(config, name, shape, layers, norms, inner=inner)


def _kinds(config: JsonObject) -> list[str]:
    """Chunked where the layer rotates queries and keys: no_rope_layers holds a 1 there, and a 0 in the others."""
    period, rotary = config.integer("no_rope_layer_interval", 4), config.sequence("no_rope_layers")
    if rotary and (len(rotary) < read_num_layers(config) or any(flag not in (0, 1) for flag in rotary)):
        raise config.error("no_rope_layers", f"an array of {read_num_layers(config)} zeros and ones, one a layer")
    flags = rotary or [(layer + 1) % period != 0 for layer in range(read_num_layers(config))]
    return read_layer_types(config, (_FULL, _CHUNKED), lambda layer: _CHUNKED if flags[layer] else _FULL)


def _sparse_layers(config: JsonObject, layers: int) -> list[int]:
    """Those in moe_layers; without that key the last of every interleave_moe_layer_step."""
    if config.fields.get("moe_layers") is None:
        step = config.integer("interleave_moe_layer_step", 1)
        return list(range(step - 1, layers, step))
    named = config.sequence("moe_layers")
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in named):
        raise config.error("moe_layers", "an array of layer numbers")
    return [layer for layer in named if isinstance(layer, int)]


READERS: dict[str, Reader] = {"llama4_text": llama4_text}
