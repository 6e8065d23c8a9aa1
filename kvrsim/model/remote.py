"""Model types whose code is not in transformers, after the types with the same layers that are.

kvrsim/data/remote_types.json translates the keys of most. DeciLM and Kimi K3 need more than other names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvrsim.io.schema import JsonObject, parse_json
from kvrsim.model.gemm import Gemm
from kvrsim.model.mixers import Attention, LatentAttention, Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec
from kvrsim.model.template import MAX_LAYERS, MAX_WIDTH

BLOCK_RESIDUALS = "attention over earlier blocks' residuals is counted by its parameters alone"
_TABLE = Path(__file__).parents[1] / "data" / "remote_types.json"
_NOT_SHAPES = ("quantization_config", "compression_config", "auto_map", "torch_dtype", "dtype", "architectures")


@cache
def _remote_types() -> dict[str, Any]:
    types: dict[str, Any] = parse_json(_TABLE.read_bytes())
    return types


def translated(config: JsonObject) -> JsonObject:
    """The configuration in the words of the type with the same layers, without what changes no shape."""
    remote = _remote_types().get(config.text("model_type"), {})
    for key, value in remote.get("only", {}).items():
        if config.has(key) and config.fields[key] != value:
            raise config.error(key, json.dumps(value))
    fields = dict(config.fields)
    for old, new in remote.get("names", {}).items():  # a dot leads into an object
        outer, _, inner = old.rpartition(".")
        source = config.fields.get(outer) if outer else config.fields
        if new is not None and isinstance(source, dict) and source.get(inner) is not None:
            fields[new] = source[inner]
        fields.pop(outer or old, None)
    for old, (new, off, on) in remote.get("flags", {}).items():  # an array of zeros and ones, an entry per layer
        outer, _, inner = old.rpartition(".")
        source = config.child(outer) if outer and config.has(outer) else config
        if source.has(inner) and (not outer or config.has(outer)):
            flags = source.sequence(inner)
            if any(flag not in (0, 1) for flag in flags):
                raise source.error(inner, "an array of zeros and ones, an entry per layer")
            used = source.flag("use_sparse_attention", True)
            fields.setdefault(new, [on if flag and used else off for flag in flags])
        fields.pop(outer or old, None)
    fields = {key: value for key, value in fields.items() if key not in _NOT_SHAPES and not key.startswith("_")}
    if "as" in remote:
        fields["model_type"] = remote["as"]
    return replace(config, fields={**remote.get("implies", {}), **fields})


def adapted(config: JsonObject, model: ModelSpec) -> ModelSpec:
    """The model with what its own type has and the type with the same layers has not."""
    fused = _remote_types().get(config.text("model_type"), {}).get("fused")
    if fused is not None:
        return _with_layers(model, lambda layer: _fused(layer, fused))
    return _kimi_k3(config, model) if config.has("routed_expert_hidden_size") else model


def _with_layers(model: ModelSpec, of: Callable[[LayerSpec], LayerSpec]) -> ModelSpec:
    kinds = {layer: of(layer) for layer in model.layer_kinds}
    return replace(model, layers=tuple(kinds[layer] for layer in model.layers))


def _fused(layer: LayerSpec, name: str) -> LayerSpec:
    """The layer with one matrix for Q, K and V."""
    assert isinstance(layer.mixer, Attention)
    first = layer.mixer.projections[0]
    width = sum(gemm.out_features for gemm in layer.mixer.projections)
    matrix = replace(first, name=name, out_features=width, split="qkv_heads")
    return replace(layer, mixer=replace(layer.mixer, projections=(matrix,)))


def _kimi_k3(config: JsonObject, model: ModelSpec) -> ModelSpec:
    """Kimi K3, a Kimi Linear: experts in a latent, full-rank and output gates, attention over blocks of residuals."""
    hidden, latent = model.hidden_size, config.integer("routed_expert_hidden_size", maximum=MAX_WIDTH)
    linear = config.child("linear_attn_config") if config.has("linear_attn_config") else config
    full_rank, output_gate = linear.flag("use_full_rank_gate", False), config.flag("mla_use_output_gate", False)
    norm = latent if config.flag("latent_moe_use_norm", False) else 0
    blocks = config.integer("attn_res_block_size", 0, minimum=0)
    residual = 2 * hidden if blocks else 0  # a norm and a vector that scores blocks

    def gate(width: int) -> Gemm:
        return Gemm(name="self_attn.g_proj", in_features=hidden, out_features=width, split="columns")

    def of(layer: LayerSpec) -> LayerSpec:
        mixer, others = layer.mixer, layer.other_parameters + 2 * residual
        if isinstance(mixer, Recurrence) and full_rank:
            low_rank = ("g_a_proj", "g_b_proj")
            kept = tuple(one for one in mixer.projections if not one.name.endswith(low_rank))
            mixer = replace(mixer, projections=(*kept, gate(mixer.num_value_heads * mixer.value_head_dim)))
        if isinstance(mixer, LatentAttention) and output_gate:
            width = mixer.num_attention_heads * mixer.v_head_dim
            mixer = replace(mixer, projections=(*mixer.projections, gate(width)), gate=True)
        if not layer.num_experts:
            return replace(layer, mixer=mixer, other_parameters=others)
        *up, down = layer.mlp
        return replace(
            layer,
            mixer=mixer,
            mlp=(*(replace(one, in_features=latent) for one in up), replace(down, out_features=latent)),
            shared_mlp=(
                Gemm(name="mlp.routed_expert_down_proj", in_features=hidden, out_features=latent),
                Gemm(name="mlp.routed_expert_up_proj", in_features=latent, out_features=hidden),
                *layer.shared_mlp,
            ),
            other_parameters=others + norm,
        )

    model = _with_layers(model, of)
    notes = (*model.approximations, *([BLOCK_RESIDUALS] if blocks else []))
    return replace(model, final_norm_parameters=model.final_norm_parameters + residual, approximations=notes)


def pruned_llama(config: JsonObject, name: str, read: Callable[[JsonObject, str], ModelSpec]) -> ModelSpec:
    """DeciLM of Llama-3.x-Nemotron: each layer is Llama's with its own widths, or lacks its attention or its MLP."""
    heads, hidden = (config.integer(key, maximum=MAX_WIDTH) for key in ("num_attention_heads", "hidden_size"))
    blocks = config.children("block_configs")
    if len(blocks) != config.integer("num_hidden_layers", maximum=MAX_LAYERS):
        raise config.error("block_configs", "an array with an entry per layer")
    layers, inners = [], []
    for block in blocks:
        attention, mlp = block.child("attention"), block.child("ffn")
        for part, key in ((one, key) for one in (attention, mlp) for key in ("sparsify", "num_sink_tokens")):
            if part.has(key):
                raise part.error(key, "null")
        group = attention.integer("n_heads_in_group", 1, maximum=heads)
        inner = (
            256 * -(-max(1, int(2 * mlp.number("ffn_mult", maximum=1000) * hidden / 3)) // 256)
            if mlp.has("ffn_mult")
            else mlp.integer("intermediate_size", hidden, maximum=MAX_WIDTH)
        )
        if heads % group:
            raise attention.error("n_heads_in_group", f"a divisor of the {heads} attention heads")
        own = {"num_hidden_layers": 1, "num_key_value_heads": heads // group, "intermediate_size": inner}
        fields = {key: value for key, value in config.fields.items() if key != "block_configs"}
        model = read(replace(config, fields={**fields, **own, "model_type": "llama"}), name)
        layer = model.layers[0]
        assert isinstance(layer.mixer, Attention)
        window = attention.integer("window_length") if attention.has("window_length") else None
        layer = replace(layer, mixer=replace(layer.mixer, sliding_window=window))
        for part in (attention, mlp):
            if part.flag("replace_with_linear", False):
                raise part.error("replace_with_linear", "false")
        if attention.flag("no_op", False):
            layer = replace(layer, mixer=None, norms_before_mixer=0, other_parameters=layer.other_parameters - hidden)
        if mlp.flag("no_op", False):
            others = layer.other_parameters - hidden
            layer = replace(layer, mlp=(), gated_mlp=False, norms_after_mixer=0, other_parameters=others)
        else:
            inners.append(inner)
        layers.append(layer)
    inner = max(inners, default=hidden)
    return replace(model, num_hidden_layers=len(layers), layers=tuple(layers), intermediate_size=inner)
