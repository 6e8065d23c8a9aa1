"""GPT-NeoX: one fused matrix for Q, K, V, a plain MLP, two LayerNorms."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import Norms, Reader, assemble, plain_mlp, read_inner, read_shape
from kvrsim.model.spec import ModelSpec


def gpt_neox(config: JsonObject, name: str) -> ModelSpec:
    shape, norms = read_shape(config, own_head_dim=False), Norms(count=2, has_bias=True)
    inner, bias = read_inner(config), config.flag("attention_bias", True)
    mixer = shape.attention(shape.fused_qkv("query_key_value", bias), "dense", bias)
    layer = norms.layer(shape, mixer, plain_mlp("dense_h_to_4h", "dense_4h_to_h", shape.hidden, inner, bias=True))
    parallel = config.flag("use_parallel_residual", True)
    return assemble(config, name, shape, [layer] * shape.layers, norms, inner=inner, parallel=parallel)


READERS: dict[str, Reader] = {"gpt_neox": gpt_neox}
