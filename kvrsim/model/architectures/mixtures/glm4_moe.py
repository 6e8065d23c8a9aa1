"""GLM 4.5 to 4.7: a shared expert beside the routed ones, the first layers dense."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family
from kvrsim.model.architectures.experts import mixture, read_experts
from kvrsim.model.architectures.parts import Norms, Reader, read_num_layers
from kvrsim.model.spec import ModelSpec


def glm4_moe(config: JsonObject, name: str) -> ModelSpec:
    """n_shared_experts experts in one are the shared expert."""
    layers, dense = read_num_layers(config), config.integer("first_k_dense_replace", 1, minimum=0)
    experts = read_experts(config, "n_routed_experts", count=128, per_token=8)
    shared = config.integer("n_shared_experts", 1, minimum=0, maximum=1000)
    experts = replace(
        experts,
        router="mlp.gate",
        place="mlp.experts.0.",
        shared_inner=shared * experts.inner or None,
        shared_gate=False,
        shared_place="mlp.shared_experts.",
    )
    norms = Norms(count=2, qk=config.flag("use_qk_norm", False))
    family = Family(qkv_bias=config.flag("attention_bias", False), norms=norms)
    return mixture(config, name, family, experts, [None] * layers, [layer >= dense for layer in range(layers)])


READERS: dict[str, Reader] = {"glm4_moe": glm4_moe}
