"""GPT-OSS: experts in all layers, attention sinks, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family
from kvrsim.model.architectures.experts import mixture, read_experts
from kvrsim.model.architectures.parts import Reader, read_inner, read_num_layers
from kvrsim.model.architectures.windows import gpt_oss_windows
from kvrsim.model.spec import ModelSpec


def gpt_oss(config: JsonObject, name: str) -> ModelSpec:
    """Biases everywhere, a learned sink for each query head, and a window in every other layer."""
    bias = config.flag("attention_bias", True)
    experts = read_experts(config, "num_local_experts", count=128, per_token=4, inner=read_inner(config))
    experts = replace(experts, bias=True, router="router")
    family = Family(qkv_bias=bias, output_bias=bias, head_dim=64)
    model = mixture(config, name, family, experts, gpt_oss_windows(config), [True] * read_num_layers(config))
    sinks = model.num_attention_heads
    with_sinks = {kind: replace(kind, other_parameters=kind.other_parameters + sinks) for kind in model.layer_kinds}
    return replace(model, layers=tuple(with_sinks[layer] for layer in model.layers))


READERS: dict[str, Reader] = {"gpt_oss": gpt_oss}
