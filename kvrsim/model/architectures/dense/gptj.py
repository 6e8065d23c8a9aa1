"""GPT-J: attention and MLP side by side after one LayerNorm, no biases in attention, one on the head."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import Norms, Reader, assemble, plain_mlp, read_inner, read_shape
from kvrsim.model.spec import ModelSpec


def gptj(config: JsonObject, name: str) -> ModelSpec:
    shape, norms = read_shape(config, own_head_dim=False), Norms(count=1, has_bias=True)
    inner = read_inner(config, "n_inner", 4 * shape.hidden)
    mixer = shape.attention(shape.separate_qkv(bias=False), "out_proj")
    layer = norms.layer(shape, mixer, plain_mlp("fc_in", "fc_out", shape.hidden, inner, bias=True))
    layers = [layer] * shape.layers
    return assemble(config, name, shape, layers, norms, inner=inner, parallel=True, head_bias=True)


READERS: dict[str, Reader] = {"gptj": gptj}
