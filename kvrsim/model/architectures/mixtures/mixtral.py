"""Mixtral: Llama with experts in all layers."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family
from kvrsim.model.architectures.experts import mixture, read_experts
from kvrsim.model.architectures.parts import Reader, read_inner, read_num_layers
from kvrsim.model.architectures.windows import same_window
from kvrsim.model.spec import ModelSpec


def mixtral(config: JsonObject, name: str) -> ModelSpec:
    """Every layer is sparse, and an expert is as wide as intermediate_size says."""
    experts = read_experts(config, "num_local_experts", count=8, per_token=2, inner=read_inner(config))
    sparse = [True] * read_num_layers(config)
    return mixture(config, name, Family(), experts, same_window(config), sparse)


READERS: dict[str, Reader] = {"mixtral": mixtral}
