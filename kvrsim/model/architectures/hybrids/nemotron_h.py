"""Nemotron-H: Mamba-2, attention, MLPs and mixtures of experts, each a layer of its own."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.experts import read_experts
from kvrsim.model.architectures.parts import (
    MAX_LAYERS,
    MAX_WIDTH,
    Norms,
    Reader,
    assemble,
    gemm,
    plain_mlp,
    read_inner,
    read_shape,
)
from kvrsim.model.architectures.routed import latent_projections
from kvrsim.model.mixers import Recurrence
from kvrsim.model.spec import LayerSpec, ModelSpec

_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_NEWER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def nemotron_h(config: JsonObject, name: str) -> ModelSpec:
    kinds = _kinds(config)
    config = replace(config, fields={**config.fields, "num_hidden_layers": len(kinds)})
    shape, bias = read_shape(config), config.flag("mlp_bias", False)
    readers = {
        "mamba": lambda: _mamba(config, shape.hidden),
        "attention": lambda: LayerSpec(
            mixer=shape.attention(shape.separate_qkv(False, "mixer."), "mixer.o_proj", rotary=False), mlp=()
        ),
        "mlp": lambda: LayerSpec(
            mixer=None, mlp=plain_mlp("mixer.up_proj", "mixer.down_proj", shape.hidden, read_inner(config), bias)
        ),
        "moe": lambda: _experts(config, shape.hidden, bias),
    }
    layer_of = {kind: _with_norm(readers[kind](), shape.hidden) for kind in dict.fromkeys(kinds)}
    layers = [layer_of[kind] for kind in kinds]
    return assemble(config, name, shape, layers, Norms(count=1), inner=read_inner(config))


def _kinds(config: JsonObject) -> list[str]:
    """For each layer what it is: by layers_block_type, else by the letters of hybrid_override_pattern."""
    key = config.first_of("layers_block_type", "layer_types", "hybrid_override_pattern")
    if not config.has(key) or key != "hybrid_override_pattern":
        found = [_NEWER_NAMES.get(str(kind), str(kind)) for kind in config.sequence(key)]
        accepted = f"an array of {', '.join(_LETTERS.values())}, or hybrid_override_pattern"
    else:
        found = [_LETTERS.get(letter, letter) for letter in config.text(key)]
        accepted = f"letters {' '.join(_LETTERS)}, one a layer"
    if not 0 < len(found) <= MAX_LAYERS or set(found) - set(_LETTERS.values()):
        raise config.error(key, accepted)
    if config.integer("num_hidden_layers", len(found), maximum=MAX_LAYERS) != len(found):
        raise config.error("num_hidden_layers", f"{len(found)}, the number of layers in {key}")
    return found


def _with_norm(layer: LayerSpec, hidden: int) -> LayerSpec:
    """One norm a layer."""
    before = int(layer.mixer is not None)
    others = layer.other_parameters + hidden
    return replace(layer, norms_before_mixer=before, norms_after_mixer=1 - before, other_parameters=others)


def _mamba(config: JsonObject, hidden: int) -> LayerSpec:
    keys = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    heads, head_dim, groups, state, kernel = (config.integer(key, maximum=MAX_WIDTH) for key in keys)
    if heads % groups:
        raise config.error("n_groups", f"a divisor of the {heads} Mamba heads")
    inner, bias = heads * head_dim, config.flag("use_bias", False)
    channels = inner + 2 * groups * state
    mixer = Recurrence(
        kind="mamba2",
        projections=(gemm("mixer.in_proj", hidden, inner + channels + heads, bias, "columns"),),
        output=(gemm("mixer.out_proj", inner, hidden, bias, "rows"),),
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=state,
        value_head_dim=head_dim,
        conv_channels=channels,
        conv_kernel=kernel,
    )
    convolution = channels * (kernel + config.flag("use_conv_bias", True))
    return LayerSpec(mixer=mixer, mlp=(), other_parameters=convolution + 3 * heads + inner)  # D, A, time steps; a norm


def _experts(config: JsonObject, hidden: int, bias: bool) -> LayerSpec:
    """Experts without a gate, in a latent of moe_latent_size where there is one; a shared expert beside it."""
    experts = read_experts(config, "n_routed_experts")
    shared_inner = read_inner(config, "moe_shared_expert_intermediate_size")
    shared = plain_mlp("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj", hidden, shared_inner, bias)
    width = read_inner(config, "moe_latent_size", hidden)
    if config.has("moe_latent_size"):
        projections = latent_projections(hidden, width, ("fc1_latent_proj", "fc2_latent_proj"), "mixer.")
        shared = (*(replace(matrix, bias=bias) for matrix in projections), *shared)
    return LayerSpec(
        mixer=None,
        mlp=plain_mlp("mixer.experts.0.up_proj", "mixer.experts.0.down_proj", width, experts.inner, bias=False),
        num_experts=experts.count,
        num_experts_per_tok=experts.per_token,
        router=gemm("mixer.gate", hidden, experts.count),
        shared_mlp=shared,
    )


READERS: dict[str, Reader] = {"nemotron_h": nemotron_h}
