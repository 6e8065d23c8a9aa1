"""Step 3.7 Flash: a gate on each head's output, more query heads in layers with a window, a shared expert."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.experts import read_experts
from kvrsim.model.architectures.parts import (
    MAX_WIDTH,
    Norms,
    Reader,
    Shape,
    assemble,
    gated_mlp,
    gemm,
    read_inner,
    read_num_layers,
    read_shape,
)
from kvrsim.model.architectures.windows import read_sliding, read_window
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import ModelSpec


def step3p7(config: JsonObject, name: str) -> ModelSpec:
    """The dense layers are the first first_k_dense_replace, or all that moe_layers_enum does not name."""
    full, norms, inner = read_shape(config, head_dim=128), Norms(count=2, qk=True), read_inner(config)
    near = replace(full, heads=_sliding_heads(config, full))
    window, sparse = read_window(config), _sparse_layers(config)
    key = config.first_of("n_routed_experts", "num_experts", "moe_num_experts")
    experts = read_experts(config, key, count=288, per_token=8, per_token_key="num_experts_per_tok")
    experts = replace(
        experts,
        router="mlp.gate",
        place="mlp.experts.0.",
        shared_inner=read_inner(config, "share_expert_dim", 1280),
        shared_gate=False,
        shared_place="mlp.shared_experts.",
    )
    mlp = gated_mlp(full.hidden, inner, config.flag("mlp_bias", False))
    layers = []
    for number, windowed in enumerate(read_sliding(config, lambda _layer: False)):
        shape = near if windowed else full
        mixer = replace(_attention(config, shape), sliding_window=window if windowed else None)
        layer = norms.layer(shape, mixer, mlp, gated=True)
        layers.append(experts.sparse(layer, shape.hidden) if number in sparse else layer)
    return assemble(config, name, full, layers, Norms(count=2), inner=inner)


def _attention(config: JsonObject, shape: Shape) -> Attention:
    """A sigmoid of one feature a head scales its output."""
    bias = config.flag("attention_bias", False)
    gate = gemm("g_proj", shape.hidden, shape.heads, split="columns")
    mixer = shape.attention((*shape.separate_qkv(bias), gate), "o_proj", bias, qk_norm=True)
    return replace(mixer, gate=True)


def _sliding_heads(config: JsonObject, full: Shape) -> int:
    """Query heads of the layers with a window."""
    other, key = config, "num_sliding_attention_heads"
    if not config.has(key) and config.has("attention_other_setting"):
        other, key = config.child("attention_other_setting"), "num_attention_heads"
    heads = other.integer(key, full.heads, maximum=MAX_WIDTH)
    if heads % full.kv_heads:
        raise other.error(key, f"a multiple of the {full.kv_heads} KV heads")
    return heads


def _sparse_layers(config: JsonObject) -> set[int]:
    """Layers with experts: those in moe_layers_enum, an array or a text of numbers between commas."""
    named = config.fields.get("moe_layers_enum")
    if named is None:
        return set(range(config.integer("first_k_dense_replace", 3, minimum=0), read_num_layers(config)))
    parts = named.split(",") if isinstance(named, str) else named if isinstance(named, list) else [None]
    texts = [str(part).strip() for part in parts]
    if not all(text.isdecimal() and len(text) < 10 for text in texts):
        raise config.error("moe_layers_enum", "numbers of layers")
    return {int(text) for text in texts}


READERS: dict[str, Reader] = {
    "step3p7": step3p7,
    "step3p7_text": step3p7,
}
