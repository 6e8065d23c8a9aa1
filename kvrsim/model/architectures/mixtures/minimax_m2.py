"""MiniMax M2: full attention, norms over all heads' queries and keys, experts in all layers."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family
from kvrsim.model.architectures.experts import mixture, read_experts
from kvrsim.model.architectures.parts import Norms, Reader, read_inner, read_num_layers
from kvrsim.model.spec import ModelSpec

_PLACE = "block_sparse_moe."


def minimax_m2(config: JsonObject, name: str) -> ModelSpec:
    """An expert is as wide as intermediate_size says."""
    layers = read_num_layers(config)
    kinds = config.sequence("attn_type_list")
    if any(kind != 1 for kind in kinds):
        raise config.error("attn_type_list", "ones: full attention in all layers")
    if config.integer("shared_intermediate_size", 0, minimum=0):
        raise config.error("shared_intermediate_size", "0: no shared expert")
    experts = read_experts(config, "num_local_experts", count=256, per_token=8, inner=read_inner(config))
    experts = replace(experts, router=f"{_PLACE}gate", place=f"{_PLACE}experts.0.")
    norms = Norms(count=2, qk=config.flag("use_qk_norm", True), qk_of_heads=True)
    return mixture(config, name, Family(head_dim=128, norms=norms), experts, [None] * layers, [True] * layers)


READERS: dict[str, Reader] = {"minimax_m2": minimax_m2}
