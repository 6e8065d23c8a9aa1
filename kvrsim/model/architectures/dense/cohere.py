"""Command R and Command A: attention and MLP side by side after one norm; the head is the embedding."""

from __future__ import annotations

from dataclasses import replace

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family, llama_like
from kvrsim.model.architectures.parts import Norms, Reader, read_num_layers
from kvrsim.model.architectures.windows import Windows, period_windows
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import ModelSpec


def cohere(config: JsonObject, name: str) -> ModelSpec:
    qk = config.flag("use_qk_norm", False)
    return _cohere(config, name, Norms(count=1, qk=qk, qk_of_heads=True), [None] * read_num_layers(config))


def cohere2(config: JsonObject, name: str) -> ModelSpec:
    """Three layers of four see a window only; the fourth has no positions."""
    period = config.integer("sliding_window_pattern", 4)
    windows = period_windows(config, 4096, period)
    model = _cohere(config, name, Norms(count=1), windows)
    layers = []
    for layer in model.layers:
        assert isinstance(layer.mixer, Attention)
        layers.append(replace(layer, mixer=replace(layer.mixer, rotary=layer.mixer.sliding_window is not None)))
    return replace(model, layers=tuple(layers))


def _cohere(config: JsonObject, name: str, norms: Norms, windows: Windows) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    family = Family(qkv_bias=bias, output_bias=bias, norms=norms, tied=True)
    return replace(llama_like(config, name, family, windows), parallel_attn=True)


READERS: dict[str, Reader] = {
    "cohere": cohere,
    "cohere2": cohere2,
}
