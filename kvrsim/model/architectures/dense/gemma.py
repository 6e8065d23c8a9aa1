"""Gemma 1 to 3: wide heads, norms before and after each block, windows in most layers."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family, llama_like
from kvrsim.model.architectures.parts import Norms, Reader, read_shape
from kvrsim.model.architectures.windows import period_windows
from kvrsim.model.spec import ModelSpec


def gemma(config: JsonObject, name: str) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    family = Family(qkv_bias=bias, output_bias=bias, head_dim=256, tied=True)
    return llama_like(config, name, family, [None] * read_shape(config, head_dim=256).layers)


def gemma2(config: JsonObject, name: str) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    family = Family(qkv_bias=bias, output_bias=bias, head_dim=256, norms=Norms(count=4), tied=True)
    return llama_like(config, name, family, period_windows(config, 4096, 2))


def gemma3_text(config: JsonObject, name: str) -> ModelSpec:
    bias, norms = config.flag("attention_bias", False), Norms(count=4, qk=True)
    family = Family(qkv_bias=bias, output_bias=bias, head_dim=256, norms=norms, tied=True)
    period = config.integer("sliding_window_pattern", 6)
    return llama_like(config, name, family, period_windows(config, 4096, period))


READERS: dict[str, Reader] = {
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
}
