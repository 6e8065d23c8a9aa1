"""OPT: learned positions, LayerNorms and biases, a plain MLP."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import Norms, Reader, assemble, plain_mlp, read_inner, read_shape
from kvrsim.model.spec import ModelSpec

_OFFSET = 2  # rows of the position embedding before that of the first token


def opt(config: JsonObject, name: str) -> ModelSpec:
    """All but OPT 350M, whose embedding is narrower than its layers and which has its norms after them."""
    shape, norms = read_shape(config, own_head_dim=False), Norms(count=2, has_bias=True)
    if config.integer("word_embed_proj_dim", shape.hidden) != shape.hidden:
        raise config.error("word_embed_proj_dim", f"hidden_size, {shape.hidden}")
    if not config.flag("do_layer_norm_before", True):
        raise config.error("do_layer_norm_before", "true")
    inner, bias = read_inner(config, "ffn_dim"), config.flag("enable_bias", True)
    mixer = shape.attention(shape.separate_qkv(bias), "out_proj", bias, rotary=False)
    layer = norms.layer(shape, mixer, plain_mlp("fc1", "fc2", shape.hidden, inner, bias))
    positions = config.integer("max_position_embeddings", 2048) + _OFFSET
    layers = [layer] * shape.layers
    return assemble(config, name, shape, layers, norms, inner=inner, tied=True, learned_positions=positions)


READERS: dict[str, Reader] = {"opt": opt}
