"""Qwen3-Next and Qwen 3.5: gated delta nets, and gated full attention in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.experts import read_experts
from kvrsim.model.architectures.mixtures.qwen import read_sparse_layers
from kvrsim.model.architectures.parts import MAX_WIDTH, Norms, Reader, Shape, assemble, gemm, read_inner, read_shape
from kvrsim.model.architectures.routed import beside_shared, dense_mlp, read_kinds
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Attention, Mixer, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec


def qwen3_next(config: JsonObject, name: str) -> ModelSpec:
    """Queries, keys, values and gates of a delta net from one matrix, decays and strengths from another."""
    return _hybrid(config, name, _mlps(config, read_sparse_layers(config)), fused=True)


def qwen3_5(config: JsonObject, name: str) -> ModelSpec:
    shape = read_shape(config)
    return _hybrid(config, name, [dense_mlp(shape.hidden, read_inner(config))] * shape.layers, fused=False)


def qwen3_5_moe(config: JsonObject, name: str) -> ModelSpec:
    return _hybrid(config, name, _mlps(config, [True] * read_shape(config).layers), fused=False)


def _mlps(config: JsonObject, sparse: list[bool]) -> list[LayerSpec]:
    """A shared expert with a gate of its own beside the routed ones."""
    hidden = read_shape(config).hidden
    shared = read_inner(config, "shared_expert_intermediate_size")
    experts = beside_shared(read_experts(config, "num_experts"), shared)
    experts = replace(experts, shared_gate=True, shared_place="mlp.shared_expert.")
    dense = dense_mlp(hidden, read_inner(config, config.first_of("intermediate_size", "moe_intermediate_size")))
    return [experts.sparse(dense, hidden) if here else dense for here in sparse]


def _hybrid(config: JsonObject, name: str, mlps: list[LayerSpec], *, fused: bool) -> ModelSpec:
    shape = read_shape(config)
    kinds: dict[bool, tuple[Mixer, int]] = {
        True: (_attention(config, shape), 2 * shape.head_dim),
        False: _delta_net(config, shape.hidden, fused),
    }
    layers = []
    for layer, full in zip(mlps, _full_attention(config, shape.layers), strict=True):
        mixer, others = kinds[full]
        layers.append(replace(layer, mixer=mixer, other_parameters=layer.other_parameters + others))
    inner = read_inner(config, config.first_of("intermediate_size", "moe_intermediate_size"))
    return assemble(config, name, shape, layers, Norms(count=2), inner=inner)


def _full_attention(config: JsonObject, num_layers: int) -> list[bool]:
    """For each layer whether it is full attention: by layer_types, else the last of every full_attention_interval."""
    full = read_kinds(config, "layer_types", num_layers, {"full_attention": True, "linear_attention": False})
    interval = config.integer("full_attention_interval", 4)
    return full or [(layer + 1) % interval == 0 for layer in range(num_layers)]


def _attention(config: JsonObject, shape: Shape) -> Attention:
    """Queries come with a gate for the output, in one matrix."""
    if not config.flag("attn_output_gate", True):
        raise config.error("attn_output_gate", "true")
    bias = config.flag("attention_bias", False)
    queries, keys, values = shape.separate_qkv(bias)
    gated = replace(queries, out_features=2 * queries.out_features)
    return replace(shape.attention((gated, keys, values), "o_proj", bias, qk_norm=True), gate=True)


def _delta_net(config: JsonObject, hidden: int, fused: bool) -> tuple[Recurrence, int]:
    """The mixer, and what it has besides matrices: convolution, decays, time steps, a norm over a value head."""

    def read(key: str) -> int:
        return config.integer(key, maximum=MAX_WIDTH)

    key_heads, value_heads = read("linear_num_key_heads"), read("linear_num_value_heads")
    if value_heads % key_heads:
        raise config.error("linear_num_key_heads", f"a divisor of the {value_heads} value heads")
    keys, values = key_heads * read("linear_key_head_dim"), value_heads * read("linear_value_head_dim")
    channels, kernel = 2 * keys + values, read("linear_conv_kernel_dim")
    widths = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": value_heads, "in_proj_a": value_heads}
    if fused:
        widths = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * value_heads}
    projections: list[Gemm] = [
        gemm(f"linear_attn.{name}", hidden, width, split="columns") for name, width in widths.items()
    ]
    mixer = Recurrence(
        kind="gated_delta",
        projections=tuple(projections),
        output=(gemm("linear_attn.out_proj", values, hidden, split="rows"),),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=read("linear_key_head_dim"),
        value_head_dim=read("linear_value_head_dim"),
        conv_channels=channels,
        conv_kernel=kernel,
    )
    return mixer, channels * kernel + 2 * value_heads + mixer.value_head_dim


READERS: dict[str, Reader] = {
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
}
