"""InternLM: Llama with one key for all of its attention's biases; InternLM 2 has Q, K, V in one matrix."""

from __future__ import annotations

from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures.dense.llama import Family, llama_like
from kvrsim.model.architectures.parts import Reader, read_num_layers
from kvrsim.model.spec import ModelSpec


def internlm(config: JsonObject, name: str) -> ModelSpec:
    bias = config.flag("bias", True)
    family = Family(qkv_bias=bias, output_bias=bias)
    return llama_like(config, name, family, [None] * read_num_layers(config))


def internlm2(config: JsonObject, name: str) -> ModelSpec:
    bias = config.flag("bias", True)
    family = Family(qkv_bias=bias, output_bias=bias, fused_qkv="wqkv")
    return llama_like(config, name, family, [None] * read_num_layers(config))


READERS: dict[str, Reader] = {
    "internlm": internlm,
    "internlm2": internlm2,
}
