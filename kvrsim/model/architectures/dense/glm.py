"""GLM 4 dense models: biases on Q, K, V, the MLP's gate and up projection in one matrix; of 2025 with four norms."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family, llama_like
from kvrsim.model.architectures.parts import Norms, Reader, read_num_layers
from kvrsim.model.spec import ModelSpec


def glm(config: JsonObject, name: str) -> ModelSpec:
    return _glm(config, name, Norms(count=2))


def glm4(config: JsonObject, name: str) -> ModelSpec:
    return _glm(config, name, Norms(count=4))


def _glm(config: JsonObject, name: str, norms: Norms) -> ModelSpec:
    family = Family(qkv_bias=config.flag("attention_bias", True), head_dim=128, norms=norms, fused_mlp=True)
    return llama_like(config, name, family, [None] * read_num_layers(config))


READERS: dict[str, Reader] = {
    "glm": glm,
    "glm4": glm4,
}
