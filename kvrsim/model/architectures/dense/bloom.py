"""BLOOM: ALiBi, one fused matrix for Q, K, V, biases everywhere, a LayerNorm after the embedding."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import Norms, Reader, assemble, plain_mlp, read_inner, read_shape
from kvrsim.model.spec import ModelSpec


def bloom(config: JsonObject, name: str) -> ModelSpec:
    shape, norms = read_shape(config, own_head_dim=False), Norms(count=2, has_bias=True)
    inner = read_inner(config, "n_inner", 4 * shape.hidden)
    mixer = shape.attention(shape.fused_qkv("query_key_value", bias=True), "dense", bias=True, rotary=False)
    layer = norms.layer(shape, mixer, plain_mlp("dense_h_to_4h", "dense_4h_to_h", shape.hidden, inner, bias=True))
    layers, of_embedding = [layer] * shape.layers, 2 * shape.hidden
    return assemble(
        config, name, shape, layers, norms, inner=inner, tied=True, alibi=True, embedding_norm_parameters=of_embedding
    )


READERS: dict[str, Reader] = {"bloom": bloom}
