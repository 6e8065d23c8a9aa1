"""Qwen 2 and 3 with experts."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family
from kvrsim.model.architectures.experts import mixture, read_experts
from kvrsim.model.architectures.parts import Norms, Reader, read_inner, read_num_layers
from kvrsim.model.architectures.windows import qwen_windows
from kvrsim.model.spec import ModelSpec


def read_sparse_layers(config: JsonObject) -> list[bool]:
    """For each layer whether it has experts: every decoder_sparse_step-th, not those in mlp_only_layers."""
    step, dense = config.integer("decoder_sparse_step", 1), config.sequence("mlp_only_layers")
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in dense):
        raise config.error("mlp_only_layers", "an array of layer numbers")
    skipped = set(dense)
    return [(layer + 1) % step == 0 and layer not in skipped for layer in range(read_num_layers(config))]


def qwen2_moe(config: JsonObject, name: str) -> ModelSpec:
    """A shared expert with its own gate; alternate layers below max_window_layers may slide."""
    experts = read_experts(config, "num_experts", count=60, per_token=4)
    experts = replace(experts, shared_inner=read_inner(config, "shared_expert_intermediate_size"))
    windows = qwen_windows(config, lambda layer, boundary: layer % 2 == 0 and layer < boundary)
    family = Family(qkv_bias=config.flag("qkv_bias", True))
    return mixture(config, name, family, experts, windows, read_sparse_layers(config))


def qwen3_moe(config: JsonObject, name: str) -> ModelSpec:
    """Norms on queries and keys, no shared expert; with use_sliding_window all layers slide."""
    bias = config.flag("attention_bias", False)
    experts = read_experts(config, "num_experts", count=128, per_token=8)
    family = Family(qkv_bias=bias, output_bias=bias, norms=Norms(count=2, qk=True))
    windows = qwen_windows(config, lambda _layer, _boundary: True)
    return mixture(config, name, family, experts, windows, read_sparse_layers(config))


READERS: dict[str, Reader] = {
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_moe_text": qwen3_moe,
}
