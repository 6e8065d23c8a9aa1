"""GPT-J: attention and MLP side by side after one LayerNorm, no biases in attention, one on the head."""

from __future__ import annotations

from kvrsim.io.json_text import JsonObject
from kvrsim.model.architectures.parts import Norms, assemble, gemm, plain_mlp, read_inner, read_shape
from kvrsim.model.spec import LayerSpec, ModelSpec


def gptj(config: JsonObject, name: str) -> ModelSpec:
    shape, norms = read_shape(config, own_head_dim=False), Norms(count=1, has_bias=True)
    inner = read_inner(config, "n_inner", 4 * shape.hidden)
    layer = LayerSpec(
        qkv=shape.separate_qkv(bias=False),
        output=gemm("out_proj", shape.hidden, shape.hidden),
        mlp=plain_mlp("fc_in", "fc_out", shape.hidden, inner, bias=True),
        norm_parameters=norms.parameters(shape),
    )
    layers = [layer] * shape.layers
    return assemble(config, name, shape, layers, norms, inner=inner, parallel=True, head_bias=True)
