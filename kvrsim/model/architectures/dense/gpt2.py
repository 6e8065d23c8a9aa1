"""GPT-2: learned positions, one fused matrix for Q, K, V, biases everywhere; the head is the embedding."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import Norms, Reader, assemble, plain_mlp, read_inner, read_shape
from kvrsim.model.spec import ModelSpec


def gpt2(config: JsonObject, name: str) -> ModelSpec:
    if config.flag("add_cross_attention", False):
        raise config.error("add_cross_attention", "false: a decoder-only model")
    shape, norms = read_shape(config, own_head_dim=False), Norms(count=2, has_bias=True)
    inner = read_inner(config, "n_inner", 4 * shape.hidden)
    mixer = shape.attention(shape.fused_qkv("c_attn", bias=True), "c_proj", bias=True, rotary=False)
    layer = norms.layer(shape, mixer, plain_mlp("c_fc", "c_proj", shape.hidden, inner, bias=True))
    positions = config.integer(config.first_of("n_positions", "max_position_embeddings"), 1024)
    layers = [layer] * shape.layers
    return assemble(config, name, shape, layers, norms, inner=inner, tied=True, learned_positions=positions)


READERS: dict[str, Reader] = {"gpt2": gpt2}
