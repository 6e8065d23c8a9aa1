"""Phi 1, 1.5 and 2: one LayerNorm for attention and MLP side by side, biases up to the head."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import Norms, Reader, assemble, plain_mlp, read_inner, read_shape
from kvrsim.model.spec import ModelSpec


def phi(config: JsonObject, name: str) -> ModelSpec:
    shape, inner = read_shape(config, own_head_dim=False), read_inner(config)
    norms = Norms(count=1, has_bias=True, qk=config.flag("qk_layernorm", False))
    mixer = shape.attention(shape.separate_qkv(bias=True), "dense", bias=True, qk_norm=norms.qk)
    layer = norms.layer(shape, mixer, plain_mlp("fc1", "fc2", shape.hidden, inner, bias=True))
    layers = [layer] * shape.layers
    return assemble(config, name, shape, layers, norms, inner=inner, parallel=True, head_bias=True)


READERS: dict[str, Reader] = {"phi": phi}
