"""DeepSeek-V2, DeepSeek-V3 and Kimi K2: latent attention, experts after the first dense layers."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.defaults import filled
from kvrsim.model.architectures.latent.parts import read_latent_shape
from kvrsim.model.architectures.parts import Norms, Reader, assemble, read_inner
from kvrsim.model.architectures.routed import deepseek_mlps
from kvrsim.model.spec import ModelSpec


def kimi_k2(config: JsonObject, name: str) -> ModelSpec:
    """DeepSeek-V3 by another name."""
    return deepseek(filled(config, "deepseek_v3"), name)


def deepseek(config: JsonObject, name: str) -> ModelSpec:
    shape = read_latent_shape(config)
    mixer, norms = shape.attention(), shape.norm_parameters
    layers = [
        replace(layer, mixer=mixer, other_parameters=layer.other_parameters + norms)
        for layer in deepseek_mlps(config, shape.hidden, shape.layers)
    ]
    return assemble(config, name, shape.plain, layers, Norms(count=2), inner=read_inner(config))


READERS: dict[str, Reader] = {"deepseek_v2": deepseek, "deepseek_v3": deepseek, "kimi_k2": kimi_k2}
