"""Models that NVIDIA's Puzzle search took out of Llama: each layer has an attention and an MLP of its own, or none."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.parts import MAX_WIDTH, Norms, Reader, Shape, assemble, gated_mlp, read_num_layers
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import LayerSpec, ModelSpec

_MULTIPLE = 256  # an MLP's width is rounded up to such (ffn_mult_to_intermediate_size of modeling_decilm.py)


def nemotron_nas(config: JsonObject, name: str) -> ModelSpec:
    """DeciLM of Llama-3.x-Nemotron: block_configs says what each layer has."""
    hidden = config.integer("hidden_size", maximum=MAX_WIDTH)
    heads = config.integer("num_attention_heads", maximum=MAX_WIDTH)
    if hidden % heads:
        raise config.error("num_attention_heads", f"a divisor of the hidden size {hidden}")
    count, blocks = read_num_layers(config), config.children("block_configs")
    if len(blocks) != count:
        raise config.error("block_configs", f"an array of {count}, one a layer")
    shape = Shape(layers=count, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads)
    layers = [_layer(config, block, shape) for block in blocks]
    inner = max((layer.mlp[0].out_features for layer in layers if layer.mlp), default=hidden)
    return assemble(config, name, shape, layers, Norms(count=2), inner=inner)


def _layer(config: JsonObject, block: JsonObject, shape: Shape) -> LayerSpec:
    mixer = _attention(config, block.child("attention"), shape)
    mlp = _mlp(config, block.child("ffn"), shape.hidden)
    before, after = int(mixer is not None), int(bool(mlp))
    return LayerSpec(
        mixer=mixer,
        mlp=mlp,
        gated_mlp=bool(mlp),
        norms_before_mixer=before,
        norms_after_mixer=after,
        other_parameters=(before + after) * shape.hidden,
    )


def _attention(config: JsonObject, part: JsonObject, shape: Shape) -> Attention | None:
    """None: the layer has none."""
    if part.flag("no_op", False):
        return None
    _plain(part, "sparsify", "num_sink_tokens")
    group = part.integer("n_heads_in_group")
    if shape.heads % group:
        raise part.error("n_heads_in_group", f"a divisor of the {shape.heads} attention heads")
    bias = config.flag("attention_bias", False)
    shape = replace(shape, kv_heads=shape.heads // group)
    window = part.integer("window_length") if part.has("window_length") else None
    return replace(shape.attention(shape.separate_qkv(bias), "o_proj", bias), sliding_window=window)


def _mlp(config: JsonObject, part: JsonObject, hidden: int) -> tuple[Gemm, ...]:
    """(): the layer has none."""
    if part.flag("no_op", False):
        return ()
    _plain(part, "sparsify")
    if part.has("intermediate_size"):
        inner = part.integer("intermediate_size", maximum=MAX_WIDTH)
    else:
        inner = -(-max(1, int(2 * part.number("ffn_mult", maximum=1000) * hidden / 3)) // _MULTIPLE) * _MULTIPLE
    return gated_mlp(hidden, inner, config.flag("mlp_bias", False))


def _plain(part: JsonObject, *absent: str) -> None:
    """Refuse what kvrsim has no time of."""
    if part.flag("replace_with_linear", False):
        raise part.error("replace_with_linear", "false")
    for key in absent:
        if part.has(key):
            raise part.error(key, "null")


READERS: dict[str, Reader] = {"nemotron-nas": nemotron_nas}
